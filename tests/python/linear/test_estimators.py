"""scikit-learn's view of the linear models: its checks, its optimum, one rank or several."""

from __future__ import annotations

import functools
import itertools
import math
import pickle
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import sklearn.linear_model
import sklearn.svm
from estimator_ranks import among, data
from scipy import sparse
from scipy.optimize import minimize
from scipy.special import logsumexp
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_digits, load_wine
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.estimator_checks import check_estimator

from telegrad import Communicator
from telegrad.linear import LinearModel, LinearSVC, LogisticRegression, Ridge, Rows, TrainingSettings, estimators
from telegrad.linear.model import State
from telegrad.linear.problem import Problem
from telegrad.linear.training import objective, train_further, train_softmax

ESTIMATORS: dict[str, Callable[..., Any]] = {"logistic": LogisticRegression, "svc": LinearSVC, "ridge": Ridge}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_scikit_learn_s_checks(name: str) -> None:
    """Two may be skipped where pandas and SCIPY_ARRAY_API are missing."""
    found = check_estimator(ESTIMATORS[name](), on_fail=None, on_skip=None)
    assert len(found) > 45
    assert [(one["check_name"], one["exception"]) for one in found if one["status"] in ("failed", "xfail")] == []
    skipped = {one["check_name"] for one in found if one["status"] == "skipped"}
    assert skipped <= {
        "check_array_api_input",
        "check_sample_weights_pandas_series",
        "check_classifier_data_not_an_array",
        "check_regressor_data_not_an_array",
    }


def loss_of(coefficients: Any, intercept: Any, x: Any, y: Any, c: float) -> float:
    scores = x @ np.ravel(coefficients) + intercept
    mean = np.logaddexp(0, -np.where(y == 1, 1, -1) * scores).mean()
    return float(mean + (np.ravel(coefficients) ** 2).sum() / (2 * c * len(y)))


def test_its_optimum_is_that_of_scikit_learn_s() -> None:
    x, y = data()
    settings: dict[str, Any] = {"max_iter": 200, "batch": 50, "learning_rate": 0.5, "decay": 0.01, "random_state": 0}
    other = sklearn.linear_model.LogisticRegression(C=0.5, tol=1e-9, max_iter=1000).fit(x, y)
    for own in (LogisticRegression(C=0.5), LogisticRegression(C=0.5, **settings)):
        own.fit(x, y)
        best, found = (loss_of(one.coef_, one.intercept_, x, y, 0.5) for one in (other, own))
        assert best * (1 - 1e-6) <= found <= best * (1 + 1e-3)
        assert np.abs(own.predict_proba(x) - other.predict_proba(x)).max() < 0.02
        assert own.predict_log_proba(x) == pytest.approx(np.log(own.predict_proba(x)))
    assert own.n_iter_ == 200
    assert LogisticRegression().fit(x, y).n_iter_ < 20


def balanced(x: Any, y: Any, weight: Any) -> Any:
    other = sklearn.linear_model.LogisticRegression(class_weight=weight, tol=1e-10, solver="newton-cholesky")
    return other.fit(x, y)


@pytest.mark.parametrize("weight", ["balanced", {1: 3.0}, {0: 0.5, 1: 2.0}], ids=["balanced", "one", "both"])
def test_weights_of_classes_are_those_of_scikit_learn(weight: Any) -> None:
    x, y = data()
    x, y = x[100:], np.where(np.arange(300) < 200, 0, y[100:])
    own = LogisticRegression(class_weight=weight, tol=1e-8).fit(x, y)
    np.testing.assert_allclose(own.coef_, balanced(x, y, weight).coef_, atol=1e-3)
    parts = [(x[:50], y[:50]), (x[50:], y[50:])]
    for one in among(parts, lambda comm: LogisticRegression(class_weight=weight, tol=1e-8, comm=comm)):
        np.testing.assert_allclose(one.coef_, own.coef_, atol=1e-4)


@pytest.mark.parametrize("optimizer", ["newton", "auto"])
def test_sample_weights_are_those_of_scikit_learn(optimizer: str) -> None:
    x, y = data()
    weights = np.random.default_rng(0).random(400)
    own = LogisticRegression(optimizer=optimizer, tol=1e-8).fit(x, y, sample_weight=weights)
    other = sklearn.linear_model.LogisticRegression(tol=1e-9, max_iter=1000).fit(x, y, sample_weight=weights)
    np.testing.assert_allclose(own.coef_, other.coef_, atol=1e-3)
    ridge = Ridge(tol=1e-10).fit(x, y * 3.0, sample_weight=weights)
    expected = sklearn.linear_model.Ridge(tol=1e-12).fit(x, y * 3.0, sample_weight=weights)
    np.testing.assert_allclose(ridge.coef_, expected.coef_, atol=1e-4)
    with pytest.raises(ValueError, match="rows have weights, which optimizer='sgd' does not know"):
        LogisticRegression(optimizer="sgd").fit(x, y, sample_weight=weights)
    with pytest.raises(ValueError, match="Negative values"):
        LogisticRegression().fit(x, y, sample_weight=-weights)


