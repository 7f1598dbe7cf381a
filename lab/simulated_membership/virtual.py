"""Processes, their threads, a store and a network in virtual time, in place of the system's.

Each virtual process has threads of its own, of which one runs at a time. Each waits in a call that stands here, so that
a seed gives the same history again.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import json
import math
import queue
import random
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from telegrad import _core

HANG, WRONG_RESULT, WRONG_ERROR, WRONG_GROUP, CRASH = "hang", "wrong result", "wrong error", "wrong group", "crash"

NOTICED_S = 0.9  # a process that stands still for less must not be left out
_STEPS_MOST = 400_000  # waits of all threads of one program
_ENDS_S = 600.0  # virtual time in which a program has to be over
_KEEPS_ABSENT_S = 0.05  # a rank that has not connected yet is frozen for as long, again and again
_PARTING_MOST_S = 5.0  # as the engine's
_ALPHA_S, _BETA_S = 1e-4, 1e-9


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
    """``slow``: from when until when an answer of the store may take so long. ``computes``: after this step, or
    shrink(), for so long, in which it calls nothing, and lives."""

    number: int
    machine: int
    begins_s: float
    stays: bool
    restarts: bool
    named: bool
    leaves_at: int  # this step
    faults: list[Fault]
    slow: tuple[float, float, float]
    computes: tuple[int | str, float]
    draw: random.Random
    dead: bool = False
    ended: str = ""  # how its program has
    leaving: bool = False
    frozen_until_s: float = 0.0
    stalled_s: float = 0.0  # the longest time for which it stood still
    stalled_until_s: float = -math.inf  # when it did so last, for as long as others may notice
    phase: str = ""
    phases: Counter[str] = field(default_factory=Counter)
    waits: int = 0
    fibres: list[Fibre] = field(default_factory=list)
    group: Group | None = None

    @property
    def mark(self) -> str:
        """As ``process_mark`` tells it."""
        return f"m{self.machine}:space:{self.number}:1"

    def stall(self, begin_s: float, duration_s: float) -> None:
        """It stands still, or the store does for it."""
        self.stalled_s = max(self.stalled_s, duration_s)
        if duration_s >= NOTICED_S:
            self.stalled_until_s = max(self.stalled_until_s, begin_s + duration_s)

    def enter(self, phase: str) -> None:
        self.phase, self.waits = phase, 0
        self.phases[phase] += 1


class Group:
    """The connections of one attempt, over a simulated network."""

    def __init__(
        self, clock: Clock, processes: list[Process], own: int, timeout_s: float, liveness_s: float | None
    ) -> None:
        self.clock, self.processes = clock, processes
        self.begins_s = clock.now_s
        self.core = _core.Simulation.make(
            len(processes), _ALPHA_S, _BETA_S, 0.0, 0.5, clock.draw.getrandbits(32), timeout_s, liveness_s
        )
        self.absent = set(range(len(processes))) - {own}
        self.left: set[int] = set()
        self.waiting: dict[Fibre, Any] = {}
        self.kept: list[Any] = []
        for rank, process in enumerate(processes):
            if process.dead:
                self.kill(rank)
            elif process.frozen_until_s > clock.now_s:
                self.freeze(rank, process.frozen_until_s - clock.now_s)
        self._keep_absent()

    def _keep_absent(self) -> None:
        self.absent = {rank for rank in self.absent if not self.processes[rank].dead}
        if self.absent and len(self.left) < len(self.processes):
            for rank in self.absent:
                self.freeze(rank, _KEEPS_ABSENT_S)
            self.clock.at(self.clock.now_s + _KEEPS_ABSENT_S, self._keep_absent)

    def attach(self, rank: int) -> None:
        self.absent.discard(rank)
        frozen_s = self.processes[rank].frozen_until_s - self.clock.now_s
        if frozen_s > 0.0:
            self.freeze(rank, frozen_s)

    def catch_up(self) -> None:
        """The network's time is this clock's, at least."""
        while self.core.advance(self.clock.now_s - self.begins_s):
            self.wake()

    def kill(self, rank: int) -> None:
        self.catch_up()
        self.core.kill(rank, self.clock.draw.choice([0.0, 0.01, 0.5]))
        self.leave(rank)

    def freeze(self, rank: int, duration_s: float) -> None:
        self.catch_up()
        self.core.freeze(rank, duration_s + self.clock.now_s - self.begins_s - self.core.now_s())

    def close(self, rank: int) -> None:
        """A process that has not connected, and will not."""
        if rank in self.absent and not self.processes[rank].dead:
            self.absent.discard(rank)
            self.catch_up()
            self.core.part(rank)
            self.leave(rank)

    def leave(self, rank: int) -> None:
        self.left.add(rank)
        if len(self.left) == len(self.processes) and self in self.clock.groups:
            self.clock.groups.remove(self)

    def next_s(self) -> float:
        return self.begins_s + self.core.next_s()

    def advance(self, until_s: float) -> None:
        if self.core.advance(until_s - self.begins_s):
            self.wake()

    def wake(self) -> None:
        at_s = max(self.clock.now_s, self.begins_s + self.core.now_s())
        for fibre in [fibre for fibre, request in self.waiting.items() if request.done()]:
            del self.waiting[fibre]
            self.clock.wake(fibre, at_s)


class VirtualRequest:
    """Of an operation of a group; whoever waits for it lets virtual time pass."""

    def __init__(self, group: Group, request: Any) -> None:
        self._group, self._request = group, request

    def wait(self, timeout_s: float | None = None) -> bool:
        clock = self._group.clock
        until_s = math.inf if timeout_s is None else clock.now_s + timeout_s
        while not self._request.done() and clock.now_s < until_s:
            self._group.waiting[clock.running] = self._request
            try:
                clock.wait(until_s)
            finally:
                self._group.waiting.pop(clock.running, None)
        return bool(self._request.done() and self._request.wait(None))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


_BEGIN = {"all_gather", "broadcast", "barrier", "all_reduce", "all_to_all", "reduce_scatter"}
_BEGIN |= {"all_gather_sparse", "all_reduce_sparse", "all_reduce_sparse_into", "all_reduce_topk"}


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

    def hint_at_stalls(self, *_: str) -> None:
        """Ranks that call nothing are told of by nobody here."""

    def report(self) -> str:
        self.group.catch_up()
        found = json.loads(self._core.report())
        for peer in found["peers"]:  # the network's time stands still while nothing happens there
            peer["heard_s_ago"] += self.group.clock.now_s - self.group.begins_s - self.group.core.now_s()
        return json.dumps(found)

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
        clock = self.group.clock
        until_s = clock.now_s + _PARTING_MOST_S
        while not self.group.core.over(self.rank) and clock.now_s < until_s:
            clock.sleep(0.01)
        self.group.catch_up()
        self.group.core.shut_down(self.rank)
        self.group.leave(self.rank)


# Stand-ins for the system, which the modules under test get in its place


class VirtualStore:
    """As ``torch.distributed.Store``. An answer takes time before and after it takes effect."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.held: dict[str, bytes] = {}

    def _asked(self, effect: Callable[[], Any]) -> Any:
        clock = self._clock
        process = clock.running.process
        process_s, (begin_s, end_s, most_s) = 1e-4 + 1e-3 * process.draw.random(), process.slow
        after_s = 0.0
        if begin_s <= clock.now_s < end_s and process.draw.random() < 0.3:
            process_s, after_s = process.draw.uniform(0.0, most_s), process.draw.uniform(0.0, most_s)
            process.stall(clock.now_s, process_s + after_s)
        clock.sleep(process_s)
        found = effect()
        if after_s:
            clock.sleep(after_s)
        return found

    def set(self, key: str, value: str | bytes) -> None:
        def done() -> None:
            self.held[key] = _bytes(value)
            self._clock.decided(key, self.held[key])

        self._asked(done)

    def get(self, key: str) -> bytes:
        def found() -> bytes | None:
            return self.held.get(key)

        if (value := self._asked(found)) is None:
            self._clock.find(HANG, f"a value that is not there is asked for: {key}")
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
                self._clock.decided(key, own)
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

    def __init__(self, clock: Clock, target: Callable[[], Any], **_: Any) -> None:
        self._clock, self._target = clock, target
        self._fibre: Fibre | None = None

    def start(self) -> None:
        self._fibre = self._clock.spawn(self._clock.running.process, self._target)

    def join(self, timeout_s: float = math.inf) -> None:
        assert self._fibre is not None
        until_s = self._clock.now_s + timeout_s
        while not self._fibre.over and self._clock.now_s < until_s:
            self._fibre.joining.append(self._clock.running)
            self._clock.wait(until_s)


