"""Policies that look at every entry in every call: exact top-k, and RedSync's two ways to it.

With ``same_sign`` all entries of a call have one sign, by turns positive and negative, so that one mean can stand for
all their values (RedSync §5, same-sign quantisation). Where fewer entries than k have that sign, all these are sent.
"""

from __future__ import annotations

from dataclasses import dataclass

from telegrad.compress.arguments import check_share
from telegrad.compress.residual import Residual
from telegrad.compress.selection import Floats, Indices, noted, select_all
from telegrad.kernels.select import Sign


@dataclass(frozen=True)
class ExactTopK:
    """The k entries of largest magnitude, ties to the lowest index; always exactly k (``same_sign``: at most k)."""

    same_sign: bool = False

    def capacity(self, entry: Residual) -> int:
        """k."""
        return entry.k

    def select(self, entry: Residual, gradient: Floats, indices: Indices, values: Floats, offset: int) -> int:
        """See ``Selection``."""
        if entry.k == entry.size and not self.same_sign:
            return select_all(entry, gradient, indices, values, offset)
        sign = _next_sign(entry, self.same_sign)
        return noted(
            entry, entry.kernels.accumulate_topk(entry.values, gradient, entry.k, indices, values, offset, sign)
        )


@dataclass(frozen=True)
class TrimmedTopK:
    """The same entries as ``ExactTopK``, found among those of magnitude >= mean + ratio (max - mean) alone.

    The ratio is the first of 1 - step, 1 - 2 step, … 0 that k entries reach. ``step``: in (0, 1). Source: RedSync,
    Algorithm 2, with the mistakes of its printed form corrected.
    """

    step: float = 0.2
    same_sign: bool = False

    def __post_init__(self) -> None:
        check_share(self.step, "step", "by how much the ratio falls from one try to the next")

    def capacity(self, entry: Residual) -> int:
        """k."""
        return entry.k

    def select(self, entry: Residual, gradient: Floats, indices: Indices, values: Floats, offset: int) -> int:
        """See ``Selection``."""
        if entry.k == entry.size and not self.same_sign:
            return select_all(entry, gradient, indices, values, offset)
        sign = _next_sign(entry, self.same_sign)
        chosen = entry.kernels.accumulate_trimmed(
            entry.values, gradient, entry.k, self.step, indices, values, offset, sign
        )
        return noted(entry, chosen)


@dataclass(frozen=True)
class ThresholdSearch:
    """All entries of magnitude >= mean + ratio (max - mean): k to 2k, with a ratio in [0, 1] found by bisection.

    Where there is no such ratio, or none is found before the interval is ``tolerance`` (in (0, 1)) wide, as among ties:
    the entries of ``ExactTopK``. So there are always k to 2k (``same_sign``: or all of that sign, if fewer). Source:
    RedSync, Algorithm 3, with the mistakes of its printed form corrected.
    """

    tolerance: float = 1e-3
    same_sign: bool = False

    def __post_init__(self) -> None:
        check_share(self.tolerance, "tolerance", "the interval of ratios at which the search ends")

    def capacity(self, entry: Residual) -> int:
        """2k, or all there are if that is less."""
        return min(2 * entry.k, entry.size)

    def select(self, entry: Residual, gradient: Floats, indices: Indices, values: Floats, offset: int) -> int:
        """See ``Selection``."""
        if entry.k == entry.size and not self.same_sign:
            return select_all(entry, gradient, indices, values, offset)
        sign = _next_sign(entry, self.same_sign)
        chosen = entry.kernels.accumulate_search(
            entry.values, gradient, entry.k, self.tolerance, indices, values, offset, sign
        )
        return noted(entry, chosen)


def _next_sign(entry: Residual, same_sign: bool) -> Sign:
    if not same_sign:
        return 0
    entry.calls += 1
    return 1 if entry.calls % 2 == 1 else -1