def test_a_coarse_tol_is_named_by_the_warning() -> None:
    x, y = data()
    with pytest.warns(ConvergenceWarning, match="tol=0.5 ended the training, and .* give a smaller one, or scale X"):
        LinearSVC(loss="hinge", tol=0.5).fit(x, y)
    unused = LogisticRegression(class_weight={**dict.fromkeys(np.unique(y).tolist(), 1.0), 99: 3.0})
    unused.fit(x, y)  # all classes have a weight


@pytest.mark.parametrize("is_dense", [False, True])
@pytest.mark.parametrize("loss", ["hinge", "squared_hinge"])
def test_a_scaled_intercept_is_regularised_as_liblinear_s(loss: str, is_dense: bool) -> None:
    x, y = data()
    x = sparse.csr_matrix(x)
    x = x.toarray() if is_dense else x
    own = LinearSVC(loss=loss, C=0.1, intercept_scaling=2.0, tol=1e-6).fit(x, y)
    other = sklearn.svm.LinearSVC(loss=loss, C=0.1, intercept_scaling=2.0, tol=1e-8, max_iter=100_000).fit(x, y)
    np.testing.assert_allclose(own.coef_, other.coef_, atol=2e-3)
    np.testing.assert_allclose(own.intercept_, other.intercept_, atol=2e-3)


def _hinge(fitted: Any, x: Any, y: Any, c: float) -> float:
    weights = fitted.coef_[0].astype(np.float64)
    return float(weights @ weights / 2 + c * np.maximum(0, 1 - y * (x @ weights + fitted.intercept_[0])).sum())


@pytest.mark.parametrize("c", [0.01, 1.0, 100.0])
@pytest.mark.parametrize("offset", [0.0, 10.0, 100.0, -1000.0])
def test_a_hinge_with_a_bias_finds_the_optimum_of_columns_far_from_zero(offset: float, c: float) -> None:
    """An offset of a column moves the bias alone."""
    numbers = np.random.default_rng(0)
    x, noise = numbers.standard_normal((600, 30)), 2 * numbers.standard_normal(600)
    y = np.where(x @ numbers.standard_normal(30) + noise > 0, 1, -1)
    best = sklearn.svm.SVC(kernel="linear", C=c, tol=1e-6).fit(x, y)
    own = LinearSVC(loss="hinge", C=c).fit(x + offset, y)
    assert _hinge(own, x + offset, y, c) <= (1 + 2e-4) * _hinge(best, x, y, c)


def test_a_hinge_with_a_bias_of_six_rows_far_from_zero() -> None:
    x, y = np.array([[99.8], [100.1], [98.9], [98.5], [99.9], [100.1]]), np.array([1, 1, -1, -1, -1, 1])
    best = sklearn.svm.SVC(kernel="linear", C=1.0, tol=1e-8).fit(x - 100, y)
    own = LinearSVC(loss="hinge").fit(x, y)
    assert _hinge(own, x, y, 1.0) <= (1 + 2e-4) * _hinge(best, x - 100, y, 1.0)


def test_what_rounding_has_ended_is_said_to_need_scaling() -> None:
    x, y = load_wine(return_X_y=True)
    with pytest.warns(ConvergenceWarning, match="^rounding ended the training, and .* more than 0.1 %: scale X$"):
        LinearSVC(loss="hinge", C=100.0, tol=1e-15).fit(x * 1e6, y == 2)


def test_a_fit_that_max_iter_ends_warns_however_low_the_estimate_of_its_gap() -> None:
    x, y = data()
    last = ""
    for steps in range(1, 20):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            LogisticRegression(max_iter=steps, tol=1e-9).fit(x, y)
        if not said:
            break  # tol ended it
        last = str(said[0].message)
        assert f"max_iter={steps} ended the training" in last
    assert "before tol=1e-09: give more, or scale X" in last


def test_the_optimum_of_ridge() -> None:
    x, _ = data()
    settings: dict[str, Any] = {"max_iter": 300, "batch": 50, "learning_rate": 0.05, "decay": 0.01, "random_state": 0}
    number = x @ np.arange(20.0) + 3 + 5 * np.random.default_rng(0).standard_normal(400)
    own, other = (
        Ridge(alpha=2.0, **settings).fit(x, number),
        sklearn.linear_model.Ridge(alpha=2.0, tol=1e-12).fit(x, number),
    )
    best, found = (((one.predict(x) - number) ** 2).sum() + 2 * (one.coef_**2).sum() for one in (other, own))
    assert best * (1 - 1e-5) <= found <= best * (1 + 1e-3)


def of_machine(loss: str, coefficients: Any, intercept: Any, x: Any, y: Any, c: float) -> float:
    short = np.maximum(0, 1 - np.where(y == 1, 1, -1) * (x @ np.ravel(coefficients) + intercept))
    mean = (short if loss == "hinge" else short**2).mean()
    return float(mean + (np.ravel(coefficients) ** 2).sum() / (2 * c * len(y)))


