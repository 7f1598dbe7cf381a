"""The command ``python -m lab topk``."""

from __future__ import annotations

import importlib.util
import itertools
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import TextColumn

from lab.accuracy.fashion import DataMissing
from lab.accuracy.runs import TASKS
from lab.common.commands import TextFolder
from lab.topk import balancing, beside, measured, simulated, tables, traffic, weak_scaling
from lab.topk.measured import MeasuredPlan
from lab.topk.plots import picture_title, plot
from lab.topk.processes import simulate_all, tasks_of
from lab.topk.recording import Recording
from lab.topk.schemes import SCHEMES
from lab.topk.simulated import ARIES, RECORDED, SimulatedPlan
from lab.topk.streams import PATTERNS
from telegrad.launch import LaunchError
from telegrad.tools.bench.machine import describe_machine, machine_text
from telegrad.tools.cli.options import (
    CalibratesFirst,
    JobTimeout,
    among,
    densities_of,
    is_given,
    networks_of,
    refuse_given,
)
from telegrad.tools.cli.outputs import check_all_writable, check_writable, counting, drawn, table_console, write_result
from telegrad.tools.cli.simulate import ranks_of
from telegrad.tools.report.figures import dated
from telegrad.tools.sim.measure import Network, cores, network_of

_SIMULATED_RANKS = "2,4,8,16,32,64,128,256,512,1024"
_MEASURED_RANKS = "2,4,8"
_WEAK_RANKS = (16, 32, 64, 128, 256)
_FEWEST_GRADIENTS = 64
_TRAINING_RANKS = 8
_XI_EVERY = 10
_LSTM_PARAMETERS = 27_569_568
_ONLY_SIMULATED = ("patterns", "parameters", "weak", "balances", "training", "xi", "jobs")
_ONLY_MEASURED = ("blocks", "samples", "seconds", "calibrates")
_BYTES_RANKS = "4..1024"
_BESIDE = ((256, 1000), (64, 4000))  # ranks and k of what another version does, too
_ONLY_BYTES = ("ks", "other_python")
_NOT_BYTES = ("simulates", "schemes", *_ONLY_SIMULATED, "blocks", "seconds", "calibrates", "plot_file", "timeout")


