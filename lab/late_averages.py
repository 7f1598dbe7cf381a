"""Communication that is seen with wait_in="forward" and delay=1, and what the delay costs in accuracy.

In virtual time the Synchronizer that trains runs on a network that is computed, where all ranks do the same at the same
time. On a real network, all ways train the same layers in the same processes, in turns. ``exposed_s`` of a way is its
step less that of ``alone``, which sums nothing. A layer computes for a fixed time without a processor, as on a GPU.
"""

from __future__ import annotations

import functools
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.table import Table
from torch import Tensor, nn

from telegrad import Communicator, Synchronizer
from telegrad.launch import join
from telegrad.synchronizer.clocks import WallClock
from telegrad.synchronizer.gradient_group import AT_ONCE
from telegrad.synchronizer.measured_timeline import MeasuredTimeline
from telegrad.tools.bench.machine import describe_machine
from telegrad.tools.bench.plan import JsonFields, run_job
from telegrad.tools.cli.options import JobTimeout, RowsFile, networks_of
from telegrad.tools.cli.outputs import check_writable, table_console, write_result

Row = dict[str, Any]

WAYS = ("alone", "step", "forward", "delay")
"""``alone``: nothing is summed. ``step``, ``forward``: of ``wait_in``. ``delay``: 1."""
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": torch.optim.SGD,
    "SGD, momentum 0.9": functools.partial(torch.optim.SGD, momentum=0.9),
    "AdamW": torch.optim.AdamW,
    "AdamW, β₁=0.5": functools.partial(torch.optim.AdamW, betas=(0.5, 0.999)),
}
RATES = {
    "SGD": (1.0, 0.5, 0.2, 0.1, 0.05),
    "SGD, momentum 0.9": (0.2, 0.1, 0.05, 0.02, 0.01, 0.005),
    "AdamW": (2e-2, 1e-2, 5e-3, 2e-3, 1e-3),
    "AdamW, β₁=0.5": (2e-2, 1e-2, 5e-3, 2e-3, 1e-3),
}
_INPUTS, _CLASSES = 32, 10
RATIOS = (0.5, 0.67, 0.8, 0.9, 1.0, 1.25, 1.5)
_LEFT_OUT, _WARM_UP = 2, 22  # steps; the groups of "forward" are put in order after 5 and after 20
_WIDTH = 64  # of the layers in virtual time, where bytes are relative


@dataclass(frozen=True)
class LatePlan(JsonFields):
    """``layers`` of ``width``², which compute ``compute_s`` each, two thirds of it in the backward pass; ``rounds``
    turns of each way, of ``steps``."""

    ranks: int
    network: str = "1gbit"
    layers: int = 24
    width: int = 1024
    compute_s: float = 0.04
    rounds: int = 6
    steps: int = 5


class _Computing(torch.autograd.Function):
    """The identity, that takes its time."""

    @staticmethod
    def forward(context: Any, x: Tensor, seconds: float, spend: Callable[[float], None]) -> Tensor:
        context.seconds, context.spend = seconds, spend
        spend(seconds / 3)
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        context.spend(2 * context.seconds / 3)
        return gradient, None, None


class _Layer(nn.Module):
    def __init__(self, width: int, seconds: float, spend: Callable[[float], None]) -> None:
        super().__init__()
        self.linear, self._seconds, self._spend = nn.Linear(width, width), seconds, spend

    def forward(self, x: Tensor) -> Tensor:
        computing: Any = _Computing
        return computing.apply(torch.tanh(self.linear(x)), self._seconds, self._spend)  # type: ignore[no-any-return]


class _VirtualSum:
    """One of a VirtualNetwork. ``left_s``: which it still takes where it is alone."""

    def __init__(self, network: VirtualNetwork, left_s: float, *, in_turn: bool) -> None:
        self._network, self.left_s, self.in_turn = network, left_s, in_turn
        self._begin_s, self.end_s = network.now_s, math.inf

    def wait(self) -> None:
        self._network.spend(math.inf, self)

    def span_s(self) -> tuple[float, float] | None:
        return (self._begin_s, self.end_s) if self.end_s < math.inf else None


