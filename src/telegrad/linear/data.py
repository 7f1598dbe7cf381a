"""LIBSVM text as rows: each rank reads its own range of bytes, plain or compressed, or maps a binary file beside it.

Ranges are moved to line borders: a line belongs to the range in which its first byte lies, so none is lost or doubled.
This module must not know of training."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import itertools
import json
import lzma
import os
import re
import stat
import sys
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from telegrad import _core
from telegrad.communicator.operands import checked_flag, checked_integer
from telegrad.linear.rows import MOST_FEATURES, Rows, joined

# Compressed files, recognised by their first bytes.

_FIRST_BYTES = {".gz": b"\x1f\x8b", ".bz2": b"BZh", ".xz": b"\xfd7zXZ\x00", ".zst": b"\x28\xb5\x2f\xfd"}
_NAMES = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "Zstandard"}

COMPRESSED = tuple(_FIRST_BYTES)
"""Suffixes of files that are decompressed."""


def check_suffix(file: Path) -> None:
    """Raises ``ValueError`` for a regular file whose first bytes are those of another format than its name says."""
    if not file.is_file():  # a pipe gives its first bytes once
        return
    with file.open("rb") as stream:
        head = stream.read(max(map(len, _FIRST_BYTES.values())))
    found = next((suffix for suffix, first in _FIRST_BYTES.items() if head.startswith(first)), file.suffix)
    if found != file.suffix:
        stem = file.stem if file.suffix.lower() in COMPRESSED else file.name
        raise ValueError(
            f"{file} is compressed ({_NAMES[found]}), which its name does not say: name it {stem}{found}, or "
            "decompress it"
        )


def blocks_of(file: Path, block_bytes: int) -> Iterator[bytes]:
    """The text of a file, plain if its name has none of the suffixes ``COMPRESSED``, about so many bytes at a time.
    Raises as ``decompressed``, and ``OSError`` for a file that cannot be read."""
    if file.suffix in COMPRESSED:
        yield from decompressed(file, block_bytes)
        return
    with file.open("rb") as stream:
        while block := stream.read(block_bytes):
            yield block


def decompressed(file: Path, block_bytes: int) -> Iterator[bytes]:
    """The text of a file with one of the suffixes ``COMPRESSED``, about so many bytes at a time. Raises ``ValueError``
    for a damaged one, ``ImportError`` without the package that its format needs."""
    try:
        yield from _TEXTS[file.suffix](file, block_bytes)
    except (EOFError, zlib.error, lzma.LZMAError) as error:
        raise ValueError(f"{file} is damaged: {error}") from error
    except OSError as error:
        if error.errno is not None:
            raise
        raise ValueError(f"{file} is damaged: {error}") from error  # not the system's, but of the data


def _gzip_text(file: Path, block_bytes: int) -> Iterator[bytes]:
    with gzip.open(file) as stream:
        while block := stream.read(block_bytes):
            yield block


def _streams_text(file: Path, block_bytes: int) -> Iterator[bytes]:
    """Of bzip2 or xz. Python's own readers take a later stream that is damaged for none, and end before it."""
    is_xz = file.suffix == ".xz"
    # The first may have the format that was before xz, which has one stream.
    decoder: Any = lzma.LZMADecompressor() if is_xz else bz2.BZ2Decompressor()
    zeros = 0  # behind a stream of xz
    with file.open("rb") as stream:
        while data := stream.read(max(1, block_bytes // 8)):
            while data:
                if decoder is None:
                    found = data.lstrip(b"\0") if is_xz else data
                    zeros += len(data) - len(found)
                    if not found:
                        break
                    _check_padding(file, zeros)
                    decoder = lzma.LZMADecompressor(lzma.FORMAT_XZ) if is_xz else bz2.BZ2Decompressor()
                    data, zeros = found, 0
                yield decoder.decompress(data, block_bytes)
                while not (decoder.eof or decoder.needs_input):
                    yield decoder.decompress(b"", block_bytes)
                data = decoder.unused_data if decoder.eof else b""
                decoder = None if decoder.eof else decoder
    if decoder is not None:
        raise ValueError(f"{file} is damaged: it ends within a stream")
    _check_padding(file, zeros)


def _check_padding(file: Path, zeros: int) -> None:
    if zeros % 4:
        raise ValueError(f"{file} is damaged: behind a stream are {zeros} zeros, which is no multiple of 4")


def _zstandard_text(file: Path, block_bytes: int) -> Iterator[bytes]:
    try:
        import zstandard
    except ModuleNotFoundError as error:
        raise ImportError(f"{file} needs zstandard: pip install 'telegrad[linear]', or decompress it") from error
    frame: Any = None
    with file.open("rb") as stream:
        while data := stream.read(max(1, block_bytes // 8)):
            while data:
                frame = frame or zstandard.ZstdDecompressor().decompressobj()
                try:
                    yield frame.decompress(data)
                except zstandard.ZstdError as error:
                    raise ValueError(f"{file} is damaged: {error}") from error
                data = frame.unused_data if frame.eof else b""
                frame = None if frame.eof else frame
    if frame is not None:
        raise ValueError(f"{file} is damaged: it ends within a frame")


_TEXTS = {".gz": _gzip_text, ".bz2": _streams_text, ".xz": _streams_text, ".zst": _zstandard_text}


# Does a LIBSVM text number its features from 0 or from 1?
# The text may say so itself: scikit-learn's `dump_svmlight_file` writes `# Column indices are zero-based` above
# the rows if it is given a comment. Otherwise the beginning of the text decides, the same bytes for every rank.

ZeroBased = bool | Literal["auto"]

HEAD_BYTES = 16 << 20
"""Of the text, from its beginning, that every rank looks at."""

_COMMENT = re.compile(rb"#\s*column indices are (zero|one)[- ]based\W*", re.IGNORECASE)
_FIRST_INDEX_IS_0 = re.compile(rb"\n[ \t\r]*[^ \t\r\n#]+[ \t\r]+(?:qid:\d+[ \t\r]+)?0+:")  # no later one is 0
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


# The cache: rows in a binary file beside their text, mapped into memory.
# A header, whose JSON says what the file was made of and where its arrays lie, then the arrays. It is used only if
# the text has the size and time that it had, and is to be read alike; it is written beside its place and then moved
# there. Of one text, only the shares of the last number of ranks that wrote some are kept, so that they do not pile
# up.

_MAGIC = b"telegrad rows\n"
_VERSION = 3
_HEADER_BYTES = 8192
_ALIGNMENT = 64
_ARRAYS = {"offsets": "uint64", "starts": "uint64", "labels": "float32", "indices": "uint32", "values": "float32"}
_ARRAYS |= {"weights": "float32"}  # none, or one for each row


def cache_path(file: Path, rank: int, world_size: int) -> Path:
    """Where the rows of one of ``world_size`` shares of ``file`` are kept."""
    return file.with_name(f"{file.name}.{rank}of{world_size}.rows")


def cached(
    file: Path, state: os.stat_result, settings: Mapping[str, object], rank: int, world_size: int
) -> Rows | None:
    """This share's rows, from its own file or that of all rows, if one is there and still right."""
    made_of = _made_of(state, settings)
    for share in ((rank, world_size), (0, 1)):
        found = _load(cache_path(file, *share), made_of)
        if found is None:
            continue
        rows, text_bytes = found
        if share == (rank, world_size):
            return rows
        assert rows.starts is not None
        borders = [text_bytes * one // world_size for one in (rank, rank + 1)]
        first, last = np.searchsorted(rows.starts, np.array(borders, np.uint64))
        part = rows.part(int(first), int(last))
        # What was left out is counted once among all ranks.
        return part if rank else _with_damage(part, rows)
    return None


def keep(
    rows: Rows,
    file: Path,
    state: os.stat_result,
    settings: Mapping[str, object],
    rank: int,
    world_size: int,
    text_bytes: int,
) -> None:
    """Writes this share's rows for later; does nothing where that cannot be. Rank 0 removes the shares of other numbers
    of ranks; who has these mapped keeps them."""
    assert rows.starts is not None
    at = _HEADER_BYTES
    places = {}
    for name in _ARRAYS:
        array = _array_of(rows, name)
        places[name] = (at, array.size)
        at += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    header = {
        **_made_of(state, settings),
        "n_features": rows.n_features,
        "index_base": rows.index_base,
        "base_is_guessed": rows.base_is_guessed,
        "damaged": rows.damaged,
        "first_damaged": rows.first_damaged,
        "text_bytes": text_bytes,
        "bytes": at,
        "arrays": places,
    }
    text = _MAGIC + json.dumps(header).encode()
    target = cache_path(file, rank, world_size)
    if len(text) > _HEADER_BYTES:
        return
    with contextlib.suppress(OSError):
        descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f"{target.name}.")
        try:
            with open(descriptor, "wb") as place:
                place.write(text.ljust(_HEADER_BYTES))
                for array, (begin, _) in places.items():
                    place.seek(begin)
                    place.write(_array_of(rows, array).data)
                place.truncate(at)
            os.chmod(name, stat.S_IMODE(state.st_mode) | stat.S_IWUSR)  # who may read the text may read its rows
            os.replace(name, target)
        except BaseException:
            os.unlink(name)
            raise
        if rank == 0:
            for other in _shares_of(file):
                if not other.name.endswith(f"of{world_size}.rows"):
                    other.unlink(missing_ok=True)


def _array_of(rows: Rows, name: str) -> Any:
    array = getattr(rows, name)
    return np.empty(0, _ARRAYS[name]) if array is None else array


def _shares_of(file: Path) -> list[Path]:
    """All caches of this text."""
    share = re.compile(re.escape(file.name) + r"\.\d+of\d+\.rows")
    return [path for path in file.parent.iterdir() if share.fullmatch(path.name)]


def _made_of(state: os.stat_result, settings: Mapping[str, object]) -> dict[str, Any]:
    return {
        "version": _VERSION,
        "byteorder": sys.byteorder,
        "source": [state.st_size, state.st_mtime_ns],
        "settings": dict(settings),
    }


def _load(path: Path, made_of: Mapping[str, Any]) -> tuple[Rows, int] | None:
    """The rows and the length of the text; ``None`` for what is not there, of something else, or not whole."""
    try:
        with path.open("rb") as stream:
            head = stream.read(_HEADER_BYTES)
        if not head.startswith(_MAGIC):
            return None
        header = json.loads(head[len(_MAGIC) :])
        if any(header[name] != value for name, value in made_of.items()) or path.stat().st_size != header["bytes"]:
            return None
        memory = np.memmap(path, np.uint8, mode="r")
        arrays: dict[str, Any] = {}
        for name, dtype in _ARRAYS.items():
            at, size = header["arrays"][name]
            arrays[name] = np.frombuffer(memory, dtype, size, at) if size or name != "weights" else None
        rows = Rows(
            **arrays,
            n_features=header["n_features"],
            damaged=header["damaged"],
            first_damaged=tuple(header["first_damaged"]),
            index_base=header["index_base"],
            base_is_guessed=header["base_is_guessed"],
        )
        return rows, header["text_bytes"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _with_damage(part: Rows, whole: Rows) -> Rows:
    return replace(part, damaged=whole.damaged, first_damaged=whole.first_damaged)


_BLOCK_BYTES = 16 << 20  # of decompressed text at a time
_DESCRIPTORS = (Path("/dev"), Path("/dev/fd"))  # whose names are of what a process has open: no cache belongs there

_WANTED_BASE = "'auto', True or False: is the file's first feature 0 (True) or 1 (False)"

_EMPTY = "{}: the file is empty: name one that has rows"

_REASONS = {
    "bad_label": "{!r} is no label: a line begins with one finite number, and not with several or none",
    "bad_index": "{!r} is no index:value pair, whose index is a whole number",
    "bad_value": "{!r} has no value: it must be a finite decimal number",
    "not_finite": "{!r} is more than float32 can hold",
    "below_base": "{!r}: {below}",
    "not_rising": "{!r}: indices must rise within a line, and occur once",
    "beyond_32_bits": "{!r}: indices must be below 2**32 - 1; hash them",
    "beyond_features": "{!r} is beyond the {features} features that are declared: declare more, or none",
    "query_id": "{!r}: qid must be a whole number right behind the label",
    "bad_weight": "{!r}: a label's weight must be a finite number, 0 or more",
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

    A label may be ``label:weight``, as XGBoost has it, with the row's weight. ``qid:n`` behind it is passed over.

    ``rank`` reads one of ``world_size`` equal ranges of the text's bytes. A ``.gz``, ``.bz2``, ``.xz`` or ``.zst``
    (needs ``zstandard``) file is decompressed up to there, and once before if there are several ranks. Blank lines and
    ``# comments`` are skipped. A pipe is read to its end, by one rank.

    - ``features``: how many are declared; ``None``: ``n_features`` is one more than the largest index in this share.
    - ``zero_based``: whether the file's first feature is 0 (``True``) or 1 (``False``). ``"auto"`` takes the comment
      ``# Column indices are zero-based`` or ``one-based`` above the rows, as of scikit-learn's ``dump_svmlight_file``.
      Without one, indices are zero-based if a 0 is among those of the first 16 MiB, else one-based, alike on all ranks.
      For a second file, such as a test set, pass ``zero_based=train_rows.index_base == 0``.
    - ``strict=False``: damaged lines are left out and counted in ``Rows.damaged``.
    - ``cache``: keeps the rows in a binary file beside ``path``, and maps it into memory the next time, until the file
      or these arguments change. One of the whole file serves every rank. If it cannot be written, nothing is kept.

    Raises ``DamagedLine``, a ``ValueError`` with the line number from 1, for a label, index or value that is missing,
    NaN or Inf, and for tokens out of order. Raises ``ValueError`` for:

    - an index beyond ``features``, an empty file, and bad arguments
    - a damaged archive or one with a wrong suffix
    - a comment that contradicts ``zero_based``

    Raises ``TypeError``, ``OSError``, and ``ImportError`` without ``zstandard``."""
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
    indices, weights = np.empty(most_entries, np.uint32), np.empty(most_rows, np.float32)
    out = _core.RowsOut(
        offsets.ctypes.data,
        indices.ctypes.data,
        values.ctypes.data,
        labels.ctypes.data,
        starts.ctypes.data,
        weights.ctypes.data,
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
        weights[: found.rows] if found.weighted else None,
    )
    return rows, found.lines
