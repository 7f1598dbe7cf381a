"""What the ranks of test_failures.py do. Each prints one line of JSON about how it ended."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable

import numpy as np

from telegrad import Communicator, errors
from telegrad.launch import join


def _say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def _until_failure(communicator: Communicator, work: Callable[[], object]) -> None:
    """Calls ``work`` until it raises, and says what it raised."""
    try:
        for number in range(1_000_000):
            work()
            if number == 5:
                _say(ready=True)
    except errors.TransportError as error:
        _say(error=type(error).__name__, peer=error.peer, rank=error.rank, text=str(error), at_s=time.monotonic())
    begin = time.monotonic()
    communicator.close()
    _say(closed_s=time.monotonic() - begin)


def reduce_for_ever(count: str, algorithm: str) -> None:
    """The test kills or freezes one of the ranks meanwhile."""
    communicator = join(timeout_s=60.0, liveness_timeout_s=2.0)
    x = np.ones(int(count), np.float32)
    _until_failure(communicator, lambda: communicator.all_reduce(x, "avg", algorithm=algorithm))


def wait_for_one() -> None:
    """All but rank 1 wait for it; it does nothing."""
    communicator = join(timeout_s=60.0, liveness_timeout_s=2.0)
    if communicator.rank == 1:
        _say(ready=True)
        time.sleep(60)
    _say(ready=True)
    _until_failure(communicator, communicator.barrier)


def reduce_after_a_close() -> None:
    """Rank 1 closes; the others call once more, after it has gone."""
    communicator = join(timeout_s=60.0, liveness_timeout_s=None)
    communicator.barrier()
    if communicator.rank == 1:
        communicator.close()
        return
    time.sleep(7)
    _until_failure(communicator, communicator.barrier)


def idle_then_reduce() -> None:
    """Nobody is in a call when rank 1 dies; the survivors hear of it at their next one."""
    communicator = join(timeout_s=60.0, liveness_timeout_s=2.0)
    communicator.barrier()
    _say(ready=True)
    time.sleep(60 if communicator.rank == 1 else 3)
    _until_failure(communicator, communicator.barrier)


def call_differently(what: str) -> None:
    """Rank 1 calls something else than the others. A slow rank may hear of it in the first barrier already."""
    communicator = join(timeout_s=30.0, join_timeout_s=30.0)
    odd = communicator.rank == 1
    x = np.ones(1000 + odd if what == "count" else 1000, np.float32)
    try:
        communicator.barrier()
        match what:
            case "count":
                communicator.all_reduce(x)
            case "reduction":
                communicator.all_reduce(x, "avg" if odd else "sum")
            case "algorithm":
                communicator.all_reduce(x, algorithm="ring" if odd else "recursive_doubling")
            case "operation":
                communicator.barrier() if odd else communicator.all_reduce(x)
            case "root":
                communicator.broadcast(x, communicator.rank % 2)
                communicator.barrier()  # who was not concerned hears of it at the next call
            case "dtype":
                _reduce_as(communicator, "bf16" if odd else "f32")
            case "fewer calls":
                if not odd:
                    communicator.all_reduce(x)
                communicator.barrier()
    except errors.TransportError as error:
        _say(
            error=type(error).__name__,
            peer=error.peer,
            rank=error.rank,
            text=str(error),
            untouched=bool((x == 1).all()),
        )
    else:
        _say(error=None)
    communicator.close()


def _reduce_as(communicator: Communicator, dtype: str) -> None:
    from cases import Case, Started

    Started(Case("dense", 1000, dtype), communicator).outcome()


def run_into_the_time_limit() -> None:
    """Rank 1 is alive but never calls."""
    communicator = join(timeout_s=1.0, liveness_timeout_s=30.0)
    if communicator.rank == 1:
        time.sleep(4)
        _say(error="none, it slept")
    else:
        _until_failure(communicator, communicator.barrier)


def wait_for_ctrl_c() -> None:
    """Rank 0 waits for the others, which never call, and gets SIGINT."""
    communicator = join(timeout_s=60.0)
    _say(ready=True)
    if communicator.rank != 0:
        time.sleep(60)
    try:
        communicator.barrier()
    except KeyboardInterrupt:
        _say(error="KeyboardInterrupt", at_s=time.monotonic())
    begin = time.monotonic()
    communicator.close()
    _say(closed_s=time.monotonic() - begin)


def fork_and_go_on(how: str) -> None:
    """A forked child ends, in every way that runs our code; the parent's communicator must not notice."""
    communicator = join(timeout_s=30.0)
    x = np.ones(100_000, np.float32)
    pending = communicator.all_reduce(x, async_op=True)
    child = os.fork()
    if child == 0:
        try:
            communicator.barrier()
            os._exit(9)
        except ValueError as error:
            if "forked" not in str(error):
                os._exit(8)
        if how == "exit":
            sys.exit(0)
        if how == "close":
            communicator.close()
            del communicator, pending
        os._exit(0) if how == "_exit" else sys.exit(0)
    _, status = os.waitpid(child, 0)
    pending.wait()
    for _ in range(20):
        communicator.all_reduce(x, "avg")
    communicator.barrier()
    communicator.close()
    _say(error=None, child=os.waitstatus_to_exitcode(status), right=bool((x == communicator.world_size).all()))


def end_by_mistake() -> None:
    """Rank 1 ends with an exception; the others hear why."""
    communicator = join(timeout_s=30.0)
    if communicator.rank == 1:
        communicator.barrier()
        raise LookupError("a mistake of rank 1")
    _until_failure(communicator, communicator.barrier)


def ignore_interrupts_of_others() -> None:
    """Other signals than Ctrl-C do not end a wait."""
    communicator = join(timeout_s=30.0)
    caught: list[int] = []
    signal.signal(signal.SIGUSR2, lambda number, _: caught.append(number))
    _say(ready=True)
    if communicator.rank == 1:
        time.sleep(2)
    communicator.barrier()
    communicator.close()
    _say(error=None, caught=len(caught))
