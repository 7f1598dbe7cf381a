"""Figures of each tensor and step: what is observed, and what JsonLines and TensorBoard make of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from handmade_buckets import LARGE, REBUILT, SHAPES, Trainer, gradients_of

from telegrad import Communicator
from telegrad.ddp import JsonLines, StepRecord, TensorBoard

OnRanks = Callable[..., list[Any]]


class Collected:
    """Keeps the records."""

    def __init__(self, every: int = 1) -> None:
        self.every, self.records = every, list[StepRecord]()

    def write(self, record: StepRecord) -> None:
        self.records.append(record)


def test_words_of_ok_topk_are_those_of_the_steps_that_are_over(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> None:
        collected = Collected()
        trainer = Trainer(comm, combine="oktopk", telemetry=collected)
        before = [(0, 0, 0)]
        for step in range(3):
            trainer.step(gradients_of(comm.rank, step), REBUILT)
            stats = trainer.state.stats
            before.append((stats.words_sent, stats.words_received, stats.kept))
            assert all(low < high for low, high in zip(*before[-2:], strict=True))
        said = [(one.words_sent, one.words_received, one.kept) for one in collected.records]
        assert said == before[:-1]

    on_ranks(2, run)


@pytest.mark.parametrize("selection", ["topk", "reused"])
def test_figures_are_those_of_the_step(on_ranks: OnRanks, selection: str) -> None:
    def run(comm: Communicator) -> None:
        collected = Collected()
        trainer = Trainer(comm, select=selection, telemetry=collected)
        sent = 0
        for step in range(5):
            gradients = gradients_of(comm.rank, step)
            before = trainer.state.stats.selected
            trainer.step(gradients, REBUILT)
            record = collected.records[step]
            assert (record.step, record.rank, record.world_size) == (step, comm.rank, 2)
            assert (record.elements, record.dense_elements, record.element_bytes) == (2226, 26, 4)
            assert not record.dropped
            assert record.bytes_sent == sent  # before this pass
            sent = comm.stats()["bytes_sent"]
            assert {one.name for one in record.tensors} == set(LARGE)
            assert sum(one.selected for one in record.tensors) == trainer.state.stats.selected - before
            for one in record.tensors:
                size = int(np.prod(SHAPES[one.name]))
                assert (one.elements, one.k) == (size, round(0.05 * size))
                assert one.gradient_norm == pytest.approx(np.linalg.norm(gradients[one.name]), rel=1e-5)
                assert one.residual_norm == pytest.approx(np.linalg.norm(trainer.residual(one.name)), rel=1e-5)
                entry = trainer.memory()["parameters"][one.name]
                assert one.threshold == entry["threshold"]

    on_ranks(2, run)


def test_only_some_steps_are_observed(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> None:
        collected = Collected(every=3)
        trainer = Trainer(comm, telemetry=collected, warmup_steps=3)
        for step in range(8):
            trainer.step(gradients_of(comm.rank, step), REBUILT)
        assert [record.step for record in collected.records] == [0, 3, 6]
        assert [len(record.tensors) for record in collected.records] == [0, 2, 2]
        assert collected.records[0].dense_elements == collected.records[0].elements

    on_ranks(2, run)


def test_a_dropped_step_is_said_to_be_dropped(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> None:
        collected = Collected()
        trainer = Trainer(comm, telemetry=collected, nonfinite="skip")
        for step in range(4):
            gradients = gradients_of(comm.rank, step)
            if step == 2 and comm.rank == 1:
                gradients["scale"][0] = np.nan
            trainer.step(gradients, REBUILT)
        assert [(record.step, record.dropped) for record in collected.records] == [
            (0, False),
            (1, False),
            (2, True),
            (2, False),
        ]

    on_ranks(2, run)


def test_norms_are_of_unscaled_gradients(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> None:
        plain, scaled = Collected(), Collected()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        one = Trainer(comm, telemetry=plain)
        two = Trainer(comm, telemetry=scaled, scaler=scaler, nonfinite="skip")
        for step in range(3):
            gradients = gradients_of(comm.rank, step)
            one.step(gradients, REBUILT)
            two.step({name: values * np.float32(1024) for name, values in gradients.items()}, REBUILT)
        assert [record.tensors for record in plain.records] == [record.tensors for record in scaled.records]

    on_ranks(1, run)


def test_json_lines(on_ranks: OnRanks, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"

    def run(comm: Communicator) -> None:
        for first in (0, 4):  # the second run goes on in the same file
            with JsonLines(path, every=2) as telemetry:
                trainer = Trainer(comm, telemetry=telemetry, select="topk")
                for step in range(first, first + 4):
                    trainer.step(gradients_of(comm.rank, step), REBUILT)

    on_ranks(1, run)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["run", "step", "step"] * 2
    row = dict(zip(lines[0]["columns"], lines[1]["tensors"][0], strict=True))
    assert (row["name"], row["elements"], row["k"], row["selected"]) == ("hidden", 1000, 50, 50)
    assert [line["step"] for line in lines if line["kind"] == "step"] == [0, 2, 0, 2]


@pytest.mark.parametrize("text", ['{"lr": 0.1}', "first line\nmy only copy", '{"kind":"run","format":"other"}\n', "\n"])
def test_a_file_of_something_else_stays_as_it_is(tmp_path: Path, text: str) -> None:
    path = tmp_path / "settings.json"
    path.write_text(text)
    with pytest.raises(
        ValueError, match="settings.json' holds something else than telemetry: give a path that is free"
    ):
        JsonLines(path)
    assert path.read_text() == text


@pytest.mark.parametrize("text", ["", '{"kin', '{"kind":"run","format":"telegrad-telemetry","ver'])
def test_a_job_that_was_killed_in_its_first_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(text)
    with JsonLines(path) as telemetry:
        telemetry.write(StepRecord(0, 0, 1))
    assert [json.loads(line)["kind"] for line in path.read_text().splitlines()] == ["run", "step"]


def test_what_is_not_finite_is_null(tmp_path: Path) -> None:
    from telegrad.compress import Observation

    with JsonLines(tmp_path / "run.jsonl") as telemetry:
        record = StepRecord(3, 0, 1, [Observation("w", 9, 1, 0, float("inf"), float("nan"), None)])
        telemetry.write(record)
    last = json.loads((tmp_path / "run.jsonl").read_text().splitlines()[-1])
    assert last["tensors"] == [["w", 9, 1, 0, None, None, None]]


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_a_full_disk_ends_the_telemetry_and_not_the_training(on_ranks: OnRanks, nonfinite: str) -> None:
    class Full(Collected):
        def write(self, record: StepRecord) -> None:
            super().write(record)
            raise OSError(28, "No space left on device")

    def run(comm: Communicator) -> None:
        full = Full(every=2)
        trainer, reference = Trainer(comm, telemetry=full, nonfinite=nonfinite), Trainer(comm)
        trainer.step(gradients_of(0, 0), REBUILT)
        reference.step(gradients_of(0, 0), REBUILT)
        for step in range(1, 5):
            result, expected = (one.step(gradients_of(0, step), REBUILT) for one in (trainer, reference))
            for name in SHAPES:
                np.testing.assert_array_equal(result[name], expected[name])
        assert len(full.records) == 1
        assert trainer.state.failure is None

    with pytest.warns(RuntimeWarning, match="telemetry ends at step 0: .*No space left on device"):
        on_ranks(1, run)


def test_a_closed_file_ends_the_telemetry_and_says_why(on_ranks: OnRanks, tmp_path: Path) -> None:
    def run(comm: Communicator) -> None:
        with JsonLines(tmp_path / "run.jsonl") as telemetry:
            trainer = Trainer(comm, telemetry=telemetry)
            trainer.step(gradients_of(0, 0), REBUILT)
        trainer.step(gradients_of(0, 1), REBUILT)
        assert trainer.state.failure is None

    with pytest.warns(RuntimeWarning, match="telemetry ends at step 1: this JsonLines is closed: keep it open"):
        on_ranks(1, run)


def test_a_state_that_begins_anew_has_a_run_of_its_own(on_ranks: OnRanks, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"

    def run(comm: Communicator) -> None:
        with JsonLines(path) as telemetry:
            for steps in (1, 3, 2):
                trainer = Trainer(comm, telemetry=telemetry, nonfinite="skip")
                for step in range(steps):
                    gradients = gradients_of(comm.rank, step)
                    if (steps, step) == (3, 1):
                        gradients["scale"][0] = np.nan  # its number comes again, in the same run
                    trainer.step(gradients, REBUILT)
                trainer.state.state_dict()  # waits for the last step's verdict
            telemetry.write(StepRecord(2, 0, 2))

    on_ranks(1, run)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line.get("step", "run") for line in lines] == ["run", 0, "run", 0, 1, 1, "run", 0, 1, "run", 2]
    assert [line["world_size"] for line in lines if line["kind"] == "run"] == [1, 1, 1, 2]


def test_a_file_on_a_full_disk_can_be_left(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> None:
        with JsonLines("/dev/full") as telemetry:
            trainer = Trainer(comm, telemetry=telemetry)
            trainer.step(gradients_of(0, 0), REBUILT)
            with pytest.raises(OSError, match="No space left on device"):  # a later training says why, too
                telemetry.write(StepRecord(1, 0, 1))

    with pytest.warns(RuntimeWarning, match="telemetry ends at step 0: .*No space left on device"):
        on_ranks(1, run)


class Writer:
    """What TensorBoard's SummaryWriter is to us."""

    def __init__(self) -> None:
        self.scalars: dict[tuple[str, int], float] = {}

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.scalars[tag, step] = value