def command(
    context: typer.Context,
    simulates: Annotated[
        bool,
        typer.Option(
            "--simulate",
            help="In virtual time: many ranks, words of every call, patterns that break bounds, and iterations of "
            "the paper's models.",
        ),
    ] = False,
    counts_bytes: Annotated[
        bool,
        typer.Option(
            "--bytes",
            help="In virtual time: all bytes of Ok-Topk in its default state, and how long calls take.",
        ),
    ] = False,
    ks: Annotated[str, typer.Option("--k", help="With --bytes: entries that sums keep; several.")] = "1000,4000,16000",
    other_python: Annotated[
        Path | None,
        typer.Option(
            "--beside",
            help="With --bytes: a Python whose telegrad is another version, which does some of the calls, too; with "
            "--network also calls over that.",
            show_default=False,
        ),
    ] = None,
    ranks: Annotated[
        str | None,
        typer.Option(
            help=f"How many; several: 2,4,8 or 2..8. Default: {_MEASURED_RANKS}; simulated {_SIMULATED_RANKS}; "
            f"--bytes {_BYTES_RANKS}.",
            show_default=False,
        ),
    ] = None,
    network: Annotated[
        str | None,
        typer.Option(
            help="Measured: [bold]tcp[/] (loopback), [bold]shm[/], or a rate such as [bold]1gbit[/] (one network "
            "namespace per rank; needs root); several; default tcp,1gbit. Simulated: [bold]aries[/], or a rate.",
            show_default=False,
        ),
    ] = None,
    density: Annotated[
        str, typer.Option(help="What share of each parameter's entries a rank selects; measured: several.")
    ] = "0.01",
    schemes: Annotated[str, typer.Option(help="Which to compare, separated by commas.")] = ",".join(SCHEMES),
    task: Annotated[str, typer.Option(help=f"What is trained to record gradients: {', '.join(TASKS)}.")] = "lstm",
    steps: Annotated[int, typer.Option(min=0, help="Steps of that before gradients are recorded.")] = 150,
    gradients: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False, help="Recorded gradients: taken from this file, or kept in it.", show_default=False
        ),
    ] = None,
    calls: Annotated[
        int, typer.Option(min=1, help="Calls one after the other, with residuals (simulated, beyond 256 ranks: 2).")
    ] = 4,
    patterns: Annotated[str, typer.Option(help=f"Simulated: {', '.join(PATTERNS)}, several, all or none.")] = "all",
    parameters: Annotated[
        int,
        typer.Option(
            min=0,
            help="Simulated: of the model that recorded gradients stand for, which are that much smaller: a byte costs "
            "as many times more. 0: of themselves. Default: the paper's LSTM.",
        ),
    ] = _LSTM_PARAMETERS,
    weak: Annotated[
        bool, typer.Option("--weak-scaling/--no-weak-scaling", help="Simulated: iterations of the paper's models.")
    ] = True,
    balances: Annotated[
        bool, typer.Option("--balancing/--no-balancing", help="Simulated: what Ok-Topk's balancing spares.")
    ] = True,
    training: Annotated[
        int, typer.Option(min=0, help="Simulated: steps of a training run with Ok-Topk among 8 ranks; 0: none.")
    ] = 200,
    xi: Annotated[bool, typer.Option("--xi", help="In that run also ξ of the paper's Assumption 1.")] = False,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Simulations at a time. Default: one for each core.", show_default=False),
    ] = None,
    blocks: Annotated[
        int, typer.Option(min=1, help="Measured: how many recorded gradients side by side make a rank's vector.")
    ] = 16,
    samples: Annotated[int, typer.Option(min=3, help="Measured: of each scheme (fewer where one takes long).")] = 15,
    seconds: Annotated[float, typer.Option(min=0.1, help="Measured: about how long, of each combination.")] = 20.0,
    calibrates: CalibratesFirst = True,
    data: Annotated[
        Path | None, typer.Option(file_okay=False, help="The folder of Fashion-MNIST.", show_default=False)
    ] = None,
    text: TextFolder = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", dir_okay=False, help="Write all rows and the machine here.")
    ] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", dir_okay=False, help="Draw everything into this PNG file.")
    ] = None,
    timeout: JobTimeout = 600.0,
) -> None:
    """Compare schemes that sum what ranks have selected of their gradients: dense, TopkA, TopkDSA, Gaussiank, Ok-Topk.

    Gradients are recorded first: one mini-batch of each rank at equal weights of a model that is trained for some
    steps; entries are selected of them with residuals, call after call. [bold]words[/]: indices and values that a rank
    sends or receives, whichever is more. [bold]6k'+2E[/]: what Ok-Topk promises for every call, k' the larger of the
    local and the global count, E the larger of P and 6√k'. [bold]bytes[/]: everything, headers and counts too. Without
    --simulate all schemes run over the network, interleaved, in the same processes.
    """
    console = table_console()
    check_all_writable({"--json": json_file, "--plot": plot_file})
    if importlib.util.find_spec("torch") is None:
        raise typer.BadParameter("torch is not installed: pip install 'telegrad[demo]'")
    tasks = among(task, tuple(TASKS), "--task")
    if len(tasks) != 1:
        raise typer.BadParameter(f"{task} are several, and gradients are of one: give one", param_hint="--task")
    if counts_bytes:
        refuse_given(context, _NOT_BYTES, "--bytes has no such choice")
        if other_python is None or network is None:
            refuse_given(context, ("samples", "network"), "--bytes needs it for calls over a network, by --beside")
    else:
        refuse_given(context, _ONLY_BYTES, "it is for --bytes")
        for_other = _ONLY_MEASURED if simulates else _ONLY_SIMULATED
        refuse_given(context, for_other, "it is for what is measured" if simulates else "it is for --simulate")
    chosen = tuple(among(schemes, tuple(SCHEMES), "--schemes"))
    densities = densities_of(density, "--density")
    most = 1024 if simulates or counts_bytes else 256
    counts = ranks_of(_BYTES_RANKS if counts_bytes and ranks is None else _default(ranks, simulates), "--ranks")
    if not 2 <= counts[0] <= counts[-1] <= most:
        raise typer.BadParameter(
            f"{ranks!r} is not within what can be compared here: use 2 to {most} ranks, as in 4,8 or 2..64",
            param_hint="--ranks",
        )
    recorder = _Recorder(console, tasks[0], steps, gradients, data, text, context)
    with tempfile.TemporaryDirectory(prefix="telegrad-topk-") as folder:
        if counts_bytes:
            bytes_plan = _BytesPlan(counts, _ks(ks), calls, _only(densities), other_python, network, samples)
            result = _count_bytes(console, bytes_plan, recorder, Path(folder))
        elif simulates:
            plan = SimulatedPlan(
                tuple(counts), _only(densities), calls, chosen, _patterns(patterns), _virtual(network or "aries")
            )
            weak_ranks = _WEAK_RANKS if weak else ()
            result = _simulate(
                console, plan, parameters, recorder, Path(folder), weak_ranks, balances, training, xi, jobs
            )
        else:
            networks = networks_of([one.strip() for one in (network or "tcp,1gbit").split(",")])
            file = recorder.file(max(counts[-1], _FEWEST_GRADIENTS), Path(folder))
            plans = [
                MeasuredPlan(
                    name, count, share, chosen, str(file.absolute()), blocks, calls, samples, seconds, calibrates
                )
                for name, count, share in itertools.product(networks, counts, densities)
            ]
            result = _measure(console, plans, Recording.load(file).elements, timeout, recorder.about)
    machine = describe_machine()
    console.print(machine_text(machine), style="dim")
    if json_file is not None:
        write_result(console, json_file, {**result, "machine": machine})
    if plot_file is not None:
        with drawn(console, plot_file):
            plot(result, dated(picture_title(result)), plot_file)
    if result.get("failed") or any(row["wrong"] for row in result.get("measured", ())):
        console.print("[red]something failed, or some sums were wrong[/]")
        raise typer.Exit(1)


