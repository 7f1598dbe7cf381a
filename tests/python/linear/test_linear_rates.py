"""The default learning rate is safe for every batch and every number of ranks; what diverges is known to have."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import sparse

from telegrad import Communicator, SparseVector, _core
from telegrad.linear import Rows, TrainingSettings, objective, train
from telegrad.linear.losses import CURVATURE_BOUND, losses_of
from telegrad.linear.optimizers import SparseSum
from telegrad.linear.problem import Problem
from telegrad.linear.rows import squared_lengths

COUNT, FEATURES = 207, 12


def rows_of(loss: str, *, long: float = 100.0) -> Rows:
    """Rows of length about 1, one empty and two ``long`` times as long, the last of them at the end."""
    random = np.random.default_rng(5)
    matrix = random.normal(size=(COUNT, FEATURES)) * (random.random((COUNT, FEATURES)) < 0.4) / 2
    matrix[[17, COUNT - 1]] *= long
    matrix[30] = 0
    scores = matrix @ random.normal(size=FEATURES) + 0.1 * random.normal(size=COUNT)
    return Rows.from_csr(sparse.csr_matrix(matrix), scores if loss == "squared_error" else np.where(scores > 0, 1, -1))


def among(world_size: int, rows: Rows, act: Callable[[Rows, Communicator], Any]) -> list[Any]:
    """Rank 0 has few rows, so that it alone has not as many as a batch."""
    comms = Communicator.local(world_size, timeout_s=60)
    borders = [0, *(20 + (COUNT - 20) * rank // world_size for rank in range(1, world_size)), COUNT]

    def one(rank: int) -> Any:
        with comms[rank] as comm:
            return act(rows.part(borders[rank], borders[rank + 1]), comm)

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(one, range(world_size)))


@pytest.mark.parametrize("block", [1, 7, 1 << 18])
def test_squared_lengths(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    from telegrad.linear import rows as module

    monkeypatch.setattr(module, "_BLOCK_ENTRIES", block)
    rows = rows_of("logistic")
    expected = (rows.to_csr().toarray().astype(np.float64) ** 2).sum(1)
    assert squared_lengths(rows) == pytest.approx(expected, rel=1e-12)
    assert squared_lengths(rows)[30] == 0
    assert np.array_equal(squared_lengths(rows.part(29, 60)), squared_lengths(rows)[29:60])
    assert squared_lengths(rows.part(0, 0)).size == 0
    assert squared_lengths(rows.part(30, 31)).tolist() == [0]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("batch", [1, 10, 50, COUNT, 1000])
@pytest.mark.parametrize("loss", CURVATURE_BOUND)
def test_a_default_rate_is_at_most_one_over_the_curvature_of_each_batch(loss: str, batch: int, overlap: bool) -> None:
    rows = rows_of(loss)
    problem = Problem(rows, TrainingSettings(loss=loss, batch=batch, overlap=overlap), None, alone=True)
    with_bias = np.c_[rows.to_csr().toarray().astype(np.float64), np.ones(COUNT)]
    sizes = []
    for epoch in range(3):
        for step, (chosen, count) in enumerate(problem.share.batches(epoch, batch)):
            part = with_bias[chosen.astype(np.int64)]
            curvature = CURVATURE_BOUND[loss] * np.linalg.eigvalsh(part.T @ part / count)[-1]
            assert problem.rate_at(step, count) * curvature <= (0.5 if overlap else 1) * (1 + 1e-12)
            sizes.append(count)
    longest = np.sort(squared_lengths(rows))[::-1][: min(batch, COUNT)]
    rate = 1 / (CURVATURE_BOUND[loss] * (longest.mean() + 1)) / (2 if overlap else 1)
    assert problem.rate_at(0, max(sizes)) == pytest.approx(rate, rel=1e-12)
    assert problem.rate_at(0, min(sizes)) == pytest.approx(rate * min(sizes) / max(sizes), rel=1e-12)


def test_a_given_rate_is_that_of_every_batch() -> None:
    problem = Problem(rows_of("logistic"), TrainingSettings(batch=50, learning_rate=0.5, decay=1.0), None, alone=True)
    assert [problem.rate_at(step, rows) for step, rows in ((0, 50), (1, 50), (1, 7))] == [0.5, 0.25, 0.25]


@pytest.mark.parametrize("batch", [3, 30, 150, 1000])
def test_a_default_rate_has_the_same_bits_for_every_number_of_ranks(batch: int) -> None:
    rows, settings = rows_of("logistic"), TrainingSettings(batch=batch, held_out=0.1)
    alone = Problem(rows, settings, None, alone=True).first_rate
    for world_size in (1, 2, 4):
        assert among(world_size, rows, lambda part, comm: Problem(part, settings, comm, alone=False).first_rate) == (
            [alone] * world_size
        )


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("batch", [1, 2, 10, COUNT])
@pytest.mark.parametrize("loss", ["squared_error", "squared_hinge", "logistic"])
def test_one_long_row_does_not_make_a_default_rate_diverge(loss: str, batch: int, overlap: bool) -> None:
    rows = rows_of(loss)
    trained = train(rows, TrainingSettings(loss=loss, batch=batch, epochs=20, overlap=overlap))
    assert not trained.diverged
    assert objective(trained.model, rows, 0.0) < trained.loss_at_zero
    assert trained.epochs[-1].loss < trained.epochs[0].loss


def test_overlap_halves_the_rate_as_the_whole_one_would_go_on_for_ever() -> None:
    count = 300
    matrix = sparse.csr_matrix(np.full((count, 1), 3.0, np.float32))  # all alike: each batch has the whole curvature
    rows = Rows.from_csr(matrix, np.full(count, 2.0))
    settings: dict[str, Any] = {"loss": "squared_error", "batch": 1, "epochs": 1, "overlap": True, "l2": 0.0}
    whole = train(rows, TrainingSettings(**settings, learning_rate=1 / 10))
    assert whole.epochs[0].loss > 0.5 * whole.loss_at_zero
    halved = train(rows, TrainingSettings(**settings))
    assert objective(halved.model, rows, 0.0) < 1e-10 * halved.loss_at_zero


@pytest.mark.parametrize("loss", ["hinge", "squared_error"])
def test_the_loss_at_zero_is_of_all_ranks_rows(loss: str) -> None:
    rows = rows_of(loss)
    expected = losses_of(loss, np.zeros(COUNT), rows.labels).mean()
    for one in among(3, rows, lambda part, comm: train(part, TrainingSettings(loss=loss, epochs=1), comm)):
        assert one.loss_at_zero == pytest.approx(expected)


def test_what_has_diverged() -> None:
    rows = rows_of("squared_error", long=1.0)
    settings: dict[str, Any] = {"loss": "squared_error", "batch": COUNT, "bias": False}
    finite = train(rows, TrainingSettings(**settings, epochs=8, learning_rate=20.0))
    assert np.isfinite(finite.model.weights).all()
    assert finite.epochs[-1].loss > 10 * finite.loss_at_zero
    assert finite.diverged
    with np.errstate(all="ignore"):
        assert train(rows, TrainingSettings(**settings, epochs=4, learning_rate=1e30)).diverged
    assert not train(rows, TrainingSettings(**settings, epochs=4)).diverged
    in_last_step = train(rows, TrainingSettings(**settings, epochs=1, learning_rate=1e6))  # its only one
    assert in_last_step.epochs[-1].loss == pytest.approx(in_last_step.loss_at_zero)
    assert not in_last_step.diverged
    assert in_last_step.held_out.size == 0
    assert in_last_step.diverged_to(objective(in_last_step.model, rows, settings.get("l2", 1e-6)))
    zeros = Rows(rows.offsets, rows.indices, rows.values, np.zeros(COUNT, np.float32), rows.n_features)
    assert not train(zeros, TrainingSettings(**settings, epochs=2)).diverged


def test_rows_that_are_held_out_say_nothing_of_divergence() -> None:
    rows = rows_of("squared_error", long=1.0)
    settings = TrainingSettings(
        loss="squared_error", batch=COUNT, bias=False, held_out=0.2, epochs=4, learning_rate=0.1
    )
    left_out = int(train(rows, settings).held_out[0])
    values = rows.values.copy()
    values[int(rows.offsets[left_out]) : int(rows.offsets[left_out + 1])] *= 1e6
    trained = train(outlying := replace(rows, values=values), settings)
    assert left_out in trained.held_out
    assert trained.diverged_to(objective(trained.model, outlying, settings.l2))
    assert not trained.diverged_to(objective(trained.model, outlying, settings.l2, without=trained.held_out))


class Dropping:
    """A sum that leaves out what is 0."""

    def prepare(self, gradient: SparseVector) -> SparseVector:
        return gradient

    def sum(self, prepared: SparseVector) -> SparseVector:
        kept = prepared.raw_values != 0
        return SparseVector(prepared.raw_indices[kept], prepared.raw_values[kept], prepared.n)


@pytest.mark.parametrize("rate", [0.1, 5.0], ids=["no slope", "nothing at all"])
def test_sums_may_leave_out_the_bias_s_and_the_loss_s_zeros(rate: float) -> None:
    matrix = sparse.csr_matrix(np.array([[1.0, 0.5], [-1.0, 0.5]], np.float32))
    rows = Rows.from_csr(matrix, [1, -1])  # at first their slopes cancel out, and later there is no loss
    settings = TrainingSettings(loss="hinge", batch=2, epochs=4, learning_rate=rate, l2=0.0)
    found, expected = (train(rows, settings, aggregation=one) for one in (Dropping(), SparseSum(None)))
    assert found.model.weights.tobytes() == expected.model.weights.tobytes()
    assert found.model.bias == expected.model.bias
    assert [one.loss for one in found.epochs] == [one.loss for one in expected.epochs]
    assert (expected.epochs[-1].loss == 0) == (rate == 5.0)


def test_threads_that_one_rank_cannot_start_are_said_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    start = _core.Team

    def refused(threads: int) -> Any:
        if threads == 3:
            raise RuntimeError("Resource temporarily unavailable")
        return start(threads)

    monkeypatch.setattr(_core, "Team", refused)
    rows = rows_of("logistic")

    def act(part: Rows, comm: Communicator) -> str:
        with pytest.raises(
            ValueError, match="threads=3 of rank 1 are more than its system can start: use fewer"
        ) as said:
            train(part, TrainingSettings(threads=2 + comm.rank), comm)
        return str(said.value)

    assert len(set(among(2, rows, act))) == 1
    with pytest.raises(ValueError, match="threads=1025 must be at most 1024"):
        TrainingSettings(threads=1025)
