"""How ``telegrad simulate training-step`` shows steps: a table, and curves with bars of where the time goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from telegrad.tools.report.durations import duration

Row = Mapping[str, Any]

_NAMES = ("scheme", "collective", "plan", "overlap")
_MARKERS = "osDv^Ppx"
PHASES = ("computing", "selecting", "decompressing", "exposed communication")


def phases_of(row: Row) -> dict[str, float]:
    """Seconds of a step by what its processor does in them; waiting for the network is what is left."""
    busy = {
        "computing": row["step_s"] - row["exposed_s"],
        "selecting": row["select_s"],
        "decompressing": row["decompress_s"],
    }
    return busy | {"exposed communication": max(0.0, row["step_s"] - sum(busy.values()))}


def name_of(row: Row, varying: Sequence[str]) -> str:
    """By what differs between rows."""
    words = {"overlap": "overlap" if row["overlap"] else "no overlap"}
    return ", ".join(str(words.get(key, row[key])) for key in varying) or row["scheme"]


def varying_of(rows: Sequence[Row]) -> list[str]:
    """Which of scheme, collective, plan and overlap tell rows of the same panel apart, beyond those before them."""
    kept: list[str] = []
    for key in _NAMES:
        without, with_it = (
            {(_panel(row), *(row[one] for one in keys)) for row in rows} for keys in (kept, [*kept, key])
        )
        if len(with_it) > len(without):
            kept.append(key)
    return kept


def table_of(rows: Sequence[Row], title: str) -> Table:
    """A line for each row; of the same ranks the shortest step is bold."""
    table = Table(title=escape(title), title_justify="left", header_style="bold", box=SIMPLE_HEAD, padding=0)
    table.caption = "exposed: by how much the step is longer than its computation"
    table.caption_justify = "left"
    varying = varying_of(rows)
    compresses = any(row["select_s"] or row["decompress_s"] for row in rows)
    several = [key for key in ("model", "scaling") if len({row.get(key) for row in rows}) > 1]
    for name in (*several, "ranks"):
        table.add_column(name, justify="right" if name == "ranks" else "left", no_wrap=True)
    for name in varying:
        table.add_column(name)
    names = ("groups", "step", "exposed", "network", *(("select", "decompress") if compresses else ()), "efficiency")
    for name in (*names, "speed-up"):
        table.add_column(name, justify="right", no_wrap=True)
    previous = None
    for row in rows:
        here = _where(row)
        if previous not in (None, here):
            table.add_section()
        previous = here
        best_s = min(other["step_s"] for other in rows if _where(other) == here)
        cells = [str(row.get(key, "–")) for key in several]
        cells += [f"{row['ranks']:,}", *(name_of(row, [key]) for key in varying), str(row["groups"])]
        cells += [duration(row[key]) for key in ("step_s", "exposed_s", "communicate_s")]
        cells += [duration(row[key]) for key in ("select_s", "decompress_s")] if compresses else []
        cells += [f"{row['efficiency']:.1%}", f"{row['speedup']:.1f}"]
        table.add_row(*cells, style="bold" if row["step_s"] == best_s and varying else None)
    return table


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
    """For each model and kind of scaling a panel of speed-ups against ranks, and below it bars of what the steps
    consist of, in the order of the curves. The format is that of the path's suffix; PNG without one."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels: dict[str, list[Row]] = {}
    for row in rows:
        panels.setdefault(_panel(row), []).append(row)
    varying = varying_of(rows)
    curves = list(dict.fromkeys(name_of(row, varying) for row in rows))
    looks = {name: {"color": f"C{at % 10}", "marker": _MARKERS[at % len(_MARKERS)]} for at, name in enumerate(curves)}
    figure, grid = pyplot.subplots(2, len(panels), figsize=(6.5 * len(panels), 9), layout="constrained", squeeze=False)
    figure.suptitle(title)
    for (about, found), above, below in zip(panels.items(), grid[0], grid[1], strict=True):
        for name in curves:
            points = sorted((row["ranks"], row["speedup"]) for row in found if name_of(row, varying) == name)
            if points:
                above.plot(*zip(*points, strict=True), label=name, markersize=4, linewidth=1, **looks[name])
        ranks = sorted({row["ranks"] for row in found})
        above.plot(ranks, ranks, color="0.6", linestyle="--", linewidth=1, label="linear")
        above.set(title=about, xlabel="ranks", ylabel="speed-up over one rank")
        above.set_xscale("log", base=2)
        above.set_yscale("log", base=2)
        above.grid(visible=True, which="major", alpha=0.3)
        above.legend(fontsize=7)
        _bars(below, found, curves, varying, ranks)
    figure.savefig(path, dpi=110, format=None if path.suffix else "png")
    pyplot.close(figure)


def _bars(axes: Any, rows: Sequence[Row], curves: Sequence[str], varying: Sequence[str], ranks: Sequence[int]) -> None:
    width = 0.85 / max(1, len(curves))
    colors = dict(zip(PHASES, ("0.75", "C1", "C4", "C3"), strict=True))
    shown: set[str] = set()
    for row in rows:
        place = ranks.index(row["ranks"]) + (curves.index(name_of(row, varying)) - (len(curves) - 1) / 2) * width
        bottom = 0.0
        for phase, seconds in phases_of(row).items():
            if seconds > 0:
                label = None if phase in shown else phase
                shown.add(phase)
                axes.bar(place, seconds, width * 0.9, bottom=bottom, color=colors[phase], label=label)
                bottom += seconds
    axes.set_xticks(range(len(ranks)), [f"{count:,}" for count in ranks])
    axes.set(xlabel="ranks", ylabel="seconds of a step")
    longest, shortest = (pick(row["step_s"] for row in rows) for pick in (max, min))
    if longest > 8 * shortest:
        axes.set_ylim(0, 8 * shortest)
        axes.set_title("cut off at 8 times the shortest step", fontsize=8)
    axes.legend(fontsize=7)


def _panel(row: Row) -> str:
    return ", ".join(str(row[key]) for key in ("model", "scaling") if key in row)


def _where(row: Row) -> tuple[Any, ...]:
    return row["model"], row.get("scaling"), row["ranks"]
