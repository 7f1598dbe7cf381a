"""What the ranks of test_failures.py do. Each prints one line of JSON about how it ended."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
from joined import join

from telegrad import Communicator, SparseVector, errors
from telegrad.launch import rank_and_size
from telegrad.launch.joining import exchange


def _say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def _say_failure(error: errors.TransportError) -> None:
    _say(
        error=type(error).__name__,
        peer=error.peer,
        host=error.host,
        rank=error.rank,
        text=str(error),
        at_s=time.monotonic(),
    )


def _until_failure(communicator: Communicator, work: Callable[[], object]) -> None:
    """Calls ``work`` until it raises, and says what it raised."""
    try:
        for number in range(1_000_000):
            work()
            if number == 5:
                _say(ready=True)
    except errors.TransportError as error:
        _say_failure(error)
    begin = time.monotonic()
    communicator.close()
    _say(closed_s=time.monotonic() - begin)


def reduce_for_ever(count: str, algorithm: str, liveness_timeout_s: str = "8") -> None:
    """The test kills or freezes one of the ranks meanwhile."""
    communicator = join(timeout_s=60.0, liveness_timeout_s=float(liveness_timeout_s))
    x = np.ones(int(count), np.float32)
    _until_failure(communicator, lambda: communicator.all_reduce(x, "avg", algorithm=algorithm))


def reduce_by_mpi(count: str, timeout_s: str = "30") -> None:
    """Calls of MPI_Iallreduce, in which the library that the test has preloaded makes rank 1 fail."""
    communicator = join(timeout_s=float(timeout_s), liveness_timeout_s=2.0)
    x = np.empty(int(count), np.float32)

    def reduce() -> None:
        x.fill(communicator.rank + 1)
        communicator.all_reduce(x, algorithm="mpi")
        assert (x == 6).all(), x

    _until_failure(communicator, reduce)
    _say(untouched=bool((x == communicator.rank + 1).all()))


def differ_in_bits() -> None:
    """The preloaded library changes one bit of rank 1's results."""
    communicator = join(timeout_s=30.0)
    x = np.full(70_001, communicator.rank, np.float64)
    x[7] = np.nan
    communicator.all_reduce(x, algorithm="mpi")
    bits = communicator.all_gather(x.view(np.uint64))
    communicator.close()
    _say(
        right=bool((np.delete(x, 7) == 3).all()),
        nan=hex(int(bits[0, 7])),
        equal=bool((bits == bits[0]).all()),
    )


def wait_for_one() -> None:
    """All but rank 1 wait for it; it does nothing."""
    communicator = join(timeout_s=60.0, liveness_timeout_s=8.0)
    if communicator.rank == 1:
        _say(ready=True)
        time.sleep(60)
    _say(ready=True)
    _until_failure(communicator, communicator.barrier)


def end_unmet(number: str, call: str) -> None:
    """Rank 1 ends by that signal. Others have sent it nothing yet; those that receive wait for what nobody sends."""
    try:
        communicator = join(timeout_s=40.0, liveness_timeout_s=5.0 if int(number) == signal.SIGSTOP else 30.0)
    except errors.TransportError as error:  # a slow rank has not joined yet
        _say_failure(error)
        return
    if communicator.rank == 1:
        os.kill(os.getpid(), int(number))
        time.sleep(60)
    x = np.empty(1, np.float32)
    source = {0: 5, 5: 0}.get(communicator.rank, 0)
    _until_failure(communicator, communicator.barrier if call == "barrier" else lambda: communicator.recv(x, source))


def wait_for_one_another() -> None:
    """All receive what nobody sends."""
    communicator = join(timeout_s=40.0, liveness_timeout_s=None)
    x = np.empty(1, np.float32)
    _say(ready=True)
    _until_failure(communicator, lambda: communicator.recv(x, {0: 5, 5: 0}.get(communicator.rank, 0)))


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
    communicator = join(timeout_s=60.0, liveness_timeout_s=8.0)
    communicator.barrier()
    _say(ready=True)
    time.sleep(60 if communicator.rank == 1 else 3)
    _until_failure(communicator, communicator.barrier)


def call_differently(what: str) -> None:
    """Rank 1 calls something else than the others. A slow rank may hear of it in the first barrier already."""
    communicator = join(timeout_s=30.0)
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
            case "mpi":
                communicator.all_reduce(x, algorithm="ring" if odd else "mpi")
            case "count of mpi":
                communicator.all_reduce(np.ones(1000 + odd, np.float32), algorithm="mpi")
            case "operation of mpi":
                communicator.barrier() if odd else communicator.all_reduce(x, algorithm="mpi")
            case "operation":
                communicator.barrier() if odd else communicator.all_reduce(x)
            case "root":
                communicator.broadcast(x, communicator.rank % 2)
                communicator.barrier()  # who was not concerned hears of it at the next call
            case "order":
                calls = [lambda: communicator.all_reduce(x, async_op=True), lambda: communicator.barrier(async_op=True)]
                for work in [call() for call in (calls[::-1] if odd else calls)]:
                    work.wait()
            case "everybody waits for another root":
                communicator.broadcast(x, 0 if odd else 1)
            case "dtype of a broadcast":
                communicator.broadcast(x.view(np.int32) if odd else x, 0)
                communicator.barrier()
            case "dtype of an all_gather":
                communicator.all_gather(x.view(np.int32) if odd else x)
            case "switch_factor":
                stream = SparseVector(np.arange(10, dtype=np.uint32), x[:10].copy(), 1000)
                communicator.all_reduce_into(stream, x, switch_factor=0.5 if odd else 1.0)
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
    """Rank 1 is alive but never calls. The barriers before it must pass within the same limit on a busy machine."""
    communicator = join(timeout_s=3.0, liveness_timeout_s=30.0)
    for _ in range(6):
        communicator.barrier()
    if communicator.rank == 1:
        time.sleep(9)
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
        is_mpi = communicator.driver == "mpi"
        if how == "close":
            communicator.close()
            del communicator, pending
        if how != "_exit" and not is_mpi:
            sys.exit(0)
        if how != "_exit":  # without mpi4py's part of it, which would be MPI_Finalize, of the parent's MPI
            atexit._run_exitfuncs()
        os._exit(0)
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


