"""What each policy promises of the number of entries, on 10,000 tensors, most of them awkward; nothing is lost."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from selection_promises import EVERY, KINDS, LONG, check_move, check_ties, keys, tensor

from telegrad import _core
from telegrad.compress import (
    ExactTopK,
    Residual,
    ReusedThreshold,
    SampledThreshold,
    Selection,
    ThresholdSearch,
    TrimmedTopK,
)

TENSORS = [2500, pytest.param(10_000, marks=pytest.mark.slow)]
LEVELS = range(_core.best_simd_level() + 1)


@pytest.fixture(autouse=True)
def _best_level_again() -> Iterator[None]:
    yield
    _core.force_simd_level(_core.best_simd_level())


def _moved(policy: Selection, entry: Residual, gradient: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    room = policy.capacity(entry)
    indices, values = np.full(room, 0xDEAD, np.uint32), np.full(room, np.nan, np.float32)
    count = policy.select(entry, gradient, indices, values, 0)
    assert 0 <= count <= room
    return indices[:count], values[:count]


@pytest.mark.parametrize("ranked", [ExactTopK, TrimmedTopK, ThresholdSearch])
@pytest.mark.parametrize("same_sign", [False, True], ids=["both signs", "one sign"])
@pytest.mark.parametrize("tensors", TENSORS)
def test_counts_of_many_tensors(ranked: type[ExactTopK], same_sign: bool, tensors: int) -> None:
    """Exactly k, or k to 2k; of one sign all that there are where those are fewer. At all SIMD levels."""
    policy = ranked(same_sign=same_sign)
    for number in range(tensors):
        kind, x, k = tensor(number)
        calls = number // len(KINDS)
        sign = 0 if not same_sign else 1 if calls % 2 == 0 else -1
        x += np.float32(0)  # as the addition to the residual does, it makes -0 to 0
        found = set()
        for level in LEVELS:
            _core.force_simd_level(level)
            entry = Residual(kind, np.zeros(x.size, np.float32), k, calls=calls)
            indices, values = _moved(policy, entry, x)
            found.add((indices.tobytes(), values.tobytes(), entry.values.tobytes(), entry.threshold))
        assert len(found) == 1, (kind, number)
        there_are = x.size if sign == 0 else np.count_nonzero(keys(x, sign) > 0)
        least = min(k, there_are)
        most = min(2 * k, there_are) if ranked is ThresholdSearch else least
        assert least <= indices.size <= most, (kind, number)
        check_move(x, entry, indices, values, sign)
        if indices.size == k:
            check_ties(x, indices, sign)


@pytest.mark.parametrize("policy", [SampledThreshold(), ReusedThreshold()])
@pytest.mark.parametrize("tensors", TENSORS)
def test_counts_of_many_tensors_with_a_reused_threshold(policy: Selection, tensors: int) -> None:
    """k to 2k, or k/2 to 2k, in every call, whatever tensor the threshold comes from."""
    for number in range(tensors):
        _core.force_simd_level(LEVELS[number // len(KINDS) % len(LEVELS)])
        kind, x, k = tensor(number)
        entry = Residual(kind, np.zeros(x.size, np.float32), k)
        with np.errstate(over="ignore"):
            following = np.random.default_rng(number).permutation(x) * np.float32((1, 0.5, 30)[number % 3])
        for call, gradient in enumerate((x, following)):
            entry.values.fill(0)
            indices, values = _moved(policy, entry, gradient)
            least = k if call == 0 or isinstance(policy, SampledThreshold) else (k + 1) // 2
            assert least <= indices.size <= min(2 * k, x.size), (kind, number)
            check_move(gradient + np.float32(0), entry, indices, values, 0)


@pytest.mark.parametrize(("name", "policy"), EVERY, ids=[name for name, _ in EVERY])
@pytest.mark.parametrize("size", [700, LONG + 1])
def test_nothing_is_lost_in_1000_steps(name: str, policy: Selection, size: int) -> None:
    """What was sent and what is left make up what was given: exactly, in numbers whose sums are exact."""
    rng, entry = np.random.default_rng(len(name)), Residual(name, np.zeros(size, np.float32), max(1, size // 100))
    steps = 1000 if size == 700 else 60
    sent, given = np.zeros(size), np.zeros(size)
    for step in range(steps):
        _core.force_simd_level(LEVELS[step % len(LEVELS)])
        gradient = np.rint(rng.standard_normal(size) * 20).astype(np.float32)
        indices, values = _moved(policy, entry, gradient)
        sent[indices] += values
        given += gradient
    np.testing.assert_array_equal(sent + entry.values, given)
    assert np.count_nonzero(sent) > size / 10


@pytest.mark.parametrize(("name", "policy"), EVERY, ids=[name for name, _ in EVERY])
def test_nothing_is_lost_to_rounding_in_1000_steps(name: str, policy: Selection) -> None:
    rng, size = np.random.default_rng(len(name)), 500
    entry = Residual(name, np.zeros(size, np.float32), 5)
    sent, given, moved = np.zeros(size), np.zeros(size), np.zeros(size)
    for _ in range(1000):
        gradient = rng.standard_normal(size).astype(np.float32)
        indices, values = _moved(policy, entry, gradient)
        sent[indices] += values
        given += gradient
        moved += np.abs(entry.values)  # each addition to it rounds by at most half of its last place
        moved[indices] += np.abs(values)
    error = np.abs(sent + entry.values - given)
    assert (error <= np.finfo(np.float32).eps / 2 * moved).all()