class VirtualQueue:
    """As ``queue.SimpleQueue``."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._held, self._waiting = clock, list[Any](), list[Fibre]()

    def put(self, one: Any) -> None:
        self._held.append(one)
        if self._waiting:
            self._clock.wake(self._waiting.pop(0))

    def get(self, timeout: float | None = None) -> Any:
        until_s = math.inf if timeout is None else self._clock.now_s + timeout
        while not self._held:
            if self._clock.now_s >= until_s:
                raise queue.Empty
            self._waiting.append(self._clock.running)
            try:
                self._clock.wait(until_s)
            finally:
                if self._clock.running in self._waiting:
                    self._waiting.remove(self._clock.running)
        return self._held.pop(0)


class VirtualFuture:
    """As ``concurrent.futures.Future``."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._waiting = clock, list[Fibre]()
        self._value: Any = None
        self._error: BaseException | None = None
        self._done = False

    def _end(self) -> None:
        self._done = True
        while self._waiting:
            self._clock.wake(self._waiting.pop())

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
        until_s = self._clock.now_s + timeout_s
        while not self._done and self._clock.now_s < until_s:
            self._waiting.append(self._clock.running)
            self._clock.wait(until_s)

    def result(self, timeout_s: float) -> Any:
        assert timeout_s == 0
        if not self._done:
            raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._value


