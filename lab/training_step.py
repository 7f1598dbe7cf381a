"""Training steps by several ways to average gradients, and the automatic choice's prediction.

A sample is the mean step of one turn on the slowest rank, ``zero_grad()`` and the optimiser's step with it. Turns of
one round are compared with each other, as a machine is slower in some rounds than in others. All ways train on the same
data from the same weights, so that their weights at the end tell whether they averaged.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.progress import TextColumn
from rich.table import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lab.common.models import MODELS
from telegrad import Communicator
from telegrad.ddp import DDPState, ddp_hook
from telegrad.launch import LaunchError, join
from telegrad.synchronizer import AutoPlan, Synchronizer
from telegrad.synchronizer.group_planning import TIMED
from telegrad.tools.bench.machine import describe_machine, machine_text
from telegrad.tools.bench.plan import JsonFields, Timing, peers_store, run_job, text_of
from telegrad.tools.cli.options import CalibratesFirst, JobTimeout, RowsFile, among, networks_of
from telegrad.tools.cli.outputs import check_all_writable, counting, drawn, table_console, write_result
from telegrad.tools.report.figures import (
    GREY,
    SKY,
    VERMILION,
    bars,
    dated,
    duration,
    grid_of,
    key_of_marks,
    picture,
    seconds_across,
)
from telegrad.tuning import calibrate

Row = dict[str, Any]

# What is measured

WAYS = ("ddp-gloo", "ddp-telegrad", "wfbp", "single", "fixed", "greedy", "auto")
"""DistributedDataParallel with its own buckets, over Gloo and with telegrad's dense hook; and Synchronizers by plan."""

LEFT_OUT = 2
"""First steps of a turn: other ways have used the caches, and ranks may begin one early."""

SLOWER_SHARE, PREDICTED_SHARE = 0.05, 0.15
"""What ``auto`` may be slower than the best of the others, and what its prediction may be off."""

_OF_A_MEDIAN = 1.25 * 1.4826  # standard error of a median, by the median absolute deviation over √n
_FEWEST_ROUNDS = 3  # of which a spread says anything


@dataclass(frozen=True)
class TrainingStepPlan(JsonFields):
    """``rounds`` times each way trains ``steps`` steps after ``LEFT_OUT``, in orders of which every second one is the
    one before it backwards, after ``warmup`` steps of each and as many more as its plans take to be made and tried,
    which have these ``warmup_steps``. ``store``: a path at which Gloo's processes meet."""

    network: str
    ranks: int
    model: str
    ways: tuple[str, ...] = WAYS
    rounds: int = 8
    steps: int = 8
    warmup: int = 10
    calibrates: bool = True
    store: str = ""

    @property
    def blocks(self) -> int:
        """How often a way takes its turn, warming up included."""
        return len(self.ways) * (self.rounds + 1)


@dataclass(frozen=True)
class Verdict:
    """Of one model. ``ratio``: of auto's step to that of ``best``, the other way for which it is largest: the median
    over rounds, and ``error`` its standard error, ``None`` of fewer rounds than 3. ``off``: of auto's predicted step
    from its measured one, as a part of this; ``None`` where it made no plan."""

    model: str
    best: str
    ratio: float
    error: float | None
    off: float | None

    @property
    def is_as_fast(self) -> bool:
        return self.ratio <= 1 + SLOWER_SHARE

    @property
    def is_predicted(self) -> bool:
        return self.off is not None and abs(self.off) <= PREDICTED_SHARE


