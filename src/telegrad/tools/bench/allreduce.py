"""``telegrad bench allreduce``: dense sums in place, ours and the peers', in turn, and rows with ratios and bounds.

A sample is a barrier and then a number of calls one after another; its time is the slowest rank's. All contenders take
their first sample, then all their second, and so on, each time in another order: neither what else the machine does nor
what the one before leaves behind favours one of them. Large sizes come first, so that small ones, which need little,
share what time is left."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
import numpy.typing as npt

from telegrad import Communicator
from telegrad.launch import join
from telegrad.tools.bench.netlab import burst_bytes
from telegrad.tools.bench.plan import (
    PEERS,
    AllreducePlan,
    Beside,
    Measured,
    Peer,
    Timing,
    bound_bytes,
    bus_factor,
    is_alternative,
    is_slower,
    payload_bytes_per_s,
    peers_store,
    rate_bytes_per_s,
    run_job,
    say_missing,
    start_peers,
    text_of,
)
from telegrad.tuning import calibrate

Vector = npt.NDArray[np.float32]

_FEWEST_SAMPLES = 3
_HOPELESS = 10.0  # times as slow as the fastest: one sample says it
_MOST_CALLS = 1000
_LEAST_GROWTH, _MOST_GROWTH = 2.0, 8.0
_MOST_SHARE = 1 / 3  # of the time left, for one size of many
_LEAST_S = 0.4  # for a size, if the longer ones have left nothing
_AGAIN_SHARE = 0.2  # of the time, for outliers
_AGAIN_FACTOR = 2  # as many samples more
_QUICK_S = 0.02  # what takes longer is not tried twice before it is measured, and may be hopeless
_SLOW_S = 0.5  # what takes longer is not tried at all
_SOME = 0.02  # of a sample's bytes
_PATIENCE_S = 5.0  # with one call of a peer's
_REACH = 4  # times as long as what is known
TIMEOUT_S = 300.0
JOIN_TIMEOUT_S = 120.0


@dataclass
class Contender:
    """``call`` sums the vector that it is given, in place unless ``wrong_values`` says how many elements are wrong."""

    name: str
    call: Callable[[Vector], object]
    ours: bool
    communicator: Communicator | None = None  # which counts its bytes; None: nobody does
    wrong_values: Callable[[int], int] | None = None  # of so many elements; None: it sums its argument, exactly
    sample_s: Callable[[int, int], float] | None = None  # seconds of calls with so many elements; None: time ``call``
    calls: int = 1
    first_s: float = 0.0
    spent_s: float = 0.0  # in all its calls
    fewest_samples: int = _FEWEST_SAMPLES
    wrong: int = 0
    wire_bytes: float | None = None
    times_s: list[float] = field(default_factory=list)

    @classmethod
    def of_ours(cls, algorithm: str, communicator: Communicator, behind: str = "") -> Self:
        """``behind``: what its name has behind the algorithm's."""
        return cls(algorithm + behind, lambda x: communicator.all_reduce(x, algorithm=algorithm), True, communicator)

    @property
    def median_s(self) -> float:
        return Timing.of(self.times_s).median_s


More = Callable[[Communicator, int], list[Contender]]
"""Contenders of an experiment besides those of the plan, by the communicator and the most elements."""


def main(plan_json: str) -> None:
    """One rank."""
    measure(AllreducePlan.from_json(plan_json))


