"""``telegrad demo``: one model, trained by plain DDP and over telegrad, on a network that is real to all of them."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Self

import typer
from rich.box import HEAVY_HEAD, SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from telegrad.launch import LaunchError, RankFailed
from telegrad.tools.bench.machine import describe_machine
from telegrad.tools.bench.netlab import NetlabError, parse_rate, why_unavailable
from telegrad.tools.cli.interrupts import ended_by_interrupt
from telegrad.tools.cli.options import among, bad_setting, described_gpu
from telegrad.tools.demo.job import (
    DEVICES,
    FIRST_LOSS,
    LOOPBACK,
    RUNS,
    SCHEMES,
    SHARED_MEMORY,
    Corpus,
    ModelSize,
    RunResult,
    Settings,
    TrainingPlace,
    as_json,
    check_length,
    check_run,
    equal_wall_s,
    open_place,
    train,
)
from telegrad.tools.report.figures import GREY, dated, duration, looks_of, name_lines, picture

# Live bars while runs train, a table when they are done, and a plot.

_RECENT = 10


class TrainingProgress:
    """A bar per run and, below, the figures of the one that trains; use it in a ``with`` statement.

    Where the output is no terminal, it prints a line at each validation instead.
    """

    def __init__(self, console: Console, names: Sequence[str], steps: int) -> None:
        self._console = console
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
        )
        self._tasks: dict[str, TaskID] = {
            name: self._bars.add_task(name, total=steps, start=False, visible=console.is_terminal) for name in names
        }
        self._figures = Text("", no_wrap=True, overflow="ellipsis")
        self._live = Live(Group(self._bars, self._figures), console=console, refresh_per_second=5)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._figures.plain = ""
        self._live.stop()

    def begin(self, name: str) -> None:
        """The run's ranks are being started."""
        self._bars.start_task(self._tasks[name])
        self._figures.plain = f"{name}: starting ranks"

    def update(self, result: RunResult, kind: str) -> None:
        """A run has sent a message of this kind."""
        figures = figures_of(result)
        self._bars.update(self._tasks[result.name], completed=len(result.steps))
        self._figures.plain = figures
        if kind == "validation" and not self._console.is_terminal:
            self._console.print(f"{result.name}, step {len(result.steps)}: {figures}", soft_wrap=True, highlight=False)

    def finish(self, name: str) -> None:
        """The run is over."""
        self._bars.stop_task(self._tasks[name])


def figures_of(result: RunResult) -> str:
    """The latest figures of a run that goes on: means over its last steps, and the last validation."""
    if not result.steps:
        return "starting training"
    recent = result.steps[-_RECENT:]
    held_out = f" (held out {result.validation_loss:.3f})" if result.validations else ""
    return (
        f"loss {result.smoothed_loss():.3f}{held_out} · "
        f"step {statistics.fmean(step.step_s for step in recent) * 1e3:.0f} ms · "
        f"exposed {statistics.fmean(step.exposed_s for step in recent) * 1e3:.0f} ms · "
        f"{result.steps[-1].sent / 1e6:,.1f} MB sent"
    )


def reference_of(results: Sequence[RunResult]) -> RunResult:
    """The run that the others are compared with: plain DDP if it is among them, else the first."""
    return next((result for result in results if result.name == "ddp-gloo"), results[0])