@pytest.mark.parametrize("loss", ["hinge", "squared_hinge"])
def test_the_optimum_of_a_machine_whose_intercept_is_not_regularised(loss: str) -> None:
    """The hinge's by libsvm, whose intercept is not either, and its square's, which is smooth, by scipy."""
    x, y = data()
    c = 0.05
    if loss == "hinge":
        other = sklearn.svm.SVC(kernel="linear", C=c, tol=1e-8).fit(x, y)
        best = of_machine(loss, other.coef_.toarray(), other.intercept_[0], x, y, c)
    else:
        signs = np.where(y == 1, 1, -1)

        def value(z: Any) -> tuple[float, Any]:
            slopes = -2 * signs * np.maximum(0, 1 - signs * (x @ z[:-1] + z[-1])) / len(y)
            gradient = np.append(x.T @ slopes + z[:-1] / (c * len(y)), slopes.sum())
            return of_machine(loss, z[:-1], z[-1], x, y, c), gradient

        best = minimize(value, np.zeros(21), jac=True, method="L-BFGS-B", options={"ftol": 1e-14, "gtol": 1e-9}).fun
    settings: dict[str, Any] = {"max_iter": 300, "batch": 50, "learning_rate": 0.05, "decay": 0.01, "random_state": 0}
    own = LinearSVC(loss=loss, C=c, **settings).fit(x, y)
    found = of_machine(loss, own.coef_, own.intercept_[0], x, y, c)
    assert best * (1 - 1e-5) <= found <= best * (1 + 1e-3)


@pytest.mark.parametrize("wrong", ["y", "error"])
def test_whatever_is_wrong_on_one_rank_is_raised_on_all(wrong: str) -> None:
    class Unreadable:
        def __array__(self, *arguments: Any, **options: Any) -> Any:
            raise RuntimeError("no such column")

    x, _ = data()
    numbers = x @ np.arange(20.0)
    large = np.where(np.arange(400) == 7, 1e40, numbers)
    bad = (x, large) if wrong == "y" else (Unreadable(), numbers)
    said = among([(x, numbers), bad], lambda comm: Ridge(comm=comm, max_iter=1))
    expected = "y has numbers that float32 cannot hold: scale or remove them" if wrong == "y" else "no such column"
    assert said == [f"rank 1: {expected}", expected]


def test_classes_that_cannot_be_told_to_others_are_raised_on_all() -> None:
    x, y = data()
    said = among([(x, y), (x, y.astype("datetime64[D]"))], lambda comm: LogisticRegression(comm=comm, max_iter=1))
    assert said[0] == f"rank 1: {said[1]}"


def test_a_default_rate_is_safe_with_one_long_row() -> None:
    x = data()[0].toarray()
    x[7] *= 300
    with pytest.warns(ConvergenceWarning):
        own = Ridge(batch=10, max_iter=50, random_state=0).fit(x, x @ np.arange(20.0))
    assert np.isfinite(own.coef_).all()
    assert own.score(x, x @ np.arange(20.0)) > 0.9


def test_divergence_is_raised_though_all_is_finite() -> None:
    x, y = data()
    with pytest.raises(ValueError, match=re.escape("learning_rate=0.5 diverges: use a smaller one, or None")):
        Ridge(learning_rate=0.5, batch=400, max_iter=8).fit(x, y)
    assert np.isfinite(Ridge(batch=400, max_iter=8).fit(x, y).coef_).all()
    with pytest.raises(ValueError, match="diverges with learning_rate=None, which is safe but for rounding: scale X"):
        Ridge(max_iter=1, batch=4).fit(np.full((4, 2), 1e30), np.array([1e38, 1, 2, 3]))


def test_several_classes_are_one_against_the_rest() -> None:
    x, y = data(3)
    names = np.array(["low", "middle", "high"])[y]
    own = LogisticRegression(max_iter=50, learning_rate=0.3, decay=0.01, random_state=0).fit(x, names)
    assert own.classes_.tolist() == ["high", "low", "middle"]
    assert own.coef_.shape == (3, 20)
    assert own.predict_proba(x).sum(axis=1) == pytest.approx(1)
    alone = LogisticRegression(max_iter=50, learning_rate=0.3, decay=0.01, random_state=0).fit(x, names == "low")
    assert np.array_equal(own.coef_[1], alone.coef_[0])
    assert (own.predict(x) == names).mean() > 0.55


