"""The ranks' side of ``telegrad bench training-step``: the same training by several ways to average gradients, in turn.

A sample is the mean step of one turn on the slowest rank, ``zero_grad()`` and the optimiser's step with it. Turns of
one round are compared with each other, as a machine is slower in some rounds than in others. All ways train on the same
data from the same weights, so that their weights at the end tell whether they averaged.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from telegrad import Communicator
from telegrad.bench.job import peers_store, run_job
from telegrad.bench.plan import Timing
from telegrad.bench.training_models import MODELS
from telegrad.bench.training_step_plan import LEFT_OUT, Row, TrainingStepPlan
from telegrad.calibration import calibrate
from telegrad.launch import join
from telegrad.train import DDPState, Synchronizer, ddp_hook

_TARGET = "telegrad.bench.training_step:main"
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


def main(plan_json: str) -> None:
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
                state = DDPState(communicator, ddp.named_parameters(), mode="dense")
                ddp.register_comm_hook(state, ddp_hook)
            self._called = ddp
        else:
            self._sync = Synchronizer(model, communicator, plan=way, warmup_steps=plan.warmup, replan_factor=None)
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
