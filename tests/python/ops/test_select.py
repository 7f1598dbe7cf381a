"""The core's selection against its oracle."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from telegrad.ops.select import cpu, naive

FEW_VALUES = st.sampled_from([0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 3.0, -7.25])
VECTORS = hnp.arrays(np.float32, st.integers(1, 200), elements=FEW_VALUES | st.floats(-1e6, 1e6, width=32))


def _outputs(capacity: int) -> tuple[np.ndarray, np.ndarray]:
    return np.full(capacity, 0xDEAD, np.uint32), np.full(capacity, np.nan, np.float32)


@given(VECTORS, st.floats(0.001, 1))
def test_threshold_is_the_kth_largest(x: np.ndarray, share: float) -> None:
    k = max(1, round(share * x.size))
    assert cpu.topk_threshold(x, k) == naive.topk_threshold(x, k)


@given(VECTORS, st.integers(0, 2**31), st.integers(0, 200), st.sampled_from([0.25, 0.5, 1.0, 100.0]))
def test_accumulate_select(x: np.ndarray, seed: int, capacity: int, threshold: float) -> None:
    gradient = np.random.default_rng(seed).choice(np.array([0, 0.5, -1], np.float32), x.size)
    got, expected = x.copy(), x.copy()
    (indices, values), (indices_, values_) = _outputs(capacity), _outputs(capacity)
    count = cpu.accumulate_select(got, gradient, threshold, indices, values, 7)
    assert count == naive.accumulate_select(expected, gradient, threshold, indices_, values_, 7)
    kept = min(count, capacity)
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(indices[:kept], indices_[:kept])
    np.testing.assert_array_equal(values[:kept], values_[:kept])


@settings(max_examples=300)
@given(VECTORS, st.floats(0.001, 1), st.integers(0, 1000))
@example(np.array([5, 0, 0], np.float32), 0.67, 0)
@example(np.array([0, 0, 0, 0], np.float32), 0.5, 3)
@example(np.array([1e-40, 2e-40, 1, 0], np.float32), 0.75, 0)
@example(np.array([1, -1, 1, -1, 2], np.float32), 0.6, 0)
def test_select_topk(x: np.ndarray, share: float, offset: int) -> None:
    x = np.where(np.abs(x) < cpu.TINY, np.float32(0), x) if not 0 < np.abs(x).min() < cpu.TINY else x
    k = max(1, round(share * x.size))
    got, expected = x.copy(), x.copy()
    (indices, values), (indices_, values_) = _outputs(k + 1), _outputs(k + 1)
    assert cpu.select_topk(got, k, indices, values, offset) == naive.select_topk(expected, k, indices_, values_, offset)
    np.testing.assert_array_equal(indices[:k], indices_[:k])
    np.testing.assert_array_equal(values[:k], values_[:k])
    np.testing.assert_array_equal(got, expected)
    assert (np.diff(indices[:k].astype(np.int64)) > 0).all()


def test_ties_go_to_the_lowest_index() -> None:
    residual = np.array([1, 2, -1, 1, 2], np.float32)
    indices, values = _outputs(3)
    assert cpu.select_topk(residual, 3, indices, values, 0) == 1.0
    assert indices.tolist() == [0, 1, 4]
    assert residual.tolist() == [0, 0, -1, 1, 0]


def test_put_back_undoes_a_move() -> None:
    x = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    residual = x.copy()
    indices, values = _outputs(100)
    cpu.select_topk(residual, 100, indices, values, 50)
    cpu.put_back(residual, indices, values, 50)
    np.testing.assert_array_equal(residual, x)


@pytest.mark.parametrize("size", [1, 15, 16, 17, 1000])
def test_accumulate(size: int) -> None:
    x = np.random.default_rng(1).standard_normal((2, size)).astype(np.float32)
    got = x[0].copy()
    cpu.accumulate(got, x[1].copy())
    np.testing.assert_array_equal(got, x[0] + x[1])
