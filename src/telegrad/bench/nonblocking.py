"""The ranks' side of ``telegrad bench nonblocking``: what a non-blocking sum costs beside a blocking one.

Three ways, in turn: blocking; issued and waited for at once; issued, and then the main thread multiplies small matrices
until the operation is over. The last one's time is until the end of the multiplication during which it was over, so
that it is too long by half a multiplication on average (``matmul_s`` says how long one takes).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from telegrad import Communicator
from telegrad.bench.plan import Plan, Timing
from telegrad.bench.runner import Row, report_of
from telegrad.launch import join

WAYS = ("blocking", "nonblocking", "computing")
_MATRIX = 48  # a multiplication takes about 10 µs, without threads
_MOST_CALLS = 500
_TIMEOUT_S, _JOIN_TIMEOUT_S = 300.0, 120.0


@dataclass
class _Way:
    call: Callable[[], object]
    calls: int = 1


def main(plan_json: str) -> None:
    """One rank. Rank 0 prints a row as JSON for each size."""
    plan = Plan.from_json(plan_json)
    with join(timeout_s=_TIMEOUT_S, join_timeout_s=_JOIN_TIMEOUT_S) as communicator:
        for size in plan.sizes:
            row = _measured(plan, communicator, size)
            if communicator.rank == 0:
                print(json.dumps(row), flush=True)


def run(plan: Plan, *, timeout_s: float, on_row: Callable[[Row], None] = lambda _: None) -> list[Row]:
    """A row per size: medians in seconds and their ratios to blocking. Raises ``RankFailed`` and ``RanksTimedOut``."""
    rows: list[Row] = []

    def take(rank: int, line: str) -> None:
        if rank == 0 and line.startswith("{"):
            row = json.loads(line)
            about = {"op": plan.benchmark, "network": plan.network, "ranks": plan.ranks}
            ratios = {f"{way}_ratio": row[f"{way}_median_s"] / row["blocking_median_s"] for way in WAYS[1:]}
            rows.append({**about, **row, **ratios})
            on_row(rows[-1])

    report_of(plan, take, timeout_s=timeout_s)
    return rows


def _measured(plan: Plan, communicator: Communicator, size: int) -> Row:
    x = np.zeros(size // 4, np.float32)
    left, right = np.ones((2, _MATRIX, _MATRIX), np.float32)
    product = np.empty_like(left)

    def compute_meanwhile() -> None:
        work = communicator.all_reduce(x, async_op=True)
        while not work.is_completed():
            np.matmul(left, right, out=product)
        work.wait()

    ways = {
        "blocking": _Way(lambda: communicator.all_reduce(x)),
        "nonblocking": _Way(lambda: communicator.all_reduce(x, async_op=True).wait()),
        "computing": _Way(compute_meanwhile),
    }
    wrong = sum(_wrong(communicator, x, way.call) for way in ways.values())
    for way in ways.values():
        once_s = min(_sample(communicator, way) for _ in range(3))
        way.calls = int(np.clip(plan.sample_s / max(once_s, 1e-9), 1, _MOST_CALLS))
    times_s: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(plan.samples):
        for index in np.random.default_rng(number).permutation(len(WAYS)):  # as on all ranks
            times_s[WAYS[index]].append(_sample(communicator, ways[WAYS[index]]))
    medians = {f"{name}_median_s": Timing.of(times).median_s for name, times in times_s.items()}
    matmul = _Way(lambda: np.matmul(left, right, out=product), calls=20)
    return {"bytes": size, **medians, "matmul_s": _sample(communicator, matmul), "wrong": wrong}


def _wrong(communicator: Communicator, x: np.ndarray, call: Callable[[], object]) -> int:
    """Wrong values of one call over all ranks; it also warms up. ``x`` is zero afterwards."""
    ranks = communicator.world_size
    x.fill(communicator.rank + 1)
    call()
    wrong = int(np.count_nonzero(x != ranks * (ranks + 1) // 2))
    x.fill(0)
    return int(communicator.all_gather(np.array([wrong], np.int64)).sum())


def _sample(communicator: Communicator, way: _Way) -> float:
    """Seconds per call, of the slowest rank; the same number on all."""
    communicator.barrier()
    begin = time.perf_counter()
    for _ in range(way.calls):
        way.call()
    mine = (time.perf_counter() - begin) / way.calls
    return float(communicator.all_gather(np.array([mine])).max())
