"""Among several ranks each numbers its own features anew: which changes no bit of what steps over all features give."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import sparse

from telegrad import Communicator, SparseVector, _core
from telegrad.linear import LOSSES, Rows, Trained, TrainingSettings, train
from telegrad.linear.problem import Problem

FEATURES, COUNT, RANKS = 300, 240, 3


def rows_of(rank: int, loss: str) -> Rows:
    """Two ranks have some features in common and others for themselves, the last one the last; rank 1 has no rows."""
    random = np.random.default_rng(rank)
    count = 0 if rank == 1 else COUNT
    width = FEATURES if rank == RANKS - 1 else 2 * FEATURES // 3
    matrix = sparse.random(count, width, 0.03, format="csr", random_state=rank)
    if rank == RANKS - 1:
        matrix = matrix @ sparse.diags((np.arange(width) > FEATURES // 2).astype(float))
    matrix = sparse.csr_matrix(matrix)
    matrix.eliminate_zeros()
    scores = matrix @ random.normal(size=width) + 0.2
    return Rows.from_csr(matrix, scores if loss == "squared_error" else np.where(scores > 0, 1, -1))


def among(act: Callable[[int, Communicator], Any]) -> list[Any]:
    comms = Communicator.local(RANKS, timeout_s=60)

    def one(rank: int) -> Any:
        with comms[rank] as comm:
            return act(rank, comm)

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(one, range(RANKS)))


def over_all_features(rank: int, comm: Communicator, settings: TrainingSettings) -> tuple[np.ndarray, float]:
    """The same steps with a weight and a sum for each of all features on each rank."""
    rows = rows_of(rank, settings.loss)
    problem = Problem(rows, settings, comm, alone=False)
    view, features, targets = rows.view(), problem.features, problem.targets.ctypes.data
    rule = getattr(_core.Rule, settings.optimizer)
    descent = _core.Descent(features, rule, settings.l1, settings.l2, settings.bias, problem.team, None)
    gradient = _core.RankGradient(descent, None, problem.team)
    steps = -(-problem.share.trained_total // settings.batch)
    for epoch in range(settings.epochs):
        late: list[tuple[SparseVector, int, float]] = []
        for step, (chosen, count) in enumerate(problem.share.batches(epoch, settings.batch)):
            rate = problem.rate_at(epoch * steps + step, count)
            size = gradient.find(view, targets, chosen.ctypes.data, chosen.size, problem.loss)
            indices, values = np.empty(size, np.uint32), np.empty(size, np.float32)
            gradient.take(indices.ctypes.data, values.ctypes.data, size)
            late.append((comm.all_reduce(SparseVector.trusted(indices, values, features + 2)), count, rate))
            if len(late) > settings.overlap:
                apply(descent, *late.pop(0))
        for one in late:
            apply(descent, *one)
    weights = np.empty(features, np.float32)
    descent.write_weights(weights.ctypes.data, features)
    return weights, descent.bias


def apply(descent: _core.Descent, total: SparseVector, rows: int, rate: float) -> None:
    indices, values = total.memory(0.0)
    at = 0 if indices is None else indices.ctypes.data
    descent.step(at, values.ctypes.data, values.size - 2, float(values[-2]), rate, rows)


class DenseSum:
    """Sums of all features, as dense peers bring them."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def prepare(self, gradient: SparseVector) -> np.ndarray:
        return np.asarray(gradient.to_dense())

    def sum(self, prepared: np.ndarray) -> SparseVector:
        self._comm.all_reduce(prepared)
        return SparseVector.from_dense(prepared)


@pytest.mark.parametrize("penalties", [(0.0, 0.0), (0.01, 0.0), (0.0, 0.003), (0.01, 0.003)], ids=str)
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
@pytest.mark.parametrize("loss", LOSSES)
def test_steps_have_the_bits_of_steps_over_all_features(
    loss: str, optimizer: str, penalties: tuple[float, ...]
) -> None:
    l2, l1 = penalties
    settings = TrainingSettings(loss=loss, optimizer=optimizer, l2=l2, l1=l1, epochs=3, batch=40, decay=0.1)
    expected = among(lambda rank, comm: over_all_features(rank, comm, settings))
    found: list[Trained] = among(lambda rank, comm: train(rows_of(rank, loss), settings, comm))
    for one in found:
        assert one.model.weights.tobytes() == expected[0][0].tobytes()
        assert one.model.bias == expected[0][1]
    own = [np.unique(rows_of(rank, loss).indices) for rank in range(RANKS)]
    assert not own[1].size
    for rank in (0, 2):  # features that only this rank has
        assert one.model.weights[np.setdiff1d(own[rank], own[2 - rank])].any()


@pytest.mark.parametrize(
    ("optimizer", "way"),
    [*itertools.product(["sgd", "adagrad"], ["threads", "overlap", "held out", "dense", "whole"]), ("sgd", "scale")],
)
def test_ways_to_train_have_the_bits_of_steps_over_all_features(optimizer: str, way: str) -> None:
    options: dict[str, Any] = {
        "threads": {"threads": 3},
        "overlap": {"overlap": True},
        "held out": {"held_out": 0.3},
        "dense": {},
        "whole": {"batch": 2 * COUNT, "epochs": 9},  # of more entries than a rank has features
        "scale": {"l2": 5.0, "learning_rate": 1.0, "l1": 1e-4},  # so small that weights are written anew
    }[way]
    settings = replace(TrainingSettings(optimizer=optimizer, l2=0.01, l1=0.001, epochs=3, batch=40), **options)
    expected = among(lambda rank, comm: over_all_features(rank, comm, replace(settings, threads=1)))
    found: list[Trained] = among(
        lambda rank, comm: train(
            rows_of(rank, "logistic"), settings, comm, aggregation=DenseSum(comm) if way == "dense" else None
        )
    )
    for one in found:
        assert one.model.weights.any()
        if way == "dense":  # which adds in another order
            assert np.abs(one.model.weights - expected[0][0]).max() < 1e-5
            assert one.model.weights.tobytes() == found[0].model.weights.tobytes()
        else:
            assert one.model.weights.tobytes() == expected[0][0].tobytes()
            assert one.model.bias == expected[0][1]
