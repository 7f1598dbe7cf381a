"""How well the simulator predicts a network: its costs are calibrated on the network laboratory, and what it then says
of every collective stands beside the time that the collective takes there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from telegrad import _core
from telegrad.bench.job import run_job
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
from telegrad.calibration.pairs import first_counts
from telegrad.comm.stream_wire import formats_named
from telegrad.plan.cost import CARD_BYTES

Row = dict[str, object]


@dataclass(frozen=True)
class Measured:
    """What a job has found: ``times`` in seconds per call, by sample; how many ``calls`` one after another a sample
    has; how many values were ``wrong``."""

    times: Mapping[Measurement, list[float]]
    calls: Mapping[Measurement, int]
    wrong: Mapping[Measurement, int]


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
) -> Measured:
    """Measures all that ``plan`` asks for; ``on_sample`` is called as each sample comes. Raises ``RankFailed``,
    ``RanksTimedOut`` and ``NetlabError``."""
    measurements = measurements_of(plan)
    times: dict[Measurement, list[float]] = {one: [] for one in measurements}
    calls: dict[Measurement, int] = {}
    wrong: dict[Measurement, int] = {}

    def take(rank: int, line: str) -> None:
        if rank != 0 or not line.startswith("{"):
            return
        said = json.loads(line)
        one = measurements[said["index"]]
        if "wrong" in said:
            wrong[one] = said["wrong"]
        elif "calls" in said:
            calls[one] = said["calls"]
        else:
            times[one].append(said["seconds"])
            on_sample(one)

    run_job(_TARGET, plan, take, timeout_s=timeout_s)
    return Measured(times, calls, wrong)


def calibration_from(plan: PredictionPlan, times: Mapping[Measurement, list[float]]) -> CostFit:
    """The model's costs on the plan's network among its ranks."""
    medians = [Timing.of(times[one]).median_s for one in calibration()]
    return fit_costs(dict(zip(calibration_probes(), medians, strict=True)), plan.ranks)


def points_of(times: Mapping[Measurement, list[float]]) -> list[Row]:
    """What the calibration has measured: a row per kind and length of message."""
    return [{"kind": one.operation, "bytes": one.bytes, **asdict(Timing.of(times[one]))} for one in calibration()]


def predict(one: Measurement, ranks: int, costs: Mapping[str, float], calls: int) -> float:
    """Virtual seconds per call of the collective ``one``, size-only, as ``calibration.pairs.sample`` takes them: of the
    slowest rank in ``calls`` calls one after another, after one that does not count unless they are few. Raises
    ``ValueError`` for what is no collective."""

    formats = formats_named(one.wire or "blocked", "f32")

    def finish_s(count: int) -> npt.NDArray[np.float64]:
        outcome = _core.measure(
            one.operation,
            one.algorithm,
            ranks,
            one.bytes,
            nnz=one.nnz or 0,
            **formats._asdict(),
            calls=count,
            costs=dict(costs),
        )
        return np.asarray(outcome["finish_by_rank_s"])

    if first_counts(calls):
        return float(finish_s(calls).max()) / calls
    return float((finish_s(1 + calls) - finish_s(1)).max()) / calls


def rows_of(plan: PredictionPlan, measured: Measured, calibration: CostFit) -> list[Row]:
    """A row per collective, with ``ratio``: the predicted time over the median of the measured ones."""
    return [_row(plan, one, measured, calibration) for one in collectives_of(plan)]


def _row(plan: PredictionPlan, one: Measurement, measured: Measured, calibration: CostFit) -> Row:
    timing, calls = Timing.of(measured.times[one]), measured.calls[one]
    predicted_s = predict(one, plan.ranks, calibration.costs(min(one.bytes, CARD_BYTES)), calls)
    ratio = predicted_s / timing.median_s
    return {
        "op": one.operation,
        "algorithm": one.algorithm,
        "network": plan.network,
        "ranks": plan.ranks,
        "bytes": one.bytes,
        "density": one.density,
        "nnz": one.nnz,
        "wire": one.wire,
        "input_bytes": one.input_bytes,
        "calls": calls,
        "predicted_s": predicted_s,
        "median_s": timing.median_s,
        "min_s": timing.min_s,
        "p90_s": timing.p90_s,
        "ratio": ratio,
        "judged": one.input_bytes >= FEWEST_JUDGED_BYTES,
        "within": abs(ratio - 1) <= WITHIN,
        "wrong": measured.wrong[one],
    }


def worst_of(rows: Iterable[Mapping[str, object]]) -> Mapping[str, object] | None:
    """The row whose prediction is furthest off; None without rows."""
    return max(rows, key=lambda row: abs(float(str(row["ratio"])) - 1), default=None)
