"""How often features occur: by a power of their rank, through two counts that are published of a data set.

The feature of rank j = 1, 2, … is in a row with probability p_j = min(1, scale · j^-exponent), independently of all
others. There is no last rank: more rows bring features that none had before (Heaps' law). This module must not know of
rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

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
