"""What a sum of so many bytes takes on a live communicator, for the planner: a few sums of a few lengths."""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from telegrad.communicator import Communicator, Work
from telegrad.communicator.cuda.runtime import runtime_of
from telegrad.cost.send_method import GroupCost, SendMethod
from telegrad.tuning.probes import written_zeros

_LEAST_BYTES, _GROWTH = 1 << 10, 8
_REPEATS = 5
_MOST_ON_DEVICE_BYTES = 64 << 20  # memory there is the model's

Prepare = Callable[[], Callable[[], Callable[[], None]]]
"""Makes a sum ready; what it returns begins it; and what that returns waits for the end and takes the result over."""


@dataclass(frozen=True)
class Begun:
    """A sum under way: what it waits for, and what takes its result over."""

    works: Sequence[Work]
    conclude: Callable[[], None]

    def __call__(self) -> None:
        for work in self.works:
            work.wait()
        self.conclude()


def measured_group_cost(comm: Communicator, *, most_bytes: int) -> GroupCost:
    """Seconds by bytes, the same function on all ranks: float32 sums of 1 KiB, 8 KiB, … and ``most_bytes`` are timed;
    of each the median, of the slowest rank; what lies between is interpolated, and what lies beyond has the last
    length's time of a byte. Called on all ranks, alike. Raises ``ValueError`` for ``most_bytes`` below 1.
    """

    def dense(elements: int) -> Prepare:
        vector = written_zeros(elements)

        def finish() -> None:
            comm.all_reduce(vector)

        return lambda: lambda: finish

    return measured_way(comm, "dense", dense, most_bytes=most_bytes).cost


def measured_device_cost(comm: Communicator, like: Any, *, most_bytes: int) -> GroupCost:
    """As ``measured_group_cost``, of sums on the device of the float32 tensor ``like``, the way that they go there; the
    host waits for each. What is longer than 64 MiB is not timed."""
    runtime, device = runtime_of(like.device.type), like.device

    def dense(elements: int) -> Prepare:
        vector = like.new_zeros(elements)  # a sum of zeros stays one

        def finish() -> None:
            comm.all_reduce(vector)
            runtime.wait_on_host(runtime.record(runtime.current_stream(device)))

        return lambda: lambda: finish

    return measured_way(comm, "dense", dense, most_bytes=min(most_bytes, _MOST_ON_DEVICE_BYTES)).cost


def measured_way(
    comm: Communicator,
    name: str,
    of_length: Callable[[int], Prepare],
    *,
    most_bytes: int,
    beside: GroupCost | None = None,
) -> SendMethod:
    """A way whose delay is what beginning a sum of so many elements takes, and whose cost what the rest of it takes,
    timed and interpolated as by ``measured_group_cost``. Called on all ranks, alike; errors as there."""
    sizes = timed_sizes(most_bytes)
    times = np.array([_medians_s(comm, of_length(size // 4)) for size in sizes])
    comm.all_reduce(times, "max")
    delay, cost = (interpolated(sizes, times[:, column]) for column in range(2))
    return SendMethod(name, cost, delay, beside=beside)


def timed_sizes(most_bytes: int) -> list[int]:
    """1 KiB, 8 KiB, … and ``most_bytes``. Raises ``ValueError`` for ``most_bytes`` below 1."""
    if most_bytes < 1:
        raise ValueError(f"most_bytes={most_bytes} must be at least 1")
    sizes = [_LEAST_BYTES]
    while sizes[-1] < most_bytes:
        sizes.append(min(sizes[-1] * _GROWTH, max(most_bytes, sizes[-1] + 4)))
    return sizes


def interpolated(sizes: Sequence[int], times: npt.NDArray[np.float64]) -> GroupCost:
    """``times``: seconds of each size. What lies beyond has the last size's time of a byte."""
    # Noise must not make a longer sum the cheaper one.
    seconds: list[float] = np.maximum.accumulate(times).tolist()

    def cost(size: int) -> float:
        after = bisect.bisect_left(sizes, size)
        if after == len(sizes):
            return seconds[-1] * size / sizes[-1]
        if after == 0:
            return seconds[0]
        share = (size - sizes[after - 1]) / (sizes[after] - sizes[after - 1])
        return seconds[after - 1] + share * (seconds[after] - seconds[after - 1])

    return cost


def _medians_s(comm: Communicator, prepare: Prepare) -> tuple[float, float]:
    """Of beginning, and of the rest."""
    found = []
    for _ in range(_REPEATS + 1):
        start = prepare()
        comm.barrier()
        begin = time.perf_counter()
        finish = start()
        begun = time.perf_counter()
        finish()
        found.append((begun - begin, time.perf_counter() - begun))
    of_starts, of_rests = np.median(found[1:], axis=0)  # the first one touches memory for the first time
    return float(of_starts), float(of_rests)


# The time of a sum while all ranks compute. It is longer on processors that computation and communication share: a
# rank that has something to pass on may have to wait for its turn.

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
