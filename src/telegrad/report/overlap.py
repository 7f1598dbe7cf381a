"""How the rows of ``telegrad bench overlap`` look: as a table, and as timelines of what the device did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from telegrad.bench.plan import text_of
from telegrad.report.durations import duration

Row = Mapping[str, Any]
Bar = tuple[str, float, float]
"""Lane, begin and end in seconds."""

_COLOURS = {"all_reduce": "#d62728", "kernels": "#1f77b4"}
_OTHERS = ("#ff7f0e", "#2ca02c", "#7f7f7f")


def table_of(rows: Sequence[Row], title: str) -> Table:
    """A line per size."""
    table = Table(title=title, title_justify="left", header_style="bold")
    names = ("size", "all_reduce alone", "kernels alone", "both", "hidden", "kernels meanwhile", "enqueueing", "wrong")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            text_of(row["bytes"]),
            duration(row["communication_median_s"]),
            duration(row["computation_median_s"]),
            duration(row["both_median_s"]),
            f"{row['hidden']:.0%}",
            f"{row['kernels_meanwhile']:.0f} of {row['kernels']}",
            duration(row["enqueue_median_s"]),
            str(row["wrong"]),
        )
    return table


def timelines_of(rows: Sequence[Row]) -> dict[str, list[Bar]]:
    """By title: what rank 0's device did, of each row; and of each trace that is not empty."""
    found: dict[str, list[Bar]] = {}
    for row in rows:
        about = f"{text_of(row['bytes'])}, {row['ranks']} ranks"
        if row["op"] == "overlap":
            found[f"{about}: {row['hidden']:.0%} hidden"] = [tuple(one) for one in row["timeline"]]
        elif row.get("intervals"):
            found[f"{about}, by torch's profiler"] = [tuple(one) for one in row["intervals"]]
    return found


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
    """A timeline below the other, a lane for each kind of work. The format is that of the path's suffix."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    timelines = timelines_of(rows)
    figure = Figure(figsize=(12, 1 + 2 * max(1, len(timelines))), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(max(1, len(timelines)), 1, squeeze=False)
    for axes, (about, bars) in zip(grid.flat, timelines.items(), strict=False):
        lanes = list(dict.fromkeys(lane for lane, _, _ in bars))
        for place, lane in enumerate(lanes):
            spans = [(begin * 1e3, (end - begin) * 1e3) for own, begin, end in bars if own == lane]
            colour = _COLOURS.get(lane, _OTHERS[place % len(_OTHERS)])
            axes.broken_barh(spans, (place - 0.4, 0.8), facecolors=colour, edgecolors="white", linewidth=0.3)
        axes.set_yticks(range(len(lanes)), lanes)
        axes.set(title=about, xlabel="ms since the call")
        axes.invert_yaxis()
    figure.suptitle(title)
    figure.savefig(path, dpi=130, format=None if path.suffix else "png")
