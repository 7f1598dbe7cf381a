"""Programs of ranks that shrink, grow and join, what their processes do, and what must hold."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import queue
import random
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt

import telegrad
from lab.simulated_membership.virtual import (
    CRASH,
    HANG,
    NOTICED_S,
    WRONG_ERROR,
    WRONG_GROUP,
    WRONG_RESULT,
    Clock,
    Fault,
    Group,
    Process,
    VirtualCore,
    VirtualFuture,
    VirtualPrefixStore,
    VirtualQueue,
    VirtualStore,
    VirtualThread,
)
from telegrad.communicator import base, communicator, membership, tuning
from telegrad.communicator.rendezvous import network_choice, store_exchange

SORTS = (CRASH, HANG, WRONG_GROUP, WRONG_RESULT, WRONG_ERROR)
"""Sorts of findings, the worst first."""

_SLACK_S = 1.0  # beyond liveness_timeout_s, for each fault
LATE_STORE_S = 0.3  # several answers of such a store may take longer than a time-out
_VALUES = 8


@dataclass(frozen=True)
class Program:
    """What a seed stands for."""

    size: int
    timeout_s: float
    liveness_s: float
    join_s: float
    ends_s: float
    pause_s: float
    grows_every: int
    processes: list[Process]

    def __str__(self) -> str:
        lines = [
            f"{self.size} ranks, timeout_s={self.timeout_s:g}, liveness_timeout_s={self.liveness_s:g}, "
            f"join_timeout_s={self.join_s:g}, ends at {self.ends_s:g} s, grows every {self.grows_every} steps"
        ]
        for one in self.processes:
            lines.append(
                f"  process {one.number} of machine {one.machine}, from {one.begins_s:.2f} s"
                f"{', stays' if one.stays else ''}{', joins anew' if one.restarts else ''}"
                + f", leaves at step {one.leaves_at}" * (one.leaves_at >= 0)
                + ": "
                + "; ".join(
                    f"in {fault.phase} {fault.nth} after {fault.after} waits "
                    + ("killed" if math.isinf(fault.freeze_s) else f"frozen for {fault.freeze_s:.2f} s")
                    for fault in one.faults
                )
                + f"; computes for {one.computes[1]:.2f} s after {one.computes[0]}" * (one.computes[1] > 0)
                + (f"; store up to {one.slow[2]:.2f} s late from {one.slow[0]:.2f} to {one.slow[1]:.2f} s")
                * (one.slow[1] > 0)
            )
        return "\n".join(lines)


_PHASES = ("join", "step", "shrink", "shrink", "connect", "connect")
_PHASES_OF_LATE = ("join", "join", "connect", "connect", "step", "shrink")


def drawn(seed: int) -> Program:
    """The program of a seed."""
    draw = random.Random(seed)
    size = draw.choice([1, 2, 2, 3, 3, 4, 5])
    liveness_s = draw.choice([2.0, 3.0, 4.0])
    late = draw.choice([0, 0, 1, 2, 2, 3])
    stays = draw.random() < 0.4
    machines = draw.choice([1, 2, size + late])
    processes = []
    struck = draw.randrange(size)  # at least one rank's step fails
    for number in range(size + late):
        faults = []
        if number == struck:
            faults.append(Fault("step", draw.randrange(1, 8), draw.randrange(4), math.inf))
        while draw.random() < (0.45 if number < size else 0.35):
            phase = draw.choice(_PHASES if number < size else _PHASES_OF_LATE)
            lasts_s = draw.choice([math.inf, math.inf, 0.3, 0.3 * liveness_s, 1.5 * liveness_s, 3.0 * liveness_s])
            nth = draw.randrange(1, 8) if phase == "step" else 1 if phase == "join" else draw.choice([1, 1, 2, 2, 3])
            after = draw.choice([0, 1, 2, 3, draw.randrange(12), draw.randrange(60), draw.randrange(60)])
            faults.append(Fault(phase, nth, after, lasts_s))
        slow = (0.0, 0.0, 0.0)
        if draw.random() < 0.2:
            begins_s = draw.uniform(0.0, 6.0)
            slow = (begins_s, begins_s + draw.uniform(0.5, 6.0), draw.choice([0.05, 0.3, 1.0, 2.0]))
        computes: tuple[int | str, float] = "", 0.0
        if draw.random() < 0.2:
            computes = draw.choice(["shrink", *range(8)]), draw.choice([0.5, 1.2, 1.5]) * liveness_s
        processes.append(
            Process(
                number,
                number % machines,
                draw.uniform(0.0, 0.5) if number < size else draw.uniform(0.5, 5.0),
                stays,
                draw.random() < 0.5,
                number < size or draw.random() < 0.3,
                draw.randrange(1, 10) if draw.random() < 0.1 else -1,
                faults,
                slow,
                computes,
                random.Random(draw.getrandbits(64)),
            )
        )
    return Program(
        size,
        draw.choice([8.0, 10.0]),
        liveness_s,
        draw.choice([8.0, 12.0]),
        draw.uniform(3.0, 9.0),
        draw.choice([0.2, 0.6]),
        draw.choice([1, 2, 4]),
        processes,
    )


def contribution(number: int, step: int) -> npt.NDArray[np.float32]:
    """The values that a process adds in a step, of which the first half are whole numbers."""
    draw = np.random.Generator(np.random.PCG64(1000 * step + number))
    whole = draw.integers(-999, 999, _VALUES).astype(np.float32)
    return np.concatenate([whole, draw.standard_normal(_VALUES, np.float32)])


class World(Clock):
    """A program's processes, their store and their time."""

    def __init__(self, seed: int, program: Program | None = None) -> None:
        self.program = program or drawn(seed)
        super().__init__(self.program.processes, seed + 1)
        self.store = VirtualStore(self)
        self.longest = 0.0, ""
        self.computes_s = 0.0  # at most, before others come to the same operation
        self._connections = 0
        self._groups_of: dict[tuple[bytes, ...], Group] = {}
        self._owners: dict[bytes, Process] = {}
        self._closed: set[bytes] = set()
        self._decided: dict[int, tuple[float, list[str]]] = {}
        self._left: set[str] = set()
        self._bits: dict[tuple[Any, ...], bytes] = {}
        self._uuids = random.Random(seed + 2)

    def play(self) -> None:
        """Until all processes have ended, or it is hopeless."""
        with self.in_place():
            self.run(self._live)
            self._hopeless = False
            for process in self.processes:
                if not process.dead and not process.ended:
                    self.find(HANG, f"process {process.number} is in {process.phase}")

    # The system, as the modules under test see it

    def state_here(self, mark: str) -> str:
        machine, _, number, _ = mark.split(":")
        own = self.running.process
        other = self.program.processes[int(number)]
        if machine != f"m{own.machine}":
            return ""
        if other.dead or other.ended:
            return "gone"
        return "" if other.frozen_until_s > self.now_s else "runs"

    def join_core(self, rank: int, size: int, exchange: Any, options: Any, *_: Any, **__: Any) -> VirtualCore:
        process = self.running.process
        self._connections += 1
        own = f"connection {self._connections} of process {process.number}".encode()
        self._owners[own] = process
        try:
            addresses = exchange(own)
        except Exception:
            self._close(own)
            raise
        if addresses[rank] != own or len(addresses) != size:
            self.find(WRONG_GROUP, f"process {process.number} as rank {rank} of {size} was told {addresses}")
        group = self._groups_of.get(tuple(addresses))
        if group is None:
            owners = [self._owners[address] for address in addresses]
            group = Group(self, owners, rank, options.timeout_s, options.liveness_timeout_s)
            self.groups.append(group)
            self._groups_of[tuple(addresses)] = group
            for closed in self._closed.intersection(addresses):
                group.close(addresses.index(closed))
        group.attach(rank)
        core = VirtualCore(group, rank)
        until_s = self.now_s + options.timeout_s
        while not group.core.over(rank) and self.now_s < until_s and (group.absent or not group.core.joined(rank)):
            self.sleep(0.005)
        process.enter("connect")
        return core

    def _close(self, address: bytes) -> None:
        """Its process has given up, which those that have it hear."""
        self._closed.add(address)
        for addresses, group in self._groups_of.items():
            if address in addresses and group in self.groups:
                group.close(addresses.index(address))

    def own_mark(self) -> str:
        return self.running.process.mark

    def own_uuid(self) -> Any:
        return types.SimpleNamespace(hex=f"{self._uuids.getrandbits(128):032x}")

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """The modules under test see this world."""
        clock = types.SimpleNamespace(monotonic=lambda: self.now_s, sleep=self.sleep)
        threads = types.SimpleNamespace(
            Thread=functools.partial(VirtualThread, self), TIMEOUT_MAX=threading.TIMEOUT_MAX
        )
        queues = types.SimpleNamespace(SimpleQueue=functools.partial(VirtualQueue, self), Empty=queue.Empty)
        uuids = types.SimpleNamespace(uuid4=self.own_uuid)
        exits = types.SimpleNamespace(register=lambda _: None, unregister=lambda _: None)
        torch_stores = types.SimpleNamespace(PrefixStore=VirtualPrefixStore)
        open_before = set(base._open)
        with contextlib.ExitStack() as stack:
            for module, name, value in (
                (membership, "time", clock),
                (membership, "threading", threads),
                (membership, "queue", queues),
                (membership, "uuid", uuids),
                (membership, "atexit", exits),
                (membership, "Future", functools.partial(VirtualFuture, self)),
                (membership, "wait", lambda futures, seconds: futures[0].wait(seconds)),
                (membership, "process_mark", self.own_mark),
                (membership, "state_here", self.state_here),
                (membership, "remove_orphans", lambda: None),
                (store_exchange, "time", clock),
                (store_exchange, "uuid", uuids),
                (tuning, "process_mark", self.own_mark),
                (tuning, "label_of", lambda _: f"m{self.running.process.machine}"),
                (tuning, "tuning_cache", types.SimpleNamespace(candidates=lambda _: [])),
                (communicator, "join_core", self.join_core),
                (communicator, "_network_devices", lambda *_: network_choice.MEMORY),
                (communicator, "report_folder", lambda: ""),
                (communicator, "bind_engine", lambda: None),
                (communicator, "report_on_signal", lambda: None),
            ):
                stack.enter_context(mock.patch.object(module, name, value))
            stack.enter_context(mock.patch.dict(sys.modules, {"torch._C._distributed_c10d": torch_stores}))
            try:
                yield
            finally:
                for key in set(base._open) - open_before:
                    base._open.pop(key)._live = None

    # What must hold

    def decided(self, key: str, value: bytes) -> None:
        """A group, or who has left, has been written to the store."""
        place, _, name = key.rpartition("/")
        if place.endswith("left"):
            self._left.add(name)
        if name != "group":
            return
        number, names, _ = json.loads(value)
        self.note(f"process {self.running.process.number} decides on group {number}: {names}")
        self.counts["groups"] += 1
        self._decided[number] = self.now_s, names
        owners = [one for name in names for one in self.processes_of(name)]
        if len({one.number for one in owners}) != len(owners):
            self.find(WRONG_GROUP, f"group {number} has a process twice: {names}")
        if number == 0:
            if len(names) != self.program.size:
                self.find(WRONG_GROUP, f"the first group has {len(names)} members, not {self.program.size}")
            return
        before = self._decided[number - 1][1]
        stayed = [name for name in before if name in names]
        if names[: len(stayed)] != stayed:
            self.find(WRONG_GROUP, f"group {number} has another order than the one before: {before}, then {names}")
        for name in before:
            ones = self.processes_of(name)
            if name not in names and name not in self._left and all(map(self.was_well, [*ones, self.running.process])):
                told = f"group {number} leaves out process {ones[0].number}, which did not stand still"
                self.find(WRONG_GROUP, told)

    def was_well(self, process: Process) -> bool:
        """For as long as others look before they leave it out."""
        return not process.dead and self.now_s > process.stalled_until_s + self.program.liveness_s + _SLACK_S

    def process_of(self, name: str) -> Process:
        return self.processes_of(name)[0]

    def processes_of(self, name: str) -> list[Process]:
        return [self.program.processes[int(mark.split(":")[2])] for mark in name.partition("@")[2].split(",")]

    def members_running(self) -> list[Process]:
        """Of the latest group, those that have not stood still."""
        names = self._decided[max(self._decided)][1] if self._decided else []
        members = map(self.processes_of, names)
        return [ones[0] for ones in members if all(map(self.was_well, ones)) and not any(map(_is_leaving, ones))]

    def check_group(self, process: Process, comm: Any, before: list[str] | None, kept: Sequence[int]) -> None:
        """``before``: the members until now; ``None``: this process is new. ``kept``: what it was told."""
        held = comm._membership
        number, names = held._group.number, held._group.names
        group: Group = comm._core.group
        told = f"process {process.number} in group {number}"
        if names != self._decided[number][1]:
            self.find(WRONG_GROUP, f"{told} has {names}, decided was {self._decided[number][1]}")
        owners = [self.process_of(name).number for name in names]
        if [one.number for one in group.processes] != owners or owners[comm.rank] != process.number:
            connected = [one.number for one in group.processes]
            self.find(WRONG_GROUP, f"{told} is rank {comm.rank}, connected to {connected}, members are {owners}")
        places = {name: place for place, name in enumerate(before or [])}
        if before is not None and tuple(kept) != tuple(places.get(name, -1) for name in names):
            self.find(WRONG_GROUP, f"{told} was told the earlier ranks {kept}: {before}, now {names}")
        left = [key for key in self.store.held if f"/join/{number}/" in key and not key.endswith(f"/{number}/0/0")]
        if comm.rank == 0 and left:
            self.find(WRONG_GROUP, f"{told} has left addresses in the store: {left[:3]}")
        if comm.rank == 0 and before is not None:
            self._check_keys(told, names)
        self.note(f"{told} is rank {comm.rank} of {comm.world_size}, earlier ranks {kept}")

    def _check_keys(self, told: str, names: Sequence[str]) -> None:
        """The store holds no more keys than the present members need, however many there have been."""
        others = sum(not one.dead and not one.ended for one in self.processes)
        (asked,) = (int(value) for key, value in self.store.held.items() if key.endswith("/tickets"))
        (group,) = (json.loads(value) for key, value in self.store.held.items() if key.endswith("/group"))
        most = 10 + 2 * len(names) + 2 * others + self.program.size + 3 * (asked - group[2])
        if len(self.store.held) > most:
            self.find(WRONG_GROUP, f"{told}: {len(self.store.held)} keys are in the store: {sorted(self.store.held)}")

    @contextlib.contextmanager
    def timed(self, process: Process, what: str, joins: Callable[[], float] = float) -> Iterator[None]:
        """It must not take longer than its time-outs. ``joins``: how often it may have asked to be taken in."""
        begin_s, program = self.now_s, self.program
        try:
            yield
        finally:
            stalled_s = sum(2.0 * one.stalled_s + one.computes[1] for one in program.processes)
            late_s = begin_s - program.liveness_s - _SLACK_S  # faults from then on may still have to be noticed
            unlucky = (
                1.0
                + sum(when_s > late_s for when_s in self.faults)
                + sum(one.slow[2] >= LATE_STORE_S for one in program.processes)
            )
            unlucky += joins() * program.join_s / program.liveness_s
            most_s = unlucky * (program.liveness_s + _SLACK_S) + stalled_s + self.computes_s
            self.longest = max(self.longest, ((self.now_s - begin_s) / most_s, what))
            if not process.dead and self.now_s - begin_s > most_s:
                self.find(
                    HANG, f"{what} of process {process.number} took {self.now_s - begin_s:.1f} s, at most {most_s:.1f}"
                )

    # What a process does

    def _live(self, process: Process) -> None:
        for _ in range(3):
            process.ended = self._run_job(process)
            self.note(f"process {process.number}: {process.ended}")
            if process.ended != "dropped" or not process.restarts or process.stays:
                break
            process.ended = ""
        self._end_threads(process)

    def _end_threads(self, process: Process) -> None:
        left = [one for one in process.fibres if not one.over and one is not self.running]
        for _ in range(100):
            if all(one.over for one in left):
                return
            self.sleep(0.1)
        self.find(WRONG_RESULT, f"process {process.number} has ended, and threads of it go on")

    def _run_job(self, process: Process) -> str:
        program = self.program
        process.enter("join")
        process.leaving, begin_s = False, self.now_s
        try:
            with self.timed(process, "join()", lambda: 1.0):
                comm: Any = telegrad.join(
                    self.store,
                    program.size if process.named else None,
                    timeout_s=program.timeout_s,
                    liveness_timeout_s=program.liveness_s,
                    join_timeout_s=program.join_s,
                )
        except telegrad.errors.RendezvousError as error:
            return self._refused(process, error, begin_s)
        self.counts["joined"] += 1
        self.check_group(process, comm, None, comm._membership.kept)
        rank = _Rank(self, process, comm)
        try:
            return rank.live()
        finally:
            if not process.dead:
                process.leaving = True
                comm._membership.leave(ends=True)
                comm.close()

    def _refused(self, process: Process, error: Any, begin_s: float) -> str:
        text = str(error)
        self.counts["refused"] += 1
        others = [one for one in self.program.processes if one is not process]
        if "has ended" in text or "gone, so nobody" in text:
            if (running := self.members_running()) and self.was_well(process):
                self.find(WRONG_ERROR, f"process {process.number}, while {running[0].number} runs: {text}")
            return f"refused: {text}"
        healthy = process.stalled_s < NOTICED_S and not any(one.stalled_s >= NOTICED_S or one.dead for one in others)
        late = process.slow[2] >= LATE_STORE_S
        if (
            ("store of the ranks is gone" in text and not late)
            or "agreed 20 times" in text
            or (healthy and process.named)
        ):
            running = [one for one in others if not one.ended and one.begins_s < self.now_s]
            if "was not taken in" not in text or len(running) == len(others):
                self.find(WRONG_ERROR, f"process {process.number}: {text}")
        return f"refused: {text}"


