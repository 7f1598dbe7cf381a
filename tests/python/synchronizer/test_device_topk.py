"""A Synchronizer that compresses on a device whose streams compute: the host's bits, and nothing lost."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from device_and_host import RANKS, DeviceRank, OnEach, assert_alike, train
from given_gradients import NAMED, gradients_of, sgd
from handmade_buckets import named
from torch import Tensor
from triton_arrays import DEVICE

from telegrad.ddp import reshard
from telegrad.errors import NonFiniteGradient, TransportError

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),  # of numpy, in the interpreter
    pytest.mark.skipif(DEVICE != "cpu", reason="the fake device's memory is the host's: set TRITON_INTERPRET=1"),
]


@pytest.mark.parametrize(
    "options",
    [
        {"plan": NAMED, "select": "reused", "interval": 3},
        {"plan": "wfbp", "select": "topk", "momentum": 0.9, "nesterov": True, "optimizer": sgd},
        {"plan": NAMED, "select": "topk", "dtype": torch.bfloat16, "nonfinite": "send"},
        {"plan": "single", "select": "topk", "warmup_steps": 4, "warmup": "falling"},
        {"plan": "single", "select": "reused", "feedback": "steps", "optimizer": sgd},
        {"plan": NAMED, "select": "topk", "values": "packed-int8", "same_sign": True, "warmup_steps": 2},
        {"plan": NAMED, "select": "search", "combine": "oktopk"},
        {"plan": NAMED, "select": "sampled", "interval": 3, "combine": "allgather"},
        {"plan": "single", "select": "topk", "combine": "gtopk", "momentum": 0.9, "optimizer": sgd},
    ],
    ids=named,
)
def test_the_hosts_bits(on_devices: OnEach, on_hosts: OnEach, options: dict[str, Any]) -> None:
    # What comes later than the third step: the end of a warm-up, and a threshold that is found anew.
    steps = range(5 if {"interval", "warmup_steps", "combine"} & {*options} else 3)
    found, expected = on_devices(train(steps), **options), on_hosts(train(steps), **options)
    for (averages, kept, _), (wanted, waits, _) in zip(found, expected, strict=True):
        for one, other in zip(averages, wanted, strict=True):
            assert_alike(one, other)
        assert_alike(kept, waits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_waits_leaves_with_a_dense_step(on_devices: OnEach, on_hosts: OnEach, dtype: torch.dtype) -> None:
    """A state of step 0 with something in it, and a warm-up in which one rank's parameter takes no part at first."""

    def idle(rank: Any) -> tuple[list[dict[str, Tensor]], dict[str, Tensor], Any]:
        rank.sync.load_state_dict(states[rank.comm.rank])
        gradients = gradients_of(rank.comm.rank, 3)
        if rank.comm.rank == 1:
            gradients["hidden"].zero_()
        first = rank.step(gradients)
        averages, kept, saved = train(range(4, 7))(rank)
        return [first, *averages], kept, saved

    options = {"plan": "single", "select": "topk", "dtype": dtype}
    states = [state | {"step": 0} for _, _, state in on_hosts(train(range(3)), **options)]
    options["warmup_steps"] = 2
    found, expected = on_devices(idle, **options), on_hosts(idle, **options)
    for (averages, kept, _), (wanted, waits, _) in zip(found, expected, strict=True):
        for one, other in zip(averages, wanted, strict=True):
            assert_alike(one, other)
        assert_alike(kept, waits)


def test_a_state_of_the_device_for_fewer_ranks_on_the_host(on_devices: OnEach, on_hosts: OnEach) -> None:
    found = on_devices(train(range(3)), plan="single", select="topk")
    states = reshard([state for _, _, state in found], 2)
    expected = sum(kept["residual hidden"].double() for _, kept, _ in found)
    resharded = sum(state["compressor"]["parameters"]["hidden"]["residual"].double() for state in states)
    torch.testing.assert_close(resharded, expected, rtol=0, atol=1e-3)
    on_hosts(train(range(3, 5), states), ranks=2, plan="single", select="topk")


