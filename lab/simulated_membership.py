"""Ranks that shrink, grow and join under random further faults, in virtual time, from seeds: do all agree?

The library's own code runs: the agreement over the store, the exchange of addresses, communicators, and the core's
sessions on a simulated network. Time, the store and the operating system are virtual. Each virtual process has threads
of its own, of which one runs at a time. Each waits in a call that this module has replaced, so that a seed gives the
same history again.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import itertools
import json
import math
import queue
import random
import resource
import signal
import sys
import threading
import time
import traceback
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import typer

import telegrad
from telegrad import _core
from telegrad.communicator import base, communicator, membership, tuning
from telegrad.communicator.rendezvous import network_choice, store_exchange

HANG, WRONG_RESULT, WRONG_ERROR, WRONG_GROUP, CRASH = "hang", "wrong result", "wrong error", "wrong group", "crash"
SORTS = (CRASH, HANG, WRONG_GROUP, WRONG_RESULT, WRONG_ERROR)
"""Sorts of findings, the worst first."""

_STEPS_MOST = 400_000  # waits of all threads of one program
_ENDS_S = 600.0  # virtual time in which a program has to be over
_KEEPS_ABSENT_S = 0.05  # a rank that has not connected yet is frozen for as long, again and again
_PARTING_MOST_S = 5.0  # as the engine's
_HEALTHY_S = 0.9  # a process that never stood still for longer must not be left out
_SLACK_S = 1.0  # beyond liveness_timeout_s, for each fault
_LATE_STORE_S = 0.3  # several answers of such a store may take longer than a time-out
_ALPHA_S, _BETA_S = 1e-4, 1e-9
_VALUES = 8


class Gone(BaseException):
    """Ends the threads of a process that was killed."""


# Threads of which one runs at a time


class _Hand(threading.Thread):
    """A thread of this process that runs virtual ones, one after the other."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.turn = threading.Lock()
        self.turn.acquire()
        self.run_next: Callable[[], None] | None = None

    def run(self) -> None:
        while True:
            self.turn.acquire()
            assert self.run_next is not None
            self.run_next()


_idle: list[_Hand] = []


class Fibre:
    """A thread of a virtual process. ``turn``: of its next wait; entries of earlier ones count no more."""

    def __init__(self, process: Process, target: Callable[[], Any]) -> None:
        self.process, self.target = process, target
        self.turn, self.over = 0, False
        self.joining: list[Fibre] = []
        self.hand: _Hand | None = None


@dataclass
class Fault:
    """Of a process: in its ``nth`` ``phase`` after so many waits. ``freeze_s``: infinity kills it."""

    phase: str
    nth: int
    after: int
    freeze_s: float


@dataclass
class Process:
    """``slow``: from when until when an answer of the store may take so long."""

    number: int
    machine: int
    begins_s: float
    stays: bool
    restarts: bool
    named: bool
    leaves_at: int  # this step
    faults: list[Fault]
    slow: tuple[float, float, float]
    draw: random.Random
    dead: bool = False
    ended: str = ""  # how its program has
    leaving: bool = False
    frozen_until_s: float = 0.0
    stalled_s: float = 0.0  # the longest time for which it stood still
    phase: str = ""
    phases: Counter[str] = field(default_factory=Counter)
    waits: int = 0
    fibres: list[Fibre] = field(default_factory=list)
    group: Group | None = None

    @property
    def mark(self) -> str:
        """As ``process_mark`` tells it."""
        return f"m{self.machine}:space:{self.number}:1"

    def enter(self, phase: str) -> None:
        self.phase, self.waits = phase, 0
        self.phases[phase] += 1


