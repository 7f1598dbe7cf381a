"""A file of 1 GB, read by four processes: no line is lost, none doubled. Run with ``-m slow``."""

from __future__ import annotations

import multiprocessing
import shutil
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from telegrad.linear import read_libsvm

_BYTES = 1 << 30
_RANKS = 4
_TAILS = 997  # lines of as many different lengths and contents, in turn


def tails() -> tuple[list[bytes], list[int], list[int]]:
    """What follows a line's label, how many entries that is, and the sum of their 1-based indices."""
    random = np.random.default_rng(0)
    texts, counts, sums = [], [], []
    for _ in range(_TAILS):
        indices = np.sort(random.choice(np.arange(1, 3_000_001), random.integers(0, 21), replace=False)).tolist()
        texts.append(b"".join(b" %d:%d" % (index, index % 9 + 1) for index in indices) + b"\n")
        counts.append(len(indices))
        sums.append(sum(indices))
    return texts, counts, sums


def write(path: Path) -> int:
    """Lines whose label is their number, which float32 holds exactly; how many there are."""
    texts, _, _ = tails()
    line = size = 0
    with path.open("wb", buffering=1 << 20) as file:
        while size < _BYTES:
            size += file.write(b"".join(b"%d%b" % (line + i, texts[(line + i) % _TAILS]) for i in range(10_000)))
            line += 10_000
    assert line <= 2**24
    return line


def share(path: Path, rank: int) -> tuple[npt.NDArray[np.float32], int, int, bool, float]:
    """The labels, the entries, the sum of their 1-based indices, whether the values fit, and the seconds computing."""
    before_s = time.process_time()
    rows = read_libsvm(path, rank=rank, world_size=_RANKS)
    took_s = time.process_time() - before_s
    indices = rows.indices.astype(np.int64) + 1
    fits = bool((rows.values == (indices % 9 + 1)).all()) and rows.damaged == 0
    return rows.labels, rows.nnz, int(indices.sum()), fits, took_s


@pytest.mark.slow  # writes and reads 1 GB
@pytest.mark.timeout(1200)
def test_four_processes_read_every_line_of_a_gigabyte_once(tmp_path: Path) -> None:
    if shutil.disk_usage(tmp_path).free < 2 * _BYTES:
        pytest.skip(f"{tmp_path} has no room for 2 GiB")
    path = tmp_path / "data.svm"
    lines = write(path)
    try:
        with ProcessPoolExecutor(_RANKS, multiprocessing.get_context("spawn")) as pool:
            found = list(pool.map(share, [path] * _RANKS, range(_RANKS)))
    finally:
        path.unlink()
    labels = np.concatenate([one[0] for one in found])
    assert np.array_equal(labels, np.arange(lines, dtype=np.float32))
    times = np.bincount(np.arange(lines) % _TAILS, minlength=_TAILS)
    _, counts, sums = tails()
    assert sum(one[1] for one in found) == int(times @ counts)
    assert sum(one[2] for one in found) == int(times @ sums)
    assert all(one[3] for one in found)
    computing_s = [round(one[4], 2) for one in found]
    print(f"{lines:,} lines, {int(times @ counts):,} entries; seconds of each rank's processor: {computing_s}")
