"""The last operations of each rank before a hang, as a picture. Needs matplotlib."""

from __future__ import annotations

import textwrap
from pathlib import Path

from telegrad.report.hang import HangVerdict
from telegrad.report.hang_files import Operation
from telegrad.report.hang_lanes import Lane

_COLOURS = ("#1f77b4", "#2ca02c", "#9467bd", "#8c564b", "#17becf", "#bcbd22", "#e377c2", "#7f7f7f")
_STUCK = "#d62728"


def plot(verdict: HangVerdict, path: Path, most_operations: int = 24) -> None:
    """Writes a PNG: a lane per rank with its last operations against the time at which they ran, by the ranks' own
    clocks. A bar that ends in red did not end before its rank's report.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    lanes = verdict.lanes
    figure = Figure(figsize=(12, 1.8 + 0.28 * min(len(lanes), 256)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    latest_s = max((lane.report.written_unix_s for lane in lanes if lane.report), default=0.0)
    bars = [(lane, bar) for lane in lanes for bar in _bars(lane, latest_s, most_operations)]
    first_s = min((begin_s for _, (_, begin_s, _) in bars), default=-1.0)
    thinnest_s = max(-first_s, 1e-6) / 400  # so that a short operation is seen at all
    names = sorted({operation.operation for _, (operation, _, _) in bars})
    colours = {name: _COLOURS[at % len(_COLOURS)] for at, name in enumerate(names)}
    for lane, (operation, begin_s, end_s) in bars:
        over = operation.state == "completed"
        axes.barh(
            lane.rank,
            max(end_s - begin_s, thinnest_s),
            left=begin_s,
            height=0.7,
            color=colours[operation.operation] if over else "white",
            edgecolor="white" if over else _STUCK,
            linewidth=0.5 if over else 1.5,
            hatch=None if over else "////",
        )
        if operation.tag == verdict.tag:
            text = f"{operation.tag}: {operation.operation}"
            ground = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
            axes.annotate(
                text,
                (begin_s, lane.rank),
                xytext=(5, 0),
                textcoords="offset points",
                va="center",
                fontsize=7,
                bbox=ground,
            )
    handles = [Patch(color=colours[name], label=name) for name in names]
    handles.append(Patch(facecolor="white", edgecolor=_STUCK, hatch="////", label="not complete"))
    for lane in lanes:
        if lane.report is None:
            axes.text(first_s, lane.rank, "no report", va="center", fontsize=8, color=_STUCK)
    axes.set_yticks([lane.rank for lane in lanes], [_lane_name(lane) for lane in lanes], fontsize=8)
    for label, lane in zip(axes.get_yticklabels(), lanes, strict=True):
        label.set_color(_STUCK if lane.rank in verdict.culprits else "black")
    axes.set(xlabel="seconds before the latest report", xlim=(1.02 * first_s, -0.01 * first_s))
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    axes.set_title(_wrapped(verdict.sentence), fontsize=9, loc="left")
    axes.grid(visible=True, axis="x", alpha=0.3)
    axes.legend(handles=handles, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(path, dpi=110, format="png")


def _bars(lane: Lane, latest_s: float, most: int) -> list[tuple[Operation, float, float]]:
    """Operations with their begin and end, in seconds relative to ``latest_s``."""
    report = lane.report
    if report is None:
        return []
    written_s = report.written_unix_s - latest_s
    bars = []
    for operation in report.operations[-most:]:
        begin_s = written_s - operation.called_s_ago
        ended = operation.took_s is not None and operation.state != "running"
        bars.append((operation, begin_s, begin_s + (operation.took_s or 0.0) if ended else written_s))
    return bars


def _lane_name(lane: Lane) -> str:
    return f"rank {lane.rank}" + (f" ({lane.host})" if lane.host else "")


def _wrapped(text: str) -> str:
    return "\n".join(line.replace("$", r"\$") for line in textwrap.wrap(text, 140)[:4])
