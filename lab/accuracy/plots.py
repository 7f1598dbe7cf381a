"""A study as a picture: each task's held-out figure against steps and against bytes; sweeps. Needs matplotlib."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lab.accuracy.results import grouped, value_of
from lab.accuracy.runs import TASKS

Result = Mapping[str, Any]

_STYLES = ("-", "--", ":", "-.")
_ACROSS = {"accuracy": "held-out top-1 (%)", "loss": "held-out loss (nats/byte)"}
_SEEN_AFTER = 0.25  # the fall from the first values would flatten everything else


def plot(parts: Mapping[str, Sequence[Result]], title: str, path: Path) -> None:
    """Two panels for each task of the part ``"methods"``, one for the sweep ``"batch"``, one for the sweep ``"ranks"``
    and one more for each of its two smallest densities; curves are means over seeds, shaded over their range. PNG
    unless the path's suffix says otherwise.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    tasks = list(dict.fromkeys(result["run"]["task"] for result in parts.get("methods", ())))
    swept = [name for name in ("batch", "ranks") if parts.get(name)]
    densities = sorted({result["run"]["density"] for result in parts.get("ranks", ())})[:2]
    down = len(tasks) + bool(swept) + bool(densities)
    figure = Figure(figsize=(13, 4.5 * max(1, down)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    panels = figure.subplots(max(1, down), 2, squeeze=False)
    for task, (over_steps, over_bytes) in zip(tasks, panels, strict=False):
        _draw_task(task, [one for one in parts["methods"] if one["run"]["task"] == task], over_steps, over_bytes)
    for panel in panels[len(tasks) :].flat:
        panel.set_visible(False)
    for name, panel in zip(swept, panels[len(tasks) :].flat, strict=False):
        panel.set_visible(True)
        (_draw_batches if name == "batch" else _draw_ranks)(parts[name], panel)
    for density, panel in zip(densities, panels[-1], strict=False):
        panel.set_visible(True)
        _draw_growth([one for one in parts["ranks"] if one["run"]["density"] == density], panel)
    figure.savefig(path, dpi=110, format=None if path.suffix else "png")


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
    groups = list(grouped(results).values())
    methods = list(dict.fromkeys(alike[0]["run"]["method"] for alike in groups))
    densities = sorted(
        {alike[0]["run"]["density"] for alike in groups if alike[0]["compressed_parameters"]}, reverse=True
    )
    late: list[float] = []
    for alike in groups:
        run = alike[0]["run"]
        sparse = bool(alike[0]["compressed_parameters"])
        look = {
            "color": f"C{methods.index(run['method']) % 10}",
            "linestyle": _STYLES[densities.index(run["density"]) % len(_STYLES)] if sparse else "-",
            "linewidth": 1.2 if sparse else 2.0,
        }
        label = run["method"] + (f" {run['density'] * 100:g} %" if sparse else "")
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
    over_steps.set(xlabel="steps", ylabel=_ACROSS[judged_by], title=TASKS[task].about)
    over_bytes.set(xlabel="sent by one rank (MB)", xscale="log")
    for panel in (over_steps, over_bytes):
        if late:
            margin = 0.05 * (max(late) - min(late)) or 1.0
            panel.set_ylim(min(late) - margin, max(late) + margin)
        panel.grid(visible=True, alpha=0.3)
    if over_bytes.lines:
        over_bytes.legend(fontsize=7)


def draw_curves(task: str, results: Sequence[Result], panel: Any, step_s: Mapping[tuple[str, float], float]) -> None:
    """One task's runs over time: ``step_s`` has the seconds of a step by method and density; others are left out."""
    judged_by = TASKS[task].judged_by
    late: list[float] = []
    groups = {(alike[0]["run"]["method"], alike[0]["run"]["density"]): alike for alike in grouped(results).values()}
    for place, (key, seconds) in enumerate(step_s.items()):
        curve = curve_of(groups.get(key, ()), "step", judged_by)
        if not curve:
            continue
        label = key[0] + (f" {key[1] * 100:g} %" if key[1] < 1 else "")
        panel.plot([x * seconds for x, *_ in curve], [y for _, y, *_ in curve], label=label, color=f"C{place % 10}")
        late += [y for x, y, *_ in curve if x > _SEEN_AFTER * curve[-1][0]]
    if late:
        margin = 0.05 * (max(late) - min(late)) or 1.0
        panel.set_ylim(min(late) - margin, max(late) + margin)
        panel.legend(fontsize=7)
    panel.set(ylabel=_ACROSS[judged_by], xscale="log")
    panel.grid(visible=True, alpha=0.3)


def _draw_batches(results: Sequence[Result], panel: Any) -> None:
    """The last figure against the batch."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for result in results:
        run, value = result["run"], value_of(result)
        label = run["method"] + (f" {run['density'] * 100:g} %" if result["compressed_parameters"] else "")
        if value is not None:
            lines.setdefault(label, []).append((run["batch"], value))
    for label, points in lines.items():
        panel.plot(*zip(*sorted(points), strict=True), marker="o", markersize=4, label=label)
    task = TASKS[results[0]["run"]["task"]]
    _counts_across(panel, [result["run"]["batch"] for result in results])
    panel.set(
        xlabel="samples per step",
        ylabel=_ACROSS[task.judged_by],
        title=f"{task.about}: after {results[0]['run']['steps']:,} steps",
    )
    panel.grid(visible=True, alpha=0.3)
    panel.legend(fontsize=7)


def _draw_ranks(results: Sequence[Result], panel: Any) -> None:
    """Density of the reduced gradient against ranks, early and late in training (SparCML, Figure 1), beside what
    entries drawn at random would give.
    """
    from matplotlib.ticker import PercentFormatter

    for place, density in enumerate(sorted({result["run"]["density"] for result in results})):
        runs = sorted((one for one in results if one["run"]["density"] == density), key=lambda one: one["run"]["ranks"])
        runs = [one for one in runs if one["points"]]
        ranks = [one["run"]["ranks"] for one in runs]
        for which, style, alpha in ((0, ":", 0.7), (-1, "-", 1.0)):
            panel.plot(
                ranks,
                [one["points"][which]["reduced_density"] for one in runs],
                color=f"C{place}",
                linestyle=style,
                alpha=alpha,
                marker="o",
                markersize=4,
                label=f"{density * 100:g} % a rank, {'first' if which == 0 else 'last'} steps",
            )
        panel.plot(
            ranks,
            [-math.expm1(count * math.log1p(-density)) if density < 1 else 1.0 for count in ranks],
            color="grey",
            linewidth=1,
            linestyle="--",
            label="at random" if place == 0 else None,
        )
    task = TASKS[results[0]["run"]["task"]]
    panel.set(yscale="log", xlabel="ranks", ylabel="density of the reduced gradient", title=task.about)
    _counts_across(panel, [result["run"]["ranks"] for result in results])
    panel.yaxis.set_major_formatter(PercentFormatter(1.0))
    panel.grid(visible=True, alpha=0.3)
    panel.legend(fontsize=7)


def _draw_growth(results: Sequence[Result], panel: Any) -> None:
    """Density of the reduced gradient over the training, of one density of each rank (SparCML, Figure 1)."""
    from matplotlib.ticker import PercentFormatter

    for result in sorted(results, key=lambda one: one["run"]["ranks"]):
        run = result["run"]
        panel.plot(
            [run["batch"] * point["step"] for point in result["points"]],
            [point["reduced_density"] for point in result["points"]],
            marker="o",
            markersize=3,
            label=f"{run['ranks']} ranks",
        )
    run = results[0]["run"]
    panel.set(
        xscale="log",
        yscale="log",
        xlabel="samples seen by all ranks",
        ylabel="density of the reduced gradient",
        title=f"{TASKS[run['task']].about}: each rank selects {run['density'] * 100:g} %",
    )
    panel.yaxis.set_major_formatter(PercentFormatter(1.0))
    panel.yaxis.set_minor_formatter(PercentFormatter(1.0))
    panel.grid(visible=True, alpha=0.3)
    panel.legend(fontsize=7)


def _counts_across(panel: Any, counts: Sequence[int]) -> None:
    """A logarithmic axis with exactly these counts on it."""
    ticks = sorted(set(counts))
    panel.set_xscale("log", base=2)
    panel.set_xticks(ticks, [f"{count:,}" for count in ticks])
    panel.minorticks_off()
