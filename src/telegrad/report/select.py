"""How the rows of ``telegrad bench select`` look: as a table, and as time against the number of elements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from telegrad.bench.select_plan import QUEUED
from telegrad.report.curves import Panel, draw
from telegrad.report.durations import duration

Row = Mapping[str, Any]


def table_of(rows: Sequence[Row], title: str) -> Table:
    """One line per method, the slowest first, below torch.topk and above what no method can beat; these two once more
    for methods that are queued."""
    waited = next((row for row in rows if row["method"] not in QUEUED), None)
    queued = next((row for row in rows if row["method"] in QUEUED), None)
    peers = [(name, row) for name, row in (("", waited), (", queued", queued)) if row is not None]
    table = Table(title=title, title_justify="left", header_style="bold")
    table.add_column("", no_wrap=True)
    for name in ("selected/k", "median", "mean", "bound", "of bound", "to torch.topk"):
        table.add_column(name, justify="right", no_wrap=True)
    if queued is not None:
        table.add_column("enqueue", justify="right", no_wrap=True)
    for how, row in peers:
        table.add_row(
            f"torch.topk{how or ' and residual'}",
            *("1.00", duration(row["torch_topk_median_s"]), "", "", "", ""),
            *_enqueue(row["torch_topk_enqueue_median_s"]),
            style="dim",
        )
    for row in sorted(rows, key=lambda row: -row["median_s"]):
        table.add_row(
            row["method"],
            f"{row['selected'] / row['k']:.2f}",
            duration(row["median_s"]),
            duration(row["mean_s"]),
            duration(row["bound_s"]),
            f"{row['of_bound']:.0%}",
            f"{row['times_faster_than_torch_topk']:.1f}x",
            *_enqueue(row["enqueue_median_s"]),
        )
    for how, row in peers:
        table.add_row(f"one copy{how}", "", duration(row["copy_s"]), style="dim")
    return table


def _enqueue(seconds: float | None) -> list[str]:
    return [] if seconds is None else [duration(seconds)]


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
    """Time per call against the number of elements, a panel for each density; against density where there is one length
    only. torch.topk and bound are those of methods that are waited for, unless all are queued."""
    draw(panels_of(rows), title, path)


def panels_of(rows: Sequence[Row]) -> list[Panel]:
    """By density over elements, if there are several lengths; else by length over density."""
    lengths = {row["elements"] for row in rows}
    by, across, says, base = ("density", "elements", "elements", 2)
    if len(lengths) == 1:
        by, across, says, base = ("elements", "density", "density", 10)
    compared = [row for row in rows if row["method"] not in QUEUED] or rows
    panels = []
    for value in sorted({row[by] for row in rows}):
        curves: dict[str, list[tuple[float, float]]] = {"torch.topk": [], "bound": []}
        for row in compared:
            place = row[across]
            if row[by] == value and not any(x == place for x, _ in curves["torch.topk"]):
                curves["torch.topk"].append((place, row["torch_topk_median_s"]))
                curves["bound"].append((place, row["bound_s"]))
        for row in rows:
            if row[by] == value:
                curves.setdefault(row["method"], []).append((row[across], row["median_s"]))
        about = f"{value:g} of the elements" if by == "density" else f"{value:,} elements"
        panels.append(Panel(says, about, curves, base=base))
    return panels
