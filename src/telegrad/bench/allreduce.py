"""The ranks' side of ``telegrad bench allreduce``: dense sums in place, ours and the peer's, in turn.

A sample is a barrier and then a number of calls one after another; its time is the slowest rank's. All contenders take
their first sample, then all their second, and so on, each time in another order: neither what else the machine does nor
what the one before leaves behind favours one of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from telegrad import Communicator, _core
from telegrad.bench.peers import Peer, make_peer
from telegrad.bench.plan import Measured, Plan, Timing
from telegrad.launch import join, rank_and_size
from telegrad.launch.joining import exchange

Vector = npt.NDArray[np.float32]

_FEWEST_SAMPLES = 3
_MOST_CALLS = 200
_TIMEOUT_S = 300.0
_JOIN_TIMEOUT_S = 120.0


@dataclass
class _Contender:
    name: str
    call: Callable[[Vector], object]
    ours: bool
    calls: int = 1
    samples: int = 0
    wrong: int = 0
    wire_bytes: float | None = None
    times_s: list[float] = field(default_factory=list)


def main(plan_json: str) -> None:
    """One rank. Rank 0 prints a line of JSON for each contender at each size."""
    plan = Plan.from_json(plan_json)
    with _joined(plan) as communicator:
        peer = make_peer(plan, communicator.rank)
        for size in plan.sizes:
            contenders = _contenders(plan, communicator, peer)
            _measure(plan, communicator, contenders, size)
            if communicator.rank != 0:
                continue
            for contender in contenders:
                timing = Timing.of(contender.times_s)
                found = Measured(
                    contender.name, size, timing, contender.wire_bytes, contender.wrong, communicator.driver
                )
                print(found.to_json(), flush=True)
        if peer is not None:
            communicator.barrier()  # a peer's close may need all ranks
            peer.close()


def _joined(plan: Plan) -> Communicator:
    if plan.watched:
        return join(timeout_s=_TIMEOUT_S, join_timeout_s=_JOIN_TIMEOUT_S)
    rank, size = rank_and_size()
    # No user may have this, so it is no argument of the public functions.
    core = _core.Communicator.ucx(rank, size, exchange(_JOIN_TIMEOUT_S), _TIMEOUT_S, None, None, checks=False)
    return Communicator(core)


def _contenders(plan: Plan, communicator: Communicator, peer: Peer | None) -> list[_Contender]:
    def ours(algorithm: str) -> _Contender:
        return _Contender(algorithm, lambda x: communicator.all_reduce(x, algorithm=algorithm), True)

    contenders = [ours(algorithm) for algorithm in plan.algorithms]
    return contenders if peer is None else [*contenders, _Contender(peer.name, peer.all_reduce, False)]


def _measure(plan: Plan, communicator: Communicator, contenders: list[_Contender], size: int) -> None:
    x = np.empty(size // 4, np.float32)
    for contender in contenders:
        _verify(communicator, contender, x)
    x.fill(0)  # a sum of zeros stays one, however often it is taken
    for contender in contenders:
        _choose_repetitions(plan, communicator, contender, x)
    for number in range(max(contender.samples for contender in contenders)):
        for index in np.random.default_rng(number).permutation(len(contenders)):  # alike on all ranks
            contender = contenders[index]
            if number < contender.samples:
                contender.times_s.append(_sample(communicator, contender, x))


def _verify(communicator: Communicator, contender: _Contender, x: Vector) -> None:
    """Counts wrong values and bytes of one call, which also warms up."""
    ranks = communicator.world_size
    whole = np.arange(x.size, dtype=np.int64) % 1009
    contender.call(x)
    x[:] = whole + communicator.rank
    sent = communicator.stats()["bytes_sent"]
    contender.call(x)
    sent = communicator.stats()["bytes_sent"] - sent
    wrong = int(np.count_nonzero(x != (whole * ranks + ranks * (ranks - 1) // 2).astype(np.float32)))
    gathered = communicator.all_gather(np.array([wrong, sent], np.int64))
    contender.wrong = int(gathered[:, 0].sum())
    contender.wire_bytes = float(gathered[:, 1].max()) if contender.ours else None


def _choose_repetitions(plan: Plan, communicator: Communicator, contender: _Contender, x: Vector) -> None:
    first_s = min(_sample(communicator, contender, x) for _ in range(2))
    contender.calls = int(np.clip(plan.sample_s / max(first_s, 1e-7), 1, _MOST_CALLS))
    affordable = plan.most_s / max(first_s * contender.calls, 1e-7)
    contender.samples = int(np.clip(affordable, _FEWEST_SAMPLES, plan.samples))


def _sample(communicator: Communicator, contender: _Contender, x: Vector) -> float:
    """Seconds per call; the same number on all ranks."""
    communicator.barrier()
    begin = time.perf_counter()
    for _ in range(contender.calls):
        contender.call(x)
    mine = (time.perf_counter() - begin) / contender.calls
    return float(communicator.all_gather(np.array([mine])).max())
