"""Made-up rows with the published shapes of data sets: as many features, as many entries a row.

They are not those data sets. A feature's popularity falls with a power of its rank (Zipf), ranks are scattered over the
indices, labels follow planted weights and some noise. Which rows there are depends on the seed alone, not on who makes
them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from telegrad.linear.rows import Rows, joined

_BLOCK_ROWS = 64  # made at once, with random numbers of their own
_NOISE = 0.3  # standard deviation beside that of the scores, 1
_SCATTER = 2_654_435_761  # a prime, which divides no number of features


@dataclass(frozen=True)
class Shape:
    """``rows``, ``features`` and mean ``entries`` a row as published; ``exponent`` of popularity, which is ours."""

    name: str
    rows: int
    features: int
    entries: int
    exponent: float
    binary: bool


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("url", 2_396_130, 3_231_961, 116, 1.1, True),
        Shape("webspam", 350_000, 16_609_143, 3_730, 1.1, False),
    )
}
"""Of URL and Webspam (trigrams). Source: SparCML, Table 1."""


def synthetic_rows(shape: Shape, first: int, last: int, *, seed: int = 0) -> Rows:
    """Rows number ``first`` to ``last``, without the latter, with labels -1 and 1.

    Values are 1 where the shape is binary, else positive numbers of rows of length 1. Raises ``ValueError`` for numbers
    that are no range.
    """
    if not 0 <= first <= last:
        raise ValueError(f"first={first} and last={last} are no range of rows: use 0 <= first <= last")
    weights = np.random.default_rng([seed, 0]).standard_normal(shape.features, np.float32)
    draws = draws_of(shape)
    parts = []
    for block in range(first // _BLOCK_ROWS, -(-last // _BLOCK_ROWS)):
        at = block * _BLOCK_ROWS
        rows = _block(shape, draws, weights, np.random.default_rng([seed, 1, block]))
        parts.append(rows.part(max(first - at, 0), min(last - at, _BLOCK_ROWS)))
    return joined(parts, shape.features)


@functools.cache
def draws_of(shape: Shape) -> int:
    """How many features must be drawn for a row, so that about ``entries`` different ones are among them."""
    low, high = shape.entries, 64 * shape.entries
    random = np.random.default_rng(0)
    while high - low > shape.entries // 100 + 1:
        draws = (low + high) // 2
        found = np.mean([np.unique(_popularity(shape, random.random(draws))).size for _ in range(8)])
        low, high = (draws, high) if found < shape.entries else (low, draws)
    return high


def _popularity(shape: Shape, uniform: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Ranks of features, 0 the most popular: rank r with a probability that falls as (r + 1)^-exponent."""
    power = 1 - shape.exponent
    reach = (shape.features + 1.0) ** power - 1
    ranks: npt.NDArray[np.float64] = (uniform * reach + 1) ** (1 / power) - 1
    return np.minimum(ranks, shape.features - 1).astype(np.int64)


def _block(shape: Shape, draws: int, weights: npt.NDArray[np.float32], random: np.random.Generator) -> Rows:
    drawn = _popularity(shape, random.random((_BLOCK_ROWS, draws)))
    columns = np.sort(drawn * _SCATTER % shape.features, axis=1)
    kept = np.ones(columns.shape, np.bool_)
    kept[:, 1:] = columns[:, 1:] != columns[:, :-1]
    counts = kept.sum(1)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.uint64)
    indices = columns[kept].astype(np.uint32)
    starts = offsets[:-1].astype(np.int64)
    values = np.ones(indices.size, np.float32)
    if not shape.binary:
        values = random.random(indices.size, np.float32) + np.float32(0.1)
        values /= np.repeat(np.sqrt(np.add.reduceat(values**2, starts)), counts)
    scores = np.add.reduceat(weights[indices] * values, starts)
    scores = scores / np.sqrt(counts if shape.binary else 1) + _NOISE * random.standard_normal(_BLOCK_ROWS)
    labels = np.where(scores > 0, np.float32(1), np.float32(-1))
    return Rows(offsets, indices, values, labels, shape.features)
