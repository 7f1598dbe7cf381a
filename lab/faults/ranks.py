"""What the ranks of ``python -m lab faults`` do: call after call, until it happens to one of them.

Every rank checks every result that it gets against the known values, and says in one line of JSON how it ended. Values
are small integers, so that sums are exact in whatever order they are taken.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import threading
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from lab.faults.trials import Call, Options, Trial, draw
from telegrad import Communicator, SparseVector
from telegrad.errors import TransportError
from telegrad.launch import join, rank_and_size

Array = npt.NDArray[Any]

OPERATION_TIMEOUT_S = 600.0
"""More than any trial may take: nothing here is found out by waiting for it."""
_JOIN_TIMEOUT_S = 60.0
_STRIKE_S = 30.0
_ABOUT = ("rank", "peer", "host", "operation", "tag")
_UNTOUCHED = -7.0
_AVERAGE_TOLERANCE = 2.0**-21  # the one division rounds


class DeliberateMistake(Exception):  # noqa: N818
    """What one rank raises."""


def rank_main(seed: str, options: str) -> None:
    """One rank of the trial with this seed."""
    trial = draw(int(seed), Options.from_json(options))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a parent in the background may have ignored it
    # The engine that they start has descriptors for as long as the process lives.
    for throwaway in Communicator.local(2):
        throwaway.close()
    descriptors = _descriptors()
    rank = _Rank(trial)
    try:
        # The others may be through with it, and struck, while this rank is still joining.
        communicator = join(
            timeout_s=OPERATION_TIMEOUT_S,
            liveness_timeout_s=trial.liveness_timeout_s,
            join_timeout_s=_JOIN_TIMEOUT_S,
        )
    except TransportError as error:
        rank.note(error)
        rank.say_how_it_ended(_descriptors() - descriptors)
        return
    say(joined=time.monotonic(), pid=os.getpid())
    try:
        # Where the mistake is not caught, the interpreter's exit has to end the communicator.
        with contextlib.nullcontext() if trial.uncaught else communicator:
            rank.make_all_calls_noting_the_end(communicator)
    except TransportError:
        pass
    except (DeliberateMistake, KeyboardInterrupt):
        if trial.uncaught:
            rank.say_how_it_ended()
            raise
    begin = time.monotonic()
    communicator.close()
    rank.closed_s = time.monotonic() - begin
    rank.say_how_it_ended(_descriptors() - descriptors)


def say(**facts: object) -> None:
    """One line, at once and in one piece: it may be the last thing that this process does."""
    os.write(1, (json.dumps(facts) + "\n").encode())


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


class _Rank:
    """One rank on its way through a trial, and what it has seen."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self._me, _ = rank_and_size()
        self._chance = random.Random(f"{trial.seed}/{self._me}")
        self._last = len(trial.calls_of(self._me)) - 1
        self._strike: _Strike | None = None
        self._called_s: list[float] = []
        self._waits_for = 0  # the number of a call
        self._waits_since_s = 0.0
        self._checked = 0
        self._wrong: list[str] = []
        self._mismatched: _Started | None = None
        self._passed_mismatch = False
        self._end: dict[str, object] = {"error": None}
        self.closed_s: float | None = None

    def make_all_calls(self, communicator: Communicator) -> None:
        """Raises what the communicator raises, or this rank's own mistake."""
        if self._me == self._trial.culprit and not self._trial.is_mismatch:
            self._strike = _Strike(self._trial, communicator)
        number = 0
        for batch in self._trial.batches_of(self._me):
            if self._chance.random() < 0.3:
                time.sleep(self._chance.uniform(0.0, 0.003))
            started = [
                _Started(call, number + offset, communicator, blocking=len(batch) == 1)
                for offset, call in enumerate(batch)
            ]
            for one in started:
                self._before(one)
                self._called_s.append(self._waiting_for(one))
                one.start()
            self._chance.shuffle(started)
            for one in started:
                if len(batch) > 1:
                    self._waiting_for(one)
                    one.wait()
                self._check(one)
            number += len(batch)

    def make_all_calls_noting_the_end(self, communicator: Communicator) -> None:
        """The same; when it ended is noted before the communicator is closed, which takes a time of its own."""
        try:
            self.make_all_calls(communicator)
        except (TransportError, DeliberateMistake, KeyboardInterrupt) as error:
            self.note(error)
            raise

    def _waiting_for(self, one: _Started) -> float:
        self._waits_for = one.number
        self._waits_since_s = time.monotonic()
        return self._waits_since_s

    def _before(self, one: _Started) -> None:
        if self._trial.is_mismatch and one.number == self._trial.at:
            self._mismatched = one
        if self._strike is None:
            return
        if one.number == self._trial.at:
            self._strike.begin()
        if one.number == self._last:
            self._strike.await_end()  # were it too late, the others would be through and hear of nothing

    def _check(self, one: _Started) -> None:
        self._checked += 1
        if one is self._mismatched:
            self._passed_mismatch = True
        fault = one.fault()
        if fault:
            self._wrong.append(f"call {one.number}, {one.call}: {fault}")

    def note(self, error: BaseException) -> None:
        """What ended this rank's calls."""
        self._end = {
            "error": type(error).__name__,
            "text": str(error),
            "at_s": time.monotonic(),
            "at_call": self._waits_for,
            "since_s": self._waits_since_s,
            **{name: getattr(error, name) for name in _ABOUT if hasattr(error, name)},
        }

    def say_how_it_ended(self, descriptors: int | None = None) -> None:
        touched = None
        if self._mismatched is not None and not self._mismatched.call.rooted:
            touched = not self._passed_mismatch and self._mismatched.touched()
        say(
            ended=self._end,
            closed_s=self.closed_s,
            called_s=self._called_s,
            checked=self._checked,
            wrong=self._wrong,
            passed_mismatch=self._passed_mismatch,
            touched=touched,
            descriptors=descriptors,
        )