def _default(ranks: str | None, simulates: bool) -> str:
    return ranks if ranks is not None else _SIMULATED_RANKS if simulates else _MEASURED_RANKS


def _only(densities: list[float]) -> float:
    if len(densities) > 1:
        given = ",".join(f"{one:g}" for one in densities)
        raise typer.BadParameter(
            f"{given} are several, and --simulate takes one: call the command for each", param_hint="--density"
        )
    return densities[0]


def _patterns(text: str) -> tuple[str, ...]:
    if text.strip() == "none":
        return ()
    return tuple(PATTERNS) if text.strip() == "all" else tuple(among(text, tuple(PATTERNS), "--patterns"))


def _virtual(name: str) -> Network:
    if name == "aries":
        return ARIES
    try:
        return network_of(name)
    except ValueError as error:
        raise typer.BadParameter(f"{error}, or aries", param_hint="--network") from error


class _Recorder:
    """Recorded gradients: from a file if there is one, else from training."""

    def __init__(
        self,
        console: Console,
        task: str,
        steps: int,
        kept: Path | None,
        data: Path | None,
        text: Path | None,
        context: typer.Context,
    ) -> None:
        self._console, self._task, self._steps, self._kept = console, task, steps, kept
        self._data, self._text, self._context = data, text, context
        check_writable(kept, "--gradients")
        self.about = f"gradients of {task} after {steps} steps"

    def file(self, count: int, folder: Path) -> Path:
        """A file with at least ``count`` gradients."""
        if self._kept is not None and self._kept.exists():
            try:
                found = Recording.load(self._kept)
            except (OSError, ValueError) as error:
                raise typer.BadParameter(str(error), param_hint="--gradients") from error
            if found.count < count:
                raise typer.BadParameter(
                    f"{self._kept} has {found.count} gradients, and {count} are needed: remove it to record them",
                    param_hint="--gradients",
                )
            self.about = f"gradients of {found.task} after {found.steps} steps"
            for name, given, has in (("task", self._task, found.task), ("steps", self._steps, found.steps)):
                if is_given(self._context, name) and given != has:
                    raise typer.BadParameter(
                        f"{given}, but {self._kept} has {self.about}: leave this out, or name another file",
                        param_hint=f"--{name}",
                    )
            self._task, self._steps = found.task, found.steps
            return self._kept
        file = self._kept or folder / "gradients.npz"
        self._record(count, folder).save(file)
        return file

    def _record(self, count: int, folder: Path) -> Recording:
        from lab.topk.training import record

        with counting(self._console) as bar:
            shown = bar.add_task(f"recording {count:,} gradients of {self._task}", total=self._steps + count)
            problem = self.problem(folder)
            return record(problem, count=count, steps=self._steps, on_step=lambda: bar.advance(shown))

    def problem(self, folder: Path) -> Any:
        """The task with its data. Raises ``BadParameter``."""
        from lab.accuracy.problems import open_problem
        from telegrad.tools.demo.job import Corpus

        try:
            if TASKS[self._task].data == "text" and not (folder / "training.bin").exists():
                Corpus.prepare(folder, self._text)
            return open_problem(self._task, self._data, folder)
        except (DataMissing, FileNotFoundError, ValueError) as error:
            raise typer.BadParameter(str(error)) from error


