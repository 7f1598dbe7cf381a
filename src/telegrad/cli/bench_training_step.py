"""``telegrad bench training-step``: training steps by several ways to average gradients, and auto's prediction."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import TextColumn

from telegrad.bench.machine import describe_machine, machine_text
from telegrad.bench.training_step_plan import WAYS, Row, TrainingStepPlan, verdicts_of
from telegrad.cli.console import table_console
from telegrad.cli.options import CalibratesFirst, JobTimeout, RowsFile, names_among, networks_of
from telegrad.cli.outputs import check_all_writable, drawn, write_result
from telegrad.cli.progress import counting
from telegrad.launch import LaunchError
from telegrad.report.measured_steps import lines_of, plot, table_of, title_of

_MODELS = ("small", "large", "mixed")
_APART = 1e-3  # weights of two ways after the same steps, of the largest: float32 sums in another order


def training_step(
    ranks: Annotated[int, typer.Option(min=1, max=64, help="Processes to start on this machine.")] = 4,
    network: Annotated[
        str,
        typer.Option(help="shm, tcp, or a rate such as [bold]1gbit[/] (one network namespace per rank; needs root)."),
    ] = "1gbit",
    models: Annotated[
        str, typer.Option(help="small: many small gradients; large: a few large ones; mixed: both.")
    ] = ",".join(_MODELS),
    ways: Annotated[str, typer.Option(help="How gradients are averaged, separated by commas.")] = ",".join(WAYS),
    rounds: Annotated[int, typer.Option(min=1, help="How often each way takes its turn.")] = 8,
    steps: Annotated[int, typer.Option(min=1, help="Steps of a turn, and two before them that do not count.")] = 8,
    calibrates: CalibratesFirst = True,
    json_file: RowsFile = None,
    plot_file: Annotated[
        Path | None,
        typer.Option("--plot", "--plot-file", dir_okay=False, help="Draw the steps' times into this PNG file."),
    ] = None,
    timeout: JobTimeout = 600.0,
) -> None:
    """Time training steps: DDP over Gloo and over telegrad, and Synchronizers with each of their plans, in turn.

    All ways train the same model on the same data in the same processes, a few steps each, in several orders.
    Times are medians over turns of the mean step, of the slowest rank, with zero_grad() and the optimiser;
    [bold]backward[/] and [bold]exposed[/] those of a Synchronizer's own report over its last passes, warming up
    included, so that with few turns they may be longer than the step. [bold]to fastest[/]: of the medians.
    [bold]predicted[/]: forward pass as profiled, the plan's time line, and the optimiser as measured. Ranks have one
    thread each; where there are more ranks than cores, they share those, and all steps are longer.

    Judged: [bold]auto[/] is no more than 5 % slower than the best of the others, by the median over rounds of the ratio
    of their turns (± its standard error), and its prediction within 15 %. Exit status 1 where sums were wrong; a miss
    of what is judged is said, and is no error.
    """
    console = table_console()
    check_all_writable({"--json": json_file, "--plot": plot_file})
    if importlib.util.find_spec("torch") is None:
        raise typer.BadParameter("torch is not installed: pip install 'telegrad[torch]'")
    chosen, (network,) = tuple(names_among(ways, WAYS, "--ways")), networks_of([network])
    plans = [
        TrainingStepPlan(network, ranks, model, chosen, rounds, steps, calibrates=calibrates)
        for model in names_among(models, _MODELS, "--models")
    ]
    rows: list[Row] = []
    failed: list[dict[str, str]] = []
    with counting(console, TextColumn("{task.fields[latest]}")) as bar:
        shown = bar.add_task("", total=sum(plan.blocks for plan in plans), latest="")
        for plan in plans:
            bar.update(shown, description=plan.model, latest="starting ranks")
            try:
                rows += _run(plan, timeout, lambda way: bar.update(shown, advance=1, latest=way))
            except (LaunchError, RuntimeError) as error:
                console.print(f"[red]{plan.model}:[/] {error}", highlight=False)
                failed.append({"model": plan.model, "error": str(error)})
    for plan in plans:
        if of_model := [row for row in rows if row["model"] == plan.model]:
            console.print(table_of(of_model, title_of(of_model)))
    for line in lines_of(rows):
        console.print(line, highlight=False)
    machine = describe_machine()
    console.print(machine_text(machine), style="dim")
    if json_file is not None:
        verdicts = [
            {"model": one.model, "best": one.best, "ratio": one.ratio, "error": one.error, "prediction_off": one.off}
            for one in verdicts_of(rows)
        ]
        write_result(console, json_file, {"rows": rows, "failed": failed, "verdicts": verdicts, "machine": machine})
    if plot_file is not None and rows:
        with drawn(console, plot_file):
            plot(rows, f"training steps, {ranks} ranks, {network}", plot_file)
    if any(row["apart"] > _APART for row in rows):
        console.print("[red]some ways have trained other weights than the first[/]")
    if failed or any(row["apart"] > _APART for row in rows):
        raise typer.Exit(1)


def _run(plan: TrainingStepPlan, timeout_s: float, on_block: Callable[[str], None]) -> list[Row]:
    from telegrad.bench.training_step import run

    return run(plan, timeout_s=timeout_s, on_block=on_block)