class Group:
    """The connections of one attempt, over a simulated network."""

    def __init__(
        self, world: World, processes: list[Process], own: int, timeout_s: float, liveness_s: float | None
    ) -> None:
        self.world, self.processes = world, processes
        self.begins_s = world.now_s
        self.core = _core.Simulation.make(
            len(processes), _ALPHA_S, _BETA_S, 0.0, 0.5, world.draw.getrandbits(32), timeout_s, liveness_s
        )
        self.absent = set(range(len(processes))) - {own}
        self.left: set[int] = set()
        self.waiting: dict[Fibre, Any] = {}
        self.kept: list[Any] = []
        for rank, process in enumerate(processes):
            if process.dead:
                self.kill(rank)
        self._keep_absent()

    def _keep_absent(self) -> None:
        self.absent = {rank for rank in self.absent if not self.processes[rank].dead}
        if self.absent and len(self.left) < len(self.processes):
            for rank in self.absent:
                self.freeze(rank, _KEEPS_ABSENT_S)
            self.world.at(self.world.now_s + _KEEPS_ABSENT_S, self._keep_absent)

    def attach(self, rank: int) -> None:
        self.absent.discard(rank)
        frozen_s = self.processes[rank].frozen_until_s - self.world.now_s
        if frozen_s > 0.0:
            self.freeze(rank, frozen_s)

    def catch_up(self) -> None:
        """The network's time is this world's, at least."""
        while self.core.advance(self.world.now_s - self.begins_s):
            self.wake()

    def kill(self, rank: int) -> None:
        self.catch_up()
        self.core.kill(rank, self.world.draw.choice([0.0, 0.01, 0.5]))
        self.leave(rank)

    def freeze(self, rank: int, duration_s: float) -> None:
        self.catch_up()
        self.core.freeze(rank, duration_s + self.world.now_s - self.begins_s - self.core.now_s())

    def leave(self, rank: int) -> None:
        self.left.add(rank)
        if len(self.left) == len(self.processes) and self in self.world.groups:
            self.world.groups.remove(self)

    def next_s(self) -> float:
        return self.begins_s + self.core.next_s()

    def advance(self, until_s: float) -> None:
        if self.core.advance(until_s - self.begins_s):
            self.wake()

    def wake(self) -> None:
        at_s = max(self.world.now_s, self.begins_s + self.core.now_s())
        for fibre in [fibre for fibre, request in self.waiting.items() if request.done()]:
            del self.waiting[fibre]
            self.world.wake(fibre, at_s)


class VirtualRequest:
    """Of an operation of a group; whoever waits for it lets virtual time pass."""

    def __init__(self, group: Group, request: Any) -> None:
        self._group, self._request = group, request

    def wait(self, timeout_s: float | None = None) -> bool:
        world = self._group.world
        until_s = math.inf if timeout_s is None else world.now_s + timeout_s
        while not self._request.done() and world.now_s < until_s:
            self._group.waiting[world.running] = self._request
            try:
                world.wait(until_s)
            finally:
                self._group.waiting.pop(world.running, None)
        return bool(self._request.done() and self._request.wait(None))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


_BEGIN = ("all_gather", "broadcast", "barrier", "all_reduce", "all_to_all", "reduce_scatter")


class VirtualCore:
    """One rank's end of a group, in place of the core's communicator over UCX."""

    driver, warning, shares_memory = "ucx", "", True

    def __init__(self, group: Group, rank: int) -> None:
        self.group, self.rank, self.size = group, rank, len(group.processes)
        self._core = group.core.communicator(rank)
        self._parted = False

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._core, name)
        if name not in _BEGIN:
            return found

        def begin(*arguments: Any) -> VirtualRequest:
            self.group.catch_up()
            return VirtualRequest(self.group, found(*arguments))

        return begin

    def abort(self, reason: str) -> None:
        if not self.group.processes[self.rank].dead and not self._parted:
            self.group.catch_up()
            self.group.core.abort(self.rank, reason)

    def part(self) -> None:
        if not self.group.processes[self.rank].dead and not self._parted:
            self._parted = True
            self.group.catch_up()
            self.group.core.part(self.rank)

    def close(self) -> None:
        self.part()
        world = self.group.world
        until_s = world.now_s + _PARTING_MOST_S
        while not self.group.core.over(self.rank) and world.now_s < until_s:
            world.sleep(0.01)
        self.group.catch_up()
        self.group.core.shut_down(self.rank)
        self.group.leave(self.rank)


