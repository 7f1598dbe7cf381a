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
DISCARDS = (2, 1, 0)
"""Passes that are thrown away after each step."""
TO_NONE = (False, True, False)
"""How ``zero_grad`` throws them away: with or without tensors of zeros."""
MOMENTUM = {"momentum": 0.5, "optimizer": sgd}


@pytest.mark.parametrize(
    "options",
    [
        {"select": "topk"},
        {"select": "reused", "interval": 2, **MOMENTUM, "nesterov": True},
        {"compress": "quantised", "formats": "int8"},
        {"select": "topk", "feedback": "steps", "optimizer": sgd},
    ],
    ids=named,
)
def test_a_synchronizer(on_devices: OnEach, options: dict[str, Any]) -> None:
    def run(discards: tuple[int, ...]) -> Callable[[DeviceRank], tuple[list[dict[str, Tensor]], Any]]:
        def train(rank: DeviceRank) -> tuple[list[dict[str, Tensor]], Any]:
            averages = []
            for step in range(STEPS):
                averages.append(rank.step(given_gradients(rank.comm.rank, step)))
                rank.model.zero_grad()
                for one in range(discards[step]):
                    other = given_gradients(rank.comm.rank, 50 + 2 * step + one)
                    rank.model({name: computed_on(rank.device, 9 * value) for name, value in other.items()}).backward()
                if discards[step]:
                    rank.model.zero_grad(set_to_none=TO_NONE[step])
            assert rank.sync.stats is not None
            state = rank.sync.state_dict()["compressor"]
            assert rank.sync.stats.discarded_passes == sum(map(bool, discards))
            return averages, state

        return train

    expected = on_devices(run((0,) * STEPS), plan="fixed", **options)
    found = on_devices(run(DISCARDS), plan="fixed", **options)
    for (averages, memory), (right, right_memory) in zip(found, expected, strict=True):
        for mine, theirs in zip(averages, right, strict=True):
            assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
        assert_same_memory(memory, right_memory)


@pytest.mark.parametrize(
    "options",
    [
        {"select": "topk"},
        {"select": "reused", "interval": 2, "momentum": 0.9, "optimizer": plain_sgd, "nonfinite": "skip"},
        {"select": "topk", "feedback": "steps", "optimizer": plain_sgd, "nonfinite": "skip"},
    ],
    ids=named,
)
def test_ddp(
    make: Callable[..., list[DeviceTrainer]], monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Passes by hand, which count as autograd's; gradients of parameters are ``None`` whenever one begins. Fused
    optimizers are told on the device whether to step."""
    tasks = itertools.count(1)
    now = [0]
    monkeypatch.setattr(torch._C, "_current_graph_task_id", lambda: now[0])

    def train(discards: tuple[int, ...]) -> tuple[list[Any], list[Any]]:
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
                with trainer.device.on(trainer.stream):
                    found_inf = computed_on(trainer.device, torch.zeros(1)) if step % 2 else None
                    trainer.state._use.after_step(optimizer.param_groups[0]["params"], found_inf)
            for one in range(discards[step]):
                one_pass(50 + 2 * step + one, 9.0)
                for trainer, optimizer in zip(trainers, optimizers, strict=True):
                    with trainer.device.on(trainer.stream):
                        skips = computed_on(trainer.device, torch.ones(1))
                        trainer.state._use.after_step(optimizer.param_groups[0]["params"], skips)
        return averages, [trainer.memory() for trainer in trainers]

    averages, memories = train((0,) * STEPS)
    found, remembered = train(DISCARDS)
    for mine, theirs in zip(found, averages, strict=True):
        for own, right in zip(mine, theirs, strict=True):
            assert all((own[name] == right[name]).all() for name in right)
    for own, right in zip(remembered, memories, strict=True):
        assert_same_memory(own, right)


def test_a_state_between_a_pass_and_its_step(
    make: Callable[..., list[DeviceTrainer]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its residuals and velocities are those before the pass, also where a warm-up changes k in each pass."""
    tasks = itertools.count(1)
    now = [0]
    monkeypatch.setattr(torch._C, "_current_graph_task_id", lambda: now[0])

    def remembered(steps: int, unused: int) -> list[dict[str, dict[str, Any]]]:
        trainers = make(select="reused", warmup_steps=5, warmup="falling", momentum=0.9, optimizer=plain_sgd)
        for step in range(steps + unused):
            now[0] = next(tasks)
            step_on_device(trainers, [gradients_of(rank, step) for rank in range(RANKS)], REBUILT)
            now[0] = -1
            for trainer in trainers:
                with trainer.device.on(trainer.stream):
                    for one in trainer.parameters.values():  # which the last step is still to use
                        one.grad = computed_on(trainer.device, torch.ones(one.shape)) if step == steps else None
                if step < steps:
                    trainer.state._use.after_step([*trainer.parameters.values()])
        states = [trainer.memory() for trainer in trainers]
        assert all(trainer.state.stats.discarded_passes == 0 for trainer in trainers)
        return [{"residual": state["parameters"], "velocity": state.get("momentum", {})} for state in states]

    expected, more = remembered(2, 0), remembered(3, 0)
    for mine, right, later in zip(remembered(2, 1), expected, more, strict=True):
        for kind, by_name in right.items():
            for name, one in by_name.items():
                assert torch.equal(mine[kind][name][kind], one[kind]), (kind, name)
                assert not torch.equal(later[kind][name][kind], one[kind]), (kind, name)
