"""The ranks' side of ``telegrad bench overlap``: kernels that are put behind a non-blocking sum, while it is in flight.

Three ways, in turn: the sum alone, the kernels alone, and both at once. Times are between points of the device's
streams. All ranks compute at the same time, on the device that they share, in every way that has kernels.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from telegrad import Communicator
from telegrad.bench.device import Device
from telegrad.bench.device_job import run_for_rows, tell_rows
from telegrad.bench.overlap_plan import OverlapPlan, Row, Sample, row_of

TARGET = "telegrad.bench.overlap:main"
"""What the ranks run."""

_WARM_UP = 3
_TRIED = 4  # kernels, by which one is timed
_FEWEST, _MOST = 8, 512


def run(plan: OverlapPlan, *, timeout_s: float, on_row: Callable[[Row], None]) -> None:
    """Everything that ``plan`` asks for; ``on_row`` gets each row as it comes, and last ``{"op": "trace", ...}``, what
    the profiler saw of rank 0's last way, or why it saw nothing. Raises ``RankFailed``, ``RanksTimedOut``."""
    run_for_rows(TARGET, plan, timeout_s=timeout_s, on_row=on_row)


def main(plan_json: str) -> None:
    """One rank. Rank 0 prints a row as JSON for each size."""
    plan = OverlapPlan.from_json(plan_json)
    tell_rows(lambda communicator, device, tell: measure(plan, communicator, device, tell))


def measure(plan: OverlapPlan, communicator: Communicator, device: Device, tell: Callable[[Row], None]) -> None:
    """What all ranks call; ``tell`` gets rank 0's rows. Raises what an operation fails with."""
    ways: _Ways | None = None
    for size in plan.sizes:
        ways = _Ways(plan, communicator, device, size)
        wrong = ways.verify()
        ways.choose_kernels()
        samples = [ways.sample(number) for number in range(plan.samples)]
        communicator.synchronize()
        if communicator.rank == 0:
            slowest: list[np.ndarray] = [times for times, _ in samples]
            communication, computation, both = (list(map(float, column)) for column in zip(*slowest, strict=True))
            own = [one for _, one in samples]
            row = row_of(
                plan, size, communication_s=communication, computation_s=computation, both_s=both, own=own, wrong=wrong
            )
            tell(row)
    if ways is not None:
        _trace(ways, communicator, tell)


def _trace(ways: _Ways, communicator: Communicator, tell: Callable[[Row], None]) -> None:
    communicator.barrier()
    if communicator.rank != 0:
        ways.both()
        return
    row: Row = {"op": "trace", "ranks": communicator.world_size, "bytes": ways.size}
    try:
        found = ways.device.profiled(ways.both)
        row["intervals"] = [(one.lane, one.begin_s, one.end_s) for one in found]
    except Exception as error:  # a profiler that does not work here takes nothing of what was measured along
        row["missing"] = f"{type(error).__name__}: {error}"
    tell(row)


class _Ways:
    def __init__(self, plan: OverlapPlan, communicator: Communicator, device: Device, size: int) -> None:
        self.device, self.size = device, size
        self._plan, self._communicator = plan, communicator
        self._vector, self._staged = device.empty(size // 4), device.pinned(size // 4)
        squares = [device.empty(plan.matrix**2).view(plan.matrix, plan.matrix) for _ in range(3)]
        self._left, self._right, self._product = squares
        for square in squares:
            square.fill_(1.0 / plan.matrix)
        self._kernels = _TRIED
        self._aside = device.new_stream()

    def verify(self) -> int:
        """Wrong values of sums with kernels behind them, over all ranks; it also warms up."""
        ranks = self._communicator.world_size
        self.computed()  # libraries are loaded before a stream waits for a peer
        for _ in range(_WARM_UP):
            self._staged.fill_(self._communicator.rank + 1.0)
            self._vector.copy_(self._staged, non_blocking=True)
            self.both()
            self._staged.fill_(math.nan)
            self._staged.copy_(self._vector, non_blocking=True)
            self.device.synchronize()
        wrong = int((self._staged != ranks * (ranks + 1) // 2).sum())
        self._vector.fill_(0.0)
        self.device.synchronize()
        return int(self._communicator.all_gather(np.array([wrong], np.int64)).sum())

    def choose_kernels(self) -> None:
        """As many as take ``load`` times as long as the communication; the same on all ranks."""
        tried = np.array([(self.communicated(), self.computed()) for _ in range(_WARM_UP)]).min(axis=0)
        communication_s, computation_s = self._communicator.all_gather(tried).max(axis=0)
        wanted = self._plan.load * communication_s / max(computation_s / self._kernels, 1e-9)
        self._kernels = int(min(max(math.ceil(wanted), _FEWEST), _MOST))

    def sample(self, number: int) -> tuple[Any, Sample]:
        """Seconds of the three ways, of the slowest rank, and this rank's part of the last one."""
        order = np.random.default_rng(number).permutation(3)  # alike on all ranks
        mine, own = np.zeros(3), None
        for index in order:
            self._communicator.barrier()
            if index == 0:
                mine[0] = self.communicated()
            elif index == 1:
                mine[1] = self.computed()
            else:
                own = self.both()
                mine[2] = own.both_s
        assert own is not None
        return self._communicator.all_gather(mine).max(axis=0), own

    def communicated(self) -> float:
        begin = self.device.mark()
        self._reduce().wait()
        end = self.device.mark()
        self.device.synchronize()
        return self.device.seconds(begin, end)

    def computed(self) -> float:
        begin = self.device.mark()
        for _ in range(self._kernels):
            torch.mm(self._left, self._right, out=self._product)
        end = self.device.mark()
        self.device.synchronize()
        return self.device.seconds(begin, end)

    def both(self) -> Sample:
        """The sum is called first, then the kernels; a stream beside them says when the sum was there."""
        device = self.device
        begun_s = time.perf_counter()
        begin = device.mark()
        work = self._reduce()
        with device.on(self._aside):
            work.wait()
            communicated = device.mark()
        kernels = []
        for _ in range(self._kernels):
            torch.mm(self._left, self._right, out=self._product)
            kernels.append(device.mark())
        work.wait()
        end = device.mark()
        enqueued_s = time.perf_counter() - begun_s
        device.synchronize()
        with device.on(self._aside):
            device.synchronize()
        return Sample(
            device.seconds(begin, communicated),
            [device.seconds(begin, one) for one in kernels],
            device.seconds(begin, end),
            enqueued_s,
        )

    def _reduce(self) -> Any:
        return self._communicator.all_reduce(self._vector, async_op=True)
