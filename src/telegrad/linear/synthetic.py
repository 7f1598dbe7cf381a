"""Made-up rows with the published shapes of data sets: as many features, entries a row, and columns that have any.

They are not those data sets: which features a row has is drawn for each feature alone, those of any rank are scattered
over the indices, and labels follow planted weights and some noise. Which rows there are depends on the seed alone, not
on who makes them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from telegrad.linear.popularity import Popularity
from telegrad.linear.rows import Rows, joined

_BLOCK_ROWS = 64  # made at once, with random numbers of their own
_NOISE = 0.3  # standard deviation beside that of the scores, 1
_SCATTER = 2_654_435_761  # a prime, which divides no number of features
_OFTEN = 0.05  # features that at least so many rows have are drawn row by row
_LEAST_VALUE = 0.1  # of values before rows are scaled; the largest is 1 more


@dataclass(frozen=True)
class Shape:
    """``rows``, ``features`` and mean ``entries`` a row; ``columns``: how many features any of all the rows has."""

    name: str
    rows: int
    features: int
    entries: int
    columns: int
    binary: bool

    @property
    def popularity(self) -> Popularity:
        """That gives these entries and columns, as expected values. Raises ``ValueError`` where none does."""
        return _fitted(self.entries, self.columns, self.rows)


@functools.cache
def _fitted(entries: int, columns: int, rows: int) -> Popularity:
    return Popularity.fitted(entries, columns, rows)


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("url", 2_396_130, 3_231_961, 116, 3_231_961, True),
        Shape("webspam", 350_000, 16_609_143, 3_730, 680_715, False),
    )
}
"""Of URL and Webspam (trigrams). Rows and features: SparCML, Table 1. All features of URL occur; that 680,715 of
Webspam's do is what the literature on linear classification says as far as we remember, and not verified."""


def synthetic_rows(shape: Shape, first: int, last: int, *, seed: int = 0) -> Rows:
    """Rows number ``first`` to ``last``, without the latter, with labels -1 and 1.

    Values are 1 where the shape is binary, else positive numbers of rows of length 1. Features of ranks beyond
    ``shape.features`` share the columns of the others. Raises ``ValueError`` for numbers that are no range, and for
    shapes that have no ``popularity``.
    """
    if not 0 <= first <= last:
        raise ValueError(f"first={first} and last={last} are no range of rows: use 0 <= first <= last")
    blocks = _Blocks(shape, seed)
    parts = []
    for block in range(first // _BLOCK_ROWS, -(-last // _BLOCK_ROWS)):
        at = block * _BLOCK_ROWS
        rows = blocks.rows(np.random.default_rng([seed, 1, block]))
        parts.append(rows.part(max(first - at, 0), min(last - at, _BLOCK_ROWS)))
    return joined(parts, shape.features)


class _Blocks:
    """What all blocks of rows share."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self.shape, self.popularity = shape, shape.popularity
        self.weights = np.random.default_rng([seed, 0]).standard_normal(shape.features, np.float32)
        self.often = self.popularity.more_often_than(_OFTEN)
        ranks = np.arange(1.0, self.often + 1)
        self.chance = self.popularity.chance(ranks).astype(np.float32)
        self.columns = self._columns_of(ranks)
        # Of the scores, so that both labels come about as often, although some features are in every row.
        mean, square = (1.0, 1.0) if shape.binary else (0.5 + _LEAST_VALUE, 1 / 12 + (0.5 + _LEAST_VALUE) ** 2)
        weights = self.weights[self.columns].astype(np.float64)
        chance = self.chance.astype(np.float64)
        self.length = 1.0 if shape.binary else np.sqrt(square * shape.entries)
        self.mean_score = mean * (weights @ chance) / self.length
        rest = square * (self.popularity.entries() - chance.sum())
        variance = (weights**2) @ (square * chance - (mean * chance) ** 2) + rest
        self.deviation = np.sqrt(variance) / self.length

    def rows(self, random: np.random.Generator) -> Rows:
        shape = self.shape
        row, often = np.nonzero(random.random((_BLOCK_ROWS, self.often), np.float32) < self.chance)
        other_row, ranks = self.popularity.draw(self.often, _BLOCK_ROWS, random)
        columns = np.concatenate([self.columns[often], self._columns_of(ranks)])
        entries = np.sort(np.concatenate([row, other_row]) * shape.features + columns)
        entries = entries[np.diff(entries, prepend=-1) > 0]
        borders = np.searchsorted(entries, np.arange(_BLOCK_ROWS + 1) * shape.features)
        counts = np.diff(borders)
        which = np.repeat(np.arange(_BLOCK_ROWS), counts)
        indices = (entries - which * shape.features).astype(np.uint32)
        values = np.ones(indices.size, np.float32)
        if not shape.binary:
            values = random.random(indices.size, np.float32) + np.float32(_LEAST_VALUE)
            squares = np.bincount(which, values**2, _BLOCK_ROWS)
            values /= np.sqrt(np.maximum(squares, 1e-30)).astype(np.float32)[which]
        scores = np.bincount(which, self.weights[indices] * values, _BLOCK_ROWS)
        scores = (scores - self.mean_score) / self.deviation + _NOISE * random.standard_normal(_BLOCK_ROWS)
        labels = np.where(scores > 0, np.float32(1), np.float32(-1))
        return Rows(borders.astype(np.uint64), indices, values, labels, shape.features)

    def _columns_of(self, ranks: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        """The same for each rank at any time, and no two of the first ``features`` ranks alike."""
        own = np.mod(ranks, self.shape.features).astype(np.int64)
        return np.asarray(own * _SCATTER % self.shape.features)