def verdicts_of(rows: Sequence[Mapping[str, Any]]) -> list[Verdict]:
    """One for each model that has ``auto`` and another way."""
    found = []
    for model in dict.fromkeys(row["model"] for row in rows):
        times = {row["way"]: row for row in rows if row["model"] == model}
        auto = times.pop("auto", None)
        if auto is None or not times:
            continue
        ratios = {way: np.array(auto["turns_s"]) / np.array(row["turns_s"]) for way, row in times.items()}
        best = max(ratios, key=lambda way: float(np.median(ratios[way])))
        ratio = float(np.median(ratios[best]))
        spread = float(np.median(np.abs(ratios[best] - ratio)))
        predicted_s, rounds = auto["predicted_s"], len(auto["turns_s"])
        found.append(
            Verdict(
                model,
                best,
                ratio,
                _OF_A_MEDIAN * spread / rounds**0.5 if rounds >= _FEWEST_ROUNDS else None,
                None if predicted_s is None else predicted_s / auto["median_s"] - 1,
            )
        )
    return found


# What each rank runs

_TARGET = "lab.training_step:rank_main"
_TIMEOUT_S, _JOIN_TIMEOUT_S = 300.0, 120.0
_RATE = 1e-3


def run(plan: TrainingStepPlan, *, timeout_s: float, on_block: Callable[[str], None] = lambda _: None) -> list[Row]:
    """A row for each way; ``on_block`` hears of each turn that is over. Raises ``RankFailed``, ``RanksTimedOut`` and
    ``NetlabError``."""
    rows: list[Row] = []

    def take(rank: int, line: str) -> None:
        if rank != 0 or not line.startswith("{"):
            return
        said = json.loads(line)
        if "block" in said:
            on_block(said["block"])
        else:
            rows.append(said)

    with peers_store() as store:
        run_job(_TARGET, replace(plan, store=store), take, timeout_s=timeout_s)
    return rows


def rank_main(plan_json: str) -> None:
    """One rank. Rank 0 prints a line for each turn, and at the end a row for each way."""
    plan = TrainingStepPlan.from_json(plan_json)
    torch.set_num_threads(1)
    with join(timeout_s=_TIMEOUT_S, join_timeout_s=_JOIN_TIMEOUT_S) as communicator:
        if plan.calibrates and communicator.world_size > 1:
            calibrate(communicator, keep=False)
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{plan.store}", rank=communicator.rank, world_size=plan.ranks
        )
        contenders = [_Contender(way, plan, communicator) for way in plan.ways]
        _measure(plan, communicator, contenders)
        reference = contenders[0].weights()
        for contender in contenders:
            row = contender.row(plan, reference)
            if communicator.rank == 0:
                print(json.dumps(row), flush=True)
        communicator.barrier()
        torch.distributed.destroy_process_group()


@dataclass
class _Times:
    """Of the slowest rank, by turn, of a step: all of it, and what comes after the backward pass."""

    step_s: list[float] = field(default_factory=list)
    after_s: list[float] = field(default_factory=list)


