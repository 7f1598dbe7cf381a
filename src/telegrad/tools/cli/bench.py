"""``telegrad bench``: figures of this machine, beside those of peers in the same run.

``telegrad bench allreduce`` is here: dense sums beside those of Gloo and MPICH, its tables and its plot."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.progress import TextColumn
from rich.table import Table

from telegrad.launch import LaunchError
from telegrad.linear.problem import available_bytes
from telegrad.tools.bench.allreduce import AllreduceOutcome, Row, result_count_of, rows_of, run
from telegrad.tools.bench.machine import describe_machine, machine_text
from telegrad.tools.bench.plan import (
    ALGORITHMS,
    BOUND_FORMULA,
    PEERS,
    AllreducePlan,
    Measured,
    bus_factor,
    check_nodes,
    text_of,
    title_of,
    why_missing,
)
from telegrad.tools.cli.bench_sparse import sparse
from telegrad.tools.cli.options import CalibratesFirst, JobTimeout, RowsFile, among, blaming, byte_sizes, networks_of
from telegrad.tools.cli.outputs import check_all_writable, counting, drawn, say_without, table_console, write_result
from telegrad.tools.report.figures import Panel, dated, draw, duration

# Tables and a plot.

ShownRow = Mapping[str, Any]


_AGAIN = "*"


def table_of(rows: Sequence[ShownRow], title: str) -> Table:
    """The rows of one network: a line for each of ours and for each peer, by size. What is fastest is bold."""
    table = Table(title=title, title_justify="left", header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("algorithm", no_wrap=True)
    present = [peer for peer in PEERS if any(row.get(f"{peer}_median_s") is not None for row in rows)]
    ratios = [f"to\n{title_of(peer)}" for peer in present]
    for name in ("median", "p90", "algbw\nGB/s", "busbw\nGB/s", "sent/\nrank", "of\nbound", *ratios, "wrong"):
        table.add_column(name, justify="right", no_wrap=True)
    for size, group in itertools.groupby(rows, key=lambda row: int(row["bytes"])):
        lines = [*_lines_of(list(group), present)]
        fastest = min(seconds for seconds, _ in lines)
        for number, (seconds, cells) in enumerate(lines):
            shown = "" if number else text_of(size)
            table.add_row(shown, *cells, style="bold" if seconds == fastest else None)
        table.add_section()
    if any(row["measured_again"] for row in rows):
        table.caption = f"{_AGAIN} auto looked slow here: measured again at the end, with more samples"
        table.caption_justify = "left"
    return table


def _lines_of(group: Sequence[ShownRow], present: Sequence[str]) -> Iterator[tuple[float, list[str]]]:
    """Median and cells of each contender at one size."""
    for row in group:
        bound_s = row["bound_s"]
        yield (
            row["median_s"],
            [
                _name_of(row) + (_AGAIN if row["measured_again"] else ""),
                *_speed(row, row["median_s"], row["p90_s"]),
                text_of(row["wire_bytes"]),
                _share(row["median_s"], bound_s),
                *(_ratio(row[f"ratio_to_{peer}"]) for peer in present),
                str(row["wrong"]),
            ],
        )
    for peer in present:
        row = group[0]  # all of a size have the same
        median_s, p90_s = row[f"{peer}_median_s"], row[f"{peer}_p90_s"]
        if median_s is None:
            continue
        yield (
            median_s,
            [
                title_of(peer),
                *_speed(row, median_s, p90_s),
                "–",
                _share(median_s, row["bound_s"]),
                *("–" for _ in present),
                str(row[f"{peer}_wrong"]),
            ],
        )


def _name_of(row: ShownRow) -> str:
    return f"{row['algorithm']} ({row['chosen']})" if row["chosen"] else row["algorithm"]


def _speed(row: ShownRow, median_s: float, p90_s: float) -> list[str]:
    algbw = row["bytes"] / median_s
    busbw = algbw * bus_factor(row["ranks"])
    return [duration(median_s), duration(p90_s), *(f"{each / 1e9:.4f}" for each in (algbw, busbw))]


def _share(seconds: float, bound_s: float | None) -> str:
    return "–" if bound_s is None else f"{bound_s / seconds:.1%}"


def _ratio(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.2f}"


def plot(rows: Sequence[ShownRow], title: str, path: Path) -> None:
    """Median time against size, as PNG: a panel per network, in it a curve per algorithm and one per peer."""
    networks = dict.fromkeys(row["network"] for row in rows)
    draw(
        [panel_of([row for row in rows if row["network"] == network], network) for network in networks],
        title,
        path,
        seconds="time (median)",
    )


def panel_of(rows: Sequence[ShownRow], network: str) -> Panel:
    """Of the rows of one network."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        curves.setdefault(row["algorithm"], []).append((row["bytes"], row["median_s"]))
    for peer in PEERS:
        medians = {row["bytes"]: row.get(f"{peer}_median_s") for row in rows}
        points = [(size, median_s) for size, median_s in medians.items() if median_s is not None]
        if points:
            curves[title_of(peer)] = points
    if bounds := sorted({(row["bytes"], row["bound_s"]) for row in rows if row["bound_s"] is not None}):
        curves["bound"] = bounds
    return Panel("bytes", network, curves, base=2)


