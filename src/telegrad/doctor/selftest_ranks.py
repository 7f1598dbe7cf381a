"""What the ranks of the self-test do. Each case prints one line of JSON; numbers are small integers, so that the known
sums are exact in any order.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from telegrad import Communicator, SparseStream, TransportError
from telegrad.launch import join

Floats = npt.NDArray[np.float32]

_TIMEOUT_S = 10.0
_LIVENESS_S = 8.0
_COUNTS = (1, 1000, 300_007)  # also several segments with a short last one
_LENGTH = 50_000  # of sparse vectors
_LATE_S = 0.1
_MANY_TIMES = 1_000_000


def collectives(interface: str) -> None:
    """All cases, one after another. After one that failed by an exception nothing more can be done."""
    with _joined(interface) as communicator:
        for name, case in CASES.items():
            try:
                fault = case(communicator)
            except TransportError as error:
                _say(case=name, fault=f"{type(error).__name__}: {error}")
                return
            _say(case=name, fault=fault)


def reduce_for_ever(interface: str) -> None:
    """Until a peer fails; the self-test kills one."""
    communicator = _joined(interface)
    x = np.ones(1000, np.float32)
    try:
        for number in range(_MANY_TIMES):
            communicator.all_reduce(x, "avg")
            if number == 5:
                _say(ready=True)
    except TransportError as error:
        _say(error=type(error).__name__, peer=error.peer, text=str(error))
    communicator.close()


def call_differently(interface: str) -> None:
    """The last rank reduces one element more than the others."""
    communicator = _joined(interface)
    odd = communicator.rank == communicator.world_size - 1
    x = np.ones(1000 + odd, np.float32)
    try:
        communicator.barrier()  # so that nobody hears of it while it still joins
        communicator.all_reduce(x)
    except TransportError as error:
        _say(error=type(error).__name__, peer=error.peer, text=str(error), untouched=bool((x == 1).all()))
    communicator.close()


def _joined(interface: str) -> Communicator:
    return join(
        timeout_s=_TIMEOUT_S, liveness_timeout_s=_LIVENESS_S, interface=interface or None, join_timeout_s=_TIMEOUT_S
    )


def _say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def _dense_input(rank: int, count: int) -> Floats:
    return ((np.arange(count) * (rank + 3) + 7 * rank) % 17 - 8).astype(np.float32)


def _dense_sum(size: int, count: int) -> Floats:
    total = np.zeros(count, np.float32)
    for rank in range(size):
        total += _dense_input(rank, count)
    return total


def _sparse_input(rank: int) -> tuple[npt.NDArray[np.uint32], Floats]:
    """Every 97th entry, at another place on each rank, and a stretch that all have."""
    own = np.arange(rank * 5, _LENGTH, 97)
    indices = np.union1d(own, np.arange(1000, 1100)).astype(np.uint32)
    return indices, _dense_input(rank, _LENGTH)[indices]


def _sparse_sum(size: int) -> Floats:
    total = np.zeros(_LENGTH, np.float32)
    for rank in range(size):
        indices, values = _sparse_input(rank)
        total[indices] += values
    return total


def _compared(got: npt.NDArray[Any], right: npt.NDArray[Any], what: str) -> str:
    """What is wrong with ``got``; empty if it is right."""
    if got.shape != right.shape:
        return f"{what} has shape {got.shape} instead of {right.shape}"
    wrong = got != right
    if not wrong.any():
        return ""
    at = tuple(int(place) for place in np.argwhere(wrong)[0])
    first = ", ".join(map(str, at))
    return f"{int(wrong.sum())} of {got.size} values of {what} are wrong: [{first}] is {got[at]} instead of {right[at]}"


def _dense(algorithm: str) -> Callable[[Communicator], str]:
    def case(communicator: Communicator) -> str:
        rank, size = communicator.rank, communicator.world_size
        faults = []
        for count in _COUNTS:  # all of them, also after a wrong one: the other ranks go on too
            x = _dense_input(rank, count)
            communicator.all_reduce(x, algorithm=algorithm)
            faults.append(_compared(x, _dense_sum(size, count), f"the sum of {count} elements"))
        return _first(faults)

    return case


def _first(faults: list[str]) -> str:
    return next(filter(None, faults), "")


def _same_bits(communicator: Communicator) -> str:
    """Sums of numbers that round: any rank may err in the last bits, but all alike."""
    x = np.random.default_rng(communicator.rank).standard_normal(10_001).astype(np.float32)
    communicator.all_reduce(x, "avg")
    everybody = communicator.all_gather(x.view(np.uint32))
    return _compared(everybody, np.broadcast_to(everybody[0], everybody.shape), "the ranks' bits")


def _sparse(communicator: Communicator) -> str:
    indices, values = _sparse_input(communicator.rank)
    total = communicator.all_reduce(SparseStream(indices, values, _LENGTH))
    return _compared(np.asarray(total.to_dense()), _sparse_sum(communicator.world_size), "the sparse sum")


def _sparse_into(communicator: Communicator) -> str:
    indices, values = _sparse_input(communicator.rank)
    out = np.full(_LENGTH, np.nan, np.float32)
    communicator.all_reduce_into(SparseStream(indices, values, _LENGTH), out)
    return _compared(out, _sparse_sum(communicator.world_size), "the sum of sparse vectors")


def _all_gather(communicator: Communicator) -> str:
    rank, size = communicator.rank, communicator.world_size
    gathered = communicator.all_gather(np.arange(5000, dtype=np.int64) * (rank + 1))
    right = np.stack([np.arange(5000, dtype=np.int64) * (other + 1) for other in range(size)])
    return _compared(gathered, right, "what was gathered")


def _broadcast(communicator: Communicator) -> str:
    faults = []
    for root in range(communicator.world_size):
        x = np.arange(5000, dtype=np.int32) * (communicator.rank + 1)
        communicator.broadcast(x, root)
        right = np.arange(5000, dtype=np.int32) * (root + 1)
        faults.append(_compared(x, right, f"what rank {root} sent"))
    return _first(faults)


def _barrier(communicator: Communicator) -> str:
    """Nobody may leave before the last has come. One machine has one monotonic clock."""
    if communicator.rank == communicator.world_size - 1:
        time.sleep(_LATE_S)
    came_s = time.monotonic()
    communicator.barrier()
    left_s = time.monotonic()
    last_came_s = communicator.all_gather(np.array([came_s])).max()
    return "" if left_s >= last_came_s else f"left {last_came_s - left_s:.3f} s before the last rank had come"


def _in_flight(communicator: Communicator) -> str:
    rank, size = communicator.rank, communicator.world_size
    vectors = [_dense_input(rank, 100 * number) for number in range(1, 17)]
    works = [communicator.all_reduce(x, async_op=True) for x in vectors]
    for work in reversed(works):
        work.wait()
    return _first([_compared(x, _dense_sum(size, x.size), f"the sum of {x.size} elements") for x in vectors])


def _join(communicator: Communicator) -> str:
    return "" if communicator.driver == "ucx" else f"the driver is {communicator.driver!r} instead of 'ucx'"


CASES: Mapping[str, Callable[[Communicator], str]] = {
    "ranks start and join": _join,
    "dense, ring": _dense("ring"),
    "dense, recursive doubling": _dense("recursive_doubling"),
    "same bits on all ranks": _same_bits,
    "sparse": _sparse,
    "sparse into dense": _sparse_into,
    "all_gather": _all_gather,
    "broadcast": _broadcast,
    "barrier": _barrier,
    "16 operations in flight": _in_flight,
}
"""By name: a function that does one collective and says what is wrong with its result."""
