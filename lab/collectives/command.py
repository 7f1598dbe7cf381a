"""The command ``python -m lab collectives OPERATION``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from lab.collectives.closed_forms import form_of
from lab.collectives.critical_path import (
    KINDS,
    Recording,
    Stretch,
    critical_path,
    record_apart,
    shares,
    write_trace,
)
from telegrad import _core
from telegrad.communicator.operands import formats_named
from telegrad.tools.bench.plan import text_of
from telegrad.tools.cli.interrupts import ended_by_interrupt
from telegrad.tools.cli.outputs import check_all_writable, table_console, write_result, written
from telegrad.tools.cli.simulate import (
    Asked,
    SimulationSettings,
    WireOption,
    chosen_algorithms,
    failures_said,
    run,
    shared_but,
    sizes_of,
    sparse_algorithms,
)
from telegrad.tools.report.figures import duration
from telegrad.tools.sim.measure import ALGORITHMS, SPARSE, Point

OPERATIONS = tuple(name.replace("_", "-") for name in ALGORITHMS)

# Each message is two slices and an arrow in a trace, about half a kilobyte.
_TRACE_MESSAGES = 250_000
_PATH_MESSAGES = 4_000_000
_STRETCHES_SHOWN = 16


@shared_but()
def command(
    operation: Annotated[str, typer.Argument(help=f"One of {', '.join(OPERATIONS)}.")],
    bytes_: Annotated[
        str,
        typer.Option(
            "--bytes",
            help="One rank's vector; of allgather, gather, scatter and all-to-all one block; of sparse operations the "
            "whole vector if it were dense. Lists and ranges too.",
        ),
    ] = "1MiB",
    algorithm: Annotated[str, typer.Option(help="Of allreduce and sparse-allreduce: as in telegrad simulate.")] = "all",
    density: Annotated[
        float, typer.Option(help="Sparse: share of the vector's entries that each rank has, above 0 and up to 1.")
    ] = 0.01,
    overlap: Annotated[float, typer.Option(help="Sparse: share of them that all ranks have in common.")] = 0.0,
    wire: WireOption = "auto",
    keep: Annotated[
        int, typer.Option(min=0, help="allreduce-topk: entries that the sum keeps; 0: as many as a rank has.")
    ] = 0,
    calls: Annotated[
        int,
        typer.Option(min=1, help="allreduce-topk: one after another; the first cuts slices and finds the threshold."),
    ] = 1,
    explain: Annotated[
        bool, typer.Option("--critical-path", help="Say what the time went into, link by link.")
    ] = False,
    timeline: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Write what ports and processors did, for ui.perfetto.dev.")
    ] = None,
    links: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Write messages and bytes per rank and per link as JSON.")
    ] = None,
    *,
    settings: SimulationSettings,
) -> None:
    """Any collective in virtual time, beside its closed form; [bold]--critical-path[/] says why it took so long.

    allreduce-topk, sparse-allgather and sparse-reduce-scatter have real entries, and every result is checked (where a
    wire rounds, within what that may do). [bold]words[/] of allreduce-topk are those of the last call and the rank that
    moves most: an index is one and a value is one.

    [bold]Example:[/] python -m lab collectives broadcast --ranks 2..4096 --bytes 100MiB --critical-path

    [bold]Example:[/] python -m lab collectives allreduce-topk --ranks 2..256 --bytes 4MiB --calls 2
    """
    name = operation.replace("-", "_")
    if name not in ALGORITHMS:
        raise typer.BadParameter(f"{operation!r} does not exist: use {', '.join(OPERATIONS)}", param_hint="OPERATION")
    if not 0 < density <= 1:
        raise typer.BadParameter(f"{density:g} is no share: use a number above 0 and up to 1", param_hint="--density")
    if not 0 <= overlap <= 1:
        raise typer.BadParameter(f"{overlap:g} is no share: use a number from 0 to 1", param_hint="--overlap")
    check_all_writable({"--json": settings.json_file, "--timeline": timeline, "--links": links})
    chosen = chosen_algorithms(algorithm, name, settings) if name.endswith("allreduce") else ALGORITHMS[name]
    if name == "sparse_allreduce":
        chosen = sparse_algorithms(chosen, wire, all_of_them="all" in algorithm)
    elif name in SPARSE:
        _check_wire(wire, name)
    shares_of = (density, overlap, wire) if name in SPARSE else (0.0, 0.0, "auto")
    asked = Asked(name, chosen, [0] if name == "barrier" else sizes_of(bytes_), *shares_of, keep, calls)
    points = asked.points(settings.all_ranks(), asked.sizes, settings.made_network(), settings)
    _check_points(points, {"--timeline": timeline, "--links": links}, explain)
    run(asked, settings, form_of)
    if explain or timeline or links:
        console = table_console()
        with ended_by_interrupt(console, "interrupted"), failures_said(console):
            _explain(console, points, explain, timeline, links)


def _check_wire(wire: str, operation: str) -> None:
    try:
        encoding = formats_named(wire, "f32").values
    except (TypeError, ValueError) as error:
        raise typer.BadParameter(str(error), param_hint="--wire") from error
    if encoding != _core.ValueEncoding.native and operation != "allreduce_topk":
        raise typer.BadParameter(
            f"{wire!r} rounds values, and results could not be checked: use one that does not", param_hint="--wire"
        )


def _check_points(points: Sequence[Point], single: Mapping[str, Path | None], explain: bool) -> None:
    shown = len({replace(point, algorithm=point.chosen) for point in points})  # auto is one of the others
    for option, wanted in single.items():
        if wanted is not None and shown != 1:
            raise typer.BadParameter(
                f"it shows a single point, and these are {shown}: give one --ranks, one --bytes, one --algorithm",
                param_hint=option,
            )
    messages = max(point.messages for point in points)
    for option, is_wanted, most in (
        ("--timeline", single["--timeline"] is not None, _TRACE_MESSAGES),
        ("--critical-path", explain, _PATH_MESSAGES),
    ):
        if is_wanted and messages > most:
            raise typer.BadParameter(
                f"{messages:,} messages are too many for it: use fewer ranks, {most:,} messages at most",
                param_hint=option,
            )


def _explain(
    console: Console, points: Sequence[Point], explain: bool, timeline: Path | None, links: Path | None
) -> None:
    if explain:
        found = [record_apart(point) for point in points]
        paths = [critical_path(one.activities, one.finish_by_rank_s) for one in found]
        console.print(split_table(points, paths, "where the time went, along the critical path"))
        if len(points) == 1:
            console.print(path_table(paths[0], "critical path: what had to happen one after the other"))
    if timeline is not None or links is not None:
        one = record_apart(points[0])
    if timeline is not None:
        with written(console, timeline):
            count = write_trace(timeline, one.activities, critical_path(one.activities, one.finish_by_rank_s))
        said = f"timeline: {timeline} ({count:,} events; open it at https://ui.perfetto.dev)"
        console.print(said, highlight=False, markup=False)
    if links is not None:
        write_result(console, links, counts_for_json(one), what="counts")


def split_table(points: Sequence[Point], paths: Sequence[list[Stretch]], title: str) -> Table:
    """The shares of a critical path's kinds, a line per point."""
    table = Table(title=title, title_justify="left", header_style="bold", box=SIMPLE_HEAD, padding=0)
    for name in ("ranks", "size", "algorithm", *KINDS):
        table.add_column(name, justify="left" if name == "algorithm" else "right", no_wrap=True)
    lines: dict[tuple[str, ...], list[str]] = {}  # auto, and what it chose, are one
    for point, path in zip(points, paths, strict=True):
        split = shares(path)
        whole_s = sum(split.values())
        cells = [f"{split[kind] / whole_s:.0%}" if whole_s else "–" for kind in KINDS]
        lines[f"{point.ranks:,}", text_of(point.size), point.chosen] = cells
    for place, cells in lines.items():
        table.add_row(*place, *cells)
    return table


