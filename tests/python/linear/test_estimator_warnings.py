"""Arguments and rows that estimators refuse, and warnings with remedies."""

from __future__ import annotations

import functools
import math
import re
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from estimator_ranks import among, data
from scipy import sparse
from scipy.optimize import linprog
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer
from sklearn.exceptions import ConvergenceWarning
from sklearn.preprocessing import normalize
from sklearn.utils.estimator_checks import check_estimator

from telegrad import Communicator
from telegrad.linear import LinearSVC, LogisticRegression


def hinge_of(fitted: Any, x: Any, y: Any) -> float:
    scores = np.where(y, 1, -1) * (x @ fitted.coef_[0].astype(np.float64) + fitted.intercept_)
    return float(np.maximum(0, 1 - scores).mean())


@functools.cache
def least_hinge() -> tuple[Any, Any, float]:
    """Rows of two classes that overlap, and the least mean hinge of any model, by a linear program."""
    random = np.random.default_rng(0)
    x = random.normal(size=(300, 5))
    y = x[:, 0] + random.normal(size=300) > 0
    signs = np.where(y, 1.0, -1.0)[:, None]
    short = np.hstack([-signs * x, -signs, -np.eye(300)])
    costs = np.append(np.zeros(6), np.full(300, 1 / 300))
    bounds = [(None, None)] * 6 + [(0, None)] * 300
    return x, y, float(linprog(costs, A_ub=short, b_ub=-np.ones(300), bounds=bounds).fun)


@pytest.mark.parametrize("options", [{}, {"optimizer": "dual"}, {"C": 1.7e308}], ids=str)
def test_a_hinge_without_penalty_is_refused_but_by_first_order_optimizers(options: dict[str, Any]) -> None:
    x, y, best = least_hinge()
    own = LinearSVC(**{"loss": "hinge", "C": math.inf, **options})
    said = re.escape(f"C={own.C} is not for loss='hinge' with optimizer='{own.optimizer}'")
    with pytest.raises(ValueError, match=said + ".*: use a large number such as 1e6, loss='squared_hinge', or optim"):
        own.fit(x, y)
    assert hinge_of(own.set_params(C=1e6).fit(x, y), x, y) == pytest.approx(best, rel=1e-3)
    own.set_params(C=math.inf, optimizer="auto").partial_fit(x, y)


def test_a_squared_hinge_without_penalty_takes_newton_s_steps() -> None:
    random = np.random.default_rng(0)
    x, y = random.normal(size=(1000, 200)), random.random(1000) < 0.5
    with pytest.raises(ValueError, match="C=inf is not for loss='squared_hinge' with optimizer='dual'.*'newton'"):
        LinearSVC(C=math.inf, optimizer="dual").fit(x, y)
    own, newton = LinearSVC(C=math.inf).fit(x, y), LinearSVC(C=math.inf, optimizer="newton").fit(x, y)
    assert own.coef_.tobytes() == newton.coef_.tobytes()
    large = LinearSVC(C=1e9).fit(x, y)
    np.testing.assert_allclose(large.decision_function(x), own.decision_function(x), atol=0.05)


@pytest.mark.parametrize("estimator", [LinearSVC(), LinearSVC(loss="hinge"), LogisticRegression()])
def test_fits_without_a_random_state_have_the_same_bits(estimator: Any) -> None:
    random = np.random.default_rng(0)
    x = sparse.random(300, 900, 0.05, format="csr", random_state=1)
    y = random.random(300) < 0.5
    one, other = (clone(estimator).fit(x, y).coef_ for _ in range(2))
    assert one.tobytes() == other.tobytes()