def test_tensorboard(on_ranks: OnRanks) -> None:
    writer, collected = Writer(), Collected()

    def run(comm: Communicator) -> None:
        for telemetry in (TensorBoard(writer, every=1), collected):
            trainer = Trainer(comm, telemetry=telemetry, select="topk")
            for step in range(3):
                trainer.step(gradients_of(comm.rank, step), REBUILT)

    on_ranks(1, run)
    for record in collected.records:
        for one in record.tensors:
            assert writer.scalars[f"telegrad/selected_to_k/{one.name}", record.step] == 1
            assert writer.scalars[f"telegrad/compression/{one.name}", record.step] == 20
            assert writer.scalars[f"telegrad/threshold/{one.name}", record.step] == one.threshold
            ratio = writer.scalars[f"telegrad/residual_to_gradient/{one.name}", record.step]
            assert ratio == pytest.approx(one.residual_norm / one.gradient_norm)
        assert writer.scalars["telegrad/dropped", record.step] == 0
        assert ("telegrad/bytes_sent", record.step) in writer.scalars


def test_without_tensorboard(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match="needs tensorboard: pip install tensorboard, or use JsonLines"):
        TensorBoard(tmp_path)


@pytest.mark.parametrize(
    ("every", "error", "message"),
    [(0, ValueError, "every=0 must be at least 1"), (1.5, TypeError, "every=1.5 must be an int")],
)
def test_bad_arguments(tmp_path: Path, every: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        JsonLines(tmp_path / "run.jsonl", every=every)
    with pytest.raises(error, match=message):
        TensorBoard(Writer(), every=every)
    with pytest.raises(OSError, match="No such file"):
        JsonLines(tmp_path / "nowhere" / "run.jsonl")
    with pytest.raises(TypeError, match="writer is a int: give a folder, or a torch.utils.tensorboard.SummaryWriter"):
        TensorBoard(5)


@pytest.mark.parametrize("cut", ['{"kind": "st', "{", "x" * 200_000])
def test_a_line_that_a_kill_cut_off_is_dropped(on_ranks: OnRanks, tmp_path: Path, cut: str) -> None:
    path = tmp_path / "run.jsonl"

    def run(comm: Communicator) -> None:
        for begin in (0, 2):
            with JsonLines(path) as lines:
                trainer = Trainer(comm, telemetry=lines)
                for step in (begin, begin + 1):
                    trainer.step(gradients_of(0, step), REBUILT)
            if begin == 0:
                with path.open("a") as file:
                    file.write(cut)

    on_ranks(1, run)
    kinds = [json.loads(line)["kind"] for line in path.read_text().splitlines()]
    assert kinds == ["run", "step", "step"] * 2


def test_telemetry_must_take_records(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> None:
        with pytest.raises(TypeError, match="telemetry is a str: give a telegrad.ddp.JsonLines"):
            Trainer(comm, telemetry="run.jsonl")

    on_ranks(1, run)


def test_a_file_that_is_none_takes_records_too() -> None:
    with JsonLines("/dev/null") as lines:
        lines.write(StepRecord(0, 0, 1))
