"""The core's selections against their oracle, bit for bit, at every SIMD level."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from telegrad.ops.select import Chosen, Sign, cpu, naive

FEW_VALUES = st.sampled_from([0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 3.0, -7.25, 1e-40, -1e-40])
SPECIAL_VALUES = st.sampled_from([math.inf, -math.inf, math.nan, 3e38, -3e38])
FINITE = hnp.arrays(np.float32, st.integers(1, 200), elements=FEW_VALUES | st.floats(-1e6, 1e6, width=32))
VECTORS = FINITE | hnp.arrays(np.float32, st.integers(1, 80), elements=FEW_VALUES | SPECIAL_VALUES)
SIGNS = st.sampled_from([0, 1, -1])
SHARES = st.floats(0.001, 1)

at_every_level = pytest.mark.usefixtures("simd_level")
examined = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def _outputs(capacity: int) -> tuple[np.ndarray, np.ndarray]:
    return np.full(capacity, 0xDEAD, np.uint32), np.full(capacity, np.nan, np.float32)


def _bits(x: np.ndarray) -> list[int]:
    return x.view(np.uint32).tolist()  # type: ignore[no-any-return]


def _gradient(x: np.ndarray, seed: int) -> np.ndarray | None:
    """Small steps, finite so that a NaN of ``x`` keeps its bits; for every third seed none."""
    return None if seed % 3 == 0 else np.random.default_rng(seed).choice(np.array([0, 0.5, -1], np.float32), x.size)


def _expect_the_same(name: str, x: np.ndarray, capacity: int, *arguments: Any, sign: Sign | None = None) -> Chosen:
    """Runs ``name`` of both modules on ``x``; returns what the core's said."""
    got, expected = x.copy(), x.copy()
    (indices, values), (indices_, values_) = _outputs(capacity), _outputs(capacity)
    signed = () if sign is None else (sign,)
    chosen: Chosen = getattr(cpu, name)(got, *arguments, indices, values, 7, *signed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of numpy, about NaN and infinity
        expected_chosen: Chosen = getattr(naive, name)(expected, *arguments, indices_, values_, 7, *signed)
    assert chosen.count == expected_chosen.count
    np.testing.assert_equal(chosen.threshold, expected_chosen.threshold)
    assert _bits(indices[: chosen.count]) == _bits(indices_[: chosen.count])
    assert _bits(values[: chosen.count]) == _bits(values_[: chosen.count])
    assert _bits(got) == _bits(expected)
    assert (np.diff(indices[: chosen.count].astype(np.int64)) > 0).all()
    assert math.isnan(chosen.peak) or not (np.abs(got) > np.float32(chosen.peak)).any()
    return chosen


@at_every_level
@examined
@given(VECTORS, st.integers(0, 2**31), st.integers(0, 200), st.sampled_from([0.0, 0.25, 0.5, 1.0, 100.0]), SIGNS)
def test_accumulate_select(x: np.ndarray, seed: int, capacity: int, threshold: float, sign: Sign) -> None:
    gradient = _gradient(x, seed)
    got, expected = x.copy(), x.copy()
    (indices, values), (indices_, values_) = _outputs(capacity), _outputs(capacity)
    count = cpu.accumulate_select(got, gradient, threshold, indices, values, 7, sign)
    assert count == naive.accumulate_select(expected, gradient, threshold, indices_, values_, 7, sign)
    kept = min(count, capacity)
    assert _bits(got) == _bits(expected)
    assert _bits(indices[:kept]) == _bits(indices_[:kept])
    assert _bits(values[:kept]) == _bits(values_[:kept])


@at_every_level
@examined
@given(VECTORS, SHARES, st.integers(0, 2**31), SIGNS)
@example(np.array([5, 0, 0], np.float32), 0.67, 0, 0)
@example(np.array([0, 0, 0, 0], np.float32), 0.5, 0, 0)
@example(np.array([1e-40, 2e-40, 1, 0], np.float32), 0.75, 0, 0)
@example(np.array([1, -1, 1, -1, 2], np.float32), 0.6, 0, 0)
@example(np.array([-1, -1, -1], np.float32), 0.6, 0, 1)
def test_accumulate_topk(x: np.ndarray, share: float, seed: int, sign: Sign) -> None:
    k = max(1, round(share * x.size))
    chosen = _expect_the_same("accumulate_topk", x, k, _gradient(x, seed), k, sign=sign)
    assert chosen.count == k if sign == 0 else chosen.count <= k


@at_every_level
@examined
@given(VECTORS, SHARES, st.integers(0, 2**31), SIGNS, st.sampled_from([0.2, 0.05, 0.3, 0.99]))
def test_accumulate_trimmed(x: np.ndarray, share: float, seed: int, sign: Sign, step: float) -> None:
    k = max(1, round(share * x.size))
    trimmed = _expect_the_same("accumulate_trimmed", x, k, _gradient(x, seed), k, step, sign=sign)
    exact = cpu.accumulate_topk(x.copy(), _gradient(x, seed), k, *_outputs(k), 7, sign)
    np.testing.assert_equal((trimmed.count, trimmed.threshold), (exact.count, exact.threshold))


@at_every_level
@examined
@given(VECTORS, SHARES, st.integers(0, 2**31), SIGNS, st.sampled_from([1e-3, 0.1, 1e-6]))
def test_accumulate_search(x: np.ndarray, share: float, seed: int, sign: Sign, tolerance: float) -> None:
    k = max(1, round(share * x.size))
    most = min(2 * k, x.size)
    chosen = _expect_the_same("accumulate_search", x, most, _gradient(x, seed), k, tolerance, sign=sign)
    assert chosen.count <= most if sign else k <= chosen.count <= most


@at_every_level
@examined
@given(VECTORS, st.integers(1, 90), st.integers(1, 9), st.integers(0, 2**31))
def test_accumulate_buckets(x: np.ndarray, bucket: int, share: int, seed: int) -> None:
    per_bucket, of_last = min(share, bucket), min(share, x.size % bucket)
    count = x.size // bucket * per_bucket + of_last
    arguments = (_gradient(x, seed), bucket, per_bucket, of_last)
    assert _expect_the_same("accumulate_buckets", x, count, *arguments).count == count


@at_every_level
@examined
@given(VECTORS, SHARES, st.tuples(st.integers(0, 2**64 - 1), *[st.integers(0, 2**32 - 1)] * 3))
def test_accumulate_random(x: np.ndarray, share: float, draw: tuple[int, int, int, int]) -> None:
    k = max(1, round(share * x.size))
    assert _expect_the_same("accumulate_random", x, k, _gradient(x, draw[0]), k, draw).count == k


@at_every_level
@examined
@given(FINITE, st.integers(0, 2**31))
def test_accumulate_normal(x: np.ndarray, seed: int) -> None:
    got, expected = x.copy(), x.copy()
    found = cpu.accumulate_normal(got, _gradient(x, seed))
    assert found == naive.accumulate_normal(expected, _gradient(x, seed))
    assert found == pytest.approx((expected.astype(np.float64).mean(), expected.astype(np.float64).std()), abs=1e-3)
    assert _bits(got) == _bits(expected)


@at_every_level
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_has_no_distribution(value: float) -> None:
    x = np.ones(40, np.float32)
    x[33] = value
    assert not math.isfinite(cpu.accumulate_normal(x, None)[1])


@at_every_level
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("share", [0.001, 0.01, 0.2])
def test_long_vectors_which_are_sampled(seed: int, share: float) -> None:
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal(40_000) ** (1, 3, 9)[seed]).astype(np.float32)
    gradient = rng.standard_normal(x.size).astype(np.float32)
    k = round(share * x.size)
    for sign in (0, 1, -1):
        assert _expect_the_same("accumulate_topk", x, k, gradient, k, sign=sign).count == k
        assert _expect_the_same("accumulate_trimmed", x, k, gradient, k, 0.2, sign=sign).count == k
        assert k <= _expect_the_same("accumulate_search", x, 2 * k, gradient, k, 1e-3, sign=sign).count <= 2 * k


