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
from typing import IO, Any, cast

_FIRST_BYTES = {".gz": b"\x1f\x8b", ".bz2": b"BZh", ".xz": b"\xfd7zXZ\x00", ".zst": b"\x28\xb5\x2f\xfd"}
_NAMES = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "Zstandard"}
_OPEN: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}

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


def decompressed(file: Path, block_bytes: int) -> Iterator[bytes]:
    """The text of a file with one of the suffixes ``COMPRESSED``, about so many bytes at a time. Raises ``ValueError``
    for a damaged one, ``ImportError`` without the package that its format needs."""
    if file.suffix == ".zst":
        yield from _decompressed_zstd(file, block_bytes)
        return
    try:
        with cast(IO[bytes], _OPEN[file.suffix](file)) as stream:
            while block := stream.read(block_bytes):
                yield block
    except (EOFError, zlib.error, lzma.LZMAError) as error:
        raise ValueError(f"{file} is damaged: {error}") from error
    except OSError as error:
        if error.errno is not None:
            raise
        raise ValueError(f"{file} is damaged: {error}") from error  # not the system's, but of the data


def _decompressed_zstd(file: Path, block_bytes: int) -> Iterator[bytes]:
    try:
        import zstandard
    except ModuleNotFoundError as error:
        raise ImportError(f"{file} needs zstandard: pip install 'telegrad[linear]', or decompress it") from error
    frame: Any = None
    with file.open("rb") as stream:
        while data := stream.read(block_bytes // 8):
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
