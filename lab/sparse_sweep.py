"""Sparse allreduces in virtual time, against the number of ranks and against density."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from telegrad.cost.decision import TWO_LEVEL
from telegrad.tools.bench.plan import text_of
from telegrad.tools.cli.interrupts import ended_by_interrupt
from telegrad.tools.cli.options import densities_of
from telegrad.tools.cli.outputs import drawn, table_console, write_result
from telegrad.tools.cli.simulate import (
    SimulationSettings,
    WireOption,
    failures_said,
    ranks_of,
    row_of,
    shared_but,
    sizes_of,
    sparse_algorithms,
    swept,
)
from telegrad.tools.report.figures import Panel, dated, draw, duration
from telegrad.tools.sim.measure import ALGORITHMS, Network, Point

Row = dict[str, Any]

# Table and plot

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


def panels_of(rows: Sequence[Row]) -> list[Panel]:
    """Of all rows of a result: time against ranks at the densities that have the most of them, and against density at
    the numbers of ranks that have the most of those."""
    panels = []
    for across, other, about in (("ranks", "density", "density {:.4g}"), ("density", "ranks", "{:,} ranks")):
        seen = {value: {row[across] for row in rows if row[other] == value} for value in {row[other] for row in rows}}
        most = max(map(len, seen.values()))
        for value in sorted(one for one, places in seen.items() if len(places) == most > 1):
            panels.append(panel_of([row for row in rows if row[other] == value], across, about.format(value)))
    return panels


def picture_title(rows: Sequence[Row], network: str) -> str:
    """What the picture of these rows shows."""
    wire = next((row["wire"] for row in rows if row.get("wire")), "dense")
    return f"simulated allreduce of sparse vectors of {text_of(rows[0]['bytes'])}, {wire}, {network}"


def plot(panels: Sequence[Panel], title: str, path: Path) -> None:
    """All panels, in virtual time. The format is that of the path's suffix; PNG without one."""
    draw(panels, title, path, seconds="virtual time")


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


# The command

_SPARSE = (*ALGORITHMS["sparse_allreduce"], AUTO)
_DENSE = {"dense": "auto", "dense_ring": "ring"}


@dataclass(frozen=True)
class _Swept:
    """One thing that varies: ``across`` is "ranks" or "density"; points are by the name and the density asked for."""

    across: str
    about: str
    points: list[tuple[str, float, Point]]


