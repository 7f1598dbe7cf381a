"""``telegrad bench``: figures of this machine, beside those of a peer in the same run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import TextColumn

from telegrad.bench.machine import describe_machine, machine_text
from telegrad.bench.plan import Measured, Plan, text_of
from telegrad.bench.registry import BENCHMARKS
from telegrad.bench.runner import Row, count_of, rows_of, run, why_without_peer
from telegrad.cli.bench_checks import checks
from telegrad.cli.bench_errors import errors
from telegrad.cli.bench_faults import faults
from telegrad.cli.bench_predictions import predictions
from telegrad.cli.bench_simulator import simulator
from telegrad.cli.options import byte_sizes, networks_of
from telegrad.cli.outputs import check_folder_of
from telegrad.cli.progress import counting
from telegrad.launch import LaunchError
from telegrad.report.allreduce import duration, plot, table_of

app = typer.Typer(help="Measure telegrad on this machine, beside a peer in the same run.", no_args_is_help=True)
app.command()(checks)
app.command()(faults)
app.command()(errors)
app.command()(predictions)
app.command()(simulator)

_SIZES = "4,1KiB,16KiB,128KiB,1MiB,4MiB,16MiB"


@app.command()
def allreduce(
    ranks: Annotated[int, typer.Option(min=1, max=256, help="Processes to start on this machine.")] = 4,
    network: Annotated[
        str,
        typer.Option(
            help="Over what they talk: [bold]shm[/] (shared memory), [bold]tcp[/] (loopback), or a rate such as "
            "[bold]1gbit[/] (one network namespace per rank, links shaped by tc; needs root). Several: shm,tcp."
        ),
    ] = "shm",
    sizes: Annotated[
        str, typer.Option(help="Lengths of the vector, from 4 bytes up, separated by commas: 4,64KiB,16MiB.")
    ] = _SIZES,
    algorithms: Annotated[
        str, typer.Option(help="Which of ours to measure, separated by commas.")
    ] = "ring,recursive_doubling,rabenseifner,auto",
    peer: Annotated[
        str,
        typer.Option(help="Whom to measure beside us, in the same processes and in turn: gloo (needs torch) or none."),
    ] = "gloo",
    samples: Annotated[
        int, typer.Option(min=3, help="Samples of each contender at each size (fewer where one takes long).")
    ] = 25,
    seconds: Annotated[
        float, typer.Option(min=0.01, help="About how long to measure each contender at each size.")
    ] = 0.7,
    json_file: Annotated[
        Path | None, typer.Option("--json", dir_okay=False, help="Write all rows, the machine and the commit here.")
    ] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", dir_okay=False, help="Draw time against size into this PNG file.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds after which a network's run is given up.")] = 600.0,
) -> None:
    """Sum a vector of floats over all ranks: our algorithms and Gloo's, interleaved, in the same processes.

    A sample is a barrier and then some calls one after another; its time is that of the slowest rank. [bold]ratio[/] is
    our median over Gloo's: below 1 we are faster. [bold]busbw[/] is size/time times 2(P−1)/P. [bold]sent/rank[/] is
    what our counters say, [bold]bound[/] the least that any algorithm must send. [bold]wrong[/] counts values that
    differ from the true sum.
    """
    console = Console()
    benchmark = BENCHMARKS["allreduce"]
    networks, byte_sizes, chosen = _checked(network, sizes, algorithms, benchmark.algorithms)
    check_folder_of(json_file, "--json")
    check_folder_of(plot_file, "--plot")
    try:
        peerless = why_without_peer(peer)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--peer") from error
    if peerless and peer != "none":
        console.print(f"[yellow]Without Gloo:[/] {peerless}")

    machine = describe_machine()
    rows: list[Row] = []
    for name in networks:
        plan = Plan(
            benchmark=benchmark.name,
            network=name,
            ranks=ranks,
            sizes=byte_sizes,
            algorithms=chosen,
            peer=None if peerless else peer,
            samples=samples,
            most_s=seconds,
        )
        try:
            rows += rows_of(plan, _run_with_progress(console, plan, timeout))
        except (LaunchError, RuntimeError) as error:
            console.print(f"[red]{name}:[/] {error}", highlight=False)
            raise typer.Exit(1) from error
        console.print(table_of([row for row in rows if row["network"] == name], f"all_reduce, {ranks} ranks, {name}"))
    console.print(machine_text(machine), style="dim")
    wrong = sum(int(str(row["wrong"])) for row in rows)
    if json_file is not None:
        json_file.write_text(
            json.dumps({"rows": rows, "peer_missing": peerless, "machine": machine}, indent=1, allow_nan=False) + "\n"
        )
        console.print(f"rows: {json_file}")
    if plot_file is not None:
        plot(
            [row for row in rows if row["network"] == networks[0]],
            f"all_reduce, {ranks} ranks, {networks[0]}",
            plot_file,
        )
        console.print(f"plot: {plot_file}")
    if wrong:
        console.print(f"[red]{wrong} values are wrong[/]")
        raise typer.Exit(1)


def _checked(
    network: str, sizes: str, algorithms: str, known: tuple[str, ...]
) -> tuple[list[str], tuple[int, ...], tuple[str, ...]]:
    networks = networks_of([name.strip() for name in network.split(",")])
    sizes_in_bytes = byte_sizes(sizes)
    chosen = tuple(name.strip() for name in algorithms.split(","))
    for name in chosen:
        if name not in known:
            raise typer.BadParameter(f"{name!r} does not exist: use {', '.join(known)}", param_hint="--algorithms")
    return networks, sizes_in_bytes, chosen


def _run_with_progress(console: Console, plan: Plan, timeout_s: float) -> list[Measured]:
    with counting(console, TextColumn("{task.fields[latest]}")) as progress:
        task = progress.add_task(f"all_reduce over {plan.network}", total=count_of(plan), latest="starting ranks")

        def show(one: Measured) -> None:
            latest = f"{text_of(one.size)} {one.contender}: {duration(one.timing.median_s)}"
            progress.update(task, advance=1, latest=latest)

        return run(plan, timeout_s=timeout_s, on_measured=show)
