"""Gradients on a device that the program throws away leave nothing in what is remembered there."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from computing_device import computed_on
from device_and_host import DeviceRank, OnEach
from device_ranks import RANKS
from device_trainer import DeviceTrainer, step_on_device
from given_gradients import gradients_of as given_gradients
from given_gradients import sgd
from handmade_buckets import REBUILT, gradients_of, named, plain_sgd
from test_discarded_passes import assert_same_memory
from torch import Tensor
from triton_arrays import DEVICE

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),  # of numpy, in the interpreter
    pytest.mark.skipif(DEVICE != "cpu", reason="the fake device's memory is the host's: set TRITON_INTERPRET=1"),
]

STEPS = 3
MOMENTUM = {"momentum": 0.5, "optimizer": sgd}


@pytest.mark.parametrize(
    "options",
    [
        {"selection": "topk"},
        {"selection": "reused", "interval": 2, **MOMENTUM, "nesterov": True},
        {"compression": "quantised", "quantised": "int8"},
        {"selection": "topk", "feedback": "steps", "optimizer": sgd},
    ],
    ids=named,
)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_synchronizer(on_devices: OnEach, options: dict[str, Any], set_to_none: bool) -> None:
    def run(discards: int) -> Callable[[DeviceRank], tuple[list[dict[str, Tensor]], Any]]:
        def train(rank: DeviceRank) -> tuple[list[dict[str, Tensor]], Any]:
            averages = []
            for step in range(STEPS):
                averages.append(rank.step(given_gradients(rank.comm.rank, step)))
                rank.model.zero_grad()
                for one in range(discards):
                    other = given_gradients(rank.comm.rank, 50 + 2 * step + one)
                    rank.model({name: computed_on(rank.device, 9 * value) for name, value in other.items()}).backward()
                if discards:
                    rank.model.zero_grad(set_to_none=set_to_none)
            assert rank.sync.stats is not None
            state = rank.sync.state_dict()["compressor"]
            assert rank.sync.stats.discarded_passes == (STEPS if discards else 0)
            return averages, state

        return train

    expected = on_devices(run(0), plan="fixed", **options)
    for discards in (1, 2):
        found = on_devices(run(discards), plan="fixed", **options)
        for (averages, memory), (right, right_memory) in zip(found, expected, strict=True):
            for mine, theirs in zip(averages, right, strict=True):
                assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
            assert_same_memory(memory, right_memory)


@pytest.mark.parametrize(
    "options",
    [
        {"selection": "topk"},
        {"selection": "topk", "nonfinite": "skip"},
        {"selection": "reused", "interval": 2, "momentum": 0.9, "optimizer": plain_sgd, "nonfinite": "skip"},
        {"selection": "topk", "feedback": "steps", "optimizer": plain_sgd, "nonfinite": "skip"},
    ],
    ids=named,
)
def test_ddp(
    make: Callable[..., list[DeviceTrainer]], monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Passes by hand, which count as autograd's; gradients of parameters are ``None`` whenever one begins."""
    tasks = itertools.count(1)
    now = [0]
    monkeypatch.setattr(torch._C, "_current_graph_task_id", lambda: now[0])

    def train(discards: int) -> tuple[list[Any], list[Any]]:
        trainers = make(**options)
        optimizers = [torch.optim.SGD([*one.parameters.values()], lr=0.1) for one in trainers]

        def one_pass(step: int, factor: float) -> Any:
            now[0] = next(tasks)
            of_all = [gradients_of(rank, step) for rank in range(RANKS)]
            given = [{name: (factor * one).astype(one.dtype) for name, one in own.items()} for own in of_all]
            return step_on_device(trainers, given, REBUILT)

        averages = []
        for step in range(STEPS):
            averages.append(one_pass(step, 1.0))
            for trainer, optimizer in zip(trainers, optimizers, strict=True):
                trainer.state._use.after_step(optimizer.param_groups[0]["params"])
            for one in range(discards):
                one_pass(50 + 2 * step + one, 9.0)
        return averages, [trainer.memory() for trainer in trainers]

    averages, memories = train(0)
    for discards in (1, 2):
        found, remembered = train(discards)
        for mine, theirs in zip(found, averages, strict=True):
            for own, right in zip(mine, theirs, strict=True):
                assert all((own[name] == right[name]).all() for name in right)
        for own, right in zip(remembered, memories, strict=True):
            assert_same_memory(own, right)