def _simulate(
    console: Console,
    plan: SimulatedPlan,
    parameters: int,
    recorder: _Recorder,
    folder: Path,
    weak_ranks: tuple[int, ...],
    balances: bool,
    training: int,
    xi: bool,
    jobs: int | None,
) -> dict[str, Any]:
    weak_ranks = weak_ranks if any(name != "dense" for name in plan.schemes) else ()
    balanced_ranks = balancing.RANKS if balances and "oktopk" in plan.schemes else ()
    count = max(*plan.ranks, *weak_ranks, _FEWEST_GRADIENTS)
    file = recorder.file(count, folder)
    recording = Recording.load(file)
    plan = replace(plan, factor=max(1.0, parameters / recording.elements))
    with counting(console, TextColumn("{task.fields[latest]}")) as bar:
        shown = bar.add_task("simulating", total=len(tasks_of(plan, weak_ranks, balanced_ranks)), latest="")
        found = simulate_all(
            plan,
            weak_ranks,
            recording,
            file,
            processes=jobs or cores(),
            balanced_ranks=balanced_ranks,
            on_done=lambda about: bar.update(shown, advance=1, latest=about),
        )
    result: dict[str, Any] = {
        "rows": found.rows,
        "weak_scaling": found.weak_scaling,
        "balancing": found.balancing,
        "about": {
            **simulated.ABOUT,
            "network": plan.network.about,
            "gradients": f"{recorder.about}, {recording.elements:,} elements, {recording.count:,} mini-batches at "
            "equal weights; density of each parameter is selected with a threshold that is reused, with residuals",
            "patterns": {name: PATTERNS[name][0] for name in plan.patterns},
            "weak_scaling": weak_scaling.ABOUT,
            "balancing": balancing.ABOUT,
        },
    }
    k = found.rows[0]["k"]
    about = f"{recorder.about}: n = {recording.elements:,}, k = {k:,}, a byte costs {plan.factor:.1f} times as much"
    recorded = [row for row in found.rows if row["gradients"] == RECORDED]
    console.print(tables.words_table(recorded, f"{about}: words, the most of any rank and call, in k"))
    console.print(tables.bytes_table(recorded, "bytes with headers and counts, the most of any rank and call, in 4k"))
    console.print(tables.times_table(recorded, "time of the last call (virtual)"))
    console.print(tables.parts_table(recorded, "its parts, among the most ranks"))
    if len(recorded) < len(found.rows):
        others = [row for row in found.rows if row["gradients"] != RECORDED]
        console.print(tables.patterns_table(others, "words on patterns, the most of any call, of 6k'+2E"))
    for table in tables.weak_scaling_tables(found.weak_scaling):
        console.print(table)
    if found.balancing:
        console.print(tables.balancing_table(found.balancing))
    if training:
        _train(console, recorder, folder, plan.density, training, xi, result)
    console.print(plan.network.about, style="dim", highlight=False)
    return result


def _train(
    console: Console, recorder: _Recorder, folder: Path, density: float, steps: int, xi: bool, result: dict[str, Any]
) -> None:
    from lab.topk.training import averages, train

    problem = recorder.problem(folder)
    with counting(console) as bar:
        shown = bar.add_task(f"training {problem.task.name} with Ok-Topk", total=steps)
        rows = train(
            problem,
            ranks=_TRAINING_RANKS,
            steps=steps,
            density=density,
            xi_every=_XI_EVERY if xi else 0,
            on_step=lambda: bar.advance(shown),
        )
    result["training"], result["training_averages"] = rows, averages(rows)
    title = f"{steps} steps of {problem.task.name} with Ok-Topk, {_TRAINING_RANKS} ranks"
    console.print(tables.training_table(rows, result["training_averages"], title))


