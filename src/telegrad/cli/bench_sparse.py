"""``telegrad bench sparse``: sums of sparse vectors beside dense ones and those of torch.distributed."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import TextColumn

from telegrad.bench.machine import describe_machine, machine_text
from telegrad.bench.peers import why_missing
from telegrad.bench.plan import text_of
from telegrad.bench.sparse import BOUND, Outcome, Row, rows_of, run
from telegrad.bench.sparse_plan import NAMES, PATTERNS, SparsePlan
from telegrad.cli.console import say_without, table_console
from telegrad.cli.interrupts import ended_by_interrupt
from telegrad.cli.options import networks_of
from telegrad.cli.outputs import check_folder_of, write_result
from telegrad.cli.progress import counting
from telegrad.launch import LaunchError
from telegrad.report.sparse import plot, table_of

_UNITS = {"": 1, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}
_LONGEST = (1 << 32) - 1


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
        str, typer.Option(help="What part of the vector every rank has; several: 0.0001,0.01.")
    ] = "0.0078125",
    pattern: Annotated[
        str,
        typer.Option(
            help="Where its entries are: [bold]uniform[/], [bold]clustered[/] (runs of 64), [bold]identical[/] (on all "
            "ranks the same); several, separated by commas."
        ),
    ] = "uniform",
    names: Annotated[str, typer.Option("--names", help="Whom to measure, separated by commas.")] = ",".join(NAMES),
    samples: Annotated[int, typer.Option(min=3, help="Samples of each contender (fewer where one takes long).")] = 9,
    seconds: Annotated[float, typer.Option(min=0.1, help="About how long to measure, of each combination.")] = 60.0,
    json_file: Annotated[
        Path | None, typer.Option("--json", dir_okay=False, help="Write all rows, the machine and the commit here.")
    ] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", dir_okay=False, help="Draw the times into this PNG file.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds after which a job is given up.")] = 600.0,
) -> None:
    """Sum sparse vectors over all ranks: in every format of ours, and as others do, interleaved, in the same processes.

    [bold]gloo-dense[/], [bold]mpich-dense[/], [bold]telegrad-dense[/]: the whole vector. [bold]gloo-coo[/]:
    torch.distributed's all_reduce of a sparse COO tensor. [bold]telegrad-INDICES-VALUES[/]: a stream as the result;
    [bold]…-to-dense[/]: into a dense vector, cleared and written. [bold]telegrad-ALGORITHM[/]: that one, packed and
    lossless. [bold]bound[/] is what the links need for what a rank must receive at least, indices at their entropy.
    [bold]to …[/]: how many times faster than that. The default is the micro-benchmark of SparCML (SC 2019, §8.1).
    """
    console = table_console()
    plans = _checked(ranks, network, n, density, pattern, names, samples, seconds)
    check_folder_of(json_file, "--json")
    check_folder_of(plot_file, "--plot")
    missing = {peer: why for peer in plans[0].peers if (why := why_missing(peer)) is not None}
    say_without(console, missing)
    machine = describe_machine()
    rows: list[Row] = []
    with ended_by_interrupt(console, "interrupted"):
        for plan in plans:
            try:
                outcome = _run_with_progress(console, plan, timeout)
            except (LaunchError, RuntimeError) as error:
                console.print(f"[red]{plan.ranks} ranks, {plan.network}:[/] {error}", highlight=False)
                raise typer.Exit(1) from error
            say_without(console, outcome.missing)
            found = rows_of(plan, outcome, missing)
            console.print(table_of(found, _title(plan, outcome)))
            rows += found
    console.print(machine_text(machine), style="dim")
    if json_file is not None:
        write_result(console, json_file, {"rows": rows, "bound_s": BOUND, "machine": machine})
    if plot_file is not None:
        plot(rows, f"sums of sparse vectors, {network}", plot_file)
        console.print(f"plot: {plot_file}")
    if wrong := sum(int(str(row["wrong"] or 0)) for row in rows):
        console.print(f"[red]{wrong} values are wrong[/]")
        raise typer.Exit(1)


def _title(plan: SparsePlan, outcome: Outcome) -> str:
    return (
        f"{plan.ranks} ranks, {plan.network}: {plan.nnz:,} of {plan.n:,} elements each ({plan.density * 100:.4g} %, "
        f"{plan.pattern}), the sum has {outcome.result_nnz:,}"
    )


def _checked(
    ranks: str, network: str, n: str, density: str, pattern: str, names: str, samples: int, seconds: float
) -> list[SparsePlan]:
    networks = networks_of([one.strip() for one in network.split(",")])
    patterns = _among(pattern, PATTERNS, "--pattern")
    chosen = _among(names, NAMES, "--names")
    combinations = itertools.product(
        networks,
        [_count(one, 2, 256, "--ranks") for one in ranks.split(",")],
        [_count(one, 1, _LONGEST, "--n") for one in n.split(",")],
        [_density(one) for one in density.split(",")],
        patterns,
    )
    return [
        SparsePlan(*combination, names=tuple(chosen), samples=samples, seconds=seconds) for combination in combinations
    ]


def _among(text: str, allowed: tuple[str, ...], option: str) -> list[str]:
    found = [one.strip() for one in text.split(",")]
    for one in found:
        if one not in allowed:
            raise typer.BadParameter(f"{one!r} does not exist: use {', '.join(allowed)}", param_hint=option)
    return found


def _count(text: str, least: int, most: int, option: str) -> int:
    digits = text.strip().lower().rstrip("kmgi")
    unit = text.strip().lower()[len(digits) :]
    if not digits.isdigit() or unit not in _UNITS or not least <= int(digits) * _UNITS[unit] <= most:
        raise typer.BadParameter(
            f"{text!r} is no number from {least} to {most}: write it like 4, 1000 or 16Mi", param_hint=option
        )
    return int(digits) * _UNITS[unit]


def _density(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 < found <= 1:
        raise typer.BadParameter(f"{text!r} is no part of 1: use a number above 0, up to 1", param_hint="--density")
    return found


def _run_with_progress(console: Console, plan: SparsePlan, timeout_s: float) -> Outcome:
    with counting(console, TextColumn("{task.fields[latest]}")) as progress:
        description = f"{plan.ranks} ranks over {plan.network}, {text_of(plan.nnz * 8)} each"
        task = progress.add_task(description, total=len(plan.names) * plan.samples, latest="starting ranks")
        return run(plan, timeout_s=timeout_s, on_sample=lambda name: progress.update(task, advance=1, latest=name))
