"""What e3m0 and codebook2 keep of float32 values, by the definitions of core/kernels/quantise.hpp, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]

E3M0_BLOCK, CODEBOOK_BLOCK = 1024, 512
_ONE, _ITERATIONS = np.float32(2**20), 2


def e3m0(values: Floats) -> Floats:
    """``values`` after they have been encoded."""
    return _in_blocks(values, E3M0_BLOCK, _e3m0_block)


def codebook2(values: Floats) -> Floats:
    """``values`` after they have been encoded."""
    return _in_blocks(values, CODEBOOK_BLOCK, _codebook2_block)


def _in_blocks(values: Floats, size: int, decoded: Callable[[Floats], Floats]) -> Floats:
    blocks = [values[begin : begin + size] for begin in range(0, len(values), size)]
    whole = [decoded(one) if np.isfinite(one).all() else np.full_like(one, np.nan) for one in blocks]
    return np.concatenate([np.zeros(0, np.float32), *whole])


def _normalised(values: Floats, most: np.float32) -> Floats:
    """Such that the largest magnitude becomes ``most``."""
    scale = np.abs(values).max()
    magnify = np.float32(2.0**100 if scale < np.float32(2.0**-60) else 1.0)
    factor = most / (scale * magnify) if scale > 0 else np.float32(0)
    return values * magnify * factor


def _e3m0_block(values: Floats) -> Floats:
    part = np.abs(_normalised(values, np.float32(1)))
    code = (part.view(np.int32) + (1 << 22) >> 23) - 120
    code = np.maximum(code, part >= np.float32(2.0**-7))
    power = np.where(code > 0, np.ldexp(np.float32(1), code - 7), np.float32(0)).astype(np.float32)
    return np.abs(values).max() * np.copysign(power, np.where(code > 0, values, 0)).astype(np.float32)


def _codebook2_block(values: Floats) -> Floats:
    fixed = np.trunc(_normalised(values, _ONE)).astype(np.int64)
    mean = _quotient(fixed.sum(), fixed.size)
    outer = _quotient(np.abs(fixed - mean).sum(), fixed.size) * 3 // 2
    edges = np.array([mean - outer, mean, mean + outer])
    for _ in range(_ITERATIONS):
        sums, counts = _bins(fixed, edges)
        centers = np.array([_quotient(*one) for one in zip(sums, counts, strict=True)])
        edges = centers[:-1] + centers[1:] >> 1
    sums, counts = _bins(fixed, edges)
    unit = np.float64(np.abs(values).max()) / np.float64(_ONE)
    levels = _finite_bf16((sums.astype(np.float64) / counts * unit).astype(np.float32))
    halves = np.float32(0.5) * levels
    bounds = halves[:-1] + halves[1:]
    return levels[(values[:, None] >= bounds).sum(axis=1)]


def _quotient(number: np.int64, by: int) -> int:
    """Towards zero."""
    return int(np.trunc(np.float64(number) / by))


def _bins(fixed: Integers, edges: Integers) -> tuple[Integers, Integers]:
    """Sums and counts of four bins. An empty one has those of the nearest lower bin, or else of the lowest."""
    code = (fixed[:, None] >= edges).sum(axis=1)
    counts = np.bincount(code, minlength=4)
    sums = np.array([fixed[code == one].sum() for one in range(4)])
    held = np.maximum.accumulate(np.where(counts > 0, np.arange(4), np.flatnonzero(counts)[0]))
    return sums[held], counts[held]


def _finite_bf16(values: Floats) -> Floats:
    """To the nearest, ties to even, at most the largest, and without negative zeros."""
    bits = values.view(np.uint32)
    upper = bits + 0x7FFF + (bits >> 16 & 1) >> 16
    upper = np.where(upper & 0x7FFF >= 0x7F80, upper - 1, upper)
    return (np.where(upper == 0x8000, 0, upper) << 16).astype(np.uint32).view(np.float32)