class VirtualNetwork(WallClock):
    """In place of a Synchronizer's communicator and clock: every rank does the same at the same time, and sums that are
    under way share a full-duplex link of ``bytes_per_s``. Time passes only in ``spend``."""

    def __init__(self, comm: Communicator, *, ranks: int, bytes_per_s: float, latency_s: float) -> None:
        self._comm, self._latency_s = comm, latency_s
        self._byte_s = 2 * (ranks - 1) / ranks / bytes_per_s
        self._sums: list[_VirtualSum] = []  # that have not ended
        self.now_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def mark(self) -> float:
        return self.now_s

    def seconds_of(self, bytes_: int) -> float:
        """Of one sum alone."""
        return self._latency_s + bytes_ * self._byte_s

    def all_reduce(self, x: Any, op: str = "sum", *, async_op: bool = False) -> _VirtualSum | None:
        if async_op:
            return self._begin(x, in_turn=False)
        self._comm.all_reduce(x, op)
        return None

    def _average_in_turn(self, x: Any, *_: Any) -> _VirtualSum:
        return self._begin(x, in_turn=True)

    def _begin(self, x: Any, *, in_turn: bool) -> _VirtualSum:
        self._sums.append(_VirtualSum(self, self.seconds_of(x.nbytes), in_turn=in_turn))
        return self._sums[-1]

    def spend(self, seconds: float, until: _VirtualSum | None = None) -> None:
        """Lets time pass, so much or until that sum has ended."""
        end_s = self.now_s + seconds
        while self.now_s < end_s and (until is None or until.end_s == math.inf):
            turns = [one for one in self._sums if one.in_turn][AT_ONCE:]
            under_way = [one for one in self._sums if one not in turns]
            first_s = min((one.left_s for one in under_way), default=math.inf) * max(len(under_way), 1)
            step_s = min(first_s, end_s - self.now_s)
            self.now_s = end_s if step_s == end_s - self.now_s else self.now_s + step_s
            for one in under_way:
                one.left_s -= step_s / len(under_way)
                if one.left_s <= 1e-12:
                    one.end_s = self.now_s
            self._sums = [one for one in self._sums if one.end_s == math.inf]


class _Way:
    def __init__(
        self, name: str, plan: LatePlan, comm: Communicator, spend: Callable[[float], None] = time.sleep
    ) -> None:
        torch.manual_seed(1)
        self.name, self.comm = name, comm
        self.model = nn.Sequential(*(_Layer(plan.width, plan.compute_s, spend) for _ in range(plan.layers)))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self._x = torch.randn(4, plan.width, generator=torch.Generator().manual_seed(comm.rank))
        self.sync: Synchronizer | None = None
        self.turns_s: list[float] = []
        names = [name for name, _ in self.model.named_parameters()]
        groups = [names[place : place + 2] for place in range(0, len(names), 2)][::-1]
        if name == "delay":
            self.sync = Synchronizer(self.model, comm, plan=groups, delay=1)
        elif name != "alone":
            self.sync = Synchronizer(self.model, comm, plan=groups, wait_in=name, optimizer=self.optimizer)

    def train(self, steps: int, now_s: Callable[[], float] = time.perf_counter) -> None:
        self.comm.barrier()
        begin_s = 0.0
        for step in range(_LEFT_OUT + steps):
            if step == _LEFT_OUT:
                begin_s = now_s()
            self.optimizer.zero_grad()
            self.model(self._x).square().mean().backward()
            self.optimizer.step()
        own = np.array([(now_s() - begin_s) / steps])
        self.comm.all_reduce(own, "max")
        self.turns_s.append(float(own[0]))

    def weights(self) -> Tensor:
        if self.sync is not None:
            self.sync.wait()
        return torch.cat([one.detach().flatten() for one in self.model.parameters()])

    def rest(self) -> None:
        """Nothing of it is on the network while others take their turns."""
        if self.sync is not None and self.name == "forward":
            self.sync.wait()


