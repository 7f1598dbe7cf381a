"""A training that goes on from its file: the same bits as one that was not broken off, and what is refused."""

from __future__ import annotations

import os
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import sparse

from telegrad import Communicator
from telegrad.linear import EpochReport, LinearModel, Rows, Trained, TrainingSettings, train
from telegrad.linear.checkpoint import Checkpoint

FEATURES, COUNT = 90, 400
SETTINGS = {
    "sgd": TrainingSettings(batch=40, l2=0.01, epochs=6, decay=0.01, held_out=0.2),
    "sgd with l1": TrainingSettings(batch=40, l1=0.002, l2=0.01, epochs=6),
    "overlapped": TrainingSettings(batch=40, l2=0.01, epochs=6, overlap=True),
    "adagrad": TrainingSettings(batch=40, optimizer="adagrad", l2=0.01, epochs=6, held_out=0.2),
    "adagrad with l1": TrainingSettings(batch=40, optimizer="adagrad", l1=0.002, epochs=6, bias=False),
    "newton with l1": TrainingSettings(l1=0.001, tol=1e-9, epochs=6),
    "newton": TrainingSettings(l2=0.01, epochs=6, held_out=0.2, tol=1e-12),
    "dual": TrainingSettings(loss="hinge", l2=0.01, epochs=6, held_out=0.2, tol=1e-12),
    "dual of squares": TrainingSettings(loss="squared_hinge", l2=0.01, epochs=6, held_out=0.2, tol=1e-12),
}


def some_rows(seed: int = 5) -> Rows:
    random = np.random.default_rng(seed)
    matrix = sparse.random(COUNT, FEATURES, 0.1, format="lil", random_state=seed)
    matrix[:, 11] = 0  # a feature that no row has
    matrix = matrix.tocsr()
    return Rows.from_csr(matrix, np.where(matrix @ random.normal(size=FEATURES) > 0, 1, -1))


def train_among(rows: Rows, world_size: int | None, settings: TrainingSettings, *paths: Any, **options: Any) -> Any:
    """By rank what ``train`` gives or raises, each with its path, or all with the one; ``None``: without ranks."""
    if world_size is None:
        return [_given(train, rows, settings, None, checkpoint=paths[0], **options)]
    comms = Communicator.local(world_size, timeout_s=60)
    borders = [len(rows) * rank // world_size for rank in range(world_size + 1)]

    def one(rank: int) -> Any:
        own = rows.part(borders[rank], borders[rank + 1])
        with comms[rank]:
            return _given(train, own, settings, comms[rank], checkpoint=paths[rank % len(paths)], **options)

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(one, range(world_size)))


def _given(function: Any, *arguments: Any, **named: Any) -> Any:
    try:
        return function(*arguments, **named)
    except (Exception, KeyboardInterrupt) as error:
        return error


def steady(reports: list[EpochReport]) -> list[EpochReport]:
    """What does not depend on the time, nor on whose reports they are: a file has rank 0's."""
    numbers: list[dict[str, Any]] = [{} if one.auc == one.auc else NONE for one in reports]
    numbers = [given | ({} if one.gap == one.gap else NO_GAP) for given, one in zip(numbers, reports, strict=True)]
    return [
        replace(one, compute_s=0, comm_s=0, entries=0, **given) for given, one in zip(numbers, reports, strict=True)
    ]


NONE: dict[str, Any] = {"held_out_loss": 0, "accuracy": 0, "auc": 0}  # NaN is not itself
NO_GAP: dict[str, Any] = {"objective": 0, "gap": 0}


def assert_same(found: Trained, wanted: Trained) -> None:
    assert found.model.weights.tobytes() == wanted.model.weights.tobytes()
    assert found.model.bias == wanted.model.bias
    assert steady(found.epochs) == steady(wanted.epochs)


@pytest.mark.parametrize("world_size", [None, 1, 3])
@pytest.mark.parametrize("name", SETTINGS)
def test_it_goes_on_to_the_same_bits(name: str, world_size: int | None, tmp_path: Path) -> None:
    rows, settings = some_rows(), SETTINGS[name]
    wanted = train_among(rows, world_size, settings, tmp_path / "whole.npz", checkpoint_every=2)
    broken = tmp_path / "broken.npz"

    def break_off(report: EpochReport) -> None:
        if report.epoch == 3:  # of which nothing is kept but what the second one's end was
            raise KeyboardInterrupt

    for one in train_among(rows, world_size, settings, broken, checkpoint_every=2, on_epoch=break_off):
        assert isinstance(one, KeyboardInterrupt)
    resumed: list[int] = []
    found = train_among(
        rows, world_size, settings, broken, checkpoint_every=2, on_resume=lambda reports: resumed.append(len(reports))
    )
    assert resumed == [2] * (world_size or 1)
    for one, other in zip(found, wanted, strict=True):
        assert_same(one, other)
        assert one.held_out.tolist() == other.held_out.tolist()


