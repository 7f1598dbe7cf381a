"""Is a fit told that it ends above the optimum, and is no other one told so?"""

from __future__ import annotations

import itertools
import math
import re
import shutil
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import sparse
from scipy.optimize import minimize, nnls
from scipy.special import expit
from sklearn.datasets import load_breast_cancer, load_digits, load_iris, load_wine, make_classification
from sklearn.exceptions import ConvergenceWarning
from typer.testing import CliRunner

from lab.common.synthetic_rows import SHAPES, synthetic_rows
from telegrad import Communicator, TransportError
from telegrad.linear import (
    LOSSES,
    EpochReport,
    LinearSVC,
    LogisticRegression,
    Ridge,
    Rows,
    TrainingSettings,
    objective,
    train,
)
from telegrad.linear.losses import least_loss_of_classes, losses_of
from telegrad.linear.newton import Newton
from telegrad.linear.problem import Problem
from telegrad.linear.training import gains_nothing, last_fall, train_softmax
from telegrad.tools.cli import make_app

ESTIMATORS: dict[str, Callable[..., Any]] = {"logistic": LogisticRegression, "svc": LinearSVC, "ridge": Ridge}
SMOOTH = ("logistic", "squared_hinge", "squared_error")


def _separable() -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    x = random.normal(size=(300, 8))
    return x, np.where(x @ random.normal(size=8) > 0, 1, -1)


def _badly_scaled() -> tuple[Any, Any]:
    random = np.random.default_rng(1)
    x = random.normal(size=(300, 12))
    y = np.where(x @ random.normal(size=12) + random.normal(size=300) > 0, 1, -1)
    return x * 10.0 ** random.uniform(-2, 2, 12), y


def _cancer() -> tuple[Any, Any]:
    found = load_breast_cancer()
    return found.data / found.data.std(0), np.where(found.target, 1, -1)


def _digits() -> tuple[Any, Any]:
    found = load_digits()
    return found.data / 16, np.where(found.target == 8, 1, -1)


DATA = {"digits": _digits, "cancer": _cancer, "separable": _separable, "badly scaled": _badly_scaled}


def slopes_of(loss: str, scores: Any, y: Any) -> Any:
    if loss == "squared_error":
        return scores - y
    if loss == "logistic":
        return -y * expit(-scores * y)
    return -2 * y * np.maximum(0, 1 - scores * y)


class Task:
    """Rows, and the optimum of their objective by scipy, whose features have one scale there."""

    def __init__(self, name: str, loss: str, c: float) -> None:
        x, y = DATA[name]()
        self.x, self.y = x.astype(np.float32).astype(float), y.astype(np.float64)
        self.loss, self.l2 = loss, 1 / (c * len(y))
        self.rows = Rows.from_csr(sparse.csr_array(self.x.astype(np.float32)), self.y)
        self.scale = np.append(1 / np.maximum(self.x.std(0), 1e-9), 1.0)
        options: dict[str, Any] = {"maxiter": 20_000, "maxfun": 40_000, "ftol": 1e-15, "gtol": 1e-9}
        found = minimize(self._scaled, np.zeros(self.scale.size), jac=True, method="L-BFGS-B", options=options)
        self.best, self.z = float(found.fun), found.x * self.scale

    def value(self, z: Any) -> float:
        return float(losses_of(self.loss, self.x @ z[:-1] + z[-1], self.y).mean() + self.l2 / 2 * z[:-1] @ z[:-1])

    def _scaled(self, scaled: Any) -> tuple[float, Any]:
        z = scaled * self.scale
        slopes = slopes_of(self.loss, self.x @ z[:-1] + z[-1], self.y) / len(self.y)
        gradient = np.append(self.x.T @ slopes + self.l2 * z[:-1], slopes.sum())
        return self.value(z), gradient * self.scale


@pytest.mark.parametrize("c", [0.1, 100.0])
@pytest.mark.parametrize("loss", SMOOTH)
@pytest.mark.parametrize("name", DATA)
def test_the_default_ends_at_the_optimum(name: str, loss: str, c: float) -> None:
    task = Task(name, loss, c)
    trained = train(task.rows, TrainingSettings(loss=loss, l2=task.l2))
    assert trained.converged
    found = task.value(np.append(trained.model.weights.astype(float), trained.model.bias))
    assert found < task.best * (1 + 1e-3) + 1e-12
    assert trained.epochs[-1].objective == pytest.approx(found, rel=1e-4)


@pytest.mark.parametrize("c", [0.1, 100.0])
@pytest.mark.parametrize("name", DATA)
def test_the_gap_of_the_hinge_is_its_own_proof(name: str, c: float) -> None:
    """A longer training finds nothing that is better by more than the gap."""
    x, y = DATA[name]()
    rows = Rows.from_csr(sparse.csr_array(x.astype(np.float32)), y)
    l2 = 1 / (c * len(y))
    trained = train(rows, TrainingSettings(loss="hinge", l2=l2, tol=1e-3))
    assert trained.converged
    longer = train(rows, TrainingSettings(loss="hinge", l2=l2, tol=1e-5))
    best = objective(longer.model, rows, l2)
    found = objective(trained.model, rows, l2)
    assert best * (1 - 1e-5) <= found <= best * (1 + 1e-3) + 1e-9
    assert trained.epochs[-1].gap <= 1e-3


@pytest.mark.parametrize("c", [1.0, 1e4])
@pytest.mark.parametrize("loss", ["logistic", "squared_hinge"])
def test_the_dual_objective_proves_the_gap_of_wide_rows(loss: str, c: float) -> None:
    """By numpy. liblinear 2.50 ends 31 % above it with C = 1e4 and its tolerance at 1e-8, by its limit of steps."""
    random = np.random.default_rng(3)
    matrix = sparse.random(400, 3000, 0.02, format="csr", random_state=3, dtype=np.float32)
    y = np.where(random.random(400) < 0.5, 1.0, -1.0)
    l2 = 1 / (c * 400)
    trained = train(Rows.from_csr(matrix, y), TrainingSettings(loss=loss, l2=l2, bias=False, optimizer="newton"))
    assert trained.converged
    wide = matrix.astype(np.float64)
    weights = trained.model.weights.astype(np.float64)
    margins = y * (wide @ weights)
    reached = losses_of(loss, margins, np.ones(400)).mean() + l2 / 2 * weights @ weights
    if loss == "logistic":
        duals = expit(-margins)
        won = -(duals * np.log(duals) + (1 - duals) * np.log1p(-duals))
    else:
        duals = 2 * np.maximum(1 - margins, 0)
        won = duals - duals**2 / 4
    of_duals = wide.T @ (duals * y) / (l2 * 400)
    bound = won.mean() - l2 / 2 * of_duals @ of_duals
    assert reached * (1 - 1.01e-4) <= bound <= reached


