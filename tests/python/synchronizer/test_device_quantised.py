"""A Synchronizer that sends all values in fewer bits, on a device whose streams compute: the host's bits."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import pytest
import torch
from device_and_host import RANKS, DeviceRank, OnEach, assert_alike, train
from given_gradients import NAMED, gradients_of, sgd
from handmade_buckets import named
from triton_arrays import DEVICE

from telegrad.errors import NonFiniteGradient, TransportError

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),  # of numpy, in the interpreter
    pytest.mark.skipif(DEVICE != "cpu", reason="the fake device's memory is the host's: set TRITON_INTERPRET=1"),
]

QUANTISED = {"compress": "quantised", "small_elements": 16}


def sevenths(rank: int, step: int) -> dict[str, torch.Tensor]:
    """Gradients of which every wire loses something."""
    return {name: one / 7 for name, one in gradients_of(rank, step).items()}


@pytest.mark.parametrize(
    "options",
    [
        {"plan": "single", "formats": "bf16"},
        {"plan": NAMED, "formats": "int8"},
        {"plan": "single", "formats": "qsgd8"},
        {"plan": NAMED, "formats": "qsgd4", "nonfinite": "send"},
        {"plan": "wfbp", "formats": "qsgd4", "momentum": 0.9, "nesterov": True, "optimizer": sgd},
        {"plan": "single", "formats": "int8", "warmup_steps": 2},
        {"plan": "single", "formats": "int8", "feedback": "steps", "optimizer": sgd},
        {"plan": "auto", "formats": ["int8", "bf16"]},
    ],
    ids=named,
)
def test_the_hosts_bits(on_devices: OnEach, on_hosts: OnEach, options: dict[str, Any]) -> None:
    options = {**QUANTISED, **options, "plan_after": 100}
    of_device = on_devices(train(range(5), gradients=sevenths), **options)
    of_host = on_hosts(train(range(5), gradients=sevenths), **options)
    for (averages, kept, _), (wanted, waits, _) in zip(of_device, of_host, strict=True):
        for one, other in zip(averages, wanted, strict=True):
            assert_alike(one, other)
        assert_alike(kept, waits)
        assert any(one.any() for one in kept.values())


def test_a_parameter_of_zeros_takes_no_part(on_devices: OnEach, on_hosts: OnEach) -> None:
    """What waits of it stays; and a state of the host goes on here."""

    def run(rank: Any) -> Any:
        rank.sync.load_state_dict(states[rank.comm.rank])
        gradients = sevenths(rank.comm.rank, 3)
        gradients["hidden"].zero_()
        return [rank.step(gradients), rank.sync.state_dict()["compressor"]["parameters"]["hidden"]["residual"]]

    options = {**QUANTISED, "plan": "single", "formats": "int8"}
    states = [state for _, _, state in on_hosts(train(range(3), gradients=sevenths), **options)]
    for (averages, waits), (wanted, expected) in zip(on_devices(run, **options), on_hosts(run, **options), strict=True):
        assert_alike(averages, wanted)
        assert torch.equal(waits, expected)
        assert waits.any()


def test_what_is_not_finite_goes_and_its_residual_stays(on_devices: OnEach, on_hosts: OnEach) -> None:
    def run(rank: Any) -> Any:
        rank.step(sevenths(rank.comm.rank, 0))
        gradients = sevenths(rank.comm.rank, 1)
        if rank.comm.rank == 1:
            gradients["hidden"][3, 5], gradients["hidden"][4, 6] = math.nan, math.inf
        return [rank.step(gradients), rank.sync.state_dict()["compressor"]["parameters"]["hidden"]["residual"]]

    options = {**QUANTISED, "plan": "single", "formats": "bf16", "nonfinite": "send"}
    for (averages, waits), (wanted, expected) in zip(on_devices(run, **options), on_hosts(run, **options), strict=True):
        for name, one in wanted.items():
            assert np.array_equal(averages[name].numpy(), one.numpy(), equal_nan=True)
        assert torch.equal(waits, expected)
        assert waits.isfinite().all()


def test_what_bfloat16_does_not_hold_waits(on_devices: OnEach, on_hosts: OnEach) -> None:
    """The largest float32 would be rounded to infinity."""

    def run(rank: Any) -> Any:
        gradients = gradients_of(rank.comm.rank, 0)
        gradients["hidden"][2, 2] = torch.finfo(torch.float32).max if rank.comm.rank == 0 else 0.0
        return [rank.step(gradients), rank.sync.state_dict()["compressor"]["parameters"]["hidden"]["residual"]]

    options = {**QUANTISED, "plan": "single", "formats": "bf16"}
    for (averages, waits), (wanted, expected) in zip(on_devices(run, **options), on_hosts(run, **options), strict=True):
        assert_alike(averages, wanted)
        assert averages["hidden"].isfinite().all()
        assert torch.equal(waits, expected)


@pytest.mark.parametrize("born", ["in the gradient", "with what waits"])
def test_it_is_raised_late(on_devices: OnEach, born: str) -> None:
    large = float(torch.finfo(torch.float32).max)
    all_trained = threading.Barrier(RANKS)

    def run(rank: DeviceRank) -> str:
        first = gradients_of(rank.comm.rank, 0)
        second = gradients_of(rank.comm.rank, 1)
        if rank.comm.rank == 1:
            first["hidden"][0, 0] = large  # of which half a step of bfloat16 waits
            second["hidden"][0, 0] = large if born == "with what waits" else math.nan
        rank.step(first)
        rank.step(second)
        all_trained.wait(60)  # an abort ends also what another rank has not finished
        wanted = NonFiniteGradient if rank.comm.rank == 1 else TransportError

        def go_on() -> None:
            for step in range(2, 4):
                rank.step(gradients_of(rank.comm.rank, step))
                rank.sync.comm.synchronize()

        with pytest.raises(wanted, match="rank 1, step 1: the gradient of 'hidden' has entries") as caught:
            go_on()
        return type(caught.value).__name__

    assert on_devices(run, **QUANTISED, plan="single", formats="bf16")[1] == "NonFiniteGradient"


def test_the_counters(on_devices: OnEach, on_hosts: OnEach) -> None:
    def run(rank: Any) -> tuple[int, ...]:
        train(range(3))(rank)
        stats = rank.sync.stats
        return (stats.buckets, stats.elements, stats.dense_elements, stats.wanted, stats.selected)

    options = {**QUANTISED, "plan": NAMED, "formats": "int8"}
    assert on_devices(run, **options) == on_hosts(run, **options)