class _Contender:
    def __init__(self, way: str, plan: TrainingStepPlan, communicator: Communicator) -> None:
        self.way = way
        self._comm = communicator
        torch.manual_seed(1)
        model, _ = MODELS[plan.model]()
        torch.manual_seed(100 + communicator.rank)
        _, self._input = MODELS[plan.model]()
        self._model = model
        self._sync: Synchronizer | None = None
        self._called: nn.Module = model
        if way.startswith("ddp"):
            ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
            if way == "ddp-telegrad":
                state = DDPState(communicator, ddp, compress=None)
                ddp.register_comm_hook(state, ddp_hook)
            self._called = ddp
        else:
            how = AutoPlan(way, plan.warmup, None) if way in TIMED else way
            self._sync = Synchronizer(model, communicator, plan=how)
        self._optimizer = torch.optim.SGD(model.parameters(), lr=_RATE)
        self.times = _Times()

    def warm_up(self, steps: int) -> None:
        """``steps`` steps, and as many more as plans take to be made and tried; the model is as it was then."""
        before = copy.deepcopy(self._model.state_dict())
        self.train(steps)
        while self._sync is not None and not self._sync.is_settled:
            self.train(steps)
        self._model.load_state_dict(before)
        self.times = _Times()

    def train(self, steps: int) -> None:
        """``steps`` steps, and before them ``LEFT_OUT``, whose time does not count."""
        after_s, begin = 0.0, 0.0
        self._comm.barrier()
        for number in range(LEFT_OUT + steps):
            if number == LEFT_OUT:
                after_s, begin = 0.0, time.perf_counter()
            self._optimizer.zero_grad()
            self._called(self._input).square().mean().backward()
            averaged = time.perf_counter()
            self._optimizer.step()
            after_s += time.perf_counter() - averaged
        own = np.array([time.perf_counter() - begin, after_s]) / steps
        # Not step by step: a rank that begins one early waits longer in it for the others, and is no slower for that.
        self._comm.all_reduce(own, "max")
        self.times.step_s.append(float(own[0]))
        self.times.after_s.append(float(own[1]))

    def weights(self) -> torch.Tensor:
        return torch.cat([one.detach().ravel() for one in self._model.parameters()])

    def row(self, plan: TrainingStepPlan, reference: torch.Tensor) -> Row:
        """What is known of this way; called on all ranks."""
        timing = Timing.of(self.times.step_s)
        row: dict[str, Any] = {
            "model": plan.model,
            "way": self.way,
            "network": plan.network,
            "ranks": plan.ranks,
            "tensors": len([*self._model.parameters()]),
            "bytes": self.weights().numel() * 4,
            "median_s": timing.median_s,
            "min_s": timing.min_s,
            "p90_s": timing.p90_s,
            "samples": len(self.times.step_s),
            "turns_s": self.times.step_s,
            "apart": float((self.weights() - reference).abs().max() / reference.abs().max()),
            "groups": None,
            "exposed_s": None,
            "backward_s": None,
            "network_s": None,
            "predicted_s": None,
            "predicted_backward_s": None,
            "predicted_network_s": None,
        }
        if self._sync is not None:
            report = self._sync.report(slowest=True)
            row |= {
                "groups": len(self._sync.groups),
                "exposed_s": report.exposed_s,
                "backward_s": report.backward_s,
                "network_s": report.network_s,
                "predicted_backward_s": report.predicted_backward_s,
                "predicted_network_s": report.predicted_network_s,
            }
            if self._sync.plan is not None and self._sync.trace is not None:
                after_s = Timing.of(self.times.after_s).median_s
                row["predicted_s"] = self._sync.trace.forward_s + self._sync.plan.finish_s + after_s
        return row


