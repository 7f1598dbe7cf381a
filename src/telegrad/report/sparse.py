"""How the rows of ``telegrad bench sparse`` look: as a table, and as time against density, ranks or length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from telegrad.bench.plan import text_of
from telegrad.report.durations import duration

Row = Mapping[str, Any]

_AXES = {"density": "density of a rank's vector", "n": "elements of the vector", "ranks": "ranks"}


def table_of(rows: Sequence[Row], title: str) -> Table:
    """One line per contender, the slowest first."""
    table = Table(title=title, title_justify="left", header_style="bold")
    table.add_column("", no_wrap=True)
    for name in ("median", "min", "sent/rank", "bound", "of bound", "to Gloo", "to COO", "wrong"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in sorted(rows, key=lambda row: -(row["median_s"] or float("inf"))):
        if row["median_s"] is None:
            table.add_row(row["name"], "–", *[""] * 7, style="dim")
            continue
        table.add_row(
            row["name"],
            duration(row["median_s"]),
            duration(row["min_s"]),
            "–" if row["wire_bytes"] is None else text_of(row["wire_bytes"]),
            "–" if row["bound_s"] is None else duration(row["bound_s"]),
            "–" if row["bound_s"] is None else f"{row['bound_s'] / row['median_s']:.0%}",
            *(_times(row[f"times_faster_than_{peer}"]) for peer in ("gloo_dense", "gloo_coo")),
            "–" if row["wrong"] is None else str(row["wrong"]),
        )
    return table


def _times(factor: float | None) -> str:
    return "–" if factor is None else f"{factor:.1f}x"


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
    """Time of every contender against what differs between the rows, a panel for each; bars if nothing does. PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    measured = [row for row in rows if row["median_s"] is not None]
    varied = [axis for axis in _AXES if len({row[axis] for row in measured}) > 1]
    figure, panels = pyplot.subplots(
        1, max(1, len(varied)), figsize=(7 * max(1, len(varied)), 5.5), layout="constrained", squeeze=False
    )
    figure.suptitle(title)
    if not varied:
        ordered = sorted(measured, key=lambda row: -row["median_s"])
        panels[0][0].barh([row["name"] for row in ordered], [row["median_s"] for row in ordered])
        panels[0][0].set(xscale="log", xlabel="seconds")
    for axis, panel in zip(varied, panels[0], strict=False):
        for name in dict.fromkeys(row["name"] for row in measured):
            points = sorted((row[axis], row["median_s"]) for row in measured if row["name"] == name)
            panel.plot(*zip(*points, strict=True), marker="o", markersize=4, linewidth=1, label=name)
        panel.set(xscale="log", yscale="log", xlabel=_AXES[axis], ylabel="seconds")
        panel.legend(fontsize=7)
        panel.grid(alpha=0.3)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
