"""``telegrad bench predictions``: what the simulator says of a network, beside what the network does."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import TextColumn

from telegrad.bench.machine import describe_machine, machine_text
from telegrad.bench.plan import text_of
from telegrad.bench.predictions import (
    FEWEST_JUDGED_BYTES,
    WITHIN,
    Measured,
    Row,
    calibration_from,
    count_of,
    points_of,
    rows_of,
    run,
    worst_of,
)
from telegrad.bench.predictions_plan import Measurement, PredictionPlan
from telegrad.cli.options import JobTimeout, byte_sizes, networks_of
from telegrad.cli.outputs import check_all_writable, drawn, write_result
from telegrad.cli.progress import counting
from telegrad.launch import LaunchError
from telegrad.report.predictions import costs_text, name_of, plot, table_of


def predictions(
    ranks: Annotated[
        str, typer.Option(help="How many processes to start; several, one job after the other: 4,8. Even numbers.")
    ] = "4,8",
    network: Annotated[
        str,
        typer.Option(
            help="Over what they talk: a rate such as [bold]1gbit[/] (one network namespace per rank, links shaped by "
            "tc; needs root), [bold]tcp[/] (loopback) or [bold]shm[/] (shared memory)."
        ),
    ] = "1gbit",
    sizes: Annotated[
        str, typer.Option(help="Lengths of a rank's vector (in allgather: of its block), separated by commas.")
    ] = "256KiB,1MiB,4MiB,16MiB",
    repetitions: Annotated[int, typer.Option(min=3, help="Samples of each measurement; the median counts.")] = 9,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", dir_okay=False, help="Write all rows, the costs, the machine and the commit here."),
    ] = None,
    plot_file: Annotated[
        Path | None,
        typer.Option("--plot", "--plot-file", dir_okay=False, help="Draw predicted against measured: a PNG file."),
    ] = None,
    timeout: JobTimeout = 900.0,
) -> None:
    """Calibrate the cost model on a network, then compare its predictions with what collectives take there.

    The four costs α, β, β in exchange and γ come from messages between pairs of ranks and from additions, all pairs at
    once, and are the same for every collective. [bold]ratio[/] is the predicted time over the measured median: above 1
    the prediction is too slow. Times are those of calls one after another on busy links. Rows in which a rank brings
    less than 256 KiB (a sparse vector's entries count 8 bytes each) are shown dim and not judged; judged ones that are
    further off than 20 % are red.
    """
    console = Console()
    plans = _checked(ranks, network, sizes, repetitions)
    check_all_writable({"--json": json_file, "--plot": plot_file})
    machine = describe_machine()
    rows: list[Row] = []
    calibrations: list[dict[str, Any]] = []
    for plan in plans:
        try:
            measured = _run_with_progress(console, plan, timeout)
        except (LaunchError, RuntimeError) as error:
            console.print(f"[red]{plan.ranks} ranks, {plan.network}:[/] {error}", highlight=False)
            raise typer.Exit(1) from error
        calibration = calibration_from(plan, measured.times)
        found = rows_of(plan, measured, calibration)
        console.print(f"{plan.ranks} ranks, {plan.network}: {costs_text(calibration)}", highlight=False)
        console.print(table_of(found, f"predicted and measured, {plan.ranks} ranks, {plan.network}"))
        rows += found
        calibrations.append(
            {"ranks": plan.ranks, "network": plan.network, **asdict(calibration), "points": points_of(measured.times)}
        )
    _say_worst(console, rows)
    console.print(machine_text(machine), style="dim")
    if json_file is not None:
        result = {"rows": rows, "calibrations": calibrations, "within": WITHIN, "machine": machine}
        write_result(console, json_file, result)
    if plot_file is not None:
        with drawn(console, plot_file):
            plot(rows, f"predicted and measured, {network}", plot_file)
    if wrong_values := sum(int(str(row["wrong"])) for row in rows):
        console.print(f"[red]{wrong_values} values are wrong[/]")
        raise typer.Exit(1)


def _checked(ranks: str, network: str, sizes: str, repetitions: int) -> list[PredictionPlan]:
    networks_of([network])
    sizes_in_bytes = byte_sizes(sizes)
    try:
        counts = [int(count) for count in ranks.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"{ranks!r} are no numbers: write them like 4,8", param_hint="--ranks") from error
    for count in counts:
        if count < 2 or count % 2:
            raise typer.BadParameter(
                f"{count} ranks cannot be calibrated in pairs: use even numbers from 2 up", param_hint="--ranks"
            )
    return [PredictionPlan(network, count, sizes_in_bytes, repetitions=repetitions) for count in counts]


def _run_with_progress(console: Console, plan: PredictionPlan, timeout_s: float) -> Measured:
    with counting(console, TextColumn("{task.fields[latest]}")) as progress:
        description = f"{plan.ranks} ranks over {plan.network}"
        task = progress.add_task(description, total=count_of(plan), latest="starting ranks")

        def show(one: Measurement) -> None:
            latest = f"{one.operation} {one.algorithm} {text_of(one.bytes)}"
            progress.update(task, advance=1, latest=latest)

        return run(plan, timeout_s=timeout_s, on_sample=show)


def _say_worst(console: Console, rows: list[Row]) -> None:
    judged = [row for row in rows if row["judged"]]
    right = sum(bool(row["within"]) for row in judged)
    least = text_of(FEWEST_JUDGED_BYTES)
    if judged:
        console.print(f"{right} of {len(judged)} predictions from {least} up are within {WITHIN * 100:.0f} %")
    else:
        console.print(f"no prediction was judged: all are of less than {least}")
    for name, among in (("worst", judged), ("worst below", [row for row in rows if not row["judged"]])):
        row = worst_of(among)
        if row is not None:
            where = f"{name_of(row)}, {text_of(int(str(row['bytes'])))}, {row['ranks']} ranks"
            console.print(f"{name}: ratio {row['ratio']:.3f} ({where})")
