"""LIBSVM text as rows: each rank reads its own range of bytes, plain or compressed.

Ranges are moved to line borders: a line belongs to the range in which its first byte lies, so none is lost or doubled.
This module must not know of training.
"""

from __future__ import annotations

import itertools
import os
import stat
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from telegrad import _core
from telegrad.communicator.operands import checked_flag, checked_integer
from telegrad.linear.cache import cached, keep
from telegrad.linear.compression import COMPRESSED, blocks_of, check_suffix
from telegrad.linear.index_base import HEAD_BYTES, IndexBase, ZeroBased, base_of
from telegrad.linear.rows import MOST_FEATURES, Rows, joined

_BLOCK_BYTES = 16 << 20  # of decompressed text at a time
_DESCRIPTORS = (Path("/dev"), Path("/dev/fd"))  # whose names are of what a process has open: no cache belongs there

_WANTED_BASE = "'auto', True or False: is the file's first feature 0 (True) or 1 (False)"

_EMPTY = "{}: the file is empty: name one that has rows"

_REASONS = {
    "bad_label": "{!r} is no label: a line begins with one finite number",
    "bad_index": "{!r} is no index:value pair, whose index is a whole number",
    "bad_value": "{!r} has no value: it must be a finite decimal number",
    "not_finite": "{!r} is more than float32 can hold",
    "below_base": "{!r}: {below}",
    "not_rising": "{!r}: indices must rise within a line, and occur once",
    "beyond_32_bits": "{!r}: indices must be below 2**32 - 1; hash them",
    "beyond_features": "{!r} is beyond the {features} features that are declared: declare more, or none",
    "query_id": "{!r}: ranking data (qid) is not supported: remove these tokens",
}


class DamagedLine(ValueError):  # noqa: N818
    """``line``: its number in the whole file, from 1."""

    def __init__(self, said: str, line: int) -> None:
        super().__init__(said, line)
        self.line = line

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True)
class LibsvmFormat:
    """How a text is to be read. Raises ``ValueError`` and ``TypeError`` for what cannot be."""

    features: int | None = None
    zero_based: ZeroBased = "auto"
    strict: bool = True

    def __post_init__(self) -> None:
        # Python's own, as caches and jobs hold them as JSON
        if isinstance(self.zero_based, str):
            if self.zero_based != "auto":
                raise ValueError(f"zero_based={self.zero_based!r} must be {_WANTED_BASE}")
        else:
            object.__setattr__(self, "zero_based", checked_flag(self.zero_based, "zero_based", ", or 'auto'"))
        if self.features is None:
            return
        wanted = f"from 1 to {MOST_FEATURES}, or None for as many as occur"
        object.__setattr__(self, "features", checked_integer(self.features, "features", f"an int {wanted}"))
        if not 1 <= self.features <= MOST_FEATURES:
            raise ValueError(f"features={self.features} must be {wanted}")


def read_libsvm(
    path: str | os.PathLike[str],
    *,
    features: int | None = None,
    zero_based: ZeroBased = "auto",
    strict: bool = True,
    rank: int = 0,
    world_size: int = 1,
    cache: bool = False,
) -> Rows:
    """The rows of this rank's share of a LIBSVM file: ``label index:value index:value …``, one a line.

    Of ``world_size`` equal ranges of the text's bytes, ``rank``'s is read: from a plain file directly; a ``.gz``,
    ``.bz2``, ``.xz`` or ``.zst`` (needs ``zstandard``) file is decompressed up to there, once before to learn its
    length if there are several ranks. Blank lines and ``# comments`` are passed over. ``features``: how many are
    declared, else ``n_features`` is one more than the largest index in this share.

    ``zero_based``: does the file number its first feature 0 (``True``) or 1 (``False``)? ``"auto"`` takes the comment
    ``# Column indices are zero-based`` or ``one-based`` above the rows, as scikit-learn's ``dump_svmlight_file`` writes
    it. Without one, indices are zero-based if a 0 is among those of the first 16 MiB of text, else one-based. Every
    rank looks at the same bytes. Give ``zero_based=train_rows.index_base == 0`` for a second file, such as a test set,
    in which a 0 may not occur.

    What is no regular file, such as a pipe, is read from its beginning to its end, by one rank, and never kept.

    ``cache``: keeps the rows in a binary file beside ``path``, and maps it into memory the next time, until the file,
    or how it is to be read, has changed. One of the whole file serves every rank. Where it cannot be written, nothing
    is kept.

    Raises ``DamagedLine``, a ``ValueError``, with the line number (of the whole file, from 1) for a damaged line: a
    label, an index or a value that is none or not finite, indices that do not rise, ``qid``; with ``strict=False`` such
    lines are left out and counted in ``Rows.damaged``. An index beyond ``features`` always is an error, as are a
    damaged archive, one whose name does not say that it is one, a file without a byte, and a comment that contradicts
    ``zero_based``. Raises ``ValueError`` and ``TypeError`` for other arguments that cannot be, ``OSError`` for a file
    that cannot be read, ``ImportError`` without ``zstandard``.
    """
    how = LibsvmFormat(features, zero_based, strict)
    world_size = checked_integer(world_size, "world_size", "an int of at least 1")
    if world_size < 1:
        raise ValueError(f"world_size={world_size} must be at least 1")
    wanted = f"from 0 to world_size - 1, which is {world_size - 1}"
    rank = checked_integer(rank, "rank", f"an int {wanted}")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank={rank} must be {wanted}")
    file = Path(path)
    state = file.stat()
    if stat.S_ISREG(state.st_mode) and state.st_size == 0:
        raise ValueError(_EMPTY.format(file))
    settings = asdict(how)
    is_pipe = not stat.S_ISREG(state.st_mode) and not stat.S_ISDIR(state.st_mode)
    if is_pipe and world_size > 1:
        raise ValueError(
            f"{file} is no regular file, of which {world_size} ranks could read parts: write it to one first, or read "
            "it with one rank"
        )
    cache = cache and not is_pipe and file.parent not in _DESCRIPTORS
    if cache and (found := cached(file, state, settings, rank, world_size)) is not None:
        return found
    check_suffix(file)
    if file.suffix in COMPRESSED or is_pipe:
        rows, text_bytes = _read_blocks(file, how, rank, world_size)
        if is_pipe and text_bytes == 0:
            raise ValueError(_EMPTY.format(file))
    else:
        rows, text_bytes = _read_plain(file, how, rank, world_size)
    if cache:
        keep(rows, file, state, settings, rank, world_size, text_bytes)
    return rows


