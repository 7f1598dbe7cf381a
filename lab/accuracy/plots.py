"""A study as a picture: each task's held-out figure against steps and against bytes; sweeps. Needs matplotlib."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lab.accuracy.results import grouped, value_of
from lab.accuracy.runs import TASKS, Task
from telegrad.tools.report.figures import (
    COLORS,
    GREY,
    counts_across,
    looks_of,
    name_lines,
    picture,
    seconds_across,
)

Result = Mapping[str, Any]

_SEEN_AFTER = 0.25  # the fall from the first values would flatten everything else
_HIGH = 3.1  # inches of a panel
_LINE_HIGH = 0.155  # inches of a name beside a line


def plot(parts: Mapping[str, Sequence[Result]], title: str, path: Path) -> None:
    """Two panels for each task of the part ``"methods"``, one for the sweep ``"batch"``, one for the sweep ``"ranks"``
    and one more for each of its two smallest densities; curves are means over seeds, shaded over their range. PNG
    unless the path's suffix says otherwise.
    """
    methods = parts.get("methods", ())
    tasks = list(dict.fromkeys(result["run"]["task"] for result in methods))
    swept = [name for name in ("batch", "ranks") if parts.get(name)]
    densities = sorted({result["run"]["density"] for result in parts.get("ranks", ())})[:2]
    of_task = {task: [one for one in methods if one["run"]["task"] == task] for task in tasks}
    heights = [max(_HIGH, 0.7 + _LINE_HIGH * len(set(map(_label, own)))) for own in of_task.values()]
    heights += [_HIGH] * (bool(swept) + bool(densities))
    with picture(path, title, height=0.5 + sum(heights or [_HIGH])) as figure:
        panels = figure.subplots(len(heights or [_HIGH]), 2, squeeze=False, height_ratios=heights or None)
        for (task, own), (over_steps, over_bytes) in zip(of_task.items(), panels, strict=False):
            _draw_task(task, own, over_steps, over_bytes)
        for panel in panels[len(tasks) :].flat:
            panel.set_visible(False)
        for name, panel in zip(swept, panels[len(tasks) :].flat, strict=False):
            panel.set_visible(True)
            (_draw_batches if name == "batch" else _draw_ranks)(parts[name], panel)
        for density, panel in zip(densities, panels[-1], strict=False):
            panel.set_visible(True)
            _draw_growth([one for one in parts["ranks"] if one["run"]["density"] == density], panel)


def _across(task: Task) -> str:
    return "held-out top-1 (%)" if task.judged_by == "accuracy" else f"held-out loss (nats/{task.unit})"


def _label(result: Result) -> str:
    run = result["run"]
    density = f" {run['density'] * 100:g} %" if result["compressed_parameters"] else ""
    return f"{run['method']}{density}"


def curve_of(alike: Sequence[Result], across: str, figure: str) -> list[tuple[float, float, float, float]]:
    """Runs that differ in their seeds: (x, mean, least, most) at each point that all of them have."""
    points = []
    for together in zip(*(result["points"] for result in alike), strict=False):
        values = [point[figure] for point in together]
        where = statistics.fmean(point[across] for point in together)
        points.append((where, statistics.fmean(values), min(values), max(values)))
    return points


def _draw_task(task: str, results: Sequence[Result], over_steps: Any, over_bytes: Any) -> None:
    judged_by = TASKS[task].judged_by
    late: list[float] = []
    looks = looks_of([_label(one) for one in results])
    for alike in grouped(results).values():
        label = _label(alike[0])
        look = looks[label].of_line() | {"marker": "", "linewidth": 1.2 if alike[0]["compressed_parameters"] else 2.2}
        for panel, across, unit in ((over_steps, "step", 1.0), (over_bytes, "sent_bytes", 1e-6)):
            curve = curve_of(alike, across, judged_by)
            if not curve:
                continue
            x = [point[0] * unit for point in curve]
            panel.plot(x, [point[1] for point in curve], label=label, **look)
            panel.fill_between(
                x, [point[2] for point in curve], [point[3] for point in curve], color=look["color"], alpha=0.12
            )
            late += [point[1] for point in curve if point[0] > _SEEN_AFTER * curve[-1][0]]
    over_steps.set(xlabel="steps", ylabel=_across(TASKS[task]), title=TASKS[task].about)
    over_bytes.set(xlabel="sent by one rank (MB)", xscale="log", title="the same lines over sent bytes")
    for panel in (over_steps, over_bytes):
        _show_late(panel, late)
    name_lines(over_steps)


def _show_late(panel: Any, late: Sequence[float]) -> None:
    if late:
        margin = 0.05 * (max(late) - min(late)) or 1.0
        panel.set_ylim(min(late) - margin, max(late) + margin)


def draw_curves(task: str, results: Sequence[Result], panel: Any, step_s: Mapping[tuple[str, float], float]) -> None:
    """One task's runs over time: ``step_s`` has the seconds of a step by method and density; others are left out."""
    judged_by = TASKS[task].judged_by
    late: list[float] = []
    groups = {(alike[0]["run"]["method"], alike[0]["run"]["density"]): alike for alike in grouped(results).values()}
    labels = {key: key[0] + (f" {key[1] * 100:g} %" if key[1] < 1 else "") for key in step_s}
    looks = looks_of(list(labels.values()))
    for key, seconds in step_s.items():
        curve = curve_of(groups.get(key, ()), "step", judged_by)
        if not curve:
            continue
        look = looks[labels[key]].of_line() | {"marker": ""}
        panel.plot([x * seconds for x, *_ in curve], [y for _, y, *_ in curve], label=labels[key], **look)
        late += [y for x, y, *_ in curve if x > _SEEN_AFTER * curve[-1][0]]
    panel.set(ylabel=_across(TASKS[task]), xscale="log")
    _show_late(panel, late)
    seconds_across(panel.xaxis)
    name_lines(panel)


