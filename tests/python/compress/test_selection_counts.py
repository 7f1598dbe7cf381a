"""What each policy promises of the number of entries, on 10,000 tensors, most of them awkward; nothing is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from telegrad import _core
from telegrad.compress import (
    SELECTIONS,
    ExactTopK,
    Residual,
    ReusedThreshold,
    SampledThreshold,
    Selection,
    ThresholdSearch,
    TrimmedTopK,
    selection_named,
)

TENSORS = 10_000
LONG = 1 << 15  # from here on policies take a sample of the tensor first
LEVELS = range(_core.best_simd_level() + 1)


@pytest.fixture(autouse=True)
def _best_level_again() -> Iterator[None]:
    yield
    _core.force_simd_level(_core.best_simd_level())


def _with_some(x: np.ndarray, rng: np.random.Generator, *values: float) -> np.ndarray:
    where = rng.integers(0, x.size, max(1, x.size // int(rng.integers(2, 200))))
    x[where] = rng.choice(np.array(values), where.size)
    return x


def _spike(rng: np.random.Generator, n: int) -> np.ndarray:
    x = np.full(n, rng.choice([0.0, 1e-30, 1.0]))
    x[rng.integers(n)] = rng.choice([-1e30, 2.0, 1e-20])
    return x


KINDS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "normal": lambda rng, n: rng.standard_normal(n) * 10.0 ** rng.integers(-30, 30),
    "heavy tails": lambda rng, n: np.clip(np.exp(rng.uniform(1, 20) * rng.standard_normal(n)), 0, 3e38),
    "uniform": lambda rng, n: rng.uniform(-1, 1, n),
    "all equal": lambda rng, n: np.full(n, rng.choice([0.1, -3.0, 1e-38, 3e38])),
    "one spike": _spike,
    "zeros of both signs": lambda rng, n: rng.choice([0.0, -0.0], n),
    "mostly zeros": lambda rng, n: rng.standard_normal(n) * (rng.random(n) < 0.01),
    "denormals": lambda rng, n: rng.integers(-50, 50, n) * 1.4e-45,
    "few values": lambda rng, n: rng.integers(-2, 3, n) / 4,
    "two clumps": lambda rng, n: np.where(rng.random(n) < rng.choice([0.001, 0.05]), 1e6, 1) + rng.random(n) * 1e-3,
    "a ramp": lambda rng, n: np.arange(n) - rng.integers(n),
    "of one sign": lambda rng, n: -rng.random(n),
    "some infinite": lambda rng, n: _with_some(rng.standard_normal(n), rng, np.inf, -np.inf),
    "some NaN": lambda rng, n: _with_some(rng.standard_normal(n), rng, np.nan),
    "nothing finite": lambda rng, n: rng.choice([np.nan, np.inf, -np.inf], n),
    "everything": lambda rng, n: _with_some(rng.standard_normal(n), rng, 0, -0.0, 1e-44, 3e38, -3e38, np.inf, np.nan),
}


def _tensor(number: int) -> tuple[str, np.ndarray, int]:
    """Kind, values and k of the tensor of this number; one in a hundred is long."""
    rng = np.random.default_rng(number)
    kind = list(KINDS)[number % len(KINDS)]
    n = int(rng.integers(LONG, 2 * LONG)) if number // len(KINDS) % 100 == 0 else int(rng.integers(1, 700))
    share = 10.0 ** rng.uniform(-3.5, 0)
    with np.errstate(under="ignore"):
        x = KINDS[kind](rng, n).astype(np.float32)
    return kind, x, max(1, round(share * n))


def _keys(x: np.ndarray, sign: int) -> np.ndarray:
    """What entries are ranked by; below 1 what is not of ``sign``."""
    bits: np.ndarray = (-x if sign < 0 else x).view(np.int32)
    return bits & np.int32(0x7FFFFFFF) if sign == 0 else bits


def _check_move(x: np.ndarray, entry: Residual, indices: np.ndarray, values: np.ndarray, sign: int) -> None:
    """The moved entries ascend, nothing that stays is larger, and both together are ``x``."""
    assert (indices[1:] > indices[:-1]).all()
    left = entry.values.copy()
    assert not left[indices].any()
    left[indices] = values
    np.testing.assert_array_equal(left.view(np.uint32), x.view(np.uint32))
    stays = np.delete(_keys(x, sign), indices)
    if indices.size and stays.size:
        assert stays.max() <= _keys(values, sign).min()
    if indices.size < stays.size:
        assert not (np.abs(entry.values) > np.float32(entry.peak)).any()


def _check_ties(x: np.ndarray, indices: np.ndarray, sign: int) -> None:
    """Of equal entries those with the lowest indices were moved."""
    keys = _keys(x, sign)
    if indices.size:
        tied = np.flatnonzero(keys == keys[indices].min())
        moved = np.isin(tied, indices, assume_unique=True)
        assert (moved[:-1] >= moved[1:]).all()


def _moved(policy: Selection, entry: Residual, gradient: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    room = policy.capacity(entry)
    indices, values = np.full(room, 0xDEAD, np.uint32), np.full(room, np.nan, np.float32)
    count = policy.select(entry, gradient, indices, values, 0)
    assert 0 <= count <= room
    return indices[:count], values[:count]


@pytest.mark.parametrize("ranked", [ExactTopK, TrimmedTopK, ThresholdSearch])
@pytest.mark.parametrize("same_sign", [False, True])
def test_counts_of_10000_tensors(ranked: type[ExactTopK], same_sign: bool) -> None:
    """Exactly k, or k to 2k; of one sign all that there are where those are fewer. At all SIMD levels."""
    policy = ranked(same_sign=same_sign)
    for number in range(TENSORS):
        kind, x, k = _tensor(number)
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
        there_are = x.size if sign == 0 else np.count_nonzero(_keys(x, sign) > 0)
        least = min(k, there_are)
        most = min(2 * k, there_are) if ranked is ThresholdSearch else least
        assert least <= indices.size <= most, (kind, number)
        _check_move(x, entry, indices, values, sign)
        if indices.size == k:
            _check_ties(x, indices, sign)


@pytest.mark.parametrize("policy", [SampledThreshold(), ReusedThreshold()])
def test_counts_of_10000_tensors_with_a_reused_threshold(policy: Selection) -> None:
    """k to 2k, or k/2 to 2k, in every call, whatever tensor the threshold comes from."""
    for number in range(TENSORS):
        _core.force_simd_level(LEVELS[number // len(KINDS) % len(LEVELS)])
        kind, x, k = _tensor(number)
        entry = Residual(kind, np.zeros(x.size, np.float32), k)
        with np.errstate(over="ignore"):
            following = np.random.default_rng(number).permutation(x) * np.float32((1, 0.5, 30)[number % 3])
        for call, gradient in enumerate((x, following)):
            entry.values.fill(0)
            indices, values = _moved(policy, entry, gradient)
            least = k if call == 0 or isinstance(policy, SampledThreshold) else (k + 1) // 2
            assert least <= indices.size <= min(2 * k, x.size), (kind, number)
            _check_move(gradient + np.float32(0), entry, indices, values, 0)


EVERY = [(name, selection_named(name)) for name in SELECTIONS] + [
    (f"{name} of one sign", selection_named(name, same_sign=True)) for name in ("topk", "trimmed", "search")
]


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