# The command.

_SIZES = ",".join(text_of(4**power).replace(" ", "") for power in range(1, 14))
_VECTORS = 2  # of each rank: its own, and what it receives


def allreduce(
    ranks: Annotated[int, typer.Option(min=1, max=256, help="Processes to start on this machine.")] = 4,
    network: Annotated[
        str,
        typer.Option(
            help="Over what they talk, separated by commas: [bold]shm[/] (shared memory), [bold]tcp[/] (loopback), or "
            "a rate such as [bold]1gbit[/] (one network namespace per rank, links shaped by tc; needs root)."
        ),
    ] = "shm,tcp,1gbit",
    nodes: Annotated[
        int,
        typer.Option(
            min=1,
            help="On how many nodes the ranks live, neighbours together (only with a rate): ranks of one share a link "
            "and memory.",
        ),
    ] = 1,
    sizes: Annotated[
        str, typer.Option(help="Lengths of the vector, from 4 bytes up, separated by commas: 4,64KiB,16MiB.")
    ] = _SIZES,
    algorithms: Annotated[
        str | None,
        typer.Option(
            show_default=False,
            help=f"Which of ours to measure, separated by commas: {', '.join(ALGORITHMS)} (all, by default; "
            "two_level of more than one node).",
        ),
    ] = None,
    peers: Annotated[
        str,
        typer.Option(
            "--peers",
            "--peer",
            help="Whom to measure beside us, in turn, separated by commas: gloo (needs torch) and mpich (needs mpi4py "
            "over MPICH) in the same processes; openmpi, impi and oneccl in their own, over shm; or none.",
        ),
    ] = ",".join(PEERS),
    samples: Annotated[
        int, typer.Option(min=3, help="Samples of each contender at each size (fewer where one takes long).")
    ] = 31,
    seconds: Annotated[
        float, typer.Option(min=0.01, help="About how long to measure on each network, all sizes together.")
    ] = 120.0,
    calibrates: CalibratesFirst = True,
    json_file: RowsFile = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", dir_okay=False, help="Draw time against size into this PNG file.")
    ] = None,
    timeout: JobTimeout = 600.0,
) -> None:
    """Sum a vector of floats over all ranks: our algorithms, Gloo, three MPIs and oneCCL, interleaved.

    A sample is a barrier and then some calls one after another; its time is that of the slowest rank. [bold]algbw[/] is
    size/time, [bold]busbw[/] that times 2(P−1)/P, as nccl-tests have them. [bold]sent/rank[/] is what our counters say,
    [bold]of bound[/] the share of what the network's links allow at best. [bold]to …[/] is our median over the peer's:
    below 1 we are faster. [bold]wrong[/] counts values that differ from the true sum. Rows where the automatic choice
    looks worse than it should are measured again at the end of a network's run, all contenders in turn."""
    console = table_console()
    networks, sizes_in_bytes, chosen = _checked(network, ranks, nodes, sizes, algorithms)
    named = [] if peers == "none" else [name.strip() for name in peers.split(",")]
    check_all_writable({"--json": json_file, "--plot": plot_file})
    with blaming("--peers"):
        missing = {name: why for name in named if (why := why_missing(name)) is not None}
    say_without(console, missing)

    machine = describe_machine()
    rows: list[Row] = []
    failed: list[dict[str, str]] = []
    for name in networks:
        plan = AllreducePlan(
            benchmark="allreduce",
            network=name,
            ranks=ranks,
            sizes=sizes_in_bytes,
            algorithms=chosen,
            peers=tuple(peer for peer in named if peer not in missing),
            samples=samples,
            seconds=seconds,
            calibrates=calibrates and "auto" in chosen,
            nodes=nodes,
        )
        try:
            outcome = _run_with_progress(console, plan, timeout)
        except (LaunchError, RuntimeError) as error:
            console.print(f"[red]{name}:[/] {error}", highlight=False)
            failed.append({"network": name, "error": str(error)})
            continue
        say_without(console, outcome.missing)
        found = rows_of(plan, outcome, missing)
        console.print(table_of(found, title_of_sums(ranks, nodes, name)))
        rows += found
    console.print(machine_text(machine), style="dim")
    if json_file is not None:
        result = {"rows": rows, "failed": failed, "peer_missing": missing, "bound_s": BOUND_FORMULA, "machine": machine}
        write_result(console, json_file, result)
    if plot_file is not None and rows:
        with drawn(console, plot_file):
            plot(rows, dated(picture_title(rows)), plot_file)
    if wrong := sum(int(str(row["wrong"])) for row in rows):
        console.print(f"[red]{wrong} values are wrong[/]")
    if wrong or failed:
        raise typer.Exit(1)


