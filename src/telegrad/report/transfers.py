"""How the rows of ``telegrad bench transfers`` look: as a table, and as time against bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from telegrad.bench.plan import text_of
from telegrad.report.curves import Panel, draw
from telegrad.report.durations import duration

Row = Mapping[str, Any]


def table_of(rows: Sequence[Row], title: str) -> Table:
    """A line per operation and size."""
    table = Table(title=title, title_justify="left", header_style="bold")
    table.add_column("", no_wrap=True)
    for name in ("size", "median", "rate", "copies", "host", "of bound", "enqueue", "p99", "wrong"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row["op"],
            text_of(row["bytes"]),
            duration(row["median_s"]),
            f"{row['bytes_per_s'] / 1e9:.3g} GB/s",
            duration(row["copies_median_s"]),
            duration(row["host_median_s"]),
            f"{row['of_bound']:.0%}",
            duration(row["enqueue_median_s"]),
            duration(row["enqueue_p99_s"]),
            str(row["wrong"]),
        )
    return table


def enqueueing_text(rows: Sequence[Row]) -> str:
    """In how many rows the host puts an operation into its stream within 50 µs."""
    within = sum(1 for row in rows if row["enqueued_within_50_us"])
    worst = max(rows, key=lambda row: row["enqueue_median_s"])
    return (
        f"enqueued within 50 µs: {within} of {len(rows)} rows; the longest median is "
        f"{duration(worst['enqueue_median_s'])} ({worst['op']} of {text_of(worst['bytes'])}, {worst['ranks']} ranks)"
    )


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
    """Time against bytes, a panel for each operation and number of ranks."""
    draw(panels_of(rows), title, path)


def panels_of(rows: Sequence[Row]) -> list[Panel]:
    """By number of ranks, then by operation."""
    panels = []
    for ranks, operation in dict.fromkeys((row["ranks"], row["op"]) for row in rows):
        own = [row for row in rows if (row["ranks"], row["op"]) == (ranks, operation)]
        names = {
            "on the device": "median_s",
            "copies": "copies_median_s",
            "on the host": "host_median_s",
            "enqueueing": "enqueue_median_s",
        }
        curves = {name: [(row["bytes"], row[key]) for row in own] for name, key in names.items()}
        panels.append(Panel("bytes", f"{operation}, {ranks} ranks", curves, base=2))
    return panels