def _ks(text: str) -> list[int]:
    try:
        found = [int(one) for one in text.split(",")]
    except ValueError:
        found = [0]
    if min(found) < 1:
        raise typer.BadParameter(f"{text!r} is no list of numbers of entries: use 1 or more each", param_hint="--k")
    return found


@dataclass(frozen=True)
class _BytesPlan:
    """``samples`` calls of each version over ``network``, if there is one."""

    ranks: list[int]
    ks: list[int]
    calls: int
    density: float
    other_python: Path | None
    network: str | None
    samples: int


def _count_bytes(console: Console, plan: _BytesPlan, recorder: _Recorder, folder: Path) -> dict[str, Any]:
    if plan.other_python is not None and not traffic.is_usable(plan.other_python):
        raise typer.BadParameter(
            f"{plan.other_python} is no Python with another telegrad: install one into a virtual environment, and name "
            "its python",
            param_hint="--beside",
        )
    blocks = beside.BLOCKS if plan.network is not None else ()
    recorded_ranks = [count for count in traffic.RECORDED_RANKS if count <= plan.ranks[-1]]
    needed = max([*recorded_ranks, *([beside.RANKS] if blocks else [])], default=0)
    recording = Recording.load(recorder.file(needed, folder)) if needed else None
    asked = [one for one in _BESIDE if one[0] in plan.ranks and one[1] in plan.ks] if plan.other_python else []
    parts = traffic.parts_of(plan.ranks, plan.ks, plan.calls, asked)
    timed: list[simulated.Row] = []
    with counting(console, TextColumn("{task.fields[latest]}")) as bar:
        total = len(parts) + len(recorded_ranks) + 2 * len(blocks) * plan.samples
        shown = bar.add_task("counting bytes", total=total, latest="")

        def done(about: str) -> None:
            bar.update(shown, advance=1, latest=about)

        if blocks:
            assert plan.network is not None
            assert plan.other_python is not None
            assert recording is not None
            (network,) = networks_of([plan.network])
            versions = {traffic.THIS: Path(sys.executable), traffic.BESIDE: plan.other_python.absolute()}
            for count in blocks:
                timed += beside.timed_rows(
                    versions,
                    recording,
                    plan.density,
                    network=network,
                    ranks=beside.RANKS,
                    blocks=count,
                    samples=plan.samples,
                    on_sample=done,
                )
        rows = traffic.all_rows(parts, plan.other_python, recording, plan.density, recorded_ranks, on_done=done)
    console.print(tables.traffic_table(traffic.summary(rows), "bytes of the busiest rank over 4k, everything counted"))
    if timed:
        console.print(tables.beside_table(timed))
    said = [*traffic.ratios(rows), *beside.timed_ratios(timed)]
    for line in said:
        console.print(f"this version beside the other: {line}", highlight=False)
    about = {**traffic.ABOUT, **(beside.ABOUT if timed else {}), "gradients": recorder.about}
    return {"rows": rows, "timed": timed, "ratios": said, "about": about}


def _measure(
    console: Console, plans: list[MeasuredPlan], elements: int, timeout_s: float, gradients: str
) -> dict[str, Any]:
    rows: list[simulated.Row] = []
    failed: list[str] = []
    with counting(console, TextColumn("{task.fields[latest]}")) as bar:
        total = sum(len(plan.schemes) * plan.samples for plan in plans)
        shown = bar.add_task("", total=total, latest="")
        for done, plan in enumerate(plans):
            about = f"{plan.ranks} ranks, {plan.network}, {plan.density:g} of {elements * plan.blocks:,} elements"
            passed = sum(len(one.schemes) * one.samples for one in plans[:done])
            bar.update(shown, description=about, completed=passed, latest="starting ranks")
            try:
                outcome = measured.run(
                    plan, timeout_s=timeout_s, on_sample=lambda name: bar.update(shown, advance=1, latest=name)
                )
            except (LaunchError, RuntimeError) as error:
                failed.append(f"{about}: {error}")
                console.print(f"[red]{about}:[/] {error}", highlight=False)
                continue
            found = measured.rows_of(plan, outcome, elements)
            console.print(tables.measured_table(found, f"{about}; {gradients}"))
            rows += found
    return {"measured": rows, "failed": failed, "about": {**measured.ABOUT, "gradients": gradients}}
