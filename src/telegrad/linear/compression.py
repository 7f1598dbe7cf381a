"""Compressed files: which there are, what a file's first bytes say it is, and its text.

This module must not know of rows.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
