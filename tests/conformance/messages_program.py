"""Messages between every two ranks, and groups of ranks, on the ranks that this process has; says what was wrong."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import program
from joined import join

from telegrad import Communicator, Work
from telegrad.errors import TransportError

COUNTS = (0, 1, 1000, 70_001, 3)  # f32: within and beyond what networks copy at once; the last one overtakes
TAGS = (5, 0, 5, 0, 5)
COLORS = (0, 1, 1, 0, 1, 1, 0, 1)  # of 8 ranks, 3 and 5


def _content(source: int, to: int, number: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng([source, to, number]).standard_normal(COUNTS[number]).astype(np.float32)


def exchange(communicators: Sequence[Communicator], *, sends_first: bool) -> Iterator[str]:
    """Every rank sends every other all of COUNTS, with a barrier of all in flight; what came wrongly."""
    size = communicators[0].world_size
    works: list[Work | int | None] = []
    received: list[tuple[str, npt.NDArray[np.float32], npt.NDArray[np.float32]]] = []

    def send(comm: Communicator) -> None:
        for number, tag in enumerate(TAGS):
            for to in range(size):
                if to != comm.rank:
                    works.append(comm.send(_content(comm.rank, to, number), to, tag=tag, async_op=True))

    def receive(comm: Communicator) -> None:
        for tag in sorted(set(TAGS)):  # not the order of the sends
            for number in (at for at, one in enumerate(TAGS) if one == tag):
                for source in range(size):
                    if source != comm.rank:
                        x = np.full(COUNTS[number], np.nan, np.float32)
                        works.append(comm.recv(x, source, tag=tag, async_op=True))
                        name = f"message {number} of rank {source} to rank {comm.rank}"
                        received.append((name, x, _content(source, comm.rank, number)))

    for step in (send, receive) if sends_first else (receive, send):
        for comm in communicators:
            step(comm)
        works.extend(comm.barrier(async_op=True) for comm in communicators)
    for work in works:
        assert isinstance(work, Work)
        work.wait()
    for name, x, right in received:
        if not np.array_equal(x, right):
            yield f"{name} has arrived with other contents"


def round_the_ring(comm: Communicator) -> Iterator[str]:
    """Blocking sendrecv, where a process has one rank."""
    size = comm.world_size
    for count in (1, 300_000):
        x, out = np.full(count, comm.rank, np.int32), np.full(count, -1, np.int32)
        comm.sendrecv(x, (comm.rank + 1) % size, out, (comm.rank - 1) % size, tag=9)
        if not (out == (comm.rank - 1) % size).all():
            yield f"sendrecv of {count} on rank {comm.rank} gave something else"


def from_anybody(communicators: Sequence[Communicator]) -> Iterator[str]:
    """Every rank sends every other a message, and takes those for it from whoever comes."""
    size = communicators[0].world_size
    sends: list[Work | None] = []
    received: dict[int, list[tuple[Work, npt.NDArray[np.float32]]]] = {comm.rank: [] for comm in communicators}
    for comm in communicators:
        others = [peer for peer in range(size) if peer != comm.rank]
        for _ in others:
            x = np.full(COUNTS[2], np.nan, np.float32)
            work = comm.recv(x, tag=17, async_op=True)
            assert isinstance(work, Work)
            received[comm.rank].append((work, x))
        sends += [comm.send(_content(comm.rank, to, 2), to, tag=17, async_op=True) for to in others]
    for rank, taken in received.items():
        for work, x in taken:
            work.wait()
            source = work.source()
            if source is None or not np.array_equal(x, _content(source, rank, 2)):
                yield f"rank {rank} took something else than what rank {source} has sent"
        if {work.source() for work, _ in taken} != {peer for peer in range(size) if peer != rank}:
            yield f"rank {rank} has not taken one message of every other rank"
    for send in sends:
        assert send is not None
        send.wait()


def exchange_main() -> None:
    with join(timeout_s=60.0) as comm:
        for sends_first in (True, False, True):
            for fault in exchange([comm], sends_first=sends_first):
                print(json.dumps({"fault": fault}))
        for fault in from_anybody([comm]):
            print(json.dumps({"fault": fault}))
        if comm.world_size > 1:
            for fault in round_the_ring(comm):
                print(json.dumps({"fault": fault}))
        print(json.dumps({"done": comm.rank}), flush=True)


ONE_IN = 15  # of all that a whole job of that size is asked elsewhere


def run_in_group(comm: Communicator) -> list[program.Outcome]:
    """The collectives in this rank's group of COLORS, the parent's barriers in between."""
    child = comm.split(COLORS[comm.rank])
    assert child is not None
    outcomes = []
    barriers = []
    with child:
        for number, outcome in enumerate(program.run([child], one_in=ONE_IN)):
            if number % 50 == 0 and number < 150:  # both groups have as many
                barriers.append(comm.barrier(async_op=True))
            outcomes.append(outcome)
        for barrier in barriers:
            assert barrier is not None
            barrier.wait()
    return outcomes


def groups_main() -> None:
    with join(timeout_s=60.0) as comm:
        for outcome in run_in_group(comm):
            print(json.dumps({"color": COLORS[comm.rank], **outcome}))


def groups_of_threads(communicators: Sequence[Communicator]) -> list[tuple[int, program.Outcome]]:
    """The same, where each rank is a thread of this process."""
    with ThreadPoolExecutor(len(communicators)) as pool:
        found = list(pool.map(run_in_group, communicators))
    return [(COLORS[rank], outcome) for rank, outcomes in enumerate(found) for outcome in outcomes]


def _failure_of(comm: Communicator, source: int, began_s: float) -> None:
    try:
        comm.recv(np.zeros(10), source, tag=1)
    except TransportError as error:
        facts = {"peer": error.peer, "parent_peer": error.parent_peer, "group": error.group}
        took_s = time.monotonic() - began_s
        print(json.dumps({"error": type(error).__name__, "took_s": took_s, "text": str(error), **facts}))


def leave_without_sending() -> None:
    """Rank 1 sends one small and one large message and closes; rank 0 receives them late, and then one too many;
    rank 2 waits for rank 0, which sends nothing."""
    comm = join(timeout_s=60.0)
    if comm.rank == 1:
        comm.send(np.full(10, 1.0), 0, tag=1)
        comm.send(np.full(500_000, 2.0), 0, tag=2)
        comm.close()
        return
    if comm.rank == 0:
        large, small = np.zeros(500_000), np.zeros(10)
        comm.recv(large, 1, tag=2)
        time.sleep(0.3)
        comm.recv(small, 1, tag=1)
        print(json.dumps({"right": bool((large == 2.0).all() and (small == 1.0).all())}))
    _failure_of(comm, 1 if comm.rank == 0 else 0, time.monotonic())
    comm.close()


def die_in_a_group() -> None:
    """Rank 1 is killed: the others wait for it in the group of ranks 1 and 2, and in the parent."""
    parent = join(timeout_s=60.0)
    child = parent.split(None if parent.rank == 0 else 0)
    if parent.rank == 2:  # who kills has heard that nobody is still on the way here
        pids = np.zeros((2, 1), np.int64)
        for rank in (0, 1):
            parent.recv(pids[rank], rank)
        os.kill(int(pids[1, 0]), signal.SIGKILL)
    else:
        parent.send(np.array([os.getpid()]), 2)
    if parent.rank == 1:
        signal.pause()
    began_s = time.monotonic()
    if child is not None:
        _failure_of(child, 0, began_s)
    _failure_of(parent, 1, began_s)
    for comm in (child, parent):
        if comm is not None:
            comm.close()


def fail_in_a_group_only() -> None:
    """The ranks of a group disagree; the parent goes on."""
    with join(timeout_s=60.0) as parent:
        child = parent.split(0)
        assert child is not None
        try:
            child.all_reduce(np.zeros(10 + child.rank, np.float32))
        except TransportError as error:
            print(json.dumps({"error": type(error).__name__, "peer": error.peer}))
        child.close()
        x = np.ones(1000, np.float32)
        parent.all_reduce(x)
        print(json.dumps({"right": bool((x == parent.world_size).all())}))
