"""Every selection policy, awkward tensors, and what must be true of the entries that leave one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from telegrad.compress import SELECTIONS, Residual, selection_named

LONG = 1 << 15  # from here on policies take a sample of the tensor first

EVERY = [(name, selection_named(name)) for name in SELECTIONS] + [
    (f"{name} of one sign", selection_named(name, same_sign=True)) for name in ("topk", "trimmed", "search")
]


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


def tensor(number: int) -> tuple[str, np.ndarray, int]:
    """Kind, values and k of the tensor of this number; one in a hundred is long."""
    rng = np.random.default_rng(number)
    kind = list(KINDS)[number % len(KINDS)]
    n = int(rng.integers(LONG, 2 * LONG)) if number // len(KINDS) % 100 == 0 else int(rng.integers(1, 700))
    share = 10.0 ** rng.uniform(-3.5, 0)
    with np.errstate(under="ignore"):
        x = KINDS[kind](rng, n).astype(np.float32)
    return kind, x, max(1, round(share * n))


def keys(x: np.ndarray, sign: int) -> np.ndarray:
    """What entries are ranked by; below 1 what is not of ``sign``."""
    bits: np.ndarray = (-x if sign < 0 else x).view(np.int32)
    return bits & np.int32(0x7FFFFFFF) if sign == 0 else bits


def check_move(x: np.ndarray, entry: Residual, indices: np.ndarray, values: np.ndarray, sign: int) -> None:
    """The moved entries ascend, nothing that stays is larger, and both together are ``x``."""
    assert (indices[1:] > indices[:-1]).all()
    left = entry.values.copy()
    assert not left[indices].any()
    left[indices] = values
    assert np.array_equal(left.view(np.uint32), x.view(np.uint32))
    has_moved = np.zeros(x.size, np.bool_)
    has_moved[indices] = True
    stays = keys(x, sign)[~has_moved]
    if indices.size and stays.size:
        assert stays.max() <= keys(values, sign).min()
    if indices.size < stays.size:
        assert not (np.abs(entry.values) > np.float32(entry.peak)).any()


def check_ties(x: np.ndarray, indices: np.ndarray, sign: int) -> None:
    """Of equal entries those with the lowest indices were moved."""
    ranked = keys(x, sign)
    if indices.size:
        tied = np.flatnonzero(ranked == ranked[indices].min())
        has_moved = np.zeros(x.size, np.bool_)
        has_moved[indices] = True
        moved = has_moved[tied]
        assert (moved[:-1] >= moved[1:]).all()
