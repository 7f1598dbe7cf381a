"""Does a LIBSVM text number its features from 0 or from 1? This module must not know of ranks or training.

The text may say so itself: scikit-learn's ``dump_svmlight_file`` writes ``# Column indices are zero-based`` above the
rows if it is given a comment. Otherwise the beginning of the text decides, the same bytes for every rank.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ZeroBased = bool | Literal["auto"]

HEAD_BYTES = 16 << 20
"""Of the text, from its beginning, that every rank looks at."""

_COMMENT = re.compile(rb"#\s*column indices are (zero|one)[- ]based\W*", re.IGNORECASE)
_FIRST_INDEX_IS_0 = re.compile(rb"\n[ \t\r]*[^ \t\r\n#]+[ \t\r]+0+:")  # indices rise: no later one of a line can be 0
_WORDS = {0: "zero", 1: "one"}


class ContradictingBase(ValueError):  # noqa: N818
    """``base``: what the text's comment says, and the argument contradicts."""

    def __init__(self, said: str, base: int) -> None:
        super().__init__(said, base)
        self.base = base

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True)
class IndexBase:
    """``number``: 0 or 1, the text's name for its first feature. ``source``: how that is known."""

    number: int
    source: Literal["argument", "comment", "guess"]

    @property
    def below(self) -> str:
        """What is wrong with an index 0 where the first feature is 1."""
        if self.source == "argument":
            return "indices begin with 1, as zero_based=False says: give zero_based=True if they begin with 0"
        if self.source == "comment":
            return "indices begin with 1, as a comment above the rows says: correct that line, or this one"
        return (
            f"indices begin with 1, as no 0 is among those of the first {HEAD_BYTES >> 20} MiB: give zero_based=True "
            "if they begin with 0"
        )


def base_of(head: bytes, zero_based: ZeroBased, file: Path) -> IndexBase:
    """``head``: the first ``HEAD_BYTES`` of the decompressed text. Raises ``ContradictingBase``."""
    said = _said_by(head)
    if zero_based == "auto":
        if said is not None:
            return IndexBase(said, "comment")
        return IndexBase(0 if _FIRST_INDEX_IS_0.search(b"\n" + head) else 1, "guess")
    asked = 0 if zero_based else 1
    if said not in (None, asked):
        assert said is not None
        raise ContradictingBase(
            f"{file}: a comment above the rows says that column indices are {_WORDS[said]}-based, and "
            f"zero_based={zero_based} that they are not: give zero_based='auto', or correct the comment if it is wrong",
            said,
        )
    return IndexBase(asked, "argument")


def _said_by(head: bytes) -> int | None:
    """What the first such comment above the rows says; a user's own comment may come behind it."""
    at = 0
    while at < len(head):
        end = head.find(b"\n", at)
        line = head[at : end if end >= 0 else len(head)].strip()
        if line and not line.startswith(b"#"):
            break
        if found := _COMMENT.fullmatch(line):
            return 0 if found[1].lower() == b"zero" else 1
        at = end + 1 if end >= 0 else len(head)
    return None
