"""``telegrad bench linear``: epochs of linear models with dense and with sparse sums."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from telegrad.bench.linear import SCHEMES, LinearPlan, Row, run
from telegrad.bench.machine import describe_machine, machine_text
from telegrad.bench.peers import why_missing
from telegrad.cli.console import say_without, table_console
from telegrad.cli.interrupts import ended_by_interrupt
from telegrad.cli.options import CalibratesFirst, JobTimeout, RowsFile, names_among, networks_of
from telegrad.cli.outputs import check_writable, write_result, written
from telegrad.cli.progress import counting
from telegrad.launch import LaunchError
from telegrad.linear.synthetic import SHAPES
from telegrad.report.linear import schemes_table


def linear(
    ranks: Annotated[int, typer.Option(min=1, max=256, help="Processes to start on this machine.")] = 4,
    network: Annotated[str, typer.Option(help="shm, tcp, or a rate such as 1gbit (needs root).")] = "shm",
    data: Annotated[
        str, typer.Option(help=f"Made-up rows in the shapes of these: {', '.join(SHAPES)}.")
    ] = "url,webspam",
    schemes: Annotated[str, typer.Option(help="How gradients are summed.")] = ",".join(SCHEMES),
    rows: Annotated[int, typer.Option(min=1, help="Rows of each rank in a step.")] = 1000,
    steps: Annotated[int, typer.Option(min=1, help="Steps of a pass; the second pass counts.")] = 3,
    calibrate: CalibratesFirst = True,
    json_file: RowsFile = None,
    timeout: JobTimeout = 600.0,
) -> None:
    """Train logistic regression by SGD on made-up rows in the shapes of URL and Webspam, with dense and with sparse
    sums of the gradients.

    All schemes take the same steps. [bold]epoch[/] and [bold]comm.[/] are scaled from the measured steps to as many
    rows as the data set has; ratios are to the first scheme.
    """
    console = table_console()
    networks_of([network])
    names, shapes = names_among(schemes, SCHEMES, "--schemes"), names_among(data, tuple(SHAPES), "--data")
    missing = {
        peer: why for peer in ("gloo", "mpich") if f"{peer}-dense" in names and (why := why_missing(peer)) is not None
    }
    say_without(console, missing)
    names = [name for name in names if name.removesuffix("-dense") not in missing]
    check_writable(json_file, "--json")
    found: list[Row] = []
    with ended_by_interrupt(console, "interrupted"):
        for shape in shapes:
            plan = LinearPlan(shape, network, ranks, tuple(names), rows, steps, calibrate)
            try:
                found += _run_with_progress(console, plan, timeout)
            except (LaunchError, RuntimeError) as error:
                console.print(f"{network}: {error}", style="red", highlight=False, markup=False)
                raise typer.Exit(1) from error
    console.print(
        schemes_table(found, f"SGD, {ranks} ranks over {network}, {rows * ranks:,} rows a step; made-up data")
    )
    machine = describe_machine()
    console.print(machine_text(machine), style="dim")
    if json_file is not None:
        with written(console, json_file):
            write_result(console, json_file, {"rows": found, "machine": machine})


def _run_with_progress(console: Console, plan: LinearPlan, timeout_s: float) -> list[Row]:
    with counting(console) as progress:
        task = progress.add_task(f"schemes, {plan.data}", total=len(plan.schemes))
        return run(plan, timeout_s=timeout_s, on_row=lambda _: progress.advance(task))
