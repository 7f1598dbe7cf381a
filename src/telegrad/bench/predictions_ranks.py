"""The ranks' side of ``telegrad bench predictions``: the times of the calibration's messages and of collectives.

A sample is a barrier, a call that does not count, and then calls one after another; its time per call is the slowest
rank's. The call that does not count spends what a shaped link has saved up while it was idle (tbf's burst, 128 KiB of
which pass at once): what follows finds the links as busy as they stay. All measurements take their first sample, then
all their second, each time in another order: whatever else the machine does meets all of them alike.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from telegrad import Communicator, SparseStream
from telegrad.bench.predictions_plan import Measurement, PredictionPlan, measurements_of
from telegrad.launch import join

_FEWEST_CALLS, _MOST_CALLS = 2, 500
_SLICE_ELEMENTS = 64 << 10  # of a reduction, as the core cuts it (256 KiB)
_TIMEOUT_S = 300.0
_JOIN_TIMEOUT_S = 120.0

Call = Callable[[], object]


def main(plan_json: str) -> None:
    """One rank. Rank 0 prints ``{"index", "wrong"}`` for each measurement, and ``{"index", "seconds"}`` for each
    sample."""
    plan = PredictionPlan.from_json(plan_json)
    measurements = measurements_of(plan)
    with (
        join(timeout_s=_TIMEOUT_S, join_timeout_s=_JOIN_TIMEOUT_S) as communicator,
        _pair_of(communicator, 1) as pair,
        _other_pair_of(communicator) as other_pair,
    ):
        vector = np.zeros(max(one.bytes for one in measurements) // 4, np.float32)
        calls = [_call_of(one, communicator, (pair, other_pair or pair), vector) for one in measurements]
        for index, one in enumerate(measurements):
            _say(communicator, index=index, wrong=_count_wrong(one, communicator, vector))
        vector.fill(0)  # a sum of zeros stays one, however often it is taken
        counts = [_count_of(plan, communicator, call) for call in calls]
        for number in range(plan.repetitions):
            for index in map(int, np.random.default_rng(number).permutation(len(calls))):  # alike on all ranks
                _say(communicator, index=index, seconds=_sample(communicator, calls[index], counts[index]))


def _say(communicator: Communicator, **what: float) -> None:
    if communicator.rank == 0:
        print(json.dumps(what), flush=True)


def _other_pair_of(communicator: Communicator) -> contextlib.AbstractContextManager[Communicator | None]:
    """The same with the neighbour's neighbour, if all ranks have one."""
    return contextlib.nullcontext() if communicator.world_size % 4 else _pair_of(communicator, 2)


def _pair_of(communicator: Communicator, distance: int) -> Communicator:
    """A communicator of this rank and the one whose number differs in the bit ``distance``."""
    pair = sorted((communicator.rank, communicator.rank ^ distance))

    def exchange(mine: bytes) -> list[bytes]:
        lengths = communicator.all_gather(np.array([len(mine)], np.int64))[:, 0]
        padded = np.zeros(int(lengths.max()), np.uint8)
        padded[: len(mine)] = np.frombuffer(mine, np.uint8)
        everybodys = communicator.all_gather(padded)
        return [everybodys[one, : lengths[one]].tobytes() for one in pair]

    return Communicator.from_exchange(pair.index(communicator.rank), 2, exchange, timeout_s=_TIMEOUT_S)


def _call_of(
    one: Measurement,
    communicator: Communicator,
    pairs: tuple[Communicator, Communicator],
    vector: npt.NDArray[np.float32],
) -> Call:
    x = vector[: one.bytes // 4]
    if one.operation == "round":
        return communicator.barrier
    if one.operation == "one_way":
        return lambda: pairs[0].broadcast(x, 0)
    if one.operation == "exchange":
        turns = itertools.cycle(pairs)
        return lambda: next(turns).all_reduce(x, algorithm="recursive_doubling")
    if one.operation == "reduce":
        return _reduction_of(one.bytes)
    if one.operation == "allreduce":
        return lambda: communicator.all_reduce(x, algorithm=one.algorithm)
    if one.operation == "sparse_allreduce":
        stream = _stream_of(one, communicator.rank)
        return lambda: communicator.all_reduce(stream, algorithm=one.algorithm)
    if one.operation == "allgather":
        return lambda: communicator.all_gather(x)
    return lambda: communicator.broadcast(x, 0)


def _reduction_of(size: int) -> Call:
    total, addend = np.zeros(size // 4, np.float32), np.zeros(size // 4, np.float32)

    def reduce() -> None:
        for begin in range(0, total.size, _SLICE_ELEMENTS):
            part = slice(begin, begin + _SLICE_ELEMENTS)
            np.add(total[part], addend[part], out=total[part])

    return reduce


def _stream_of(one: Measurement, rank: int) -> SparseStream:
    length = one.bytes // 4
    drawn = np.random.default_rng(rank).choice(length, one.nnz, replace=False, shuffle=False)
    indices = np.sort(drawn).astype(np.uint32)
    return SparseStream(indices, np.ones(indices.size, np.float32), length)


def _count_wrong(one: Measurement, communicator: Communicator, vector: npt.NDArray[np.float32]) -> int:
    """Values that a collective got wrong, over all ranks; 0 for what is no collective."""
    ranks, rank = communicator.world_size, communicator.rank
    x = vector[: one.bytes // 4]
    x.fill(rank + 1)
    wrong = 0
    if one.operation == "allreduce":
        communicator.all_reduce(x, algorithm=one.algorithm)
        wrong = int(np.count_nonzero(x != ranks * (ranks + 1) // 2))
    elif one.operation == "sparse_allreduce":
        expected = np.zeros(x.size, np.float32)
        for other in range(ranks):
            expected[_stream_of(one, other).indices] += 1
        total = communicator.all_reduce(_stream_of(one, rank), algorithm=one.algorithm)
        expected[total.indices] -= total.values
        wrong = int(np.count_nonzero(expected))
    elif one.operation == "allgather":
        gathered = communicator.all_gather(x)
        wrong = int(np.count_nonzero(gathered != np.arange(1, ranks + 1, dtype=np.float32)[:, None]))
    elif one.operation == "broadcast":
        communicator.broadcast(x, 0)
        wrong = int(np.count_nonzero(x != 1))
    else:
        return 0
    return int(communicator.all_gather(np.array([wrong], np.int64)).sum())


def _count_of(plan: PredictionPlan, communicator: Communicator, call: Call) -> int:
    """Calls that make up a sample; alike on all ranks. It also warms up."""
    seconds = _sample(communicator, call, 1)
    return int(np.clip(plan.sample_s / max(seconds, 1e-7), _FEWEST_CALLS, _MOST_CALLS))


def _sample(communicator: Communicator, call: Call, count: int) -> float:
    """Seconds per call; the same number on all ranks."""
    communicator.barrier()
    call()
    begin = time.perf_counter()
    for _ in range(count):
        call()
    mine = (time.perf_counter() - begin) / count
    return float(communicator.all_gather(np.array([mine])).max())