def picture_title(rows: Sequence[ShownRow]) -> str:
    """What a picture of these rows shows: whose algorithms are named."""
    peers = [title_of(peer) for peer in PEERS if any(row.get(f"{peer}_median_s") is not None for row in rows)]
    whose = ", ".join(["telegrad's algorithms", *peers])
    return f"{title_of_sums(rows[0]['ranks'], rows[0]['nodes'])}: {whose}"


def title_of_sums(ranks: int, nodes: int, network: str = "") -> str:
    """What was measured."""
    on = f" on {nodes} nodes" if nodes > 1 else ""
    return f"all_reduce, {ranks} ranks{on}" + (f", {network}" if network else "")


def _checked(
    network: str, ranks: int, nodes: int, sizes: str, algorithms: str | None
) -> tuple[list[str], tuple[int, ...], tuple[str, ...]]:
    networks = networks_of([name.strip() for name in network.split(",")])
    with blaming("--nodes"):
        for name in networks:
            check_nodes(name, ranks, nodes)
    sizes_in_bytes = byte_sizes(sizes)
    needed, free = _VECTORS * max(sizes_in_bytes) * ranks, available_bytes()
    if 0 <= free < needed:
        raise typer.BadParameter(
            f"{ranks} ranks with vectors of {text_of(max(sizes_in_bytes))} need {text_of(needed)} of memory, of which "
            f"{text_of(free)} are free: use shorter ones, or fewer ranks",
            param_hint="--sizes",
        )
    usual = ",".join(name for name in ALGORITHMS if nodes > 1 or name != "two_level")
    chosen = among(usual if algorithms is None else algorithms, ALGORITHMS, "--algorithms")
    return networks, sizes_in_bytes, tuple(chosen)


def _run_with_progress(console: Console, plan: AllreducePlan, timeout_s: float) -> AllreduceOutcome:
    with counting(console, TextColumn("{task.fields[latest]}")) as progress:
        task = progress.add_task(
            f"all_reduce over {plan.network}", total=result_count_of(plan), latest="starting ranks"
        )

        def show(one: Measured) -> None:
            latest = f"{text_of(one.size)} {one.contender}: {duration(one.timing.median_s)}"
            progress.update(task, advance=not one.again, latest=latest + (" (again)" if one.again else ""))

        return run(plan, timeout_s=timeout_s, on_measured=show)


app = typer.Typer(help="Measure telegrad on this machine, beside a peer in the same run.", no_args_is_help=True)
for command in (allreduce, sparse):
    app.command()(command)