def test_what_float32_weights_lose_with_a_large_c_is_told() -> None:
    """Separable rows: margins lack 1e-8 of 1, which C = 1e6 makes 0.8 % of the objective."""
    x = normalize(sparse.random(300, 2000, 0.02, format="csr", random_state=0, dtype=np.float32))
    y = np.where(np.random.default_rng(0).random(300) < 0.5, 1, -1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConvergenceWarning)
        fitted = LinearSVC(loss="hinge", C=1e6, fit_intercept=False).fit(x, y)
        best = LinearSVC(loss="hinge", C=1e4, fit_intercept=False, tol=1e-6).fit(x, y)

    def reached(w: Any, times: float = 1.0) -> float:
        w = w.astype(np.float64).ravel() * times
        return float(1e6 * np.maximum(0, 1 - y * (x.astype(np.float64) @ w)).sum() + w @ w / 2)

    least = 1 / (y * (x.astype(np.float64) @ best.coef_.ravel().astype(np.float64))).min()
    above = reached(fitted.coef_) / reached(best.coef_, least * (1 + 1e-12)) - 1
    told = [float(re.search(r"may be ([0-9.]+) % above", str(one.message))[1]) for one in caught]  # type: ignore[index]
    assert above <= 1e-3 or max(told, default=0) / 100 >= above / 1.1
    assert "rounding ended the training" in str(caught[0].message)  # within tol in float64: a smaller one gains nothing
    assert "give a smaller one" not in str(caught[0].message)


def test_no_penalty_of_the_hinge_names_a_remedy_that_is_one() -> None:
    with pytest.raises(ValueError, match="penalty=None must be 'l2' for loss='hinge': a large C such as 1e6") as raised:
        LinearSVC(loss="hinge", penalty=None).fit(*data())
    assert "inf" not in str(raised.value)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("scale", [1.0, 1e-4, [1e3, 1, 1, 1, 1], [1, 1e6, 1, 1, 1]], ids=str)
@pytest.mark.parametrize("options", [{"optimizer": "adagrad"}, {"optimizer": "sgd"}, {"batch": 20}], ids=str)
def test_a_hinge_without_penalty_is_judged_by_its_optimum(options: dict[str, Any], scale: Any, ranks: int) -> None:
    x, y, best = least_hinge()
    x = x * scale
    own = LinearSVC(loss="hinge", C=math.inf, random_state=0, **options)
    parts = [(x[rank::ranks], y[rank::ranks]) for rank in range(ranks)]
    found: list[Any] = []
    said = told(lambda: found.extend(among(parts, lambda comm: clone(own).set_params(comm=comm))))
    if isinstance(found[0], str):
        assert "diverges" in found[0]
        return
    reached = hinge_of(found[0], x, y)
    assert reached > (1 + 1e-3) * best, "else nothing is shown"
    above = [float(one) for one in re.findall(r"may be ([\d.,e+]+) % above", said[0])]
    if above:
        assert above[0] == pytest.approx(100 * (reached / best - 1), rel=0.02)
    else:
        assert "no better than a model without weights" in said[0]


def test_a_hinge_without_penalty_that_is_near_the_optimum_is_not_warned_of() -> None:
    x, y, best = least_hinge()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        own = LinearSVC(loss="hinge", C=math.inf, optimizer="adagrad", max_iter=400, batch=20, random_state=0)
        own.fit(x, y)
    assert hinge_of(own, x, y) <= (1 + 1e-3) * best


def mean_loss(own: Any, x: Any, y: Any) -> float:
    scores = np.where(y, 1, -1) * (x @ own.coef_[0].astype(np.float64) + own.intercept_)
    losses = np.logaddexp(0, -scores) if isinstance(own, LogisticRegression) else np.maximum(0, 1 - scores) ** 2
    return float(losses.mean())


