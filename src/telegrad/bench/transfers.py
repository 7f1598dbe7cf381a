"""The ranks' side of ``telegrad bench transfers``: operations on tensors of a device that the ranks share, beside the
same on host tensors and beside the copies alone, in turn.

A sample is a barrier and one call; its time is the slowest rank's, until its stream is through. Sizes ascend, and each
row is printed when it is known: what a large size breaks does not take the small ones along.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from telegrad import Communicator
from telegrad.bench.device import Device
from telegrad.bench.device_job import run_for_rows, tell_rows
from telegrad.bench.transfers_plan import Row, Times, TransfersPlan, row_of

TARGET = "telegrad.bench.transfers:main"
"""What the ranks run."""

_FEWEST_SAMPLES = 3
_WARM_UP = 2  # calls: the first ones allocate pinned memory
_LONG_BYTES = 256 << 20  # of what is longer, which takes seconds, one of each is enough
_PERIOD = 1009  # of the values that are communicated: whole numbers that float32 adds exactly


def run(plan: TransfersPlan, *, timeout_s: float, on_row: Callable[[Row], None]) -> None:
    """Everything that ``plan`` asks for; ``on_row`` gets each row as it comes. Raises ``RankFailed``,
    ``RanksTimedOut``."""
    run_for_rows(TARGET, plan, timeout_s=timeout_s, on_row=on_row)


def main(plan_json: str) -> None:
    """One rank. Rank 0 prints a row as JSON for each operation at each size."""
    plan = TransfersPlan.from_json(plan_json)
    tell_rows(lambda communicator, device, tell: measure(plan, communicator, device, tell))


def measure(plan: TransfersPlan, communicator: Communicator, device: Device, tell: Callable[[Row], None]) -> None:
    """What all ranks call; ``tell`` gets rank 0's rows. Raises what an operation fails with."""
    cases = plan.cases()
    begin = time.monotonic()
    vectors: _Vectors | None = None
    for number, (size, operation) in enumerate(cases):
        if vectors is None or vectors.size != size:
            vectors = None  # frees the smaller ones first
            vectors = _Vectors.of(size, device)
        case = _Case(communicator, device, vectors, operation)
        wrong = case.verify()
        left_s = max(plan.seconds - (time.monotonic() - begin), 0.0) / (len(cases) - number)
        case.sample(plan.samples, communicator.all_gather(np.array([left_s]))[0, 0])
        enqueued = communicator.all_gather(np.array(case.enqueued_s))
        communicator.synchronize()
        if communicator.rank == 0:
            times = Times(
                case.times_s["device"], case.times_s["copies"], case.times_s["host"], enqueued.ravel().tolist()
            )
            tell(row_of(plan, operation, size, times, wrong))


@dataclass
class _Vectors:
    """What the ways of one size work on; ``staged`` is pinned."""

    size: int
    device: torch.Tensor
    copied: torch.Tensor
    staged: torch.Tensor
    host: torch.Tensor
    values: torch.Tensor  # what rank 0 gives

    @classmethod
    def of(cls, size: int, device: Device) -> _Vectors:
        n = size // 4
        values = torch.arange(_PERIOD, dtype=torch.float32).repeat(-(-n // _PERIOD))[:n]
        return cls(size, device.empty(n), device.empty(n), device.pinned(n), torch.empty(n), values)


def _unequal(x: torch.Tensor, expected: torch.Tensor) -> int:
    return 0 if torch.equal(x, expected) else int((x != expected).sum())


@dataclass
class _Case:
    communicator: Communicator
    device: Device
    vectors: _Vectors
    operation: str
    times_s: dict[str, list[float]] = field(default_factory=dict)
    enqueued_s: list[float] = field(default_factory=list)

    def call(self, x: torch.Tensor) -> None:
        """The operation, so that the current stream (of a host tensor: the host) waits for its result."""
        communicator = self.communicator
        if self.operation == "all_reduce":
            communicator.all_reduce(x)
        elif self.operation == "all_reduce_async":
            work = communicator.all_reduce(x, async_op=True)
            assert work is not None
            work.wait()
        elif self.operation == "broadcast":
            communicator.broadcast(x, 0)
        elif communicator.rank % 2 == 1:
            communicator.recv(x, communicator.rank - 1)
        elif communicator.rank + 1 < communicator.world_size:
            communicator.send(x, communicator.rank + 1)

    def verify(self) -> int:
        """Wrong values of a call on the device and of one on the host, over all ranks; it also warms up."""
        vectors, rank = self.vectors, self.communicator.rank
        for _ in range(1 if vectors.size > _LONG_BYTES else _WARM_UP):
            torch.add(vectors.values, rank, out=vectors.staged)
            vectors.device.copy_(vectors.staged, non_blocking=True)
            torch.add(vectors.values, rank, out=vectors.host)
            self.call(vectors.device)
            self.device.synchronize()
            self.call(vectors.host)
            self.communicator.synchronize()
        vectors.staged.fill_(float("nan"))
        vectors.staged.copy_(vectors.device, non_blocking=True)
        self.device.synchronize()
        expected = self._expected(vectors.values)
        wrong = max(_unequal(vectors.staged, expected), _unequal(vectors.host, expected))
        vectors.host.zero_()  # sums of zeros stay zeros, however often they are taken
        vectors.staged.zero_()
        self._copies()
        vectors.device.copy_(vectors.staged.zero_(), non_blocking=True)
        self.device.synchronize()
        return int(self.communicator.all_gather(np.array([wrong], np.int64)).sum())

    def _expected(self, values: torch.Tensor) -> torch.Tensor:
        ranks, rank = self.communicator.world_size, self.communicator.rank
        if self.operation.startswith("all_reduce"):
            return (values * ranks).add_(ranks * (ranks - 1) // 2)
        if self.operation == "broadcast":
            return values
        return values + (rank - rank % 2)

    def sample(self, samples: int, most_s: float) -> None:
        """Up to ``samples`` rounds of all ways, fewer where they take longer than ``most_s``."""
        ways: dict[str, Callable[[], None]] = {
            "device": self._timed_on_device,
            "copies": self._copies,
            "host": lambda: self.call(self.vectors.host),
        }
        self.times_s = {name: [] for name in ways}
        names = list(ways)
        fewest = 1 if self.vectors.size > _LONG_BYTES else _FEWEST_SAMPLES
        spent_s = 0.0
        for number in range(samples):
            if number >= fewest and spent_s > most_s:
                break
            for index in np.random.default_rng(number).permutation(len(names)):  # alike on all ranks
                self.communicator.barrier()
                begin = time.perf_counter()
                ways[names[index]]()
                mine = time.perf_counter() - begin
                slowest = float(self.communicator.all_gather(np.array([mine])).max())
                self.times_s[names[index]].append(slowest)
                spent_s += slowest

    def _timed_on_device(self) -> None:
        begin = time.perf_counter()
        self.call(self.vectors.device)
        self.enqueued_s.append(time.perf_counter() - begin)
        self.device.synchronize()

    def _copies(self) -> None:
        self.vectors.staged.copy_(self.vectors.device, non_blocking=True)
        self.vectors.copied.copy_(self.vectors.staged, non_blocking=True)
        self.device.synchronize()