def _read_plain(file: Path, how: LibsvmFormat, rank: int, world_size: int) -> tuple[Rows, int]:
    size = file.stat().st_size
    # An empty file cannot be mapped.
    text = np.memmap(file, np.uint8, mode="r") if size else np.empty(0, np.uint8)
    base = base_of(text[:HEAD_BYTES].tobytes(), how.zero_based, file)
    begin, end = _core.whole_lines(text.ctypes.data, size, size * rank // world_size, size * (rank + 1) // world_size)

    def lines_before() -> int:
        return sum(
            int(np.count_nonzero(text[at : min(at + _BLOCK_BYTES, begin)] == ord("\n")))
            for at in range(0, begin, _BLOCK_BYTES)
        )

    rows, _ = _parse(text[begin:end], how, base, begin, file, lines_before)
    return rows, size


def _read_blocks(file: Path, how: LibsvmFormat, rank: int, world_size: int) -> tuple[Rows, int]:
    """Also the length of the text, or 0 where that is not known."""
    begin, end = 0, 2**63
    if world_size > 1:
        size = sum(len(block) for block in blocks_of(file, _BLOCK_BYTES))
        begin, end = size * rank // world_size, size * (rank + 1) // world_size
    parts: list[Rows] = []
    at = lines = 0
    base, blocks = _base_and_blocks(file, how)
    for block in blocks:
        if at >= end:
            break
        text = np.frombuffer(block, np.uint8)
        first, last = _core.whole_lines(
            text.ctypes.data, text.size, max(0, begin - at), max(0, min(end - at, text.size))
        )
        lines += block.count(b"\n", 0, first)
        if first < last:
            part, read = _parse(text[first:last], how, base, at + first, file, lambda before=lines: before)
            parts.append(part)
            lines += read
        at += text.size
    n_features = max((part.n_features for part in parts), default=how.features or 0)
    return joined(parts, n_features), size if world_size > 1 else at


def _base_and_blocks(file: Path, how: LibsvmFormat) -> tuple[IndexBase, Iterator[bytes]]:
    """Of a text that can be read once only, and is short where it has no ``HEAD_BYTES``."""
    blocks = _line_blocks(file)
    first: list[bytes] = []
    while sum(map(len, first)) < HEAD_BYTES and (block := next(blocks, None)) is not None:
        first.append(block)
    return base_of(b"".join(first)[:HEAD_BYTES], how.zero_based, file), itertools.chain(first, blocks)


def _line_blocks(file: Path) -> Iterator[bytes]:
    """The text in blocks of whole lines; the last line may lack its end."""
    rest = b""
    for block in blocks_of(file, _BLOCK_BYTES):
        cut = block.rfind(b"\n") + 1
        if cut:
            yield rest + block[:cut]
            rest = block[cut:]
        else:
            rest += block
    if rest:
        yield rest


def _parse(
    text: Any, how: LibsvmFormat, base: IndexBase, start: int, file: Path, lines_before: Any
) -> tuple[Rows, int]:
    """The rows of whole lines that begin at byte ``start`` of the text, and how many lines there are."""
    most_rows, most_entries = _core.libsvm_bounds(text.ctypes.data, text.size)
    offsets, starts = np.empty(most_rows + 1, np.uint64), np.empty(most_rows, np.uint64)
    labels, values = np.empty(most_rows, np.float32), np.empty(most_entries, np.float32)
    indices = np.empty(most_entries, np.uint32)
    out = _core.RowsOut(
        offsets.ctypes.data,
        indices.ctypes.data,
        values.ctypes.data,
        labels.ctypes.data,
        starts.ctypes.data,
        most_rows,
        most_entries,
    )
    features = MOST_FEATURES if how.features is None else how.features
    found = _core.parse_libsvm(text.ctypes.data, text.size, base.number, features, how.strict, out)
    said: tuple[str, ...] = ()
    if found.first_damaged:
        before = lines_before() + 1
        said = tuple(
            f"{file}, line {before + line}: "
            + _REASONS[damage.name].format(token.decode(errors="replace"), features=features, below=base.below)
            for line, damage, token in found.first_damaged
        )
    if not found.complete:
        may_be_left_out = how.strict and found.first_damaged[-1][1].name != "beyond_features"
        remedy = "; strict=False leaves out damaged lines" if may_be_left_out else ""
        raise DamagedLine(said[-1] + remedy, before + found.first_damaged[-1][0])
    rows = Rows(
        offsets[: found.rows + 1],
        indices[: found.entries],
        values[: found.entries],
        labels[: found.rows],
        how.features or found.features,
        starts[: found.rows] + np.uint64(start),
        found.damaged,
        said,
        base.number,
        base.source == "guess",
    )
    return rows, found.lines
