"""The ranks' side of the measured part: every scheme in turn on the same selected entries, and what selection and
additions take by themselves.

A sample is a barrier and then one call; its time is the slowest rank's. All schemes take their first sample, then all
their second, and so on, each time in another order.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lab.topk.measured import MeasuredPlan
from lab.topk.recording import Recording
from lab.topk.schemes import SCHEMES, TopkA
from lab.topk.streams import SelectingRank, streams_of_rank
from telegrad import Communicator, SparseVector
from telegrad.launch import join
from telegrad.tuning import calibrate

Vector = npt.NDArray[np.float32]

_TIMEOUT_S = 300.0
_JOIN_TIMEOUT_S = 120.0
_FEWEST_SAMPLES = 3
_TIMES_APART = 5
_TOLERANCE = 1e-5  # of the largest sum: sums are formed in other orders


class Contender:
    """One scheme on this rank. ``call(stream)`` gives the result: a vector, or a stream."""

    def __init__(self, name: str, communicator: Communicator, n: int, k: int) -> None:
        self.name = name
        self._communicator = communicator
        self._n = n
        self.left = SparseVector(np.zeros(0, np.uint32), np.zeros(0, np.float32), n)  # of the last call
        self.words = (0, 0)  # sent and received by the last call; (0, 0) where the scheme does not count them
        state = SCHEMES[name].state
        self._state = None if state is None else state(k)
        self._dense = np.zeros(n if name == "dense" else 0, np.float32)

    def call(self, stream: SparseVector) -> Vector | SparseVector:
        """One sum over all ranks."""
        if self.name == "dense":
            self._communicator.all_reduce(self._dense)
            return self._dense
        if self._state is not None:
            found = self._communicator.all_reduce_topk(stream, self._state)
            self.words = found.report.words_sent, found.report.words_received
            self.left = found.left
            total: SparseVector = found.sum
            return total
        if self.name == "topkdsa":
            summed: SparseVector = self._communicator.all_reduce(stream, algorithm="split_allgather")
            return summed
        return added(self._communicator.all_gather(stream), self._n)


def added(streams: Sequence[SparseVector], n: int) -> Vector:
    """The dense sum, in the order of ranks."""
    total = np.zeros(n, np.float32)
    for one in streams:
        total[one.raw_indices] += one.raw_values
    return total


def rank_main(plan_json: str) -> None:
    """One rank. Rank 0 prints ``{"name", "seconds"}`` for each sample, ``{"name", "wrong", "words_max", "wire_bytes"}``
    for each scheme, and ``{"apart"}``: by name the seconds of selection and of additions."""
    plan = MeasuredPlan.from_json(plan_json)
    recording = Recording.load(Path(plan.file))
    with join(timeout_s=_TIMEOUT_S, join_timeout_s=_JOIN_TIMEOUT_S) as communicator:
        if plan.calibrates:
            calibrate(communicator, keep=False)
        _measure(plan, communicator, recording)


def _measure(plan: MeasuredPlan, communicator: Communicator, recording: Recording) -> None:
    streams = {
        selection: streams_of_rank(recording, plan.density, selection, plan.calls, communicator.rank, plan.blocks)
        for selection in dict.fromkeys(SCHEMES[name].selection for name in plan.schemes)
    }
    n = next(iter(streams.values()))[0].n
    k = max(1, round(plan.density * n))
    contenders = [Contender(name, communicator, n, k) for name in plan.schemes]
    for one in contenders:
        stream = streams[SCHEMES[one.name].selection][0]
        sent = communicator.stats()["bytes_sent"]
        result = one.call(stream)
        sent = communicator.stats()["bytes_sent"] - sent
        wrong = _is_wrong(one.name, result, communicator.all_gather(stream), communicator.all_gather(one.left), k)
        most = communicator.all_gather(np.array([int(wrong), max(one.words), sent], np.int64)).reshape(-1, 3)
        counted = int(most[:, 1].max()) or None
        _say(
            communicator,
            name=one.name,
            wrong=int(most[:, 0].sum()),
            words_max=counted,
            wire_bytes=int(most[:, 2].max()),
        )
    spent = {one.name: 0.0 for one in contenders}
    for number in range(plan.samples):
        for index in map(int, np.random.default_rng(number).permutation(len(contenders))):  # alike on all ranks
            one = contenders[index]
            if number >= _FEWEST_SAMPLES and spent[one.name] > plan.seconds / len(contenders):
                continue
            stream = streams[SCHEMES[one.name].selection][number % plan.calls]
            communicator.barrier()
            begin = time.perf_counter()
            one.call(stream)
            own_s = time.perf_counter() - begin
            seconds = float(communicator.all_gather(np.array([own_s])).max())
            spent[one.name] += seconds
            _say(communicator, name=one.name, seconds=seconds)
    _say_apart(plan, communicator, recording, {name: own[-1] for name, own in streams.items()})


def _is_wrong(
    name: str,
    result: Vector | SparseVector,
    streams: Sequence[SparseVector],
    left: Sequence[SparseVector],
    k: int,
) -> bool:
    """Of a first call: of Ok-Topk exactly the largest sums, of others that keep a part (gTopk: at most k) what with all
    ``left`` is all sums, else all sums."""
    n = streams[0].n
    expected = added(streams, n)
    tolerance = _TOLERANCE * float(np.abs(expected).max())
    if not isinstance(result, SparseVector):
        if name == "dense":
            return bool(np.any(result))  # of zeros
        return bool(np.abs(result - expected).max() > tolerance)
    found = np.zeros(n, np.float32)
    found[result.raw_indices] = result.raw_values
    if name == "topkdsa":
        return bool(np.abs(found - expected).max() > tolerance)
    if not name.startswith("oktopk") or name == "oktopk-bounded":
        too_many = name == "gtopk" and result.nnz > k
        return too_many or bool(np.abs(found + added(left, n) - expected).max() > tolerance)
    kept = np.zeros(n, np.bool_)
    kept[result.raw_indices] = True
    least = np.abs(expected[~kept]).max(initial=0.0)
    enough = result.nnz >= min(k, int(np.count_nonzero(expected)))
    return not enough or bool(
        np.abs(found - expected)[kept].max(initial=0.0) > tolerance
        or np.abs(found[kept]).min(initial=np.inf) < least - tolerance
    )


def _say_apart(
    plan: MeasuredPlan, communicator: Communicator, recording: Recording, streams: dict[str, SparseVector]
) -> None:
    """Selection and the additions of a scheme, done by numpy after all calls; of the slowest rank."""
    mine: dict[str, tuple[float, float]] = {}
    for rank in range(plan.ranks):  # one rank at a time: processes that share a core would time each other
        communicator.barrier()
        if rank == communicator.rank:
            mine = _apart(plan, rank, recording, streams)
    slowest = communicator.all_gather(np.array([*mine.values()])).reshape(plan.ranks, -1, 2).max(axis=0)
    _say(communicator, apart={name: (float(one[0]), float(one[1])) for name, one in zip(mine, slowest, strict=True)})


def _apart(
    plan: MeasuredPlan, rank: int, recording: Recording, streams: dict[str, SparseVector]
) -> dict[str, tuple[float, float]]:
    """Of each scheme, seconds of this rank's selection and additions. What is alike in several is timed once."""
    n = next(iter(streams.values())).n
    selecting = {name: _selection_s(plan, recording, rank, name) for name in streams}
    cleared_s = _median_s(lambda: np.zeros(n, np.float32))
    a, b = np.zeros(n, np.float32), np.ones(n, np.float32)
    own = next(iter(streams.values()))
    adding = {
        "dense": _median_s(lambda: np.add(a, b, out=a)) * (plan.ranks - 1) / plan.ranks,
        "own": _median_s(lambda: added([own], n)) - cleared_s,  # an owner adds about as many entries as it gives
    }
    found: dict[str, tuple[float, float]] = {}
    for name in plan.schemes:
        entry = SCHEMES[name]
        if entry.summing is TopkA:
            all_of_them = [streams[entry.selection]] * plan.ranks
            adding[name] = _median_s(lambda given=all_of_them: added(given, n)) - cleared_s  # type: ignore[misc]
        reduction_s = adding.get(name, adding["own"])
        found[name] = 0.0 if name == "dense" else selecting[entry.selection], max(0.0, reduction_s)
    return found


def _selection_s(plan: MeasuredPlan, recording: Recording, rank: int, selection: str) -> float:
    """Of all blocks: the median call on one, times their number."""
    selecting = SelectingRank(recording, plan.density, selection)
    times = []
    for call in range(max(_TIMES_APART, plan.calls) + 1):
        gradient = recording.gradient(rank, call)
        begin = time.perf_counter()
        selecting.select(gradient)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:]) * plan.blocks


def _median_s(call: Callable[[], object]) -> float:
    times = []
    for _ in range(_TIMES_APART):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _say(communicator: Communicator, **what: Any) -> None:
    if communicator.rank == 0:
        print(json.dumps(what), flush=True)