class Clock:
    """The time of a program's processes: it goes on once all of their threads wait."""

    def __init__(self, processes: Sequence[Process], seed: int) -> None:
        self.processes, self.draw = processes, random.Random(seed)
        self.now_s = 0.0
        self.groups: list[Group] = []
        self.findings: list[tuple[str, str]] = []
        self.counts: Counter[str] = Counter()
        self.trace: list[str] = []
        self.faults: list[float] = []  # when
        self.running: Fibre = None  # type: ignore[assignment]  # none does outside of run()
        self._heap: list[tuple[float, int, Fibre | None, int, Callable[[], None] | None]] = []
        self._order = itertools.count()
        self._main = threading.Lock()
        self._main.acquire()
        self._waits = self._alive = 0
        self._hopeless = False

    def run(self, begin: Callable[[Process], None]) -> None:
        """Calls ``begin`` for each process in its time, in a thread of that one, until all threads are over."""
        for process in self.processes:
            self.at(process.begins_s, functools.partial(self._begin, process, begin))
            self._alive += 1
        self._hand_over(self._next())
        self._main.acquire()

    def _begin(self, process: Process, begin: Callable[[Process], None]) -> None:
        self._alive -= 1
        self.spawn(process, functools.partial(begin, process))

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
        for process in self.processes:
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
        for process in self.processes:
            self.kill(process)

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
                process.stall(self.now_s, fault.freeze_s)
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

    def note(self, text: str) -> None:
        self.trace.append(f"{self.now_s:9.4f} {text}")

    def find(self, what: str, detail: str) -> None:
        if not self._hopeless:
            self.note(f"{what}: {detail}")
            self.findings.append((what, f"at {self.now_s:.4f} s: {detail}"))

    def decided(self, key: str, value: bytes) -> None:
        """Something that others may go by has been written to the store."""


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