# What the modules under test see instead of the system


class VirtualStore:
    """As ``torch.distributed.Store``. An answer takes time before and after it takes effect."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.held: dict[str, bytes] = {}

    def _asked(self, effect: Callable[[], Any]) -> Any:
        world = self._world
        process = world.running.process
        process_s, (begin_s, end_s, most_s) = 1e-4 + 1e-3 * process.draw.random(), process.slow
        after_s = 0.0
        if begin_s <= world.now_s < end_s and process.draw.random() < 0.3:
            process_s, after_s = process.draw.uniform(0.0, most_s), process.draw.uniform(0.0, most_s)
            process.stalled_s = max(process.stalled_s, process_s + after_s)
        world.sleep(process_s)
        found = effect()
        if after_s:
            world.sleep(after_s)
        return found

    def set(self, key: str, value: str | bytes) -> None:
        def done() -> None:
            self.held[key] = _bytes(value)
            self._world.decided(key, self.held[key])

        self._asked(done)

    def get(self, key: str) -> bytes:
        def found() -> bytes | None:
            return self.held.get(key)

        if (value := self._asked(found)) is None:
            self._world.find(HANG, f"a value that is not there is asked for: {key}")
            raise RuntimeError("wait timeout")
        return bytes(value)

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._asked(lambda: all(key in self.held for key in keys)))

    def add(self, key: str, amount: int) -> int:
        def added() -> int:
            total = int(self.held.get(key, b"0")) + amount
            self.held[key] = str(total).encode()
            return total

        return int(self._asked(added))

    def compare_set(self, key: str, expected: str | bytes, wanted: str | bytes) -> bytes:
        def compared() -> bytes:
            own = self.held.get(key)
            if own is None and expected:
                return _bytes(expected)
            if own is None or own == _bytes(expected):
                self.held[key] = own = _bytes(wanted)
                self._world.decided(key, own)
            return own

        return bytes(self._asked(compared))

    def delete_key(self, key: str) -> bool:
        return bool(self._asked(lambda: self.held.pop(key, None) is not None))


class VirtualPrefixStore:
    """As torch's."""

    def __init__(self, prefix: str, store: Any) -> None:
        self._prefix, self.underlying_store = prefix, store

    def __getattr__(self, name: str) -> Any:
        call = getattr(self.underlying_store, name)
        if name == "check":
            return lambda keys: call([f"{self._prefix}/{key}" for key in keys])
        return lambda key, *more: call(f"{self._prefix}/{key}", *more)


class VirtualThread:
    """As ``threading.Thread``."""

    def __init__(self, world: World, target: Callable[[], Any], **_: Any) -> None:
        self._world, self._target = world, target
        self._fibre: Fibre | None = None

    def start(self) -> None:
        self._fibre = self._world.spawn(self._world.running.process, self._target)

    def join(self, timeout_s: float = math.inf) -> None:
        assert self._fibre is not None
        until_s = self._world.now_s + timeout_s
        while not self._fibre.over and self._world.now_s < until_s:
            self._fibre.joining.append(self._world.running)
            self._world.wait(until_s)


class VirtualQueue:
    """As ``queue.SimpleQueue``."""

    def __init__(self, world: World) -> None:
        self._world, self._held, self._waiting = world, list[Any](), list[Fibre]()

    def put(self, one: Any) -> None:
        self._held.append(one)
        if self._waiting:
            self._world.wake(self._waiting.pop(0))

    def get(self, timeout: float | None = None) -> Any:
        until_s = math.inf if timeout is None else self._world.now_s + timeout
        while not self._held:
            if self._world.now_s >= until_s:
                raise queue.Empty
            self._waiting.append(self._world.running)
            try:
                self._world.wait(until_s)
            finally:
                if self._world.running in self._waiting:
                    self._waiting.remove(self._world.running)
        return self._held.pop(0)


