"""Errors that pages quote are those of the sources."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted((ROOT / "docs" / "how-to").glob("*.md"))
KINDS = (
    "ValueError|TypeError|RuntimeError|RuntimeWarning|ChoiceWarning|RendezvousError|NonFiniteGradient|TransportError"
)
# What a text has from its occasion: names in quotes, numbers, arguments' values, and classes.
VARIES = re.compile(r"…|'[^']*'|\b\d[\d.,]*\b|=\w+|\b(?:AdamW|DDPState|Synchronizer|residual|torch\.\w+)\b")


def sources() -> str:
    """All of Python and of the core, with strings over several lines as one."""
    files = [*sorted((ROOT / "src" / "telegrad").rglob("*.py")), *sorted((ROOT / "core").rglob("*.[ch]pp"))]
    text = "\n".join(path.read_text() for path in files)
    return re.sub(r"\s+", " ", re.sub(r'"\s*[fr]?"', "", text))


def quoted(text: str) -> Iterator[str]:
    for said in re.findall(rf"`(?:{KINDS}): ([^`]+)`", re.sub(r"\s+", " ", text)):
        yield from (piece.strip() for piece in VARIES.split(said) if len(piece.strip()) >= 10)


def test_errors_are_those_of_the_sources() -> None:
    known = sources()
    found = {piece: page.name for page in PAGES for piece in quoted(page.read_text())}
    assert len(found) > 15
    assert {piece: page for piece, page in found.items() if piece not in known} == {}


# In samples of the reference, what has its place from the occasion: which operation and rank, and names.
_OF_OCCASION = re.compile(
    r"^rank \d+: .*? \(operation \d+\): |^rank \d+, step \d+: | \[(?:peer: |split).*$|`[^`]*`|/\S+"
    r"|ranks? \d[\d, ]*|node\d|allreduce\(|from_torch|SGD|the DDP hook|lo, eth0"
)


def sampled(page: str) -> Iterator[str]:
    """Between punctuation, as sources put texts together from such pieces."""
    for block in re.findall(r"^```\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL):
        for line in block.splitlines():
            for part in VARIES.split(_OF_OCCASION.sub("…", line)):
                yield from (one.strip() for one in re.split(r"[:;(),]", part) if len(one.strip()) >= 10)


def test_samples_of_errors_are_those_of_the_sources() -> None:
    known = sources()
    found = set(sampled((ROOT / "docs" / "reference" / "errors.md").read_text()))
    assert len(found) > 20
    assert {piece for piece in found if piece not in known} == set()


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("`ValueError: density=0.1 is not used with\npolicy=, …`", ["is not used with policy=,"]),
        ("a `ValueError` that lists", []),
    ],
)
def test_what_is_quoted(text: str, pieces: list[str]) -> None:
    assert list(quoted(text)) == pieces
