"""The demo's data: the same on every rank and in every run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from telegrad.tools.demo import job
from telegrad.tools.demo.job import Corpus


@pytest.fixture
def library(tmp_path: Path) -> Path:
    root = tmp_path / "library"
    for i in range(60):
        path = root / f"package{i % 3}" / f"module{i}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# file {i}\n" * 50)
    foreign = root / "site-packages" / "foreign.py"
    foreign.parent.mkdir()
    foreign.write_text("SECRET")
    return root


def test_the_standard_library_is_there() -> None:
    files = job.source_files()
    assert len(files) > 300
    assert files == sorted(files)
    assert not [path for path in files if "site-packages" in path.parts]
    held_out = [path for path in files if job.is_held_out(path.name)]
    assert 0.01 < len(held_out) / len(files) < 0.12


def test_split_without_overlap(library: Path, tmp_path: Path) -> None:
    corpus = Corpus.prepare(tmp_path, library)
    assert len(corpus.held_out) > 0
    training, held_out = (bytes(one).decode() for one in (corpus.training, corpus.held_out))
    files = {f"# file {i}\n" for i in range(60)}
    in_training = {line for line in files if line in training}
    in_held_out = {line for line in files if line in held_out}
    assert in_training | in_held_out == files
    assert not in_training & in_held_out
    assert "SECRET" not in training + held_out
    again = Corpus.open(tmp_path)
    assert np.array_equal(again.training, corpus.training)


def test_batches_depend_on_seed_step_and_rank_only(library: Path, tmp_path: Path) -> None:
    data = Corpus.prepare(tmp_path, library).training

    def batch(seed: int = 0, step: int = 0, rank: int = 0) -> tuple[bytes, ...]:
        inputs, targets = job.training_batch(data, seed=seed, step=step, rank=rank, batch=3, context=16)
        assert inputs.shape == targets.shape == (3, 16)
        assert inputs.dtype == targets.dtype == np.int64
        assert np.array_equal(inputs[:, 1:], targets[:, :-1])
        return inputs.tobytes(), targets.tobytes()

    assert batch() == batch()
    assert len({batch(), batch(seed=1), batch(step=1), batch(rank=1)}) == 4


def test_validation_covers_the_same_windows_for_any_number_of_ranks(library: Path, tmp_path: Path) -> None:
    data = Corpus.prepare(tmp_path, library).held_out

    def windows(world_size: int) -> list[bytes]:
        return sorted(
            window.tobytes()
            for rank in range(world_size)
            for inputs, _ in job.validation_batches(
                data, windows=10, batch=3, context=16, rank=rank, world_size=world_size
            )
            for window in inputs
        )

    assert len(windows(1)) == 10
    assert windows(1) == windows(3) == windows(16)


def test_no_sources(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no \*\.py file to train on: name a folder that has"):
        job.source_files(tmp_path)


def test_too_little_text(tmp_path: Path) -> None:
    root = tmp_path / "library"
    root.mkdir()
    (root / "only.py").write_text("x = 1")
    with pytest.raises(ValueError, match="too small to be split, give a larger one"):
        Corpus.prepare(tmp_path, root)


def test_text_shorter_than_a_window() -> None:
    data = np.zeros(16, np.uint8)
    with pytest.raises(ValueError, match="context=16 needs a longer text than 16 bytes"):
        job.training_batch(data, seed=0, step=0, rank=0, batch=1, context=16)
    with pytest.raises(ValueError, match="choose a shorter context"):
        next(job.validation_batches(data, windows=1, batch=1, context=16))