def _draw_batches(results: Sequence[Result], panel: Any) -> None:
    """The last figure against the batch."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for result in results:
        value = value_of(result)
        if value is not None:
            lines.setdefault(_label(result), []).append((result["run"]["batch"], value))
    looks = looks_of(list(lines))
    for label, points in lines.items():
        panel.plot(*zip(*sorted(points), strict=True), label=label, **looks[label].of_line())
    task = TASKS[results[0]["run"]["task"]]
    counts_across(panel, sorted({result["run"]["batch"] for result in results}))
    panel.set(
        xlabel="samples per step",
        ylabel=_across(task),
        title=f"{task.about},\nafter {results[0]['run']['steps']:,} steps",
    )
    name_lines(panel)


def _draw_ranks(results: Sequence[Result], panel: Any) -> None:
    """Density of the reduced gradient against ranks, early and late in training (SparCML, Figure 1), beside what
    entries drawn at random would give.
    """
    from matplotlib.ticker import PercentFormatter

    for place, density in enumerate(sorted({result["run"]["density"] for result in results})):
        runs = sorted((one for one in results if one["run"]["density"] == density), key=lambda one: one["run"]["ranks"])
        runs = [one for one in runs if one["points"]]
        ranks = [one["run"]["ranks"] for one in runs]
        for which, style in ((0, ":"), (-1, "-")):
            panel.plot(
                ranks,
                [one["points"][which]["reduced_density"] for one in runs],
                color=COLORS[place % len(COLORS)],
                linestyle=style,
                marker="o",
                label=f"{density * 100:g} %,\n{'first' if which == 0 else 'last'} steps",
            )
        panel.plot(
            ranks,
            [-math.expm1(count * math.log1p(-density)) if density < 1 else 1.0 for count in ranks],
            color=GREY,
            linewidth=1,
            linestyle="--",
            label=f"{density * 100:g} %,\nat random",
        )
    task = TASKS[results[0]["run"]["task"]]
    panel.set(yscale="log", xlabel="ranks", ylabel="density of the reduced gradient", title=task.about)
    counts_across(panel, sorted({result["run"]["ranks"] for result in results}))
    panel.yaxis.set_major_formatter(PercentFormatter(1.0))
    name_lines(panel)


def _draw_growth(results: Sequence[Result], panel: Any) -> None:
    """Density of the reduced gradient over the training, of one density of each rank (SparCML, Figure 1)."""
    from matplotlib.ticker import LogLocator, NullFormatter, PercentFormatter

    for place, result in enumerate(sorted(results, key=lambda one: one["run"]["ranks"])):
        run = result["run"]
        panel.plot(
            [run["batch"] * point["step"] for point in result["points"]],
            [point["reduced_density"] for point in result["points"]],
            marker="o",
            markersize=2.5,
            color=COLORS[place % len(COLORS)],
            label=f"{run['ranks']} ranks",
        )
    run = results[0]["run"]
    panel.set(
        xscale="log",
        yscale="log",
        xlabel="samples seen by all ranks",
        ylabel="density of the reduced gradient",
        title=f"{TASKS[run['task']].about},\neach rank selects {run['density'] * 100:g} %",
    )
    panel.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    panel.yaxis.set_major_formatter(PercentFormatter(1.0))
    panel.yaxis.set_minor_formatter(NullFormatter())
    name_lines(panel)
