"""Programs of replicas that train by DiLoCo in a ReplicaGroup, what their processes do, and what must hold."""

from __future__ import annotations

import contextlib
import math
import random
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch._dynamo  # which optimizers import, and which imports what this world replaces
from torch import nn

import telegrad
from lab.simulated_membership.virtual import NOTICED_S, WRONG_ERROR, WRONG_RESULT, Fault, Process, VirtualStore
from lab.simulated_membership.world import LATE_STORE_S, Program, World
from telegrad import diloco
from telegrad.communicator import groups
from telegrad.diloco import replica_ranks
from telegrad.diloco.replica_ranks import ReplicaGroup

_EVERY = 4
_GLOO_S = 100.0  # the time-out of a replica's process group
_OPTIONS: dict[str, dict[str, Any]] = {
    "dense": {},
    "sparse": {"compress": telegrad.TopK(0.25, small_elements=0, combine="allgather"), "decay": 0.9},
    "streaming": {"streaming": telegrad.Streaming(2, delay=2, mix=0.5)},
}
_PHASES = ("join", "step", "step", "regroup", "regroup", "connect", "connect", "align", "align")


@dataclass(frozen=True)
class ReplicaProgram(Program):
    """``size`` replicas of so many ``ranks`` begin, and others follow. They train for so many ``rounds``."""

    ranks: int
    kind: str
    rounds: int

    def __str__(self) -> str:
        return f"{self.rounds} rounds of {self.kind} DiLoCo, {self.ranks} processes a replica; {super().__str__()}"


def drawn(seed: int) -> ReplicaProgram:
    """The program of a seed."""
    draw = random.Random(seed)
    ranks, size, late = draw.choice([1, 2, 2]), draw.choice([1, 2, 2, 3]), draw.choice([0, 1, 1, 2])
    liveness_s = draw.choice([2.0, 3.0])
    count = (size + late) * ranks
    machines = draw.choice([1, 2, count])
    struck = draw.randrange(size * ranks)
    processes: list[Process] = []
    for number in range(count):
        faults = []
        if number == struck:
            faults.append(Fault("step", draw.randrange(1, 20), draw.randrange(8), math.inf))
        while draw.random() < 0.25:
            phase = draw.choice(_PHASES)
            nth = draw.randrange(1, 20) if phase == "step" else 1 if phase == "join" else draw.choice([1, 1, 2, 2, 3])
            lasts_s = draw.choice([math.inf, 0.3, 1.5 * liveness_s, 3.0 * liveness_s])
            faults.append(Fault(phase, nth, draw.choice([0, 1, 2, draw.randrange(12), draw.randrange(80)]), lasts_s))
        slow = (0.0, 0.0, 0.0)
        if draw.random() < 0.1:
            begins_s = draw.uniform(0.0, 6.0)
            slow = (begins_s, begins_s + draw.uniform(0.5, 6.0), draw.choice([0.05, 0.3, 1.0]))
        begins_s = draw.uniform(0.0, 0.5) if number < size * ranks else draw.uniform(0.5, 5.0)
        if number % ranks:
            begins_s = processes[-1].begins_s + draw.uniform(0.0, 0.3)
        own = random.Random(draw.getrandbits(64))
        none: tuple[int | str, float] = "", 0.0
        processes.append(Process(number, number % machines, begins_s, True, False, True, -1, faults, slow, none, own))
    limits = draw.choice([10.0, 100.0]), liveness_s, draw.choice([8.0, 12.0])
    kind = draw.choice([*_OPTIONS, "streaming"])
    return ReplicaProgram(
        size, *limits, 0.0, draw.choice([0.05, 0.2, 1.0]), 0, processes, ranks, kind, draw.randrange(6, 20)
    )


class ProcessGroupError(RuntimeError):
    """As Gloo's errors: another process of the replica has ended, or does not answer."""


class VirtualReplica:
    """As the process group of a replica's processes, over Gloo."""

    def __init__(self, world: World, processes: Sequence[Process]) -> None:
        self._world, self._processes = world, processes
        self._turns = [0] * len(processes)
        self._told: list[dict[int, Any]] = []

    def size(self) -> int:
        return len(self._processes)

    def rank(self) -> int:
        return self._processes.index(self._world.running.process)

    def told(self, own: Any) -> list[Any]:
        """Gives ``own`` to the others. Returns what each has given, by rank."""
        rank, world = self.rank(), self._world
        turn, until_s = self._turns[rank], world.now_s + _GLOO_S
        self._turns[rank] += 1
        if turn == len(self._told):
            self._told.append({})
        told = self._told[turn]
        told[rank] = own
        while len(told) < len(self._processes):
            if any(one.dead or one.ended for place, one in enumerate(self._processes) if place not in told):
                raise ProcessGroupError("connection closed by peer")
            if world.now_s > until_s:
                raise ProcessGroupError("timed out")
            world.sleep(0.01)
        return [told[place] for place in range(len(self._processes))]


def _all_reduce(told: torch.Tensor, _: Any, *, group: VirtualReplica) -> None:
    told.copy_(torch.stack(group.told(told.clone())).amax(0))


def _all_gather_object(told: list[Any], own: Any, *, group: VirtualReplica) -> None:
    told[:] = group.told(own)