@pytest.mark.parametrize("name", SETTINGS)
def test_other_ranks_go_on_to_the_same_but_for_rounding(name: str, tmp_path: Path) -> None:
    rows, settings, file = some_rows(), SETTINGS[name], tmp_path / "state.npz"
    wanted = train_among(rows, 2, settings, tmp_path / "whole.npz")[0]
    train_among(rows, 2, replace(settings, epochs=3), file)
    kept = file.read_bytes()
    for world_size in (None, 3):
        file.write_bytes(kept)
        for found in train_among(rows, world_size, settings, file):
            np.testing.assert_allclose(found.model.weights, wanted.model.weights, rtol=1e-3, atol=1e-5)
            second_order = settings.method in ("newton", "dual")
            assert abs(len(found.epochs) - len(wanted.epochs)) <= second_order  # by rounding


def test_all_epochs_are_there_and_more_may_follow(tmp_path: Path) -> None:
    rows, settings, file = some_rows(), SETTINGS["adagrad"], tmp_path / "state.npz"
    first = train(rows, replace(settings, epochs=2), checkpoint=file)
    again = train(rows, replace(settings, epochs=2), checkpoint=file, on_step=lambda step, steps: pytest.fail("a step"))
    assert_same(again, first)
    assert_same(train(rows, settings, checkpoint=file), train(rows, settings, checkpoint=tmp_path / "other.npz"))


def test_it_is_a_model_s_file(tmp_path: Path) -> None:
    rows, file = some_rows(), tmp_path / "state.npz"
    trained = train(rows, SETTINGS["sgd"], checkpoint=file)
    model = LinearModel.load(file)
    assert model.weights.tobytes() == trained.model.weights.tobytes()
    assert (model.bias, model.loss) == (trained.model.bias, "logistic")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"batch": 41}, "batch=40, and here it is 41"),
        ({"l2": 0.02}, "l2=0.01, and here it is 0.02"),
        ({"optimizer": "adagrad"}, "optimizer='sgd', and here it is 'adagrad'"),
        ({"epochs": 5}, "6 epochs, and here are epochs=5"),
    ],
)
def test_a_checkpoint_of_other_settings_is_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    rows, file = some_rows(), tmp_path / "state.npz"
    train(rows, SETTINGS["sgd"], checkpoint=file)
    before = file.read_bytes()
    for error in train_among(rows, 2, replace(SETTINGS["sgd"], **changes), file):
        assert isinstance(error, ValueError)
        assert said in str(error)
        assert "or remove this one" in str(error)
    assert file.read_bytes() == before


def test_threads_may_be_others(tmp_path: Path) -> None:
    rows, file = some_rows(), tmp_path / "state.npz"
    train(rows, replace(SETTINGS["sgd"], epochs=3), checkpoint=file)
    assert len(train(rows, replace(SETTINGS["sgd"], threads=2), checkpoint=file).epochs) == 6


@pytest.mark.parametrize("world_size", [None, 2])
def test_a_checkpoint_of_other_data_is_refused(world_size: int | None, tmp_path: Path) -> None:
    file, settings = tmp_path / "state.npz", SETTINGS["sgd"]
    train(some_rows(), settings, checkpoint=file)
    for other, said in ((some_rows().part(0, 300), "rows is 400, and here it is 300"), (some_rows(6), "first rate is")):
        for error in train_among(other, world_size, settings, file):
            assert isinstance(error, ValueError)
            assert f"data whose {said}" in str(error)