class VirtualFuture:
    """As ``concurrent.futures.Future``."""

    def __init__(self, world: World) -> None:
        self._world, self._waiting = world, list[Fibre]()
        self._value: Any = None
        self._error: BaseException | None = None
        self._done = False

    def _end(self) -> None:
        self._done = True
        while self._waiting:
            self._world.wake(self._waiting.pop())

    def set_result(self, value: Any) -> None:
        self._value = value
        self._end()

    def set_exception(self, error: BaseException) -> None:
        self._error = error
        self._end()

    def done(self) -> bool:
        return self._done

    def wait(self, timeout_s: float) -> None:
        """As ``concurrent.futures.wait``."""
        until_s = self._world.now_s + timeout_s
        while not self._done and self._world.now_s < until_s:
            self._waiting.append(self._world.running)
            self._world.wait(until_s)

    def result(self, timeout_s: float) -> Any:
        assert timeout_s == 0
        if not self._done:
            raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._value


# One program


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
                random.Random(draw.getrandbits(64)),
            )
        )
    return Program(
        size,
        draw.choice([6.0, 10.0]),
        liveness_s,
        draw.choice([8.0, 12.0]),
        draw.uniform(3.0, 9.0),
        draw.choice([0.2, 0.6]),
        draw.choice([1, 2, 4]),
        processes,
    )


def contribution(number: int, step: int) -> npt.NDArray[np.float32]:
    """What a process adds in a step: the first half are whole numbers."""
    draw = np.random.Generator(np.random.PCG64(1000 * step + number))
    whole = draw.integers(-999, 999, _VALUES).astype(np.float32)
    return np.concatenate([whole, draw.standard_normal(_VALUES, np.float32)])


