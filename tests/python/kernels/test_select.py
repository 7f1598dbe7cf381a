"""The core's selections against their oracle, bit for bit, at every SIMD level."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import selection_checks as checks
from hypothesis import HealthCheck, example, given, settings

from telegrad.kernels.select import Chosen, Sign, cpu

at_every_level = pytest.mark.usefixtures("simd_level")
examined = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


@at_every_level
@examined
@given(*checks.SELECT)
def test_accumulate_select(x: np.ndarray, seed: int, capacity: int, threshold: float, sign: Sign) -> None:
    checks.check_select(cpu, x, seed, capacity, threshold, sign)


@at_every_level
@pytest.mark.parametrize("capacity", [0, 30, 1001])
def test_a_residual_that_is_made_anew(capacity: int) -> None:
    before, gradient = np.random.default_rng(3).standard_normal((2, 1001)).astype(np.float32)
    residual, anew, was = before.copy(), np.full(1001, 9, np.float32), before.copy()
    (indices, values), (indices_, values_) = checks.outputs(capacity), checks.outputs(capacity)
    count = cpu.accumulate_select(residual, gradient, 2.0, indices, values, 7)
    assert count > 60
    assert cpu.accumulate_select(anew, gradient, 2.0, indices_, values_, 7, before=before) == count
    np.testing.assert_array_equal(anew, residual)
    np.testing.assert_array_equal(before, was)
    moved = min(count, capacity)
    np.testing.assert_array_equal(indices_[:moved], indices[:moved])
    np.testing.assert_array_equal(values_[:moved], values[:moved])


@at_every_level
@examined
@given(*checks.TOPK)
@example(np.array([5, 0, 0], np.float32), 0.67, 0, 0)
@example(np.array([0, 0, 0, 0], np.float32), 0.5, 0, 0)
@example(np.array([1e-40, 2e-40, 1, 0], np.float32), 0.75, 0, 0)
@example(np.array([1, -1, 1, -1, 2], np.float32), 0.6, 0, 0)
@example(np.array([-1, -1, -1], np.float32), 0.6, 0, 1)
def test_accumulate_topk(x: np.ndarray, share: float, seed: int, sign: Sign) -> None:
    checks.check_topk(cpu, x, share, seed, sign)


@at_every_level
@examined
@given(*checks.TRIMMED)
def test_accumulate_trimmed(x: np.ndarray, share: float, seed: int, sign: Sign, step: float) -> None:
    checks.check_trimmed(cpu, x, share, seed, sign, step)


@at_every_level
@examined
@given(*checks.SEARCH)
def test_accumulate_search(x: np.ndarray, share: float, seed: int, sign: Sign, tolerance: float) -> None:
    checks.check_search(cpu, x, share, seed, sign, tolerance)


@at_every_level
@examined
@given(*checks.BUCKETS)
def test_accumulate_buckets(x: np.ndarray, bucket: int, share: int, seed: int) -> None:
    checks.check_buckets(cpu, x, bucket, share, seed)


@at_every_level
@examined
@given(*checks.RANDOM)
def test_accumulate_random(x: np.ndarray, share: float, draw: tuple[int, int, int, int]) -> None:
    checks.check_random(cpu, x, share, draw)


@at_every_level
@examined
@given(*checks.NORMAL)
def test_accumulate_normal(x: np.ndarray, seed: int) -> None:
    checks.check_normal(cpu, x, seed, rel=0)


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
        assert checks.expect_the_same(cpu, "accumulate_topk", x, k, gradient, k, sign=sign).count == k
        assert checks.expect_the_same(cpu, "accumulate_trimmed", x, k, gradient, k, 0.2, sign=sign).count == k
        assert (
            k <= checks.expect_the_same(cpu, "accumulate_search", x, 2 * k, gradient, k, 1e-3, sign=sign).count <= 2 * k
        )


def test_ties_go_to_the_lowest_index() -> None:
    residual = np.array([1, 2, -1, 1, 2], np.float32)
    indices, values = checks.outputs(3)
    assert cpu.accumulate_topk(residual, None, 3, indices, values, 0).threshold == 1.0
    assert indices.tolist() == [0, 1, 4]
    assert residual.tolist() == [0, 0, -1, 1, 0]


def test_put_back_undoes_a_move() -> None:
    x = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    residual = x.copy()
    indices, values = checks.outputs(100)
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
        call(np.ones(105, np.float32), *checks.outputs(10))


@at_every_level
@pytest.mark.parametrize("size", [1, 15, 16, 17, 1000])
def test_accumulate(size: int) -> None:
    x = np.random.default_rng(1).standard_normal((2, size)).astype(np.float32)
    got = x[0].copy()
    cpu.accumulate(got, x[1].copy())
    np.testing.assert_array_equal(got, x[0] + x[1])


@pytest.mark.parametrize("size", [1, 17, 1000])
def test_accumulate_all(size: int) -> None:
    checks.check_all(cpu, size)
