"""How the rows of ``telegrad bench training-step`` look: a table for each model, sentences, and bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from telegrad.bench.plan import text_of
from telegrad.bench.training_step_plan import PREDICTED_SHARE, SLOWER_SHARE, verdicts_of
from telegrad.report.durations import duration

Row = Mapping[str, Any]


def table_of(rows: Sequence[Row], title: str) -> Table:
    """One line for each way; ratios are of medians, to the fastest."""
    table = Table(title=title, title_justify="left", header_style="bold")
    table.add_column("", no_wrap=True)
    for name in ("step", "p90", "to fastest", "groups", "backward", "exposed", "predicted", "off"):
        table.add_column(name, justify="right", no_wrap=True)
    fastest_s = min(row["median_s"] for row in rows)
    for row in rows:
        predicted_s = row["predicted_s"]
        table.add_row(
            row["way"],
            duration(row["median_s"]),
            duration(row["p90_s"]),
            f"{row['median_s'] / fastest_s:.2f}",
            "–" if row["groups"] is None else str(row["groups"]),
            duration(row["backward_s"]),
            duration(row["exposed_s"]),
            duration(predicted_s),
            "–" if predicted_s is None else f"{predicted_s / row['median_s'] - 1:+.0%}",
        )
    return table


def title_of(rows: Sequence[Row]) -> str:
    """What a table's rows have in common."""
    one = rows[0]
    return (
        f"{one['model']}: {one['tensors']} gradients, {text_of(one['bytes'])}; {one['ranks']} ranks, {one['network']}"
    )


def lines_of(rows: Sequence[Row]) -> list[str]:
    """What is judged of each model, in words."""
    lines = []
    for verdict in verdicts_of(rows):
        slower = "slower than" if verdict.error is None else "SLOWER than"
        speed = "no slower than" if verdict.is_as_fast else slower
        error = "" if verdict.error is None else f" ± {verdict.error:.2f}"
        few = "; too few rounds to judge" if verdict.error is None else ""
        ratio = f"{verdict.ratio:.2f}{error} of it, {1 + SLOWER_SHARE:.2f} allowed{few}"
        said = f"{verdict.model}: auto is {speed} {verdict.best} ({ratio})"
        if verdict.off is None:
            said += "; it made no plan"
        else:
            close = "within" if verdict.is_predicted else "OUTSIDE of"
            said += f"; its prediction is off by {verdict.off:+.0%}, {close} {PREDICTED_SHARE:.0%}"
        lines.append(said)
    return lines


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
    """A panel for each model, a bar for each way: its median step, the spread up to p90, and what was predicted. The
    format is that of the path's suffix; PNG without one."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    models = list(dict.fromkeys(row["model"] for row in rows))
    figure = Figure(figsize=(4.6 * len(models), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    for model, axes in zip(models, figure.subplots(1, len(models), squeeze=False).flat, strict=True):
        of_model = [row for row in rows if row["model"] == model]
        places = range(len(of_model))
        medians = [row["median_s"] * 1e3 for row in of_model]
        late = [row["p90_s"] * 1e3 - median for row, median in zip(of_model, medians, strict=True)]
        colours = ["#d62728" if row["way"] == "auto" else "#1f77b4" for row in of_model]
        axes.bar(places, medians, yerr=[[0.0] * len(medians), late], color=colours, ecolor="#777777", capsize=2)
        predicted = [
            (place, row["predicted_s"] * 1e3)
            for place, row in zip(places, of_model, strict=True)
            if row["predicted_s"] is not None
        ]
        if predicted:
            axes.plot(*zip(*predicted, strict=True), "k_", markersize=18, markeredgewidth=2, label="predicted")
            axes.legend(fontsize=8)
        axes.set_xticks([*places], [row["way"] for row in of_model], rotation=45, ha="right", fontsize=8)
        axes.set(title=title_of(of_model).partition(";")[0], ylabel="ms a step (median; up to p90)")
        axes.grid(visible=True, axis="y", alpha=0.3)
    figure.savefig(path, dpi=130, format=None if path.suffix else "png")