def test_ties_go_to_the_lowest_index() -> None:
    residual = np.array([1, 2, -1, 1, 2], np.float32)
    indices, values = _outputs(3)
    assert cpu.accumulate_topk(residual, None, 3, indices, values, 0).threshold == 1.0
    assert indices.tolist() == [0, 1, 4]
    assert residual.tolist() == [0, 0, -1, 1, 0]


def test_put_back_undoes_a_move() -> None:
    x = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    residual = x.copy()
    indices, values = _outputs(100)
    cpu.accumulate_topk(residual, None, 100, indices, values, 50)
    cpu.put_back(residual, indices, values, 50)
    np.testing.assert_array_equal(residual, x)


@pytest.mark.parametrize(
    "call",
    [
        lambda x, *out: cpu.accumulate_topk(x, None, 11, *out, 0),
        lambda x, *out: cpu.accumulate_trimmed(x, None, 11, 0.2, *out, 0),
        lambda x, *out: cpu.accumulate_search(x, None, 6, 1e-3, *out, 0),
        lambda x, *out: cpu.accumulate_buckets(x, None, 10, 1, 1, *out, 0),
        lambda x, *out: cpu.accumulate_random(x, None, 11, (0, 0, 0, 0), *out, 0),
    ],
)
def test_outputs_that_are_too_short(call: Callable[..., Chosen]) -> None:
    with pytest.raises(ValueError, match=r"hold 10 entries, but up to 1[12] are to be moved: make them longer"):
        call(np.ones(105, np.float32), *_outputs(10))


@at_every_level
@pytest.mark.parametrize("size", [1, 15, 16, 17, 1000])
def test_accumulate(size: int) -> None:
    x = np.random.default_rng(1).standard_normal((2, size)).astype(np.float32)
    got = x[0].copy()
    cpu.accumulate(got, x[1].copy())
    np.testing.assert_array_equal(got, x[0] + x[1])
