"""What a rank has not sent yet, saved on a device and loaded on the host, and the other way round."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from device_ranks import RANKS
from device_trainer import DeviceTrainer, Gradients, step_on_device, step_on_host
from handmade_buckets import LARGE, ONE, REBUILT, Trainer, gradients_of, plain_sgd
from triton_arrays import DEVICE

from telegrad.ddp import OkTopk, reshard

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),  # of numpy, in the interpreter
    pytest.mark.skipif(DEVICE != "cpu", reason="the fake device's memory is the host's: set TRITON_INTERPRET=1"),
]

OPTIONS: list[dict[str, Any]] = [
    {"select": "topk"},
    {"select": "reused", "interval": 4, "momentum": 0.9, "optimizer": plain_sgd},
    {"select": "reused", "feedback": "steps", "optimizer": plain_sgd, "nonfinite": "skip"},
    {"select": "sampled", "interval": 4, "combine": OkTopk(boundaries_every=2, threshold_every=5)},
    {"select": "random", "combine": "bounded", "density": 0.05},
    {"select": "trimmed", "same_sign": True},
]

Make = Callable[..., list[DeviceTrainer]]


WARM_UPS: list[dict[str, Any]] = [
    {"select": "topk", "warmup_steps": 4},
    {"select": "reused", "interval": 3, "warmup_steps": 9, "warmup": "falling"},
]
"""With passes that are dropped while they last."""


def as_hosts(trainers: list[DeviceTrainer]) -> list[Trainer]:
    """Their states, with gradients in host memory."""
    made = []
    for trainer in trainers:
        host = Trainer.__new__(Trainer)
        host.comm, host.state, host.parameters = trainer.comm, trainer.state, trainer.parameters  # type: ignore[assignment]
        made.append(host)
    return made


def poisoned(step: int) -> list[Gradients]:
    """As ``of_all``, with a NaN of one rank."""
    gradients = of_all(step)
    gradients[1]["hidden"][3] = np.nan
    return gradients


def of_all(step: int, ranks: int = RANKS) -> list[Gradients]:
    return [gradients_of(rank, step) for rank in range(ranks)]


def saved(trainer: DeviceTrainer) -> dict[str, Any]:
    with trainer.device.on(trainer.stream):
        return trainer.state.state_dict()


def load(trainer: DeviceTrainer, state: dict[str, Any]) -> None:
    with trainer.device.on(trainer.stream):
        trainer.state.load_state_dict(state)


def assert_alike(one: list[Gradients], other: list[Gradients]) -> None:
    for own, wanted in zip(one, other, strict=True):
        for name, average in wanted.items():
            assert own[name].tobytes() == average.tobytes(), name


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: options["select"] + str(len(options)))
def test_a_device_and_the_host_go_on_from_each_others_states(make: Make, on_host: Any, options: dict[str, Any]) -> None:
    hosts, trainers = on_host(**options), make(**options)
    for step in range(3):
        step_on_host(hosts, of_all(step), ONE)
    for trainer, host in zip(trainers, hosts, strict=True):
        load(trainer, host.state.state_dict())
        assert trainer.state.step == 3
    for step in range(3, 6):
        assert_alike(step_on_device(trainers, of_all(step), REBUILT), step_on_host(hosts, of_all(step), REBUILT))
    others = on_host(**options)
    for trainer, other in zip(trainers, others, strict=True):
        other.state.load_state_dict(saved(trainer))
        assert other.state.step == 6
    for step in range(6, 9):
        wanted = step_on_host(hosts, of_all(step), REBUILT)
        assert_alike(step_on_host(others, of_all(step), REBUILT), wanted)
        if step == 6:
            assert_alike(step_on_device(trainers, of_all(step), REBUILT), wanted)  # saving changed nothing


def test_a_state_is_taken_back_on_the_device(make: Make) -> None:
    trainers = make(select="reused", momentum=0.9, optimizer=plain_sgd)
    step_on_device(trainers, of_all(0), REBUILT)
    states = [saved(trainer) for trainer in trainers]
    wanted = [step_on_device(trainers, of_all(step), REBUILT) for step in (1, 2)]
    for trainer, state in zip(trainers, states, strict=True):
        load(trainer, state)
    for step in (1, 2):
        assert_alike(step_on_device(trainers, of_all(step), REBUILT), wanted[step - 1])


def test_a_state_that_does_not_fit_changes_nothing(make: Make) -> None:
    trainers = make(select="topk")
    step_on_device(trainers, of_all(0), REBUILT)
    before = saved(trainers[0])
    damaged = {**before, "compressor": {**before["compressor"], "parameters": {}}}
    with pytest.raises(ValueError, match="state has no residual for"):
        load(trainers[0], damaged)
    after = saved(trainers[0])
    for name in LARGE:
        one, other = (state["compressor"]["parameters"][name]["residual"] for state in (before, after))
        assert torch.equal(one, other)
        assert one.any()


def test_another_number_of_ranks_goes_on_with_what_waits(make: Make, on_host: Any) -> None:
    trainers = make(select="topk", momentum=0.9, optimizer=plain_sgd)
    for step in range(3):
        step_on_device(trainers, of_all(step), REBUILT)
    states = [saved(trainer) for trainer in trainers]
    two = on_host(2, select="topk", momentum=0.9, optimizer=plain_sgd)
    made = reshard(states, 2)
    for host, state in zip(two, made, strict=True):
        host.state.load_state_dict(state)
    for kind, group in (("residual", "parameters"), ("velocity", "velocities")):
        for name, entry in states[0]["compressor"][group].items():
            before = sum(state["compressor"][group][name][kind].double().numpy() for state in states)
            after = sum(state["compressor"][group][name][kind].double().numpy() for state in made)
            np.testing.assert_allclose(after, before, rtol=1e-6, atol=1e-6 * np.abs(before).max())
            assert entry[kind].any() or name not in LARGE
    step_on_host(two, of_all(3, 2), REBUILT)
    assert [host.state.step for host in two] == [4, 4]


def test_a_model_that_moves_to_the_host_takes_what_waits_along(make: Make, on_host: Any) -> None:
    trainers, hosts = make(select="topk"), on_host(select="topk")
    for step in range(2):
        step_on_device(trainers, of_all(step), REBUILT)
        step_on_host(hosts, of_all(step), REBUILT)
    with trainers[0].device.on(trainers[0].stream):
        assert_alike(step_on_host(as_hosts(trainers), of_all(2), REBUILT), step_on_host(hosts, of_all(2), REBUILT))


@pytest.mark.parametrize("options", WARM_UPS, ids=lambda options: options["select"])
def test_a_warm_up_with_dropped_steps_is_resumed_where_it_was(
    make: Make, on_host: Any, options: dict[str, Any]
) -> None:
    trainers, hosts = make(nonfinite="skip", **options), on_host(nonfinite="skip", **options)
    step_on_device(trainers, of_all(0), REBUILT)
    for step in (1, 2):
        step_on_device(trainers, poisoned(step), REBUILT)
    states = [saved(trainer) for trainer in trainers]
    assert [(state["step"], state["warmup_passes"]) for state in states] == [(1, 3)] * RANKS
    wanted = [step_on_device(trainers, of_all(step), REBUILT) for step in range(3, 7)]
    for trainer, host, state in zip(trainers, hosts, states, strict=True):
        load(trainer, state)
        host.state.load_state_dict(state)
    for step in range(3, 7):
        assert_alike(step_on_device(trainers, of_all(step), REBUILT), wanted[step - 3])
        assert_alike(step_on_host(hosts, of_all(step), REBUILT), wanted[step - 3])
    for trainer, host in zip(trainers, hosts, strict=True):
        assert saved(trainer)["warmup_passes"] == host.state.state_dict()["warmup_passes"] == 7


def test_a_state_that_counts_no_passes_has_warmed_up_by_its_steps(make: Make, on_host: Any) -> None:
    trainers, hosts = (made(select="topk", warmup_steps=4) for made in (make, on_host))
    for trainer, host in zip(trainers, hosts, strict=True):
        state = {**saved(trainer), "step": 3}
        del state["warmup_passes"]
        load(trainer, state)
        host.state.load_state_dict(state)
    for step, dense in ((3, True), (4, False)):
        found = step_on_device(trainers, of_all(step), REBUILT)
        assert_alike(found, step_on_host(hosts, of_all(step), REBUILT))
        assert (np.mean(found[0]["hidden"] != 0) > 0.5) == dense


def test_passes_that_are_no_count_change_nothing(make: Make) -> None:
    trainer = make(select="topk", warmup_steps=4)[0]
    state = saved(trainer)
    for passes, error in ((-1, ValueError), ("2", TypeError)):
        with pytest.raises(error, match=r"state\['warmup_passes'\]"):
            load(trainer, {**state, "step": 2, "warmup_passes": passes})
    assert trainer.state.step == 0


def test_a_model_that_moves_to_the_device_has_warmed_up_on_the_host(make: Make, on_host: Any) -> None:
    options = {"select": "topk", "warmup_steps": 3}
    trainers, hosts = make(**options), on_host(**options)
    for step in range(2):
        step_on_host(as_hosts(trainers), of_all(step), REBUILT)
        step_on_host(hosts, of_all(step), REBUILT)
    for step in range(2, 5):
        assert_alike(step_on_device(trainers, of_all(step), REBUILT), step_on_host(hosts, of_all(step), REBUILT))
