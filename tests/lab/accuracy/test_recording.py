"""Recorded gradients: what is recorded, and files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from lab.accuracy.problems import open_problem
from lab.topk.recording import Recorder, Recording
from lab.topk.training import record

LARGE = np.array([1.0, -3.0, 0.25, 0.0], np.float32)


def _recording() -> Recording:
    recorder = Recorder("lstm", 3, {"a": 1, "b": 3}, 3)
    for row in range(3):
        recorder.take(row, LARGE * np.float32(10.0**-row))
    return recorder.recording()


@pytest.mark.parametrize("task", ["lstm", "vgg"])
def test_each_gradient_is_of_other_samples_at_the_same_weights(task: str, places: tuple[Path, Path]) -> None:
    problem = open_problem(task, *places)
    counted: list[None] = []
    found = record(problem, count=3, steps=2, on_step=lambda: counted.append(None))
    assert (found.task, found.steps, found.count, len(counted)) == (task, 2, 3, 5)
    model = problem.model("small", "cpu")
    assert dict(zip(found.names, found.sizes, strict=True)) == {
        name: one.numel() for name, one in model.named_parameters()
    }
    assert found.elements == sum(found.sizes)
    gradients = [found.gradient(rank, 0) for rank in range(3)]
    assert all(np.any(one) for one in gradients)
    assert not np.array_equal(gradients[0], gradients[1])
    again = record(problem, count=3, steps=2)
    assert np.array_equal(again.values, found.values)
    later = record(problem, count=1, steps=4)
    assert not np.array_equal(later.gradient(0, 0), gradients[0])


def test_as_many_threads_as_before_are_used_afterwards(places: tuple[Path, Path]) -> None:
    torch.set_num_threads(2)
    record(open_problem("lstm", *places), count=1, steps=0)
    assert torch.get_num_threads() == 2


def test_gradients_keep_their_scale_and_go_round() -> None:
    found = _recording()
    for row in range(3):
        assert np.allclose(found.gradient(row, 0), LARGE * 10.0**-row, rtol=1e-3)
    assert found.gradient(0, 0).dtype == np.float32
    calls = [[float(found.gradient(rank, call)[0]) for rank in range(3)] for call in range(2)]
    assert calls[0] != calls[1]
    assert sorted(calls[0]) == sorted(calls[1])


def test_zeros_stay_zeros() -> None:
    recorder = Recorder("lstm", 0, {"a": 2}, 1)
    recorder.take(0, np.zeros(2, np.float32))
    assert recorder.recording().gradient(0, 0).tolist() == [0, 0]


def test_a_file_gives_back_what_was_saved(tmp_path: Path) -> None:
    found, file = _recording(), tmp_path / "gradients"
    found.save(file)
    loaded = Recording.load(file)
    assert (loaded.task, loaded.steps, loaded.names, loaded.sizes) == ("lstm", 3, ("a", "b"), (1, 3))
    assert np.array_equal(loaded.values, found.values)
    assert np.array_equal(loaded.scales, found.scales)


def test_other_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "other"
    for write in (
        lambda: file.write_text("no"),
        lambda: np.savez(file.open("wb"), format="other"),
        lambda: _array(file),
    ):
        write()
        with pytest.raises(ValueError, match="holds no recorded gradients"):
            Recording.load(file)
    with pytest.raises(OSError, match="missing"):
        Recording.load(tmp_path / "missing")


def _array(file: Path) -> None:
    with file.open("wb") as opened:
        np.save(opened, np.zeros(3))
