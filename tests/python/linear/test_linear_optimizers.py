"""Every optimiser: the optimum that others find, L1 included, the same steps for every number of ranks and threads."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import sparse
from scipy.optimize import minimize

from lab.linear import DenseGather
from telegrad import Communicator, SparseVector
from telegrad.linear import Rows, Trained, TrainingSettings, objective, train
from telegrad.linear.losses import losses_of
from telegrad.linear.optimizers import SparseSum

FEATURES, COUNT, L2 = 60, 600, 0.01

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": "sgd", "learning_rate": 1.0, "decay": 0.005, "epochs": 150, "batch": 50},
    "adagrad": {"optimizer": "adagrad", "learning_rate": 0.3, "epochs": 150, "batch": 50},
    "newton": {"optimizer": "newton"},
}


def rows_of(loss: str, seed: int = 1) -> Rows:
    random = np.random.default_rng(seed)
    matrix = sparse.random(COUNT, FEATURES, 0.1, format="csr", random_state=seed)
    scores = matrix @ random.normal(size=FEATURES) + 0.3 * random.normal(size=COUNT) + 0.2
    return Rows.from_csr(matrix, scores if loss == "squared_error" else np.where(scores > 0, 1, -1))


def train_among(
    rows: Rows, world_size: int, settings: TrainingSettings, aggregation: Any = lambda comm: None
) -> list[Trained]:
    comms = Communicator.local(world_size, timeout_s=60)
    borders = [len(rows) * rank // world_size for rank in range(world_size + 1)]

    def one(rank: int) -> Trained:
        with comms[rank] as comm:
            part = rows.part(borders[rank], borders[rank + 1])
            return train(part, settings, comm, aggregation=aggregation(comm))

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(one, range(world_size)))


def least(loss: str, rows: Rows, l1: float) -> tuple[float, int]:
    """The objective's minimum, and how many weights are 0 there: by scipy, with weights as differences of two positive
    parts, whose sum l1 weighs."""
    matrix, y = rows.to_csr().toarray().astype(np.float64), rows.labels.astype(np.float64)

    def value(z: Any) -> tuple[float, Any]:
        w = z[:FEATURES] - z[FEATURES:-1]
        s = matrix @ w + z[-1]
        slopes = {
            "logistic": lambda: -y / (1 + np.exp(y * s)),
            "squared_error": lambda: s - y,
            "squared_hinge": lambda: -2 * y * np.maximum(0, 1 - y * s),
        }[loss]()
        gradient = matrix.T @ slopes / COUNT + L2 * w
        found = losses_of(loss, s, y).mean() + L2 / 2 * w @ w + l1 * z[:-1].sum()
        return found, np.concatenate([gradient + l1, -gradient + l1, [slopes.mean()]])

    bounds = [(0, None)] * (2 * FEATURES) + [(None, None)]
    options = {"maxiter": 5000, "maxfun": 50_000, "ftol": 1e-14, "gtol": 1e-9}
    found = minimize(value, np.zeros(2 * FEATURES + 1), jac=True, method="L-BFGS-B", bounds=bounds, options=options)
    return float(found.fun), int((found.x[:FEATURES] == found.x[FEATURES:-1]).sum())


@pytest.mark.parametrize("l1", [0.0, 0.002])
@pytest.mark.parametrize("loss", ["logistic", "squared_hinge", "squared_error"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_optimum_is_scipy_s(optimizer: str, loss: str, l1: float) -> None:
    rows = rows_of(loss)
    best, zeros = least(loss, rows, l1)
    model = train(rows, TrainingSettings(loss=loss, l2=L2, l1=l1, **OPTIMIZERS[optimizer])).model
    assert best * (1 - 1e-6) <= objective(model, rows, L2, l1=l1) <= best * (1 + 1e-3)
    if optimizer == "newton":
        assert int((model.weights == 0).sum()) == zeros
        assert (zeros > 0) == (l1 > 0)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_with_l1_alone_the_optimum_is_scikit_learn_s(optimizer: str) -> None:
    from sklearn.linear_model import LogisticRegression

    rows, l1 = rows_of("logistic"), 0.005
    saga = LogisticRegression(C=1 / (l1 * COUNT), l1_ratio=1.0, solver="saga", tol=1e-5, max_iter=20_000)
    saga.fit(rows.to_csr(), rows.labels)
    longer = {"sgd": {"epochs": 300, "learning_rate": 2.0}, "adagrad": {"epochs": 300}}.get(optimizer, {})
    model = train(rows, TrainingSettings(l2=0.0, l1=l1, **{**OPTIMIZERS[optimizer], **longer})).model
    best = replace(model, weights=np.ravel(saga.coef_).astype(np.float32), bias=float(saga.intercept_[0]))
    assert objective(model, rows, 0.0, l1=l1) <= objective(best, rows, 0.0, l1=l1) * (1 + 1e-3)


@pytest.mark.parametrize("l1", [0.0, 0.003])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_ranks_and_threads_take_the_steps_of_one(optimizer: str, l1: float) -> None:
    rows = rows_of("logistic")
    own: dict[str, Any] = {} if optimizer == "newton" else {"batch": 64, "decay": 0.1}
    settings = TrainingSettings(optimizer=optimizer, l2=L2, l1=l1, epochs=3, held_out=0.2, **own)
    alone = train(rows, settings)
    for threads in (2, 3):
        threaded = train(rows, replace(settings, threads=threads))
        assert threaded.model.weights.tobytes() == alone.model.weights.tobytes()
        assert threaded.model.bias == alone.model.bias
    for world_size in (1, 2, 4):
        every = train_among(rows, world_size, settings)
        for one in every:
            assert one.model.weights.tobytes() == every[0].model.weights.tobytes()
            assert one.model.bias == every[0].model.bias
            for name in ("loss", "held_out_loss", "accuracy", "auc"):
                values = [[getattr(report, name) for report in run.epochs] for run in (one, alone)]
                assert values[0] == pytest.approx(values[1], rel=1e-4)
        same = every[0].model.weights.tobytes() == alone.model.weights.tobytes()
        assert same or optimizer != "newton"
        assert np.abs(every[0].model.weights - alone.model.weights).max() < 2e-5
        assert every[0].model.bias == pytest.approx(alone.model.bias, abs=1e-5)


@pytest.mark.parametrize(("optimizer", "l1"), [("sgd", 0.0), ("sgd", 0.002), ("adagrad", 0.0), ("adagrad", 0.002)])
def test_one_rank_without_streams_trains_as_one_with_them(optimizer: str, l1: float) -> None:
    rows = rows_of("logistic")
    settings = TrainingSettings(optimizer=optimizer, l2=L2, l1=l1, epochs=3, batch=37)
    streamed, alone = train(rows, settings, aggregation=SparseSum(None)), train(rows, settings)
    assert np.abs(alone.model.weights - streamed.model.weights).max() < 1e-6
    assert alone.model.bias == pytest.approx(streamed.model.bias, abs=1e-6)
    among_one = train_among(rows, 1, settings)[0].model
    assert among_one.weights.tobytes() == alone.model.weights.tobytes()


def delayed(rows: Rows, settings: TrainingSettings) -> tuple[Any, float]:
    """Logistic regression by SGD in f64 whose gradients lack the step before, unless it ended an epoch."""
    from telegrad.linear.problem import Share

    matrix, targets = rows.to_csr().astype(np.float64), rows.labels.astype(np.float64)
    weights, bias, rate = np.zeros(FEATURES), 0.0, settings.learning_rate or 0.0
    for epoch in range(settings.epochs):
        late = None
        for chosen, size in [*Share(0, COUNT, COUNT, held_out=0, seed=0).batches(epoch, settings.batch), (None, 0)]:
            sent = None
            if chosen is not None:
                part, signs = matrix[chosen.astype(np.int64)], targets[chosen.astype(np.int64)]
                slopes = -signs / (1 + np.exp(signs * (part @ weights + bias)))
                sent = part.T @ slopes / size, slopes.sum() / size
            if late is not None:
                weights, bias = (weights - rate * late[0]) / (1 + rate * settings.l2), bias - rate * late[1]
            late = sent
    return weights, bias


def test_overlapped_sums_arrive_one_step_late_on_every_rank() -> None:
    rows = rows_of("logistic")
    settings = TrainingSettings(l2=L2, epochs=3, batch=64, learning_rate=0.7, overlap=True)
    weights, bias = delayed(rows, settings)
    assert np.abs(weights - train(rows, replace(settings, overlap=False)).model.weights).max() > 1e-3
    for world_size in (1, 2, 4):
        every = train_among(rows, world_size, settings)
        again = train_among(rows, world_size, settings)
        for one, other in zip(every, again, strict=True):
            assert one.model.weights.tobytes() == every[0].model.weights.tobytes() == other.model.weights.tobytes()
            assert one.epochs[0].loss == every[0].epochs[0].loss
        assert np.abs(every[0].model.weights - weights).max() < 1e-5
        assert every[0].model.bias == pytest.approx(bias, abs=1e-5)
    alone = train(rows, settings).model
    assert np.abs(alone.weights - weights).max() < 1e-5


def test_overlap_reaches_the_optimum() -> None:
    rows = rows_of("logistic")
    best, _ = least("logistic", rows, 0.0)
    model = train(rows, TrainingSettings(l2=L2, overlap=True, **OPTIMIZERS["sgd"])).model
    assert objective(model, rows, L2) <= best * (1 + 1e-3)


def test_nan_is_not_hidden_by_penalties() -> None:
    rows = rows_of("squared_error")
    settings = TrainingSettings(loss="squared_error", l1=0.1, learning_rate=1e30, epochs=4, batch=50)
    with np.errstate(over="ignore", invalid="ignore"):
        assert not np.isfinite(objective(train(rows, settings).model, rows, 0.0))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"optimizer": "adam"},
            "optimizer='adam' does not exist: use one of auto, newton, dual, sgd, adagrad",
        ),
        ({"l1": -1.0}, "l1=-1.0 must be a finite number, 0 or more"),
        ({"threads": 0}, "threads=0 must be at least 1"),
        ({"optimizer": "newton", "loss": "hinge"}, "optimizer='newton' is not for loss='hinge': use 'dual'"),
        ({"optimizer": "dual"}, "optimizer='dual' is not for loss='logistic': leave it out"),
        ({"optimizer": "dual", "loss": "hinge", "l2": 0}, "l2=0 is not for optimizer='dual': give more, or use"),
        (
            {"optimizer": "dual", "loss": "hinge", "l1": 0.1},
            "l1=0.1 is not for optimizer='dual' with loss='hinge': use",
        ),
        (
            {"optimizer": "dual", "loss": "squared_hinge", "l2": 0},
            "l2=0 is not for optimizer='dual': give more, or use 'newton'",
        ),
        (
            {"optimizer": "dual", "loss": "squared_hinge", "l1": 0.1},
            "l1=0.1 is not for optimizer='dual' with loss='squared_hinge': use 'newton', or",
        ),
        ({"optimizer": "newton", "batch": 5}, "batch=5 is not for optimizer='newton', whose steps follow from the"),
        ({"optimizer": "newton", "learning_rate": 0.5}, "learning_rate=0.5 is not for optimizer='newton'"),
        ({"tol": 0}, "tol=0.0 must be a finite number above 0"),
    ],
    ids=[
        *("optimizer", "l1", "threads"),
        *(
            "newton hinge",
            "dual logistic",
            "dual without l2",
            "dual l1",
            "squared l2",
            "squared l1",
            "newton batch",
            "newton rate",
            "tol",
        ),
    ],
)
def test_settings_of_optimisers_that_cannot_be(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        TrainingSettings(**options)


class OnlySums:
    def prepare(self, gradient: SparseVector) -> SparseVector:
        return gradient

    def sum(self, prepared: SparseVector) -> SparseVector:
        return prepared


def test_an_aggregation_must_be_for_the_optimiser() -> None:
    rows = rows_of("logistic")
    with pytest.raises(TypeError, match=r"aggregation is a OnlySums without begin\(\), which overlap=True needs"):
        train(rows, TrainingSettings(overlap=True), aggregation=OnlySums())
    with Communicator.local(1)[0] as comm, pytest.raises(TypeError, match="a DenseGather, which sums no gradients"):
        train(rows, TrainingSettings(optimizer="sgd"), comm, aggregation=DenseGather(comm))
    with pytest.raises(TypeError, match="aggregation is not for optimizer='newton': leave it out"):
        train(rows, aggregation=OnlySums())


def test_memory_is_judged_before_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    from telegrad.linear import problem

    rows = Rows(
        *(np.zeros(2, np.uint64), np.empty(0, np.uint32)), *[np.empty(0, np.float32)] * 1, np.ones(1, np.float32), 2**31
    )
    monkeypatch.setattr(problem, "available_bytes", lambda: 8 * 2**30 - 1)
    with pytest.raises(ValueError, match=r"^2147483648 features: 1 ranks of one machine need 8\.0 GiB beside their"):
        train(rows)
    with pytest.raises(ValueError, match=r"1 ranks of one machine need 16\.0 GiB beside their rows"):
        train(rows, TrainingSettings(optimizer="sgd"), aggregation=SparseSum(None))
    wanted = {"sgd": 8, "adagrad": 20}
    for optimizer, each in wanted.items():
        assert problem.bytes_needed(1000, 0, TrainingSettings(optimizer=optimizer)) == 1000 * each
    monkeypatch.setattr(problem, "available_bytes", lambda: 5000)
    comms = Communicator.local(2, timeout_s=60)

    def one(rank: int) -> str:
        with comms[rank], pytest.raises(ValueError, match="2 ranks of one machine") as raised:
            train(rows_of("logistic").first_features(300), TrainingSettings(optimizer="adagrad"), comms[rank])
        return str(raised.value)

    with ThreadPoolExecutor(2) as pool:
        monkeypatch.setattr(problem, "available_bytes", lambda: FEATURES * 24 * 2 - 1)
        assert len(set(pool.map(one, range(2)))) == 1
