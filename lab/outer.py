"""The accuracy of outer loops beside DDP at equal tokens: local SGD, DiLoCo, Streaming DiLoCo and SparseLoCo.

The demo's GPT (5.3 million parameters) and AdamW. Replicas are threads of one process, each with its own model and its
own inner optimizer, and exchange by the library itself. In a step each sees one window, as a rank of DDP does. Nothing
here is a measured time. Virtual time is ``--step-s`` for each step and what the bytes take on a link of that rate, one
after the other.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import typer
from rich.table import Table
from torch import nn

import telegrad
from lab.adamw import held_out, optimizers_of, positive_numbers, step_all
from lab.common.commands import TextFolder
from lab.common.growing_result import GrowingResult
from telegrad import Communicator, DiLoCo
from telegrad.tools.bench.machine import describe_machine, machine_text
from telegrad.tools.cli.options import RowsFile, among
from telegrad.tools.cli.outputs import check_all_writable, counting, drawn, table_console
from telegrad.tools.demo.job import Corpus, ModelSize, Settings, training_batch
from telegrad.tools.demo.training import ByteGPT, learning_rate_at, loss_of
from telegrad.tools.report.figures import COLORS, GREY, dated, picture

METHODS = ("ddp", "local-sgd", "diloco", "streaming", "sparseloco")
OUTER_RATES = {"local-sgd": 1.0, "diloco": 0.7, "streaming": 0.7, "sparseloco": 1.0}
"""The authors', of the outer optimizer; local SGD takes the average itself."""
MOMENTUM = {"diloco": 0.9, "streaming": 0.9}
"""The authors', by Nesterov; none for the others."""
_LINK = 100e6 / 8
_MBIT = 10, 100, 500


@dataclass(frozen=True)
class Run:
    """``every``: inner steps of a round, 1 with DDP. ``outer_rate``, ``momentum``: of the outer optimizer. ``start``:
    the first so many steps are DDP's. ``windows``: that a replica sees in a step. ``values``: the format in which
    dense rounds travel; f32 without. ``combine``: SparseLoCo's, as of ``TopK``. ``inner_rate``: the inner optimizer's
    learning rate, as a multiple of the demo's. ``grow``: above 0, a round has one step for every so many before it, and
    at most ``every``. ``optimizer``: the inner one, as of ``lab.adamw``. ``decay``: of SparseLoCo's residuals."""

    method: str
    replicas: int
    steps: int
    seed: int
    every: int
    outer_rate: float
    momentum: float = 0.0
    start: int = 0
    windows: int = 1
    values: str = ""
    combine: str = "allgather"
    inner_rate: float = 1.0
    grow: int = 0
    optimizer: str = "adamw"
    decay: float = 0.95


def outer_of(run: Run) -> Callable[[Any], torch.optim.Optimizer]:
    """With Nesterov's momentum, or none."""
    return functools.partial(torch.optim.SGD, lr=run.outer_rate, momentum=run.momentum, nesterov=run.momentum > 0)