def table_of(results: Sequence[RunResult], title: str) -> Table:
    """A column per run, or a line per run where they are many; in brackets the ratio to plain DDP."""
    reference, at_s = reference_of(results), equal_wall_s(results)
    lines: list[tuple[str, ...]] = [("", *(result.name for result in results))]

    def add(name: str, figure: Callable[[RunResult], float], text: Callable[[float], str], *, inverse: bool) -> None:
        cells = []
        for result in results:
            cell = text(figure(result))
            if result is not reference and figure(reference) > 0 and figure(result) > 0:
                ratio = figure(result) / figure(reference)
                cell += f" (1/{1 / ratio:.{1 if ratio > 0.01 else 0}f})" if inverse else f" ({ratio:.2f}x)"
            cells.append(cell)
        lines.append((name, *cells))

    def nats(value: float) -> str:
        return f"{value:.3f}"

    add("held-out loss (nats/byte)", lambda result: result.validation_loss, nats, inverse=False)
    add("bits per byte", lambda result: result.bits_per_byte, nats, inverse=False)
    add(f"held-out loss after {duration(at_s)}", lambda result: result.loss_at(at_s), nats, inverse=False)
    add("training time", lambda result: result.training_s, lambda value: f"{value:.1f} s", inverse=False)
    add("median step", lambda result: result.step_s_median, _milliseconds, inverse=False)
    add("exposed communication", lambda result: result.exposed_s_median, _milliseconds, inverse=False)
    add(
        "sent per rank and step",
        lambda result: result.bytes_per_rank_step,
        lambda value: f"{value / 1e6:.2f} MB",
        inverse=True,
    )
    across = len(results) <= len(RUNS)
    table = Table(title=title, title_justify="left", header_style="bold", box=HEAVY_HEAD if across else SIMPLE_HEAD)
    if not across:  # eighty columns hold three runs
        lines = [*zip(*(line for line in lines if line[0] != "bits per byte"), strict=True)]
        lines = [(line[0], *(cell.replace(" (", "\n(") for cell in line[1:])) for line in lines]
        lines[0] = tuple(name.replace("communication", "time").replace("nats/byte", "nats") for name in lines[0])
        table.padding = 0
    for place, name in enumerate(lines[0]):
        table.add_column(
            name, justify="right" if place else "left", no_wrap=across == (place > 0), min_width=0 if place else 18
        )
    for line in lines[1:]:
        table.add_row(*line)
    return table


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms"


def picture_title(found: Mapping[str, Any], where: str) -> str:
    """What the picture of a demo on the network ``where`` shows. ``found``: as ``as_json`` gives it."""
    parameters = found["runs"][0]["parameters"] / 1e6
    return f"training of {parameters:.1f} M parameters, {found['ranks']} ranks, {where}, {found['steps']} steps"