@pytest.mark.parametrize("is_scaled", [False, True])
def test_a_softmax_s_optimum_is_that_of_scikit_learn(is_scaled: bool) -> None:
    found = load_digits() if is_scaled else load_wine()
    x, y = found.data / (16.0 if is_scaled else 1.0), found.target
    classes, c = np.unique(y), 0.7

    def value(fitted: Any) -> float:
        scores = x @ fitted.coef_.T + fitted.intercept_
        losses = logsumexp(scores, axis=1) - scores[np.arange(len(y)), y]
        return float(losses.mean() + (fitted.coef_**2).sum() / (2 * c * len(y)))

    own = LogisticRegression(C=c).fit(x, y)
    other = sklearn.linear_model.LogisticRegression(C=c, solver="newton-cholesky", tol=1e-10, max_iter=1000).fit(x, y)
    assert value(own) == pytest.approx(value(other), rel=1e-4)
    assert own.coef_.shape == (classes.size, x.shape[1])
    np.testing.assert_allclose(own.predict_proba(x), other.predict_proba(x), atol=0.03)
    np.testing.assert_allclose(own.predict_proba(x).sum(axis=1), 1)
    exact = LogisticRegression(C=c, tol=1e-9, multi_class="multinomial").fit(x, y)
    np.testing.assert_allclose(exact.predict_proba(x), other.predict_proba(x), atol=1e-4)
    assert exact.intercept_.sum() == pytest.approx(0, abs=1e-8)
    assert not np.allclose(LogisticRegression(C=c, multi_class="ovr").fit(x, y).predict_proba(x), own.predict_proba(x))


