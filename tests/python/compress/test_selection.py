"""The selection policies: how many entries, which, and what stays."""

from __future__ import annotations

import numpy as np
import pytest

from telegrad.compress import ExactTopK, Residual, ReusedThreshold, Selection
from telegrad.ops.select import naive


def _entry(size: int, k: int) -> Residual:
    return Residual("weight", np.zeros(size, np.float32), k)


def _call(policy: Selection, entry: Residual, gradient: np.ndarray, offset: int = 0) -> tuple[np.ndarray, np.ndarray]:
    indices, values = np.empty(policy.capacity(entry), np.uint32), np.empty(policy.capacity(entry), np.float32)
    count = policy.select(entry, gradient.astype(np.float32), indices, values, offset)
    assert count <= policy.capacity(entry)
    return indices[:count], values[:count]


@pytest.mark.parametrize("policy", [ExactTopK(), ReusedThreshold(), ReusedThreshold(1)])
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
        naive.select_topk(expected, 20, indices_, values_, 0)
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
    for policy in (ExactTopK(), ReusedThreshold()):
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
    for policy in (ExactTopK(), ReusedThreshold()):
        entry = _entry(50, 50)
        gradient = np.random.default_rng(4).standard_normal(50).astype(np.float32)
        gradient[7] = 0
        indices, values = _call(policy, entry, gradient)
        assert indices.tolist() == list(range(50))
        np.testing.assert_array_equal(values, gradient)
        assert not entry.values.any()


def test_same_input_same_output() -> None:
    def run() -> list[tuple[np.ndarray, np.ndarray]]:
        rng, entry = np.random.default_rng(5), _entry(3000, 30)
        return [_call(ReusedThreshold(), entry, rng.standard_normal(3000)) for _ in range(25)]

    for (a, b), (c, d) in zip(run(), run(), strict=True):
        np.testing.assert_array_equal(a, c)
        np.testing.assert_array_equal(b, d)


@pytest.mark.parametrize("policy", [ExactTopK(), ReusedThreshold(), ReusedThreshold(1), ReusedThreshold(gain=0.9)])
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


def test_a_numpy_interval() -> None:
    assert type(ReusedThreshold(np.int64(3)).interval) is int  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("interval", "error"), [(0, ValueError), (-1, ValueError), (2.5, TypeError), (True, TypeError)]
)
def test_bad_interval(interval: object, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"interval={interval!r} must be"):
        ReusedThreshold(interval)  # type: ignore[arg-type]