def parts_of(rows: Rows, borders: list[int]) -> list[Rows]:
    return [rows.part(a, b) for a, b in itertools.pairwise(borders)]


@pytest.mark.parametrize("density", [0.02, 0.7], ids=["sparse sums", "dense sums"])
@pytest.mark.parametrize(("loss", "optimizer"), [*((loss, "auto") for loss in LOSSES), ("squared_hinge", "newton")])
@pytest.mark.parametrize("borders", [(0, 101, 300), (0, 130, 130, 140, 300), (0, 1, 9, 40, 90, 130, 200, 222, 300)])
def test_any_number_of_ranks_finds_the_same_bits(
    loss: str, optimizer: str, density: float, borders: tuple[int, ...]
) -> None:
    """Rows have weights, one rank may have no row, and no rank has all features."""
    random = np.random.default_rng(2)
    matrix = sparse.random(300, 800, density, format="csr", random_state=4, dtype=np.float32)
    rows = Rows.from_csr(matrix, np.where(random.random(300) < 0.4, 1, -1))
    rows = replace(rows, weights=random.random(300).astype(np.float32))
    settings = TrainingSettings(loss=loss, l2=0.01, held_out=0.1, optimizer=optimizer)
    parts = parts_of(rows, [*borders])
    comms = Communicator.local(len(parts), timeout_s=60)

    def run(rank: int) -> Any:
        with comms[rank]:
            trained = train(parts[rank], settings, comms[rank])
            return trained, objective(trained.model, parts[rank], 0.01, comms[rank])

    with ThreadPoolExecutor(len(parts)) as pool:
        every = list(pool.map(run, range(len(parts))))
    alone = train(rows, settings)
    assert alone.converged
    for trained, reached in every:
        assert trained.model.weights.tobytes() == alone.model.weights.tobytes()
        assert trained.model.bias == alone.model.bias
        assert [one.objective for one in trained.epochs] == [one.objective for one in alone.epochs]
        assert reached == pytest.approx(objective(alone.model, rows, 0.01), rel=1e-6)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_weight_is_as_many_rows(loss: str) -> None:
    x, y = data()
    counts = np.random.default_rng(0).integers(0, 4, 400)
    rows = Rows.from_csr(x, np.where(y, 1, -1))
    weighted = replace(rows, weights=counts.astype(np.float32))
    places = np.repeat(np.arange(400), counts)
    repeated = Rows.from_csr(x[places], rows.labels[places])
    settings = TrainingSettings(loss=loss, l2=0.01, tol=1e-8)
    one, other = train(weighted, settings), train(repeated, settings)
    np.testing.assert_allclose(one.model.weights, other.model.weights, atol=1e-4)
    assert one.loss_at_zero == pytest.approx(other.loss_at_zero)
    assert one.loss_without_weights == pytest.approx(other.loss_without_weights)
    assert objective(one.model, weighted, 0.01) == pytest.approx(objective(one.model, repeated, 0.01))


