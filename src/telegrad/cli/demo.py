"""``telegrad demo``: one model, trained by plain DDP and over telegrad, on a network that is real to all of them."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from telegrad.bench.netlab import NetlabError, parse_rate, why_unavailable
from telegrad.cli.interrupts import sigterm_as_interrupt
from telegrad.demo.job import LOOPBACK, Place, open_place, train
from telegrad.demo.results import RunResult, as_json
from telegrad.demo.settings import RUNS, SCHEMES, ModelSize, Settings
from telegrad.demo.text import Corpus, check_length
from telegrad.launch import RankFailed, RanksTimedOut
from telegrad.report.training import TrainingProgress, table_of
from telegrad.report.training_plot import plot

_DEFAULT_RATE = "1gbit"
_HEAD_WIDTH = 64
_LAST_LINES = 25


def demo(
    ranks: Annotated[int, typer.Option(min=1, max=64, help="Training processes to start on this machine.")] = 4,
    steps: Annotated[int, typer.Option(min=1, help="Optimiser steps of each run.")] = 220,
    density: Annotated[
        float,
        typer.Option(help="Share of each large tensor's gradient entries that the sparse run sends in a step."),
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
            "by tc (needs root). [bold]loopback[/]: this machine's own. Default: 1gbit as root, else loopback.",
            show_default=False,
        ),
    ] = None,
    runs: Annotated[str, typer.Option(help="Which runs to do, in this order, separated by commas.")] = ",".join(RUNS),
    batch: Annotated[int, typer.Option(min=1, help="Windows of text per rank and step.")] = 1,
    context: Annotated[int, typer.Option(min=8, help="Bytes in a window.")] = 64,
    width: Annotated[
        int, typer.Option(min=_HEAD_WIDTH, help=f"Width of the model, a multiple of {_HEAD_WIDTH}.")
    ] = 448,
    layers: Annotated[int, typer.Option(min=1, help="Transformer blocks of the model.")] = 2,
    seed: Annotated[int, typer.Option(min=0, help="Of the first weights and of the order of the data.")] = 0,
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
    """Train a byte-level GPT (5.3 million parameters by default) on the source code of Python's standard library,
    several times for the same number of steps: by PyTorch's DDP over Gloo, by telegrad with dense and with sparse
    gradients.

    All runs start with the same weights, see the same data in the same order and meet the same network.
    [bold]held-out loss[/] is in nats per byte, on files that no run trains on. [bold]training time[/] is without
    start-up and validation. [bold]exposed comm.[/] is the time from the moment when a step has computed its last
    gradient until all averaged gradients are there. [bold]sent[/] is what the network interface has counted in training
    steps, headers and dense warm-up included.
    """
    console = Console()
    names = _checked_runs(runs)
    if importlib.util.find_spec("torch") is None:
        raise typer.BadParameter("torch is not installed: pip install 'telegrad[demo]'", param_hint="telegrad demo")
    if width % _HEAD_WIDTH:
        raise typer.BadParameter(f"{width} is not a multiple of {_HEAD_WIDTH}", param_hint="--width")
    _check_outputs(out, json_file)
    size = ModelSize(width=width, layers=layers, heads=width // _HEAD_WIDTH, context=context)
    with (
        sigterm_as_interrupt(),
        _explained_failures(console),
        tempfile.TemporaryDirectory(prefix="telegrad-demo-") as folder,
        _place(console, network, ranks) as place,
    ):
        try:
            settings = Settings(
                run=names[0],
                corpus=folder,
                steps=steps,
                interface=place.interface,
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
            raise typer.BadParameter(str(error)) from error
        console.print(
            f"Text: {len(corpus.training) / 1e6:.1f} MB to train on, {len(corpus.held_out) / 1e6:.1f} MB held out; "
            f"{ranks} ranks; {_described(place)}"
        )
        results = _train_all(console, names, settings, place, timeout)
    _show(console, results, place, steps, out, json_file)


def _train_all(
    console: Console, names: list[str], settings: Settings, place: Place, timeout_s: float
) -> list[RunResult]:
    results = []
    with TrainingProgress(console, names, settings.steps) as progress:
        for name in names:
            progress.begin(name)
            own = dataclasses.replace(settings, run=name)
            results.append(train(own, place, timeout_s=timeout_s, on_message=progress.update))
            progress.finish(name)
    return results


def _show(
    console: Console, results: list[RunResult], place: Place, steps: int, out: Path, json_file: Path | None
) -> None:
    title = f"{results[0].parameters / 1e6:.1f} M parameters, {place.ranks} ranks, {place.name}, {steps} steps"
    console.print(table_of(results, title))
    for result in results:
        if not result.ranks_agree:
            console.print(f"[red]{result.name}: the ranks' weights differ at the end[/]")
    if json_file is not None:
        figures = as_json(results, network=place.name, ranks=place.ranks, steps=steps)
        json_file.write_text(json.dumps(figures, indent=1, allow_nan=False) + "\n")
        console.print(f"figures: {json_file.resolve()}", soft_wrap=True, highlight=False)
    picture = (out / "demo.png").resolve()
    plot(results, title, picture)
    console.print(f"plot: {picture}", soft_wrap=True, highlight=False)
    if not all(result.ranks_agree for result in results):
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
        if name not in RUNS:
            raise typer.BadParameter(f"{name!r} does not exist: use {', '.join(RUNS)}", param_hint="--runs")
    if len(set(names)) != len(names):
        raise typer.BadParameter(f"{runs!r} names a run twice", param_hint="--runs")
    return names


@contextlib.contextmanager
def _place(console: Console, network: str | None, ranks: int) -> Iterator[Place]:
    """The network that was asked for; without a wish the laboratory, or loopback where there can be none."""
    if network is not None and network != LOOPBACK:
        try:
            parse_rate(network)
        except ValueError as error:
            raise typer.BadParameter(f"{error}, or loopback", param_hint="--network") from error
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


def _described(place: Place) -> str:
    if place.prefix_of is None:
        return (
            "network: loopback, as fast as it goes; bytes are the loopback interface's, of all programs on this "
            f"machine, divided by {place.ranks}"
        )
    return f"network: {place.name}, one namespace per rank; bytes are those of each rank's own interface"


@contextlib.contextmanager
def _explained_failures(console: Console) -> Iterator[None]:
    try:
        yield
    except RankFailed as failure:
        first = failure.exits[0]
        how = f"status {first.returncode}" if first.returncode >= 0 else signal.Signals(-first.returncode).name
        last = "\n".join(first.stderr.rstrip().splitlines()[-_LAST_LINES:]) or "(it said nothing)"
        console.print(f"[red]rank {first.rank} ended with {how}; all ranks are stopped. Its last words:[/]")
        console.print(last, markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from failure
    except RanksTimedOut as error:
        console.print(str(error), markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt as interrupt:
        console.print("[yellow]interrupted; all ranks are stopped[/]")
        raise typer.Exit(130) from interrupt