class _Strike:
    """What happens to the culprit: by itself, from another thread, so that it hits in the middle of a collective."""

    def __init__(self, trial: Trial, communicator: Communicator) -> None:
        self._trial = trial
        self._communicator = communicator
        self._thread = threading.Thread(target=self._run, daemon=True)

    def begin(self) -> None:
        if self._trial.kind == "exception":
            time.sleep(self._trial.delay_s)
            say(fault=time.monotonic())
            raise DeliberateMistake(f"mistake {self._trial.seed}")
        if self._trial.kind != "none":
            self._thread.start()

    def await_end(self) -> None:
        if self._thread.ident is not None:
            self._thread.join(_STRIKE_S)

    def _run(self) -> None:
        time.sleep(self._trial.delay_s)
        say(fault=time.monotonic())
        match self._trial.kind:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "freeze":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "interrupt":
                os.kill(os.getpid(), signal.SIGINT)
            case "abort":
                self._communicator.abort(f"mistake {self._trial.seed}")


class _Started:
    """One call with its input, and what must come out."""

    def __init__(self, call: Call, number: int, communicator: Communicator, *, blocking: bool) -> None:
        self.call = call
        self.number = number
        self._communicator = communicator
        self._blocking = blocking
        self._salt = 37 * number % 101
        self._work: Any = None
        self._result: Any = None
        me = communicator.rank
        if call.family == "sparse":
            self._stream = SparseVector.trusted(*self._entries(me), call.count)
            self._x: Array = np.full(call.count, _UNTOUCHED, np.float32)
        else:
            self._x = self._dense(me)

    def start(self) -> None:
        """Begins the call; one that blocks is over afterwards."""
        call, communicator, later = self.call, self._communicator, not self._blocking
        match call.operation:
            case "all_reduce":
                self._work = communicator.all_reduce(self._x, call.reduction, algorithm=call.algorithm, async_op=later)
            case "sparse":
                self._work = communicator.all_reduce(
                    self._stream, call.reduction, switch_factor=call.switch_factor, async_op=later
                )
            case "sparse_into":
                self._work = communicator.all_reduce_into(
                    self._stream, self._x, call.reduction, switch_factor=call.switch_factor, async_op=later
                )
            case "all_gather":
                self._work = communicator.all_gather(self._x, async_op=later)
            case "broadcast":
                self._work = communicator.broadcast(self._x, call.root, async_op=later)
            case _:
                self._work = communicator.barrier(async_op=later)
        if self._blocking:
            self._result = self._work

    def wait(self) -> None:
        """Only for a call that did not block."""
        self._result = self._work.result()

    def fault(self) -> str:
        """What is wrong with the result; nothing if it is as it must be."""
        if self.call.operation == "barrier":
            return ""
        found = {"sparse": lambda: self._result.to_dense(), "all_gather": lambda: self._result}.get(
            self.call.operation, lambda: self._x
        )()
        wanted = self._wanted()
        if found.shape != wanted.shape:
            return f"shape {found.shape}, not {wanted.shape}"
        if self.call.reduction == "avg":
            off = np.abs(found * self._communicator.world_size - wanted) > np.abs(wanted) * _AVERAGE_TOLERANCE
        else:
            off = found != wanted
        at = np.argwhere(off)
        return f"{len(at)} of {off.size} values, at {at[0].tolist()} {found[tuple(at[0])]}" if len(at) else ""

    def touched(self) -> bool:
        """Whether the caller's output has changed."""
        if self.call.operation == "sparse_into":
            return bool((self._x != _UNTOUCHED).any())
        if self.call.operation == "all_reduce":
            return bool((self._x != self._dense(self._communicator.rank)).any())
        return False

    def _dense(self, rank: int) -> Array:
        """Each rank adds a power of two of its own: a part that is missing or comes twice shows."""
        values: Array = (np.arange(self.call.count) + self._salt) % 1009 + 2**rank
        return values.astype(np.int32 if self.call.dtype == "i32" else np.float32)

    def _entries(self, rank: int) -> tuple[npt.NDArray[np.uint32], Array]:
        stride = max(1, round(1 / self.call.density)) + rank
        indices = np.arange((self._salt + 3 * rank) % stride, self.call.count, stride, dtype=np.uint32)
        values = (indices % 13 + 2**rank).astype(np.float32)
        if self.call.dtype == "bf16":  # without torch: integers as small as these are the upper half of float32
            return indices, (values.view(np.uint32) >> 16).astype(np.uint16)
        return indices, values

    def _wanted(self) -> Array:
        """The result; of an average, times the number of ranks."""
        ranks = range(self._communicator.world_size)
        match self.call.operation:
            case "broadcast":
                return self._dense(self.call.root)
            case "all_gather":
                return np.stack([self._dense(rank) for rank in ranks])
            case "all_reduce":
                return np.asarray((self._dense(0) - 1) * len(ranks) + sum(2**rank for rank in ranks))
        total: Array = np.zeros(self.call.count, np.float32)
        for rank in ranks:
            indices, values = self._entries(rank)
            total[indices] += values
        return total
