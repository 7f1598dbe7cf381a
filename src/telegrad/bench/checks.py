"""What it costs to look after peers: heartbeats, liveness, and telling calls to whom one waits for.

The same sums are timed in jobs that do all that and in jobs that do none of it, one pair of jobs after the other, each
pair in the other order: two communicators in one process would share the engine, and with it the cost. What comes with
every message (an envelope, and the comparison of the call in it) is in both.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence

from telegrad.bench.plan import Plan
from telegrad.bench.runner import run

Row = dict[str, object]


def run_pairs(plan: Plan, pairs: int, *, timeout_s: float, on_job: Callable[[], None] = lambda: None) -> list[Row]:
    """A row per size: the medians of both kinds of job in seconds, and the median of the pairs' ratios. ``on_job`` is
    called after each of the ``2 * pairs`` jobs. Raises ``RankFailed`` and ``RanksTimedOut``."""
    medians: dict[bool, dict[int, list[float]]] = {True: {}, False: {}}
    wrong = 0
    for pair in range(pairs):
        for watched in (True, False) if pair % 2 else (False, True):
            for one in run(dataclasses.replace(plan, watched=watched, peers=()), timeout_s=timeout_s).measured:
                medians[watched].setdefault(one.size, []).append(one.timing.median_s)
                wrong += one.wrong
            on_job()
    return [_row(plan, size, medians[True][size], medians[False][size], wrong) for size in plan.sizes]


def _row(plan: Plan, size: int, watched: Sequence[float], unwatched: Sequence[float], wrong: int) -> Row:
    ratios = sorted(one / other for one, other in zip(watched, unwatched, strict=True))
    return {
        "op": plan.benchmark,
        "network": plan.network,
        "ranks": plan.ranks,
        "bytes": size,
        "watched_median_s": statistics.median(watched),
        "unwatched_median_s": statistics.median(unwatched),
        "ratio": statistics.median(ratios),
        "least_ratio": ratios[0],
        "most_ratio": ratios[-1],
        "pairs": len(ratios),
        "wrong": wrong,
    }
