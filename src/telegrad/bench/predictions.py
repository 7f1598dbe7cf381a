"""How well the simulator predicts a network: its costs are calibrated on the network laboratory, and what it then says
of every collective stands beside the time that the collective takes there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict

from telegrad import _core
from telegrad.bench.networks import open_network
from telegrad.bench.plan import Timing
from telegrad.bench.predictions_plan import (
    Measurement,
    PredictionPlan,
    calibration,
    calibration_probes,
    collectives_of,
    measurements_of,
)
from telegrad.calibration.fit import CostFit, fit_costs
from telegrad.launch import SINGLE_THREADED, Ranks

Row = dict[str, object]
Times = dict[Measurement, list[float]]
"""Seconds per call, by sample."""

FEWEST_JUDGED_BYTES = 256 << 10
"""Of what a rank brings: below, latencies and the processor's share count more than the links that the model is of."""
WITHIN = 0.2
"""How far a judged prediction may be off, as a part of the measured time."""

_TARGET = "telegrad.bench.predictions_ranks:main"


def count_of(plan: PredictionPlan) -> int:
    """How many samples ``run`` will see."""
    return len(measurements_of(plan)) * plan.repetitions


def run(
    plan: PredictionPlan, *, timeout_s: float, on_sample: Callable[[Measurement], None] = lambda _: None
) -> tuple[Times, dict[Measurement, int]]:
    """The times of all that ``plan`` asks for, and how many values of each were wrong; ``on_sample`` is called as each
    sample comes. Raises ``RankFailed``, ``RanksTimedOut`` and ``NetlabError``."""
    measurements = measurements_of(plan)
    times: Times = {one: [] for one in measurements}
    wrong = dict.fromkeys(measurements, 0)

    def take(rank: int, line: str) -> None:
        if rank != 0 or not line.startswith("{"):
            return
        said = json.loads(line)
        one = measurements[said["index"]]
        if "wrong" in said:
            wrong[one] += said["wrong"]
        else:
            times[one].append(said["seconds"])
            on_sample(one)

    with (
        open_network(plan.network, plan.ranks) as network,
        Ranks(
            _TARGET,
            plan.ranks,
            timeout_s=timeout_s,
            arguments=[plan.to_json()],
            environment={**SINGLE_THREADED, **network.environment},
            prefix_of=network.prefix_of,
            on_line=take,
        ) as ranks,
    ):
        ranks.wait()
    return times, wrong


def calibration_from(plan: PredictionPlan, times: Mapping[Measurement, list[float]]) -> CostFit:
    """The model's costs on the plan's network among its ranks."""
    medians = [Timing.of(times[one]).median_s for one in calibration()]
    return fit_costs(dict(zip(calibration_probes(), medians, strict=True)), plan.ranks)


def points_of(times: Mapping[Measurement, list[float]]) -> list[Row]:
    """What the calibration has measured: a row per kind and length of message."""
    return [{"kind": one.operation, "bytes": one.bytes, **asdict(Timing.of(times[one]))} for one in calibration()]


def predict(one: Measurement, ranks: int, costs: Mapping[str, float]) -> float:
    """Virtual seconds until the last rank has finished the collective ``one``, size-only. Raises ``ValueError`` for
    what is no collective."""
    outcome = _core.measure(
        one.operation, one.algorithm, ranks, one.bytes, nnz=one.nnz or 0, payloads=False, costs=dict(costs)
    )
    return float(outcome["finish_s"])


def rows_of(
    plan: PredictionPlan,
    times: Mapping[Measurement, list[float]],
    wrong: Mapping[Measurement, int],
    calibration: CostFit,
) -> list[Row]:
    """A row per collective, with ``ratio``: the predicted time over the median of the measured ones."""
    return [_row(plan, one, Timing.of(times[one]), wrong[one], calibration) for one in collectives_of(plan)]


def _row(plan: PredictionPlan, one: Measurement, timing: Timing, wrong: int, calibration: CostFit) -> Row:
    # The one algorithm that exchanges in pairs, recursive doubling, sends whole vectors.
    predicted_s = predict(one, plan.ranks, calibration.costs(one.bytes))
    ratio = predicted_s / timing.median_s
    return {
        "op": one.operation,
        "algorithm": one.algorithm,
        "network": plan.network,
        "ranks": plan.ranks,
        "bytes": one.bytes,
        "density": one.density,
        "nnz": one.nnz,
        "input_bytes": one.input_bytes,
        "predicted_s": predicted_s,
        "median_s": timing.median_s,
        "min_s": timing.min_s,
        "p90_s": timing.p90_s,
        "ratio": ratio,
        "judged": one.input_bytes >= FEWEST_JUDGED_BYTES,
        "within": abs(ratio - 1) <= WITHIN,
        "wrong": wrong,
    }


def worst_of(rows: Iterable[Mapping[str, object]]) -> Mapping[str, object] | None:
    """The row whose prediction is furthest off; None without rows."""
    return max(rows, key=lambda row: abs(float(str(row["ratio"])) - 1), default=None)