def plot(found: Mapping[str, Any], title: str, path: Path) -> None:
    """Writes a PNG with two panels: loss over training time, where a line marks the time at which the fastest run was
    done and dots each run's loss then; and loss over the bytes that one rank has sent. ``found``: as ``as_json`` gives
    it.
    """
    runs: Sequence[Mapping[str, Any]] = found["runs"]
    looks = looks_of([run["name"] for run in runs])
    path.parent.mkdir(parents=True, exist_ok=True)
    with picture(path, title, height=7.6) as figure:
        over_time, over_bytes = figure.subplots(2, 1, sharey=True)
        losses = [point["validation_loss"] for run in runs for point in run["curve"]]
        finite = [loss for loss in losses if loss is not None]
        at_s = runs[0]["equal_wall_s"]
        for run in runs:
            look = looks[run["name"]].of_line()
            curve = [point for point in run["curve"] if point["validation_loss"] is not None]
            reached = [point["validation_loss"] for point in curve]
            end = f"{reached[-1]:.3f} at the end" if reached else "diverged"
            after, at_loss = "", run["validation_loss_at_equal_wall"]
            if at_loss is not None:
                after = f"\n{at_loss:.3f} after {at_s:.0f} s,"
                over_time.plot([at_s], [at_loss], marker="o", markersize=9, fillstyle="none", color=look["color"])
            seconds = [0.0, *(point["wall_s"] for point in curve)]
            over_time.plot(seconds, [FIRST_LOSS, *reached], label=f"{run['name']}{after}\n{end}", **look)
            label = f"{run['name']}\n{run['bytes_per_rank_step'] / 1e6:.2f} MB a step"
            over_bytes.plot([point["bytes_per_rank"] / 1e6 for point in curve], reached, label=label, **look)
        over_time.axvline(at_s, color=GREY, linestyle=":", linewidth=1)
        if finite:  # the fall from the first loss would flatten everything else
            over_time.set_ylim(0.95 * min(finite), 1.05 * max(finite))
        over_time.annotate(
            "equal wall time",
            (at_s, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(4, -10),
            textcoords="offset points",
            color=GREY,
        )
        over_time.set(xlabel="training time (s)", ylabel="held-out loss (nats/byte)")
        over_bytes.set(xlabel="sent by one rank (MB)", ylabel="held-out loss (nats/byte)")
        if any(x > 0 for line in over_bytes.get_lines() for x in line.get_xdata()):
            over_bytes.set_xscale("log")  # a logarithmic axis with nothing on it cannot be drawn
        for axes in (over_time, over_bytes):
            name_lines(axes)


_DEFAULT_RATE = "1gbit"
_HEAD_WIDTH = 64
_OPTIONS = ("density", "scheme", "steps", "batch", "learning_rate", "warmup_steps", "bucket_mb", "context", "seed")
_LAST_LINES = 25


def demo(
    ranks: Annotated[int, typer.Option(min=1, max=64, help="Training processes to start on this machine.")] = 4,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of each run.")] = 220,
    density: Annotated[
        float, typer.Option(help="Share of each large tensor's gradient entries that the sparse run sends in a step.")
    ] = 0.01,
    scheme: Annotated[
        str,
        typer.Option(
            help="How the sparse run's entries meet: [bold]allreduce[/]: all are summed; [bold]oktopk[/]: of a sum "
            "about as many are kept as each rank sends; [bold]gtopk[/]: the same by a tree; [bold]bounded[/]: the same "
            "in messages of fixed sizes; [bold]allgather[/]: every rank gets every rank's. Ok-Topk's rivals: "
            "[bold]topka[/], [bold]topkdsa[/], [bold]gaussiank[/]."
        ),
    ] = next(iter(SCHEMES)),
    network: Annotated[
        str | None,
        typer.Option(
            help="A rate such as [bold]1gbit[/] or [bold]100mbit[/]: one network namespace per rank, every link shaped "
            "by tc (needs root). [bold]loopback[/]: this machine's own. [bold]shm[/]: loopback for Gloo, shared memory "
            "for telegrad. Default: 1gbit as root, else loopback; on a GPU shm.",
            show_default=False,
        ),
    ] = None,
    runs: Annotated[
        str,
        typer.Option(
            help="Which runs to do, in this order, separated by commas; of torch's own hooks [bold]ddp-fp16[/] and, of "
            "any rank, [bold]ddp-powersgd-4[/]; of ours, of any rank, [bold]telegrad-lowrank-4[/], and "
            "with an exchange every so many steps [bold]telegrad-diloco-30[/], [bold]telegrad-sparseloco-30[/] and "
            "[bold]telegrad-streaming-30[/]; "
            "[bold]torchft-diloco-30[/] where torchft is installed."
        ),
    ] = ",".join(RUNS),
    batch: Annotated[int, typer.Option(min=1, help="Windows of text per rank and step.")] = 1,
    context: Annotated[int, typer.Option(min=8, help="Bytes in a window.")] = 64,
    width: Annotated[
        int, typer.Option(min=_HEAD_WIDTH, help=f"Width of the model, a multiple of {_HEAD_WIDTH}.")
    ] = 448,
    layers: Annotated[int, typer.Option(min=1, help="Transformer blocks of the model.")] = 2,
    device: Annotated[str, typer.Option(help="Where to train: cpu, or cuda, one GPU for all ranks.")] = DEVICES[0],
    seed: Annotated[
        int, typer.Option(min=0, max=2**63 - 1, help="Of the first weights and of the order of the data.")
    ] = 0,
    warmup_steps: Annotated[
        int, typer.Option(min=0, help="Steps that the sparse run does densely at first; their bytes count.")
    ] = 0,
    learning_rate: Annotated[float, typer.Option(help="AdamW's highest learning rate, for all runs.")] = 1e-3,
    bucket_mb: Annotated[float, typer.Option(help="DDP's bucket_cap_mb, for all runs.")] = 4.0,
    validations: Annotated[
        int, typer.Option(min=1, help="How often to take the held-out loss (not counted as training time).")
    ] = 8,
    text: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="Train on the *.py files in this folder instead of Python's standard library.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder for the plot; made if missing.")] = Path(
        "demo-results"
    ),
    json_file: Annotated[
        Path | None, typer.Option("--json", dir_okay=False, help="Write all figures here.", show_default=False)
    ] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds after which a run is given up.")] = 1800.0,
) -> None:
    """Train a small GPT by DDP over Gloo, by telegrad dense and by telegrad sparse; compare time, bytes and loss.

    It has 5.3 million parameters by default, and reads bytes of the source code of Python's standard library.
    All runs start with the same weights, see the same data in the same order and meet the same network. [bold]held-out
    loss[/] is in nats per byte, on files that no run trains on. [bold]training time[/] is without start-up and
    validation. [bold]exposed comm.[/] is the time from the moment when a step has computed its last gradient until all
    averaged gradients are there. [bold]sent[/] is what the network interface has counted in training steps, headers and
    dense warm-up included. With [bold]--device cuda[/] a run that has no way to train there says why.
    """
    console = Console()
    names = _checked_runs(runs)
    if importlib.util.find_spec("torch") is None:
        raise typer.BadParameter("torch is not installed: pip install 'telegrad[demo]'", param_hint="telegrad demo")
    if width % _HEAD_WIDTH:
        raise typer.BadParameter(f"{width} is not a multiple of {_HEAD_WIDTH}", param_hint="--width")
    among(device, DEVICES, "--device")
    machine = describe_machine() if device == "cpu" else described_gpu(console)
    _check_outputs(out, json_file)
    size = ModelSize(width=width, layers=layers, heads=width // _HEAD_WIDTH, context=context)
    with (
        ended_by_interrupt(console, "interrupted; all ranks are stopped"),
        tempfile.TemporaryDirectory(prefix="telegrad-demo-") as folder,
        _place(console, network or (SHARED_MEMORY if device != "cpu" else None), ranks) as place,
    ):
        try:
            settings = Settings(
                run=names[0],
                corpus=folder,
                steps=steps,
                interface=place.interface,
                shared_memory=place.shared_memory,
                device=device,
                seed=seed,
                batch=batch,
                density=density,
                scheme=scheme,
                warmup_steps=warmup_steps,
                validations=min(validations, steps),
                bucket_mb=bucket_mb,
                learning_rate=learning_rate,
                final_learning_rate=learning_rate / 10,
                model=size,
            )
            corpus = Corpus.prepare(Path(folder), text)
            check_length(corpus.training, context)
            check_length(corpus.held_out, context)
        except (ValueError, FileNotFoundError) as error:
            raise bad_setting(error, _OPTIONS) from error
        console.print(
            f"Text: {len(corpus.training) / 1e6:.1f} MB to train on, {len(corpus.held_out) / 1e6:.1f} MB held out; "
            f"{ranks} ranks; {_described(place)}"
        )

        def write(results: list[RunResult], missing: Mapping[str, str]) -> None:
            if json_file is not None:
                figures = {
                    **as_json(results, network=place.name, ranks=ranks, steps=steps, missing=missing),
                    "device": device,
                    "machine": machine,
                }
                json_file.write_text(json.dumps(figures, indent=1, allow_nan=False) + "\n")

        training = _Training(console, names, place, timeout, write)
        training.run(settings)
    where = place.name if device == "cpu" else f"{place.name}, {machine['gpu']}"
    found = as_json(training.results, network=place.name, ranks=ranks, steps=steps)
    _show(console, training, found, where, out, json_file)


class _Training:
    """The runs, one after the other. ``write(results, missing)`` is called after each: what comes later may fail."""

    def __init__(
        self,
        console: Console,
        names: list[str],
        place: TrainingPlace,
        timeout_s: float,
        write: Callable[[list[RunResult], Mapping[str, str]], None],
    ) -> None:
        self.results: list[RunResult] = []
        self.missing: dict[str, str] = {}  # why a run was not done, by name
        self.failed = False
        self._console, self._names, self._place = console, names, place
        self._timeout_s, self._write = timeout_s, write

    def run(self, settings: Settings) -> None:
        with TrainingProgress(self._console, self._names, settings.steps) as progress:
            for name in self._names:
                progress.begin(name)
                own = dataclasses.replace(settings, run=name)
                try:
                    result = train(own, self._place, timeout_s=self._timeout_s, on_message=progress.update)
                except LaunchError as error:
                    self._fail(name, error)
                else:
                    progress.finish(name)
                    self._take(name, result)
                self._write(self.results, self.missing)

    def _take(self, name: str, result: RunResult) -> None:
        if result.refused is None:
            self.results.append(result)
        else:
            self.missing[name] = result.refused
            self._console.print(f"{name} is not possible here: {result.refused}", markup=False, soft_wrap=True)

    def _fail(self, name: str, error: LaunchError) -> None:
        self.failed = True
        last = str(error)
        if isinstance(error, RankFailed):
            first = error.exits[0]
            last = "\n".join(first.stderr.rstrip().splitlines()[-_LAST_LINES:]) or "(it said nothing)"
            self._console.print(
                f"[red]{name}: rank {first.rank} ended with {first.how}; all ranks are stopped. Its last words:[/]"
            )
        self._console.print(last, markup=False, highlight=False, soft_wrap=True)
        self.missing[name] = last


def _show(
    console: Console, training: _Training, found: Mapping[str, Any], where: str, out: Path, json_file: Path | None
) -> None:
    results = training.results
    if json_file is not None:
        console.print(f"figures: {json_file.resolve()}", soft_wrap=True, highlight=False, markup=False)
    if results:
        title = picture_title(found, where)
        console.print(table_of(results, title))
        file = (out / "demo.png").resolve()
        plot(found, dated(title), file)
        console.print(f"plot: {file}", soft_wrap=True, highlight=False, markup=False)
    for result in results:
        if not result.ranks_agree:
            console.print(f"[red]{result.name}: the ranks' weights differ at the end[/]")
    if training.failed or not results or not all(result.ranks_agree for result in results):
        raise typer.Exit(1)


def _check_outputs(out: Path, json_file: Path | None) -> None:
    """Minutes of training must not end at a folder that cannot be written."""
    wanted = {"--out": out} if json_file is None else {"--out": out, "--json": json_file.parent}
    for option, folder in wanted.items():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise typer.BadParameter(f"cannot write to {folder}: {error}", param_hint=option) from error
    if json_file is not None and json_file.is_dir():
        raise typer.BadParameter(f"{json_file} is a folder: name a file in it", param_hint="--json")


def _checked_runs(runs: str) -> list[str]:
    names = [name.strip() for name in runs.split(",")]
    for name in names:
        try:
            check_run(name)
        except ValueError as error:
            raise typer.BadParameter(str(error).removeprefix("run="), param_hint="--runs") from error
    if len(set(names)) != len(names):
        raise typer.BadParameter(f"{runs!r} names a run twice", param_hint="--runs")
    return names


@contextlib.contextmanager
def _place(console: Console, network: str | None, ranks: int) -> Iterator[TrainingPlace]:
    """The network that was asked for; without a wish the laboratory, or loopback where there can be none."""
    if network is not None and network not in (LOOPBACK, SHARED_MEMORY):
        try:
            parse_rate(network)
        except ValueError as error:
            raise typer.BadParameter(f"{error}, or loopback or shm", param_hint="--network") from error
    with contextlib.ExitStack() as stack:
        try:
            place = stack.enter_context(open_place(network or _DEFAULT_RATE, ranks))
        except NetlabError as error:
            if network is not None:
                raise typer.BadParameter(f"{error}; or use --network loopback", param_hint="--network") from error
            reason = why_unavailable() or str(error)
            console.print(f"[yellow]Over loopback, not {_DEFAULT_RATE}:[/] {escape(reason)}")
            place = stack.enter_context(open_place(LOOPBACK, ranks))
        yield place


def _described(place: TrainingPlace) -> str:
    if place.shared_memory:
        return (
            "network: loopback for Gloo, whose bytes are the interface's, of all programs, divided by "
            f"{place.ranks}; shared memory for telegrad, which counts its own"
        )
    if place.prefix_of is None:
        return (
            "network: loopback, as fast as it goes; bytes are the loopback interface's, of all programs on this "
            f"machine, divided by {place.ranks}"
        )
    return f"network: {place.name}, one namespace per rank; bytes are those of each rank's own interface"
