"""The core's selections against their oracle, bit for bit, at every SIMD level."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import selection_checks as checks
from hypothesis import HealthCheck, example, given, settings

from telegrad.kernels.select import Chosen, Sign, cpu

at_every_level = pytest.mark.usefixtures("simd_level")
examined = settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


@at_every_level
@examined
@given(*checks.SELECT)
def test_accumulate_select(x: np.ndarray, seed: int, capacity: int, threshold: float, sign: Sign) -> None:
    checks.check_select(cpu, x, seed, capacity, threshold, sign)


def _reused(threshold: float | None, k: int, *, is_due: bool = False, copies: bool, **moving: Any) -> tuple[Any, ...]:
    """What ``accumulate_reused`` makes of 1001 numbers: its findings, what it moved, the residual and the velocity."""
    residual, gradient, velocity = np.random.default_rng(3).standard_normal((3, 1001)).astype(np.float32)
    was, velocity_was = residual.copy(), velocity.copy()
    indices, values = checks.outputs(2 * k)
    fresh, fresh_velocity = np.full((2, 1001), 9, np.float32)
    if copies:
        before, velocity_before = residual, velocity
        residual, velocity = fresh, fresh_velocity
    else:
        before = velocity_before = None
    step = None
    if moving:
        step = cpu.VelocityStep(velocity, velocity_before, **moving)
    found = cpu.accumulate_reused(
        residual, gradient, k, threshold, indices, values, 7, is_due=is_due, before=before, velocity=step
    )
    for one, kept in ((before, was), (velocity_before, velocity_was)):
        assert one is None or np.array_equal(one, kept)
    count = found.moved
    return found[:3], found.threshold, found.peak, indices[:count], values[:count], residual, step and velocity


@at_every_level
@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize(
    ("threshold", "is_due"), [(2.0, False), (0.1, False), (9.0, False), (2.0, True), (None, False)]
)
def test_accumulate_reused(threshold: float | None, is_due: bool, copies: bool) -> None:
    residual, gradient, _ = np.random.default_rng(3).standard_normal((3, 1001)).astype(np.float32)
    k = 80
    indices, values = checks.outputs(2 * k)
    if threshold == 2.0 and not is_due:
        count = cpu.accumulate_select(residual, gradient, threshold, indices, values, 7)
        assert k <= count <= 2 * k
        found, lowest, peak = (True, False, count), np.float32(threshold), threshold
    else:
        chosen = cpu.accumulate_topk(residual, gradient, k, indices, values, 7)
        count, found, lowest, peak = k, (True, True, k), chosen.threshold, chosen.peak
    result = _reused(threshold, k, is_due=is_due, copies=copies)
    assert result[:3] == (found, lowest, peak)
    for one, expected in zip(result[3:6], (indices[:count], values[:count], residual), strict=True):
        np.testing.assert_array_equal(one, expected)


@at_every_level
@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("threshold", [3.0, 0.1, None])
def test_a_velocity_moves_in_the_same_pass(threshold: float | None, nesterov: bool, masks: bool, copies: bool) -> None:
    is_exact = threshold != 3.0
    if nesterov and threshold is not None:
        threshold += 1  # what is added is larger
    residual, gradient, velocity = np.random.default_rng(3).standard_normal((3, 1001)).astype(np.float32)
    k, m = 60, np.float32(0.9)
    moved = (velocity + gradient) * m if nesterov else velocity * m + gradient
    total = residual + (gradient + moved if nesterov else moved)
    found, _, _, indices, values, left, after = _reused(
        threshold, k, copies=copies, factor=0.9, nesterov=nesterov, masks=masks
    )
    where = indices - np.uint32(7)
    assert found == (True, is_exact, where.size)
    assert where.size > 0
    np.testing.assert_array_equal(values, total[where])
    total[where] = 0
    np.testing.assert_array_equal(left, total)
    if masks:
        moved[where] = 0
    np.testing.assert_array_equal(after, moved)


@at_every_level
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 100.0])
def test_a_gradient_at_the_limit_is_not_taken(value: float) -> None:
    before, gradient = np.random.default_rng(3).standard_normal((2, 1001)).astype(np.float32)
    residual, (indices, values) = np.empty(1001, np.float32), checks.outputs(20)
    was = before.copy()
    gradient[700] = value
    taken = cpu.accumulate_reused(residual, gradient, 10, 3.0, indices, values, 0, before=before, limit=100.0)
    assert not taken.sound
    np.testing.assert_array_equal(before, was)
    gradient[700] = -99
    taken = cpu.accumulate_reused(residual, gradient, 10, 3.0, indices, values, 0, before=before, limit=100.0)
    assert taken.sound
    assert taken.added == 99


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


@pytest.mark.parametrize("size", [1, 17, 1000])
def test_accumulate_all(size: int) -> None:
    checks.check_all(cpu, size)