def rounds_of(run: Run) -> set[int]:
    """After which steps a round that grows ends."""
    ends, step = set[int](), run.start
    while step < run.steps:
        step += min(run.every, max(1, step // run.grow))
        ends.add(min(step, run.steps))
    return ends


def outer_loop(run: Run, model: nn.Module, comm: Communicator, inner: Sequence[torch.optim.Optimizer]) -> DiLoCo:
    options: dict[str, Any] = {"every": None if run.grow else run.every, "outer": outer_of(run)}
    if run.method == "sparseloco":
        return telegrad.DiLoCo.sparse(model, comm, inner, combine=run.combine, decay=run.decay, **options)
    options["compress"] = telegrad.Quantised(run.values) if run.values else None
    if run.method == "streaming":
        return telegrad.DiLoCo.streaming(model, comm, inner, **options)
    return telegrad.DiLoCo(model, comm, inner, **options)


def trained(run: Run, corpus: Corpus, size: ModelSize, on_step: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """A row of ``run``."""
    settings = Settings("ddp-gloo", "", run.steps, "lo", seed=run.seed, batch=run.windows, model=size)
    rates = {name: run.inner_rate * getattr(settings, name) for name in ("learning_rate", "final_learning_rate")}
    settings = replace(settings, **rates)
    begin = time.process_time()
    model, inner, sent = _ddp(run, settings, corpus, on_step)
    if run.method != "ddp":
        model, by_replica = _replicas(
            run, settings, corpus, on_step, (model.state_dict(), [one.state_dict() for one in inner])
        )
        sent += by_replica
    whole = 2 * (run.replicas - 1) / run.replicas * 4 * sum(one.numel() for one in model.parameters()) * run.steps
    return vars(run) | {
        "loss": held_out(model, corpus, settings),
        "mb_per_step": sent / run.steps / 1e6,
        "less": whole / sent,
        "wire_s_at_100mbit": sent / _LINK,
        "cpu_s": time.process_time() - begin,
    }


def _model_of(settings: Settings) -> ByteGPT:
    torch.manual_seed(settings.seed)
    return ByteGPT(settings.model)


def _batch(corpus: Corpus, settings: Settings, step: int, rank: int) -> Any:
    return training_batch(
        corpus.training,
        seed=settings.seed,
        step=step,
        rank=rank,
        batch=settings.batch,
        context=settings.model.context,
    )


def _step(model: nn.Module, inner: Sequence[torch.optim.Optimizer], batch: Any, step: int, settings: Settings) -> None:
    for group in [group for one in inner for group in one.param_groups]:
        group["lr"] = learning_rate_at(step, settings)
    model.zero_grad()
    inputs, targets = map(torch.from_numpy, batch)
    loss_of(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
    step_all(inner)


def _ddp(
    run: Run, settings: Settings, corpus: Corpus, on_step: Callable[[], None]
) -> tuple[nn.Module, list[torch.optim.Optimizer], float]:
    """The steps that are DDP's. All windows in one batch have the gradient that ranks average. Bytes are those of a
    ring."""
    model = _model_of(settings)
    optimizers = optimizers_of(model, settings, run.optimizer)
    steps = run.steps if run.method == "ddp" else run.start
    for step in range(steps):
        batches = [_batch(corpus, settings, step, rank) for rank in range(run.replicas)]
        _step(model, optimizers, [np.concatenate(part) for part in zip(*batches, strict=True)], step, settings)
        on_step()
    share = 2 * (run.replicas - 1) / run.replicas
    return model, optimizers, steps * share * 4 * sum(one.numel() for one in model.parameters())


_making = threading.Lock()  # torch's random numbers are of the process


def _replicas(
    run: Run, settings: Settings, corpus: Corpus, on_step: Callable[[], None], begun: tuple[Any, Any]
) -> tuple[nn.Module, float]:
    """The other steps, from the states of the model and its optimizer that all replicas have."""

    def train(comm: Communicator) -> tuple[nn.Module, float]:
        with _making:
            model = _model_of(settings)
        inner = optimizers_of(model, settings, run.optimizer)
        model.load_state_dict(begun[0])
        for one, state in zip(inner, begun[1], strict=True):
            one.load_state_dict(copy.deepcopy(state))
        outer = outer_loop(run, model, comm, inner)
        ends = rounds_of(run) if run.grow else set()
        for step in range(run.start, run.steps):
            _step(model, inner, _batch(corpus, settings, step, comm.rank), step, settings)
            if step + 1 in ends:
                outer.exchange()
            if comm.rank == 0:
                on_step()
        if not run.grow:  # else the last round has ended, and one more would move by the momentum alone
            outer.exchange()
        outer.close()
        return model, comm.stats()["bytes_sent"]

    comms = Communicator.local(run.replicas, timeout_s=600)
    with ThreadPoolExecutor(run.replicas) as threads:
        models = [one.result() for one in [threads.submit(train, comm) for comm in comms]]
    for comm in comms:
        comm.close()
    return models[0][0], sum(sent for _, sent in models) / run.replicas


# Rows, their table and their plot


def run_of(row: Mapping[str, Any]) -> Run:
    """Rows of before have no momentum, the authors' then."""
    found = {name: row[name] for name in Run.__dataclass_fields__ if name in row}
    return Run(**{"momentum": MOMENTUM.get(row["method"], 0.0)} | found)


def virtual_s(row: Mapping[str, Any], mbit: float, step_s: float) -> float:
    """On links of that rate. Nothing overlaps, as most of what outer loops send is one burst."""
    return float(row["steps"] * (step_s + row["mb_per_step"] * 8 / mbit))


def table_of(rows: Sequence[Mapping[str, Any]], step_s: float = 0.063) -> Table:
    """Means over seeds; how far above DDP of the same replicas, steps and seeds."""
    table = Table(header_style="bold", padding=(0, 1))
    about = ["method", "every", "values", "replicas", "windows", "steps", "of DDP", "outer rate", "momentum"]
    for name in (*about, "optimizer", "inner rate", "grow", "seeds"):
        table.add_column(name, justify="left" if name == "method" else "right")
    for name in ("held-out loss", "above DDP", "MB a step", "less", *(f"at {mbit} Mbit/s" for mbit in _MBIT)):
        table.add_column(name, justify="right")
    runs = [(run_of(row), row) for row in rows]

    def base_of(run: Run) -> Run:
        base = Run("ddp", run.replicas, run.steps, run.seed, 1, 0.0, windows=run.windows)
        return replace(base, inner_rate=run.inner_rate, optimizer=run.optimizer)

    dense = {base_of(one): row["loss"] for one, row in runs if one.method == "ddp"}

    def kind(row: Mapping[str, Any]) -> Run:
        return replace(run_of(row), seed=0)

    for run, found in itertools.groupby(sorted(rows, key=lambda row: astuple(kind(row))), kind):
        own = list(found)
        losses = [row["loss"] for row in own]
        bases = [dense.get(base_of(replace(run, seed=row["seed"]))) for row in own]
        known = [(loss, base) for loss, base in zip(losses, bases, strict=True) if base is not None]
        cells = [run.method, str(run.every), run.values, str(run.replicas), str(run.windows), f"{run.steps:,}"]
        above = ""
        if run.method == "ddp":
            cells += [f"{run.steps:,}", "", ""]
        else:
            cells += [f"{run.start:,}", f"{run.outer_rate:g}", f"{run.momentum:g}"]
            above = f"{sum(a for a, _ in known) / sum(b for _, b in known) - 1:+.1%}" if known else ""
        cells += [run.optimizer, f"{run.inner_rate:g}", str(run.grow or ""), str(len(own))]
        cells += [f"{np.mean(losses):.3f}", above]
        cells += [f"{own[0]['mb_per_step']:.3g}", f"1/{own[0]['less']:,.0f}"]
        cells += [f"{virtual_s(own[0], mbit, step_s):,.0f} s" for mbit in _MBIT]
        table.add_row(*cells)
    return table


def plot(rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Loss over bytes; a point for each run."""
    with picture(path, title, height=4.2) as figure:
        axes = figure.subplots()
        for color, method in zip((GREY, *COLORS), METHODS, strict=False):
            own = [row for row in rows if row["method"] == method]
            axes.plot([row["mb_per_step"] for row in own], [row["loss"] for row in own], "o", color=color, label=method)
            for row in own if method != "ddp" else []:
                axes.annotate(
                    f"every {row['every']}", (row["mb_per_step"], row["loss"]), (4, 4), textcoords="offset points"
                )
        axes.set(xscale="log", xlabel="sent by a replica in a step (MB)", ylabel="held-out loss (nats per byte)")
        axes.legend(frameon=False)


def command(
    methods: Annotated[str, typer.Option(help="Names, separated by commas.")] = ",".join(METHODS),
    every: Annotated[str, typer.Option(help="Inner steps of a round; several, separated by commas.")] = "30",
    replicas: Annotated[int, typer.Option(min=2, max=64, help="Threads of this process.")] = 4,
    steps: Annotated[int, typer.Option(min=1, help="Inner steps of a run.")] = 1000,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each method.")] = 1,
    outer_rates: Annotated[
        str, typer.Option(help="Learning rates of the outer optimizer, separated by commas; the authors' without.")
    ] = "",
    momentum: Annotated[
        float | None, typer.Option(min=0, max=1, help="Of the outer optimizer, by Nesterov; the authors' without.")
    ] = None,
    start: Annotated[int, typer.Option(min=0, help="The first so many steps are DDP's, in all runs.")] = 0,
    windows: Annotated[int, typer.Option(min=1, help="That a replica sees in a step.")] = 1,
    values: Annotated[str, typer.Option(help="The format of dense rounds, as e3m0; f32 without.")] = "",
    combine: Annotated[str, typer.Option(help="How SparseLoCo's entries meet: allgather or oktopk.")] = "allgather",
    decay: Annotated[float, typer.Option(help="Of SparseLoCo's residuals in a round.")] = 0.95,
    optimizer: Annotated[Literal["adamw", "muon"], typer.Option(help="Of replicas; Muon is for matrices.")] = "adamw",
    inner_rates: Annotated[
        str, typer.Option(help="Its learning rates as multiples of the demo's, separated by commas.")
    ] = "1",
    grow: Annotated[
        int, typer.Option(min=0, help="A round has a step for so many before it, at most --every; 0: --every.")
    ] = 0,
    width: Annotated[int, typer.Option(min=7, help="Of the model: 448 has 5.3 million parameters.")] = ModelSize.width,
    step_s: Annotated[float, typer.Option(min=0, help="Seconds to compute a step, for virtual time.")] = 0.063,
    text: TextFolder = None,
    json_file: RowsFile = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", dir_okay=False, help="Draw loss over bytes (PNG, SVG, PDF).")
    ] = None,
) -> None:
    """Train a GPT by outer loops of several replicas, and compare with DDP at equal tokens.

    Runs of which the file of [bold]--json[/] has a row already are not made again: the same command goes on.

    [bold]Example:[/] python -m lab outer --methods ddp,diloco --every 15,30 --outer-rates 0.5,0.7 --json rows.json
    """
    console = table_console()
    names = among(methods, METHODS, "--methods")
    check_all_writable({"--json": json_file, "--plot": plot_file})
    rounds = [int(one) for one in positive_numbers(every, "--every", "15,30")]
    if ",".join(map(str, rounds)) != every.replace(" ", ""):
        raise typer.BadParameter(f"{every!r} is no list of whole numbers: use 15,30", param_hint="--every")
    rates = positive_numbers(outer_rates, "--outer-rates", "0.4,0.7") if outer_rates else []
    size = ModelSize(width=width)
    if width % size.heads:
        raise typer.BadParameter(f"{width} is no multiple of {size.heads}, the heads: use 56", param_hint="--width")
    if grow and "streaming" in names:
        raise typer.BadParameter("fragments take turns in rounds of one length: leave it out", param_hint="--grow")
    if start >= steps:
        raise typer.BadParameter(f"{start} leaves no step of {steps} to the outer loop", param_hint="--start")

    def momentum_of(name: str) -> float:
        own = MOMENTUM.get(name, 0.0)
        return own if momentum is None or name == "ddp" else momentum

    machine = describe_machine()
    result = GrowingResult(json_file, {"machine": machine, "width": width})
    if json_file is not None and json_file.is_file() and json_file.stat().st_size:
        result.rows += json.loads(json_file.read_text())["rows"]
    wanted = [
        Run(
            *(name, replicas, steps, seed, each, rate, momentum_of(name)),
            start=0 if name == "ddp" else start,
            windows=windows,
            values="" if name in ("ddp", "sparseloco") else values,
            combine=combine if name == "sparseloco" else "allgather",
            inner_rate=inner_rate,
            grow=0 if name == "ddp" else grow,
            optimizer=optimizer,
            decay=decay if name == "sparseloco" else 0.95,
        )
        for seed in range(seeds)
        for name in names
        for each in ([1] if name == "ddp" else rounds)
        for rate in ([0.0] if name == "ddp" else rates or [OUTER_RATES[name]])
        for inner_rate in positive_numbers(inner_rates, "--inner-rates", "1,4")
    ]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, counting(console) as progress:
        corpus = Corpus.prepare(Path(folder), text)
        for run in [run for run in wanted if run not in map(run_of, result.rows)]:
            bar = progress.add_task(f"{run.method}, every {run.every}, seed {run.seed}", total=run.steps)
            result.add(trained(run, corpus, size, lambda bar=bar: progress.advance(bar)))  # type: ignore[misc]
            progress.remove_task(bar)
    rows = [row for row in result.rows if run_of(row) in wanted]
    console.print(table_of(rows, step_s))
    console.print(machine_text(machine), style="dim")
    if plot_file is not None:
        with drawn(console, plot_file):
            plot(rows, dated(f"outer loops at equal tokens, {replicas} replicas, {steps:,} steps"), plot_file)
    result.end(console)