@shared_but(ranks="2..1024", network="1gbit")
def command(
    bytes_: Annotated[
        str, typer.Option("--bytes", help="The whole vector if it were dense, 4 bytes an entry; one size.")
    ] = "64MiB",
    density: Annotated[
        str,
        typer.Option(
            help="Shares of entries that each rank has: a list [bold]0.001,0.1[/] or a range (×4): 1e-6..0.5."
        ),
    ] = "1e-6..0.5",
    at_ranks: Annotated[
        str, typer.Option(help="Among how many ranks time is shown against density; several, separated by commas.")
    ] = "8",
    at_density: Annotated[
        str, typer.Option(help="At which density time is shown against ranks; several, separated by commas.")
    ] = "0.0078125",
    algorithm: Annotated[
        str,
        typer.Option(
            help=f"{', '.join(_SPARSE)}, two_level (with --ranks-per-node), dense (the fastest dense sum by the closed "
            "forms), dense_ring, several with commas, or all (but dense_ring)."
        ),
    ] = "all",
    overlap: Annotated[
        float, typer.Option(min=0, max=1, help="Share of its entries that a rank has in common with all others.")
    ] = 0.0,
    wire: WireOption = "auto",
    *,
    settings: SimulationSettings,
) -> None:
    """Sum sparse vectors over all ranks: time against ranks, and against density, of every algorithm.

    Figure 3 of SparCML (SC 2019) in virtual time, to any number of ranks: there N = 16 Mi, and d = 0.781 % or P = 8.

    [bold]Example:[/] python -m lab sparse-sweep --ranks 2..1024 --at-ranks 8,1024 --plot --json sweep.json
    """
    console = table_console()
    sizes = sizes_of(bytes_)
    if len(sizes) != 1:
        raise typer.BadParameter(f"{bytes_!r} are {len(sizes)} sizes: give one", param_hint="--bytes")
    network = settings.made_network()
    names = _names(algorithm, wire, on_nodes=network.ranks_per_node > 1)
    settings.check_outputs()
    target = settings.drawn_into("sparse_sweep")
    counts, shares = settings.all_ranks(), densities_of(density, "--density")

    def points(ranks: Sequence[int], densities: Sequence[float]) -> list[tuple[str, float, Point]]:
        return [
            (name, share, _point(name, count, sizes[0], share, overlap, wire, network, settings))
            for count in ranks
            for share in densities
            for name in names
        ]

    sweeps = [
        _Swept("ranks", f"density {share:.4g}", points(counts, [share]))
        for share in densities_of(at_density, "--at-density")
    ]
    sweeps += [
        _Swept("density", f"{count:,} ranks", points([count], shares)) for count in ranks_of(at_ranks, "--at-ranks")
    ]
    every = list(dict.fromkeys(point for one in sweeps for _, _, point in one.points))
    with ended_by_interrupt(console, "interrupted: nothing was written"), failures_said(console):
        found = dict(zip(every, swept(console, every, settings.jobs), strict=True))
        rows = [
            [{"name": name, "density": share, **row_of(found[point])} for name, share, point in one.points]
            for one in sweeps
        ]
        of = f"{text_of(sizes[0])}, {_wire_format(every)}"
        for one, there in zip(sweeps, rows, strict=True):
            console.print(table_of(there, one.across, f"sparse sums of {of}, {one.about}: virtual time"))
        told = list({(row["name"], row["ranks"], row["density"]): row for there in rows for row in there}.values())
        _say_worst(console, told)
        console.print(network.about, style="dim", highlight=False)
        if settings.json_file is not None:
            about = {"name": settings.network, "about": network.about, **network.fields_of_core()}
            write_result(console, settings.json_file, {"rows": told, "network": about})
        if target is not None:
            panels = [panel_of(there, one.across, one.about) for one, there in zip(sweeps, rows, strict=True)]
            with drawn(console, target):
                plot(panels, dated(picture_title(told, settings.network)), target)


def _names(text: str, wire: str, *, on_nodes: bool) -> tuple[str, ...]:
    asked = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    known = (*ALGORITHMS["sparse_allreduce"], *([TWO_LEVEL] if on_nodes else []), AUTO, *_DENSE)
    for name in asked:
        if name not in (*known, "all"):
            nodes = "" if on_nodes else " (two_level: with --ranks-per-node)"
            raise typer.BadParameter(
                f"{name!r} does not exist: use {', '.join(known)}, all{nodes}", param_hint="--algorithm"
            )
    chosen = tuple(name for name in known if name in asked or ("all" in asked and name != "dense_ring"))
    return sparse_algorithms(chosen, wire, all_of_them="all" in asked)


def _point(
    name: str,
    ranks: int,
    size: int,
    density: float,
    overlap: float,
    wire: str,
    network: Network,
    settings: SimulationSettings,
) -> Point:
    common: dict[str, Any] = {"ranks": ranks, "size": size, "network": network, "seed": settings.seed}
    common["payloads"] = settings.payloads
    if name in _DENSE:
        return Point("allreduce", _DENSE[name], **common)
    nnz = max(1, round(density * (size // 4))) if size else 0
    return Point("sparse_allreduce", name, nnz=nnz, overlap=overlap, wire=wire, **common)


def _wire_format(points: Sequence[Point]) -> str:
    return next((point.wire_format for point in points if point.wire_format), "dense")


def _say_worst(console: Console, rows: Sequence[Row]) -> None:
    worst = worst_choice(rows)
    if worst is None:
        return
    ratio, row, best = worst
    where = f"{row['ranks']:,} ranks, density {row['density']:.3g}"
    console.print(f"auto takes at most {ratio:.3f} times the fastest's time ({where}: {best})", highlight=False)