def test_a_parameter_that_only_some_ranks_use(on_devices: OnEach, on_hosts: OnEach) -> None:
    """Its gradient stays where no rank has one, and where others have, what this rank still had is its share."""

    def run(rank: Any) -> tuple[list[dict[str, Tensor]], Any]:
        averages = [rank.step(gradients_of(rank.comm.rank, 0))]
        names = ("hidden", "norm", "bias")
        keeping = rank.step if isinstance(rank, DeviceRank) else _keeping(rank)
        averages.append(keeping(gradients_of(rank.comm.rank, 1, names), keeps=True))
        own = (*names, "embedding") if rank.comm.rank == 1 else names
        averages.append(keeping(gradients_of(rank.comm.rank, 2, own), keeps=True))
        return averages, rank.sync.state_dict()["compressor"]["parameters"]["embedding"]["residual"]

    found = on_devices(run, plan=NAMED, select="topk")
    expected = on_hosts(run, plan=NAMED, select="topk")
    for (averages, waits), (wanted, residual) in zip(found, expected, strict=True):
        for one, other in zip(averages, wanted, strict=True):
            assert_alike(one, other)
        assert torch.equal(waits, residual)
    assert torch.equal(found[0][0][0]["embedding"], found[0][0][1]["embedding"])


def _keeping(rank: Any) -> Callable[..., dict[str, Tensor]]:
    def step(gradients: dict[str, Tensor], *, keeps: bool) -> dict[str, Tensor]:
        assert keeps
        rank.model(gradients).backward()
        rank.trains.step()
        return rank.averages()  # type: ignore[no-any-return]

    return step


def test_a_ranks_own_gradient_is_clipped(on_devices: OnEach, on_hosts: OnEach) -> None:
    options = {"plan": NAMED, "select": "topk", "clip_norm": 5000.0}
    found, expected = on_devices(train(range(3)), **options), on_hosts(train(range(3)), **options)
    for (averages, _, _), (wanted, _, _) in zip(found, expected, strict=True):
        for one, other in zip(averages, wanted, strict=True):
            for name, x in other.items():
                torch.testing.assert_close(one[name], x, rtol=1e-5, atol=1e-3)


def test_nan_is_raised_late_and_is_in_no_residual(on_devices: OnEach) -> None:
    all_trained = threading.Barrier(RANKS)

    def run(rank: DeviceRank) -> str:
        rank.step(gradients_of(rank.comm.rank, 0))
        gradients = gradients_of(rank.comm.rank, 1)
        if rank.comm.rank == 1:
            gradients["hidden"][3, 5] = math.nan
        assert rank.step(gradients)["hidden"].isnan().sum() == 1
        all_trained.wait(60)  # an abort ends also what another rank has not finished
        wanted = NonFiniteGradient if rank.comm.rank == 1 else TransportError

        def go_on() -> None:
            for step in range(2, 4):
                rank.step(gradients_of(rank.comm.rank, step))
                rank.sync.comm.synchronize()

        with pytest.raises(wanted, match="rank 1, step 1: the gradient of 'hidden' has entries") as caught:
            go_on()
        compression = rank.sync._compression
        assert compression is not None
        compression.device.feedback.save()  # type: ignore[attr-defined]
        assert all(torch.from_numpy(entry.values).isfinite().all() for entry in compression.compressor.residuals)
        return type(caught.value).__name__

    assert on_devices(run)[1] == "NonFiniteGradient"


def test_the_counters_are_known_after_a_state(on_devices: OnEach, on_hosts: OnEach) -> None:
    def run(rank: Any) -> tuple[int, ...]:
        train(range(3))(rank)
        stats = rank.sync.stats
        return (stats.buckets, stats.elements, stats.dense_elements, stats.wanted, stats.selected)

    assert on_devices(run, plan=NAMED, select="reused") == on_hosts(run, plan=NAMED, select="reused")