class World:
    """A program's processes, their store and their time."""

    def __init__(self, seed: int) -> None:
        self.program, self.draw = drawn(seed), random.Random(seed + 1)
        self.now_s = 0.0
        self.groups: list[Group] = []
        self.findings: list[tuple[str, str]] = []
        self.counts: Counter[str] = Counter()
        self.trace: list[str] = []
        self.running: Fibre = None  # type: ignore[assignment]  # none runs outside of run()
        self.store = VirtualStore(self)
        self._heap: list[tuple[float, int, Fibre | None, int, Callable[[], None] | None]] = []
        self._order = itertools.count()
        self._main = threading.Lock()
        self._main.acquire()
        self._waits = 0
        self._alive = 0
        self._hopeless = False
        self.faults: list[float] = []  # when
        self.longest = 0.0, ""
        self._connections = 0
        self._groups_of: dict[tuple[bytes, ...], Group] = {}
        self._owners: dict[bytes, Process] = {}
        self._decided: dict[int, tuple[float, list[str]]] = {}
        self._left: set[str] = set()
        self._bits: dict[tuple[Any, ...], bytes] = {}
        self._uuids = random.Random(seed + 2)

    # Time

    def at(self, when_s: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (when_s, next(self._order), None, 0, call))

    def wake(self, fibre: Fibre, when_s: float | None = None) -> None:
        when_s = self.now_s if when_s is None else when_s
        heapq.heappush(self._heap, (when_s, next(self._order), fibre, fibre.turn, None))

    def sleep(self, seconds: float) -> None:
        self.wait(self.now_s + max(seconds, 1e-6))

    def wait(self, until_s: float) -> None:
        """Until this thread is woken, or then. Raises ``Gone`` in a process that was killed."""
        fibre = self.running
        fibre.turn += 1
        self._suffer(fibre.process)
        if until_s < math.inf:
            self.wake(fibre, until_s)
        chosen = self._next()
        if chosen is not fibre:
            self._hand_over(chosen)
            assert fibre.hand is not None
            fibre.hand.turn.acquire()
        if fibre.process.dead:
            raise Gone

    def spawn(self, process: Process, target: Callable[[], Any]) -> Fibre:
        fibre = Fibre(process, target)
        process.fibres.append(fibre)
        self._alive += 1
        self.wake(fibre)
        return fibre

    def _hand_over(self, chosen: Fibre | None) -> None:
        if chosen is None:
            self._main.release()
            return
        self.running = chosen
        if chosen.hand is None:
            if _idle:
                chosen.hand = _idle.pop()
            else:
                chosen.hand = _Hand()
                chosen.hand.start()
            chosen.hand.run_next = functools.partial(self._run, chosen)
        chosen.hand.turn.release()

    def _run(self, fibre: Fibre) -> None:
        try:
            if not fibre.process.dead:
                fibre.target()
        except Gone:
            pass
        except BaseException as error:
            text = "".join(traceback.format_exception(error))
            self.find(CRASH, f"process {fibre.process.number}: {type(error).__name__}: {error}\n{text}")
        fibre.over = True
        self._alive -= 1
        for one in fibre.joining:
            self.wake(one)
        hand, fibre.hand = fibre.hand, None
        assert hand is not None
        chosen = self._next()
        _idle.append(hand)
        self._hand_over(chosen)

    def _next(self) -> Fibre | None:
        while True:
            self._waits += 1
            if not self._alive:
                return None
            if not self._hopeless and (self._waits > _STEPS_MOST or self.now_s > _ENDS_S):
                self.find(HANG, f"not over after {self.now_s:.1f} s and {self._waits} waits\n{self.where()}")
                self.end_all()
            limit_s = self._heap[0][0] if self._heap else math.inf
            if self.groups and not self._hopeless:
                group = min(self.groups, key=Group.next_s)
                next_s = group.next_s()
                if next_s < limit_s:
                    self.now_s = max(self.now_s, next_s)
                    group.advance(min(limit_s, next_s + 0.05))
                    continue
            if not self._heap:
                if not self._hopeless:
                    self.find(HANG, f"nothing is left to happen, and threads wait\n{self.where()}")
                    self.end_all()
                    continue
                return None
            when_s, _, fibre, turn, call = heapq.heappop(self._heap)
            self.now_s = max(self.now_s, when_s)
            if call is not None:
                if not self._hopeless:
                    call()
            elif fibre is not None and not fibre.over and turn == fibre.turn:
                process = fibre.process
                if process.frozen_until_s > self.now_s and not process.dead:
                    self.wake(fibre, process.frozen_until_s)
                    continue
                fibre.turn += 1
                return fibre

    def where(self) -> str:
        """The stacks of all threads that are not over."""
        frames, lines = sys._current_frames(), []
        for process in self.program.processes:
            for fibre in process.fibres:
                frame = (
                    frames.get(fibre.hand.ident or 0) if fibre.hand and not fibre.over and not process.dead else None
                )
                if frame is not None and fibre is not self.running:
                    lines.append(f"process {process.number}, {process.phase} {process.phases[process.phase]}:")
                    lines += [line.rstrip() for line in traceback.format_stack(frame)[3:-2]]
        return "\n".join(lines)

    def end_all(self) -> None:
        """Nothing more is to be learned."""
        self._hopeless = True
        for process in self.program.processes:
            self.kill(process)

    # Faults

    def _suffer(self, process: Process) -> None:
        if process.dead:
            raise Gone
        process.waits += 1
        for fault in process.faults:
            if (fault.phase, fault.nth) == (
                process.phase,
                process.phases[process.phase],
            ) and process.waits > fault.after:
                process.faults.remove(fault)
                self.faults.append(self.now_s)
                self.note(f"process {process.number} in {process.phase}: {fault}")
                if math.isinf(fault.freeze_s):
                    self.counts["killed"] += 1
                    self.kill(process)
                    raise Gone
                self.counts["frozen"] += 1
                process.frozen_until_s = self.now_s + fault.freeze_s
                process.stalled_s = max(process.stalled_s, fault.freeze_s)
                for group in list(self.groups):
                    if process in group.processes:
                        group.freeze(group.processes.index(process), fault.freeze_s)
                break

    def kill(self, process: Process) -> None:
        if process.dead:
            return
        process.dead = True
        for group in list(self.groups):
            if process in group.processes and not self._hopeless:
                group.kill(group.processes.index(process))
        for fibre in process.fibres:
            if not fibre.over and fibre is not self.running:
                fibre.turn += 1
                self.wake(fibre)

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
        addresses = exchange(own)
        if addresses[rank] != own or len(addresses) != size:
            self.find(WRONG_GROUP, f"process {process.number} as rank {rank} of {size} was told {addresses}")
        group = self._groups_of.get(tuple(addresses))
        if group is None:
            owners = [self._owners[address] for address in addresses]
            group = Group(self, owners, rank, options.timeout_s, options.liveness_timeout_s)
            self.groups.append(group)
            self._groups_of[tuple(addresses)] = group
        group.attach(rank)
        core = VirtualCore(group, rank)
        until_s = self.now_s + options.timeout_s
        while not group.core.joined(rank) and not group.core.over(rank) and self.now_s < until_s:
            self.sleep(0.005)
        process.enter("connect")
        return core

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """The modules under test see this world."""

        def own_uuid() -> Any:
            return types.SimpleNamespace(hex=f"{self._uuids.getrandbits(128):032x}")

        clock = types.SimpleNamespace(monotonic=lambda: self.now_s, sleep=self.sleep)
        threads = types.SimpleNamespace(
            Thread=functools.partial(VirtualThread, self), TIMEOUT_MAX=threading.TIMEOUT_MAX
        )
        queues = types.SimpleNamespace(SimpleQueue=functools.partial(VirtualQueue, self), Empty=queue.Empty)
        uuids = types.SimpleNamespace(uuid4=own_uuid)
        exits = types.SimpleNamespace(register=lambda _: None, unregister=lambda _: None)
        torch_stores = types.SimpleNamespace(PrefixStore=VirtualPrefixStore)
        own_mark = lambda: self.running.process.mark  # noqa: E731
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
                (membership, "process_mark", own_mark),
                (membership, "state_here", self.state_here),
                (store_exchange, "time", clock),
                (store_exchange, "uuid", uuids),
                (tuning, "process_mark", own_mark),
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

    def note(self, text: str) -> None:
        self.trace.append(f"{self.now_s:9.4f} {text}")

    def find(self, what: str, detail: str) -> None:
        if not self._hopeless:
            self.note(f"{what}: {detail}")
            self.findings.append((what, f"at {self.now_s:.4f} s: {detail}"))

    def decided(self, key: str, value: bytes) -> None:
        """A group, or who has left, has been written to the store."""
        place, _, number = key.rpartition("/")
        if place.endswith("left"):
            self._left.add(number)
        if not place.endswith("group"):
            return
        names, _ = json.loads(value)
        self.note(f"process {self.running.process.number} decides on group {number}: {names}")
        self.counts["groups"] += 1
        self._decided[int(number)] = self.now_s, names
        owners = [self.process_of(name) for name in names]
        if len({one.number for one in owners}) != len(owners):
            self.find(WRONG_GROUP, f"group {number} has a process twice: {names}")
        if int(number) == 0:
            if len(names) != self.program.size:
                self.find(WRONG_GROUP, f"the first group has {len(names)} members, not {self.program.size}")
            return
        before = self._decided[int(number) - 1][1]
        stayed = [name for name in before if name in names]
        if names[: len(stayed)] != stayed:
            self.find(WRONG_GROUP, f"group {number} has another order than the one before: {before}, then {names}")
        for name in before:
            one = self.process_of(name)
            if name not in names and name not in self._left and not one.dead and one.stalled_s < _HEALTHY_S:
                self.find(WRONG_GROUP, f"group {number} leaves out process {one.number}, which never stood still")

    def process_of(self, name: str) -> Process:
        return self.program.processes[int(name.split(":")[2])]

    def members_running(self) -> list[Process]:
        """Of the latest group."""
        members = [self.process_of(name) for name in self._decided[max(self._decided)][1]] if self._decided else []
        return [one for one in members if not one.dead and not one.leaving]

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
        self.note(f"{told} is rank {comm.rank} of {comm.world_size}, earlier ranks {kept}")

    @contextlib.contextmanager
    def timed(self, process: Process, what: str) -> Iterator[None]:
        """It must not take longer than its time-outs."""
        begin_s, program = self.now_s, self.program
        try:
            yield
        finally:
            stalled_s = 2.0 * sum(one.stalled_s for one in program.processes)
            late_s = begin_s - program.liveness_s - _SLACK_S  # faults from then on may still have to be noticed
            unlucky = (
                1.0
                + sum(when_s > late_s for when_s in self.faults)
                + sum(one.slow[2] >= _LATE_STORE_S for one in program.processes)
            )
            if "join" in what:
                unlucky += program.join_s / program.liveness_s
            most_s = unlucky * (program.liveness_s + _SLACK_S) + stalled_s
            self.longest = max(self.longest, ((self.now_s - begin_s) / most_s, what))
            if not process.dead and self.now_s - begin_s > most_s:
                self.find(
                    HANG, f"{what} of process {process.number} took {self.now_s - begin_s:.1f} s, at most {most_s:.1f}"
                )

    # What a process does

    def run(self) -> None:
        with self.in_place():
            for process in self.program.processes:
                self.at(process.begins_s, functools.partial(self._begin, process))
                self._alive += 1
            self._hand_over(self._next())
            self._main.acquire()
            self._hopeless = True
            self._judge_end()

    def _begin(self, process: Process) -> None:
        self._alive -= 1
        self.spawn(process, functools.partial(self._live, process))

    def _live(self, process: Process) -> None:
        for _ in range(3):
            process.ended = self._run_job(process)
            self.note(f"process {process.number}: {process.ended}")
            if process.ended != "dropped" or not process.restarts or process.stays:
                break
            process.ended = ""
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
            with self.timed(process, "join()"):
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
        if ("has ended" in text or "gone, so nobody" in text) and not self.members_running():
            return f"refused: {text}"
        healthy = process.stalled_s < _HEALTHY_S and not any(one.stalled_s >= _HEALTHY_S or one.dead for one in others)
        late = process.slow[2] >= _LATE_STORE_S
        if (
            ("store of the ranks is gone" in text and not late)
            or "agreed 20 times" in text
            or (healthy and process.named)
        ):
            running = [one for one in others if not one.ended and one.begins_s < self.now_s]
            if "was not taken in" not in text or len(running) == len(others):
                self.find(WRONG_ERROR, f"process {process.number}: {text}")
        return f"refused: {text}"

    def _judge_end(self) -> None:
        self._hopeless = False
        for process in self.program.processes:
            if not process.dead and not process.ended:
                self.find(HANG, f"process {process.number} is in {process.phase}")


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
        world.sleep(program.pause_s * self.process.draw.random())
        if grows:
            self._grow()
        return False

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
            late = "store of the ranks is gone" in str(error) and process.slow[2] >= _LATE_STORE_S
            stalled = any(one.stalled_s >= _HEALTHY_S for one in world.program.processes)
            late = late or (process.stays and stalled and "was not taken in" in str(error))
            if not late and (not (ended or "gone, so nobody has" in str(error)) or running):
                world.find(WRONG_ERROR, f"process {process.number}: {error}")


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def play(seed: int) -> World:
    """Plays one seed."""
    world = World(seed)
    world.run()
    return world