def _measure(plan: TrainingStepPlan, communicator: Communicator, contenders: list[_Contender]) -> None:
    for contender in contenders:
        contender.warm_up(plan.warmup)
        _say(communicator, contender.way)
    for number in range(plan.rounds):
        order = np.random.default_rng(number // 2).permutation(len(contenders))  # as on all ranks
        for index in order[::-1] if number % 2 else order:
            contenders[index].train(plan.steps)
            _say(communicator, contenders[index].way)


def _say(communicator: Communicator, way: str) -> None:
    if communicator.rank == 0:
        print(json.dumps({"block": way}), flush=True)


# Table and plot


def table_of(rows: Sequence[Row], title: str) -> Table:
    """One line for each way; ratios are of medians, to the fastest."""
    table = Table(title=title, title_justify="left", header_style="bold")
    table.add_column("", no_wrap=True)
    for name in ("step", "p90", "to fastest", "groups", "backward", "exposed", "predicted", "off"):
        table.add_column(name, justify="right", no_wrap=True)
    fastest_s = min(row["median_s"] for row in rows)
    for row in rows:
        predicted_s = row["predicted_s"]
        table.add_row(
            row["way"],
            duration(row["median_s"]),
            duration(row["p90_s"]),
            f"{row['median_s'] / fastest_s:.2f}",
            "–" if row["groups"] is None else str(row["groups"]),
            duration(row["backward_s"]),
            duration(row["exposed_s"]),
            duration(predicted_s),
            "–" if predicted_s is None else f"{predicted_s / row['median_s'] - 1:+.0%}",
        )
    return table


def title_of(rows: Sequence[Row]) -> str:
    """What a table's rows have in common."""
    one = rows[0]
    return (
        f"{one['model']}: {one['tensors']} gradients, {text_of(one['bytes'])}; {one['ranks']} ranks, {one['network']}"
    )


def lines_of(rows: Sequence[Row]) -> list[str]:
    """What is judged of each model, in words."""
    lines = []
    for verdict in verdicts_of(rows):
        slower = "slower than" if verdict.error is None else "SLOWER than"
        speed = "no slower than" if verdict.is_as_fast else slower
        error = "" if verdict.error is None else f" ± {verdict.error:.2f}"
        few = "; too few rounds to judge" if verdict.error is None else ""
        ratio = f"{verdict.ratio:.2f}{error} of it, {1 + SLOWER_SHARE:.2f} allowed{few}"
        said = f"{verdict.model}: auto is {speed} {verdict.best} ({ratio})"
        if verdict.off is None:
            said += "; it made no plan"
        else:
            close = "within" if verdict.is_predicted else "OUTSIDE of"
            said += f"; its prediction is off by {verdict.off:+.0%}, {close} {PREDICTED_SHARE:.0%}"
        lines.append(said)
    return lines


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
    """A panel for each model, a bar for each way: its median step, the spread up to p90, and what was predicted. The
    format is that of the path's suffix; PNG without one."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    ways = list(dict.fromkeys(row["way"] for row in rows))
    with picture(path, title, height=0.8 + (0.7 + 0.25 * len(ways)) * len(models)) as figure:
        for model, axes in zip(models, grid_of(figure, len(models), 1), strict=True):
            of_model = [row for row in rows if row["model"] == model]
            medians = [row["median_s"] for row in of_model]
            bars(axes, [row["way"] for row in of_model], {"a step": medians}, colors={"a step": SKY})
            longest = max(row["p90_s"] for row in of_model)
            for place, row in enumerate(of_model):
                axes.plot([row["median_s"], row["p90_s"]], [place, place], color=GREY, linewidth=1.2)
                predicted_s = row["predicted_s"]
                if predicted_s is not None:
                    axes.plot([predicted_s] * 2, [place - 0.42, place + 0.42], color=VERMILION, linewidth=2.5)
                axes.annotate(
                    duration(row["median_s"]),
                    (max(row["p90_s"], predicted_s or 0.0), place),
                    xytext=(5, 0),
                    textcoords="offset points",
                    va="center",
                    weight="bold" if row["median_s"] == min(medians) else "normal",
                )
            axes.set_xlim(0, 1.12 * longest)
            seconds_across(axes.xaxis, logarithmic=False)
            axes.set(xlabel="time of a step (median)", title=title_of(of_model).partition(";")[0])
        bar = {"linestyle": "", "marker": "|", "markersize": 12, "markeredgewidth": 2.5}
        marks = {"up to p90": {"color": GREY, "linewidth": 1.2}, "predicted": {"color": VERMILION, **bar}}
        key_of_marks(figure, marks)


# The command

_MODELS = ("small", "large", "mixed")
_APART = 1e-3  # weights of two ways after the same steps, of the largest: float32 sums in another order


def command(
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
    chosen, (network,) = tuple(among(ways, WAYS, "--ways")), networks_of([network])
    plans = [
        TrainingStepPlan(network, ranks, model, chosen, rounds, steps, calibrates=calibrates)
        for model in among(models, _MODELS, "--models")
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
            plot(rows, dated(f"training steps, {ranks} ranks, {network}"), plot_file)
    if any(row["apart"] > _APART for row in rows):
        console.print("[red]some ways have trained other weights than the first[/]")
    if failed or any(row["apart"] > _APART for row in rows):
        raise typer.Exit(1)


def _run(plan: TrainingStepPlan, timeout_s: float, on_block: Callable[[str], None]) -> list[Row]:

    return run(plan, timeout_s=timeout_s, on_block=on_block)
