"""The command ``python -m lab accuracy``."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from lab.accuracy.fashion import DEFAULT_FOLDER, DataMissing
from lab.accuracy.job import Place, Result, check_sources, missing, prepare, results, time_steps, train
from lab.accuracy.plots import plot
from lab.accuracy.results import Row, best_rates, rows_of
from lab.accuracy.runs import GROWN, METHODS, SELDOM, SIZES, TASKS, Run
from lab.accuracy.study import MAIN, SWEEPS, SWEPT_TASK, Study, in_order
from lab.accuracy.tables import StudyProgress, sweep_table, tables_of
from lab.accuracy.time_to_accuracy import plot_over_time, read_iterations, timed, times_table
from lab.accuracy.time_to_loss import measured_trace, timed_curves, times_to
from lab.accuracy.time_to_loss import plot as plot_losses
from lab.accuracy.time_to_loss import times_table as losses_table
from lab.common.commands import TextFolder, check_device
from telegrad.launch import RankFailed, RanksTimedOut
from telegrad.tools.bench.machine import describe_machine, machine_text
from telegrad.tools.cli.interrupts import ended_by_interrupt
from telegrad.tools.cli.options import among, bad_setting, densities_of, is_given, refuse_given
from telegrad.tools.cli.outputs import check_all_writable, drawn, say_file, table_console, written
from telegrad.tools.report.figures import dated
from telegrad.tools.sim.measure import network_of

_LAST_LINES = 15
_SMALL_TASKS = ",".join(name for name in TASKS if name not in (*GROWN, *SELDOM))
_LARGE: dict[str, Any] = {
    "tasks": ",".join(GROWN),
    "methods": "dense,reused,momentum,oktopk,lowrank-16",
    "rates": "0.5,1,2",
    "steps": 1500,
}
"""Defaults of large studies, which fit about 20 core-hours."""


def command(
    context: typer.Context,
    tasks: Annotated[
        str, typer.Option("--task", help="What to train; several, separated by commas: " + ", ".join(TASKS) + ".")
    ] = _SMALL_TASKS,
    methods: Annotated[
        str, typer.Option(help="How gradients go; several, separated by commas: " + ", ".join(METHODS) + ".")
    ] = ",".join(METHODS),
    density: Annotated[
        str,
        typer.Option(
            help="What share of each large tensor's entries a rank sends; several: 0.01,0.001. Of the default method;"
            " the others have the one at which the task is judged, if it is among them; with --size large all have it."
        ),
    ] = "0.01,0.001",
    seeds: Annotated[
        int, typer.Option(min=1, help="Of dense training, and of the default method at the task's usual density.")
    ] = 3,
    all_seeds: Annotated[
        bool, typer.Option("--all-seeds", help="Give the other methods all --seeds too, at the task's usual density.")
    ] = False,
    rates: Annotated[
        str,
        typer.Option(
            help="Learning rates to try with the first seed of every method, as multiples of the task's: 0.5,1,2. "
            "The other seeds have the best one of their method, and tables say it."
        ),
    ] = "1",
    steps: Annotated[int, typer.Option(min=1, help="Of each run; those of sweeps have fewer.")] = 3000,
    ranks: Annotated[int, typer.Option(min=1, max=256, help="Ranks of each run.")] = 4,
    batch: Annotated[
        int | None,
        typer.Option(min=1, help="Samples per step, of all ranks. Default: each task's own.", show_default=False),
    ] = None,
    sweep: Annotated[
        str,
        typer.Option(
            help="What to vary for one CNN: [bold]batch[/] (128 to 2,048 samples per step, an eighth of the steps), "
            "[bold]ranks[/] (2 to 32, a tenth of the steps), both, or [bold]none[/]. Default: both if --task has that "
            f"CNN, {SWEPT_TASK}."
        ),
    ] = ",".join(SWEEPS),
    size: Annotated[
        str,
        typer.Option(
            help="Of the models: [bold]small[/], or [bold]large[/] for 7 to 11 million parameters. Large has other "
            f"defaults: --task {','.join(GROWN)} --methods {_LARGE['methods']} --rates {_LARGE['rates']} "
            f"--steps {_LARGE['steps']} --all-seeds."
        ),
    ] = "small",
    device: Annotated[
        str | None,
        typer.Option(
            help="Where models are trained, as torch names it; gradients are exchanged in main memory. Default: cpu, "
            "or with --size large a GPU if torch finds one.",
            show_default=False,
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            file_okay=False,
            help=f"The folder with the IDX files of Fashion-MNIST. Default: {DEFAULT_FOLDER}, where Debian's package "
            "dataset-fashion-mnist has them.",
            show_default=False,
        ),
    ] = None,
    text: TextFolder = None,
    out: Annotated[
        Path,
        typer.Option(
            file_okay=False, help="Folder for the runs. Called again with it, the command goes on from there."
        ),
    ] = Path("accuracy-results"),
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Runs at a time. Default: one for each core.", show_default=False)
    ] = None,
    plan_only: Annotated[
        bool, typer.Option("--plan", help="Only say what would be done and how long it takes.")
    ] = False,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", dir_okay=False, help="Write rows, runs with their curves, and the machine here."),
    ] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", dir_okay=False, help="Draw all curves into this PNG file.")
    ] = None,
    iterations_file: Annotated[
        Path | None,
        typer.Option(
            "--iterations",
            dir_okay=False,
            exists=True,
            help="What python -m lab topk --simulate --json FILE has written: also say how long the runs of "
            "its schemes take with iterations as long as those of its weak scaling.",
        ),
    ] = None,
    networks: Annotated[
        str,
        typer.Option(
            help="Networks to say the time to a loss on: 100mbit,1gbit,10gbit. One rank's step is measured, the cost "
            "model gives the rest.",
            show_default=False,
        ),
    ] = "",
    time_plot_file: Annotated[
        Path | None,
        typer.Option(
            "--time-plot", dir_okay=False, help="With --iterations or --networks: draw curves over time into this file."
        ),
    ] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds after which it is given up.")] = 86400.0,
) -> None:
    """Train the same models with dense and with compressed gradients, on the same data in the same order, and compare
    accuracy or loss on held-out data, and bytes.

    One process plays all ranks of a run: the gradients of each rank's samples go through its own residual, selection
    and wire format, and through the collectives. Bits and bytes are those of a real job over a network with DDP.
    [bold]behind dense[/]: points of accuracy. [bold]above dense[/]: percent of the loss; both compare means over the
    same seeds. [bold]sent/step[/]: payload that one rank sends. [bold]reduced density[/]: what share of the compressed
    entries the averaged gradient has. [bold]selected/k[/]: entries that were sent, of those asked for.
    """
    console = table_console()
    is_large = among(size, SIZES, "--size") == ["large"]
    if is_large:
        given: dict[str, Any] = {"tasks": tasks, "methods": methods, "rates": rates, "steps": steps}
        own = {name: one for name, one in given.items() if is_given(context, name)}
        tasks, methods, rates, steps = (_LARGE | own).values()
    if importlib.util.find_spec("torch") is None:
        raise typer.BadParameter("torch is not installed: pip install 'telegrad[demo]'")
    device = device or _device(is_large)
    chosen = tuple(among(tasks, tuple(TASKS), "--task"))
    sweeps = SWEPT_TASK in chosen or is_given(context, "sweep")
    study = Study(
        chosen,
        tuple(among(methods, tuple(METHODS), "--methods")),
        tuple(sorted(densities_of(density, "--density"), reverse=True)),
        seeds,
        all_seeds or is_large,
        steps,
        ranks,
        batch,
        () if sweep == "none" or not sweeps else tuple(among(sweep, SWEEPS, "--sweep")),
        "large" if is_large else "small",
        device,
        _rates_of(rates),
        is_large and not is_given(context, "density"),
    )
    check_device(console, device)
    check_all_writable({"--json": json_file, "--plot": plot_file, "--time-plot": time_plot_file})
    if time_plot_file is not None and (iterations_file is None) == (not networks):
        raise typer.BadParameter(
            "needs --iterations FILE: how long an iteration takes; or --networks, not both", param_hint="--time-plot"
        )
    iterations = _iterations_in(iterations_file)
    named = _networks_of(networks)
    if plan_only:
        refuse_given(
            context, ("json_file", "plot_file", "time_plot_file", "networks"), "--plan measures nothing to write"
        )
    place = Place(out / "runs", out / "text", data)
    jobs = jobs or len(os.sched_getaffinity(0))
    with ended_by_interrupt(console, f"interrupted; the same command goes on from what {out} has"):
        try:
            parts, now = _parts_of(study, place)
            runs = in_order(parts)
            if not parts[MAIN]:
                have = "; ".join(f"{task} has {', '.join(_methods_of(task))}" for task in chosen)
                raise typer.BadParameter(f"{methods} fit none of these tasks: {have}", param_hint="--methods")
            left = missing(place, runs)
            if plan_only:
                check_sources(place, text)
                with tempfile.TemporaryDirectory(prefix="telegrad-accuracy-") as folder:
                    scratch = Place(Path(folder) / "runs", Path(folder) / "text", data)
                    prepare(scratch, runs, text)
                    _say_plan(console, scratch, runs, left, jobs)
                return
            prepare(place, runs, text)
            _say_plan(console, place, runs, left, jobs)
            for _ in range(2):  # the second time, seeds whose rate the first one has found
                if left := missing(place, now):
                    with StudyProgress(console, left, jobs) as progress:

                        def hear(worker: int, message: Mapping[str, Any], tell: Any = progress.update) -> None:
                            tell(worker, message)
                            if message["kind"] == "end" and json_file is not None:  # the command may be killed
                                with written(console, json_file):
                                    json_file.write_text(_text_of(_found(study, place)))

                        train(place, now, jobs, timeout_s=timeout, on_message=hear)
                parts, now = _parts_of(study, place)
            found = _found(study, place)
            timed_on = _timed_curves(found[MAIN], place, named)
        except DataMissing as error:
            images = [task for task in chosen if TASKS[task].data == "fashion"]
            why = "" if images else f" (--sweep trains {SWEPT_TASK}: leave it out to do without)"
            raise typer.BadParameter(f"{error}{why}") from error
        except ValueError as error:
            raise bad_setting(error, ("batch", "ranks", "steps")) from error
        except OSError as error:
            if str(error.filename or "").startswith(str(out)):
                raise typer.BadParameter(
                    f"cannot write {error.filename}: {error.strerror}; name another folder", param_hint="--out"
                ) from error
            raise typer.BadParameter(str(error)) from error
        except RankFailed as failure:
            last = "\n".join(failure.exits[0].stderr.rstrip().splitlines()[-_LAST_LINES:]) or "(it said nothing)"
            console.print("[red]a training process has failed; its last words:[/]")
            console.print(last, markup=False, highlight=False, soft_wrap=True)
            raise typer.Exit(1) from failure
        except RanksTimedOut as error:
            console.print(str(error), markup=False, highlight=False, soft_wrap=True)
            raise typer.Exit(1) from error
    _show(console, found, iterations, timed_on, json_file, plot_file, time_plot_file)


def _found(study: Study, place: Place) -> dict[str, list[Result]]:
    """What is there of each part."""
    return {part: results(place, of_part) for part, of_part in _parts_of(study, place)[0].items()}


def _timed_curves(of_runs: Sequence[Result], place: Place, networks: Sequence[str]) -> list[Row]:
    if not networks:
        return []
    import torch

    from lab.accuracy.problems import open_problem

    torch.set_num_threads(1)
    firsts = {one["run"]["task"]: Run.from_dict(one["run"]) for one in of_runs}
    traces = {task: measured_trace(run, open_problem(task, place.data, place.texts)) for task, run in firsts.items()}
    return timed_curves(of_runs, traces, networks)


def _networks_of(text: str) -> list[str]:
    named = [one.strip() for one in text.split(",") if one.strip()]
    try:
        for one in named:
            network_of(one)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--networks") from error
    return named


def _parts_of(study: Study, place: Place) -> tuple[dict[str, list[Run]], list[Run]]:
    """And the runs that can begin now: where rates are to be compared, the first seed comes first."""
    parts = study.parts()
    runs = in_order(parts)
    firsts = [run for run in runs if run.seed == 0]
    if len(study.rates) == 1:
        return parts, runs
    if missing(place, firsts):
        return parts, firsts
    best = best_rates(results(place, [run for run in parts[MAIN] if run.seed == 0]))
    parts = study.parts({(key[0], key[1], key[2]): rate for key, rate in best.items()})
    return parts, in_order(parts)


def _rates_of(text: str) -> tuple[float, ...]:
    try:
        found = tuple(sorted({float(rate) for rate in text.split(",")}))
    except ValueError:
        found = ()
    if not found or not all(0 < rate < math.inf for rate in found):
        raise typer.BadParameter(
            f"{text!r} must be numbers above 0, separated by commas: 0.5,1,2", param_hint="--rates"
        )
    return found


def _device(is_large: bool) -> str:
    if not is_large:
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _methods_of(task: str) -> list[str]:
    return [name for name, method in METHODS.items() if method.fits(TASKS[task])]


def _say_plan(console: Console, place: Place, runs: Sequence[Run], left: Sequence[Run], jobs: int) -> None:
    console.print(
        f"{len(runs)} runs of {len({run.task for run in runs})} tasks, {sum(run.steps for run in runs):,} steps"
        + (f"; {len(runs) - len(left)} runs are done" if len(left) < len(runs) else ""),
        highlight=False,
    )
    if not left:
        return
    step_s = time_steps(place, left, timeout_s=3600)
    by_task: dict[str, float] = {}
    for run in left:
        by_task[run.task] = by_task.get(run.task, 0.0) + step_s[run.name] * run.steps
    for task, seconds in by_task.items():
        console.print(f"  {task}: {sum(run.task == task for run in left)} runs, {_minutes(seconds)} of one core")
    jobs = min(jobs, len(left))
    console.print(
        f"about {_minutes(sum(by_task.values()) / jobs)} with {jobs} at a time, if the cores have nothing else to do; "
        f"{sum(by_task.values()) / 3600:.1f} core-hours together",
        highlight=False,
    )


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f} min"


def _iterations_in(file: Path | None) -> list[Row]:
    try:
        return [] if file is None else read_iterations(file)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error), param_hint="--iterations") from error


def _show(
    console: Console,
    found: dict[str, list[Result]],
    iterations: list[Row],
    timed_on: list[Row],
    json_file: Path | None,
    plot_file: Path | None,
    time_plot_file: Path | None,
) -> None:
    rows: dict[str, list[Row]] = {part: rows_of(of_part) for part, of_part in found.items()}
    for table in tables_of(rows[MAIN]):
        console.print(table)
    for part, of_part in rows.items():
        if part != MAIN and of_part:
            console.print(sweep_table(of_part, part))
    times = timed(rows[MAIN], iterations)
    if times:
        console.print(times_table(times))
    if timed_on:
        console.print(losses_table(times_to(timed_on)))
    console.print(machine_text(describe_machine()), style="dim")
    if json_file is not None:
        with written(console, json_file):
            json_file.write_text(_text_of(found, times, timed_on))
        say_file(console, "rows", json_file)
    if plot_file is not None:
        with drawn(console, plot_file):
            plot(found, dated("held-out figures, dense and compressed"), plot_file)
    if time_plot_file is not None and timed_on:
        with drawn(console, time_plot_file):
            plot_losses(timed_on, dated("held-out losses over time"), time_plot_file)
    elif time_plot_file is not None:
        if not times:
            console.print("[red]no picture over time: no method of these runs is a scheme of --iterations[/]")
            raise typer.Exit(1)
        plot_over_time(found[MAIN], times, sorted({row["ranks"] for row in times})[:2], time_plot_file)
        say_file(console, "plot over time", time_plot_file)


def _text_of(found: Mapping[str, list[Result]], times: Sequence[Row] = (), timed_on: Sequence[Row] = ()) -> str:
    """What ``--json`` writes."""
    whole: dict[str, Any] = {
        "rows": [{"part": part, **row} for part, of_part in found.items() for row in rows_of(of_part)],
        "runs": [{"part": part, **result} for part, of_part in found.items() for result in of_part],
        **({"times": list(times)} if times else {}),
        **({"curves": list(timed_on), "times_to_losses": times_to(timed_on)} if timed_on else {}),
        "machine": describe_machine(),
    }
    return json.dumps(whole, indent=1, allow_nan=False) + "\n"
