"""What stands for NCCL on the fake device: groups of this process's ranks, each with a stream of the group's own, in
which operations wait for each other as NCCL's do. One adds in the order of the ranks, and refuses two ranks on one
device; the other has Gloo move what ranks of a node exchange.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
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


class StreamGroup(dist.ProcessGroup):
    """Torch's process group of a node's ranks, whose operations Gloo makes in a stream of its own, behind the current
    one. ``calls``: their names, as this rank has begun them."""

    def __init__(self, runtime: FakeRuntime, store: dist.Store, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=30))  # type: ignore[attr-defined]
        self._runtime, self._stream = runtime, runtime.new_stream()
        self.calls: list[str] = []

    def alltoall_base(self, output: Any, given: Any, coming: Any, leaving: Any, options: Any) -> Any:
        return self._begin("alltoall_base", lambda *x: self._gloo.alltoall_base(*x, coming, leaving), [output, given])

    def allgather(self, outputs: Any, inputs: Any, options: Any) -> Any:
        def gather(own: torch.Tensor, *rows: torch.Tensor) -> Any:
            return self._gloo.allgather([[*rows]], [own])

        return self._begin("allgather", gather, [inputs[0], *outputs[0]])

    all_to_all_single, all_gather = alltoall_base, allgather  # as torch 2.13 calls them

    def _begin(self, name: str, operation: Callable[..., Any], tensors: Sequence[Any]) -> StandInWork:
        self.calls.append(name)
        runtime, stream = self._runtime, self._stream
        runtime.wait_event(stream, runtime.record(runtime.current_stream(DEVICE)))
        for one in tensors:
            runtime.keep(one, stream)
        plain = [one.plain for one in tensors]
        stream.put(lambda: operation(*plain).wait())
        return StandInWork(runtime, runtime.record(stream))


def node_groups(runtime: FakeRuntime, sizes: Sequence[int]) -> Callable[[int], StreamGroup]:
    """Makes a rank's group of its node, of nodes of these sizes; waits for the node's other ranks."""
    store, nodes = dist.HashStore(), numbers_of(sizes)

    def make(rank: int) -> StreamGroup:
        node = nodes[rank]
        return StreamGroup(runtime, dist.PrefixStore(str(node), store), rank - nodes.index(node), sizes[node])

    return make


def numbers_of(sizes: Sequence[int]) -> list[int]:
    """By rank its node's."""
    return [node for node, size in enumerate(sizes) for _ in range(size)]


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
