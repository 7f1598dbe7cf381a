"""What a sum of so many bytes takes on a live communicator, for the planner: a few sums of a few lengths."""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable

import numpy as np

from telegrad.comm import Communicator

_LEAST_BYTES, _GROWTH = 1 << 10, 8
_REPEATS = 5


def measured_group_cost(comm: Communicator, *, most_bytes: int) -> Callable[[int], float]:
    """Seconds by bytes, the same function on all ranks: float32 sums of 1 KiB, 8 KiB, … and ``most_bytes`` are timed;
    of each the median, of the slowest rank; what lies between is interpolated, and what lies beyond has the last
    length's time of a byte. Called on all ranks, alike. Raises ``ValueError`` for ``most_bytes`` below 1.
    """
    if most_bytes < 1:
        raise ValueError(f"most_bytes={most_bytes} must be at least 1")
    sizes = [_LEAST_BYTES]
    while sizes[-1] < most_bytes:
        sizes.append(min(sizes[-1] * _GROWTH, max(most_bytes, sizes[-1] + 4)))
    times = np.array([_median_s(comm, size // 4) for size in sizes])
    comm.all_reduce(times, "max")
    times = np.maximum.accumulate(times)  # noise must not make a longer sum the cheaper one

    seconds: list[float] = times.tolist()

    def cost(size: int) -> float:
        after = bisect.bisect_left(sizes, size)
        if after == len(sizes):
            return seconds[-1] * size / sizes[-1]
        if after == 0:
            return seconds[0]
        share = (size - sizes[after - 1]) / (sizes[after] - sizes[after - 1])
        return seconds[after - 1] + share * (seconds[after] - seconds[after - 1])

    return cost


def _median_s(comm: Communicator, elements: int) -> float:
    vector = np.zeros(elements, np.float32)
    found = []
    for _ in range(_REPEATS + 1):
        comm.barrier()
        begin = time.perf_counter()
        comm.all_reduce(vector)
        found.append(time.perf_counter() - begin)
    return float(np.median(found[1:]))  # the first one touches memory for the first time
