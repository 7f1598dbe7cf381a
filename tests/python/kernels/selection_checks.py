"""What every implementation of the selections must do, on what tests draw: what the oracle does, bit for bit."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
import selection_reference
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from telegrad.kernels.select import Chosen, Sign

FEW_VALUES = st.sampled_from([0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 3.0, -7.25, 1e-40, -1e-40])
SPECIAL_VALUES = st.sampled_from([math.inf, -math.inf, math.nan, 3e38, -3e38])
FINITE = hnp.arrays(np.float32, st.integers(1, 200), elements=FEW_VALUES | st.floats(-1e6, 1e6, width=32))
VECTORS = FINITE | hnp.arrays(np.float32, st.integers(1, 80), elements=FEW_VALUES | SPECIAL_VALUES)
SIGNS = st.sampled_from([0, 1, -1])
SHARES = st.floats(0.001, 1)
SEEDS = st.integers(0, 2**31)

SELECT = (VECTORS, SEEDS, st.integers(0, 200), st.sampled_from([0.0, 0.25, 0.5, 1.0, 100.0]), SIGNS)
TOPK = (VECTORS, SHARES, SEEDS, SIGNS)
TRIMMED = (VECTORS, SHARES, SEEDS, SIGNS, st.sampled_from([0.2, 0.05, 0.3, 0.99]))
SEARCH = (VECTORS, SHARES, SEEDS, SIGNS, st.sampled_from([1e-3, 0.1, 1e-6]))
BUCKETS = (VECTORS, st.integers(1, 90), st.integers(1, 9), SEEDS)
RANDOM = (VECTORS, SHARES, st.tuples(st.integers(0, 2**64 - 1), *[st.integers(0, 2**32 - 1)] * 3))
NORMAL = (FINITE, SEEDS)


def outputs(capacity: int) -> tuple[np.ndarray, np.ndarray]:
    return np.full(capacity, 0xDEAD, np.uint32), np.full(capacity, np.nan, np.float32)


def bits(x: np.ndarray) -> list[int]:
    """Every NaN is the same one: which one an addition makes is the processor's affair, and an NVIDIA GPU makes
    0x7FFFFFFF of any."""
    if x.dtype == np.float32:
        x = np.where(np.isnan(x), np.float32(np.nan), x)
    return x.view(np.uint32).tolist()  # type: ignore[no-any-return]


def gradient_of(x: np.ndarray, seed: int) -> np.ndarray | None:
    """Small steps, finite so that a NaN of ``x`` keeps its bits; for every third seed none."""
    return None if seed % 3 == 0 else np.random.default_rng(seed).choice(np.array([0, 0.5, -1], np.float32), x.size)


def expect_the_same(
    kernels: Any, name: str, x: np.ndarray, capacity: int, *arguments: Any, sign: Sign | None = None
) -> Chosen:
    """Runs ``name`` of ``kernels`` and of the oracle on ``x``; returns what the first said."""
    got, expected = x.copy(), x.copy()
    (indices, values), (indices_, values_) = outputs(capacity), outputs(capacity)
    signed = () if sign is None else (sign,)
    chosen: Chosen = getattr(kernels, name)(got, *arguments, indices, values, 7, *signed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of numpy, about NaN and infinity
        expected_chosen: Chosen = getattr(selection_reference, name)(
            expected, *arguments, indices_, values_, 7, *signed
        )
    assert chosen.count == expected_chosen.count
    np.testing.assert_equal(chosen.threshold, expected_chosen.threshold)
    assert bits(indices[: chosen.count]) == bits(indices_[: chosen.count])
    assert bits(values[: chosen.count]) == bits(values_[: chosen.count])
    assert bits(got) == bits(expected)
    assert (np.diff(indices[: chosen.count].astype(np.int64)) > 0).all()
    assert math.isnan(chosen.peak) or not (np.abs(got) > np.float32(chosen.peak)).any()
    return chosen


def check_select(kernels: Any, x: np.ndarray, seed: int, capacity: int, threshold: float, sign: Sign) -> None:
    gradient = gradient_of(x, seed)
    got, expected = x.copy(), x.copy()
    (indices, values), (indices_, values_) = outputs(capacity), outputs(capacity)
    count = kernels.accumulate_select(got, gradient, threshold, indices, values, 7, sign)
    assert count == selection_reference.accumulate_select(expected, gradient, threshold, indices_, values_, 7, sign)
    kept = min(count, capacity)
    assert bits(got) == bits(expected)
    assert bits(indices[:kept]) == bits(indices_[:kept])
    assert bits(values[:kept]) == bits(values_[:kept])


def check_topk(kernels: Any, x: np.ndarray, share: float, seed: int, sign: Sign) -> None:
    k = max(1, round(share * x.size))
    chosen = expect_the_same(kernels, "accumulate_topk", x, k, gradient_of(x, seed), k, sign=sign)
    assert chosen.count == k if sign == 0 else chosen.count <= k


def check_queued(
    kernels: Any, name: str, x: np.ndarray, seed: int, capacity: int, what: Any, sign: Sign | None
) -> None:
    """``queue_topk`` with k, others with a tuple, maybe no sign: the oracle's entries, and how many they are."""
    whats = what if isinstance(what, tuple) else (what,)
    signed = () if sign is None else (sign,)
    gradient = gradient_of(x, seed)
    got, expected = x.copy(), x.copy()
    (indices, values), (indices_, values_) = outputs(capacity), outputs(capacity)
    count = np.full(1, -5, np.int32 if seed % 2 else np.int64)
    getattr(kernels, f"queue_{name}")(got, gradient, *whats, indices, values, count, 7, *signed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of numpy, about NaN and infinity
        found = getattr(selection_reference, f"accumulate_{name}")(
            expected, gradient, *whats, indices_, values_, 7, *signed
        )
    moved = min(found.count, capacity)
    assert count.tolist() == [moved]
    assert bits(got) == bits(expected)
    assert bits(indices[:moved]) == bits(indices_[:moved])
    assert bits(values[:moved]) == bits(values_[:moved])


def check_trimmed(kernels: Any, x: np.ndarray, share: float, seed: int, sign: Sign, step: float) -> None:
    k = max(1, round(share * x.size))
    trimmed = expect_the_same(kernels, "accumulate_trimmed", x, k, gradient_of(x, seed), k, step, sign=sign)
    exact = kernels.accumulate_topk(x.copy(), gradient_of(x, seed), k, *outputs(k), 7, sign)
    np.testing.assert_equal((trimmed.count, trimmed.threshold), (exact.count, exact.threshold))


def check_search(kernels: Any, x: np.ndarray, share: float, seed: int, sign: Sign, tolerance: float) -> None:
    k = max(1, round(share * x.size))
    most = min(2 * k, x.size)
    chosen = expect_the_same(kernels, "accumulate_search", x, most, gradient_of(x, seed), k, tolerance, sign=sign)
    assert chosen.count <= most if sign else k <= chosen.count <= most


def check_buckets(kernels: Any, x: np.ndarray, bucket: int, share: int, seed: int) -> None:
    per_bucket, rest = min(share, bucket), x.size % bucket
    of_last = 1 + seed % min(share, rest) if rest else 0
    count = x.size // bucket * per_bucket + of_last
    arguments = (gradient_of(x, seed), bucket, per_bucket, of_last)
    assert expect_the_same(kernels, "accumulate_buckets", x, count, *arguments).count == count


def check_random(kernels: Any, x: np.ndarray, share: float, draw: tuple[int, int, int, int]) -> None:
    k = max(1, round(share * x.size))
    assert expect_the_same(kernels, "accumulate_random", x, k, gradient_of(x, draw[0]), k, draw).count == k


def check_normal(kernels: Any, x: np.ndarray, seed: int, rel: float) -> None:
    """``rel``: how far mean and deviation may be from the oracle's, of the largest magnitude."""
    got, expected = x.copy(), x.copy()
    found = kernels.accumulate_normal(got, gradient_of(x, seed))
    said = selection_reference.accumulate_normal(expected, gradient_of(x, seed))
    assert bits(got) == bits(expected)
    largest, exact = float(np.abs(expected).max()), expected.astype(np.float64)
    assert found == pytest.approx(said, rel=0, abs=rel * largest)
    # The difference of two equal squares: half of the digits may be lost.
    assert found == pytest.approx((exact.mean(), exact.std()), rel=0, abs=1e-6 * largest)


def check_all(kernels: Any, size: int) -> None:
    x = np.random.default_rng(size).standard_normal((2, size)).astype(np.float32)
    residual = x[0].copy()
    indices, values = outputs(size + 3)
    kernels.accumulate_all(residual, x[1].copy(), indices, values, 2**32 - size)
    assert indices[:size].tolist() == list(range(2**32 - size, 2**32))
    np.testing.assert_array_equal(values[:size], x[0] + x[1])
    assert not residual.any()