@pytest.mark.parametrize("world_size", [None, 2])
def test_data_that_differ_by_little_are_refused(world_size: int | None, tmp_path: Path) -> None:
    rows, file = some_rows(), tmp_path / "state.npz"
    wide, settings = replace(rows, n_features=2_000_000), replace(SETTINGS["adagrad"], epochs=1)
    train(wide, settings, checkpoint=file)
    labels, values, fewer = rows.labels.copy(), rows.values.copy(), rows.offsets.copy()
    labels[0] *= -1
    values[0] += 0.5
    fewer[-1] -= 1
    last = int(fewer[-1])
    others = {
        "features is 2000000, and here it is 2000001": replace(rows, n_features=2_000_001),
        "positive labels is": replace(wide, labels=labels),
        "sum of squares is": replace(wide, values=values),
        "entries is": replace(wide, offsets=fewer, indices=rows.indices[:last], values=rows.values[:last]),
    }
    for said, other in others.items():
        for error in train_among(other, world_size, settings, file):
            assert isinstance(error, ValueError)
            assert f"data whose {said}" in str(error)


def test_another_index_base_is_refused(tmp_path: Path) -> None:
    rows, file, settings = some_rows(), tmp_path / "state.npz", replace(SETTINGS["sgd"], epochs=1)
    train(replace(rows, index_base=1), settings, checkpoint=file)
    with pytest.raises(ValueError, match="index_base=1, and here it is 0"):
        train(replace(rows, index_base=0), settings, checkpoint=file)
    train(rows, settings, checkpoint=file)  # of which nobody knows


STRUCTURE = np.dtype([("rows", "i8"), ("features", "i8"), ("loss", "U3"), ("rate", "f8")])
DAMAGES: dict[str, Any] = {
    "squares that are no numbers": lambda own: {"squares": np.full_like(own["squares"], np.nan)},
    "squares below 0": lambda own: {"squares": -own["squares"]},
    "squares too large": lambda own: {"squares": own["squares"].astype(np.float64) * 1e300},
    "too few squares": lambda own: {"squares": own["squares"][:1]},
    "indices below 0": lambda own: {"square_indices": -own["square_indices"].astype(np.int64)},
    "indices too large": lambda own: {"square_indices": own["square_indices"] + np.uint32(50)},
    "indices that fall": lambda own: {"square_indices": own["square_indices"][::-1]},
    "flags": lambda own: {"square_indices": np.ones(FEATURES, bool), "squares": np.ones(FEATURES, np.float32)},
    "a sum of squares below 0": lambda own: {"bias_squares": np.float64(-1)},
    "a text": lambda own: {"bias_squares": np.str_("1")},
    "no epochs": lambda own: {"epochs": own["epochs"][:0]},
    "epochs that fall": lambda own: {"epochs": own["epochs"][::-1]},
    "other columns": lambda own: {"epochs": own["epochs"][:, :5]},
    "no object": lambda own: {"settings": np.str_("[1]")},
    "no optimizer": lambda own: {"settings": np.str_("{}")},
    "a structure": lambda own: {"data": np.array((COUNT, FEATURES, "x", 0.1), STRUCTURE)},
    "objects": lambda own: {"data": np.array([1, None], object)},
    "other features": lambda own: {"n_features": np.uint64(FEATURES + 1)},
}


@pytest.mark.parametrize("name", [None, *DAMAGES])
def test_a_damaged_checkpoint_is_refused_on_all_ranks(name: str | None, tmp_path: Path) -> None:
    rows, file, settings = some_rows(), tmp_path / "state.npz", replace(SETTINGS["adagrad"], epochs=2)
    train(rows, settings, checkpoint=file)
    if name is None:
        file.write_bytes(file.read_bytes()[:-40])
    else:
        with np.load(file) as arrays:
            changed = {**arrays}
        np.savez(file, **(changed | DAMAGES[name](changed)))
    for error in train_among(rows, 2, settings, file, tmp_path / "seen by rank 0 alone"):
        assert isinstance(error, ValueError)
        assert "is no checkpoint of a linear model's training" in str(error)


def test_a_pipe_is_refused_on_all_ranks(tmp_path: Path) -> None:
    os.mkfifo(file := tmp_path / "pipe")
    for error in train_among(some_rows(), 2, SETTINGS["sgd"], file):
        assert isinstance(error, ValueError)
        assert str(error) == f"the checkpoint {file} is no regular file: name another"


