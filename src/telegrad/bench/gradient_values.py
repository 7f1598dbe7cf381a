"""Values for benchmarks of sparse sums: how long messages get that pack values depends on how their exponents lie."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

_RANDOM_SEED = 1_000_003
_PARETO_EXPONENT = 3
_LARGEST = 64.0


def largest_of_gradients(count: int, rank: int) -> npt.NDArray[np.float32]:
    """``count`` float32 like gradients of which the largest were selected: of a Pareto distribution with exponent 3, of
    both signs, up to 64 times the least magnitude. They have 7 significant bits, so that sums are the same in any
    order."""
    draw = np.random.default_rng((rank, _RANDOM_SEED))
    magnitude = np.minimum((1 - draw.random(count)) ** (-1 / _PARETO_EXPONENT), _LARGEST)
    fraction, exponent = np.frexp(magnitude)
    rounded = np.ldexp(np.floor(fraction * 128) / 128, exponent)
    return np.asarray(rounded * draw.choice([-1, 1], count), np.float32)


def exponent_bits() -> float:
    """The entropy of their exponents: an octave has the same part of what the ones below have left."""
    stays = 1 - 2.0**-_PARETO_EXPONENT
    return -math.log2(stays) - (1 - stays) / stays * math.log2(1 - stays)
