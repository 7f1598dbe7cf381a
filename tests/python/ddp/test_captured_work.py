"""What each pass repeats on a device is captured in the second pass and replayed from there on: with the results of
launching it anew, and only as long as nothing has changed."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from computing_device import ComputingRuntime, computed_on, wait_for
from device_trainer import DeviceTrainer, step_on_device
from handmade_buckets import REBUILT, gradients_of
from triton_arrays import DEVICE

from telegrad import Communicator
from telegrad.ddp import JsonLines
from telegrad.ddp.cuda.captured_work import SWITCH, CapturedWork

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),  # of numpy, in the interpreter
    pytest.mark.skipif(DEVICE != "cpu", reason="the fake device's memory is the host's: set TRITON_INTERPRET=1"),
]

Make = Callable[..., DeviceTrainer]


@pytest.fixture
def make(device: ComputingRuntime) -> Iterator[Make]:
    """One rank."""
    with Communicator.local(1)[0] as comm:
        yield lambda **options: DeviceTrainer(device, comm, device.new_stream(), **options)


def steps(trainer: DeviceTrainer, count: int, first: int = 0) -> list[dict[str, np.ndarray]]:
    """Averages of each."""
    return [step_on_device([trainer], [gradients_of(0, step)], REBUILT)[0] for step in range(first, first + count)]


def assert_same(found: list[dict[str, np.ndarray]], wanted: list[dict[str, np.ndarray]]) -> None:
    for one, other in zip(found, wanted, strict=True):
        for name, values in other.items():
            np.testing.assert_array_equal(one[name].view(np.uint32), values.view(np.uint32), name)


def launched_anew(make: Make, monkeypatch: pytest.MonkeyPatch, count: int, **options: Any) -> Any:
    """Averages, and what waits in the end, of a rank that captures nothing."""
    with monkeypatch.context() as patch:
        patch.setenv(SWITCH, "0")
        trainer = make(**options)
        found = steps(trainer, count)
        assert trainer.device.captures == []
        return found, trainer.memory()


def test_replays_do_what_launches_do(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, waits = launched_anew(make, monkeypatch, 5, select="reused")
    trainer = make(select="reused")
    assert_same(steps(trainer, 5), wanted)
    assert [one.replays for one in trainer.device.captures] == [4] * len(REBUILT)
    for name, entry in trainer.memory()["parameters"].items():
        assert torch.equal(entry["residual"], waits["parameters"][name]["residual"])


def test_while_numbers_of_entries_change_nothing_is_captured(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"warmup_steps": 4, "warmup": "falling", "density": 0.001}
    wanted, _ = launched_anew(make, monkeypatch, 7, **options)
    trainer = make(**options)
    found = steps(trainer, 4)
    before = len(trainer.device.captures)
    found += steps(trainer, 3, first=4)
    assert_same(found, wanted)
    compressed = [one for one in trainer.device.captures[before:] if one.replays]
    assert before == 1  # of the bucket that has no compressed parameter
    assert [one.replays for one in compressed] == [2] * (len(REBUILT) - 1)


def test_what_is_loaded_lies_elsewhere(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, _ = launched_anew(make, monkeypatch, 6)
    trainer = make()
    found = steps(trainer, 3)
    with trainer.device.on(trainer.stream):
        trainer.state.load_state_dict(trainer.state.state_dict())
    assert_same(found + steps(trainer, 3, first=3), wanted)


def test_passes_that_are_observed_are_launched(make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wanted, _ = launched_anew(make, monkeypatch, 6)
    trainer = make(telemetry=JsonLines(tmp_path / "steps.jsonl", every=2))
    assert_same(steps(trainer, 6), wanted)
    trainer.state.synchronize()
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    observed = [line for line in lines if line["kind"] == "step"]
    assert [line["step"] for line in observed] == [0, 2, 4]
    selected = lines[0]["columns"].index("selected")
    assert all(one[selected] > 0 for line in observed for one in line["tensors"])
    assert [one.replays for one in trainer.device.captures] == [3] * len(REBUILT)  # passes 1, 3 and 5


def test_what_cannot_be_captured_is_launched(
    make: Make, device: ComputingRuntime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> Any:
        raise RuntimeError("CUDA error: operation not permitted\nwith more lines")

    wanted, _ = launched_anew(make, monkeypatch, 4)
    monkeypatch.setattr(device, "capture", refuse)
    with caplog.at_level(logging.WARNING, "telegrad"):
        trainer = make()
        assert_same(steps(trainer, 4), wanted)
    (said,) = [record.getMessage() for record in caplog.records if record.name == "telegrad"]
    assert "(CUDA error: operation not permitted): kernels are launched one by one" in said
    assert f"{SWITCH}=0" in said


def test_what_broke_off_the_first_time_is_not_captured_the_second(device: ComputingRuntime) -> None:
    """It has not been done yet: kernels are not compiled."""
    stream, captured = device.new_stream(), CapturedWork[torch.Tensor]()
    total = computed_on(device, torch.zeros(1))
    breaks = [True, False, False]

    def work(made: torch.Tensor) -> None:
        if breaks.pop(0):
            raise KeyboardInterrupt
        made.copy_(total.add_(1))

    def do() -> Any:
        with device.on(stream):
            return captured.run("x", captured, 0, total, lambda: total.new_empty(1), work)

    with pytest.raises(KeyboardInterrupt):
        do()
    for wanted, captures in ((1, 0), (2, 1), (3, 1)):
        made = do()
        wait_for([stream])
        assert (made.memory.item(), len(device.captures)) == (wanted, captures)


def test_what_is_done_as_it_comes_and_is_another_is_forgotten(device: ComputingRuntime) -> None:
    """A graph may have the addresses of what the other one has replaced."""
    stream, captured = device.new_stream(), CapturedWork[torch.Tensor]()
    total = computed_on(device, torch.zeros(1))
    runs: list[int] = []

    def work(made: torch.Tensor) -> None:
        runs.append(1)
        made.copy_(total.add_(1))

    with device.on(stream):
        for about, replays, launches in (
            *((0, True, 1), (0, True, 1), (0, False, 1), (0, True, 0)),
            *((1, False, 1), (0, True, 1), (0, True, 1), (0, True, 0)),
        ):
            runs.clear()
            captured.run("x", captured, about, total, lambda: total.new_empty(1), work, replays=replays)
            assert len(runs) == launches
        captured.forget()
        captured.run("x", captured, 0, total, lambda: total.new_empty(1), work)
    wait_for([stream])
    assert len(runs) == 1
    assert total.memory.item() == 9


def test_another_owner_stream_or_place_is_done_as_it_comes(device: ComputingRuntime) -> None:
    one, other = device.new_stream(), device.new_stream()
    captured: CapturedWork[torch.Tensor] = CapturedWork()
    total = computed_on(device, torch.zeros(1))
    owners = [object(), object()]
    runs: list[int] = []

    def do(stream: Any, owner: object, about: int) -> None:
        def work(made: torch.Tensor) -> None:
            runs.append(1)
            total.add_(1)
            made.copy_(total)

        with device.on(stream):
            captured.run("x", owner, about, total, lambda: total.new_empty(1), work)
            wait_for([stream])

    for stream, owner, about, launches in (
        *((one, 0, 7, 1), (one, 0, 7, 1), (one, 0, 7, 0), (one, 0, 7, 0)),
        *((one, 1, 7, 1), (one, 0, 7, 1), (other, 0, 7, 1), (other, 0, 8, 1), (other, 0, 8, 1), (other, 0, 8, 0)),
    ):
        runs.clear()
        do(stream, owners[owner], about)
        assert len(runs) == launches
    assert total.memory.item() == 10
    assert len(device.captures) == 2


def test_what_was_made_is_kept_until_it_has_been_read(device: ComputingRuntime) -> None:
    """Though nobody has waited for what reads it: a pass was broken off."""
    stream, reading, gate = device.new_stream(), device.new_stream(), threading.Event()
    captured: CapturedWork[torch.Tensor] = CapturedWork()
    total, seen = computed_on(device, torch.zeros(1)), computed_on(device, torch.zeros(4))

    class Reader:
        def __init__(self, made: torch.Tensor, place: int) -> None:
            device.wait_event(reading, device.record(stream))
            with device.on(reading):
                seen[place].copy_(made[0])
            self._event = device.record(reading)

        def wait(self) -> bool:
            device.wait_event(device.current_stream(total.device), self._event)
            return True

    def work(made: torch.Tensor) -> None:
        total.add_(1)
        made.copy_(total)

    reading.put(gate.wait)
    for place in range(4):
        with device.on(stream):
            made = captured.run("x", captured, 0, total, lambda: total.new_empty(1), work)
        captured.read_by("x", Reader(made, place))  # type: ignore[arg-type]
    captured.read_by("y", Reader(made, 3))  # type: ignore[arg-type]  # which was not run: nothing to wait for
    time.sleep(0.1)  # the stream goes as far as it may
    gate.set()
    wait_for([stream, reading])
    assert seen.memory.tolist() == [1, 2, 3, 4]
