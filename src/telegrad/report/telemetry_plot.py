"""The figures of a training's tensors over its steps, as a picture. Needs matplotlib."""

from __future__ import annotations

import math
from pathlib import Path

from telegrad.report.telemetry import FIGURES, Run, printable, title_of

_NAMED = 9  # of the largest tensors have a colour and a name; the others are grey
_LOGARITHMIC = ("compression", "threshold")


def plot(run: Run, path: Path) -> None:
    """Writes a PNG with a panel for each figure and a line for each tensor."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 8), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (name, figure_of) in zip(figure.subplots(2, 2, sharex=True).flat, FIGURES.items(), strict=True):
        drawn = False
        for place, tensor in reversed(list(enumerate(run.names))):  # the largest on top
            points = [(step, value) for step, one in run.of(tensor) if (value := figure_of(one)) is not None]
            points = [(step, value) for step, value in points if math.isfinite(value)]
            if not points:
                continue
            drawn = True
            named = place < _NAMED
            axes.plot(
                *zip(*points, strict=True),
                color=f"C{place}" if named else "#bbbbbb",
                linewidth=1.2 if named else 0.6,
                marker="." if len(points) < 3 else None,
                label=printable(tensor).replace("$", r"\$") if named else None,
            )
        if drawn and name.startswith(_LOGARITHMIC) and all(line.get_ydata().min() > 0 for line in axes.get_lines()):
            axes.set_yscale("log")
        if name.startswith("selected"):
            axes.axhline(1, color="black", linewidth=0.6, linestyle=":")
            axes.set_ylim(bottom=0)
        axes.set_title(name, fontsize=10)
        axes.grid(alpha=0.3)
    for axes in figure.axes[2:]:
        axes.set_xlabel("step")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    others = f"grey: {len(run.names) - _NAMED} smaller ones" if len(run.names) > _NAMED else None
    if handles:
        figure.legend(handles[::-1], labels[::-1], loc="outside right upper", fontsize=7, title=others)
    figure.suptitle(title_of(run), fontsize=10)
    figure.savefig(path, dpi=110)
