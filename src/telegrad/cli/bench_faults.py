"""``telegrad bench faults``: does it hang, does it lie, does it blame the right rank?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import TextColumn

from telegrad.bench.fault_judge import Seen, Verdict, Violation
from telegrad.bench.fault_runs import run_trials
from telegrad.bench.fault_trials import KINDS, LIVENESS_TIMEOUT_S, Options
from telegrad.bench.machine import describe_machine, machine_text
from telegrad.cli.console import table_console
from telegrad.cli.options import rank_range
from telegrad.cli.outputs import check_all_writable, drawn, write_result
from telegrad.cli.progress import counting
from telegrad.report.faults import failed, plot, summary, table_of

_SEEDS_APART = 1_000_000
_NETWORKS = ("shm", "tcp")


def faults(
    trials: Annotated[int, typer.Option(min=1, help="How many to run, each with real processes.")] = 50,
    seed: Annotated[int, typer.Option(min=0, help="What the trials are drawn from.")] = 1,
    ranks: Annotated[str, typer.Option(help="Fewest and most processes of a trial: 2..8, or one number.")] = "2..8",
    network: Annotated[
        str, typer.Option(help="Over what they talk: shm, tcp or both, separated by commas.")
    ] = "shm,tcp",
    kinds: Annotated[str, typer.Option(help=f"Which faults, separated by commas: {', '.join(KINDS)}; or all.")] = "all",
    jobs: Annotated[int, typer.Option(min=1, help="Trials that run at a time.")] = 2,
    liveness: Annotated[
        float, typer.Option(min=0.5, help="liveness_timeout_s of trials with a frozen rank, in seconds.")
    ] = LIVENESS_TIMEOUT_S,
    only: Annotated[int | None, typer.Option(help="Run the one trial that has this seed.")] = None,
    repeat: Annotated[int, typer.Option(min=1, help="How often to run each trial: the timing is chance's.")] = 1,
    strict_times: Annotated[bool, typer.Option("--strict-times", help="Fail on times beyond the limits too.")] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", dir_okay=False, help="Write all verdicts and the machine here.")
    ] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", dir_okay=False, help="Draw the times to the error into this PNG file.")
    ] = None,
) -> None:
    """Let things go wrong at random moments of random collectives, and judge what every rank makes of it.

    A rank is killed, frozen, ends with an exception, aborts, or calls something else than the others. Nobody may hang,
    get a wrong sum, or blame the wrong rank; nothing may be left behind. A trial is drawn from its seed and can be
    repeated alone; chance remains in the timing. Ends with status 1 on any violation; times are judged with
    [bold]--strict-times[/] only, for they are the machine's too.
    """
    console = table_console()
    options = _checked(ranks, network, kinds, liveness)
    check_all_writable({"--json": json_file, "--plot": plot_file})
    machine = describe_machine()
    seeds = [only] if only is not None else [seed * _SEEDS_APART + number for number in range(trials)]
    seeds = [seed for seed in seeds for _ in range(repeat)]
    with counting(console, TextColumn("{task.fields[latest]}")) as progress:
        task = progress.add_task("fault trials", total=len(seeds), latest="")

        def show(verdict: Verdict, seen: Seen) -> None:
            progress.update(task, advance=1, latest=str(verdict.trial))
            if verdict.violations:
                console.print(failed(verdict, seen, options), highlight=False, markup=False, soft_wrap=True)

        def show_left(violation: Violation) -> None:
            console.print(str(violation), highlight=False, markup=False, soft_wrap=True)

        verdicts = run_trials(seeds, options, jobs=jobs, on_verdict=show, on_left=show_left)
    networks = ", ".join(options.networks)
    title = f"{len(verdicts)} fault trials, {options.ranks[0]} to {options.ranks[1]} ranks over {networks}"
    console.print(table_of(verdicts, title))
    for verdict in verdicts:
        if verdict.late and verdict.limit_s is not None:
            slowest = max(verdict.detected_s.values())
            console.print(
                f"late: trial {verdict.trial.seed}, {slowest:.3f} s (limit {verdict.limit_s:g} s): {verdict.trial}",
                style="yellow",
                highlight=False,
                markup=False,
            )
    console.print(summary(verdicts), highlight=False)
    console.print(machine_text(machine), style="dim")
    if json_file is not None:
        rows = [verdict.row() for verdict in verdicts]
        write_result(console, json_file, {"trials": rows, "machine": machine}, what="verdicts")
    if plot_file is not None:
        with drawn(console, plot_file):
            plot(verdicts, title, plot_file)
    late = strict_times and any(verdict.late for verdict in verdicts)
    if late or any(verdict.violations for verdict in verdicts):
        raise typer.Exit(1)


def _checked(ranks: str, network: str, kinds: str, liveness_timeout_s: float) -> Options:
    chosen_ranks = rank_range(ranks, most=64, example="2..8")
    networks = tuple(name.strip() for name in network.split(","))
    chosen = KINDS if kinds == "all" else tuple(name.strip() for name in kinds.split(","))
    for names, known, option in ((networks, _NETWORKS, "--network"), (chosen, KINDS, "--kinds")):
        for name in names:
            if name not in known:
                raise typer.BadParameter(f"{name!r} does not exist: use {', '.join(known)}", param_hint=option)
    return Options(chosen_ranks, networks, chosen, liveness_timeout_s)
