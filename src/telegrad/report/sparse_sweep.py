"""How ``telegrad simulate sparse-sweep`` shows times: a table and a panel for each thing that varies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from telegrad.report.curves import Panel
from telegrad.report.simulation import duration

Row = Mapping[str, Any]

AUTO = "auto"
_AXES = {"ranks": "ranks", "density": "density of a rank's vector"}


def table_of(rows: Sequence[Row], across: str, title: str) -> Table:
    """A line for each value of ``across`` ("ranks" or "density"), a column for each name; the fastest is bold."""
    names = list(dict.fromkeys(row["name"] for row in rows))
    table = Table(title=title, title_justify="left", header_style="bold", box=SIMPLE_HEAD, padding=0)
    table.caption = "filled: the part of the sum that has entries"
    table.caption_justify = "left"
    for name in (across, "filled"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in names:
        table.add_column(name.replace("_", " "), justify="right")
    for value, found in _by_value(rows, across).items():
        best_s = min(found[name]["time_s"] for name in names)
        filled = min(
            (row["result_nnz"] / max(1, row["bytes"] // 4) for row in found.values() if "nnz" in row), default=1
        )
        cells = [f"{value:,}" if across == "ranks" else f"{value:.2g}", f"{filled:.2g}"]
        for name in names:
            time_s = found[name]["time_s"]
            cells.append(f"[bold]{duration(time_s)}[/]" if time_s == best_s else duration(time_s))
        table.add_row(*cells)
    return table


def panel_of(rows: Sequence[Row], across: str, about: str) -> Panel:
    """The same as curves. A dense sum does not know of density: a line."""
    curves: dict[str, list[tuple[float, float]]] = {}
    levels: dict[str, float] = {}
    for row in rows:
        if across == "density" and "nnz" not in row:
            levels[row["name"]] = row["time_s"]
        else:
            curves.setdefault(row["name"], []).append((row[across], row["time_s"]))
    return Panel(_AXES[across], about, curves, levels, base=2 if across == "ranks" else 10)


def worst_choice(rows: Sequence[Row]) -> tuple[float, Row, str] | None:
    """Where the automatic choice is slowest beside the fastest at the same place: how many times, its row, and the
    name of the fastest. None without that choice, or without others."""
    found: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        found.setdefault((row["ranks"], row["bytes"], row["density"]), {})[row["name"]] = row
    worst: tuple[float, Row, str] | None = None
    for there in found.values():
        if AUTO not in there or len(there) == 1:
            continue
        best = min((row for name, row in there.items() if name != AUTO), key=lambda row: float(row["time_s"]))
        ratio = there[AUTO]["time_s"] / best["time_s"] if best["time_s"] else 1.0
        if worst is None or ratio > worst[0]:
            worst = ratio, there[AUTO], best["name"]
    return worst


def _by_value(rows: Sequence[Row], across: str) -> dict[float, dict[str, Row]]:
    found: dict[float, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(row[across], {})[row["name"]] = row
    return dict(sorted(found.items()))
