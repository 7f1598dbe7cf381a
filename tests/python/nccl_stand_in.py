"""What stands for NCCL on the fake device: a group of this process's ranks, each with a stream of the group's own, in
which sums wait for each other as NCCL's do. It adds in the order of the ranks, and refuses two ranks on one device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from fake_device import DEVICE_TYPE, FakeRuntime, FakeStream

from telegrad import Communicator
from telegrad.communicator.cuda.nccl import NcclSums, Verdict

DEVICE = torch.device(DEVICE_TYPE, 0)


class DuplicateDeviceError(RuntimeError):
    """As torch's DistBackendError has it."""


@dataclass
class _Round:
    """One sum of all ranks."""

    given: dict[int, torch.Tensor] = field(default_factory=dict)
    at_s: float = 0.0  # of the last rank, by its stream's clock
    whole: threading.Event = field(default_factory=threading.Event)


class StandInWork:
    def __init__(self, runtime: FakeRuntime, over: threading.Event) -> None:
        self._runtime, self._over = runtime, over

    def wait(self) -> bool:
        self._runtime.wait_event(self._runtime.current_stream(DEVICE), self._over)
        return True


class StandIn:
    """What all ranks share. ``places``: of their devices. ``sums``: by rank the bytes of each, as they were begun. One
    goes after the other, and begins when the last rank's stream has come to it."""

    def __init__(self, runtime: FakeRuntime, places: Sequence[str]) -> None:
        self.runtime, self.ranks, self._places = runtime, len(places), places
        self.sums: list[list[int]] = [[] for _ in places]
        self.fails: Exception | None = None
        self.takes: Callable[[int], float] = lambda size: 0.0  # seconds by bytes, by the streams' clocks
        self._rounds: list[_Round] = []
        self._streams = [runtime.new_stream() for _ in places]
        self._lock = threading.Lock()

    def group_of(self, rank: int) -> RankGroup:
        return RankGroup(self, rank)

    def begin(self, rank: int, x: torch.Tensor) -> StandInWork:
        if self.fails is not None:
            raise self.fails
        runtime, stream = self.runtime, self._streams[rank]
        with self._lock:
            self._check_place(rank)
            number = len(self.sums[rank])
            if number == len(self._rounds):
                self._rounds.append(_Round())
            here = self._rounds[number]
        self.sums[rank].append(x.nbytes)
        memory = x.memory if hasattr(x, "memory") else x.as_subclass(torch.Tensor)
        runtime.wait_event(stream, runtime.record(runtime.current_stream(DEVICE)))
        stream.put(lambda: self._add(here, rank, memory))
        return StandInWork(runtime, runtime.record(stream))

    def _check_place(self, rank: int) -> None:
        for other, place in enumerate(self._places):
            if other != rank and place == self._places[rank]:
                raise DuplicateDeviceError(f"Duplicate GPU detected : rank {rank} and rank {other} both on {place}")

    def _add(self, here: _Round, rank: int, memory: torch.Tensor) -> None:
        with self._lock:
            here.given[rank] = memory.detach().clone()
            here.at_s = max(here.at_s, self._streams[rank].now_s)
            if len(here.given) == self.ranks:
                here.whole.set()
        while not here.whole.wait(0.01):
            if not self._streams[rank].runs:  # the test is over, and a rank never came
                return
        self._streams[rank].now_s = here.at_s + self.takes(memory.nbytes)
        added = [here.given[one] for one in range(self.ranks)]
        assert len({(one.shape, one.dtype) for one in added}) == 1, "NCCL would hang, or give nonsense"
        total = added[0].clone()
        for one in added[1:]:
            total += one
        memory.copy_(total)


class RankGroup:
    """See telegrad.communicator.cuda.nccl.SumGroup."""

    def __init__(self, shared: StandIn, rank: int) -> None:
        self._shared, self._rank = shared, rank

    def begin_sum(self, x: Any) -> StandInWork:
        return self._shared.begin(self._rank, x)


def give_group(
    runtime: FakeRuntime,
    comms: Sequence[Communicator],
    streams: Sequence[FakeStream],
    *,
    setting: str = "auto",
    places: Sequence[str] | None = None,
    kinds: Sequence[str] | None = None,
    met: bool = False,
) -> StandIn:
    """As if the communicators had been made with such a group. ``places``: of each rank's device, else all apart.
    ``met``: the ranks know that already; else each must have a thread in the first sum."""
    apart = places or [f"place {rank}" for rank in range(len(comms))]
    shared = StandIn(runtime, apart)
    for rank, (comm, stream) in enumerate(zip(comms, streams, strict=True)):
        runtime.identities[stream] = ("fake" if kinds is None else kinds[rank], apart[rank])
        group = shared.group_of(rank)
        comm._options = replace(comm._options, device_algorithm=setting, device_group=group)
        comm._nccl = NcclSums(group, setting, rank)
        if met:
            assert len(set(apart)) == len(apart)
            comm._nccl._verdicts[DEVICE] = Verdict("", "fake")
    return shared
