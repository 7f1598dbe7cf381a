"""Made-up rows with the published shapes of data sets: as many features, entries a row, and columns that have any.

They are not those data sets: which features a row has is drawn for each feature alone, those of any rank are scattered
over the indices, and labels follow planted weights and some noise. Which rows there are depends on the seed alone, not
on who makes them.

How often features occur is a power of their rank, through two counts that are published of a data set: the feature of
rank j = 1, 2, … is in a row with probability p_j = min(1, scale · j^-exponent), independently of all others. There is
no last rank: more rows bring features that none had before (Heaps' law).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from telegrad.linear.rows import Rows, joined

F64 = npt.NDArray[np.float64]

EXPONENTS = (1.1, 8.0)
"""Between them one is looked for: ranks and powers of them must be numbers that a float64 can hold."""
_ALONE = 4096  # ranks that are summed one by one …
_WIDTH = 1.005  # … before those that are summed in intervals that grow by this factor, and behind
_LAST = 1e18  # … the integral


def _intervals() -> tuple[F64, F64]:
    """Ranks that stand for intervals of ranks, and how many ranks each stands for."""
    steps = int(np.log(_LAST / _ALONE) / np.log(_WIDTH))
    borders = np.concatenate([np.arange(1.0, _ALONE), np.floor(_ALONE * _WIDTH ** np.arange(steps + 1.0))])
    counts = np.diff(borders)
    return borders[:-1] + (counts - 1) / 2, counts


_RANKS, _COUNTS = _intervals()


@dataclass(frozen=True)
class Popularity:
    """p_j = min(1, ``scale`` · j^-``exponent``)."""

    exponent: float
    scale: float

    @staticmethod
    def fitted(entries: float, columns: float, rows: int) -> Popularity:
        """With so many ``entries`` a row, and in so many ``rows`` so many ``columns`` that are not empty: both are
        expected values. Raises ``ValueError`` where no exponent of ``EXPONENTS`` gives that."""
        low, high = EXPONENTS

        def with_exponent(exponent: float) -> Popularity:
            weights = _RANKS**-exponent
            mass = _COUNTS * weights
            # For each number of ranks that every row has, the scale that gives the rest of the entries to the others.
            every = np.concatenate([[0.0], np.cumsum(_COUNTS)[:-1]])
            scales = (entries - every) / (_tail_of(exponent) + np.cumsum(mass[::-1])[::-1])
            return Popularity(exponent, float(scales[np.argmax(scales * weights < 1)]))

        if not with_exponent(high).columns(rows) < columns < with_exponent(low).columns(rows):
            raise ValueError(
                f"no power of the rank between {low:g} and {high:g} gives {columns:,.0f} columns in {rows:,} rows of "
                f"{entries:g} entries: choose another number of columns"
            )
        for _ in range(44):
            exponent = (low + high) / 2
            low, high = (exponent, high) if with_exponent(exponent).columns(rows) > columns else (low, exponent)
        return with_exponent(high)

    def chance(self, ranks: F64) -> F64:
        """p_j of each rank."""
        return np.minimum(1, self.scale * ranks**-self.exponent)

    def entries(self) -> float:
        """Of a row, expected."""
        return float(_COUNTS @ self.chance(_RANKS) + self.scale * _tail_of(self.exponent))

    def columns(self, rows: int) -> float:
        """How many features ``rows`` rows have among them, expected."""
        with np.errstate(divide="ignore"):  # where p is 1, none lacks the feature
            found = -np.expm1(rows * np.log1p(-self.chance(_RANKS)))
        return float(_COUNTS @ found + rows * self.scale * _tail_of(self.exponent))

    def more_often_than(self, chance: float) -> int:
        """How many features are in a row with at least that probability, below 1."""
        return int((self.scale / chance) ** (1 / self.exponent))

    def draw(self, after: int, rows: int, random: np.random.Generator) -> tuple[npt.NDArray[np.int64], F64]:
        """The entries of ``rows`` rows in features of ranks beyond ``after``, where p is below 1: the row and the rank
        of each, some of them twice.

        A row has feature j if a Poisson process of rate -log(1 - p_j) has a point there, which is so with probability
        p_j. Its points are those of a process with the rate of a continuous power law, thinned.
        """
        begin, power = after + 0.5, self.exponent - 1
        rarest = 1 - self.chance(np.array([after + 1.0]))[0]
        more = -np.log(rarest) / (1 - rarest)  # log(1 - p) / p is largest where p is
        mass = more * self.scale * begin**-power / power
        count = random.poisson(rows * mass)
        where = random.integers(0, rows, count)
        ranks = np.floor(begin * (1 - random.random(count)) ** (-1 / power) + 0.5)
        chance = self.scale * ranks**-self.exponent
        # The power law's mass from j - 1/2 to j + 1/2, over its value at j; further terms are below 1e-8.
        cell = 1 + self.exponent * (self.exponent + 1) / (24 * ranks**2)
        with np.errstate(invalid="ignore", divide="ignore"):
            rate = np.where(chance > 0, -np.log1p(-chance) / chance, 1)
        kept = random.random(count) * more * cell < rate
        return where[kept], ranks[kept]


def _tail_of(exponent: float) -> float:
    """Σ j^-exponent over the ranks behind the intervals."""
    end = float(_RANKS[-1] + _COUNTS[-1] / 2)
    return float(end ** (1 - exponent) / (exponent - 1))


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
