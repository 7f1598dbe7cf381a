"""What a study has found: runs that differ in their seeds alone become one row. Knows no process and no terminal."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from lab.accuracy.runs import DENSE, METHODS, TASKS

Result = Mapping[str, Any]
Row = dict[str, Any]

_ALIKE = ("task", "method", "density", "steps", "batch", "ranks", "size", "device")
_SAME_TRAINING = tuple(name for name in _ALIKE if name not in ("method", "density"))


def rows_of(results: Sequence[Result]) -> list[Row]:
    """One for each method at each density of each task, in the order of the tables.

    ``value`` is the mean over seeds of the figure that the task is judged by (``judged_by``: ``"accuracy"``, percent;
    ``"loss"``, nats per byte), ``lowest`` and ``highest`` its range; ``values`` by seed, None for a run that diverged.
    ``behind_dense``: how much worse than the mean of dense runs of the same seeds: points of accuracy, percent of the
    loss; None without such. ``perplexity`` (per byte): of the mean loss. ``sent_bytes_per_step``: by one rank;
    ``less``: how many times fewer than dense. ``reduced_density``, ``selected`` and ``travelled``: see ``Training``,
    over the whole run. ``rate``: at which learning rate, as a multiple of the task's: the best of ``rates``, which have
    the values of the first seed.
    """
    groups = grouped(results)
    rows = [_row(alike, groups) | {"rates": _tried(alike[0], results)} for alike in groups.values()]
    return sorted(rows, key=lambda row: (*_place(row), -row["density"]))


def grouped(results: Sequence[Result]) -> dict[tuple[Any, ...], list[Result]]:
    """Those that differ in their seeds alone, by all else, at the best learning rate of those that were tried."""
    best = best_rates(results)
    found: dict[tuple[Any, ...], list[Result]] = {}
    for result in results:
        if _rate(result) == best[_key(result)]:
            found.setdefault(_key(result), []).append(result)
    return {key: sorted(alike, key=lambda result: int(result["run"]["seed"])) for key, alike in found.items()}


def best_rates(results: Sequence[Result]) -> dict[tuple[Any, ...], float]:
    """By all but rate and seed (task, method and density first), the rate with which the first seed ended best; of
    equals that nearest to 1. Seeds beyond the first, which only the best rate has, do not judge."""
    found: dict[tuple[Any, ...], list[Result]] = {}
    for result in results:
        found.setdefault(_key(result), []).append(result)
    firsts = {key: min(int(one["run"]["seed"]) for one in own) for key, own in found.items()}
    return {
        key: _rate(min((one for one in own if one["run"]["seed"] == firsts[key]), key=_badness))
        for key, own in found.items()
    }


def _badness(result: Result) -> tuple[float, float]:
    value = value_of(result)
    judged_by = TASKS[result["run"]["task"]].judged_by
    bad = math.inf if value is None else -value if judged_by == "accuracy" else value
    return bad, abs(math.log(_rate(result)))


def _tried(result: Result, results: Sequence[Result]) -> dict[str, float | None]:
    """The values of its seed by rate, as JSON's keys."""
    seed = result["run"]["seed"]
    alike = [one for one in results if _key(one) == _key(result) and one["run"]["seed"] == seed]
    return {f"{_rate(one):g}": value_of(one) for one in sorted(alike, key=_rate)}


def _key(result: Result) -> tuple[Any, ...]:
    return tuple(result["run"][name] for name in _ALIKE)


def _rate(result: Result) -> float:
    return float(result["run"].get("rate", 1.0))


def value_of(result: Result) -> float | None:
    """The figure at the end that its task is judged by; None if it diverged."""
    if result["diverged"] is not None:
        return None
    return float(result["points"][-1][TASKS[result["run"]["task"]].judged_by])


def mean_over(result: Result, name: str) -> float:
    """A figure that points give as a mean since the last one, as a mean over all steps. NaN without points."""
    total, before = 0.0, 0
    for point in result["points"]:
        total += point[name] * (point["step"] - before)
        before = point["step"]
    return total / before if before else math.nan


def _row(alike: Sequence[Result], groups: Mapping[tuple[Any, ...], Sequence[Result]]) -> Row:
    run = alike[0]["run"]
    task = TASKS[run["task"]]
    values = {result["run"]["seed"]: value_of(result) for result in alike}
    ended = [value for value in values.values() if value is not None]
    dense = _dense_of(run, groups)
    row: Row = {name: run[name] for name in _ALIKE} | {
        "judged_by": task.judged_by,
        "seeds": list(values),
        "values": list(values.values()),
        "value": statistics.fmean(ended) if ended else None,
        "lowest": min(ended, default=None),
        "highest": max(ended, default=None),
        "behind_dense": _behind(task.judged_by, values, dense),
        "sent_bytes_per_step": _sent_per_step(alike),
        "less": None,
        "reduced_density": _mean(mean_over(result, "reduced_density") for result in alike),
        "selected": _mean(result["points"][-1]["selected"] for result in alike if result["points"]),
        "travelled": _mean(
            result["points"][-1].get("travelled", math.nan) for result in alike if result["points"]
        ),  # nan: of before it was counted
        "rate": _rate(alike[0]),
        "compressed_parameters": alike[0]["compressed_parameters"],
        "parameters": alike[0]["parameters"],
        "seconds": sum(result["seconds"] for result in alike),
    }
    if task.judged_by == "loss":
        row["perplexity"] = None if row["value"] is None else math.exp(row["value"])
    dense_sent = _sent_per_step(list(dense.values())) if dense else None
    if dense_sent is not None and row["sent_bytes_per_step"]:
        row["less"] = dense_sent / row["sent_bytes_per_step"]
    return row


def _dense_of(run: Mapping[str, Any], groups: Mapping[tuple[Any, ...], Sequence[Result]]) -> dict[int, Result]:
    """Dense runs of the same training, by seed."""
    same = [run[name] for name in _SAME_TRAINING]
    for alike in groups.values():
        other = alike[0]["run"]
        if other["method"] == DENSE and [other[name] for name in _SAME_TRAINING] == same:
            return {result["run"]["seed"]: result for result in alike}
    return {}


def _behind(judged_by: str, values: Mapping[int, float | None], dense: Mapping[int, Result]) -> float | None:
    pairs = [
        (own, reference)
        for seed, own in values.items()
        if own is not None and seed in dense and (reference := value_of(dense[seed])) is not None
    ]
    if not pairs or len(pairs) < len(values):  # a mean without those that diverged would flatter
        return None
    own, reference = (statistics.fmean(side) for side in zip(*pairs, strict=True))
    return reference - own if judged_by == "accuracy" else 100 * (own / reference - 1)


def _sent_per_step(alike: Sequence[Result]) -> float | None:
    return _mean(
        result["points"][-1]["sent_bytes"] / result["points"][-1]["step"] for result in alike if result["points"]
    )


def _mean(figures: Any) -> float | None:
    found = [figure for figure in figures if math.isfinite(figure)]
    return statistics.fmean(found) if found else None


def _place(row: Row) -> tuple[int, int, int, int]:
    return list(TASKS).index(row["task"]), row["batch"], row["ranks"], list(METHODS).index(row["method"])