def path_table(path: Sequence[Stretch], title: str) -> Table:
    """The chain from the start to the last rank's end, work on one rank in one line; of a long one the first and the
    last lines."""
    table = Table(title=title, title_justify="left", header_style="bold")
    for name in ("from", "for"):
        table.add_column(name, justify="right")
    table.add_column("what")
    table.add_column("rank", justify="right")
    for name in ("other rank", "step", "bytes"):
        table.add_column(name, justify="right")
    lines = _joined(path)
    half = _STRETCHES_SHOWN // 2
    left_out = len(lines) - _STRETCHES_SHOWN
    shown = [*lines[:half], None, *lines[-half:]] if left_out > 0 else lines
    for one in shown:
        if one is None:
            table.add_row("…", "", f"{left_out:,} more", "", "", "", "")
            continue
        others = ("–" if value is None else f"{value:,}" for value in (one.peer, one.step, one.bytes))
        table.add_row(duration(one.start_s), duration(one.time_s), one.kind, str(one.rank), *others)
    return table


def _joined(path: Sequence[Stretch]) -> list[Stretch]:
    lines: list[Stretch] = []
    for one in path:
        last = lines[-1] if lines else None
        if last is not None and one.kind == last.kind == "compute" and one.rank == last.rank:
            lines[-1] = replace(last, end_s=one.end_s, bytes=(last.bytes or 0) + (one.bytes or 0))
        else:
            lines.append(one)
    return lines


def counts_for_json(found: Recording) -> dict[str, Any]:
    """What every rank and every link carried."""
    of = found.links
    columns = zip(*(part.tolist() for part in (of.source, of.destination, of.messages, of.bytes)), strict=True)
    names = ("from", "to", "messages", "bytes")
    by_rank = {"finish_s": found.finish_by_rank_s.tolist()} | {
        f"{what}_{way}": np.bincount(ends, counts, found.point.ranks).astype(int).tolist()
        for way, ends in (("sent", of.source), ("received", of.destination))
        for what, counts in (("messages", of.messages), ("bytes", of.bytes))
    }
    ranks = [
        {"rank": rank, **{name: column[rank] for name, column in by_rank.items()}} for rank in range(found.point.ranks)
    ]
    links = [dict(zip(names, link, strict=True)) for link in columns]
    return {"operation": found.point.operation, "algorithm": found.point.chosen, "ranks": ranks, "links": links}