@pytest.mark.parametrize("loss", ["hinge", "squared_hinge"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("c", [0.1, 10.0])
def test_one_rank_s_hinge_ends_where_several_ranks_do(
    loss: str, bias: bool, c: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sparse rows with weights and many columns; another method checks the gap. Of so few entries several ranks find
    the same bits; of more than they exchange the same objective."""
    random = np.random.default_rng(5)
    matrix = sparse.random(400, 900, 0.03, format="csr", random_state=6, dtype=np.float32)
    matrix.data += 1
    rows = Rows.from_csr(matrix, np.where(random.random(400) < 0.3, 1, -1))
    rows = replace(rows, weights=random.integers(0, 4, 400).astype(np.float32))
    settings = TrainingSettings(loss=loss, l2=1 / (400 * c), bias=bias, tol=1e-5)
    best = train(rows, replace(settings, tol=1e-8)).epochs[-1].objective
    alone = train(rows, settings)
    assert alone.converged
    assert len(alone.epochs) < 20
    reached = objective(alone.model, rows, settings.l2)
    assert reached == pytest.approx(alone.epochs[-1].objective, rel=1e-5)
    assert best * (1 - 1e-6) <= reached <= best * (1 + 1e-5) + 1e-9
    for one in alone.epochs:
        assert one.objective * (1 - one.gap) <= best * (1 + 1e-6)
    assert train(rows, settings).model.weights.tobytes() == alone.model.weights.tobytes()
    comms = Communicator.local(2, timeout_s=60)

    def run(rank: int) -> Any:
        return train(parts_of(rows, [0, 150, 400])[rank], settings, comms[rank])

    for most in (6 << 20, 0):
        monkeypatch.setattr("telegrad.linear.problem._POOLED", most)
        with ThreadPoolExecutor(2) as pool:
            both = list(pool.map(run, range(2)))
        one = train(rows, settings)
        assert both[0].model.weights.tobytes() == both[1].model.weights.tobytes() == one.model.weights.tobytes()
        assert (one.model.weights.tobytes() == alone.model.weights.tobytes()) == (most > 0)
        assert both[0].epochs[-1].objective == pytest.approx(reached, rel=3e-5)
    monkeypatch.undo()
    file = tmp_path / "state.npz"
    whole = train(rows, settings, checkpoint=tmp_path / "whole.npz")
    train(rows, replace(settings, epochs=2), checkpoint=file)
    resumed = train(rows, settings, checkpoint=file)
    assert resumed.model.weights.tobytes() == whole.model.weights.tobytes()
    assert [one.gap for one in resumed.epochs] == [one.gap for one in whole.epochs]
    duals = np.load(file)["duals"][:-1]
    x, y, weights = matrix.astype(float), rows.labels.astype(float), np.asarray(rows.weights, float)
    implied = x.T @ (weights * duals * y) / (weights.sum() * settings.l2)
    np.testing.assert_allclose(implied, resumed.model.weights, atol=1e-5 * np.abs(implied).max())
    if not bias:  # else duals of one class are scaled before they prove anything
        won = duals - duals**2 / 4 * (loss == "squared_hinge")
        bound = (weights * won).sum() / weights.sum() - settings.l2 / 2 * implied @ implied
        assert best * (1 - 1e-4) <= bound <= best * (1 + 1e-9)


def _rows_of_uneven_lengths(columns: int) -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    x = random.normal(size=(120, columns)) * np.exp(2 * random.normal(size=(120, 1)))
    return x, (x[:, 0] + x[:, 1] / 2 > 0) ^ (random.random(120) < 0.2)


def _columns_far_from_zero(columns: int) -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    x = random.normal(size=(300, columns)) + 100
    return x, (x[:, 0] > 100) ^ (random.random(300) < 0.2)


def _a_few_large_values(columns: int) -> tuple[Any, Any]:
    random = np.random.default_rng(70022)
    x = random.normal(size=(300, columns))
    x = np.where(random.random(x.shape) < 0.01, x * 1e5, x)
    return x, x @ random.normal(size=columns) > 0


@pytest.mark.parametrize("loss", ["hinge", "squared_hinge"])
@pytest.mark.parametrize(
    ("make", "columns", "c", "bias"),
    [
        (_rows_of_uneven_lengths, 200, 1, True),
        (_columns_far_from_zero, 400, 1, True),
        (_a_few_large_values, 159, 100, False),
    ],
)
def test_rows_on_which_descents_are_slow_take_few_steps(
    make: Callable[[int], Any], columns: int, c: float, bias: bool, loss: str, tmp_path: Path
) -> None:
    """Steps by a Hessian's factors follow. They, and their resumption, have the same bits on any number of ranks."""
    x, y = make(columns)
    rows = Rows.from_csr(sparse.csr_matrix(x.astype(np.float32)), np.where(y, 1, -1))
    settings = TrainingSettings(loss=loss, l2=1 / (len(y) * c), bias=bias, tol=1e-4)
    alone = train(rows, settings)
    assert alone.converged
    assert len(alone.epochs) < 60
    for one in train_in_parts(rows, settings, 3):
        assert one.model.weights.tobytes() == alone.model.weights.tobytes()
        assert one.model.bias == alone.model.bias
    if make is _columns_far_from_zero:
        whole = train(rows, settings, checkpoint=tmp_path / "whole.npz").model
        for broken_off in (1, len(alone.epochs) // 2):
            file = tmp_path / f"{broken_off}.npz"
            train(rows, replace(settings, epochs=broken_off), checkpoint=file)
            assert train(rows, settings, checkpoint=file).model.weights.tobytes() == whole.weights.tobytes()


def test_few_columns_with_a_few_large_values_end_at_the_optimum() -> None:
    """Of the dual of the squared hinge without a bias, which is a problem of non-negative least squares."""
    x, y = _a_few_large_values(40)
    x = x.astype(np.float32).astype(float)
    settings = TrainingSettings(loss="squared_hinge", l2=1 / 30_000, bias=False)  # C = 100
    reached = train(Rows.from_csr(sparse.csr_matrix(x.astype(np.float32)), np.where(y, 1, -1)), settings)
    signed = x * np.where(y, 1, -1)[:, None]
    lengths = np.sqrt((signed**2).sum(axis=1) + 1 / 200)
    system = np.vstack([signed.T, np.eye(300) / np.sqrt(200)]) / lengths
    duals = nnls(system, np.append(np.zeros(40), np.full(300, np.sqrt(200))), maxiter=20_000)[0] / lengths
    bound = (duals.sum() - ((signed.T @ duals) ** 2).sum() / 2 - (duals**2).sum() / 400) / 30_000
    assert reached.converged
    assert bound * (1 - 1e-6) <= reached.epochs[-1].objective <= bound * (1 + 1e-3)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_large_hinge_has_one_rank_s_bits_on_many(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("telegrad.linear.problem._POOLED", 0)
    rows = Rows.from_csr(*_sparse_rows())
    parts = parts_of(rows, [300 * rank // ranks for rank in range(ranks + 1)])
    settings = TrainingSettings(loss="hinge", l2=1e-3, tol=1e-6)
    alone = train(rows, settings)
    comms = Communicator.local(ranks, timeout_s=60)
    with ThreadPoolExecutor(ranks) as pool:
        every = list(pool.map(train, parts, [settings] * ranks, comms))
    for one in (alone, *every):
        assert one.converged
        assert one.model.weights.tobytes() == alone.model.weights.tobytes()
        assert [report.gap for report in one.epochs] == [report.gap for report in alone.epochs]


def train_in_parts(rows: Rows, settings: TrainingSettings, ranks: int, **options: Any) -> list[Any]:
    parts = parts_of(rows, [len(rows) * rank // ranks for rank in range(ranks + 1)])
    comms = Communicator.local(ranks, timeout_s=60)
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(lambda rank: train(parts[rank], settings, comms[rank], **options), range(ranks)))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_descents_on_few_rows_have_one_rank_s_bits(
    ranks: int, bias: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank may take 60 % of the rows at a time, which have weights. A training that was
    broken off goes on to the same bits, among other ranks, too."""
    made = synthetic_rows(SHAPES["url"], 0, 600)
    rows = replace(made, weights=np.random.default_rng(0).integers(0, 3, 600).astype(np.float32))
    settings = TrainingSettings(loss="hinge", l2=1 / 600, tol=1e-6, bias=bias)
    on_all = train(rows, settings)
    monkeypatch.setattr("telegrad.linear.problem._POOLED", 0)
    monkeypatch.setattr("telegrad.linear.problem._GATHERED", int(0.6 * rows.nnz))
    monkeypatch.setattr("telegrad.linear.newton._SLOW", 20)
    moved: list[int] = []
    few_rows = Newton._on_few_rows

    def on_few_rows(newton: Newton, number: int, gap: float) -> Any:
        moved.append(number)
        return few_rows(newton, number, gap)

    monkeypatch.setattr(Newton, "_on_few_rows", on_few_rows)
    alone = train(rows, settings)
    assert moved
    every = train_in_parts(rows, settings, ranks)
    for one in every:
        assert one.converged
        assert one.model.weights.tobytes() == alone.model.weights.tobytes()
    reached = every[0].epochs[-1].objective
    assert reached == pytest.approx(on_all.epochs[-1].objective, rel=1e-6)
    assert objective(every[0].model, rows, settings.l2) == pytest.approx(reached, rel=1e-5)  # of weights in float32
    file = tmp_path / "state.npz"
    whole = train_in_parts(rows, settings, ranks, checkpoint=tmp_path / "whole.npz")[0]
    assert whole.converged
    train_in_parts(rows, replace(settings, epochs=len(whole.epochs) - 1), ranks, checkpoint=file)
    shutil.copy(file, tmp_path / "of_many.npz")
    resumed = train_in_parts(rows, settings, ranks, checkpoint=file)
    for one in (*resumed, train(rows, settings, checkpoint=tmp_path / "of_many.npz")):
        assert one.model.weights.tobytes() == whole.model.weights.tobytes()
        assert [report.gap for report in one.epochs] == [report.gap for report in whole.epochs]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_small_hinge_has_one_rank_s_bits_on_many(ranks: int, tmp_path: Path) -> None:
    """Rows are held out; a checkpoint of one rank goes on among many, and the others notice a rank that fails."""
    rows = Rows.from_csr(*_sparse_rows())
    settings = TrainingSettings(loss="hinge", l2=1e-3, tol=1e-7, held_out=0.1)
    alone = train(rows, settings, checkpoint=tmp_path / "whole.npz")
    assert alone.converged
    assert len(alone.epochs) > 3
    file = tmp_path / "state.npz"
    train(rows, replace(settings, epochs=2), checkpoint=file)
    parts = parts_of(rows, [300 * rank // ranks for rank in range(ranks + 1)])

    def run(act: Callable[[int, Communicator], Any]) -> list[Any]:
        comms = Communicator.local(ranks, timeout_s=60)

        def one(rank: int) -> Any:
            try:
                with comms[rank]:
                    return act(rank, comms[rank])
            except (ValueError, TransportError) as error:
                return str(error)

        with ThreadPoolExecutor(ranks) as pool:
            return list(pool.map(one, range(ranks)))

    plain = run(lambda rank, comm: train(parts[rank], replace(settings, epochs=2), comm))
    resumed = run(lambda rank, comm: train(parts[rank], settings, comm, checkpoint=file))
    before = train(rows, replace(settings, epochs=2))
    for wanted, every in ((before, plain), (alone, resumed)):
        for found in every:
            assert found.model.weights.tobytes() == wanted.model.weights.tobytes()
            assert found.model.bias == wanted.model.bias
            assert [one.held_out_loss for one in found.epochs] == [one.held_out_loss for one in wanted.epochs]

    def failing(rank: int, comm: Communicator) -> Any:
        def fail(report: EpochReport) -> None:
            if rank == 1 and report.epoch == 2:
                raise ValueError("my own")

        return train(parts[rank], settings, comm, on_epoch=fail)

    assert all("my own" in said for said in run(failing))


def _sparse_rows() -> tuple[Any, Any]:
    matrix = sparse.random(300, 900, 0.03, format="csr", random_state=6, dtype=np.float32)
    return matrix, np.where(np.random.default_rng(5).random(300) < 0.4, 1, -1)


def test_weights_that_cannot_be() -> None:
    x, y = data()
    rows = Rows.from_csr(x, np.where(y, 1, -1))
    with pytest.raises(TypeError, match="weights is 1-D float64"):
        replace(rows, weights=np.ones(400))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="weights has 3 elements but labels 400: give as many"):
        replace(rows, weights=np.ones(3, np.float32))
    for bad in (-1, np.nan, np.inf):
        with pytest.raises(ValueError, match="weights have a negative number, NaN or Inf"):
            replace(rows, weights=np.full(400, bad, np.float32))
    with pytest.raises(ValueError, match="the weights of all rows to train on are 0"):
        train(replace(rows, weights=np.zeros(400, np.float32)))
    with pytest.raises(ValueError, match="rows have weights, which optimizer='sgd' does not know: use 'newton'"):
        train(replace(rows, weights=np.ones(400, np.float32)), TrainingSettings(optimizer="sgd"))


def test_auto_follows_the_options() -> None:
    chosen: list[tuple[dict[str, Any], str]] = [
        ({}, "newton"),
        ({"loss": "squared_error", "l2": 0.0}, "newton"),
        ({"loss": "hinge"}, "dual"),
        ({"loss": "hinge", "l2": 0.0}, "adagrad"),
        ({"loss": "squared_hinge"}, "dual"),
        ({"loss": "squared_hinge", "l2": 0.0}, "newton"),
        ({"loss": "squared_hinge", "l1": 0.1}, "newton"),
        ({"l1": 0.1}, "newton"),
        ({"loss": "hinge", "l1": 0.1}, "adagrad"),
        ({"batch": 7}, "sgd"),
        ({"learning_rate": 0.1, "l1": 0.1}, "sgd"),
        ({"overlap": True}, "sgd"),
        ({"decay": 0.1}, "sgd"),
        ({"optimizer": "adagrad"}, "adagrad"),
    ]
    for options, name in chosen:
        settings = TrainingSettings(**options)
        assert settings.method == name
        assert settings.most_epochs == (1000 if name in ("newton", "dual") else 10)


@pytest.mark.parametrize("loss", ["logistic", "hinge"])
def test_a_training_that_is_interrupted_leaves_a_model(loss: str) -> None:
    x, y = data()
    left = []

    def on_epoch(report: EpochReport) -> None:
        if report.epoch == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(
            Rows.from_csr(x, np.where(y, 1, -1)),
            TrainingSettings(loss=loss),
            on_epoch=on_epoch,
            on_break_off=left.append,
        )
    assert np.abs(left[0].weights).max() > 0


def test_a_checkpoint_of_a_converged_training_is_not_trained_on(tmp_path: Path) -> None:
    x, y = data()
    rows, file = Rows.from_csr(x, np.where(y, 1, -1)), tmp_path / "state.npz"
    first = train(rows, TrainingSettings(), checkpoint=file)
    again = train(rows, TrainingSettings(), checkpoint=file, on_step=lambda step, steps: pytest.fail("a step"))
    assert again.converged
    assert again.model.weights.tobytes() == first.model.weights.tobytes()
    finer = train(rows, TrainingSettings(tol=1e-12), checkpoint=file)
    assert len(finer.epochs) > len(first.epochs)


@pytest.mark.parametrize(("learning_rate", "max_iter"), [(1.0, 100), (1.0, 200), (2.0, 100), (0.3, 200), (None, 300)])
def test_noise_of_the_loss_does_not_hide_that_a_fit_ended_early(learning_rate: float | None, max_iter: int) -> None:
    task = Task("digits", "logistic", 100.0)
    with pytest.warns(ConvergenceWarning, match=rf"max_iter={max_iter} ended the training, and the objective may be"):
        own = LogisticRegression(
            C=100, optimizer="sgd", batch=100, learning_rate=learning_rate, max_iter=max_iter, random_state=0
        ).fit(task.x, task.y)
    assert task.value(np.append(own.coef_, own.intercept_)) > 1.05 * task.best


def data(classes: int = 2) -> tuple[Any, Any]:
    x, y = make_classification(400, 20, n_informative=8, n_classes=classes, class_sep=0.7, flip_y=0.1, random_state=3)
    return sparse.csr_array(np.where(np.abs(x) > 0.3, x, 0).astype(np.float32)), y


@pytest.mark.parametrize("fit_intercept", [True, False])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_fit_that_ends_too_early_is_warned_of_and_a_converged_one_is_not(name: str, fit_intercept: bool) -> None:
    x, y = data()
    for epochs in (1, 3):
        with pytest.warns(ConvergenceWarning, match=f"max_iter={epochs} ended the training|no better than"):
            ESTIMATORS[name](max_iter=epochs, batch=100, random_state=0, fit_intercept=fit_intercept).fit(x, y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        settings: dict[str, Any] = {"batch": 400, "learning_rate": 0.05, "random_state": 0}
        ESTIMATORS[name](max_iter=5000, fit_intercept=fit_intercept, **settings).fit(x, y)
        ESTIMATORS[name](fit_intercept=fit_intercept).fit(x, y)


def test_the_gap_of_the_hinge() -> None:
    x, y = data()
    with pytest.warns(ConvergenceWarning, match="max_iter=5 "):
        LinearSVC(loss="hinge", C=0.05, batch=100, max_iter=5, random_state=0).fit(x, y)
    with pytest.warns(ConvergenceWarning, match="max_iter=3 "):
        LinearSVC(loss="hinge", max_iter=3).fit(x, y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        settings: dict[str, Any] = {"max_iter": 300, "batch": 50, "learning_rate": 0.05, "decay": 0.01}
        LinearSVC(loss="hinge", C=0.05, random_state=0, **settings).fit(x, y)


def test_models_of_several_classes_are_warned_of_once() -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        LogisticRegression(max_iter=1, random_state=0).fit(*data(3))
    assert [one.category for one in found] == [ConvergenceWarning]
    assert found[0].filename == __file__


@pytest.mark.parametrize("y", [np.full(40, 3.0), np.zeros(40)])
def test_numbers_that_are_all_the_same_are_no_error(y: Any) -> None:
    x = np.random.default_rng(0).normal(size=(40, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Ridge(max_iter=2000, batch=40, random_state=0).fit(x, y)


@pytest.mark.parametrize("loss", ["logistic", "hinge", "squared_hinge"])
@pytest.mark.parametrize("positive", [0.5, 0.1, 0.97, 1.0])
def test_the_least_loss_without_weights(loss: str, positive: float) -> None:
    rows = 1000
    targets = np.where(np.arange(rows) < positive * rows, 1.0, -1.0)
    grid = np.linspace(-9, 9, 3601)
    expected = min(losses_of(loss, np.full(rows, one), targets).mean() for one in grid)
    assert least_loss_of_classes(loss, positive) == pytest.approx(expected, abs=2e-4)
    made = Rows.from_csr(sparse.csr_array(np.ones((rows, 1), np.float32)), targets)
    for bias, wanted in ((True, expected), (False, 1.0 if loss != "logistic" else np.log(2))):
        trained = train(made, TrainingSettings(loss=loss, epochs=1, bias=bias))
        assert trained.loss_without_weights == pytest.approx(wanted, abs=2e-4)
        settings = TrainingSettings(loss=loss, epochs=1, bias=bias, held_out=0.3)
        kept = np.delete(targets, train(made, settings).held_out.astype(int))
        best = losses_of(loss, np.zeros(kept.size), kept).mean()
        if bias:
            best = least_loss_of_classes(loss, float((kept > 0).mean()))
        assert train(made, settings).loss_without_weights == pytest.approx(best)


def test_the_least_loss_of_numbers_without_weights() -> None:
    y = np.random.default_rng(0).normal(3, 2, 200).astype(np.float32)
    made = Rows.from_csr(sparse.csr_array(np.ones((200, 1), np.float32)), y)
    for bias, expected in ((True, y.var() / 2), (False, (y**2).mean() / 2)):
        settings = TrainingSettings(loss="squared_error", epochs=1, bias=bias)
        assert train(made, settings).loss_without_weights == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("positive", [0.5, 0.1])
@pytest.mark.parametrize(
    ("estimator", "rate"),
    [
        (LogisticRegression, 40.0),
        (lambda **more: LinearSVC(loss="hinge", **more), 20.0),
        (lambda **more: LinearSVC(loss="squared_hinge", **more), 0.9),
        (Ridge, 0.95),
    ],
)
def test_a_fit_that_is_worse_than_no_weights_is_told(estimator: Any, rate: float, positive: float) -> None:
    """Labels by chance, and steps that are too long: no error of divergence, and yet told."""
    random = np.random.default_rng(5)
    x = random.normal(size=(200, 4)).astype(np.float32)
    y = np.where(random.random(200) < positive, 1, -1)
    if estimator is Ridge:
        y = random.normal(size=200)
    for factor in (1.0, 0.5, 0.25, 0.125, 0.0625):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            try:
                estimator(learning_rate=rate * factor, batch=2, max_iter=5, random_state=0).fit(x, y)
            except ValueError:  # of a training that has diverged
                continue
        break
    assert len(found) == 1
    said = str(found[0].message)
    assert found[0].category is ConvergenceWarning
    assert "the fit is no better than a model without weights: its objective is" in said
    assert f"use a lower learning_rate than {rate * factor:g}, or None, or scale X" in said


def test_a_fit_by_the_default_rate_that_is_worse_than_no_weights_is_told_what_to_change() -> None:
    x = np.random.default_rng(5).normal(size=(200, 4))
    x[0] *= 1e4  # so that the default rate is tiny, and the bias stays near 0
    y = np.where(np.arange(200) < 10, 1, -1)
    with pytest.warns(ConvergenceWarning, match="no better than a model without.*; scale X, or give more max_iter"):
        LogisticRegression(batch=10, max_iter=2, random_state=0).fit(x, y)


@pytest.mark.parametrize("positive", [0.5, 0.1])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_fit_whose_steps_are_too_short_is_told(name: str, positive: float) -> None:
    x = np.random.default_rng(5).normal(size=(200, 4)).astype(np.float32)
    y = np.where(x[:, 0] > np.quantile(x[:, 0], 1 - positive), 1, -1)
    with pytest.warns(ConvergenceWarning, match=r"no better than .*; use a higher learning_rate than 1e-07, or None"):
        ESTIMATORS[name](learning_rate=1e-7, max_iter=2, random_state=0).fit(x, y)


def test_an_optimum_as_good_as_none_is_not_warned_of() -> None:
    x, y = np.zeros((100, 2), np.float32), np.tile([1, -1], 50)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for options in ({}, {"batch": 100, "max_iter": 3}):
            LogisticRegression(**options).fit(x, y)


def test_a_model_as_good_as_none_is_no_better() -> None:
    x, y = np.zeros((100, 2), np.float32), np.tile([1, -1], 50)
    rows = Rows.from_csr(sparse.csr_array(x), y)
    trained = train(rows, TrainingSettings(epochs=3, batch=100))
    reached = objective(trained.model, rows, 0.0)
    assert gains_nothing(reached, trained.loss_without_weights)
    assert gains_nothing(0.7, trained.loss_without_weights)
    assert not gains_nothing(0.69, trained.loss_without_weights)
    assert [trained.better_rate(one) for one in (0.7, math.log(2), 0.6)] == ["a lower", "a higher", "another"]


@pytest.mark.parametrize("rate", [("--learning-rate", "20"), ("--optimizer", "adagrad", "--learning-rate", "9")])
def test_a_model_that_is_worse_than_none_is_told(tmp_path: Path, rate: tuple[str, ...]) -> None:
    signs, rows = np.random.default_rng(1).integers(0, 2, 200), np.random.default_rng(2).normal(size=(200, 2))
    noise = tmp_path / "noise.svm"
    noise.write_text("".join(f"{y} 1:{a:.3f} 2:{b:.3f}\n" for y, (a, b) in zip(signs, rows, strict=True)))
    asked = ["linear", "train", str(noise), "--model", str(tmp_path / "m.npz"), "--ranks", "2", "--batch", "150", *rate]
    done = CliRunner().invoke(make_app(), asked, env={"COLUMNS": "200"})
    status, said = done.exit_code, " ".join(done.output.split())
    assert status == 0, said
    assert "the model is no better than one without weights (objective " in said
    assert f"without weights 0.69): try a lower --learning-rate than {rate[-1]}, or leave it out" in re.sub(
        r"(0\.69)\d+\)", r"\1)", said
    )
    assert "give more --epochs" not in said


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        (("--optimizer", "sgd", "--learning-rate", "1e-9"), "try a higher --learning-rate than 1e-09, or leave it out"),
        (("--optimizer", "adagrad", "--learning-rate", "1e-9"), "try a higher --learning-rate than 1e-09"),
        (("--batch", "60", "--epochs", "1", "--overlap"), "scale the features, or give more --epochs"),
        (("--l1", "5"), "no other is, with these features and --l2 1e-06 --l1 5"),
        (("--l2", "1e5"), "no other is, with these features and --l2 100000"),
        (("--loss", "hinge", "--l2", "1e5"), "no other is, with these features and --l2 100000"),
        (("--optimizer", "newton", "--l2", "1e3", "--tol", "1e-15", "--epochs", "1"), "or give more --epochs"),
        (("--loss", "squared_error", "--optimizer", "sgd", "--learning-rate", "1e-9"), "try a higher --learning-rate"),
    ],
)
def test_an_objective_near_that_of_zero_weights_is_told(tmp_path: Path, options: tuple[str, ...], remedy: str) -> None:
    path = tmp_path / "data.svm"
    long = 1e5 if "--overlap" in options else 1  # such rows make the default rate tiny
    path.write_text("".join(f"{i % 2} {1 + i % 2}:1 3:{long if i in (9, 10) else 1}\n" for i in range(60)))
    asked = ["linear", "train", str(path), "--model", str(tmp_path / "m.npz"), "--ranks", "1", *options]
    done = CliRunner().invoke(make_app(), asked, env={"COLUMNS": "200"})
    said = " ".join(done.output.split())
    assert done.exit_code == 0, said
    assert "the model is no better than one without weights (objective " in said
    assert remedy in said


def test_last_fall() -> None:
    assert last_fall([2.0, 1.0]) == 0.5
    assert last_fall([9.0, 2.0, 2.0, 1.0, 1.0]) == pytest.approx(0.25)  # two epochs later
    assert last_fall([100.0] * 20 + [10.0] * 10 + [5.0] * 10) == pytest.approx(0.05)
    assert last_fall([0.999**epoch for epoch in range(100)]) == pytest.approx(0.001, rel=0.02)
    assert last_fall([1.0, 0.0, 0.0, 0.0, 0.0]) == 0
    steady = [0.69, *(0.1 + 0.3 * 0.8**epoch for epoch in range(10))]
    assert last_fall(steady) == pytest.approx(0.09, abs=0.02), "a fall is no chance because it is steep"
    assert last_fall([1.0, 2.0]) == 0
    uneven = np.random.default_rng(0).normal(10, 1, (500, 40))
    assert sum(last_fall(losses.tolist()) > 0 for losses in uneven) <= 3  # of 500 that do not fall


@pytest.mark.parametrize("loss", SMOOTH)
def test_ranks_that_share_few_features_exchange_these_alone(
    loss: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits as one rank; rows are held out, a checkpoint resumes, and what ends a training leaves a model."""
    monkeypatch.setattr("telegrad.linear.problem._LEAST_SPLIT", 100)
    random = np.random.default_rng(3)
    matrix = sparse.random(300, 3000, 0.005, format="csr", random_state=4, dtype=np.float32)
    rows = Rows.from_csr(matrix, np.where(random.random(300) < 0.4, 1, -1))
    settings = TrainingSettings(loss=loss, l2=1e-2, tol=1e-2, held_out=0.1, optimizer="newton")
    alone = train(rows, settings, checkpoint=tmp_path / "one.npz")
    comms = Communicator.local(4, timeout_s=60)
    parts = parts_of(rows, [0, 130, 130, 140, 300])

    def run(rank: int) -> Any:
        comm = comms[rank]
        with comm:
            problem = Problem(parts[rank], settings, comm, alone=False)
            assert problem.shared is not None
            assert problem.shared.own.size <= problem.features < problem.occurring
            left: list[Any] = []

            def end(report: EpochReport) -> None:
                if report.epoch == 2:
                    raise KeyboardInterrupt

            with pytest.raises(KeyboardInterrupt):
                train(parts[rank], settings, comm, on_epoch=end, on_break_off=left.append)
            file = tmp_path / "state.npz"
            train(parts[rank], replace(settings, epochs=2), comm, checkpoint=file)
            return train(parts[rank], settings, comm, checkpoint=file), left[0]

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(run, range(4)))
    for trained, left in found:
        assert trained.model.weights.tobytes() == alone.model.weights.tobytes()
        assert trained.model.bias == alone.model.bias
        assert [one.held_out_loss for one in trained.epochs] == [one.held_out_loss for one in alone.epochs]
        assert np.count_nonzero(left.weights) > 1000


def test_softmax_of_ranks_that_share_few_features(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("telegrad.linear.problem._LEAST_SPLIT", 100)
    matrix = sparse.random(200, 2000, 0.005, format="csr", random_state=4, dtype=np.float32)
    rows = Rows.from_csr(matrix, np.arange(200) % 3)
    settings = TrainingSettings(l2=1e-3, tol=1e-3)
    alone = train_softmax(rows, 3, settings)
    comms = Communicator.local(2, timeout_s=60)

    def run(rank: int) -> Any:
        with comms[rank]:
            return train_softmax(parts_of(rows, [0, 90, 200])[rank], 3, settings, comms[rank])

    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(run, range(2)):
            assert found.weights.tobytes() == alone.weights.tobytes()
            assert found.biases.tobytes() == alone.biases.tobytes()


@pytest.mark.parametrize("every", [1, 3])
def test_checkpoints_do_not_hold_the_hinge_up(every: int, tmp_path: Path) -> None:
    """By Newton's method, whose steps do not each lower the objective."""
    random = np.random.default_rng(0)
    matrix = sparse.random(400, 100, 0.1, format="csr", random_state=1, dtype=np.float32)
    labels = np.sign(matrix @ random.normal(size=100) + random.normal(size=400) / 2 + 1e-9)
    rows, settings = Rows.from_csr(matrix, labels), TrainingSettings(loss="hinge", l2=1e-4)
    plain = train(rows, settings)
    kept = train(rows, settings, checkpoint=tmp_path / "state.npz", checkpoint_every=every)
    assert plain.converged
    assert kept.converged
    assert len(kept.epochs) <= 2 * len(plain.epochs)
    assert (
        train(rows, settings, checkpoint=tmp_path / "state.npz").model.weights.tobytes() == kept.model.weights.tobytes()
    )
    assert kept.epochs[-1].objective < plain.epochs[-1].objective * (1 + 1e-3)


class Uneven:
    """Rows of which one, or a tenth, or a column is ``times`` as large, and the optimum by a Newton method in numpy,
    whose steps are solved by the rows' QR factors."""

    def __init__(self, what: str, times: float, loss: str, c: float, shape: tuple[int, int]) -> None:
        random = np.random.default_rng(3)
        count, columns = shape
        x = random.normal(size=shape)
        scores = x @ random.normal(size=columns) + random.normal(size=count) * np.sqrt(columns) / 3
        self.y = np.where(scores > 0, 1.0, -1.0)
        larger = {"row": np.s_[0], "rows": np.s_[: count // 10], "column": np.s_[:, 0]}
        x[larger[what]] *= times
        self.x = x.astype(np.float32).astype(np.float64)
        self.loss, self.l2 = loss, 1 / (count * c)
        self.rows = Rows.from_csr(sparse.csr_array(self.x), self.y)

    def at(self, w: Any) -> tuple[float, Any, Any]:
        margins = self.x @ w * self.y
        short, small = np.maximum(0, 1 - margins), np.exp(-np.abs(margins))
        if self.loss == "squared_hinge":
            value, slopes, curvatures = short**2, -2 * short, 2.0 * (short > 0)
        else:
            value = np.logaddexp(0, -margins)
            slopes, curvatures = -np.where(margins < 0, 1, small) / (1 + small), small / (1 + small) ** 2
        gradient = self.x.T @ (slopes * self.y) / len(self.y) + self.l2 * w
        return float(value.mean() + self.l2 / 2 * w @ w), gradient, curvatures / len(self.y)

    def least(self) -> float:
        columns = self.x.shape[1]
        w = np.zeros(columns)
        for _ in range(200):
            value, gradient, curvatures = self.at(w)
            factor = np.linalg.qr(
                np.vstack([np.sqrt(curvatures)[:, None] * self.x, np.sqrt(self.l2) * np.eye(columns)]), "r"
            )
            step = np.linalg.solve(factor, np.linalg.solve(factor.T, -gradient))
            parts = (0.5**k for k in range(40))
            slope = gradient @ step
            part = next((one for one in parts if self.at(w + one * step)[0] <= value + 1e-4 * one * slope), 0.0)
            w = w + part * step
            if value - self.at(w)[0] <= 1e-13 * value:
                break
        return self.at(w)[0]


@pytest.mark.parametrize("loss", ["squared_hinge", "logistic"])
@pytest.mark.parametrize(("columns", "c"), [(40, 1.0), (40, 100.0), (400, 1.0)])
@pytest.mark.parametrize("times", [1e3, 1e4])
def test_a_row_of_far_larger_values_hides_no_other(loss: str, c: float, columns: int, times: float) -> None:
    data = Uneven("row", times, loss, c, (300, columns))
    found = train(data.rows, TrainingSettings(loss=loss, l2=data.l2, bias=False))
    assert found.converged
    assert data.at(found.model.weights.astype(np.float64))[0] <= data.least() * (1 + 1e-4)


@pytest.mark.parametrize(("what", "times", "c", "steps"), [("row", 1e3, 100.0, 60), ("rows", 1e3, 1.0, 150)])
def test_conjugate_gradients_of_uneven_rows_do_not_end_at_one_small_gain(
    what: str, times: float, c: float, steps: int
) -> None:
    """Their gains go up and down. By the last gain alone these took 176 steps, and more than 1,000."""
    data = Uneven(what, times, "squared_hinge", c, (200, 400))
    settings = TrainingSettings(loss="squared_hinge", l2=data.l2, bias=False, optimizer="newton")
    found = train(data.rows, settings)
    assert found.converged
    assert len(found.epochs) <= steps
    assert data.at(found.model.weights.astype(np.float64))[0] <= data.least() * (1 + 1e-4)


@pytest.mark.parametrize("epochs", [1, 7, None])
@pytest.mark.parametrize(
    ("what", "times", "loss", "c", "shape"),
    [
        ("row", 1e4, "squared_hinge", 100.0, (300, 40)),
        ("row", 1e6, "squared_hinge", 1.0, (300, 40)),
        ("rows", 1e6, "squared_hinge", 100.0, (300, 40)),
        ("rows", 1e4, "logistic", 1.0, (300, 40)),
        ("column", 1e6, "logistic", 1e4, (300, 40)),
        ("column", 1e3, "squared_hinge", 1.0, (200, 400)),
        ("row", 1e6, "squared_hinge", 1e4, (200, 400)),
        ("rows", 1e6, "squared_hinge", 1e-2, (200, 400)),
        ("row", 1e3, "logistic", 1e4, (200, 400)),
    ],
)
def test_no_end_on_uneven_data_is_told_to_be_better_than_it_is(
    what: str, times: float, loss: str, c: float, shape: tuple[int, int], epochs: int | None
) -> None:
    """By the tolerance, by rounding, or by the limit of steps: the gap, and the warning of a fit."""
    data = Uneven(what, times, loss, c, shape)
    least = data.least()
    found = train(data.rows, TrainingSettings(loss=loss, l2=data.l2, bias=False, epochs=epochs))
    last = found.epochs[-1]
    assert 1 - least / last.objective <= 2 * last.gap + 1e-9
    options: dict[str, Any] = {"C": c, "fit_intercept": False, "max_iter": epochs}
    fitted = LogisticRegression(**options) if loss == "logistic" else LinearSVC(**options, loss=loss)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConvergenceWarning)
        fitted.fit(data.x, data.y)
    reached = data.at(fitted.coef_[0].astype(np.float64))[0]
    said = [str(one.message) for one in caught]
    told = [re.search(r"may be ([0-9.,e+]+) % above", one) for one in said]
    if 1 - least / reached > 2e-3:
        assert said
        assert all(one is None or float(one[1].replace(",", "")) / 50 >= 1 - least / reached for one in told), said


def test_the_first_pass_of_a_slow_descent_is_no_divergence() -> None:
    """Its weights may be worse than none."""
    data = Uneven("column", 1e3, "squared_hinge", 1.0, (200, 400))
    trained = train(data.rows, TrainingSettings(loss="squared_hinge", l2=data.l2, bias=False, epochs=1))
    assert trained.epochs[-1].objective > 10 * trained.loss_at_zero
    assert not trained.diverged
    with pytest.warns(ConvergenceWarning, match="no better than a model without weights: its objective is 16.6"):
        LinearSVC(fit_intercept=False, max_iter=1).fit(data.x, data.y)


@pytest.mark.parametrize("optimizer", ["newton", "dual"])
@pytest.mark.parametrize("c", [1.0, 1e4])
def test_even_columns_hide_no_uneven_one(c: float, optimizer: str) -> None:
    """Most columns have one value, as those of ones and zeros. The gap was told to be 3e-6, and the objective was twice
    the optimum."""
    data = Uneven("row", 1e6, "squared_hinge", c, (300, 40))
    rows = Rows.from_csr(sparse.csr_array(np.hstack([data.x, np.full((300, 160), 1e-30)])), data.y)
    settings = TrainingSettings(loss="squared_hinge", l2=data.l2, bias=False, optimizer=optimizer, epochs=40)
    last = train(rows, settings).epochs[-1]
    assert 1 - data.least() / last.objective <= 2 * last.gap + 1e-9


@pytest.mark.parametrize("loss", ["squared_hinge", "logistic"])
@pytest.mark.parametrize("what", ["row", "rows"])
def test_uneven_rows_give_the_same_bits_on_any_number_of_ranks(what: str, loss: str) -> None:
    data = Uneven(what, 1e4, loss, 1.0, (300, 40))
    settings = TrainingSettings(loss=loss, l2=data.l2, optimizer="newton")
    alone = train(data.rows, settings)
    assert alone.converged
    for ranks in (2, 4):
        for one in train_in_parts(data.rows, settings, ranks):
            assert one.model.weights.tobytes() == alone.model.weights.tobytes()
            assert one.model.bias == alone.model.bias
            assert [(each.objective, each.gap) for each in one.epochs] == [
                (each.objective, each.gap) for each in alone.epochs
            ]
    threaded = train(data.rows, replace(settings, threads=2))
    assert threaded.model.weights.tobytes() == alone.model.weights.tobytes()


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("load", [load_iris, load_wine])
def test_a_softmax_at_its_optimum_warns_of_nothing(load: Callable[..., Any], scaled: bool) -> None:
    """Such fits ended before the bound that is told was within tol, and so they warned."""
    x, y = load(return_X_y=True)
    x = (x - x.mean(0)) / x.std(0) if scaled else x
    for strength in (0.01, 1.0, 100.0):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            LogisticRegression(C=strength).fit(x, y)
