"""What a sum takes while all ranks compute: on processors that computation and communication share it is longer, since
a rank that has something to pass on may have to wait until it is its turn."""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable

import numpy as np

from telegrad.comm import Communicator

_LEAST_BYTES, _GROWTH = 1 << 10, 8
_REPEATS = 5
_SAMPLE_S = 0.04  # several turns of a processor that is shared
_MOST_SUMS = 40
_MATRIX = 48  # a multiplication takes about 10 µs, without threads


def group_cost_while_computing(comm: Communicator, *, most_bytes: int) -> Callable[[int], float]:
    """Seconds by bytes of a float32 sum during which every rank's main thread multiplies small matrices; the same
    function on all ranks: sums of 1 KiB, 8 KiB, … and ``most_bytes`` are timed; of each the median, of the slowest
    rank; what lies between is interpolated, and what lies beyond has the last length's time of a byte. Called on all
    ranks, alike. Raises ``ValueError`` for ``most_bytes`` below 1."""
    if most_bytes < 1:
        raise ValueError(f"most_bytes={most_bytes} must be at least 1")
    sizes = [_LEAST_BYTES]
    while sizes[-1] < most_bytes:
        sizes.append(min(sizes[-1] * _GROWTH, max(most_bytes, sizes[-1] + 4)))
    times = np.array([_median_s(comm, size // 4) for size in sizes])
    comm.all_reduce(times, "max")
    seconds: list[float] = np.maximum.accumulate(times).tolist()  # noise must not make a longer sum the cheaper one

    def cost(size: int) -> float:
        after = bisect.bisect_left(sizes, size)
        if after == len(sizes):
            return seconds[-1] * size / sizes[-1]
        return float(np.interp(size, sizes, seconds))

    return cost


def _median_s(comm: Communicator, elements: int) -> float:
    vector = np.zeros(elements, np.float32)
    left, right = np.ones((2, _MATRIX, _MATRIX), np.float32)
    product = np.empty_like(left)

    def sums(count: int) -> float:
        comm.barrier()
        begin = time.perf_counter()
        for _ in range(count):
            work = comm.all_reduce(vector, async_op=True)
            while not work.is_completed():
                np.matmul(left, right, out=product)
            work.wait()
        return (time.perf_counter() - begin) / count

    first_s = np.array([sums(1)])
    comm.all_reduce(first_s, "max")  # so that all ranks make as many sums
    count = int(np.clip(_SAMPLE_S / first_s[0], 1, _MOST_SUMS))
    return float(np.median([sums(count) for _ in range(_REPEATS)]))