def worst_of(world: World) -> tuple[str, str] | None:
    """The worst finding; ``None``: all is well."""
    return min(world.findings, key=lambda found: SORTS.index(found[0]), default=None)


def explored(first: int, count: int) -> dict[str, Any]:
    """What these seeds showed: counts, and the worst finding of each seed that has one."""
    counts: Counter[str] = Counter()
    failures = []
    for seed in range(first, first + count):
        world = play(seed)
        counts.update(world.counts)
        if (found := worst_of(world)) is not None:
            failures.append({"seed": seed, "what": found[0], "detail": found[1]})
    return {"seeds": count, "counts": dict(counts), "failures": failures}


# The command

_CHUNK_SEEDS = 25
_ABOUT = {
    "sums": "of a process, compared bit by bit with the others'",
    "groups": "that the processes have agreed on",
    "shrunk": "returns of shrink(), by a process",
    "grown": "returns of grow() with newcomers, by a process",
    "joined": "returns of join()",
    "refused": "join() that ended with an error, such as that the job had ended",
    "dropped": "processes that were told that the others had gone on without them",
    "left": "processes that ended in the middle of the job",
    "killed": "processes",
    "frozen": "processes, some several times",
}


def command(
    seeds: Annotated[int, typer.Option(min=1, help="How many programs to play.")] = 10_000,
    first_seed: Annotated[int, typer.Option(min=0, help="The first of them.")] = 0,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes that share the work; default: one a core.")] = None,
    replay: Annotated[int | None, typer.Option(min=0, help="Play this one seed, and tell all about it.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", dir_okay=False, help="Write what was found here.")] = None,
) -> None:
    """Explore random programs that shrink, grow and join under random further faults in virtual time.

    From each seed follow ranks that join, sum in a loop and shrink after each failure, and processes that come later.
    They are killed, freeze, leave, and hear from the store late, also while they agree and connect. All that are left
    must agree on the same ranks in the same order, and compute again in time, with the same bits. Who was left out must
    be told. Ends with status 1 if a seed shows anything else.
    """
    from rich.console import Console
    from rich.progress import TextColumn, TimeRemainingColumn

    from lab.simulated_faults import Died, play_chunks
    from telegrad.tools.cli.interrupts import ended_by_interrupt
    from telegrad.tools.cli.outputs import check_writable, counting, say_file, written
    from telegrad.tools.sim.measure import cores

    console = Console()
    check_writable(json_file, "--json")
    if replay is not None:
        world = play(replay)
        for line in (str(world.program), *world.trace, f"{len(world.findings)} findings, {dict(world.counts)}"):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit(bool(world.findings))
    begin_s, played, counts, failures = time.monotonic(), 0, Counter[str](), []
    chunks = [
        (first, min(_CHUNK_SEEDS, first_seed + seeds - first))
        for first in range(first_seed, first_seed + seeds, _CHUNK_SEEDS)
    ]
    worker = ["env", "PYTHONHASHSEED=0", sys.executable, "-m", "lab.simulated_membership"]
    with (
        ended_by_interrupt(console, "stopped"),
        counting(console, TimeRemainingColumn(), TextColumn("{task.fields[bad]}")) as bar,
    ):
        task = bar.add_task("seeds", total=seeds, bad="")
        for result in play_chunks(chunks, jobs or cores(), worker):
            played += result.seeds
            if isinstance(result, Died):
                failures.append({"seed": result.seed, "what": result.what, "detail": result.detail})
            else:
                for found in map(json.loads, result.texts):
                    counts.update(found["counts"])
                    failures += found["failures"]
            bar.update(task, advance=result.seeds, bad=f"{len(failures)} failures" if failures else "")
    for failure in failures:
        text = f"{failure['what']}: {failure['detail'].splitlines()[0]}"
        again = f"PYTHONHASHSEED=0 python -m lab simulated-membership --replay {failure['seed']}"
        console.print(f"{text}\n  {again}", highlight=False, markup=False, soft_wrap=True)
    for name, about in _ABOUT.items():
        console.print(f"{counts[name]:12,} {name}: {about}", highlight=False)
    console.print(f"{played:,} seeds from {first_seed}, {len(failures)} failures; {time.monotonic() - begin_s:.0f} s")
    if json_file is not None:
        found = {"seeds": played, "first_seed": first_seed, "counts": dict(counts), "failures": failures}
        with written(console, json_file):
            json_file.write_text(json.dumps(found | {"about": _ABOUT}, indent=1) + "\n")
        say_file(console, "found", json_file)
    raise typer.Exit(bool(failures))


def play_main() -> None:
    """What each process of the command runs: see lab.simulated_faults."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin:
        first, count = map(int, line.split())
        texts = []
        for seed in range(first, first + count):
            print(seed, flush=True)
            texts.append(json.dumps(explored(seed, 1)))
        print(json.dumps(texts), flush=True)


if __name__ == "__main__":
    play_main()