@pytest.mark.parametrize("name", ["load", "save"])
@pytest.mark.parametrize(
    ("raised", "kind", "why"),
    [(MemoryError(), MemoryError, "MemoryError"), (TypeError("a slip"), RuntimeError, "a slip")],
)
def test_whatever_rank_0_meets_ends_all_ranks(
    name: str, raised: Exception, kind: type[Exception], why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows, file, settings = some_rows(), tmp_path / "state.npz", replace(SETTINGS["sgd"], epochs=1)
    train(rows, settings, checkpoint=file)

    def fail(*arguments: Any) -> None:
        raise raised

    monkeypatch.setattr(Checkpoint, name, fail)
    what = {"load": "read", "save": "write"}[name]
    for error in train_among(rows, 2, replace(settings, epochs=2), file):
        assert type(error) is kind
        assert str(error) == f"cannot {what} the checkpoint {file}: {why}"


def test_what_was_read_is_not_kept(tmp_path: Path) -> None:
    rows, file, features = some_rows(), tmp_path / "state.npz", 1_000_000
    wide, settings = replace(rows, n_features=features), replace(SETTINGS["adagrad"], epochs=1)
    train_among(wide, 1, settings, file)
    held: list[int] = []
    tracemalloc.start()
    try:
        train_among(
            wide,
            1,
            replace(settings, epochs=2),
            file,
            on_step=lambda *_: held.append(tracemalloc.get_traced_memory()[0]),
        )
    finally:
        tracemalloc.stop()
    assert held
    assert max(held) < features


def test_a_model_is_no_checkpoint(tmp_path: Path) -> None:
    rows, file = some_rows(), tmp_path / "model.npz"
    train(rows, SETTINGS["sgd"]).model.save(file)
    with pytest.raises(ValueError, match="a model without what a training goes on from"):
        train(rows, SETTINGS["sgd"], checkpoint=file)


@pytest.mark.parametrize("world_size", [None, 2])
def test_a_checkpoint_that_cannot_be_written_ends_all_ranks(world_size: int | None, tmp_path: Path) -> None:
    left: list[LinearModel] = []
    file = tmp_path / "no folder" / "state.npz"
    for error in train_among(some_rows(), world_size, SETTINGS["sgd"], file, on_break_off=left.append):
        assert isinstance(error, OSError)
        assert str(error) == f"cannot write the checkpoint {file}: No such file or directory"
    assert len(left) == (world_size or 1)


def test_only_rank_0_needs_the_file(tmp_path: Path) -> None:
    rows, settings, file, other = some_rows(), SETTINGS["sgd"], tmp_path / "state.npz", tmp_path / "not written"
    train_among(rows, 2, replace(settings, epochs=3), file, other)
    assert [len(one.epochs) for one in train_among(rows, 2, settings, file, other)] == [6, 6]
    assert not other.exists()


def test_what_has_diverged_leaves_the_last_one(tmp_path: Path) -> None:
    rows, file = some_rows(), tmp_path / "state.npz"
    settings = TrainingSettings(batch=40, epochs=400, learning_rate=1e30, loss="squared_error", bias=False)
    trained = train(rows, settings, checkpoint=file)
    assert trained.diverged
    with LinearModelOrNone(file) as model:
        assert model is None or np.isfinite(model.weights).all()


class LinearModelOrNone(nullcontext[LinearModel | None]):
    def __init__(self, file: Path) -> None:
        super().__init__(LinearModel.load(file) if file.exists() else None)


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"checkpoint_every": 0}, ValueError, "checkpoint_every=0 must be at least 1"),
        ({"checkpoint_every": 1.5}, TypeError, "checkpoint_every=1.5 must be an int of at least 1"),
        ({"checkpoint": 7}, TypeError, "checkpoint=7 must be a path, or None"),
    ],
)
def test_arguments_that_cannot_be(options: dict[str, Any], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        train(some_rows(), SETTINGS["sgd"], **options)


def test_ranks_that_do_not_agree_about_it(tmp_path: Path) -> None:
    for error in train_among(some_rows(), 2, SETTINGS["sgd"], tmp_path / "state.npz", None):
        assert isinstance(error, ValueError)
        assert "checkpoint_every of rank 1 is another than that of rank 0" in str(error)


def test_an_interrupt_does_not_disturb_what_a_break_leaves() -> None:
    left: list[LinearModel] = []

    def on_step(step: int, steps: int) -> None:
        if step == 3:
            raise ValueError("the end")

    def on_break_off(model: LinearModel) -> None:
        left.append(model)
        if len(left) == 1:
            raise KeyboardInterrupt

    with pytest.raises(ValueError, match="the end"):
        train(some_rows(), SETTINGS["sgd"], on_step=on_step, on_break_off=on_break_off)
    assert len(left) == 2
