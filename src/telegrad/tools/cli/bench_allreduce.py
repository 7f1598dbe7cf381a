"""``telegrad bench allreduce``: dense sums beside those of Gloo and MPICH."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import TextColumn

from telegrad.communicator.operands import WIRES
from telegrad.launch import LaunchError
from telegrad.linear.memory import available_bytes
from telegrad.tools.bench.allreduce import AllreduceOutcome, Row, count_of, rows_of, run
from telegrad.tools.bench.machine import describe_machine, machine_text
from telegrad.tools.bench.networks import BOUND_FORMULA, check_nodes
from telegrad.tools.bench.peers import PEERS, why_missing
from telegrad.tools.bench.plan import ALGORITHMS, AllreducePlan, Measured, text_of
from telegrad.tools.cli.console import counting, say_without, table_console
from telegrad.tools.cli.options import CalibratesFirst, JobTimeout, RowsFile, byte_sizes, networks_of
from telegrad.tools.cli.outputs import check_all_writable, drawn, write_result
from telegrad.tools.report.allreduce import lines_of, plot, summary_of, table_of
from telegrad.tools.report.durations import duration

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
    interleaved: Annotated[
        bool,
        typer.Option(
            "--interleaved/--no-interleaved",
            help="Of more than one node: measure each algorithm also among the same ranks, dealt out to the nodes in "
            "turn.",
        ),
    ] = True,
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
    wires: Annotated[
        str | None,
        typer.Option(
            show_default=False,
            help=f"Measure sums in messages that round, too, separated by commas: {', '.join(WIRES)}; or all (none, by "
            "default).",
        ),
    ] = None,
    peers: Annotated[
        str,
        typer.Option(
            "--peers",
            "--peer",
            help="Whom to measure beside us, in the same processes and in turn, separated by commas: gloo (needs "
            "torch), mpich (needs mpi4py over MPICH); or none.",
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
    """Sum a vector of floats over all ranks: our algorithms, Gloo and MPICH, interleaved, in the same processes.

    A sample is a barrier and then some calls one after another; its time is that of the slowest rank. [bold]algbw[/] is
    size/time, [bold]busbw[/] that times 2(P−1)/P, as nccl-tests have them. [bold]sent/rank[/] is what our counters say,
    [bold]of bound[/] the share of what the network's links allow at best. [bold]to …[/] is our median over the peer's:
    below 1 we are faster. [bold]wrong[/] counts values that differ from the true sum, with
    [bold]--wires[/] by more than roundings can. Rows where the automatic choice
    looks worse than it should are measured again at the end of a network's run, all contenders in turn.
    """
    console = table_console()
    networks, sizes_in_bytes, chosen = _checked(network, ranks, nodes, sizes, algorithms)
    rounding = _checked_wires(wires)
    named = [] if peers == "none" else [name.strip() for name in peers.split(",")]
    check_all_writable({"--json": json_file, "--plot": plot_file})
    try:
        missing = {name: why for name in named if (why := why_missing(name)) is not None}
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--peers") from error
    say_without(console, missing)

    machine = describe_machine()
    rows: list[Row] = []
    summaries: list[dict[str, Any]] = []
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
            interleaved=interleaved and nodes > 1,
            wires=rounding,
        )
        try:
            outcome = _run_with_progress(console, plan, timeout)
        except (LaunchError, RuntimeError) as error:
            console.print(f"[red]{name}:[/] {error}", highlight=False)
            failed.append({"network": name, "error": str(error)})
            continue
        say_without(console, outcome.missing)
        found = rows_of(plan, outcome, missing)
        summary = summary_of(found)
        summaries.append(asdict(summary))
        console.print(table_of(found, _title(ranks, nodes, name)))
        for line in lines_of(summary):
            console.print(line, highlight=False)
        rows += found
    console.print(machine_text(machine), style="dim")
    if json_file is not None:
        result = {
            "rows": rows,
            "failed": failed,
            "summaries": summaries,
            "peer_missing": missing,
            "bound_s": BOUND_FORMULA,
            "machine": machine,
        }
        write_result(console, json_file, result)
    if plot_file is not None and rows:
        with drawn(console, plot_file):
            plot(rows, _title(ranks, nodes), plot_file)
    if wrong := sum(int(str(row["wrong"])) for row in rows):
        console.print(f"[red]{wrong} values are wrong[/]")
    if wrong or failed:
        raise typer.Exit(1)


def _title(ranks: int, nodes: int, network: str = "") -> str:
    on = f" on {nodes} nodes" if nodes > 1 else ""
    return f"all_reduce, {ranks} ranks{on}" + (f", {network}" if network else "")


def _checked(
    network: str, ranks: int, nodes: int, sizes: str, algorithms: str | None
) -> tuple[list[str], tuple[int, ...], tuple[str, ...]]:
    networks = networks_of([name.strip() for name in network.split(",")])
    for name in networks:
        try:
            check_nodes(name, ranks, nodes)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--nodes") from error
    sizes_in_bytes = byte_sizes(sizes)
    needed, free = _VECTORS * max(sizes_in_bytes) * ranks, available_bytes()
    if 0 <= free < needed:
        raise typer.BadParameter(
            f"{ranks} ranks with vectors of {text_of(max(sizes_in_bytes))} need {text_of(needed)} of memory, of which "
            f"{text_of(free)} are free: use shorter ones, or fewer ranks",
            param_hint="--sizes",
        )
    known = ALGORITHMS
    usual = ",".join(name for name in known if nodes > 1 or name != "two_level")
    chosen = tuple(name.strip() for name in (usual if algorithms is None else algorithms).split(","))
    for name in chosen:
        if name not in known:
            raise typer.BadParameter(f"{name!r} does not exist: use {', '.join(known)}", param_hint="--algorithms")
    return networks, sizes_in_bytes, chosen


def _checked_wires(wires: str | None) -> tuple[str, ...]:
    if wires is None or wires == "all":
        return () if wires is None else WIRES
    chosen = tuple(dict.fromkeys(name.strip() for name in wires.split(",")))
    for name in chosen:
        if name not in WIRES:
            raise typer.BadParameter(f"{name!r} does not exist: use {', '.join(WIRES)}, or all", param_hint="--wires")
    return chosen


def _run_with_progress(console: Console, plan: AllreducePlan, timeout_s: float) -> AllreduceOutcome:
    with counting(console, TextColumn("{task.fields[latest]}")) as progress:
        task = progress.add_task(f"all_reduce over {plan.network}", total=count_of(plan), latest="starting ranks")

        def show(one: Measured) -> None:
            latest = f"{text_of(one.size)} {one.contender}: {duration(one.timing.median_s)}"
            progress.update(task, advance=not one.again, latest=latest + (" (again)" if one.again else ""))

        return run(plan, timeout_s=timeout_s, on_measured=show)
