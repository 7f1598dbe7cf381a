"""The values that benchmarks of sparse sums send."""

from __future__ import annotations

import math

import numpy as np

from telegrad.tools.bench.sparse import exponent_bits, largest_of_gradients, value_bits


def test_sums_are_exact_in_any_order_and_one_alone_is_a_bfloat16() -> None:
    drawn = np.stack([largest_of_gradients(20_000, rank) for rank in range(8)])
    np.testing.assert_array_equal(drawn.sum(axis=0, dtype=np.float32), drawn.sum(axis=0, dtype=np.float64))
    np.testing.assert_array_equal(drawn[::-1].cumsum(axis=0)[-1], drawn.cumsum(axis=0)[-1])
    assert not (drawn.view(np.uint32) & 0xFFFF).any()
    assert 1 <= np.abs(drawn).min() < 1.02
    assert np.abs(drawn).max() <= 64
    assert abs(drawn.mean()) < 0.05


def test_exponents_have_the_entropy_that_bounds_are_computed_with() -> None:
    exponents = np.frexp(largest_of_gradients(200_000, 0))[1]
    parts = np.unique(exponents, return_counts=True)[1] / exponents.size
    entropy = -sum(part * math.log2(part) for part in parts)
    assert abs(entropy - exponent_bits()) < 0.02
    assert value_bits("f32", packed=True) == 24 + exponent_bits()
    assert value_bits("bf16", packed=False) == 16
    assert value_bits("int8", packed=True) == value_bits("int8", packed=False)