@pytest.mark.parametrize("options", [{}, {"fit_intercept": False}, {"intercept_scaling": 2.0}], ids=str)
def test_any_number_of_ranks_fits_the_same_bits(options: dict[str, Any]) -> None:
    x, y = data(3)
    made: list[tuple[Callable[..., Any], Any]] = [
        (LogisticRegression, y),
        (LinearSVC, y == 1),
        (functools.partial(LinearSVC, loss="hinge"), y == 1),
    ]
    weights = np.random.default_rng(0).random(400) if not options else None
    for make, targets in made:
        alone = make(**options).fit(x, targets)
        for ranks in (2, 3, 5):
            borders = [400 * rank // ranks for rank in range(ranks + 1)]
            parts = [(x[a:b], targets[a:b]) for a, b in itertools.pairwise(borders)]
            for one in among(parts, lambda comm: make(comm=comm, **options)):  # noqa: B023
                assert np.array_equal(one.coef_, alone.coef_)
                assert np.array_equal(one.intercept_, alone.intercept_)
        if weights is not None:
            weighted = make().fit(x, targets, sample_weight=weights)
            assert not np.array_equal(weighted.coef_, alone.coef_)


@pytest.mark.parametrize("make", [LogisticRegression, LinearSVC])
@pytest.mark.parametrize("classes", [2, 3])
def test_parts_of_the_rows_lead_to_nearly_the_optimum(make: Any, classes: int) -> None:
    x, y = data(classes)
    best = make(**({"multi_class": "ovr"} if make is LogisticRegression else {})).fit(x, y)
    own = make(batch=20, optimizer="adagrad", random_state=0)
    scores = []
    for _ in range(40):
        for first in range(0, 400, 100):
            own.partial_fit(x[first : first + 100], y[first : first + 100], classes=np.unique(y))
        scores.append(own.score(x, y))
    assert own.n_iter_ == 160
    assert scores[-1] >= best.score(x, y) - 0.02
    assert own.decision_function(x) == pytest.approx(best.decision_function(x), abs=0.5)
    again = pickle.loads(pickle.dumps(own)).partial_fit(x, y)
    assert np.array_equal(again.coef_, own.partial_fit(x, y).coef_)
    assert np.all(own.fit(x, y).n_iter_ < 100)
    assert own.partial_fit(x, y).n_iter_ == 1


def test_features_that_a_part_lacks_keep_their_weights() -> None:
    x, y = data()
    own = LogisticRegression(C=1e9).partial_fit(x, y, classes=[0, 1])
    before = own.coef_.copy()
    few = x.toarray()
    few[:, 5:] = 0
    own.partial_fit(sparse.csr_array(few), y)
    assert own.coef_[0, 5:] == pytest.approx(before[0, 5:], abs=1e-6)
    assert (np.abs(own.coef_[0, :5] - before[0, :5]) > 1e-4).all()


@pytest.mark.parametrize("scaling", [None, 2.0])
def test_parts_go_on_from_a_fit_and_scaled_intercepts(scaling: float | None) -> None:
    x, y = data()
    own = LogisticRegression(C=10.0, intercept_scaling=scaling, optimizer="auto", random_state=0).fit(x, y)
    before, intercept = own.coef_.copy(), own.intercept_.copy()
    own.set_params(optimizer="sgd", learning_rate=1e-9).partial_fit(x, y)
    assert own.coef_ == pytest.approx(before, abs=1e-5)
    assert own.intercept_ == pytest.approx(intercept, abs=1e-5)
    own.set_params(optimizer="adagrad", learning_rate=0.1).partial_fit(x, y)  # from sums of 0
    assert not np.allclose(own.coef_, before)


def test_all_ranks_fit_one_model_of_parts() -> None:
    x, y = data(3)

    class Parts:
        def __init__(self, comm: Communicator | None) -> None:
            self.own = LogisticRegression(comm=comm, random_state=0, batch=30, optimizer="adagrad")

        def fit(self, x: Any, y: Any) -> Any:
            for _ in range(3):
                self.own.partial_fit(x, y, classes=[0, 1, 2])
            return self.own

    alone = Parts(None).fit(x, y)
    for one in among([(x[:150], y[:150]), (x[150:], y[150:])], Parts):
        assert one.coef_ == pytest.approx(alone.coef_, abs=1e-5)
        assert one.intercept_ == pytest.approx(alone.intercept_, abs=1e-5)


def test_what_cannot_be_a_part() -> None:
    x, y = data()
    for own, classes, said in [
        (LogisticRegression(), None, "classes=None at the first call of partial_fit"),
        (LogisticRegression(), [1], "classes=[1] must be at least two"),
        (LogisticRegression(), [1, 2], "y has 0, which is not in classes=[1, 2]"),
        (LogisticRegression(class_weight="balanced"), [0, 1], "class_weight='balanced' is not for partial_fit"),
        (LinearSVC(optimizer="newton"), [0, 1], "optimizer='newton' is not for partial_fit"),
        (LogisticRegression(multi_class="both"), [0, 1], "multi_class='both' must be 'auto', 'multinomial' or 'ovr'"),
        (
            LogisticRegression(multi_class="multinomial", batch=10),
            [0, 1],
            "multi_class='multinomial' is not for optimizer='sgd'",
        ),
        (LinearSVC(learning_rate=1e30, batch=4), [0, 1], "learning_rate=1e+30 diverges"),
    ]:
        with pytest.raises(ValueError, match=re.escape(said)):
            own.partial_fit(x * 1e9, y, classes=classes)
    own = LogisticRegression().partial_fit(x, y, classes=[0, 1])
    with pytest.raises(ValueError, match=re.escape("classes=[0, 2] differ from those before: [0, 1]")):
        own.partial_fit(x, y, classes=[0, 2])
    with pytest.raises(ValueError, match="X has 7 features"):
        own.partial_fit(x[:, :7], y)

    class Parts:
        def __init__(self, comm: Communicator) -> None:
            self.comm = comm

        def fit(self, x: Any, y: Any) -> Any:
            return LinearSVC(comm=self.comm).partial_fit(x, y, classes=[0, 1, 2 + self.comm.rank])

    said = among([(x, y), (x, y)], Parts)
    assert said == ["classes are [[0, 1, 2], [0, 1, 3]] by rank: give all ranks the same"] * 2


def test_partial_fit_tells_that_it_goes_on_otherwise_after_a_softmax(recwarn: pytest.WarningsRecorder) -> None:
    x, y = load_digits(return_X_y=True)
    own = LogisticRegression().fit(x / 16, y)
    with pytest.warns(UserWarning, match="found a softmax, .*; fit with multi_class='ovr' first"):
        own.partial_fit(x / 16, y)
    own.partial_fit(x / 16, y)  # once
    one_by_one = LogisticRegression(multi_class="ovr").fit(x / 16, y).partial_fit(x / 16, y)
    assert one_by_one.score(x / 16, y) > 0.95
    assert not [one for one in recwarn if "softmax" in str(one.message)]


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_ranks_fit_one_model(world_size: int) -> None:
    x, y = data(3)
    order = np.argsort(y, kind="stable")  # some ranks lack a class
    x, y = x[order], np.array(["a", "bb", "c"])[y[order]]
    settings: dict[str, Any] = {"max_iter": 5, "learning_rate": 0.1, "random_state": 1}
    borders = [400 * rank // world_size for rank in range(world_size + 1)]
    parts = [(x[a:b], y[a:b]) for a, b in itertools.pairwise(borders)]
    fitted = among(parts, lambda comm: LogisticRegression(comm=comm, **settings))
    alone = LogisticRegression(**settings).fit(x, y)
    for one in fitted:
        assert one.classes_.tolist() == ["a", "bb", "c"]
        assert np.array_equal(one.coef_, fitted[0].coef_)
        assert one.coef_ == pytest.approx(alone.coef_, abs=1e-5)
    # Without a number, all ranks take the first one's.
    fitted = among(parts, lambda comm: LogisticRegression(comm=comm, max_iter=2))
    assert all(np.array_equal(one.coef_, fitted[0].coef_) for one in fitted)


@pytest.mark.parametrize("dtype", ["int8", "uint16", ">i4", "int64", "float32", "float64", "bool", "U3", "U9", "O"])
def test_classes_keep_the_dtype_of_y(dtype: str) -> None:
    x, y = data(3)
    y = np.array(["a", "bb", "ccc"] if dtype[0] in "UO" else [0, 1, 7], dtype)[y]
    settings: dict[str, Any] = {"max_iter": 1, "learning_rate": 0.1, "random_state": 0}
    alone = LogisticRegression(**settings).fit(x, y)
    ranks = among([(x, y), (x[:9], y[:9])], lambda comm: LogisticRegression(comm=comm, **settings))
    for one in (alone, *ranks):
        assert one.classes_.dtype == y.dtype
        assert one.classes_.tolist() == np.unique(y).tolist()
        assert one.predict(x).dtype == y.dtype


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [(["a", "b"], ["ccc", "b"], ["a", "b", "ccc"]), ([1, 2], [2.0, 3.0], [1, 2, 3])],
    ids=["text", "numbers"],
)
def test_classes_of_ranks_with_other_dtypes(one: list[Any], other: list[Any], expected: list[Any]) -> None:
    x = np.eye(2)
    for fitted in among([(x, np.array(one)), (x, np.array(other))], lambda comm: LinearSVC(comm=comm, max_iter=1)):
        assert fitted.classes_.tolist() == expected


def test_what_is_wrong_on_one_rank_is_raised_on_all() -> None:
    x, y = data()
    good, bad = (x, y), (x, np.where(y, np.nan, 0.5))
    said = among([good, bad], lambda comm: LogisticRegression(comm=comm, max_iter=1))
    assert said[0].startswith("rank 1: ")
    assert "NaN" in said[1]
    said = among([good, (x[:, :7], y)], lambda comm: Ridge(comm=comm, max_iter=1))
    assert said == ["X has [20, 7] features by rank: give all ranks as many"] * 2
    said = among([good, good], lambda comm: LogisticRegression(comm=comm, C=1.0 + comm.rank, max_iter=1))
    assert said == ["C is 2.0 on rank 1 and 1.0 on rank 0: give all ranks the same"] * 2
    said = among([good, good], lambda comm: Ridge(comm=comm, batch=comm.rank, max_iter=1))
    assert said == ["batch=0 must be at least 1", "rank 0: batch=0 must be at least 1"]
    said = among([(x, np.ones(400)), (x, np.ones(400))], lambda comm: LinearSVC(comm=comm))
    assert said == ["y has 1 class, 1.0: at least two are needed"] * 2


@pytest.mark.parametrize(
    ("estimator", "said"),
    [
        (LogisticRegression(C=0), "C=0 must be above 0"),
        (LinearSVC(loss="log"), "loss='log' must be 'hinge' or 'squared_hinge'"),
        (Ridge(alpha=-1), "alpha=-1 must be finite, 0 or more"),
        (LogisticRegression(C=1e-320), "C=1e-320 is too small"),
        (Ridge(alpha=math.inf), "alpha=inf must be finite, 0 or more"),
        (Ridge(learning_rate=1e6), "learning_rate=1000000.0 diverges"),
        (LogisticRegression(class_weight="even"), "class_weight='even' must be a dict, 'balanced' or None"),
        (LogisticRegression(class_weight={7: 2}), "class_weight has 7, which is no class of y"),
        (LinearSVC(intercept_scaling=0), "intercept_scaling=0 must be above 0, or None"),
        (LogisticRegression(max_iter=0), "max_iter=0 must be an int of at least 1"),
        (LogisticRegression(max_iter=True), "max_iter=True must be an int of at least 1"),
    ],
    ids=[
        *("C", "loss", "alpha", "tiny C", "infinite alpha", "diverges", "class weight", "no class", "intercept"),
        "max_iter",
        "flag as max_iter",
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_arguments_that_cannot_be(estimator: Any, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        estimator.fit(*data())


@pytest.mark.parametrize(
    ("estimator", "said"),
    [
        (LogisticRegression(C="1"), "C='1' must be a number above 0"),
        (Ridge(alpha="1"), "alpha='1' must be a number, 0 or more"),
        (LinearSVC(fit_intercept="no"), "fit_intercept='no' must be True or False"),
        (Ridge(batch=1.5), "batch=1.5 must be an int of at least 1"),
        (Ridge(comm=3), "comm=3 must be a telegrad Communicator, or None"),
    ],
    ids=["C", "alpha", "fit_intercept", "batch", "comm"],
)
def test_arguments_of_another_type(estimator: Any, said: str) -> None:
    with pytest.raises(TypeError, match=re.escape(said)):
        estimator.fit(*data())


def test_clones_share_a_communicator_and_pickles_have_none() -> None:
    (comm,) = Communicator.local(1)
    with comm:
        own = LogisticRegression(C=3.0, comm=comm, max_iter=2)
        assert clone(own).comm is comm
        assert clone(own).C == 3.0
        x, y = data()
        again = pickle.loads(pickle.dumps(own.fit(x, y)))
        assert again.comm is None
        assert own.comm is comm
        assert np.array_equal(again.predict(x), own.predict(x))


def test_the_package_does_not_import_scikit_learn() -> None:
    code = (
        "import sys; sys.modules['sklearn'] = None; import telegrad.linear as linear\n"
        "try: linear.LogisticRegression\n"
        "except ImportError as error: print(error)\n"
        "try: linear.Nothing\n"
        "except AttributeError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "estimators need scikit-learn: pip install 'telegrad[estimators]'" in done.stdout
    assert "has no attribute 'Nothing'" in done.stdout


@pytest.mark.parametrize("make", [LogisticRegression, LinearSVC])
def test_scikit_learn_s_checks_with_an_l1_penalty(make: Callable[..., Any]) -> None:
    found = check_estimator(make(penalty="l1"), on_fail=None, on_skip=None)
    assert [(one["check_name"], one["exception"]) for one in found if one["status"] == "failed"] == []


def test_adagrad_fails_the_checks_of_weights_alone() -> None:
    found = check_estimator(LogisticRegression(optimizer="adagrad"), on_fail=None, on_skip=None)
    failed = {one["check_name"] for one in found if one["status"] == "failed"}
    assert "check_sample_weights_list" in failed
    assert all("weight" in name for name in failed)


def of_l1(x: Any, y: Any, w: Any, c: float) -> float:
    return float(np.logaddexp(0, -np.where(y, 1, -1) * (x @ np.ravel(w))).mean() + np.abs(w).sum() / (c * len(y)))


@pytest.mark.parametrize("name", ["cancer", "scaled cancer", "digits", "text"])
def test_the_optimum_of_l1_is_liblinear_s_or_better(name: str) -> None:
    liblinear = pytest.importorskip("liblinear.liblinearutil", reason="pip install liblinear-official")
    found = load_digits() if name == "digits" else load_breast_cancer()
    x, y = found.data, found.target == (8 if name == "digits" else 1)
    if name == "scaled cancer":
        x = x / x.std(0)
    elif name == "text":
        random = np.random.default_rng(0)
        x = sparse.random_array((2000, 5000), density=0.004, format="csr", rng=random)
        y = x @ random.normal(size=5000) > 0
    x = sparse.csr_matrix(x).astype(np.float32).astype(np.float64)
    own = LogisticRegression(penalty="l1", fit_intercept=False).fit(x, y)
    other = liblinear.train(liblinear.problem(np.where(y, 1, -1), x), liblinear.parameter("-s 6 -c 1 -e 1e-6 -q"))
    weights = np.zeros(x.shape[1])
    weights[: other.nr_feature] = other.w[: other.nr_feature]
    assert of_l1(x, y, own.coef_, 1) <= of_l1(x, y, weights * other.get_labels()[0], 1) * (1 + 1e-5)
    assert 0 < np.count_nonzero(own.coef_) < x.shape[1]
    assert of_l1(x, y, LogisticRegression(l1_ratio=1.0, fit_intercept=False).fit(x, y).coef_, 1) == of_l1(
        x, y, own.coef_, 1
    )


def test_an_elastic_net_is_scikit_learn_s_and_its_classes_are_one_against_the_rest() -> None:
    x, y = data()
    own = LogisticRegression(l1_ratio=0.3, C=0.1, tol=1e-8).fit(x, y)
    other = sklearn.linear_model.LogisticRegression(l1_ratio=0.3, C=0.1, solver="saga", tol=1e-6, max_iter=20_000)
    np.testing.assert_allclose(own.coef_, other.fit(x, y).coef_, atol=1e-3)
    x, y = data(3)
    every = LogisticRegression(penalty="l1").fit(x, y)
    one = LogisticRegression(penalty="l1").fit(x, y == 1)
    np.testing.assert_array_equal(every.coef_[1], one.coef_[0])


@pytest.mark.parametrize(
    ("estimator", "said"),
    [
        (LogisticRegression(penalty="elasticnet"), "penalty='elasticnet' must be 'l2' or 'l1'"),
        (LogisticRegression(l1_ratio=1.5), "l1_ratio=1.5 must be from 0 to 1, or None"),
        (LogisticRegression(penalty="l1", l1_ratio=0.5), "l1_ratio=0.5 is not for penalty='l1'"),
        (LogisticRegression(penalty="l1", multi_class="multinomial"), "multi_class='multinomial' is not for an L1"),
        (LinearSVC(penalty="l1", loss="hinge"), "penalty='l1' is not for loss='hinge'"),
    ],
    ids=["penalty", "ratio", "both", "multinomial", "hinge"],
)
def test_l1_penalties_that_cannot_be(estimator: Any, said: str) -> None:
    x, y = data()
    with pytest.raises(ValueError, match=re.escape(said)):
        estimator.fit(x, y)


@pytest.mark.parametrize("rows_a_call", [20, 569], ids=["parts", "all rows"])
def test_partial_fit_goes_on_near_what_fit_has_found(rows_a_call: int) -> None:
    """From sums of 0 the first 20 rows made the objective 9 times as large."""
    found = load_breast_cancer()
    x = (found.data - found.data.mean(0)) / found.data.std(0)
    y = np.where(found.target, 1, -1)
    own = LogisticRegression(random_state=0).fit(x, y)

    def reached() -> float:
        losses = np.logaddexp(0, -y * own.decision_function(x))
        return float(losses.mean() + (own.coef_**2).sum() / 2 / len(y))

    best = reached()
    order = np.random.default_rng(0).permutation(len(y))
    for first in range(0, len(y), rows_a_call):
        chosen = order[first : first + rows_a_call]
        own.partial_fit(x[chosen], y[chosen])
        assert reached() < 1.5 * best
    assert reached() < 1.1 * best


def test_a_softmax_that_reached_tol_is_not_said_to_have_ended_by_rounding() -> None:
    random = np.random.default_rng(2)
    x = (random.normal(size=(120, 5)) + 3).astype(np.float32)
    y = np.argmax(x[:, :3] + random.normal(size=(120, 3)), 1)
    settings = TrainingSettings(l2=1e-3, tol=1e-3)
    found = train_softmax(Rows.from_csr(sparse.csr_array(x), y), 3, settings)
    assert found.converged
    assert found.gap <= settings.tol
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LogisticRegression(C=1 / (120 * 1e-3), tol=1e-3).fit(x, y)
        LogisticRegression(C=1 / (120 * 1e-3), tol=1e-3, max_iter=found.steps).fit(x, y)


def test_a_pass_without_moves_sums_squares_and_leaves_the_model() -> None:
    random = np.random.default_rng(4)
    x = random.normal(size=(50, 6)).astype(np.float32)
    rows = Rows.from_csr(sparse.csr_array(x), np.where(x[:, 0] > 0, 1, -1))
    settings = TrainingSettings(optimizer="adagrad", learning_rate=0.1, l2=0.1, batch=10, epochs=1)
    begun = State(LinearModel(random.normal(size=6).astype(np.float32), 0.3, "logistic"))
    after, loss = train_further(rows, settings, None, begun, 0, moves=False)
    assert np.array_equal(after.model.weights, begun.model.weights)
    assert after.model.bias == begun.model.bias
    assert loss == pytest.approx(objective(begun.model, rows, 0.0))
    w, y = begun.model.weights.astype(np.float64), np.where(x[:, 0] > 0, 1.0, -1.0)
    slopes = -y / (1 + np.exp(y * (x @ w + 0.3)))
    order = np.concatenate([chosen for chosen, _ in Problem(rows, settings, None, alone=False).share.batches(0, 10)])
    batches = order.astype(int).reshape(5, 10)
    assert sorted(order.tolist()) == list(range(50))
    expected = [np.square((slopes[chosen, None] * x[chosen]).mean(0)) for chosen in batches]
    assert after.squares is not None
    np.testing.assert_allclose(after.squares, np.sum(expected, axis=0), rtol=1e-4)


def test_the_rows_of_fit_count_in_partial_fit_s_penalty(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []
    further = estimators.train_further

    def noting(rows: Any, settings: Any, *others: Any, **also: Any) -> Any:
        seen.append(settings.l2)
        return further(rows, settings, *others, **also)

    monkeypatch.setattr(estimators, "train_further", noting)
    x, y = data(2)
    LogisticRegression(C=2.0).fit(x, y).partial_fit(x[:100], y[:100])
    assert seen == [1 / (2.0 * (len(y) + 100))] * 2


def test_ranks_whose_models_were_fitted_to_other_rows_are_told() -> None:
    x, y = data(2)
    comms = Communicator.local(2, timeout_s=60)

    def run(rank: int) -> None:
        own = LogisticRegression(comm=comms[rank])
        if rank:
            own.set_params(comm=None).fit(x, y).set_params(comm=comms[rank])
        with comms[rank], pytest.raises(ValueError, match=r"rows before are \[0, 400\] by rank"):
            own.partial_fit(x, y, classes=[0, 1])

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, range(2)))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: LogisticRegression(penalty=None), "penalty=None must be .*, and C=math.inf is without any"),
        (lambda: LogisticRegression(penalty="elasticnet"), "'l2' or 'l1': l1_ratio= mixes both"),
        (lambda: LogisticRegression(class_weight={0: -1}), r"class_weight\[0\]=-1 must be a finite number, 0 or more"),
        (lambda: LogisticRegression(class_weight={0: math.nan}), r"class_weight\[0\]=nan must be a finite"),
        (lambda: LogisticRegression(random_state=-1), "random_state=-1 must be an int from 0 to 4294967295"),
        (lambda: LogisticRegression(solver="saga"), "LogisticRegression has no solver='saga': optimizer= chooses"),
        (lambda: LogisticRegression(n_jobs=2), "has no n_jobs=2: give each rank of comm= a part"),
        (lambda: LogisticRegression(warm_start=True), "has no warm_start=True: use partial_fit"),
        (lambda: LinearSVC(dual=True), "LinearSVC has no dual=True: leave it out"),
        (lambda: LinearSVC(multi_class="ovr"), "LinearSVC has no multi_class='ovr': leave it out"),
        (lambda: Ridge(positive=True), "Ridge has no positive=True: use scikit-learn's"),
        (lambda: Ridge(other=True), "unexpected keyword argument 'other'"),
    ],
)
def test_arguments_that_scikit_learn_has(make: Any, said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        make().fit(*data(2))


@pytest.mark.parametrize("kind", [2, 3])
def test_n_iter_has_scikit_learn_s_type(kind: int) -> None:
    x, y = data(kind)
    x = x.toarray()
    for own, other in (
        (LogisticRegression(), sklearn.linear_model.LogisticRegression()),
        (LinearSVC(), sklearn.svm.LinearSVC()),
        (Ridge(), sklearn.linear_model.Ridge(solver="sag")),
    ):
        found, expected = own.fit(x, y).n_iter_, other.fit(x, y).n_iter_
        assert type(found) is type(expected)
        assert np.shape(found) == np.shape(expected)
        assert np.array(found).dtype == np.array(expected).dtype
