"""``telegrad bench linear``: epochs of linear models with dense and with sparse sums."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from telegrad.bench.linear import BOUND, Row, run
from telegrad.bench.linear_plan import DATA, SCHEMES, SGD_SCHEMES, LinearPlan, default_schemes
from telegrad.bench.machine import describe_machine, machine_text
from telegrad.bench.peers import why_missing
from telegrad.cli.console import say_without, table_console
from telegrad.cli.options import CalibratesFirst, JobTimeout, RowsFile, names_among, networks_of
from telegrad.cli.outputs import check_all_writable, drawn, write_result, written
from telegrad.cli.progress import counting
from telegrad.launch import LaunchError
from telegrad.report.linear_schemes import about_data, by_data, plot, schemes_table, title_of


def linear(
    ranks: Annotated[int, typer.Option(min=1, max=256, help="Processes to start on this machine.")] = 4,
    network: Annotated[str, typer.Option(help="shm, tcp, or a rate such as 1gbit (needs root).")] = "shm",
    data: Annotated[
        str,
        typer.Option(
            help="url, webspam: made-up rows in their shapes; stdlib: trigrams of Python's sources; or LIBSVM files. "
            "Several with commas."
        ),
    ] = ",".join(DATA),
    schemes: Annotated[
        str | None,
        typer.Option(
            show_default=False,
            help=f"What to compare: {', '.join(SCHEMES)} (by default all, but coordinate descent on url alone).",
        ),
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Rows of each rank in a step, or as many as there are.")] = 1000,
    steps: Annotated[
        int,
        typer.Option(
            min=1, help="Steps of a pass, in coordinate descent for each block of columns; the second pass counts."
        ),
    ] = 3,
    columns: Annotated[
        int | None,
        typer.Option(min=1, help="Columns of a made-up set that any of all its rows has, instead of those published."),
    ] = None,
    calibrate: CalibratesFirst = True,
    json_file: RowsFile = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", dir_okay=False, help="Draw a step's times into this PNG file.")
    ] = None,
    timeout: JobTimeout = 600.0,
) -> None:
    """Train logistic regression by SGD with dense and with sparse sums of the gradients, and by coordinate descent with
    dense and with sparse allgathers (cd-dense, cd-sparse).

    All schemes of one kind take the same steps. [bold]epoch[/] and its [bold]comm.[/] are scaled from the measured
    steps to as many rows as the data set has; [bold]to[/] the scheme at the columns' heads: how many times faster.
    [bold]MB received[/]: in a step, by the rank that received most; the [bold]bound[/] beside it is what a rank must
    receive at least. [bold]telegrad-sparse[/] is the automatic choice, [bold]telegrad-ALGORITHM[/] that one.
    """
    console = table_console()
    networks_of([network])
    named = None if schemes is None else tuple(names_among(schemes, SCHEMES, "--schemes"))
    wanted = SGD_SCHEMES if named is None else named
    missing = {
        peer: why for peer in ("gloo", "mpich") if f"{peer}-dense" in wanted and (why := why_missing(peer)) is not None
    }
    say_without(console, missing)
    plans = []
    for one in dict.fromkeys(part.strip() for part in data.split(",")):
        names = tuple(name for name in named or default_schemes(one) if name.removesuffix("-dense") not in missing)
        try:
            plans.append(LinearPlan(one, network, ranks, names, rows, steps, columns, calibrate))
        except ValueError as error:
            hint = "--columns" if "columns" in str(error) else "--data"
            raise typer.BadParameter(str(error), param_hint=hint) from error
    check_all_writable({"--json": json_file, "--plot": plot_file})
    found: list[Row] = []
    for plan in plans:
        try:
            found += _run_with_progress(console, plan, timeout)
        except (LaunchError, RuntimeError, ValueError) as error:
            said = _in_its_options(str(error))
            console.print(f"{plan.name}, {network}: {said}", style="red", highlight=False, markup=False)
            raise typer.Exit(1) from error
    title = f"logistic regression, {ranks} ranks over {network}"
    for alike in by_data(found):
        console.print(schemes_table(alike, f"{title_of(alike[0])}: {title}"))
        console.print(about_data(alike), style="dim", highlight=False, markup=False)
    machine = describe_machine()
    console.print(machine_text(machine), style="dim")
    if json_file is not None:
        with written(console, json_file):
            write_result(console, json_file, {"rows": found, "bound_bytes": BOUND, "machine": machine})
    if plot_file is not None and found:
        with drawn(console, plot_file):
            plot(found, title, plot_file)


# what reading says of Python's arguments, which this command has no options for
_NOT_OPTIONS = {
    "; strict=False leaves out damaged lines": "; remove the line from the file that --data names",
    ": give zero_based=True if they begin with 0": (
        ": if they begin with 0, put the line '# Column indices are zero-based' above the rows of the file that --data "
        "names"
    ),
}


def _in_its_options(said: str) -> str:
    for python, here in _NOT_OPTIONS.items():
        said = said.replace(python, here)
    return said


def _run_with_progress(console: Console, plan: LinearPlan, timeout_s: float) -> list[Row]:
    with counting(console) as progress:
        task = progress.add_task(f"schemes, {plan.name}", total=len(plan.schemes))
        return run(plan, timeout_s=timeout_s, on_row=lambda _: progress.advance(task))
