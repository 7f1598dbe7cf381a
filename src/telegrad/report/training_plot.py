"""Training runs as a picture: held-out loss against time and against bytes. Needs matplotlib."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from telegrad.demo.results import FIRST_LOSS, RunResult, equal_wall_s

_COLOURS = {"ddp-gloo": "#444444", "telegrad-dense": "#1f77b4", "telegrad-sparse": "#d62728"}


def plot(results: Sequence[RunResult], title: str, path: Path) -> None:
    """Writes a PNG with two panels: loss over training time, where a line marks the time at which the fastest run was
    done and dots each run's loss then; and loss over the bytes that one rank has sent.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), layout="constrained")
    FigureCanvasAgg(figure)
    over_time, over_bytes = figure.subplots(1, 2, sharey=True)
    at_s = equal_wall_s(results)
    for result in results:
        colour = _COLOURS.get(result.name)
        losses = [one.loss for one in result.validations]
        over_time.plot(
            [0.0, *(one.training_s for one in result.validations)],
            [FIRST_LOSS, *losses],
            marker="o",
            markersize=4,
            color=colour,
            label=f"{result.name}: {result.loss_at(at_s):.3f} at {at_s:.0f} s, {result.validation_loss:.3f} at the end",
        )
        over_time.plot([at_s], [result.loss_at(at_s)], marker="o", markersize=11, fillstyle="none", color=colour)
        over_bytes.plot(
            [one.sent / 1e6 for one in result.validations],
            losses,
            marker="o",
            markersize=4,
            color=colour,
            label=f"{result.name}: {result.bytes_per_rank_step / 1e6:.2f} MB a step",
        )
    over_time.axvline(at_s, color="grey", linestyle=":", linewidth=1)
    over_time.annotate(
        "equal wall time",
        (at_s, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(4, -12),
        textcoords="offset points",
        color="grey",
        fontsize=9,
    )
    over_time.set(xlabel="training time (s)", ylabel="held-out loss (nats per byte)")
    over_bytes.set(xlabel="sent by one rank (MB)")
    seen = [one for result in results for one in result.validations if math.isfinite(one.loss)]
    if seen:  # the fall from the first loss would flatten everything else
        finite = [one.loss for one in seen]
        over_time.set_ylim(0.95 * min(finite), 1.05 * max(finite))
    if any(one.sent > 0 for one in seen):  # a logarithmic axis with nothing on it cannot be drawn
        over_bytes.set_xscale("log")
    for axes in (over_time, over_bytes):
        axes.grid(visible=True, alpha=0.3)
        axes.legend(fontsize=8)
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
