"""LowRank: PowerSGD on several ranks, against a reference of the paper's algorithm in numpy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from handmade_buckets import Trainer
from threaded_ranks import on_ranks

import telegrad
from telegrad import Communicator, DDPState, LowRank, Momentum, NonFiniteGradient, TransportError, Warmup
from telegrad.ddp import choices, reshard
from telegrad.ddp.low_rank import MatrixShape, first_factor, orthonormal, product

torch = pytest.importorskip("torch")
Arrays = dict[str, npt.NDArray[np.float32]]
RANK, RANKS, STEPS = 2, 3, 4
MATRICES = {"embedding": MatrixShape(30, 40, RANK), "hidden": MatrixShape(20, 50, RANK)}
WHOLE = ("norm", "bias", "scale")
SIZES = {"embedding": 1200, "norm": 16, "hidden": 1000, "bias": 7, "scale": 3}
ONE_BUCKET = [list(SIZES)]
TWO_BUCKETS = [["scale", "bias", "hidden"], ["norm", "embedding"]]


def gradients(rank: int, step: int, scale: float = 1.0) -> Arrays:
    random = np.random.default_rng([rank, step])
    return {name: scale * random.standard_normal(size).astype(np.float32) for name, size in SIZES.items()}


def trainer(comm: Communicator, **options: Any) -> Trainer:
    return Trainer(comm, compress=LowRank(RANK, small_elements=100), **options)


class Reference:
    """Vogels et al., Algorithms 1 and 2, in float64, for one matrix on all ranks; errors as the paper has them."""

    def __init__(self, name: str, ranks: int) -> None:
        self.shape = MATRICES[name]
        self.q = first_factor(name, self.shape).astype(np.float64)
        self.errors = np.zeros((ranks, self.shape.rows, self.shape.columns))

    def step(self, given: list[npt.NDArray[np.float32]]) -> npt.NDArray[np.float64]:
        m = self.errors + np.stack([one.reshape(self.shape[:2]) for one in given])
        p = np.mean([one @ self.q for one in m], axis=0)
        p, _ = np.linalg.qr(p)
        self.q = np.mean([one.T @ p for one in m], axis=0)
        average = p @ self.q.T
        self.errors = m - average
        return average


@pytest.mark.parametrize("buckets", [ONE_BUCKET, TWO_BUCKETS])
def test_averages_are_the_papers_and_the_same_on_all_ranks(buckets: list[list[str]]) -> None:
    def run(comm: Communicator) -> list[Arrays]:
        one = trainer(comm)
        return [one.step(gradients(comm.rank, step), buckets) for step in range(STEPS)]

    found = on_ranks(RANKS, run)
    references = {name: Reference(name, RANKS) for name in MATRICES}
    for step in range(STEPS):
        given = [gradients(rank, step) for rank in range(RANKS)]
        for name in SIZES:
            own = [of_rank[step][name] for of_rank in found]
            assert all(one.tobytes() == own[0].tobytes() for one in own)
            all_given = [one[name] for one in given]
            expected = references[name].step(all_given).ravel() if name in MATRICES else np.mean(all_given, axis=0)
            np.testing.assert_allclose(own[0], expected, rtol=1e-4, atol=2e-5)


def test_what_was_given_is_what_was_sent_and_what_is_kept() -> None:
    def run(comm: Communicator) -> tuple[list[Arrays], Arrays]:
        one = trainer(comm)
        averages = [one.step(gradients(comm.rank, step), TWO_BUCKETS) for step in range(STEPS)]
        return averages, {part.name: part.values.copy() for part in one.state._compressor.residuals}

    found = on_ranks(RANKS, run)
    for name in MATRICES:
        given = sum(gradients(rank, step)[name].astype(np.float64) for rank in range(RANKS) for step in range(STEPS))
        sent = RANKS * sum(averages[name].astype(np.float64) for averages in found[0][0])
        kept = sum(residuals[name].astype(np.float64) for _, residuals in found)
        np.testing.assert_allclose(sent + kept, given, atol=2e-5)
        assert np.linalg.norm(kept) > 0.1 * np.linalg.norm(given)  # or the test shows nothing


def test_a_matrix_of_low_rank_arrives_whole() -> None:
    random = np.random.default_rng(1)
    one, other = (random.standard_normal((2, rows, RANK)) for rows in (30, 40))
    given = [(one[0] * (rank + 1)) @ other[0].T for rank in range(2)]

    def run(comm: Communicator) -> npt.NDArray[np.float32]:
        matrix = given[comm.rank].astype(np.float32).ravel()
        rest = gradients(comm.rank, 0)
        return trainer(comm).step({**rest, "embedding": matrix}, ONE_BUCKET)["embedding"]

    expected = np.mean(given, axis=0).ravel()
    np.testing.assert_allclose(on_ranks(2, run)[0], expected, rtol=1e-4, atol=1e-4)


def test_bytes_are_those_of_the_narrow_matrices() -> None:
    def run(comm: Communicator) -> int:
        one = trainer(comm)
        one.step(gradients(comm.rank, 0), ONE_BUCKET)
        before = comm.stats()["bytes_sent"]
        one.step(gradients(comm.rank, 1), ONE_BUCKET)
        assert one.state.stats.selected == 2 * sum(shape.words for shape in MATRICES.values())
        return int(comm.stats()["bytes_sent"] - before)

    words = sum(shape.words for shape in MATRICES.values()) + sum(SIZES[name] for name in WHOLE)
    assert on_ranks(2, run) == [4 * words] * 2


def test_training_goes_on_bitwise_from_a_state() -> None:
    def run(comm: Communicator) -> None:
        first = trainer(comm)
        for step in range(3):
            first.step(gradients(comm.rank, step), TWO_BUCKETS)
        state, second = first.state.state_dict(), trainer(comm)
        second.state.load_state_dict(state)
        for step in range(3, 6):
            averages = [one.step(gradients(comm.rank, step), TWO_BUCKETS) for one in (first, second)]
            assert all(averages[0][name].tobytes() == averages[1][name].tobytes() for name in SIZES)

    on_ranks(2, run)


def test_a_state_is_for_other_buckets_and_for_another_number_of_ranks() -> None:
    def before(comm: Communicator) -> dict[str, Any]:
        one = trainer(comm)
        for step in range(2):
            one.step(gradients(comm.rank, step), TWO_BUCKETS)
        return one.state.state_dict()

    states = on_ranks(3, before)
    waiting = {name: sum(s["compressor"]["parameters"][name]["residual"].double() for s in states) for name in MATRICES}
    fewer = reshard(states, 2)

    def after(comm: Communicator) -> tuple[Arrays, Arrays]:
        one = trainer(comm)
        one.state.load_state_dict(fewer[comm.rank])
        average = one.step(gradients(comm.rank, 9), ONE_BUCKET)
        return average, {part.name: part.values.copy() for part in one.state._compressor.residuals}

    found = on_ranks(2, after)
    for name in MATRICES:
        given = waiting[name].numpy() + sum(gradients(rank, 9)[name] for rank in range(2))
        kept = sum(residuals[name] for _, residuals in found)
        np.testing.assert_allclose(2 * found[0][0][name] + kept, given, atol=2e-5)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda state: state.pop("factors"), "state\\['factors'\\] is not of these parameters"),
        (lambda state: state["factors"].pop("hidden"), "state\\['factors'\\] is not of these parameters"),
        (lambda state: state["factors"].update(hidden=torch.zeros(50, 3)), "finite float32 of shape \\(50, 2\\)"),
        (lambda state: state["factors"]["hidden"].fill_(math.nan), "finite float32 of shape \\(50, 2\\)"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(change: Callable[[dict[str, Any]], Any], match: str) -> None:
    def run(comm: Communicator) -> None:
        one = trainer(comm)
        one.step(gradients(0, 0), ONE_BUCKET)
        state = one.state.state_dict()
        one.step(gradients(0, 1), ONE_BUCKET)
        now = str(one.state.state_dict())
        change(state)
        with pytest.raises(ValueError, match=match):
            one.state.load_state_dict(state)
        assert str(one.state.state_dict()) == now

    on_ranks(1, run)


def test_a_gradient_that_is_not_finite_follows_the_policy() -> None:
    poisoned = {**gradients(1, 1), "hidden": np.full(1000, np.nan, np.float32)}

    def run(comm: Communicator, policy: str) -> Any:
        one = trainer(comm, nonfinite=policy)
        one.step(gradients(comm.rank, 0), TWO_BUCKETS)
        before = str(one.state.state_dict()["compressor"])
        second = poisoned if comm.rank == 1 else gradients(comm.rank, 1)
        if policy == "raise":
            with pytest.raises((NonFiniteGradient, TransportError, RuntimeError), match="'hidden' are NaN or infinite"):
                one.step(second, TWO_BUCKETS)
            return None
        averages = one.step(second, TWO_BUCKETS)
        if policy == "skip":
            assert one.state.skipped
            assert not any(average.any() for average in averages.values())
            assert str(one.state.state_dict()["compressor"]) == before
        else:
            assert np.isnan(averages["hidden"]).all()
            assert all(np.isfinite(averages[name]).all() for name in SIZES if name != "hidden")
        after = one.step(gradients(comm.rank, 2), TWO_BUCKETS)
        assert all(np.isfinite(average).all() for average in after.values())
        return None

    for policy in ("skip", "send"):
        on_ranks(2, lambda comm, policy=policy: run(comm, policy))
    with pytest.raises(NonFiniteGradient):  # of rank 1; rank 0 hears of it
        on_ranks(2, lambda comm: trainer(comm).step(poisoned, TWO_BUCKETS))


def test_a_parameter_that_takes_no_part_keeps_what_waits_and_its_start() -> None:
    def run(comm: Communicator) -> None:
        one = trainer(comm)
        one.step(gradients(comm.rank, 0), ONE_BUCKET)
        before = one.state.state_dict()
        nothing = {**gradients(comm.rank, 1), "hidden": np.zeros(1000, np.float32)}
        assert not one.step(nothing, ONE_BUCKET)["hidden"].any()
        after = one.state.state_dict()
        assert str(after["compressor"]["parameters"]["hidden"]) == str(before["compressor"]["parameters"]["hidden"])
        assert torch.equal(after["factors"]["hidden"], before["factors"]["hidden"])
        assert one.step(gradients(comm.rank, 2), ONE_BUCKET)["hidden"].any()

    on_ranks(2, run)


def test_first_steps_are_dense_and_each_rank_clips_before() -> None:
    def run(comm: Communicator) -> None:
        one = trainer(comm, warmup=Warmup(1), clip_norm=1.0)
        dense = one.step(gradients(comm.rank, 0), TWO_BUCKETS)
        norms = [math.sqrt(sum(float((x**2).sum()) for x in gradients(rank, 0).values())) for rank in range(2)]
        for name in SIZES:
            clipped = [gradients(rank, 0)[name] / (math.sqrt(2) * norms[rank]) for rank in range(2)]
            np.testing.assert_allclose(dense[name], np.mean(clipped, axis=0), rtol=1e-4, atol=1e-7)
        sparse = one.step(gradients(comm.rank, 1), TWO_BUCKETS)["hidden"].reshape(20, 50)
        assert np.linalg.matrix_rank(sparse, tol=1e-4) == RANK

    on_ranks(2, run)


def test_bfloat16_gradients() -> None:
    def run(comm: Communicator) -> Arrays:
        return Trainer(comm, torch.bfloat16, compress=LowRank(RANK, 100)).step(gradients(comm.rank, 0), ONE_BUCKET)

    averages = on_ranks(2, run)[0]
    reference = Reference("hidden", 2)
    rounded = [torch.from_numpy(gradients(rank, 0)["hidden"]).bfloat16().float().numpy() for rank in range(2)]
    np.testing.assert_allclose(averages["hidden"], reference.step(rounded).ravel(), rtol=2**-8, atol=1e-3)


def test_columns_are_made_orthonormal() -> None:
    random = np.random.default_rng(3)
    for rows in (1, 2, 3, 7, 64, 1001):
        columns = random.standard_normal((rows, min(rows, 4))).astype(np.float32)
        basis = orthonormal(columns)
        np.testing.assert_allclose(basis.T @ basis, np.eye(columns.shape[1]), atol=2e-6)
        np.testing.assert_allclose(basis @ (basis.T @ columns), columns, atol=2e-5)
    dependent = np.stack([columns[:, 0], 3 * columns[:, 0], columns[:, 1]], axis=1)
    basis = orthonormal(dependent)
    assert not basis[:, 1].any()
    np.testing.assert_allclose(basis.T @ basis, np.diag([1, 0, 1]), atol=2e-6)
    assert not orthonormal(np.zeros((5, 2), np.float32)).any()
    tiny = orthonormal(np.full((5, 1), 1e-30, np.float32))  # its square is no float32
    np.testing.assert_allclose(tiny, 1 / math.sqrt(5), rtol=1e-6)


def test_products_add_their_terms_in_order() -> None:
    random = np.random.default_rng(4)
    basis, factor = (random.standard_normal((rows, 3)).astype(np.float32) for rows in (17, 29))
    expected = np.zeros((17, 29), np.float32)
    for number in range(3):
        term = basis[:, number, None] * factor[:, number]
        expected = term if number == 0 else expected + term
    out = np.full(17 * 29, np.nan, np.float32)
    product(basis, factor, out)
    assert out.tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: LowRank(0), ValueError, "rank=0 must be at least 1"),
        (lambda: LowRank(-1), ValueError, "rank=-1"),
        (lambda: LowRank(1.5), TypeError, "rank=1.5"),
        (lambda: LowRank(2, small_elements=-1), ValueError, "small_elements=-1"),
    ],
)
def test_options_that_mean_nothing(make: Callable[[], LowRank], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        make()


def test_a_state_of_low_rank_is_for_low_rank() -> None:
    def run(comm: Communicator) -> None:
        state = trainer(comm).state.state_dict()
        with pytest.raises(ValueError, match="state has factors of compress=LowRank"):
            Trainer(comm).state.load_state_dict(state)

    on_ranks(1, run)


def test_a_rank_that_compresses_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "_told", set())
    with Communicator.local(1)[0] as comm, pytest.warns(telegrad.ChoiceWarning, match="compresses no parameter"):
        DDPState(comm, torch.nn.Linear(64, 64), compress=LowRank(500))


def test_options_that_do_not_fit() -> None:
    with Communicator.local(1)[0] as comm:
        model = torch.nn.Linear(64, 64)
        with pytest.raises(ValueError, match="leave momentum to the optimizer"):
            DDPState(comm, model, compress=LowRank(), momentum=Momentum(0.9))
        with pytest.raises(ValueError, match="use kind='dense'"):
            DDPState(comm, model, compress=LowRank(), warmup=Warmup(5, "falling"))
        with pytest.raises(TypeError, match="compress=LowRank"):
            telegrad.Synchronizer(model, comm, compress=LowRank())
