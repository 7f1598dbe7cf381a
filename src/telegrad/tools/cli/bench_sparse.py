"""``telegrad bench sparse``: sums of sparse vectors beside dense ones and those of torch.distributed."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import TextColumn
from rich.table import Table

from telegrad.launch import LaunchError
from telegrad.tools.bench.machine import describe_machine, machine_text
from telegrad.tools.bench.plan import check_nodes, text_of, why_missing
from telegrad.tools.bench.sparse import (
    BOUND,
    NAMES,
    PATTERNS,
    SWEEPS,
    Row,
    SparseOutcome,
    SparsePlan,
    rows_of,
    run,
    swept,
)
from telegrad.tools.cli.options import (
    CalibratesFirst,
    JobTimeout,
    RowsFile,
    among,
    blaming,
    count_of,
    densities_of,
    networks_of,
)
from telegrad.tools.cli.outputs import check_all_writable, counting, drawn, say_without, table_console, write_result
from telegrad.tools.report.figures import Panel, bars, dated, draw, duration, grid_of, picture, seconds_across

# The table, and plots of time against density, ranks or length.

ShownRow = Mapping[str, Any]

_AXES = {"density": "density of a rank's vector", "n": "elements of the vector", "ranks": "ranks"}
_DIFFERING = (*_AXES, "network", "pattern")


def table_of(rows: Sequence[ShownRow], title: str) -> Table:
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


def plot(rows: Sequence[ShownRow], title: str, path: Path) -> None:
    """Time of every contender against what differs between the rows, a panel for each thing that varies while all else
    is the same; bars where nothing does."""
    measured = [row for row in rows if row["median_s"] is not None]
    panels = panels_of(measured)
    if panels:
        draw(panels, title, path)
    else:
        _draw_bars(measured, title, path)


def panels_of(rows: Sequence[ShownRow]) -> list[Panel]:
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


def _groups(rows: Sequence[ShownRow], by: Sequence[str]) -> list[list[ShownRow]]:
    found: dict[tuple[Any, ...], list[ShownRow]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in by), []).append(row)
    return list(found.values())


def _about(row: ShownRow, axis: str) -> str:
    parts = {
        "network": row["network"],
        "ranks": f"{row['ranks']} ranks",
        "n": f"{text_of(4 * row['n'])} densely",
        "density": f"density {row['density']:.4g}",
        "pattern": row["pattern"],
    }
    return ", ".join(part for name, part in parts.items() if name != axis)


def _draw_bars(rows: Sequence[ShownRow], title: str, path: Path) -> None:
    groups = _groups(rows, _DIFFERING)
    height = sum(0.9 + 0.22 * len(group) for group in groups)
    with picture(path, title, height=0.5 + height) as figure:
        for group, axes in zip(groups, grid_of(figure, len(groups), 1), strict=True):
            ordered = sorted(group, key=lambda row: row["median_s"])
            medians = [row["median_s"] for row in ordered]
            bars(axes, [row["name"] for row in ordered], {"communication": medians}, [*map(duration, medians)])
            seconds_across(axes.xaxis, logarithmic=False)
            axes.set(xlabel="time (median)", title=_about(group[0], ""))


_LONGEST = (1 << 32) - 1
_UNUSUAL = ("telegrad-dense-out", "telegrad-two_level")
_USUAL = [name for name in NAMES if name not in _UNUSUAL]


def sparse(
    ranks: Annotated[
        str, typer.Option(help="How many processes to start; several, one job after the other: 2,4,8.")
    ] = "4",
    network: Annotated[
        str,
        typer.Option(
            help="Over what they talk: a rate such as [bold]1gbit[/] (one network namespace per rank, links shaped by "
            "tc; needs root), [bold]tcp[/] (loopback) or [bold]shm[/] (shared memory); several, separated by commas."
        ),
    ] = "1gbit",
    n: Annotated[str, typer.Option("--n", help="Elements of the vector; several: 1Mi,16Mi.")] = "16Mi",
    density: Annotated[
        str, typer.Option(help="What part of the vector every rank has; several: 0.0001,0.01 or 1e-6..0.5 (×4).")
    ] = "0.0078125",
    pattern: Annotated[
        str,
        typer.Option(
            help="Where its entries are: [bold]uniform[/], [bold]clustered[/] (runs of 64), [bold]identical[/] (on all "
            "ranks the same); several, separated by commas."
        ),
    ] = "uniform",
    sweep: Annotated[
        str | None,
        typer.Option(
            help=f"What to vary, over usual values and those given: {', '.join(SWEEPS)}; several with commas, each by "
            "itself."
        ),
    ] = None,
    nodes: Annotated[
        int, typer.Option(min=1, help="On how many nodes the ranks live, neighbours together (only with a rate).")
    ] = 1,
    names: Annotated[
        str,
        typer.Option(
            "--names",
            show_default=False,
            help=f"Whom to measure, separated by commas: {', '.join(NAMES)} (by default all but "
            f"{' and '.join(_UNUSUAL)}). telegrad-WIRE is the automatic choice, -to-dense writes into a dense vector.",
        ),
    ] = ",".join(_USUAL),
    samples: Annotated[int, typer.Option(min=3, help="Samples of each contender (fewer where one takes long).")] = 9,
    seconds: Annotated[float, typer.Option(min=0.1, help="About how long to measure, of each combination.")] = 60.0,
    calibrates: CalibratesFirst = True,
    json_file: RowsFile = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", dir_okay=False, help="Draw the times into this PNG file.")
    ] = None,
    timeout: JobTimeout = 600.0,
) -> None:
    """Sum sparse vectors over all ranks: in every format of ours, and as others do, interleaved, in the same processes.

    [bold]gloo-dense[/], [bold]mpich-dense[/], [bold]telegrad-dense[/]: the whole vector, in place;
    [bold]telegrad-dense-out[/]: into another one. [bold]gloo-coo[/]: torch.distributed's all_reduce of a sparse COO
    tensor. [bold]telegrad-INDICES-VALUES[/]: a stream as the result; [bold]…-to-dense[/]: into a dense vector, cleared
    and written. [bold]telegrad-ALGORITHM[/]: that one, packed and lossless. [bold]bound[/] is what the links need for
    what a rank must receive at least, indices at their entropy.
    [bold]to …[/]: how many times faster than that. The default is the micro-benchmark of SparCML (SC 2019, §8.1).
    """
    console = table_console()
    plans = _checked(ranks, network, nodes, n, density, pattern, names, samples, seconds, calibrates)
    plans = swept(plans, among(sweep, tuple(SWEEPS), "--sweep") if sweep is not None else [])
    check_all_writable({"--json": json_file, "--plot": plot_file})
    missing = {peer: why for peer in plans[0].peers if (why := why_missing(peer)) is not None}
    say_without(console, missing)
    machine = describe_machine()
    rows: list[Row] = []
    failed: list[str] = []
    try:
        for number, plan in enumerate(plans, 1):
            try:
                of_all = f"{number} of {len(plans)}: " if len(plans) > 1 else ""
                outcome = _run_with_progress(console, plan, of_all, timeout)
            except (LaunchError, RuntimeError) as error:
                failed.append(f"{plan.ranks} ranks, {plan.network}, n={plan.n}, density {plan.density:g}: {error}")
                console.print(f"[red]{plan.ranks} ranks, {plan.network}:[/] {error}", highlight=False)
                continue
            say_without(console, outcome.missing)
            found = rows_of(plan, outcome, missing)
            console.print(table_of(found, _title(plan, outcome)))
            rows += found
    finally:  # hours may have gone into them
        if json_file is not None and rows:
            result = {"rows": rows, "failed": failed, "bound_s": BOUND, "machine": machine}
            write_result(console, json_file, result)
    console.print(machine_text(machine), style="dim")
    if plot_file is not None and rows:
        with drawn(console, plot_file):
            plot(rows, dated(f"allreduce of sparse vectors, {network}"), plot_file)
    if wrong := sum(int(str(row["wrong"] or 0)) for row in rows):
        console.print(f"[red]{wrong} values are wrong[/]")
    if wrong or failed:
        raise typer.Exit(1)


def _title(plan: SparsePlan, outcome: SparseOutcome) -> str:
    return (
        f"{plan.ranks} ranks, {plan.network}: {plan.nnz:,} of {plan.n:,} elements each ({plan.density * 100:.4g} %, "
        f"{plan.pattern}), the sum has {outcome.result_nnz:,}"
    )


def _checked(
    ranks: str,
    network: str,
    nodes: int,
    n: str,
    density: str,
    pattern: str,
    names: str,
    samples: int,
    seconds: float,
    calibrates: bool,
) -> list[SparsePlan]:
    networks = networks_of([one.strip() for one in network.split(",")])
    patterns = among(pattern, PATTERNS, "--pattern")
    chosen = among(names, NAMES, "--names")
    combinations = list(
        itertools.product(
            networks,
            [count_of(one, 2, 256, "--ranks") for one in ranks.split(",")],
            [count_of(one, 1, _LONGEST, "--n") for one in n.split(",")],
            densities_of(density, "--density"),
            patterns,
        )
    )
    with blaming("--nodes"):
        for name, size, *_ in combinations:
            check_nodes(name, size, nodes)
    return [
        SparsePlan(
            *combination, names=tuple(chosen), samples=samples, seconds=seconds, calibrates=calibrates, nodes=nodes
        )
        for combination in combinations
    ]


def _run_with_progress(console: Console, plan: SparsePlan, number: str, timeout_s: float) -> SparseOutcome:
    with counting(console, TextColumn("{task.fields[latest]}")) as progress:
        task = progress.add_task(
            f"{number}{plan.ranks} ranks over {plan.network}, {text_of(plan.nnz * 8)} each",
            total=len(plan.names) * plan.samples,
            latest="starting ranks",
        )
        return run(plan, timeout_s=timeout_s, on_sample=lambda name: progress.update(task, advance=1, latest=name))