def told(call: Callable[[], Any]) -> list[str]:
    """Texts of the ``ConvergenceWarning``."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        call()
    return [str(one.message) for one in said if one.category is ConvergenceWarning]


@pytest.mark.parametrize(("make", "at_zero"), [(LogisticRegression, math.log(2)), (LinearSVC, 1.0)])
def test_parts_that_are_told_worse_than_by_zero_weights_are_warned_of(make: Any, at_zero: float) -> None:
    x, y = load_breast_cancer(return_X_y=True)
    worse = 0
    for seed in range(5):
        own = make(random_state=seed)
        for _ in range(10):
            said = told(lambda: own.partial_fit(x, y, classes=[0, 1]))  # noqa: B023
            if mean_loss(own, x, y) > (1 + 1e-3) * at_zero:
                worse += 1
                assert len(said) == 1
                assert f"a mean loss above that of zero weights, {at_zero:.4g}: scale X" in said[0]
            else:
                assert said == []
    assert worse >= 3, "else nothing is shown"
    scaled = (x - x.mean(0)) / x.std(0)
    own = make(random_state=0)
    for _ in range(3):
        assert told(lambda: own.partial_fit(scaled, y, classes=[0, 1])) == []


@pytest.mark.parametrize("rows_a_call", [1, 5, 20])
def test_small_parts_of_unscaled_rows_are_warned_of_and_scaled_ones_not(rows_a_call: int) -> None:
    x, y = load_breast_cancer(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(y))
    shares = []
    for features in (x, (x - x.mean(0)) / x.std(0)):
        own, worse, warned = LogisticRegression(random_state=0), 0, 0
        for first in range(0, len(y), rows_a_call):
            chosen = order[first : first + rows_a_call]
            said = told(lambda: own.partial_fit(features[chosen], y[chosen], classes=[0, 1]))  # noqa: B023
            is_worse = mean_loss(own, features, y) > math.log(2)
            worse += is_worse
            warned += is_worse and bool(said)
            assert not said or features is x
        shares.append((worse, warned))
    assert shares[0][0] > 10
    assert shares[0][1] > 0.9 * shares[0][0]
    assert shares[1] == (0, 0)


def test_a_learning_rate_of_parts_is_told_to_be_lower_and_ranks_warn_alike() -> None:
    x, y = load_breast_cancer(return_X_y=True)
    own = LogisticRegression(optimizer="adagrad", learning_rate=0.2, random_state=0)
    assert told(lambda: own.partial_fit(x, y, classes=[0, 1]))[0].endswith("scale X, or use a lower learning_rate")
    comms = Communicator.local(2, timeout_s=60)

    def run(rank: int) -> Any:
        with comms[rank]:
            own = LogisticRegression(comm=comms[rank], random_state=0)
            return own.partial_fit(x[rank::2], y[rank::2], classes=[0, 1])._recent

    with warnings.catch_warnings(), ThreadPoolExecutor(2) as pool:
        warnings.simplefilter("ignore")
        first, second = pool.map(run, range(2))
    np.testing.assert_array_equal(first, second)
    assert first.max() > 1


def test_losses_of_parts_are_forgotten_by_fit() -> None:
    x, y = data(3)
    own = LinearSVC(random_state=0)
    assert told(lambda: own.partial_fit(x[:50] * 1e9, y[:50], classes=[0, 1, 2]))
    assert own._recent.shape == (3, 2)
    x, y = data(4)
    own.fit(x, y)
    assert told(lambda: own.partial_fit(x[:50], y[:50])) == []
    assert own._recent.shape == (4, 2)


_PARTS = ["check_estimators_partial_fit_n_features", "check_fit_score_takes_y", "check_n_features_in_after_fitting"]


@pytest.mark.parametrize(
    "own",
    [
        LogisticRegression(class_weight="balanced"),
        LinearSVC(class_weight="balanced"),
        LogisticRegression(optimizer="newton"),
        LinearSVC(loss="hinge", optimizer="dual"),
    ],
    ids=str,
)
def test_scikit_learn_s_checks_of_what_partial_fit_refuses(own: Any) -> None:
    expected = dict.fromkeys(_PARTS, "partial_fit refuses it, as the docstring says")
    found = check_estimator(own, expected_failed_checks=expected, on_fail=None, on_skip=None)
    assert [(one["check_name"], one["exception"]) for one in found if one["status"] == "failed"] == []
    assert {one["check_name"] for one in found if one["status"] == "xfail"} == set(_PARTS)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_iter": 1}, "^max_iter=1 ended the training, .*: give more, or scale X$"),
        ({"max_iter": 1, "optimizer": "sgd"}, "^max_iter=1 ended .*: give more, another learning_rate, or scale X$"),
        ({"tol": 0.5}, "^tol=0.5 ended the training, .*: give a smaller one, or scale X$"),
    ],
    ids=["newton", "sgd", "tol"],
)
def test_a_remedy_is_one_of_the_optimizer_that_ended(options: dict[str, Any], said: str) -> None:
    x, y = data()
    assert re.search(said, told(lambda: LogisticRegression(C=1e4, **options).fit(x, y))[0])


@pytest.mark.parametrize(
    ("own", "said"),
    [
        (LinearSVC(optimizer="adagrad"), "diverges with learning_rate=None, which is 0.1: scale X$"),
        (LinearSVC(optimizer="adagrad", learning_rate=0.2), "^learning_rate=0.2 diverges: use a smaller one, or None$"),
    ],
    ids=["default", "given"],
)
def test_a_divergence_names_a_remedy_of_its_optimizer(own: Any, said: str) -> None:
    x, y = data()
    with pytest.raises(ValueError, match=said):
        own.fit(x * 1e6, y)


def test_classes_without_an_order_are_told_with_their_types() -> None:
    x, y = data()
    mixed = np.array([1, "b"], object)[y]
    wanted = "y has values of types int and str, which have no order: make all text, or all numbers"
    for call in (LogisticRegression().fit, functools.partial(LogisticRegression().partial_fit, classes=[0, 1])):
        with pytest.raises(TypeError, match=wanted):
            call(x, mixed)
    with pytest.raises(TypeError, match="classes has values of types int and str"):
        LinearSVC().partial_fit(x, y, classes=np.array([1, "b"], object))
    said = among([(x, y), (x, mixed)], lambda comm: LinearSVC(comm=comm))
    assert said == [f"rank 1: {wanted}", wanted]
    text = np.array(["a", "b"])[y]
    said = among([(x, y), (x, text)], lambda comm: LogisticRegression(comm=comm))
    assert said == ["y has text on rank 1 and numbers on rank 0: give all ranks the same"] * 2
    said = among([(x, text), (x, text), (x, y)], lambda comm: LogisticRegression(comm=comm))
    assert said == ["y has numbers on rank 2 and text on rank 0: give all ranks the same"] * 3
    said = among([(x, y), (x, y.astype("datetime64[D]"))], lambda comm: LogisticRegression(comm=comm))
    assert said[1] == "y has a date, which no rank can tell others: give text or numbers"


def test_partial_fit_refuses_weights_with_a_remedy() -> None:
    x, y = data()
    with pytest.raises(ValueError, match="sample_weight is not for partial_fit, whose .* know no weights: use fit, or"):
        LogisticRegression().partial_fit(x, y, [0, 1], np.ones(400))
    with pytest.raises(ValueError, match="class_weight={1: 2} is not for partial_fit, .*: use fit, or None"):
        LinearSVC(class_weight={1: 2}).partial_fit(x, y, classes=[0, 1])


@pytest.mark.parametrize("make", [LogisticRegression, LinearSVC, functools.partial(LinearSVC, loss="hinge")])
def test_one_class_with_weights_is_refused_and_a_third_one_without_costs_nothing(make: Any) -> None:
    x, y = data()
    said = "y has 1 class, 1, with weights above 0: at least two are needed"
    with pytest.raises(ValueError, match=said):
        make().fit(x, y, sample_weight=y)
    with pytest.raises(ValueError, match=said):
        make(class_weight={0: 0}).fit(x, y)
    # classes are counted among all ranks
    halves = [(x[y == 0], y[y == 0]), (x[y == 1], y[y == 1])]
    assert among(halves, lambda comm: make(comm=comm, class_weight={0: 0})) == [said] * 2
    of_three = np.where(np.arange(400) < 40, 2, y)
    own, other = make(), make()
    if make is LogisticRegression:
        own, other = make(multi_class="ovr"), make(multi_class="ovr")
    assert told(lambda: own.fit(x, of_three, sample_weight=of_three != 2)) == []
    assert np.max(own.n_iter_) < 100
    other.fit(x[40:], y[40:])
    np.testing.assert_allclose(own.coef_[1], other.coef_[0], atol=2e-3)
    assert 2 not in own.predict(x)
