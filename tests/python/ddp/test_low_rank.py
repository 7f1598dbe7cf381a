"""LowRank: PowerSGD on several ranks, against a reference of the paper's algorithm in numpy."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from handmade_buckets import Trainer
from threaded_ranks import on_ranks, outcomes

import telegrad
from telegrad import Communicator, DDPState, LowRank, Momentum, NonFiniteGradient, PeerFailed, Warmup
from telegrad.compress import ExactTopK
from telegrad.ddp import ByShape, ParameterCompression, ParameterInfo, choices, reshard
from telegrad.ddp.low_rank import MatrixShape, first_basis, first_factor, orthonormal, product, squared_lengths

torch = pytest.importorskip("torch")
Floats = npt.NDArray[Any]
Arrays = dict[str, Floats]
Average = Callable[[list[Floats]], tuple[Floats, list[Floats]]]
RANK, RANKS, STEPS = 2, 3, 4
MATRICES = {"embedding": MatrixShape(30, 40, RANK), "hidden": MatrixShape(20, 50, RANK)}
WHOLE = ("norm", "bias", "scale")
SIZES = {"embedding": 1200, "norm": 16, "hidden": 1000, "bias": 7, "scale": 3}
ONE_BUCKET = [list(SIZES)]
TWO_BUCKETS = [["scale", "bias", "hidden"], ["norm", "embedding"]]


def gradients(rank: int, step: int, scale: float = 1.0) -> Arrays:
    random = np.random.default_rng([rank, step])
    return {name: scale * random.standard_normal(size).astype(np.float32) for name, size in SIZES.items()}


def trainer(comm: Communicator, *, values: str = "f32", **options: Any) -> Trainer:
    return Trainer(comm, compress=LowRank(RANK, small_elements=100, values=values), **options)


def exact(arrays: list[Floats]) -> tuple[Floats, list[Floats]]:
    """The average, and of each rank what it has lost on the way."""
    return np.mean(arrays, axis=0), [np.zeros_like(one) for one in arrays]


def rows_at_equal_distances(p: Floats) -> Floats:
    rows, rank = p.shape
    return np.eye(rows)[:, np.arange(rank) * rows // rank]


class Reference:
    """Vogels et al., Algorithms 1 and 2, in float64, for matrices on all ranks, whose P, and then whose Q, are averaged
    together, from the second step on by ``average``. A residual keeps what it has lost. The first basis is rows."""

    def __init__(self, names: Sequence[str], ranks: int, average: Average = exact) -> None:
        self.shapes, self.average, self.ranks = {name: MATRICES[name] for name in names}, average, range(ranks)
        self.q = {name: first_factor(name, shape).astype(np.float64) for name, shape in self.shapes.items()}
        self.errors = [{name: np.zeros(one[:2]) for name, one in self.shapes.items()} for _ in self.ranks]
        self.average_now: Average | None = None

    def step(self, given: list[Arrays]) -> Arrays:
        m = [
            {n: errors[n] + own[n].reshape(self.shapes[n][:2]) for n in self.q}
            for own, errors in zip(given, self.errors, strict=True)
        ]
        squares = {n: np.frexp((q * q).sum(0))[1] for n, q in self.q.items()}
        unit = {n: 2.0 ** (squares[n] - one.rows.bit_length() // 2) for n, one in self.shapes.items()}
        p, _ = self.averages([{n: one[n] @ self.q[n] for n in one} for one in m], unit)
        basis = rows_at_equal_distances if self.average_now is None else lambda one: np.linalg.qr(one)[0]
        p = {n: basis(one) for n, one in p.items()}
        unit = {n: 2.0 ** (squares[n] // 2 - one.columns.bit_length() // 2) for n, one in self.shapes.items()}
        q = [{n: one[n].T @ p[n] for n in one} for one in m]
        self.q, lost = self.averages(q, unit)
        self.errors = [{n: m[r][n] - p[n] @ (q[r][n] - lost[r][n]).T for n in p} for r in self.ranks]
        self.average_now = self.average
        return {n: p[n] @ self.q[n].T for n in p}

    def averages(self, own: list[Arrays], unit: Arrays) -> tuple[Arrays, list[Arrays]]:
        """All matrices together, each by columns, in ``unit`` of each column."""
        packed = [np.concatenate([(x[n] / unit[n]).T.ravel() for n in unit]) for x in own]
        average, lost = (self.average_now or exact)(packed)
        return self.parted(average, own[0], unit), [self.parted(one, own[0], unit) for one in lost]

    def parted(self, packed: Floats, like: Arrays, unit: Arrays) -> Arrays:
        parts = np.split(packed, np.cumsum([like[n].size for n in unit])[:-1])
        return {n: one.reshape(like[n].shape[::-1]).T * unit[n] for n, one in zip(unit, parts, strict=True)}


def to_int8(arrays: list[Floats]) -> tuple[Floats, list[Floats]]:
    """The average that one rank alone has in 8 bits: a scale for 256 numbers."""
    x = arrays[0].astype(np.float32)
    blocks = [x[at : at + 256] for at in range(0, x.size, 256)]
    units = [np.float32(np.abs(block).max() / 127) for block in blocks]
    made = np.concatenate([np.rint(block / unit) * unit for block, unit in zip(blocks, units, strict=True)])
    return made, [x - made]


@pytest.mark.parametrize(
    ("found", "rows"), [(range(10), (0, 3, 6)), ((1, 4, 5, 8, 9), (1, 4, 8)), ((7, 2), (2, 7)), ((), ())]
)
def test_the_first_basis_is_of_rows_that_have_a_gradient(found: Sequence[int], rows: Sequence[int]) -> None:
    p = np.zeros((10, 3), np.float32)
    p[list(found), np.arange(len(found)) % 3] = -0.5
    expected = np.zeros_like(p)
    expected[list(rows), np.arange(len(rows))] = 1
    np.testing.assert_array_equal(first_basis(p), expected)


@pytest.mark.parametrize("buckets", [ONE_BUCKET, TWO_BUCKETS])
def test_averages_are_the_papers_and_the_same_on_all_ranks(buckets: list[list[str]]) -> None:
    def run(comm: Communicator) -> list[Arrays]:
        one = trainer(comm)
        return [one.step(gradients(comm.rank, step), buckets) for step in range(STEPS)]

    found = on_ranks(RANKS, run)
    reference = Reference([*MATRICES], RANKS)
    for step in range(STEPS):
        given = [gradients(rank, step) for rank in range(RANKS)]
        averages = reference.step(given)
        for name in SIZES:
            own = [of_rank[step][name] for of_rank in found]
            assert all(one.tobytes() == own[0].tobytes() for one in own)
            expected = averages[name].ravel() if name in MATRICES else np.mean([one[name] for one in given], axis=0)
            np.testing.assert_allclose(own[0], expected, rtol=1e-4, atol=2e-5)


def test_rounded_factors_are_the_references() -> None:
    def run(comm: Communicator) -> list[Arrays]:
        one = trainer(comm, values="int8")
        return [one.step(gradients(0, step), ONE_BUCKET) for step in range(STEPS)]

    found, reference = on_ranks(1, run)[0], Reference([*MATRICES], 1, to_int8)
    for step, averages in enumerate(found):
        expected = reference.step([gradients(0, step)])
        for name in MATRICES:  # a number that float32 and float64 round to different sides is one step of 127 away
            apart = np.linalg.norm(averages[name] - expected[name].ravel())
            assert apart <= 2e-3 * np.linalg.norm(expected[name])


def test_small_parameters_go_in_8_bits_and_what_rounding_loses_waits() -> None:
    def run(comm: Communicator) -> list[Arrays]:
        one = trainer(comm, values="int8")
        return [one.step(gradients(0, step), ONE_BUCKET) for step in range(STEPS)]

    lost = np.zeros(sum(SIZES[name] for name in WHOLE))
    for step, averages in enumerate(on_ranks(1, run)[0]):
        given = np.concatenate([gradients(0, step)[name] for name in sorted(WHOLE)])
        expected, [lost] = to_int8([given + lost])
        np.testing.assert_allclose(np.concatenate([averages[name] for name in sorted(WHOLE)]), expected, atol=1e-6)
        assert lost.any()


def test_a_state_without_residuals_of_small_parameters_is_loaded() -> None:
    def run(comm: Communicator) -> None:
        first, second = (trainer(comm, values="int8") for _ in range(2))
        for one in (first, second):
            one.step(gradients(0, 0), ONE_BUCKET)
        state = first.state.state_dict()
        with pytest.raises(ValueError, match="'bias'"):
            trainer(comm).state.load_state_dict(state)  # of "f32", where nothing of it waits
        for name in WHOLE:
            assert second.residual(name).any()
            del state["compressor"]["parameters"][name]
        second.state.load_state_dict(state)
        for name in SIZES:
            expected = np.zeros(SIZES[name]) if name in WHOLE else first.residual(name)
            np.testing.assert_array_equal(second.residual(name), expected)

    on_ranks(1, run)


def test_where_an_average_is_not_a_number_small_parameters_keep_what_waits() -> None:
    poisoned = {**gradients(1, 1), "bias": np.full(7, np.nan, np.float32)}

    def run(comm: Communicator) -> None:
        one = trainer(comm, values="int8", nonfinite="send")
        one.step(gradients(comm.rank, 0), ONE_BUCKET)
        before = {name: one.residual(name).copy() for name in WHOLE}
        averages = one.step(poisoned if comm.rank else gradients(0, 1), ONE_BUCKET)
        for name in WHOLE:  # they share a scale
            assert np.isnan(averages[name]).all()
            np.testing.assert_array_equal(one.residual(name), before[name])
        assert np.isfinite(one.step(gradients(comm.rank, 2), ONE_BUCKET)["bias"]).all()

    on_ranks(2, run)


@pytest.mark.parametrize("ranks", [2, 3])
def test_averages_do_not_depend_on_the_order_in_a_bucket(ranks: int) -> None:
    def run(comm: Communicator) -> tuple[list[Arrays], list[Arrays]]:
        layouts = ONE_BUCKET, [["hidden", "norm", "scale", "embedding", "bias"]]
        first, second = (trainer(comm, values="int8") for _ in layouts)
        steps = [
            [one.step(gradients(comm.rank, step), layout) for step in range(STEPS)]
            for one, layout in zip((first, second), layouts, strict=True)
        ]
        return [*zip(*steps, strict=True)], [{n: one.residual(n) for n in SIZES} for one in (first, second)]

    for steps, residuals in on_ranks(ranks, run):
        for one, other in (*steps, residuals):
            for name in one:
                np.testing.assert_array_equal(one[name], other[name])


@pytest.mark.parametrize("values", ["f32", "int8"])
def test_what_was_given_is_what_was_sent_and_what_is_kept(values: str) -> None:
    def run(comm: Communicator) -> tuple[list[Arrays], Arrays]:
        one = trainer(comm, values=values)
        averages = [one.step(gradients(comm.rank, step), TWO_BUCKETS) for step in range(STEPS)]
        return averages, {part.name: part.values.copy() for part in one.state._compressor.residuals}

    assert_kept(on_ranks(RANKS, run))


def assert_kept(found: list[tuple[list[Arrays], Arrays]]) -> None:
    """``found``: of each rank the averages of all steps, which must be the same, and its residuals."""
    assert all(
        one[name].tobytes() == own[name].tobytes()
        for averages, _ in found
        for one, own in zip(averages, found[0][0], strict=True)
        for name in SIZES
    )
    for name in found[0][1]:
        given = sum(gradients(rank, step)[name].astype(np.float64) for rank in range(RANKS) for step in range(STEPS))
        sent = RANKS * sum(averages[name].astype(np.float64) for averages in found[0][0])
        kept = sum(residuals[name].astype(np.float64) for _, residuals in found)
        np.testing.assert_allclose(sent + kept, given, atol=2e-5)
        least = 0.1 if name in MATRICES else 1e-4
        assert np.linalg.norm(kept) > least * np.linalg.norm(given)  # or the test shows nothing


MIXED = ByShape(RANK, 100, tables=("embedding",), density=0.05)


@pytest.mark.parametrize("buckets", [ONE_BUCKET, TWO_BUCKETS])
def test_products_and_largest_entries_share_buckets(buckets: list[list[str]]) -> None:
    def run(comm: Communicator, compress: LowRank | telegrad.TopK) -> tuple[list[Arrays], int]:
        one = Trainer(comm, compress=compress)
        averages = [one.step(gradients(comm.rank, step), buckets) for step in range(STEPS)]
        return averages, one.state.stats.selected

    found = on_ranks(RANKS, lambda comm: run(comm, LowRank(values="f32", policy=MIXED)))
    topk = on_ranks(RANKS, lambda comm: run(comm, telegrad.TopK(0.05, small_elements=100)))
    reference = Reference(["hidden"], RANKS)
    for step in range(STEPS):
        given = [gradients(rank, step) for rank in range(RANKS)]
        expected = reference.step(given)["hidden"].ravel()
        for averages, _ in found:
            own = averages[step]
            assert all(own[name].tobytes() == found[0][0][step][name].tobytes() for name in SIZES)
            np.testing.assert_allclose(own["hidden"], expected, rtol=1e-4, atol=2e-5)
            assert own["embedding"].tobytes() == topk[0][0][step]["embedding"].tobytes()
            for name in WHOLE:
                np.testing.assert_allclose(own[name], np.mean([one[name] for one in given], axis=0), atol=1e-6)
    assert all(selected > STEPS * (MATRICES["hidden"].words + 0.04 * 1200) for _, selected in found)


@pytest.mark.parametrize("values", ["f32", "int8"])
def test_what_was_given_is_what_was_sent_and_what_is_kept_of_mixed_buckets(values: str) -> None:
    def run(comm: Communicator) -> tuple[list[Arrays], Arrays]:
        one = Trainer(comm, compress=LowRank(values=values, policy=MIXED))
        averages = [one.step(gradients(comm.rank, step), TWO_BUCKETS) for step in range(STEPS)]
        return averages, {part.name: part.values.copy() for part in one.state._compressor.residuals}

    assert_kept(on_ranks(RANKS, run))


def test_mixed_buckets_go_on_bitwise_and_bear_infinity() -> None:
    poisoned = {**gradients(1, 1), "embedding": np.full(1200, np.inf, np.float32)}

    def run(comm: Communicator) -> None:
        first, second = (
            Trainer(comm, compress=LowRank(values="f32", policy=MIXED), nonfinite="send") for _ in range(2)
        )
        first.step(gradients(comm.rank, 0), TWO_BUCKETS)
        averages = first.step(poisoned if comm.rank else gradients(0, 1), TWO_BUCKETS)
        assert np.isinf(averages["embedding"]).all()
        assert np.isfinite(averages["hidden"]).all()
        second.state.load_state_dict(first.state.state_dict())
        for step in range(2, 5):
            both = [one.step(gradients(comm.rank, step), TWO_BUCKETS) for one in (first, second)]
            assert all(both[0][name].tobytes() == both[1][name].tobytes() for name in SIZES)

    on_ranks(2, run)


def test_entries_of_bfloat16_gradients_stay_as_they_are() -> None:
    """TopK has no 8 bits for them."""

    def run(comm: Communicator) -> Arrays:
        compress = LowRank(policy=ByShape(RANK, 100, tables=("embedding",), density=1, select="topk"))
        return Trainer(comm, torch.bfloat16, compress=compress).step(gradients(0, 0), ONE_BUCKET)

    given = torch.from_numpy(gradients(0, 0)["embedding"]).bfloat16().float().numpy()
    np.testing.assert_array_equal(on_ranks(1, run)[0]["embedding"], given)


@pytest.mark.parametrize(
    ("compress", "match"),
    [
        (telegrad.TopK(policy=ByShape(2)), "give compress=LowRank\\(policy=…\\)"),
        (LowRank(policy=lambda _: ParameterCompression(rank=2)), "rank=2 of parameter 'bias' of shape \\(64,\\)"),
        (LowRank(policy=ByShape(tables=("weights",))), "tables names 'weights', which the model does not have"),
    ],
)
def test_policies_that_do_not_fit(compress: Any, match: str) -> None:
    with Communicator.local(1)[0] as comm, pytest.raises(ValueError, match=match):
        DDPState(comm, torch.nn.Linear(64, 64), compress=compress)


def test_a_policy_sees_the_shape() -> None:
    seen = []

    def policy(tensor: ParameterInfo) -> ParameterCompression:
        seen.append(tensor.shape)
        return ParameterCompression(rank=1 if len(tensor.shape) > 1 else None)

    with Communicator.local(1)[0] as comm:
        state = DDPState(comm, torch.nn.Linear(64, 32), compress=LowRank(policy=policy))
        assert state.state_dict()["factors"]["weight"].shape == (64, 1)
    assert seen == [(32, 64), (32,)]


def test_a_matrix_of_low_rank_arrives_whole_from_the_second_step_on() -> None:
    random = np.random.default_rng(1)
    one, other = (random.standard_normal((2, rows, RANK)) for rows in (30, 40))
    given = [(one[0] * (rank + 1)) @ other[0].T for rank in range(2)]

    def run(comm: Communicator) -> npt.NDArray[np.float32]:
        step = {**gradients(comm.rank, 0), "embedding": given[comm.rank].astype(np.float32).ravel()}
        one = trainer(comm)
        rows = one.step(step, ONE_BUCKET)["embedding"].reshape(30, 40)
        assert [*np.flatnonzero(rows.any(axis=1))] == [*np.arange(RANK) * 30 // RANK]
        return rows.ravel() + one.step(step, ONE_BUCKET)["embedding"]

    expected = np.mean(given, axis=0).ravel()
    np.testing.assert_allclose(on_ranks(2, run)[0], 2 * expected, rtol=1e-4, atol=2e-4)


def test_bytes_are_those_of_the_narrow_matrices() -> None:
    def run(comm: Communicator) -> int:
        one = trainer(comm, values=values)
        one.step(gradients(comm.rank, 0), ONE_BUCKET)
        before = comm.stats()["bytes_sent"]
        one.step(gradients(comm.rank, 1), ONE_BUCKET)
        assert one.state.stats.selected == 2 * sum(shape.words for shape in MATRICES.values())
        return int(comm.stats()["bytes_sent"] - before)

    words, whole = sum(shape.words for shape in MATRICES.values()), sum(SIZES[name] for name in WHOLE)
    values = "f32"
    assert on_ranks(2, run) == [4 * words + 4 * whole] * 2
    values = "int8"
    of_p, of_q = (sum(shape[side] * RANK for shape in MATRICES.values()) for side in range(2))
    scales = sum(-(-count // 256) for count in (of_p, of_q, whole))
    assert on_ranks(2, run) == [words + whole + 4 * scales] * 2


def test_numbers_of_other_matrices_do_not_cost_precision() -> None:
    """One scale is for 256 numbers, of which these matrices fill less: it must be of all of them alike."""

    def run(comm: Communicator) -> list[Arrays]:
        one = trainer(comm, values="int8")
        return [one.step(_of_unlike_lengths(step), ONE_BUCKET) for step in range(10)]

    found = on_ranks(1, run)[0]
    for name in MATRICES:
        given = sum(_of_unlike_lengths(step)[name].astype(np.float64) for step in range(10))
        sent = sum(averages[name].astype(np.float64) for averages in found)
        assert np.linalg.norm(given - sent) < 0.1 * np.linalg.norm(given) / 10  # which is one step's


def _of_unlike_lengths(step: int) -> Arrays:
    """Matrices of two columns of unlike lengths, one matrix a million times the other."""
    rest = gradients(0, step)
    for name, length in (("embedding", 1e-3), ("hidden", 1e3)):
        random = np.random.default_rng(len(name))
        left, right = (random.standard_normal((n, RANK)) for n in MATRICES[name][:2])
        rest[name] = (length * (left * [1, 0.01]) @ right.T).astype(np.float32).ravel()
    return rest


def test_infinity_stays_out_of_residuals_of_rounded_factors() -> None:
    """It spoils the scale that it shares with other matrices, whose averages may be NaN then."""
    poisoned = {**gradients(1, 1), "hidden": np.full(1000, np.inf, np.float32)}

    def run(comm: Communicator) -> Arrays:
        one = trainer(comm, values="int8", nonfinite="send")
        one.step(poisoned if comm.rank else gradients(0, 1), ONE_BUCKET)
        assert all(np.isfinite(part.values).all() for part in one.state._compressor.residuals)
        return one.step(gradients(comm.rank, 2), ONE_BUCKET)

    assert all(np.isfinite(average).all() for average in on_ranks(2, run)[0].values())


@pytest.mark.parametrize("values", ["f32", "int8"])
def test_training_goes_on_bitwise_from_a_state(values: str) -> None:
    def run(comm: Communicator) -> None:
        first = trainer(comm, values=values)
        for step in range(3):
            first.step(gradients(comm.rank, step), TWO_BUCKETS)
        state, second = first.state.state_dict(), trainer(comm, values=values)
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
        (
            lambda state: state["factors"].update(hidden=torch.zeros(50, 3)),
            "is of rank 3, but compress= here of rank 2",
        ),
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
    both_have_one = threading.Barrier(2)

    def raising(comm: Communicator) -> None:
        one = trainer(comm, nonfinite="raise")
        both_have_one.wait(60)  # an abort ends also what another rank has not finished
        one.step(poisoned if comm.rank == 1 else gradients(0, 1), TWO_BUCKETS)

    told, raised = outcomes(2, raising)
    assert isinstance(raised, NonFiniteGradient)
    assert "'hidden' are NaN or infinite" in str(raised)
    assert "'hidden' are NaN or infinite" in str(told)


@pytest.mark.parametrize("policy", ["raise", "skip", "send"])
@pytest.mark.parametrize("compress", [telegrad.TopK(0.05, small_elements=100), LowRank(RANK, 100)])
def test_a_peers_failure_is_an_error_of_the_averages(compress: Any, policy: str) -> None:
    """As DDP reads them from futures, with any ``compress``. The error itself is in ``failure``."""
    both_trained = threading.Barrier(2)

    def run(comm: Communicator) -> tuple[type[BaseException], bool, Exception | None]:
        one = Trainer(comm, compress=compress, nonfinite=policy)
        one.step(gradients(comm.rank, 0), TWO_BUCKETS)
        before = one.memory()
        both_trained.wait(60)  # an abort ends also what another rank has not finished
        if comm.rank == 1:
            raise ArithmeticError
        with pytest.raises(RuntimeError, match="PeerFailed") as found:
            one.step(gradients(comm.rank, 1), TWO_BUCKETS)
        return found.type, str(one.memory()) == str(before), one.state.failure

    kind, is_undone, failure = outcomes(2, run)[0]
    assert kind is RuntimeError
    assert isinstance(failure, PeerFailed)
    assert is_undone == (policy == "skip")


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
        return trainer(comm, dtype=torch.bfloat16).step(gradients(comm.rank, 0), ONE_BUCKET)

    averages = on_ranks(2, run)[0]
    given = [torch.from_numpy(gradients(rank, 0)["hidden"]).bfloat16().float().numpy() for rank in range(2)]
    expected = Reference(["hidden"], 2).step([{"hidden": one} for one in given])["hidden"].ravel()
    np.testing.assert_allclose(averages["hidden"], expected, rtol=2**-8, atol=1e-3)


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


def _halves_added(terms: npt.NDArray[np.float64]) -> Any:
    while len(terms) > 1:
        half = (len(terms) + 1) // 2
        sums = terms[:half].copy()
        sums[: len(terms) - half] += terms[half:]
        terms = sums
    return terms[0]


@pytest.mark.parametrize("rows", [1, 2, 5, 448, 1001])
def test_sums_of_columns_add_halves(rows: int) -> None:
    columns = np.random.default_rng(rows).standard_normal((rows, 3)).astype(np.float32)
    columns[:, -1] = 2 * columns[:, 0]
    made = columns.astype(np.float64)
    lengths = np.sqrt(_halves_added(made * made))
    np.testing.assert_array_equal(squared_lengths(columns), _halves_added(made * made))
    for number in range(3):
        own = made[:, number]
        length = np.sqrt(_halves_added(own * own))
        if not length > 1e-6 * lengths[number]:
            own[:] = 0
            continue
        own /= length
        for other in range(number + 1, 3):
            made[:, other] -= own * _halves_added(own * made[:, other])
    np.testing.assert_array_equal(orthonormal(columns), made.astype(np.float32))


def test_products_add_their_terms_in_order() -> None:
    random = np.random.default_rng(4)
    basis, factor = (random.standard_normal((rows, 3)).astype(np.float32) for rows in (17, 29))
    expected = np.zeros((17, 29), np.float32)
    for number in range(3):
        term = basis[:, number, None] * factor[:, number]
        expected = term if number == 0 else expected + term
    out = np.full(17 * 29, np.nan, np.float32)
    product(basis, factor.T, out)
    assert out.tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: LowRank(0), ValueError, "rank=0 must be at least 1"),
        (lambda: LowRank(-1), ValueError, "rank=-1"),
        (lambda: LowRank(1.5), TypeError, "rank=1.5"),
        (lambda: LowRank(2, small_elements=-1), ValueError, "small_elements=-1"),
        (lambda: LowRank(2, values="bf16"), ValueError, "values='bf16' does not exist: use one of int8, f32"),
        (lambda: LowRank(2, policy=ByShape()), ValueError, "rank=2 is not used with policy="),
        (lambda: LowRank(small_elements=9, policy=ByShape()), ValueError, "small_elements=9 is not used with policy="),
        (lambda: LowRank(policy="tables"), TypeError, "policy is a str: give a ByShape, or a function"),
        (lambda: ByShape(0), ValueError, "rank=0"),
        (lambda: ByShape(tables="codes"), TypeError, r"tables=\('codes',\)"),
        (lambda: ByShape(density=0.1), ValueError, "density=0.1 is not used without tables="),
        (lambda: ByShape(select="topk"), ValueError, "select='topk' is not used without tables="),
        (lambda: ByShape(tables=("codes",), density=0), ValueError, "density=0"),
        (lambda: ByShape(tables=("codes",), select="most"), ValueError, "select='most' does not exist"),
        (lambda: ParameterCompression(rank=0), ValueError, "rank=0"),
        (lambda: ParameterCompression(rank=2, density=0.1), ValueError, "rank=2 sends the whole matrix"),
        (lambda: ParameterCompression(ExactTopK(), rank=2), ValueError, "rank=2 sends the whole matrix"),
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


def test_a_synchronizers_state_of_low_rank_is_for_low_rank() -> None:
    model = torch.nn.Linear(64, 64)
    with Communicator.local(1)[0] as comm:
        with contextlib.closing(telegrad.Synchronizer(model, comm, compress=LowRank())) as one:
            model(torch.ones(1, 64)).sum().backward()
            state = one.state_dict()
        with contextlib.closing(telegrad.Synchronizer(model, comm, compress=telegrad.TopK())) as other:
            with pytest.raises(ValueError, match="state has factors of compress=LowRank"):
                other.load_state_dict(state)
            without = other.state_dict()
        with (
            contextlib.closing(telegrad.Synchronizer(model, comm, compress=LowRank())) as one,
            pytest.raises(ValueError, match="state\\['factors'\\] is not of these parameters"),
        ):
            one.load_state_dict(without)


@pytest.mark.parametrize(
    "make", [DDPState, lambda comm, model, **options: telegrad.Synchronizer(model, comm, **options).close()]
)
def test_a_rank_that_compresses_nothing_is_told(monkeypatch: pytest.MonkeyPatch, make: Callable[..., Any]) -> None:
    monkeypatch.setattr(choices, "_told", set())
    with Communicator.local(1)[0] as comm, pytest.warns(telegrad.ChoiceWarning, match="compresses no parameter"):
        make(comm, torch.nn.Linear(64, 64), compress=LowRank(500))


def test_options_that_do_not_fit() -> None:
    with Communicator.local(1)[0] as comm:
        model = torch.nn.Linear(64, 64)
        with pytest.raises(ValueError, match="leave momentum to the optimizer"):
            DDPState(comm, model, compress=LowRank(), momentum=Momentum(0.9))
        with pytest.raises(ValueError, match="use kind='dense'"):
            DDPState(comm, model, compress=LowRank(), warmup=Warmup(5, "falling"))
        with pytest.raises(ValueError, match="plan='optimal' needs to know what groups cost"):
            telegrad.Synchronizer(model, comm, compress=LowRank(), plan="optimal")
        with pytest.raises(ValueError, match="leave momentum to the optimizer"):
            telegrad.Synchronizer(model, comm, compress=LowRank(), momentum=Momentum(0.9))


def test_a_state_of_another_rank_names_both() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 20))  # the second is whole at rank 16
    with Communicator.local(1)[0] as comm:
        saved = DDPState(comm, model, compress=LowRank(16)).state_dict()
        for rank in (8, 4):
            other = DDPState(comm, model, compress=LowRank(rank))
            said = (
                rf"is of rank 16, but compress= here of rank {rank}: load it with compress=telegrad.LowRank\(rank=16\)"
            )
            with pytest.raises(ValueError, match=said):
                other.load_state_dict(saved)