def measure(
    plan: AllreducePlan, more: More = lambda communicator, elements: [], joined: Communicator | None = None
) -> None:
    """On one rank, which joins unless it has ``joined``.

    Rank 0 prints a line of JSON for each contender at each size, and once more where it was measured again. A rank on
    which a peer does not start prints ``{"missing", "why"}``."""
    with joined or join(timeout_s=TIMEOUT_S, join_timeout_s=JOIN_TIMEOUT_S) as communicator:
        if plan.calibrates and communicator.world_size > 1:
            calibrate(communicator, keep=False)
        peers = start_peers(plan, communicator)
        _measure_all(plan, communicator, peers, more(communicator, max(plan.sizes) // 4))
        for peer in peers:
            communicator.barrier()
            peer.close()


def _measure_all(
    plan: AllreducePlan, communicator: Communicator, peers: Sequence[Peer], more: Sequence[Contender]
) -> None:
    vector = np.zeros(max(plan.sizes) // 4, np.float32)
    begin = time.monotonic()

    def left_s(until: float) -> float:
        """The same on all ranks, and never nothing: what is begun takes its time."""
        mine = max(until - (time.monotonic() - begin), 0.0)
        return float(communicator.all_gather(np.array([mine]))[0, 0])

    longest = _within_reach(plan, communicator, peers, vector)
    done: dict[int, list[Contender]] = {}
    compared = len(plan.algorithms) + len(more) + len(plan.peers) > 1
    first_pass_s = plan.seconds * (1 - _AGAIN_SHARE if compared else 1)
    for number, size in enumerate(sorted(plan.sizes, reverse=True)):
        contenders = done[size] = [
            *(Contender.of_ours(algorithm, communicator) for algorithm in plan.algorithms),
            *(replace(one, times_s=[]) for one in more),
            *(_peer_of(one) for one in peers if size <= longest[one.name]),
        ]
        x = vector[: size // 4]
        for contender in contenders:
            _verify(communicator, contender, x)
        x.fill(0)  # a sum of zeros stays one, however often it is taken
        seconds = [_choose_calls(plan, communicator, contender, x) for contender in contenders]
        for contender, mine_s in zip(contenders, seconds, strict=True):
            if mine_s > max(_HOPELESS * min(seconds), plan.sample_s, _QUICK_S):
                contender.fewest_samples, contender.times_s = 1, [mine_s]
        share_s = max(left_s(first_pass_s) * max(_MOST_SHARE, 1 / (len(plan.sizes) - number)), _LEAST_S)
        _take_samples(plan, communicator, contenders, x, plan.samples, share_s)
        _report(communicator, contenders, size, again=False)
    vector.fill(0)
    outliers = [size for size in done if _is_outlier(done[size])]
    for number, size in enumerate(outliers):
        contenders = done[size]
        taken = max(len(contender.times_s) for contender in contenders)
        share_s = left_s(plan.seconds) / (len(outliers) - number)
        again = [contender for contender in contenders if contender.fewest_samples > 1]
        _take_samples(plan, communicator, again, vector[: size // 4], _AGAIN_FACTOR * taken, share_s)
        _report(communicator, contenders, size, again=True)


def _peer_of(peer: Peer) -> Contender:
    if isinstance(peer, Beside):
        found = peer
        return Contender(peer.name, peer.all_reduce, False, wrong_values=lambda _: found.wrong, sample_s=found.sample_s)
    return Contender(peer.name, peer.all_reduce, False)


def _within_reach(
    plan: AllreducePlan, communicator: Communicator, peers: Iterable[Peer], vector: Vector
) -> dict[str, int]:
    """How many bytes each peer is given at most, by name: calls of ``_REACH`` times as many would take more than
    ``_PATIENCE_S`` if time grew as length does. A call cannot be broken off, and with more ranks than cores that of a
    peer which never sleeps can take minutes."""
    most = max(plan.sizes)
    longest = {}
    for peer in peers:
        length = min(plan.sizes)
        peer.all_reduce(vector[: length // 4])  # it may connect
        while True:
            communicator.barrier()
            begin = time.perf_counter()
            peer.all_reduce(vector[: length // 4])
            took_s = float(communicator.all_gather(np.array([time.perf_counter() - begin])).max())
            longest[peer.name] = length
            if length == most:
                break
            if took_s * _REACH > _PATIENCE_S:
                if communicator.rank == 0:
                    say_missing(peer.name, f"too slow above {text_of(length)}, where a call took {took_s:.1f} s")
                break
            length = min(length * _REACH, most)
    return longest


def _verify(communicator: Communicator, contender: Contender, x: Vector) -> None:
    """Counts wrong values and bytes of one call, which also warms up."""
    ranks = communicator.world_size
    whole = np.arange(x.size, dtype=np.int64) % 1009
    x[:] = whole + communicator.rank
    communicator.barrier()
    sent = _bytes_sent(contender)
    begin = time.perf_counter()
    contender.call(x)
    contender.first_s = time.perf_counter() - begin
    sent = _bytes_sent(contender) - sent
    if contender.wrong_values is None:
        wrong = int(np.count_nonzero(x != (whole * ranks + ranks * (ranks - 1) // 2).astype(np.float32)))
    else:
        wrong = contender.wrong_values(x.size)
    gathered = communicator.all_gather(np.array([wrong, sent, contender.first_s]))
    contender.wrong = int(gathered[:, 0].sum())
    contender.first_s = contender.spent_s = float(gathered[:, 2].max())
    contender.wire_bytes = float(gathered[:, 1].max()) if contender.ours else None


def _bytes_sent(contender: Contender) -> int:
    return contender.communicator.stats()["bytes_sent"] if contender.communicator else 0


def _choose_calls(plan: AllreducePlan, communicator: Communicator, contender: Contender, x: Vector) -> float:
    """Decides how many calls make up a sample; returns about how many seconds a call takes.

    Ranks leave the barrier one after another, so that few calls tell little of many: their number grows until a sample
    lasts long enough, and the better of two tries counts."""
    if contender.first_s > _SLOW_S:
        return contender.first_s
    while True:
        seconds = contender.calls * _sample(communicator, contender, x)
        if seconds < _QUICK_S:
            seconds = min(seconds, contender.calls * _sample(communicator, contender, x))
        if seconds >= plan.sample_s or contender.calls >= _MOST_CALLS:
            return seconds / contender.calls
        grown = contender.calls * np.clip(plan.sample_s / max(seconds, 1e-9), _LEAST_GROWTH, _MOST_GROWTH)
        contender.calls = min(int(grown), _MOST_CALLS)


def _take_samples(
    plan: AllreducePlan, communicator: Communicator, contenders: list[Contender], x: Vector, samples: int, most_s: float
) -> None:
    """Up to ``samples`` rounds. Who has used up its part of ``most_s`` seconds and has enough samples sits out."""
    rate = rate_bytes_per_s(plan.network)
    saved_up = 0 if rate is None else burst_bytes(8 * rate)
    most_each_s = {one.name: one.spent_s + most_s / len(contenders) for one in contenders}
    for number in range(samples):
        for index in np.random.default_rng(number).permutation(len(contenders)):  # alike on all ranks
            one = contenders[index]
            if len(one.times_s) < one.fewest_samples or one.spent_s < most_each_s[one.name]:
                one.times_s.append(_sample(communicator, one, x, saved_up))


def _sample(communicator: Communicator, contender: Contender, x: Vector, saved_up: int = 0) -> float:
    """Seconds per call; the same number on all ranks. ``saved_up``: bytes that the links pass at once after they were
    idle. Where that is some of a sample, as many are sent before it; calls so short that links stay idle save up."""
    ranks = communicator.world_size
    call_bytes = max(2 * x.nbytes * (ranks - 1) // ranks, 1)
    is_some = saved_up > _SOME * contender.calls * call_bytes
    communicator.barrier()
    start = time.perf_counter()
    for _ in range(min(math.ceil(saved_up / call_bytes), contender.calls) if is_some else 0):
        contender.call(x)
    begin = time.perf_counter()
    if contender.sample_s is None:
        for _ in range(contender.calls):
            contender.call(x)
        end = time.perf_counter()
    else:
        end = begin + contender.sample_s(x.size, contender.calls)
    slowest, spent_s = communicator.all_gather(np.array([end - begin, end - start])).max(axis=0)
    contender.spent_s += float(spent_s)
    return float(slowest) / contender.calls


def _is_outlier(contenders: list[Contender]) -> bool:
    """Whether the automatic choice looks worse than it should: than the better peer, or than the best of our own."""
    auto = [contender for contender in contenders if contender.name == "auto"]
    peers = [contender.median_s for contender in contenders if not contender.ours]
    others = [one.median_s for one in contenders if one.ours and is_alternative(one.name)]
    return any(
        (peers and is_slower(one.median_s, min(peers), share=0.1))
        or (others and is_slower(one.median_s, min(others), share=0.05))
        for one in auto
    )


def _report(communicator: Communicator, contenders: list[Contender], size: int, *, again: bool) -> None:
    if communicator.rank != 0:
        return
    for one in contenders:
        timing = Timing.of(one.times_s)
        found = Measured(
            contender=one.name,
            size=size,
            timing=timing,
            wire_bytes=one.wire_bytes,
            wrong=one.wrong,
            driver=communicator.driver,
            samples=len(one.times_s),
            again=again,
            chosen=_chosen_by(one, size),
        )
        print(found.to_json(), flush=True)


def _chosen_by(contender: Contender, size: int) -> str | None:
    if contender.communicator is None or not contender.name.startswith("auto"):
        return None
    return str(contender.communicator._usable().choose_allreduce(size).name)


Row = dict[str, object]

TARGET = "telegrad.tools.bench.allreduce:main"


@dataclass
class AllreduceOutcome:
    """``measured``: each contender at each size once, sizes ascending. ``missing``: why a peer did not start, by
    name."""

    measured: list[Measured] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)


def run(
    plan: AllreducePlan,
    *,
    timeout_s: float,
    on_measured: Callable[[Measured], None] = lambda _: None,
    target: str = TARGET,
) -> AllreduceOutcome:
    """Everything that ``plan`` asks for; ``on_measured`` sees each result as it comes, and once more if it was measured
    again. ``target``: what the ranks run. Raises ``RankFailed`` and ``RanksTimedOut``."""
    found: dict[tuple[int, str], Measured] = {}
    outcome = AllreduceOutcome()

    def take(rank: int, line: str) -> None:
        if line.startswith('{"missing"'):
            said = json.loads(line)
            outcome.missing.setdefault(said["missing"], f"rank {rank}: {said['why']}")
        elif rank == 0 and line.startswith("{"):
            one = Measured.from_json(line)
            found[one.size, one.contender] = one
            on_measured(one)

    report_of(plan, take, timeout_s=timeout_s, target=target)
    outcome.measured = sorted(found.values(), key=lambda one: one.size)
    return outcome


def report_of(
    plan: AllreducePlan, on_line: Callable[[int, str], None], *, timeout_s: float, target: str = TARGET
) -> None:
    """Runs ``plan`` on its network; ``on_line(rank, line)`` gets what the ranks print, which run ``target``
    (``module:function``, with the plan as JSON). Raises ``RankFailed`` and ``RanksTimedOut``."""
    with peers_store() as store:
        run_job(
            target,
            dataclasses.replace(plan, store=store),
            on_line,
            timeout_s=timeout_s,
            mpich="mpich" in plan.peers,
            nodes=plan.nodes,
        )


def result_count_of(plan: AllreducePlan) -> int:
    """How many results ``run`` will see, without those that come again."""
    return len(plan.sizes) * (len(plan.algorithms) + len(plan.peers))


def rows_of(plan: AllreducePlan, outcome: AllreduceOutcome, missing: Mapping[str, str] | None = None) -> list[Row]:
    """A row for each algorithm and size, with the peers' times of the same run beside it. ``missing``: why a peer was
    not even asked to start."""
    absent = {**(missing or {}), **outcome.missing}
    by_contender = {(one.contender, one.size): one for one in outcome.measured}
    return [
        _row(plan, one, {peer: by_contender.get((peer, one.size)) for peer in PEERS}, absent)
        for one in outcome.measured
        if one.contender not in PEERS
    ]


def _row(plan: AllreducePlan, ours: Measured, peers: Mapping[str, Measured | None], absent: Mapping[str, str]) -> Row:
    links = plan.nodes if plan.nodes > 1 else plan.ranks  # a node has one, whatever its ranks
    least_bytes = bound_bytes(links, ours.size)
    rate = payload_bytes_per_s(plan.network)
    return {
        "op": plan.benchmark,
        "algorithm": ours.contender,
        "chosen": ours.chosen,
        "driver": ours.driver,
        "network": plan.network,
        "ranks": plan.ranks,
        "nodes": plan.nodes,
        "bytes": ours.size,
        "median_s": ours.timing.median_s,
        "min_s": ours.timing.min_s,
        "p90_s": ours.timing.p90_s,
        "samples": ours.samples,
        "measured_again": ours.again,
        "algbw_bytes_per_s": ours.size / ours.timing.median_s,
        "busbw_bytes_per_s": ours.size / ours.timing.median_s * bus_factor(plan.ranks),
        "wire_bytes": ours.wire_bytes,
        "bound_bytes": least_bytes,
        "bound_s": least_bytes / rate if rate else None,
        "wrong": ours.wrong,
        **{name: value for peer, one in peers.items() for name, value in _beside(peer, ours, one, absent).items()},
    }


def _beside(peer: str, ours: Measured, theirs: Measured | None, absent: Mapping[str, str]) -> Row:
    return {
        f"{peer}_median_s": theirs.timing.median_s if theirs else None,
        f"{peer}_p90_s": theirs.timing.p90_s if theirs else None,
        f"{peer}_samples": theirs.samples if theirs else None,
        f"ratio_to_{peer}": ours.timing.median_s / theirs.timing.median_s if theirs else None,
        f"{peer}_wrong": theirs.wrong if theirs else None,
        f"{peer}_missing": None if theirs else absent.get(peer, "not asked for"),
    }