def rank_main(plan_json: str) -> None:
    """One rank. Rank 0 prints a row for each way."""
    plan = LatePlan.from_json(plan_json)
    torch.set_num_threads(1)
    with join(timeout_s=120.0, join_timeout_s=120.0) as comm:
        ways = [_Way(name, plan, comm) for name in WAYS]
        for way in ways:
            way.train(_WARM_UP if way.name == "forward" else _WARM_UP // 4)
            way.rest()
            way.turns_s = []
        for number in range(plan.rounds):
            for way in ways[:: -1 if number % 2 else 1]:
                way.train(plan.steps)
                way.rest()
        by_name = {way.name: way for way in ways}
        by_name["step"].train(_WARM_UP - _WARM_UP // 4 - _LEFT_OUT)  # as many steps as "forward"
        by_name["step"].turns_s.pop()
        weights = by_name["step"].weights()
        for way in ways:
            alike = torch.equal(way.weights(), weights)
            exposed_s = [own - alone for own, alone in zip(way.turns_s, ways[0].turns_s, strict=True)]
            if comm.rank == 0:
                row: Row = {
                    "way": way.name,
                    "ranks": plan.ranks,
                    "ratio": None,
                    "step_s": statistics.median(way.turns_s),
                }
                row |= {"exposed_s": statistics.median(exposed_s), "same_weights": alike, "turns_s": way.turns_s}
                print(json.dumps({**row, "bytes": 4 * weights.numel()}), flush=True)
        comm.barrier()
        for way in ways:
            if way.sync is not None:
                way.sync.finish()
                way.sync.close()


def virtual_rows(ratio: float, *, ranks: int = 2, layers: int = 24, bytes_per_s: float = 125e6) -> list[Row]:
    """A row for each way in virtual time, by the Synchronizer that trains: ``ratio`` of the seconds that all sums take
    one after another, to those that the layers compute in a step."""
    rows: list[Row] = []
    found: dict[str, Tensor] = {}
    (comm,) = Communicator.local(1)
    with comm:
        for name in WAYS:
            network = VirtualNetwork(comm, ranks=ranks, bytes_per_s=bytes_per_s, latency_s=200e-6)
            sums_s = layers * network.seconds_of(4 * (_WIDTH * _WIDTH + _WIDTH))
            way = _Way(name, LatePlan(ranks, "virtual", layers, _WIDTH, sums_s / ratio / layers), comm, network.spend)
            if way.sync is not None:
                way.sync._comm, way.sync._clock = network, network  # type: ignore[assignment]
                way.sync._timeline = MeasuredTimeline([group.bytes for group in way.sync._groups], network)
            for steps in (_WARM_UP, 8):
                way.train(steps, network.mark)
            found[name] = way.weights()
            step_s = way.turns_s[-1]
            rows.append({"way": name, "ranks": ranks, "ratio": ratio, "step_s": step_s})
            rows[-1]["exposed_s"] = max(0.0, step_s - sums_s / ratio)  # rounding may leave less than nothing
            if way.sync is not None:
                way.sync.finish()
                way.sync._comm = comm
                way.sync.close()
    return [{**row, "same_weights": torch.equal(found[row["way"]], found["step"])} for row in rows]


def run(plan: LatePlan, *, timeout_s: float) -> list[Row]:
    """A row for each way. Raises ``RankFailed``, ``RanksTimedOut`` and ``NetlabError``."""
    rows: list[Row] = []

    def take(rank: int, line: str) -> None:
        if rank == 0 and line.startswith("{"):
            rows.append(json.loads(line))

    run_job("lab.late_averages:rank_main", plan, take, timeout_s=timeout_s)
    return rows


def accuracy_of(delay: int, optimizer: str, rate: float, *, steps: int = 400, seed: int = 0) -> Row:
    """Of a small network that learns what another one answers, on one rank: averages of several are as late as one's.
    A loss that is NaN or Inf counts as ``math.inf``."""
    draw = torch.Generator().manual_seed(seed)
    teacher, noise = torch.randn(_INPUTS, _CLASSES, generator=draw), 0.5

    def batch(size: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(size, _INPUTS, generator=draw)
        answers = torch.tanh(x) @ teacher + noise * torch.randn(size, _CLASSES, generator=draw)
        return x, answers.argmax(1)

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(_INPUTS, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, _CLASSES))
    made = OPTIMIZERS[optimizer](model.parameters(), lr=rate)
    (comm,) = Communicator.local(1)
    with comm:
        sync = Synchronizer(model, comm, plan="single", delay=delay)
        for _ in range(steps):
            made.zero_grad()
            x, y = batch(64)
            nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            made.step()
        sync.finish()
        if delay:
            made.step()
        sync.close()
    with torch.no_grad():
        x, y = batch(4096)
        held_out = nn.functional.cross_entropy(model(x), y).item()
    row = {"delay": delay, "optimizer": optimizer, "rate": rate, "steps": steps, "seed": seed}
    return {**row, "held_out": held_out if math.isfinite(held_out) else math.inf}


def table_of(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A line for each way."""
    table = Table("ratio", "way", "step", "exposed", "of step", "of wait_in=step", "weights", title_justify="left")
    for row in rows:
        waits_s = next(one["exposed_s"] for one in rows if one["way"] == "step" and one["ratio"] == row["ratio"])
        cells = (f"{row['step_s'] * 1e3:.2f} ms", f"{row['exposed_s'] * 1e3:.2f} ms")
        same = "same" if row["same_weights"] else "other"
        shares = (f"{row['exposed_s'] / row['step_s']:.1%}", f"{row['exposed_s'] / waits_s:.2f}")
        table.add_row(f"{row['ratio']:.2f}" if row["ratio"] else "", row["way"], *cells, *shares, same)
    return table


def accuracy_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A line for each optimizer and rate, means over seeds."""
    table = Table("optimizer", "rate", "no delay", "delay=1", title_justify="left")
    for optimizer, rate in dict.fromkeys((row["optimizer"], row["rate"]) for row in rows):
        of = [row for row in rows if (row["optimizer"], row["rate"]) == (optimizer, rate)]
        means = (statistics.fmean(row["held_out"] for row in of if row["delay"] == delay) for delay in (0, 1))
        table.add_row(optimizer, f"{rate:g}", *(f"{one:.3f}" for one in means))
    return table


def command(
    ranks: Annotated[int, typer.Option(min=2, max=16, help="Processes, each in a network namespace.")] = 2,
    network: Annotated[
        str, typer.Option(help="virtual, or as for other experiments: 1gbit (needs root), shm …")
    ] = "virtual",
    compute_ms: Annotated[float, typer.Option(min=0.1, help="Of a layer in a step, but in virtual time.")] = 40.0,
    width: Annotated[int, typer.Option(min=8, help="Of layers: 512 are 25 MB, 1024 are 101 MB. Not virtual.")] = 1024,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each way. Not virtual.")] = 6,
    seeds: Annotated[int, typer.Option(min=0, help="Of the jobs that show accuracy; 0: none.")] = 2,
    json_file: RowsFile = None,
    timeout: JobTimeout = 400.0,
) -> None:
    """Compare ways to wait for averages of 24 layers: exposed communication, weights, and accuracy with a delay.

    [bold]ratio[/]: of the time of all sums, one after another, to that of a step without them. [bold]exposed[/]: a step
    less one that sums nothing. [bold]of wait_in=step[/]: as a part of that way's. [bold]weights[/]: whether they are
    those of wait_in="step", bit for bit, after the same steps.
    """
    console = table_console()
    check_writable(json_file, "--json")
    if network == "virtual":
        rows = [row for ratio in RATIOS for row in virtual_rows(ratio, ranks=ranks)]
    else:
        (found,) = networks_of([network])
        rows = run(LatePlan(ranks, found, width=width, compute_s=compute_ms / 1e3, rounds=rounds), timeout_s=timeout)
    console.print(table_of(rows))
    accuracy = [
        accuracy_of(delay, optimizer, rate, seed=seed)
        for optimizer, rates in RATES.items()
        for rate in rates
        for delay in (0, 1)
        for seed in range(seeds)
    ]
    if accuracy:
        console.print(accuracy_table(accuracy))
    if json_file is not None:
        write_result(console, json_file, {"rows": rows, "accuracy": accuracy, "machine": describe_machine()})
    if not all(row["same_weights"] for row in rows if row["way"] == "forward"):
        console.print("[red]wait_in='forward' has trained other weights than wait_in='step'[/]")
        raise typer.Exit(1)
