"""Whole short jobs, dense and compressed, beside what ``telegrad advise`` predicts of them.

Ranks calibrate their network, and record their own step without a network, as a user would. The forecast comes from
these two alone, before they train the whole job twice: dense, and by the recipe that advise prints, with dense first
steps and accumulated passes. Both jobs take turns, so that other work on the machine meets both alike. Steps recorded
between the turns make a second forecast, which tells what a change of the machine's speed did to the first.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.progress import TextColumn
from rich.table import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import telegrad
from lab.common.models import MODELS
from telegrad import Communicator
from telegrad.cost import Tuning
from telegrad.launch import LaunchError, join
from telegrad.synchronizer import StepProfile
from telegrad.synchronizer.trace import Trace
from telegrad.tools.advise.advice import SCHEMES, Advice, advise, recipe_of
from telegrad.tools.advise.workload import DEVICES, Workload, scaled
from telegrad.tools.bench.machine import describe_machine, machine_text
from telegrad.tools.bench.model_profile import Loss
from telegrad.tools.bench.plan import JsonFields, peers_store, run_job
from telegrad.tools.cli.advise import cluster_of
from telegrad.tools.cli.options import JobTimeout, RowsFile
from telegrad.tools.cli.outputs import check_all_writable, counting, table_console, write_result
from telegrad.tools.demo.job import VOCABULARY, ModelSize
from telegrad.tools.demo.training import ByteGPT, loss_of
from telegrad.tools.report.figures import duration
from telegrad.tuning import calibrate

Row = dict[str, Any]

# The jobs


@dataclass(frozen=True)
class WholeJob(JsonFields):
    """``steps`` of the optimizer, each of ``accumulate`` passes. ``turn``: steps that one of the two jobs trains before
    the other's turn. ``recorded``: steps without a network before the jobs, of which the forecast is made; before each
    turn there are ``alone`` more, which tell how the machine's speed changed. ``store``: a path at which Gloo's
    processes meet."""

    name: str
    model: str
    network: str
    optimizer: str
    steps: int
    accumulate: int = 1
    density: float = 0.01
    turn: int = 5
    recorded: int = 10
    alone: int = 2
    ranks: int = 2
    calibration_s: float = 7.0
    store: str = ""


JOBS = (
    WholeJob("gpt-100mbit", "gpt", "100mbit", "adamw", 30),
    WholeJob("gpt-100mbit-x8", "gpt", "100mbit", "adamw", 20, accumulate=8),
    WholeJob("gpt-1gbit", "gpt", "1gbit", "adamw", 60),
    WholeJob("wide-100mbit", "large", "100mbit", "sgd-momentum", 60),
    WholeJob("wide-1gbit-x8", "large", "1gbit", "sgd-momentum", 60, accumulate=8),
)
_NAMES = ",".join(one.name for one in JOBS)
WITHIN = 0.15
"""How far a predicted speed-up may be off, as a part of the measured one."""


def _model_and_loss(job: WholeJob, rank: int) -> tuple[nn.Module, Loss]:
    """The same model on all ranks, each with its own samples."""
    torch.manual_seed(1)
    if job.model == "gpt":
        size = ModelSize()
        model: nn.Module = ByteGPT(size)
        torch.manual_seed(100 + rank)
        tokens = torch.randint(VOCABULARY, (1, size.context + 1))
        return model, lambda model: loss_of(model(tokens[:, :-1]), tokens[:, 1:])
    model, _ = MODELS[job.model]()
    torch.manual_seed(100 + rank)
    _, x = MODELS[job.model]()
    return model, lambda model: model(x).square().mean()


def _optimizer(job: WholeJob, model: nn.Module, *, momentum: float = 0.0) -> torch.optim.Optimizer:
    if job.optimizer.startswith("adam"):
        return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=momentum)


# What each rank runs

_TARGET = "lab.whole_jobs:rank_main"
_TIMEOUT_S, _JOIN_TIMEOUT_S = 300.0, 120.0
_LEFT_OUT = 2


def rank_main(job_json: str) -> None:
    """One rank. Rank 0 prints what the forecast is made of (``tuning``, ``trace``, ``recorded_s``) before it trains, a
    line for each turn, and at the end the later trace and the steps' seconds."""
    job = WholeJob.from_json(job_json)
    torch.set_num_threads(1)
    with join(timeout_s=_TIMEOUT_S, join_timeout_s=_JOIN_TIMEOUT_S) as communicator:
        tuning = calibrate(communicator, seconds=job.calibration_s, keep=False)
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{job.store}", rank=communicator.rank, world_size=job.ranks
        )
        recorded = _Alone(job, communicator)
        recorded.train(job.recorded)
        _say(communicator, {**recorded.said("trace", "recorded_s"), "tuning": tuning.to_json()})
        alone = _Alone(job, communicator)
        jobs = {name: _Training(job, communicator, compressed=name == "sparse") for name in ("dense", "sparse")}
        for first in range(0, job.steps, job.turn):
            alone.train(job.alone)
            for one in jobs.values():
                one.train(min(job.turn, job.steps - first))
            _say(communicator, {"turn": first})
        times = {f"{name}_s": one.steps_s for name, one in jobs.items()}
        _say(communicator, {**alone.said("later_trace", "alone_s"), **times})
        communicator.barrier()
        torch.distributed.destroy_process_group()


