"""Figures of compressed tensors on a device: the host's, written once they are known, and waited for by nobody."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from computing_device import ComputingRuntime, computed_on, wait_for
from device_ranks import RANKS
from device_trainer import DeviceTrainer, Gradients, step_on_device, step_on_host
from fake_device import FakeStream
from handmade_buckets import LARGE, REBUILT, Trainer, gradients_of, named, plain_sgd
from triton_arrays import DEVICE

from telegrad import Communicator
from telegrad.ddp import JsonLines, StepRecord

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),  # of numpy, in the interpreter
    pytest.mark.skipif(DEVICE != "cpu", reason="the fake device's memory is the host's: set TRITON_INTERPRET=1"),
]


class Collected:
    def __init__(self, every: int = 1) -> None:
        self.every, self.records = every, list[StepRecord]()

    def write(self, record: StepRecord) -> None:
        self.records.append(record)


class Full(Collected):
    """A disk that is."""

    def write(self, record: StepRecord) -> None:
        raise OSError("no space left")


Make = Callable[..., list[DeviceTrainer]]


@pytest.fixture
def make(device: ComputingRuntime, comms: list[Communicator], streams: list[FakeStream]) -> Make:
    """``telemetry``: of rank 0."""
    return lambda telemetry, **options: [
        DeviceTrainer(device, comm, streams[rank], telemetry=None if rank else telemetry, **options)
        for rank, comm in enumerate(comms)
    ]


@pytest.fixture
def on_host() -> Any:
    hosts = Communicator.local(RANKS, timeout_s=60.0)
    yield lambda telemetry, **options: [
        Trainer(comm, telemetry=None if rank else telemetry, **options) for rank, comm in enumerate(hosts)
    ]
    for comm in hosts:
        comm.close()


def of_all(step: int) -> list[Gradients]:
    return [gradients_of(rank, step) for rank in range(RANKS)]


@pytest.mark.parametrize(
    "options",
    [
        {"select": "topk"},
        {"select": "reused", "interval": 3},
        {"select": "trimmed", "momentum": 0.9, "nesterov": True, "optimizer": plain_sgd},
        {"select": "topk", "dtype": torch.bfloat16},
        {"select": "search", "density": 0.1},
        {"select": "gaussian"},
        {"select": "buckets"},
        {"select": "topk", "nonfinite": "skip", "every": 2},
        {"compress": None},
    ],
    ids=named,
)
def test_the_hosts_figures(make: Make, on_host: Any, options: dict[str, Any]) -> None:
    every = options.get("every", 1)
    options = {name: one for name, one in options.items() if name != "every"}
    seen, wanted = Collected(every), Collected(every)
    trainers, hosts = make(seen, **options), on_host(wanted, **options)
    for step in range(5):
        gradients = of_all(step)
        if step == 3:
            gradients[0]["hidden"][:] = 0  # it takes no part: it is not observed
        step_on_device(trainers, gradients, REBUILT)
        step_on_host(hosts, gradients, REBUILT)
    trainers[0].state.synchronize()
    hosts[0].state.state_dict()
    assert len(seen.records) == len(wanted.records) == len(range(0, 5, every))
    for record, other in zip(seen.records, wanted.records, strict=True):
        names = ("step", "rank", "world_size", "elements", "dense_elements", "element_bytes", "dropped")
        assert [getattr(record, name) for name in names] == [getattr(other, name) for name in names]
        assert [one[:4] for one in record.tensors] == [one[:4] for one in other.tensors]
        for one, expected in zip(record.tensors, other.tensors, strict=True):
            assert one[4:6] == pytest.approx(expected[4:6], rel=1e-5)
            if options.get("select") in ("search", "gaussian"):  # on the device the least that is sent
                assert one.threshold is not None
                assert expected.threshold is not None
                assert expected.threshold <= one.threshold < 1.1 * expected.threshold
            else:
                assert (one.threshold is None) == (expected.threshold is None)
                assert (one.threshold or 0.0) == pytest.approx(expected.threshold or 0.0, rel=1e-5)
    assert seen.records[-1].bytes_sent > seen.records[0].bytes_sent
    assert ("compress" in options) == (not seen.records[0].tensors)


def test_nobody_waits_for_figures(make: Make, tmp_path: Path) -> None:
    with JsonLines(tmp_path / "steps") as lines:
        trainers, held = make(lines, select="topk"), threading.Event()
        for trainer in trainers:
            trainer.stream.put(held.wait)
        started = [trainer.start(own, REBUILT) for trainer, own in zip(trainers, of_all(0), strict=True)]
        assert not (tmp_path / "steps").read_text()
        held.set()
        for trainer, passes in zip(trainers, started, strict=True):
            trainer.wait(passes)
        wait_for([trainer.stream for trainer in trainers])
        step_on_device(trainers, of_all(1), REBUILT)  # whose first bucket writes what is known
        steps = [json.loads(line) for line in (tmp_path / "steps").read_text().splitlines()]
        assert [one["kind"] for one in steps][:2] == ["run", "step"]
        assert {tensor[0] for tensor in steps[1]["tensors"]} == {*LARGE}
        trainers[0].state.synchronize()
        assert len((tmp_path / "steps").read_text().splitlines()) == 3


def test_dropped_passes_are_told_of(make: Make) -> None:
    seen = Collected()
    trainers = make(seen, select="topk", nonfinite="skip")
    for step in range(4):
        gradients = of_all(step)
        if step in (1, 2):
            gradients[2]["bias"][0] = math.nan
        step_on_device(trainers, gradients, REBUILT)
    trainers[0].state.synchronize()
    assert [(one.step, one.dropped) for one in seen.records] == [(0, False), (1, True), (2, True), (3, False)]


def test_norms_are_without_the_scale(make: Make, device: ComputingRuntime) -> None:
    seen, scaler = Collected(), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(torch.zeros(()))
    trainers = make(seen, select="topk", nonfinite="skip")
    with device.on(trainers[0].stream):
        scaler._scale = computed_on(device, scaler._scale)  # type: ignore[arg-type]
        trainers[0] = DeviceTrainer(
            device, trainers[0].comm, trainers[0].stream, telemetry=seen, scaler=scaler, nonfinite="skip"
        )
    gradients = of_all(0)
    norms = {name: np.linalg.norm(gradients[0][name]) for name in LARGE}
    gradients[0] = {name: one * np.float32(2.0**10) for name, one in gradients[0].items()}
    step_on_device(trainers, gradients, REBUILT)
    trainers[0].state.synchronize()
    assert {one.name: one.gradient_norm for one in seen.records[0].tensors} == pytest.approx(norms)


def test_a_full_disk_does_not_end_the_training(make: Make) -> None:
    trainers = make(Full(), select="topk")
    step_on_device(trainers, of_all(0), REBUILT)
    with pytest.warns(RuntimeWarning, match="telemetry ends at step 0: no space left"):
        trainers[0].state.synchronize()
    step_on_device(trainers, of_all(1), REBUILT)
    trainers[0].state.synchronize()
