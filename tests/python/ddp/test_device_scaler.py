"""Compression on a device under a GradScaler, whose scale the host does not wait for: the host's bits all the same."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from computing_device import ComputingRuntime, computed_on, wait_for
from device_ranks import RANKS
from device_trainer import DeviceTrainer, Gradients, step_on_device, step_on_host
from fake_device import FakeStream
from handmade_buckets import LARGE, ONE, REBUILT, SHAPES, Trainer, named, plain_sgd
from triton_arrays import DEVICE

from telegrad import Communicator
from telegrad.errors import TransportError

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),  # of numpy, in the interpreter
    pytest.mark.skipif(DEVICE != "cpu", reason="the fake device's memory is the host's: set TRITON_INTERPRET=1"),
]

INTERVAL = 2  # passes without an infinity between one scale and a larger one


class Scaled:
    """All ranks on the device and all on the host, each with a GradScaler of its own."""

    def __init__(
        self,
        device: ComputingRuntime,
        comms: list[Communicator],
        hosts: list[Communicator],
        streams: list[FakeStream],
        growth: float = 2.0,
        **options: Any,
    ) -> None:
        given: dict[str, Any] = {"nonfinite": "skip", **options}
        self.factors = growth, 1 / growth
        self.scales = {rank: self._on_host() for rank in range(RANKS)}
        self.on_device = {rank: self._on_device(device, stream) for rank, stream in enumerate(streams)}
        self.trainers = [
            DeviceTrainer(device, comm, stream, scaler=self.on_device[rank], **given)
            for rank, (comm, stream) in enumerate(zip(comms, streams, strict=True))
        ]
        self.hosts = [Trainer(comm, scaler=self.scales[rank], **given) for rank, comm in enumerate(hosts)]

    def _on_host(self) -> torch.amp.GradScaler:
        growth, backoff = self.factors
        scaler = torch.amp.GradScaler(
            "cpu", init_scale=2.0**6, growth_factor=growth, backoff_factor=backoff, growth_interval=INTERVAL
        )
        scaler.scale(torch.zeros(()))  # what a training does with its loss: now there is a scale
        return scaler

    def _on_device(self, device: ComputingRuntime, stream: FakeStream) -> torch.amp.GradScaler:
        scaler = self._on_host()
        with device.on(stream):
            for name in ("_scale", "_growth_tracker"):
                setattr(scaler, name, computed_on(device, getattr(scaler, name)))
        return scaler

    @property
    def scale(self) -> float:
        return self.scales[0].get_scale()

    def scaled(self, step: int, infinite: bool = False) -> list[Gradients]:
        """What the backward pass gives."""
        gradients = []
        for rank in range(RANKS):
            rng = np.random.default_rng([rank, step])
            own = {name: rng.standard_normal(int(np.prod(shape))) ** 3 * self.scale for name, shape in SHAPES.items()}
            gradients.append({name: values.astype(np.float32) for name, values in own.items()})
        if infinite:
            gradients[step % RANKS]["hidden"][17] = -np.inf
        return gradients

    def update(self, infinite: bool) -> None:
        """As ``GradScaler.update`` after a step that has met an infinity, or none."""
        for rank in range(RANKS):
            with self.trainers[rank].device.on(self.trainers[rank].stream):
                for scaler in (self.scales[rank], self.on_device[rank]):
                    scale, tracker = scaler._scale, scaler._growth_tracker
                    assert scale is not None
                    found = scale.new_full((), float(infinite))
                    torch._amp_update_scale_(scale, tracker, found, *self.factors, INTERVAL)  # type: ignore[attr-defined]


Make = Callable[..., Scaled]


@pytest.fixture
def make(device: ComputingRuntime, comms: list[Communicator], streams: list[FakeStream]) -> Any:
    hosts = Communicator.local(RANKS, timeout_s=60.0)
    yield lambda **options: Scaled(device, comms, hosts, streams, **options)
    for comm in hosts:
        comm.close()


WAYS: list[dict[str, Any]] = [
    {"select": "reused", "interval": 3, "growth": 1.7},
    {"select": "topk", "dtype": torch.bfloat16},
    {"select": "topk", "momentum": 0.9, "nesterov": True, "optimizer": plain_sgd, "growth": 1.7},
    {"select": "topk", "feedback": "steps", "optimizer": plain_sgd, "growth": 1.7},
    {"select": "topk", "warmup_steps": 3, "warmup": "falling"},
    {"select": "topk", "values": "int8", "growth": 1.7},
    {"compress": None, "momentum": 0.9, "optimizer": plain_sgd},
]
SLOW_WAYS: list[dict[str, Any]] = [
    {"select": "reused", "interval": 3},
    {"select": "topk", "momentum": 0.9, "optimizer": plain_sgd, "dtype": torch.bfloat16},
]


@pytest.mark.parametrize(
    "options", [*WAYS, *(pytest.param(way, marks=pytest.mark.slow) for way in SLOW_WAYS)], ids=named
)
def test_the_hosts_bits(make: Make, options: dict[str, Any]) -> None:
    """While the scale grows and falls; a step with an infinity on one rank has never been, on any."""
    ranks, scales = make(**options), set()
    for step in range(9):
        if "feedback" in options:
            for one in (*ranks.trainers, *ranks.hosts):
                one.state._scales._optimizer.param_groups[0]["lr"] = 0.5 / (1 + step % 3)
        infinite = step in (4, 6)
        scaled = ranks.scaled(step, infinite)
        scales.add(ranks.scale)
        before = [trainer.memory() for trainer in ranks.trainers] if infinite else None
        buckets = ONE if step == 0 else REBUILT
        found, expected = step_on_device(ranks.trainers, scaled, buckets), step_on_host(ranks.hosts, scaled, buckets)
        for own, other in zip(found, expected, strict=True):
            for name, average in other.items():
                assert own[name].tobytes() == average.tobytes(), (step, name)
                assert np.isposinf(average).all() == infinite
        if before is not None:
            for trainer, state in zip(ranks.trainers, before, strict=True):
                _assert_same(trainer.memory(), state)
        ranks.update(infinite)
    assert len(scales) > 2
    for trainer, host in zip(ranks.trainers, ranks.hosts, strict=True):
        assert trainer.state.step == host.state.step == 7
        _assert_same(trainer.memory(), host.state.state_dict()["compressor"], thresholds=False)


def _assert_same(state: dict[str, Any], wanted: dict[str, Any], *, thresholds: bool = True) -> None:
    for group, kind in (("parameters", "residual"), ("velocities", "velocity")):
        assert state.get(group, {}).keys() == wanted.get(group, {}).keys()
        for name, entry in wanted.get(group, {}).items():
            own = state[group][name]
            assert own[kind].numpy().tobytes() == entry[kind].numpy().tobytes(), name
            assert own["unit"] == entry["unit"], name
            if thresholds and "threshold" in entry:
                assert (own["threshold"], own["calls"]) == (entry["threshold"], entry["calls"])


def test_a_state_goes_on_under_another_scale(make: Make) -> None:
    """Saved on the device, loaded by the host, and the other way round."""
    ranks = make(select="topk", momentum=0.5, optimizer=plain_sgd)
    for step in range(2):
        scaled = ranks.scaled(step)
        step_on_device(ranks.trainers, scaled, REBUILT)
        step_on_host(ranks.hosts, scaled, REBUILT)
        ranks.update(False)
    for trainer, host in zip(ranks.trainers, ranks.hosts, strict=True):
        with trainer.device.on(trainer.stream):
            own, other = trainer.state.state_dict(), host.state.state_dict()
            trainer.state.load_state_dict(other)
            host.state.load_state_dict(own)
    ranks.update(True)
    for step in range(2, 4):
        scaled = ranks.scaled(step)
        found, expected = step_on_device(ranks.trainers, scaled, REBUILT), step_on_host(ranks.hosts, scaled, REBUILT)
        for name, average in expected[0].items():
            assert found[0][name].tobytes() == average.tobytes(), name
        ranks.update(False)


def test_own_gradients_are_clipped_without_the_scale(make: Make) -> None:
    ranks = make(select="topk", clip_norm=20.0)
    for step in range(3):
        scaled = ranks.scaled(step)
        found, expected = step_on_device(ranks.trainers, scaled, REBUILT), step_on_host(ranks.hosts, scaled, REBUILT)
        for name, average in expected[0].items():
            np.testing.assert_allclose(found[0][name], average, rtol=1e-5, atol=1e-5 * ranks.scale)
        ranks.update(step == 1)
    assert ranks.hosts[0].state.stats.clipped_steps == 3


def test_a_residual_that_overflows_is_a_step_for_the_scaler(make: Make) -> None:
    """Gradients that are finite, and their sum with what waits is not: averages are infinite, so the scale falls."""
    ranks = make(select="topk")
    gradients = [{name: np.full(int(np.prod(shape)), 3e38, np.float32) for name, shape in SHAPES.items()}] * RANKS
    small = [{name: one * np.float32(1e-3) for name, one in own.items()} for own in gradients]
    assert np.isfinite(step_on_device(ranks.trainers, small, REBUILT)[0]["norm"]).all()
    for own in gradients:
        for name in SHAPES:
            own[name] = own[name] if name in LARGE else own[name] * np.float32(1e-3)
    before = ranks.trainers[1].memory()
    for _ in range(200):
        found = step_on_device(ranks.trainers, gradients, REBUILT)
        if np.isposinf(found[0]["hidden"]).all():
            break
        before = ranks.trainers[1].memory()
    assert all(np.isposinf(one).all() for own in found for one in own.values())
    _assert_same(ranks.trainers[1].memory(), before)


@pytest.mark.filterwarnings("ignore:an operation on device tensors has failed")  # it has, on each rank
@pytest.mark.parametrize("scale", [math.inf, math.nan, 0.0, -2.0])
def test_a_scale_that_is_none(make: Make, scale: float) -> None:
    """It is told as soon as the host knows; what waits is what it was."""
    ranks = make(select="topk")
    step_on_device(ranks.trainers, ranks.scaled(0), REBUILT)
    trainer = ranks.trainers[0]
    wanted = trainer.memory()["parameters"]["hidden"]
    held_back = threading.Event()
    trainer.stream.put(held_back.wait)
    with trainer.device.on(trainer.stream):
        ranks.on_device[0]._scale.fill_(scale)  # type: ignore[union-attr]
    empty = [{name: np.zeros(int(np.prod(shape)), np.float32) for name, shape in SHAPES.items()}] * RANKS
    for rank, one in enumerate(ranks.trainers):
        one.start(empty[rank], REBUILT)
    held_back.set()
    wait_for([one.stream for one in ranks.trainers])
    held = trainer.state._device._compression.feedback._residuals["hidden"]
    assert held.values.memory.numpy().tobytes() == wanted["residual"].numpy().tobytes()  # type: ignore[attr-defined]
    assert held.unit.memory.tolist() == [wanted["unit"]]  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"scaler has the scale .*: it must be above 0"):
        trainer.start(empty[0], REBUILT)

    def go_on() -> None:
        ranks.trainers[1].start(empty[1], REBUILT)
        ranks.trainers[1].state.synchronize()

    with pytest.raises(TransportError, match="scaler has the scale"):
        go_on()