def _is_leaving(process: Process) -> bool:
    return process.leaving or bool(process.ended)


class _Rank:
    """One process's place in the job: it sums in a loop, and shrinks after each failure."""

    def __init__(self, world: World, process: Process, comm: Any) -> None:
        self.world, self.process, self.comm = world, process, comm
        self.step, self.is_new = 0, True
        if process.stays:
            comm._membership.stay()

    def live(self) -> str:
        if self.comm._membership._number == 0:
            self.is_new = False
        else:
            try:
                self._align()
            except telegrad.TransportError as error:
                if not self._recover(error):
                    return "dropped"
        while True:
            try:
                self.process.enter("step")
                if self.step == self.process.leaves_at:
                    self.world.counts["left"] += 1
                    self.process.leaving = True
                    self.comm._membership.leave()
                    self.comm.abort("the program says so")
                    return "leaves"
                if self._take_step():
                    return "ended"
            except telegrad.TransportError as error:
                if not self._recover(error):
                    return "dropped"

    def _take_step(self) -> bool:
        world, comm, program = self.world, self.comm, self.world.program
        told = np.zeros(3, np.int64)
        if comm.rank == 0:
            wanted = self.step % program.grows_every == 0
            if self.process.stays:
                wanted = comm._membership.wanted()
            told[:] = world.now_s > program.ends_s, wanted, self.step
        self._timed("broadcast", lambda: comm.broadcast(told, 0))
        ends, grows, step = told.tolist()
        if step != self.step:
            world.find(WRONG_RESULT, f"process {self.process.number} is at step {self.step}, and rank 0 at {step}")
        if ends:
            comm.barrier()
            return True
        own = contribution(self.process.number, self.step)
        before = own.copy()
        members = [contribution(one.number, self.step) for one in comm._core.group.processes]
        try:
            found = self._timed("all_gather", lambda: comm.all_gather(own))
        finally:
            if not np.array_equal(own, before):
                world.find(WRONG_RESULT, f"all_gather has changed the input of process {self.process.number}")
        if not np.array_equal(found, np.stack(members)):
            world.find(WRONG_RESULT, f"all_gather of process {self.process.number} in step {self.step}")
        self._timed("all_reduce", lambda: comm.all_reduce(own))
        if not np.array_equal(own[:_VALUES], np.sum(members, 0)[:_VALUES]):
            world.find(WRONG_RESULT, f"the sum of process {self.process.number} in step {self.step}")
        key = (comm._membership._number, self.step)
        if world._bits.setdefault(key, own.tobytes()) != own.tobytes():
            world.find(WRONG_RESULT, f"other bits on process {self.process.number} in step {self.step}")
        world.counts["sums"] += 1
        self.step += 1
        self._compute_after(self.step - 1)
        world.sleep(program.pause_s * self.process.draw.random())
        if grows:
            self._grow()
        return False

    def _compute_after(self, what: int | str) -> None:
        after, seconds = self.process.computes
        if after == what:
            self.world.sleep(seconds)

    def _timed(self, what: str, call: Callable[[], Any]) -> Any:
        with self.world.timed(self.process, what):
            return call()

    def _grow(self) -> None:
        comm, world = self.comm, self.world
        self.process.enter("shrink")
        before = list(comm._membership._group.names)
        number = comm._membership._number
        if self.process.stays:
            kept, was_member = self._timed("_regroup()", lambda: comm._regroup(admit=True, rejoins=True))
            self.is_new = self.is_new or not was_member
        else:
            came = self._timed("grow()", lambda: comm.grow(0))
            kept, was_member = comm._membership.kept, True
            if came != kept.count(-1) and comm._membership._number != number:
                world.find(WRONG_GROUP, f"grow() of process {self.process.number} returned {came}: {kept}")
        if comm._membership._number != number:
            world.counts["grown"] += 1
            world.check_group(self.process, comm, before if was_member else None, kept)
            self._align()

    def _recover(self, error: telegrad.TransportError) -> bool:
        """False: the others have gone on without this process."""
        world, comm, process = self.world, self.comm, self.process
        while True:
            process.enter("shrink")
            before = list(comm._membership._group.names) if comm._membership._group else None
            rank = comm.rank
            try:
                if isinstance(error, telegrad.errors.RendezvousError):
                    raise error
                if process.stays:
                    peer = error.peer
                    call = functools.partial(comm._regroup, admit=False, blamed=peer, rejoins=True)
                    kept, was_member = self._timed("_regroup()", call)
                else:
                    kept, was_member = self._timed("shrink()", comm.shrink), True
            except telegrad.errors.RendezvousError as dropped:
                self._judge_dropped(dropped, rank)
                return False
            world.counts["shrunk"] += 1
            self.is_new = self.is_new or not was_member
            world.check_group(process, comm, before if was_member else None, kept)
            self._compute_after("shrink")
            try:
                self._align()
                return True
            except telegrad.TransportError as another:
                error = another

    def _align(self) -> None:
        """All go on with the step of those that are furthest; nobody is behind by more than one."""
        steps = self._timed("all_gather", lambda: self.comm.all_gather(np.array([-1 if self.is_new else self.step])))
        last = int(steps.max())
        if any(0 <= one < last - 1 for one in steps.reshape(-1)):
            self.world.find(WRONG_RESULT, f"more than a step is lost: {steps.tolist()}")
        self.step, self.is_new = max(last, 0), False

    def _judge_dropped(self, error: telegrad.TransportError, rank: int) -> None:
        world, process = self.world, self.process
        world.counts["dropped"] += 1
        world.note(f"process {process.number} is told: {error}")
        if "have gone on without this one" in str(error):
            last = max(world._decided)
            if any(world.process_of(name) is process for name in world._decided[last][1]):
                world.find(WRONG_ERROR, f"process {process.number} is in group {last}, and was told: {error}")
            if error.rank != rank:
                world.find(WRONG_ERROR, f"process {process.number} was rank {rank}, told was {error.rank}: {error}")
        else:
            running = [one for one in world.members_running() if one is not process]
            ended = process.stays and "the run of this name has ended" in str(error)
            late = "store of the ranks is gone" in str(error) and process.slow[2] >= LATE_STORE_S
            stalled = any(one.stalled_s >= NOTICED_S for one in world.program.processes)
            late = late or (process.stays and stalled and "was not taken in" in str(error))
            if not late and (not (ended or "gone, so nobody has" in str(error)) or running):
                world.find(WRONG_ERROR, f"process {process.number}: {error}")


def play(seed: int) -> World:
    """Plays one seed."""
    world = World(seed)
    world.play()
    return world


def worst_of(world: World) -> tuple[str, str] | None:
    """The worst finding; ``None``: all is well."""
    return min(world.findings, key=lambda found: SORTS.index(found[0]), default=None)