def hang_at_rank_1() -> None:
    """Rank 1 does not call the third operation."""
    communicator = join()
    communicator.barrier()
    communicator.barrier()
    _say(ready=True)
    if communicator.rank != 1:
        communicator.barrier()
    time.sleep(60)


def hold_pythons_lock() -> None:
    """Rank 1 is for long in a C function that keeps Python's lock; the others wait for it."""
    communicator = join(liveness_timeout_s=3.0)
    communicator.barrier()
    if communicator.rank == 1:
        ctypes.PyDLL(None).sleep(5)
    x = np.ones(10, np.float32)
    communicator.all_reduce(x)
    communicator.close()
    _say(error=None, right=bool((x == communicator.world_size).all()))


def leave_a_child() -> None:
    """Rank 1 forks a child that outlives it, with all its connections open."""
    communicator = join(liveness_timeout_s=None)
    x = np.ones(100_000, np.float32)
    communicator.all_reduce(x)
    if communicator.rank == 1:
        child = os.fork()
        if child == 0:
            os.setsid()
            time.sleep(60)
            os._exit(0)
        _say(ready=True, child=child)
    _until_failure(communicator, lambda: communicator.all_reduce(x, "avg"))


def abort_and_close_at_once() -> None:
    """Rank 0 does, while rank 1 is stopped, which goes on when rank 0 has left."""
    communicator = join(timeout_s=60.0, liveness_timeout_s=None)

    def call() -> None:
        pids = communicator.all_gather(np.array([os.getpid()])).ravel()  # a slow rank may hear of the end here already
        if communicator.rank == 0:
            time.sleep(0.3)  # the others are in their barrier
            os.kill(pids[1], signal.SIGSTOP)
            communicator.abort("the disk is full")
            communicator.close()
            os.kill(pids[1], signal.SIGCONT)
            sys.exit(0)
        communicator.barrier()

    _until_failure(communicator, call)


def abort_from_a_thread() -> None:
    """Rank 1 waits in one thread and aborts in another."""
    communicator = join(timeout_s=60.0)

    def call() -> None:
        communicator.barrier()  # a slow rank may hear of the end here already
        if communicator.rank == 1:
            threading.Timer(0.3, communicator.abort, ["enough of it"]).start()
        # The last rank never calls: all others wait.
        if communicator.rank == 2:
            time.sleep(2)
        communicator.barrier()

    _until_failure(communicator, call)


def fail_and_look_around() -> None:
    """After a failure and close(), this process has no more descriptors, threads and shared memory than before."""

    def around() -> set[str]:
        found = {f"thread {path}" for path in os.listdir("/proc/self/task")}
        for descriptor in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):
                found.add(f"descriptor {descriptor} {os.readlink(f'/proc/self/fd/{descriptor}')}")
        with open("/proc/self/maps") as maps:
            found |= {line.split(maxsplit=5)[5] for line in maps if "/dev/shm" in line or "/SYSV" in line}
        return found

    join().close()  # what stays for ever comes with the first
    before = around()
    communicator = join(timeout_s=30.0)
    failed = None
    x = np.ones(300_000, np.float32)
    works = []
    try:
        communicator.all_reduce(x)  # a slow rank may hear of the end here already
        if communicator.rank != 1:
            works.append(communicator.all_reduce(x, async_op=True))
        if communicator.rank == 1:
            communicator.abort("on purpose")
            communicator.barrier()
        while works:
            works.pop().wait()
    except errors.TransportError as error:
        failed = type(error).__name__
    communicator.close()
    del communicator
    gc.collect()
    _say(error=failed, left=sorted(around() - before))


def look_after_a_death_with_a_child() -> None:
    """Rank 0 has a forked child, as with DataLoader workers, when rank 1 dies."""
    communicator = join(liveness_timeout_s=None)
    communicator.barrier()
    child = os.fork() if communicator.rank == 0 else -1
    if child == 0:
        time.sleep(60)
        os._exit(0)
    _say(ready=True)
    try:
        communicator.barrier()
        time.sleep(60 if communicator.rank == 1 else 0)
        communicator.barrier()
    except errors.PeerFailed:
        begin = time.process_time()
        time.sleep(2)
        _say(idle_cpu_s=time.process_time() - begin)
    os.kill(child, signal.SIGKILL)
    communicator.close()


def die_before_joining() -> None:
    """Rank 1 gives its address and dies before anybody can reach it."""
    rank, size = rank_and_size()
    swap = exchange(30.0)

    def and_then(blob: bytes) -> list[bytes]:
        everybody = swap(blob)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1)
        return everybody

    try:
        Communicator.from_exchange(rank, size, and_then)
    except errors.TransportError as error:
        _say(error=type(error).__name__, peer=error.peer, text=str(error))


def join_one_who_does_not() -> None:
    """Rank 1 gives its address and does nothing more."""
    rank, size = rank_and_size()
    swap = exchange(30.0)

    def and_then(blob: bytes) -> list[bytes]:
        everybody = swap(blob)
        _say(ready=True)
        time.sleep(60 if rank == 1 else 0)
        return everybody

    try:
        Communicator.from_exchange(rank, size, and_then)
    except KeyboardInterrupt:
        _say(error="KeyboardInterrupt")
