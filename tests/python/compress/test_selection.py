"""The selection policies: how many entries, which, and what stays."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
import selection_reference

from telegrad.compress import (
    SELECTIONS,
    BucketTopK,
    ExactTopK,
    GaussianThreshold,
    RandomK,
    Residual,
    ReusedThreshold,
    SampledThreshold,
    Selection,
    ThresholdSearch,
    TrimmedTopK,
    selection_named,
)

EVERY = [selection_named(name) for name in SELECTIONS]
SAME_SIGN = [selection_named(name, same_sign=True) for name in ("topk", "trimmed", "search")]


def _entry(size: int, k: int) -> Residual:
    return Residual("weight", np.zeros(size, np.float32), k)


def _call(policy: Selection, entry: Residual, gradient: np.ndarray, offset: int = 0) -> tuple[np.ndarray, np.ndarray]:
    indices, values = np.empty(policy.capacity(entry), np.uint32), np.empty(policy.capacity(entry), np.float32)
    count = policy.select(entry, gradient.astype(np.float32), indices, values, offset)
    assert count <= policy.capacity(entry)
    return indices[:count], values[:count]


@pytest.mark.parametrize("policy", [*EVERY, ReusedThreshold(1), *SAME_SIGN])
@pytest.mark.parametrize("k", [1, 10, 500, 1000])
def test_nothing_is_lost_and_nothing_sent_twice(policy: Selection, k: int) -> None:
    rng, entry = np.random.default_rng(k), _entry(1000, k)
    sent, given = np.zeros(1000), np.zeros(1000)
    for _ in range(30):
        gradient = rng.integers(-50, 50, 1000).astype(np.float32)  # sums of these are exact
        indices, values = _call(policy, entry, gradient, 100)
        assert (np.diff(indices.astype(np.int64)) > 0).all()
        sent[indices - 100] += values
        given += gradient
        np.testing.assert_array_equal(sent + entry.values, given)


def test_topk_sends_exactly_k_of_residual_plus_gradient() -> None:
    rng, entry, expected = np.random.default_rng(0), _entry(999, 20), np.zeros(999, np.float32)
    for _ in range(20):
        gradient = rng.standard_normal(999).astype(np.float32)
        indices, values = _call(ExactTopK(), entry, gradient)
        expected += gradient
        indices_, values_ = np.empty(20, np.uint32), np.empty(20, np.float32)
        selection_reference.accumulate_topk(expected, None, 20, indices_, values_, 0)
        np.testing.assert_array_equal(indices, indices_)
        np.testing.assert_array_equal(values, values_)
        np.testing.assert_array_equal(entry.values, expected)


@pytest.mark.parametrize("growth", [0.9, 1.0, 1.2])
def test_reused_threshold_stays_between_half_and_twice_k(growth: float) -> None:
    rng, entry, counts = np.random.default_rng(1), _entry(20_000, 200), []
    for step in range(60):
        gradient = rng.standard_normal(20_000) * growth**step
        counts.append(len(_call(ReusedThreshold(), entry, gradient)[0]))
    assert 100 <= min(counts)
    assert max(counts) <= 400
    assert 150 <= np.mean(counts) <= 300


def test_the_threshold_is_exact_at_every_intervalth_call() -> None:
    rng, entry, counts = np.random.default_rng(2), _entry(5000, 50), []
    for _ in range(12):
        entry.values.fill(0)  # so that only chance moves the count
        counts.append(len(_call(ReusedThreshold(4), entry, rng.standard_normal(5000))[0]))
    assert counts[::4] == [50, 50, 50]
    assert set(counts[1:4]) != {50}  # those between only follow


@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_a_jump_falls_back_to_exact_topk_at_once(scale: float) -> None:
    rng, entry = np.random.default_rng(3), _entry(5000, 50)
    _call(ReusedThreshold(100), entry, rng.standard_normal(5000))
    entry.values.fill(0)
    assert len(_call(ReusedThreshold(100), entry, rng.standard_normal(5000) * scale)[0]) == 50


def test_constant_gradients_send_k_entries_and_the_lowest_first() -> None:
    for policy in EVERY:
        if isinstance(policy, RandomK | BucketTopK | GaussianThreshold):
            continue
        entry = _entry(100, 10)
        for _ in range(3):
            indices, _ = _call(policy, entry, np.ones(100))
            assert len(indices) == 10
        entry = _entry(100, 10)
        assert _call(policy, entry, np.ones(100))[0].tolist() == list(range(10))


def test_zeros_are_not_sent_by_a_reused_threshold() -> None:
    entry = _entry(100, 10)
    gradient = np.zeros(100)
    gradient[:3] = 1
    _call(ReusedThreshold(), entry, gradient)  # exact: ten entries, seven of them zero
    assert entry.threshold is not None
    assert entry.threshold > 0
    gradient[:8] = 1
    assert _call(ReusedThreshold(), entry, gradient)[0].tolist() == list(range(8))


def test_density_one_sends_everything() -> None:
    for policy in EVERY:
        entry = _entry(50, 50)
        gradient = np.random.default_rng(4).standard_normal(50).astype(np.float32)
        gradient[7] = 0
        indices, values = _call(policy, entry, gradient)
        assert indices.tolist() == list(range(50))
        np.testing.assert_array_equal(values, gradient)
        assert not entry.values.any()


@pytest.mark.parametrize("policy", [*EVERY, *SAME_SIGN])
def test_same_input_same_output(policy: Selection) -> None:
    def run() -> list[tuple[np.ndarray, np.ndarray]]:
        rng, entry = np.random.default_rng(5), _entry(3000, 30)
        return [_call(policy, entry, rng.standard_normal(3000)) for _ in range(25)]

    for (a, b), (c, d) in zip(run(), run(), strict=True):
        np.testing.assert_array_equal(a, c)
        np.testing.assert_array_equal(b, d)


@pytest.mark.parametrize("policy", [*EVERY, *SAME_SIGN, ReusedThreshold(1), ReusedThreshold(gain=0.9)])
@pytest.mark.parametrize("k", [1, 30, 1000])
def test_the_peak_bounds_the_residual(policy: Selection, k: int) -> None:
    rng, entry = np.random.default_rng(k), _entry(1000, k)
    assert entry.peak == np.inf  # nobody has looked
    for step in range(40):
        gradient = rng.standard_normal(1000) * 10.0 ** rng.integers(-3, 4)
        if step % 4 == 0:
            gradient = np.sign(gradient)  # many of one magnitude
        _call(policy, entry, gradient)
        assert np.abs(entry.values).max() <= np.float32(entry.peak) < np.inf


@pytest.mark.parametrize("policy", SAME_SIGN)
def test_entries_of_one_sign_by_turns(policy: Selection) -> None:
    rng, entry = np.random.default_rng(6), _entry(2000, 20)
    for call in range(6):
        _, values = _call(policy, entry, rng.standard_normal(2000))
        assert (np.sign(values) == (1 if call % 2 == 0 else -1)).all()
        assert 20 <= values.size <= policy.capacity(entry)
    entry = _entry(100, 10)
    gradient = np.zeros(100)
    gradient[:30], gradient[40:43] = 1, -1
    assert _call(policy, entry, gradient)[0].size in (10, 20)
    assert _call(policy, entry, np.zeros(100))[0].tolist() == [40, 41, 42]  # there are no more
    assert _call(policy, entry, np.zeros(100))[0].size >= 10
    assert _call(policy, entry, np.zeros(100))[0].size == 0


@pytest.mark.parametrize("growth", [0.9, 1.0, 1.2])
def test_a_sampled_threshold_always_sends_k_to_2k(growth: float) -> None:
    rng, entry, thresholds = np.random.default_rng(1), _entry(20_000, 200), []
    for step in range(60):
        indices, _ = _call(SampledThreshold(), entry, rng.standard_normal(20_000) * growth**step)
        assert 200 <= indices.size <= 400
        thresholds.append(entry.threshold)
    assert len(set(thresholds)) >= 12  # a search at every fifth call at least
    assert growth != 1 or len(set(thresholds)) < 30  # and not at every call


def test_a_sampled_threshold_is_searched_at_every_fifth_call() -> None:
    rng, entry, thresholds = np.random.default_rng(2), _entry(20_000, 200), []
    for _ in range(11):
        entry.values.fill(0)  # so that only chance moves the count
        _call(SampledThreshold(tolerance=1e-6), entry, rng.standard_normal(20_000))
        thresholds.append(entry.threshold)
    assert len(set(thresholds[:5])) == len(set(thresholds[5:10])) == 1
    assert len(set(thresholds)) == 3


@pytest.mark.parametrize(
    ("size", "k", "policy", "expected"),
    [
        (2048, 20, BucketTopK(), [5] * 4),
        (1024, 1, BucketTopK(), [1, 1]),  # at least one of each
        (100, 10, BucketTopK(), [10]),
        (600, 60, BucketTopK(), [51, 9]),
        (1100, 11, BucketTopK(512, 8), [8, 8, 1]),
        (100, 1, BucketTopK(512, 64), [13]),
        (100, 1, BucketTopK(512, 64, least=64), [64]),
        (40, 1, BucketTopK(512, 64, least=64), [40]),
        (1100, 11, BucketTopK(512, 8, least=8), [8, 8, 8]),
        (600, 60, BucketTopK(least=20), [51, 20]),
        (96, 6, BucketTopK(bucket_elements=32), [2, 2, 2]),
    ],
)
def test_every_bucket_sends_its_share(size: int, k: int, policy: BucketTopK, expected: list[int]) -> None:
    rng, entry = np.random.default_rng(3), _entry(size, k)
    for _ in range(3):
        gradient = rng.standard_normal(size) * np.linspace(0.01, 1, size)  # the largest all at the end
        indices, _ = _call(policy, entry, gradient)
        assert np.bincount(indices // policy.bucket_elements).tolist() == expected
        assert policy.capacity(entry) == sum(expected)


def test_a_gaussian_threshold_finds_k_where_values_are_normal_and_never_more_than_2k() -> None:
    rng = np.random.default_rng(4)
    entry = _entry(100_000, 1000)
    assert _call(GaussianThreshold(), entry, rng.standard_normal(100_000))[0].size == pytest.approx(1000, rel=0.1)
    entry = _entry(1000, 10)
    few = np.zeros(1000)
    few[500] = 1
    assert _call(GaussianThreshold(), entry, few)[0].tolist() == [500]
    entry = _entry(1000, 10)
    many = np.ones(1000)
    many[::2] = -1
    assert _call(GaussianThreshold(), entry, many)[0].size <= 20


def test_a_gaussian_threshold_is_lowered_until_three_quarters_of_k_reach_it() -> None:
    rng = np.random.default_rng(5)
    entry, lowered = _entry(20_000, 200), 0
    for _ in range(12):  # what is left has lost its tail, of which the fit knows nothing
        gradient = rng.standard_normal(20_000).astype(np.float32)
        total = entry.values + gradient
        fitted = abs(total.mean()) + statistics.NormalDist().inv_cdf(1 - 200 / 40_000) * total.std()
        indices, _ = _call(GaussianThreshold(), entry, gradient)
        assert 150 <= indices.size <= 400
        assert entry.threshold is not None
        times = np.log(entry.threshold / fitted) / np.log(0.9)
        assert times == pytest.approx(round(times), abs=1e-3)
        assert round(times) == 0 or (np.abs(total) >= entry.threshold / 0.9001).sum() < 150
        lowered += round(times)
    assert lowered > 0


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("policy", [policy for policy in EVERY if not isinstance(policy, RandomK | GaussianThreshold)])
def test_what_is_not_finite_is_sent_first(policy: Selection, value: float) -> None:
    entry, gradient = _entry(400, 4), np.random.default_rng(7).standard_normal(400)
    gradient[[33, 301]] = value
    for call in range(2):
        indices, _ = _call(policy, entry, gradient if call == 0 else np.ones(400))
        assert 4 <= indices.size <= 8
        assert np.isfinite(entry.values).all()
        assert call == 1 or {33, 301} <= set(indices.tolist())
        assert np.abs(entry.values).max() <= np.float32(entry.peak)
        assert entry.threshold is None or 0 <= entry.threshold < np.inf


def test_random_entries_depend_on_seed_rank_name_and_call() -> None:
    def chosen(policy: RandomK, name: str = "weight", calls: int = 0) -> tuple[int, ...]:
        entry = Residual(name, np.zeros(5000, np.float32), 50, calls=calls)
        return tuple(_call(policy, entry, np.ones(5000))[0].tolist())

    assert chosen(RandomK(1)) == chosen(RandomK(1))
    policies = [RandomK(1), RandomK(2), RandomK(1, rank=1)]
    others = {chosen(policy) for policy in policies} | {chosen(RandomK(1), "bias"), chosen(RandomK(1), calls=1)}
    assert len(others) == 5


def test_every_name_is_a_policy_with_its_options() -> None:
    for name, policy in SELECTIONS.items():
        assert isinstance(selection_named(name, 3), policy)
    assert selection_named("sampled", 3) == SampledThreshold(3)
    assert selection_named("sampled") == SampledThreshold(5)
    assert selection_named("topk", 3, same_sign=True) == ExactTopK(same_sign=True)


def test_bad_names_and_options() -> None:
    with pytest.raises(ValueError, match=r"selection='best' does not exist: use one of reused, topk, trimmed, search"):
        selection_named("best")
    with pytest.raises(ValueError, match=r"same_sign=True does not fit selection='sampled': use one of topk, trimmed"):
        selection_named("sampled", same_sign=True)
    with pytest.raises(ValueError, match="interval=0 must be at least 1"):
        selection_named("topk", 0)
    for make, message in (
        (lambda: TrimmedTopK(step=1), r"step=1 must be in \(0, 1\)"),
        (lambda: ThresholdSearch(tolerance=0.0), r"tolerance=0.0 must be in \(0, 1\)"),
        (lambda: SampledThreshold(tolerance=2), r"tolerance=2 must be in \(0, 1\)"),
        (lambda: ReusedThreshold(gain=-0.1), "gain=-0.1 must be from 0 to 1: the power of count / k"),
        (lambda: ReusedThreshold(gain=float("nan")), "gain=nan must be from 0 to 1"),
        (lambda: BucketTopK(0), "bucket_elements=0 must be at least 1"),
        (lambda: BucketTopK(8, 9), "per_bucket=9 must be at least 1 and at most 8"),
        (lambda: BucketTopK(8, 4, 9), "least=9 must be at least 1 and at most 8"),
        (lambda: RandomK(-1), "seed=-1 must be at least 0"),
        (lambda: RandomK(rank=2**32), "rank=4294967296 must be at least 0 and at most 4294967295"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
    with pytest.raises(TypeError, match=r"step='0.2' must be a number in \(0, 1\)"):
        TrimmedTopK(step="0.2")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="gain='0.1' must be a number from 0 to 1"):
        ReusedThreshold(gain="0.1")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="rank=1.0 must be an int"):
        RandomK(rank=1.0)  # type: ignore[arg-type]


def test_a_numpy_interval() -> None:
    assert type(ReusedThreshold(np.int64(3)).interval) is int  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("interval", "error"), [(0, ValueError), (-1, ValueError), (2.5, TypeError), (True, TypeError)]
)
@pytest.mark.parametrize("policy", [ReusedThreshold, SampledThreshold])
def test_bad_interval(policy: type[ReusedThreshold], interval: object, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"interval={interval!r} must be"):
        policy(interval)  # type: ignore[arg-type]
