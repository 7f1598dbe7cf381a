"""Fashion-MNIST's files: read gzipped and plain, and refused when they are missing or damaged."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
from fashion_files import idx, write_fashion

from lab.accuracy.fashion import DataMissing, read_fashion, read_idx


def test_gzipped_and_plain_files_hold_the_same(tmp_path: Path) -> None:
    folder = write_fashion(tmp_path / "zipped", training=30, held_out=20)
    plain = tmp_path / "plain"
    plain.mkdir()
    for path in folder.iterdir():
        (plain / path.stem).write_bytes(gzip.decompress(path.read_bytes()))
    for one, other in zip(read_fashion(folder), read_fashion(plain), strict=True):
        assert np.array_equal(one.images, other.images)
        assert np.array_equal(one.labels, other.labels)
    training, held_out = read_fashion(folder)
    assert (training.images.shape, held_out.images.shape) == ((30, 28, 28), (20, 28, 28))
    assert training.labels.shape == (30,)


def test_missing_data_say_what_to_install(tmp_path: Path) -> None:
    folder = write_fashion(tmp_path)
    (folder / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DataMissing, match=r"has no t10k-labels.*apt-get install dataset-fashion-mnist.*--data"):
        read_fashion(folder)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a", b"", "no IDX file"),
        ("a", b"\0\0\x0d\1\0\0\0\0", "no IDX file"),  # floats
        ("a", b"\0\0\x08\3\0\0\0\1", "no IDX file"),
        ("a", idx(np.zeros((3, 2), np.uint8))[:-1], "5 bytes for an array of shape (3, 2)"),
        ("a.gz", b"no gzip", "no complete gzip file"),
        ("a.gz", gzip.compress(idx(np.zeros(9, np.uint8)), mtime=0)[:-9], "no complete gzip file"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError) as caught:
        read_idx(tmp_path / name)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("name", "array", "said"),
    [
        ("train-images-idx3-ubyte.gz", np.zeros((320, 27, 28), np.uint8), "images of 28 x 28"),
        ("t10k-labels-idx1-ubyte.gz", np.zeros(79, np.uint8), "fit 80 images"),
        ("t10k-labels-idx1-ubyte.gz", np.full(80, 10, np.uint8), "below 10"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(tmp_path: Path, name: str, array: np.ndarray, said: str) -> None:
    folder = write_fashion(tmp_path)
    (folder / name).write_bytes(gzip.compress(idx(array)))
    with pytest.raises(ValueError, match=said):
        read_fashion(folder)
