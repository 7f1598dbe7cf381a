"""How the rows of ``telegrad bench sparse`` look: as a table, and as time against density, ranks or length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from telegrad.tools.bench.plan import text_of
from telegrad.tools.report.curves import Panel, draw
from telegrad.tools.report.durations import duration

Row = Mapping[str, Any]

_AXES = {"density": "density of a rank's vector", "n": "elements of the vector", "ranks": "ranks"}
_DIFFERING = (*_AXES, "network", "pattern")


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
    """Time of every contender against what differs between the rows, a panel for each thing that varies while all else
    is the same; bars where nothing does."""
    measured = [row for row in rows if row["median_s"] is not None]
    panels = panels_of(measured)
    if panels:
        draw(panels, title, path)
    else:
        _draw_bars(measured, title, path)


def panels_of(rows: Sequence[Row]) -> list[Panel]:
    """None where rows differ in their names alone."""
    panels = []
    for axis, across in _AXES.items():
        for alike in _groups(rows, [name for name in _DIFFERING if name != axis]):
            if len({row[axis] for row in alike}) == 1:
                continue
            curves: dict[str, list[tuple[float, float]]] = {}
            for row in alike:
                curves.setdefault(row["name"], []).append((row[axis], row["median_s"]))
            panels.append(Panel(across, _about(alike[0], axis), curves, base=10 if axis == "density" else 2))
    return panels


def _groups(rows: Sequence[Row], by: Sequence[str]) -> list[list[Row]]:
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in by), []).append(row)
    return list(found.values())


def _about(row: Row, axis: str) -> str:
    parts = {
        "network": row["network"],
        "ranks": f"{row['ranks']} ranks",
        "n": f"{text_of(4 * row['n'])} densely",
        "density": f"density {row['density']:.4g}",
        "pattern": row["pattern"],
    }
    return ", ".join(part for name, part in parts.items() if name != axis)


def _draw_bars(rows: Sequence[Row], title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups = _groups(rows, _DIFFERING)
    figure, panels = pyplot.subplots(
        1, max(1, len(groups)), figsize=(7 * max(1, len(groups)), 5.5), layout="constrained", squeeze=False
    )
    figure.suptitle(title)
    for group, panel in zip(groups, panels[0], strict=False):
        ordered = sorted(group, key=lambda row: -row["median_s"])
        panel.barh([row["name"] for row in ordered], [row["median_s"] for row in ordered])
        panel.set(xscale="log", xlabel="seconds", title=_about(group[0], ""))
    figure.savefig(path, dpi=130, format=None if path.suffix else "png")
    pyplot.close(figure)