class ReplicaWorld(World):
    """A program's processes, their store and their time."""

    def __init__(self, seed: int) -> None:
        self.replicas = drawn(seed)
        super().__init__(seed, self.replicas)
        self.computes_s = _EVERY * self.replicas.pause_s
        ranks, processes = self.replicas.ranks, self.replicas.processes
        self._insides = [
            VirtualReplica(self, processes[begin : begin + ranks]) for begin in range(0, len(processes), ranks)
        ]
        self._rounds: dict[tuple[int, int], dict[int, int]] = {}  # by round and position the checksum of each process
        self._excused: set[int] = set()  # replicas that were told rightly that they cannot go on
        self._deadly = [sum(math.isinf(fault.freeze_s) for fault in one.faults) for one in processes]

    def play(self) -> None:
        super().play()
        for (
            number,
            position,
        ), found in self._rounds.items():  # whoever was lost may have ended one that nobody else has
            bits = {one: bits for one, bits in found.items() if self.replicas.processes[one].ended == "ended"}
            if len({*bits.values()}) > 1:
                self.findings.append((WRONG_RESULT, f"round {number}, position {position}: other bits: {bits}"))
        for number, inside in enumerate(self._insides[: self.replicas.size]):
            ends = [one.ended for one in inside._processes]
            well = number not in self._excused and not any(map(self._is_troubled, inside._processes))
            if well and {*ends} != {"ended"}:
                self.findings.append((WRONG_ERROR, f"all of replica {number} was well, and ended with {ends}"))

    def _is_troubled(self, process: Process) -> bool:
        killed = sum(math.isinf(fault.freeze_s) for fault in process.faults) < self._deadly[process.number]
        return killed or process.stalled_s >= NOTICED_S or process.slow[2] >= LATE_STORE_S

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        regroup, align = telegrad.DiLoCo._regroup, telegrad.DiLoCo._align

        def regrouped(own: telegrad.DiLoCo, **options: Any) -> None:
            self.running.process.enter("regroup")
            regroup(own, **options)

        def aligned(own: telegrad.DiLoCo, failed: bool) -> None:
            self.running.process.enter("align")
            align(own, failed)

        with super().in_place(), contextlib.ExitStack() as stack:
            for place, name, value in (
                (groups, "join_core", self.join_core),
                (diloco, "ProcessGroup", VirtualReplica),
                (replica_ranks, "ProcessGroup", VirtualReplica),
                (replica_ranks, "Store", VirtualStore),
                (replica_ranks, "all_reduce", _all_reduce),
                (replica_ranks, "all_gather_object", _all_gather_object),
                (replica_ranks, "get_process_group_ranks", lambda group: [*range(group.size())]),
                (replica_ranks, "get_rank", lambda group: group.rank()),
                (replica_ranks, "process_mark", self.own_mark),
                (replica_ranks, "uuid", types.SimpleNamespace(uuid4=self.own_uuid)),
                (telegrad.DiLoCo, "_regroup", regrouped),
                (telegrad.DiLoCo, "_align", aligned),
            ):
                stack.enter_context(mock.patch.object(place, name, value))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            yield

    def _live(self, process: Process) -> None:
        process.enter("join")
        try:
            self._train(process)
            process.ended = "ended"
            self.note(f"process {process.number} ends")
        except (telegrad.TransportError, ProcessGroupError) as error:
            process.ended = f"{type(error).__name__}: {error}"
            self.note(f"process {process.number}: {process.ended}")
            self.counts["failed"] += 1
            if self._is_refused(process, str(error)):
                self._excused.add(process.number // self.replicas.ranks)
            self.kill(process)  # its connections end with it
            return
        self._end_threads(process)

    def _is_refused(self, process: Process, text: str) -> bool:
        """Whether nobody is left who could take this process in."""
        if "not taken in" in text:
            return any(map(self._is_troubled, self.processes))
        return ("has ended" in text or "gone, so nobody" in text) and not self.members_running()

    def _train(self, process: Process) -> None:
        program, number = self.replicas, process.number
        replica, position = divmod(number, program.ranks)
        model, inside = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), self._insides[replica]
        with torch.no_grad():
            for one in model.parameters():
                one.copy_(_drawn_like(one, replica))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        limits: dict[str, Any] = {"timeout_s": program.timeout_s, "liveness_timeout_s": program.liveness_s}
        group = ReplicaGroup(self.store, program.size, join_timeout_s=program.join_s, **limits)
        given: Any = inside if program.ranks > 1 else 1
        with self.timed(process, "DiLoCo()", lambda: 2.0 if self._decided else math.inf):
            trained = telegrad.DiLoCo(model, group, optimizer, every=_EVERY, replica=given, **_OPTIONS[program.kind])
        self.counts["joined"] += 1
        step = 0
        while trained.rounds < program.rounds:
            process.enter("step")
            if program.ranks > 1:
                inside.told(None)  # as gradients are averaged
            for one in model.parameters():
                one.grad = _drawn_like(one, replica + 100 * step)
            self.sleep(program.pause_s * process.draw.random())
            before, step = trained.rounds, step + 1
            self._timed(process, "step()", optimizer.step)
            if trained.rounds != before:
                self._check(process, trained, position)
        self._timed(process, "exchange()", trained.exchange)
        self._check(process, trained, position)
        trained.close()

    def _timed(self, process: Process, what: str, call: Callable[[], Any]) -> None:
        together = self._insides[process.number // self.replicas.ranks]._processes
        with self.timed(process, what, lambda: 2.0 * any(map(self._is_troubled, together))):
            call()

    def _check(self, process: Process, trained: telegrad.DiLoCo, position: int) -> None:
        self.counts["rounds"] += 1
        self.note(f"process {process.number} has round {trained.rounds}, {trained.checksum():08x}")
        self._rounds.setdefault((trained.rounds, position), {})[process.number] = trained.checksum()


def _drawn_like(one: torch.Tensor, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.Generator(np.random.PCG64(seed)).standard_normal(tuple(one.shape), np.float32))


def play(seed: int) -> ReplicaWorld:
    """Plays one seed."""
    world = ReplicaWorld(seed)
    world.play()
    return world