def _say(comm: Communicator, line: dict[str, Any]) -> None:
    if comm.rank == 0:
        print(json.dumps(line), flush=True)


def _step(job: WholeJob, model: nn.Module, loss: Loss, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    for number in range(job.accumulate):
        last = number == job.accumulate - 1
        quiet = model.no_sync() if isinstance(model, DistributedDataParallel) and not last else contextlib.nullcontext()
        with quiet:
            (loss(model) / job.accumulate).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def _timed(comm: Communicator, steps: int, step: Callable[[], None]) -> list[float]:
    """Seconds of the slowest rank, by step."""
    comm.barrier()
    times = np.empty(steps)
    for number in range(steps):
        begin = time.perf_counter()
        step()
        times[number] = time.perf_counter() - begin
    comm.all_reduce(times, "max")
    return [*map(float, times)]


class _Alone:
    """The steps that a user records: without a network, while all ranks compute."""

    def __init__(self, job: WholeJob, communicator: Communicator) -> None:
        self._job, self._comm = job, communicator
        self._model, self._loss = _model_and_loss(job, communicator.rank)
        self._optimizer = _optimizer(job, self._model, momentum=recipe_of(job.optimizer).momentum)
        self._profile = StepProfile(self._model, skip=0, optimizer=self._optimizer)
        for _ in range(_LEFT_OUT):
            self._step()
        self.steps_s: list[float] = []

    def _step(self) -> None:
        _step(self._job, self._model, self._loss, self._optimizer)

    def train(self, steps: int) -> None:
        with self._profile:
            self.steps_s += _timed(self._comm, steps, self._step)

    def said(self, trace: str, seconds: str) -> dict[str, Any]:
        """The trace, medians of the slowest rank, and the seconds of the steps, by these names."""
        return {trace: self._profile.trace(self._comm).to_json(), seconds: self.steps_s}


class _Training:
    """One of the two jobs. ``steps_s``: of the slowest rank, by step."""

    def __init__(self, job: WholeJob, communicator: Communicator, *, compressed: bool) -> None:
        self._job, self._comm = job, communicator
        recipe = recipe_of(job.optimizer)
        model, self._loss = _model_and_loss(job, communicator.rank)
        self._ddp = DistributedDataParallel(model)
        own = recipe.momentum if compressed else 0.0
        self._optimizer = _optimizer(job, self._ddp, momentum=recipe.momentum - own)
        options: dict[str, Any] = {"compress": None}
        if compressed:
            options = {"compress": telegrad.TopK(density=job.density)}
            if recipe.dense_share:
                options["warmup"] = telegrad.Warmup(steps=recipe.dense_steps(job.steps))
            if own:
                options |= {"momentum": telegrad.Momentum(own), "optimizer": self._optimizer}
        state = telegrad.DDPState(communicator, self._ddp, **options)
        self._ddp.register_comm_hook(state, telegrad.ddp_hook)
        self.steps_s: list[float] = []

    def train(self, steps: int) -> None:
        self.steps_s += _timed(self._comm, steps, lambda: _step(self._job, self._ddp, self._loss, self._optimizer))


# The prediction, and both beside each other


def predicted(job: WholeJob, tuning: Tuning, trace: Trace, alone_s: Sequence[float]) -> Advice:
    """The output of ``telegrad advise --tuning … --trace … --device cpu`` for DDP's buckets and summed entries.

    ``alone_s``: of the recorded steps. A trace has medians; the sum of a job's steps follows their mean, to which all
    its times are scaled, as with ``--compute-ms``.
    """
    mean_s = float(np.mean(alone_s))
    factor = mean_s / (trace.accumulate * trace.compute_s + trace.rest_s)
    trace = replace(scaled(trace, factor), rest_s=trace.rest_s * factor)
    workload = Workload(job.name, trace, 1.0, accumulate=trace.accumulate)
    return advise(
        workload,
        cluster_of(tuning, job.ranks, 1),
        DEVICES["cpu"],
        optimizer=job.optimizer,
        steps=job.steps,
        density=job.density,
        schemes=[one for one in SCHEMES if one.name in ("ddp", "topk")],
    )


def run(job: WholeJob, *, timeout_s: float, on_turn: Callable[[], None] = lambda: None) -> Row:
    """The job's row. Raises ``RankFailed``, ``RanksTimedOut`` and ``NetlabError``."""
    said: Row = {}

    def take(rank: int, line: str) -> None:
        if rank != 0 or not line.startswith("{"):
            return
        one = json.loads(line)
        if "turn" in one:
            on_turn()
        else:
            said.update(one)

    with peers_store() as store:
        run_job(_TARGET, replace(job, store=store), take, timeout_s=timeout_s)
    tuning, trace = Tuning.from_json(said["tuning"]), Trace.from_json(said["trace"])
    row = row_of(job, tuning, trace, said["recorded_s"], said["dense_s"], said["sparse_s"])
    later = row_of(
        job, tuning, Trace.from_json(said["later_trace"]), said["alone_s"], said["dense_s"], said["sparse_s"]
    )
    return {**row, "later_ratio": later["ratio"], "later_alone_s": later["alone_s"]}


def row_of(
    job: WholeJob,
    tuning: Tuning,
    trace: Trace,
    alone_s: Sequence[float],
    dense_s: Sequence[float],
    sparse_s: Sequence[float],
) -> Row:
    """``ratio``: of the predicted speed-up of the whole job to the measured one. ``alone_s``: of the recorded steps."""
    advice = predicted(job, tuning, trace, alone_s)
    dense, sparse = advice.of("ddp"), advice.of("topk")
    measured = sum(dense_s) / sum(sparse_s)
    expected = dense.mean_s / sparse.mean_s
    first = recipe_of(job.optimizer).dense_steps(job.steps)
    return {
        **{name: value for name, value in asdict(job).items() if name != "store"},
        "parameters": trace.bytes // 4,
        "compute_s": trace.compute_s,
        "optimizer_s": trace.rest_s,
        "beta_s_per_byte": tuning.costs.beta_s_per_byte,
        "predicted_dense_s": dense.mean_s * job.steps,
        "predicted_compressed_s": sparse.mean_s * job.steps,
        "predicted_speedup": expected,
        "measured_dense_s": sum(dense_s),
        "measured_compressed_s": sum(sparse_s),
        "measured_speedup": measured,
        "ratio": expected / measured,
        "predicted_step_s": {"dense": dense.step_s, "compressed": sparse.step_s},
        "median_step_s": {"dense": float(np.median(dense_s)), "compressed": float(np.median(sparse_s[first:]))},
        "alone_s": float(np.mean(alone_s)),
        "steps_s": {"dense": [*dense_s], "compressed": [*sparse_s]},
        "trace": json.loads(trace.to_json()),
    }


def table_of(rows: Sequence[Row]) -> Table:
    """One line for each job."""
    table = Table(title="whole jobs, predicted and measured", title_justify="left", header_style="bold")
    table.add_column("job", no_wrap=True)
    for name in ("dense", "predicted", "compressed", "predicted", "speed-up", "predicted", "off", "off, later trace"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row["name"],
            duration(row["measured_dense_s"]),
            duration(row["predicted_dense_s"]),
            duration(row["measured_compressed_s"]),
            duration(row["predicted_compressed_s"]),
            f"{row['measured_speedup']:.2f}x",
            f"{row['predicted_speedup']:.2f}x",
            f"{row['ratio'] - 1:+.0%}",
            f"{row['later_ratio'] - 1:+.0%}" if "later_ratio" in row else "",
        )
    return table


def lines_of(rows: Sequence[Row]) -> Iterator[str]:
    """What is judged, in words."""
    missed = [row["name"] for row in rows if abs(row["ratio"] - 1) > WITHIN]
    yield f"{len(rows) - len(missed)} of {len(rows)} speed-ups are within {WITHIN:.0%}"
    if missed:
        yield f"not within: {', '.join(missed)}"


def command(
    jobs: Annotated[str, typer.Option(help="Which, separated by commas.")] = _NAMES,
    json_file: RowsFile = None,
    timeout: JobTimeout = 600.0,
) -> None:
    """Train whole short jobs over links of a given rate, and compare their speed-up with advise's prediction.

    Needs root, for the network laboratory. Two ranks with one thread each. Judged: each predicted speed-up of the whole
    job is within 15 % of the measured one. A miss is said, and is no error.
    """
    console = table_console()
    check_all_writable({"--json": json_file})
    known = {one.name: one for one in JOBS}
    names = [one.strip() for one in jobs.split(",")]
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"{name!r} does not exist: use {', '.join(known)}", param_hint="--jobs")
    rows: list[Row] = []
    failed: list[dict[str, str]] = []
    with counting(console, TextColumn("{task.fields[latest]}")) as bar:
        turns = sum(-(-known[name].steps // known[name].turn) for name in names)
        shown = bar.add_task("jobs", total=turns, latest="")
        for name in names:
            bar.update(shown, latest=name)
            try:
                rows.append(run(known[name], timeout_s=timeout, on_turn=lambda: bar.advance(shown)))
            except (LaunchError, RuntimeError) as error:
                console.print(f"[red]{name}:[/] {error}", highlight=False)
                failed.append({"job": name, "error": str(error)})
    if rows:
        console.print(table_of(rows))
    for line in lines_of(rows):
        console.print(line, highlight=False)
    machine = describe_machine()
    console.print(machine_text(machine), style="dim")
    if json_file is not None:
        write_result(console, json_file, {"rows": rows, "failed": failed, "machine": machine})
    if failed:
        raise typer.Exit(1)
