"""Compressed files of several streams, one behind the other: read whole, or refused."""

from __future__ import annotations

import bz2
import gzip
import lzma
from pathlib import Path

import pytest

from telegrad.linear.data import COMPRESSED, decompressed

FIRST, SECOND = (b"".join(b"%d %d:0.5\n" % (1 - 2 * (i % 2), i) for i in range(at, at + 50)) for at in (1, 51))


def compressed(text: bytes, suffix: str) -> bytes:
    match suffix:
        case ".gz":
            return gzip.compress(text)
        case ".bz2":
            return bz2.compress(text)
        case ".xz":
            return lzma.compress(text)
    zstandard = pytest.importorskip("zstandard")
    return bytes(zstandard.ZstdCompressor(write_checksum=True).compress(text))


def read(folder: Path, suffix: str, content: bytes, block_bytes: int = 1 << 16) -> bytes:
    path = folder / f"data{suffix}"
    path.write_bytes(content)
    return b"".join(decompressed(path, block_bytes))


def refused(folder: Path, suffix: str, content: bytes, block_bytes: int = 1 << 16) -> None:
    with pytest.raises(ValueError, match=r"data.* is damaged: "):
        read(folder, suffix, content, block_bytes)


@pytest.mark.parametrize("block_bytes", [8, 100, 1 << 16])
@pytest.mark.parametrize("suffix", COMPRESSED)
def test_streams_behind_each_other_are_one_text(tmp_path: Path, suffix: str, block_bytes: int) -> None:
    streams = [compressed(text, suffix) for text in (FIRST, b"", SECOND)]
    assert read(tmp_path, suffix, b"".join(streams), block_bytes) == FIRST + SECOND


@pytest.mark.parametrize("suffix", COMPRESSED)
def test_no_damage_leaves_a_part_of_the_text(tmp_path: Path, suffix: str) -> None:
    first, second = compressed(FIRST, suffix), compressed(SECOND, suffix)
    refusals: list[str] = []
    for at in range(len(second)):
        damaged = bytearray(second)
        damaged[at] ^= 0xFF
        try:
            found = read(tmp_path, suffix, first + damaged)
        except ValueError as error:
            refusals.append(str(error))
        else:
            assert found == FIRST + SECOND  # some bytes of headers say nothing of the text
    assert all("is damaged: " in said for said in refusals)
    assert len(refusals) > 0.9 * len(second)


@pytest.mark.parametrize("suffix", COMPRESSED)
def test_a_later_stream_that_is_cut_is_refused(tmp_path: Path, suffix: str) -> None:
    first, second = compressed(FIRST, suffix), compressed(SECOND, suffix)
    for kept in range(1, len(second)):
        refused(tmp_path, suffix, first + second[:kept])


@pytest.mark.parametrize("junk", [b"junk", b"\x5d\x00\x00\x80\x00 like LZMA", b"\1"], ids=["text", "lzma", "byte"])
@pytest.mark.parametrize("suffix", COMPRESSED)
def test_what_is_no_stream_behind_one_is_refused(tmp_path: Path, suffix: str, junk: bytes) -> None:
    refused(tmp_path, suffix, compressed(FIRST, suffix) + junk)


@pytest.mark.parametrize("block_bytes", [8, 1 << 16])
def test_zeros_fill_xz_streams_up_by_fours(tmp_path: Path, block_bytes: int) -> None:
    first, second = lzma.compress(FIRST), lzma.compress(SECOND)
    for zeros in range(10):
        between, after = first + bytes(zeros) + second, first + second + bytes(zeros)
        for content in (between, after, between + bytes(zeros)):
            if zeros % 4:
                refused(tmp_path, ".xz", content, block_bytes)
            else:
                assert read(tmp_path, ".xz", content, block_bytes) == FIRST + SECOND
    refused(tmp_path, ".xz", bytes(4) + first)
    refused(tmp_path, ".bz2", bz2.compress(FIRST) + bytes(4))


def test_xz_s_older_format_is_read(tmp_path: Path) -> None:
    older = lzma.compress(FIRST, lzma.FORMAT_ALONE)
    assert read(tmp_path, ".xz", older) == FIRST
    refused(tmp_path, ".xz", older + b"junk")


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz"])
def test_text_comes_in_blocks_however_well_it_was_compressed(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"data{suffix}"
    path.write_bytes(compressed(bytes(1 << 20), suffix))
    lengths = [len(block) for block in decompressed(path, 1 << 12)]
    assert (sum(lengths), max(lengths)) == (1 << 20, 1 << 12)
