"""Sums of streams of 64 Mi elements, from almost nothing to every element, among 1 to 16 ranks of this process.

Ranks share what they bring: each has one of a few streams. Values are small whole numbers, so that sums are exact.
The whole grid takes a quarter of an hour and up to 15 GB: ``pytest -m slow tests/conformance/test_long_streams.py``.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from telegrad import Communicator, SparseVector

N = 1 << 26
_STREAMS = 2
_TIMEOUT_S = 900.0
_ENTRY_BYTES = 8

ALGORITHMS = ("split_allgather", "split_dense_allgather", "recursive_doubling", "ring")
FEW = [
    (1, 1e-2, "auto", "auto"),
    (2, 1.0, "auto", "auto"),
    (3, 0.1, "split_dense_allgather", "auto"),
    (5, 1e-3, "ring", "packed"),
    (7, 1e-2, "recursive_doubling", "packed"),
    (16, 1e-6, "auto", "packed"),
    (16, 1e-2, "split_allgather", "packed-bf16"),
]
RANKS = (1, 2, 3, 4, 5, 6, 7, 8, 11, 13, 16)
DENSITIES = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 0.5, 1.0)
ALL = [
    *itertools.product(RANKS, DENSITIES, ("auto",), ("auto",)),
    *itertools.product((3, 8, 16), (1e-6, 1e-3, 0.02, 0.3), ALGORITHMS, ("packed",)),
    *itertools.product((3, 16), (1e-6, 1e-3, 0.3), ALGORITHMS[:2], ("packed-bf16", "packed-int8", "packed-qsgd4")),
]
_ROUNDING = {"bf16": 2**-8, "int8": 1 / 127, "qsgd4": 1 / 7}
"""By what part of the largest value of its block a value may be off."""
_LARGEST = 7


@functools.lru_cache(maxsize=1)
def streams(density: float) -> tuple[SparseVector, ...]:
    made = []
    for number in range(_STREAMS):
        draw = np.random.default_rng(number)
        if density == 1:
            indices = np.arange(N, dtype=np.uint32)
        elif density > 0.05:
            indices = np.flatnonzero(draw.random(N, np.float32) < density).astype(np.uint32)
        else:
            indices = np.unique(draw.integers(0, N, round(N * density), np.uint32))
        values = np.resize(draw.integers(1, _LARGEST + 1, 9973 + number).astype(np.float32), indices.size)
        made.append(SparseVector(indices, values, N))
    return tuple(made)


def expected_sum(ranks: int, density: float) -> npt.NDArray[np.float32]:
    total = np.zeros(N, np.float32)
    for number, stream in enumerate(streams(density)):
        times = np.float32(len(range(number, ranks, _STREAMS)))
        if stream.nnz == N:
            total += stream.values * times
        elif times:
            total[stream.indices] += stream.values * times
    return total


def most_off(ranks: int, wire: str) -> float:
    """What rounding may do to a sum: once on its way to its owner, once on its way back."""
    part = next((size for name, size in _ROUNDING.items() if wire.endswith(name)), 0.0)
    return part * ranks * _LARGEST * (2 + part)


def assert_same_bits(one: SparseVector, other: SparseVector) -> None:
    assert one.is_dense == other.is_dense
    if one.is_dense:
        np.testing.assert_array_equal(_held(one).view(np.uint32), _held(other).view(np.uint32))
    else:
        assert np.array_equal(one.raw_indices, other.raw_indices)
        assert np.array_equal(one.raw_values.view(np.uint32), other.raw_values.view(np.uint32))


def _held(stream: SparseVector) -> Any:
    """What a dense result holds, without a copy."""
    assert stream._dense is not None
    return stream._dense


def assert_sums(ranks: int, density: float, algorithm: str, wire: str) -> None:
    communicators = Communicator.local(ranks, timeout_s=_TIMEOUT_S)
    try:
        bring = streams(density)
        works = [
            one.all_reduce(bring[one.rank % _STREAMS], algorithm=algorithm, wire=wire, async_op=True)
            for one in communicators
        ]
        first, *others = [work.result() for work in works]
        del works
        for other in others:
            assert_same_bits(first, other)
        del others
    finally:
        for one in communicators:
            one.close()
    expected = expected_sum(ranks, density)
    found = _held(first) if first.is_dense else first.to_dense()
    allowed = most_off(ranks, wire)
    if allowed == 0:
        assert np.array_equal(found, expected)
    else:
        found -= expected
        assert np.abs(found, out=found).max() <= allowed
        assert not np.any(found[expected == 0])
    if density <= 1e-3 and algorithm != "split_dense_allgather":
        assert not first.is_dense
        assert first.nnz == np.count_nonzero(expected)


def needed_bytes(ranks: int, density: float, algorithm: str) -> float:
    """About what such a sum takes: the ranks' copies of what they bring, and what each holds of the sum."""
    brought = N * density * _ENTRY_BYTES
    summed = min(N * (1 - (1 - density) ** min(ranks, _STREAMS)) * _ENTRY_BYTES, N * 4)
    copies = 4 if algorithm == "recursive_doubling" else 2
    return _STREAMS * brought + ranks * max(brought + summed, copies * summed) + 3 * N * 4


def available_bytes() -> int:
    with open("/proc/meminfo") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))


@pytest.mark.parametrize(("ranks", "density", "algorithm", "wire"), FEW)
def test_sums_of_64_mi_elements(ranks: int, density: float, algorithm: str, wire: str) -> None:
    assert_sums(ranks, density, algorithm, wire)


@pytest.mark.slow
@pytest.mark.timeout(_TIMEOUT_S)
@pytest.mark.parametrize(
    ("ranks", "density", "algorithm", "wire"), sorted(ALL, key=lambda case: (case[1], case[0])), ids=str
)
def test_all_sums_of_64_mi_elements(ranks: int, density: float, algorithm: str, wire: str) -> None:
    if (needed := needed_bytes(ranks, density, algorithm)) > available_bytes():
        pytest.skip(f"needs about {needed / 2**30:.1f} GiB of memory")
    assert_sums(ranks, density, algorithm, wire)
