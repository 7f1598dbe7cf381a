"""What a sum takes while all ranks compute: on processors that computation and communication share it is longer, since
a rank that has something to pass on may have to wait until it is its turn."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from telegrad.communicator import Communicator
from telegrad.cost.way import GroupCost
from telegrad.tuning.group_cost import Begun, interpolated, timed_sizes
from telegrad.tuning.pairs import written_zeros

_REPEATS = 5
_SAMPLE_S = 0.04  # several turns of a processor that is shared
_MOST_SUMS = 40
_MATRIX = 48  # a multiplication takes about 10 µs, without threads


def group_cost_while_computing(comm: Communicator, *, most_bytes: int) -> GroupCost:
    """As ``measured_group_cost``, of sums during which every rank's main thread multiplies small matrices."""

    def dense(elements: int) -> Callable[[], Callable[[], Begun]]:
        vector = written_zeros(elements)
        return lambda: lambda: Begun([comm.all_reduce(vector, async_op=True)], lambda: None)

    return way_cost_while_computing(comm, dense, most_bytes=most_bytes)


def way_cost_while_computing(
    comm: Communicator, of_length: Callable[[int], Callable[[], Callable[[], Begun]]], *, most_bytes: int
) -> GroupCost:
    """The cost of ``measured_way``, of sums during which every rank's main thread multiplies small matrices."""
    sizes = timed_sizes(most_bytes)
    times = np.array([_median_s(comm, of_length(size // 4)) for size in sizes])
    comm.all_reduce(times, "max")
    return interpolated(sizes, times)


def _median_s(comm: Communicator, prepare: Callable[[], Callable[[], Begun]]) -> float:
    left, right = np.ones((2, _MATRIX, _MATRIX), np.float32)
    product = np.empty_like(left)

    def sums(count: int) -> float:
        comm.barrier()
        total_s = 0.0
        for _ in range(count):
            begun = prepare()()
            begin = time.perf_counter()
            while not all(work.is_completed() for work in begun.works):
                np.matmul(left, right, out=product)
            begun()
            total_s += time.perf_counter() - begin
        return total_s / count

    first_s = np.array([sums(1)])
    comm.all_reduce(first_s, "max")  # so that all ranks make as many sums
    count = int(np.clip(_SAMPLE_S / first_s[0], 1, _MOST_SUMS))
    return float(np.median([sums(count) for _ in range(_REPEATS)]))
