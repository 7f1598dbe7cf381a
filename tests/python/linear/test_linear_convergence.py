"""Is a fit told that it ends above the optimum, and is no other one told so?"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import sparse
from scipy.optimize import minimize
from sklearn.datasets import load_breast_cancer, load_digits, make_classification
from sklearn.exceptions import ConvergenceWarning
from typer.testing import CliRunner

from telegrad import Communicator
from telegrad.linear import LinearSVC, LogisticRegression, Ridge, Rows, TrainingSettings, objective, train
from telegrad.linear.losses import gap_above_optimum, least_loss_of_classes, losses_of, slopes_and_curvatures
from telegrad.linear.training import last_fall
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
        slopes = slopes_and_curvatures(self.loss, self.x @ z[:-1] + z[-1], self.y, 1.0)[0] / len(self.y)
        gradient = np.append(self.x.T @ slopes + self.l2 * z[:-1], slopes.sum())
        return self.value(z), gradient * self.scale

    def gap(self, z: Any, enough: float = 0.01) -> float:
        return gap_above_optimum(
            sparse.csr_array(self.x),
            self.y,
            z[:-1].astype(np.float32),
            float(z[-1]),
            loss=self.loss,
            l2=self.l2,
            rows=len(self.y),
            negligible=1e-9,
            enough=enough,
        )

    def at(self, gap: float, seed: int) -> Any:
        """A model so far above the optimum, on a way from the latter in a random direction."""
        direction = np.random.default_rng(seed).normal(size=self.z.size) * self.scale
        low, high = 0.0, 1.0
        while self.value(self.z + high * direction) < self.best * (1 + gap):
            high *= 2
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (
                (low, middle) if self.value(self.z + middle * direction) > self.best * (1 + gap) else (middle, high)
            )
        return self.z + low * direction


@pytest.mark.parametrize("c", [0.1, 100.0])
@pytest.mark.parametrize("loss", SMOOTH)
@pytest.mark.parametrize("name", DATA)
def test_the_gap_is_found_on_both_sides_of_the_limit(name: str, loss: str, c: float) -> None:
    task = Task(name, loss, c)
    assert task.gap(task.z) < 1e-3
    for seed in range(3):
        assert task.gap(task.at(1e-3, seed)) < 2e-3  # more only as the optimum of scipy is not exact
        assert task.gap(task.at(0.05, seed)) > 0.01
    assert task.gap(task.at(0.05, 9), enough=1.0) == pytest.approx(0.05, rel=0.1)
    assert task.gap(np.zeros(task.z.size)) > 0.01


@pytest.mark.parametrize(("learning_rate", "max_iter"), [(1.0, 100), (1.0, 200), (2.0, 100), (0.3, 200), (None, 300)])
def test_noise_of_the_loss_does_not_hide_that_a_fit_ended_early(learning_rate: float | None, max_iter: int) -> None:
    task = Task("digits", "logistic", 100.0)
    with pytest.warns(
        ConvergenceWarning, match=rf"max_iter={max_iter} ended the training when the objective was at least"
    ):
        own = LogisticRegression(C=100, learning_rate=learning_rate, max_iter=max_iter, random_state=0).fit(
            task.x, task.y
        )
    assert task.value(np.append(own.coef_, own.intercept_)) > 1.05 * task.best


def data(classes: int = 2) -> tuple[Any, Any]:
    x, y = make_classification(400, 20, n_informative=8, n_classes=classes, class_sep=0.7, flip_y=0.1, random_state=3)
    return sparse.csr_array(np.where(np.abs(x) > 0.3, x, 0).astype(np.float32)), y


@pytest.mark.parametrize("fit_intercept", [True, False])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_fit_that_ends_too_early_is_warned_of_and_a_converged_one_is_not(name: str, fit_intercept: bool) -> None:
    x, y = data()
    for epochs in (1, 3):
        with pytest.warns(ConvergenceWarning, match=f"max_iter={epochs} ended the training|worse than a model without"):
            ESTIMATORS[name](max_iter=epochs, random_state=0, fit_intercept=fit_intercept).fit(x, y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        settings: dict[str, Any] = {"batch": 400, "learning_rate": 0.05, "random_state": 0}
        ESTIMATORS[name](max_iter=1000, fit_intercept=fit_intercept, **settings).fit(x, y)


def test_the_gap_of_the_hinge() -> None:
    x, y = data()
    with pytest.warns(ConvergenceWarning, match="max_iter=5 "):
        LinearSVC(loss="hinge", C=0.05, max_iter=5, random_state=0).fit(x, y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        settings: dict[str, Any] = {"max_iter": 300, "batch": 50, "learning_rate": 0.05, "decay": 0.01}
        LinearSVC(loss="hinge", C=0.05, random_state=0, **settings).fit(x, y)


def test_models_of_several_classes_are_warned_of_once() -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        LogisticRegression(max_iter=2, random_state=0).fit(*data(3))
    assert [one.category for one in found] == [ConvergenceWarning]
    assert found[0].filename == __file__


@pytest.mark.parametrize("y", [np.full(40, 3.0), np.zeros(40)])
def test_numbers_that_are_all_the_same_are_no_error(y: Any) -> None:
    x = np.random.default_rng(0).normal(size=(40, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Ridge(max_iter=2000, batch=40, random_state=0).fit(x, y)


def test_all_ranks_find_the_gap_of_one() -> None:
    x, y = data()
    comms = Communicator.local(3, timeout_s=60.0)
    borders = [0, 90, 90, 400]  # one has no row

    def found(rank: int, comm: Communicator | None) -> float:
        own = slice(borders[rank], borders[rank + 1]) if comm else slice(0, 400)
        weights, signs = np.linspace(-1, 1, 20, dtype=np.float32), np.where(y == 1, 1.0, -1.0)
        matrix = sparse.csr_array(x.toarray()[own].astype(float))
        settings: dict[str, Any] = {"loss": "logistic", "l2": 0.01, "rows": 400, "negligible": 1e-9, "enough": 9.0}
        return gap_above_optimum(matrix, signs[own], weights, 0.3, comm=comm, **settings)

    def run(rank: int) -> float:
        with comms[rank]:
            return found(rank, comms[rank])

    with ThreadPoolExecutor(3) as pool:
        every = list(pool.map(run, range(3)))
    assert every == [every[0]] * 3
    assert every[0] == pytest.approx(found(0, None), rel=1e-6)
    assert every[0] > 0.1


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
    assert "the fit is worse than a model without weights: its objective is" in said
    assert f"use a smaller learning_rate than {rate * factor:g}, or None, or scale X" in said


def test_a_fit_by_the_default_rate_that_is_worse_than_no_weights_is_told_what_to_change() -> None:
    x = np.random.default_rng(5).normal(size=(200, 4))
    x[0] *= 1e4  # so that the default rate is tiny, and the bias stays near 0
    y = np.where(np.arange(200) < 10, 1, -1)
    with pytest.warns(ConvergenceWarning, match="worse than a model without weights.*; scale X, or give more max_iter"):
        LogisticRegression(batch=10, max_iter=2, random_state=0).fit(x, y)


def test_a_model_as_good_as_none_is_not_worse() -> None:
    x, y = np.zeros((100, 2), np.float32), np.tile([1, -1], 50)
    rows = Rows.from_csr(sparse.csr_array(x), y)
    trained = train(rows, TrainingSettings(epochs=3, batch=100))
    reached = objective(trained.model, rows, 0.0)
    assert not trained.is_worse_than_no_weights(reached)
    assert trained.is_worse_than_no_weights(0.7)
    assert replace(trained, loss_without_weights=0.0).is_worse_than_no_weights(0.7)  # labels that are all the same
    assert not replace(trained, loss_without_weights=0.0).is_worse_than_no_weights(0.1)


@pytest.mark.parametrize("rate", [("--learning-rate", "20"), ("--optimizer", "adagrad", "--learning-rate", "9")])
def test_a_model_that_is_worse_than_none_is_said_to_be(tmp_path: Path, rate: tuple[str, ...]) -> None:
    signs, rows = np.random.default_rng(1).integers(0, 2, 200), np.random.default_rng(2).normal(size=(200, 2))
    noise = tmp_path / "noise.svm"
    noise.write_text("".join(f"{y} 1:{a:.3f} 2:{b:.3f}\n" for y, (a, b) in zip(signs, rows, strict=True)))
    asked = ["linear", "train", str(noise), "--model", str(tmp_path / "m.npz"), "--ranks", "2", "--batch", "150", *rate]
    done = CliRunner().invoke(make_app(), asked, env={"COLUMNS": "200"})
    status, said = done.exit_code, " ".join(done.output.split())
    assert status == 0, said
    assert "the model is worse than one without weights (objective " in said
    assert f"without weights 0.69): try a lower --learning-rate than {rate[-1]}, or leave it out" in re.sub(
        r"(0\.69)\d+\)", r"\1)", said
    )
    assert "give more --epochs" not in said


def test_last_fall() -> None:
    assert last_fall([2.0, 1.0]) == 0.5
    assert last_fall([9.0, 2.0, 2.0, 1.0, 1.0]) == pytest.approx(0.25)  # two epochs later
    assert last_fall([100.0] * 20 + [10.0] * 10 + [5.0] * 10) == pytest.approx(0.05)
    assert last_fall([0.999**epoch for epoch in range(100)]) == pytest.approx(0.001, rel=0.02)
    assert last_fall([1.0, 0.0, 0.0, 0.0, 0.0]) == 0
    assert last_fall([1.0, 2.0]) == 0
    uneven = np.random.default_rng(0).normal(10, 1, (500, 40))
    assert sum(last_fall(losses.tolist()) > 0 for losses in uneven) <= 3  # of 500 that do not fall
