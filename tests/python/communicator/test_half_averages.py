"""Averages of float16 whose sums are out of range, as a program asks for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from telegrad import Communicator, SparseVector

_LARGE = np.full(4000, 30_000, np.float16)
_RANKS = 4


def _of_all(call: Callable[[Communicator], Any]) -> list[Any]:
    """``call`` starts an operation: its works' results, by rank."""
    comms = Communicator.local(_RANKS)
    try:
        works = [call(comm) for comm in comms]
        return [work.result() for work in works]
    finally:
        for comm in comms:
            comm.close()


@pytest.mark.parametrize("algorithm", ["auto", "ring", "recursive_doubling", "rabenseifner", "two_level"])
def test_all_reduce(algorithm: str) -> None:
    xs = [_LARGE.copy() for _ in range(_RANKS)]
    _of_all(lambda comm: comm.all_reduce(xs[comm.rank], "avg", algorithm=algorithm, async_op=True))
    for x in xs:
        np.testing.assert_array_equal(x, _LARGE)


@pytest.mark.parametrize("count", [40, 4_000, 400_000])  # up a tree, and scattered and gathered
def test_reduce(count: int) -> None:
    xs = [np.full(count, 30_000, np.float16) for _ in range(_RANKS)]
    _of_all(lambda comm: comm.reduce(xs[comm.rank], 2, "avg", async_op=True))
    np.testing.assert_array_equal(xs[2], np.full(count, 30_000, np.float16))


def test_reduce_scatter() -> None:
    results = _of_all(lambda comm: comm.reduce_scatter(_LARGE.copy(), "avg", async_op=True))
    for mine in results:
        np.testing.assert_array_equal(mine, _LARGE[: _LARGE.size // _RANKS])


@pytest.mark.parametrize(
    "algorithm", ["auto", "split_allgather", "split_dense_allgather", "ring", "recursive_doubling"]
)
def test_streams(algorithm: str) -> None:
    indices = np.arange(0, 8_000, 2, dtype=np.uint32)
    mine = SparseVector(indices, _LARGE, 10_000)
    results = _of_all(lambda comm: comm.all_reduce(mine, "avg", algorithm=algorithm, async_op=True))
    for average in results:
        dense = average.to_dense()
        np.testing.assert_array_equal(dense[indices], _LARGE)
        assert dense.dtype == np.float16
        assert np.count_nonzero(dense) == indices.size
