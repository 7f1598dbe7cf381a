"""The ranks' side of ``telegrad bench predictions``: the times of the calibration's messages and of collectives.

All measurements take their first sample, then all their second, each time in another order: whatever else the machine
does meets all of them alike.
"""

from __future__ import annotations

import json
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from telegrad import Communicator, SparseStream
from telegrad.bench.gradient_values import largest_of_gradients
from telegrad.bench.predictions_plan import OF_BLOCKS, Measurement, PredictionPlan, measurements_of
from telegrad.calibration.pairs import Call, Pairs, calls_of_sample, open_pairs, sample, timed_sample
from telegrad.calibration.probes import KINDS, Probe
from telegrad.launch import join

_TIMEOUT_S = 300.0
_JOIN_TIMEOUT_S = 120.0


def main(plan_json: str) -> None:
    """One rank. Rank 0 prints ``{"index", "wrong"}`` and ``{"index", "calls"}`` for each measurement, and
    ``{"index", "seconds"}`` for each sample."""
    plan = PredictionPlan.from_json(plan_json)
    measurements = measurements_of(plan)
    with (
        join(timeout_s=_TIMEOUT_S, join_timeout_s=_JOIN_TIMEOUT_S) as communicator,
        open_pairs(communicator, timeout_s=_TIMEOUT_S) as pairs,
    ):
        vector = np.zeros(max(one.bytes for one in measurements) // 4, np.float32)
        calls = [_call_of(one, communicator, pairs, vector) for one in measurements]
        for index, one in enumerate(measurements):
            _say(communicator, index=index, wrong=_count_wrong(one, communicator, vector))
        vector.fill(0)  # a sum of zeros stays one, however often it is taken
        counts = [calls_of_sample(timed_sample(communicator, call, 1).per_call_s, plan.sample_s) for call in calls]
        for index, count in enumerate(counts):
            _say(communicator, index=index, calls=count)
        for number in range(plan.repetitions):
            for index in map(int, np.random.default_rng(number).permutation(len(calls))):  # alike on all ranks
                _say(communicator, index=index, seconds=sample(communicator, calls[index], counts[index]))


def _say(communicator: Communicator, **what: float) -> None:
    if communicator.rank == 0:
        print(json.dumps(what), flush=True)


def _call_of(
    one: Measurement,
    communicator: Communicator,
    pairs: Pairs,
    vector: npt.NDArray[np.float32],
) -> Call:
    x = vector[: one.bytes // 4]
    if one.operation in KINDS:
        return pairs.call_of(Probe(one.operation, one.bytes), communicator, vector)
    if one.operation == "allreduce":
        return lambda: communicator.all_reduce(x, algorithm=one.algorithm)
    if one.operation == "sparse_allreduce":
        stream = _stream_of(one, communicator.rank)
        return lambda: communicator.all_reduce(stream, algorithm=one.algorithm, wire=one.wire)
    return _dense(one.operation, communicator, x).call


class _Dense(NamedTuple):
    """``call`` puts into ``result``, if this rank has one, what is ``expected`` where every rank's vector is its number
    plus one."""

    call: Call
    result: npt.NDArray[np.float32] | None
    expected: npt.NDArray[np.float32]


def _dense(operation: str, communicator: Communicator, x: npt.NDArray[np.float32]) -> _Dense:
    """``operation`` on vectors or blocks ``x``. Results have their memory beforehand: the first touch of a new page
    costs as much as its bytes do on a link."""
    ranks, rank, root = communicator.world_size, communicator.rank, 0
    every = np.arange(1, ranks + 1, dtype=np.float32)[:, None]
    blocks = np.zeros((ranks, x.size), np.float32) if operation in OF_BLOCKS else np.zeros(0, np.float32)
    at_root = rank == root
    match operation:
        case "broadcast":
            return _Dense(lambda: communicator.broadcast(x, root), x, every[root])
        case "reduce":
            total = np.zeros_like(x) if at_root else None
            return _Dense(lambda: communicator.reduce(x, root, out=total), total, every.sum(axis=0))
        case "reduce_scatter":
            counts = [x.size // ranks + (other < x.size % ranks) for other in range(ranks)]
            mine = np.zeros(counts[rank], np.float32)
            return _Dense(lambda: communicator.reduce_scatter(x, out=mine, counts=counts), mine, every.sum(axis=0))
        case "allgather":
            return _Dense(lambda: communicator.all_gather(x, out=blocks), blocks, every)
        case "gather":
            gathered = blocks if at_root else None
            return _Dense(lambda: communicator.gather(x, root, out=gathered), gathered, every)
        case "scatter":
            blocks += every
            scattered = blocks if at_root else None
            mine = np.zeros_like(x)
            return _Dense(lambda: communicator.scatter(scattered, mine, root), mine, every[rank])
        case "all_to_all":
            leaving = blocks + np.float32(rank + 1)
            return _Dense(lambda: communicator.all_to_all(leaving, out=blocks), blocks, every)
        case _:
            raise ValueError(f"operation={operation!r} is no dense collective that can be predicted")


def _stream_of(one: Measurement, rank: int) -> SparseStream:
    length = one.bytes // 4
    drawn = np.random.default_rng(rank).choice(length, one.nnz, replace=False, shuffle=False)
    indices = np.sort(drawn).astype(np.uint32)
    return SparseStream(indices, largest_of_gradients(indices.size, rank), length)


def _count_wrong(one: Measurement, communicator: Communicator, vector: npt.NDArray[np.float32]) -> int:
    """Values that a collective got wrong, over all ranks; 0 for what is no collective."""
    ranks, rank = communicator.world_size, communicator.rank
    x = vector[: one.bytes // 4]
    x.fill(rank + 1)
    if one.operation in KINDS:
        return 0
    if one.operation == "allreduce":
        communicator.all_reduce(x, algorithm=one.algorithm)
        wrong = int(np.count_nonzero(x != ranks * (ranks + 1) // 2))
    elif one.operation == "sparse_allreduce":
        expected = np.zeros(x.size, np.float32)
        for other in range(ranks):
            theirs = _stream_of(one, other)
            expected[theirs.indices] += theirs.values
        total = communicator.all_reduce(_stream_of(one, rank), algorithm=one.algorithm, wire=one.wire)
        expected[total.indices] -= total.values
        wrong = int(np.count_nonzero(expected))
    else:
        dense = _dense(one.operation, communicator, x)
        dense.call()
        wrong = 0 if dense.result is None else int(np.count_nonzero(dense.result != dense.expected))
    return int(communicator.all_gather(np.array([wrong], np.int64)).sum())
