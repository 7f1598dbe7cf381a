"""Policies that evaluate a threshold at some calls and reuse it in between: one fused pass, with one comparison."""

from __future__ import annotations

from dataclasses import dataclass

from telegrad.compress.arguments import check_gain, check_share, checked_whole
from telegrad.compress.residual import Residual
from telegrad.compress.selection import Floats, Indices, noted, select_all
from telegrad.kernels.select import TINY, Chosen


@dataclass(frozen=True)
class ReusedThreshold:
    """All entries at or above a threshold that is exact (top-k) at every ``interval``-th call and reused in between.

    Between, it follows the count gently: threshold *= (count / k) ** ``gain``; error feedback makes the count very
    sensitive to it. Where the count leaves [k/2, 2k], the call falls back to exact top-k at once. One fused pass
    otherwise. Source: RedSync §3.2 ("sampled"), with exact top-k in place of its search.
    """

    interval: int = 8
    gain: float = 0.1

    def __post_init__(self) -> None:
        object.__setattr__(self, "interval", _checked_interval(self.interval))
        check_gain(self.gain, "gain", "the power of count / k that corrects a threshold that is reused; 0: none")

    def capacity(self, entry: Residual) -> int:
        """2k, or all there are if that is less."""
        return min(2 * entry.k, entry.size)

    def select(self, entry: Residual, gradient: Floats, indices: Indices, values: Floats, offset: int) -> int:
        """See ``Selection``."""
        if entry.k == entry.size:
            return select_all(entry, gradient, indices, values, offset)
        added: Floats | None = gradient
        if entry.threshold is not None and entry.calls < self.interval:
            count = _reuse(entry, gradient, (entry.k + 1) // 2, indices, values, offset)
            if count is not None:
                entry.threshold = max(entry.threshold * (count / entry.k) ** self.gain, TINY)
                return count
            added = None
        return _anew(entry, entry.kernels.accumulate_topk(entry.values, added, entry.k, indices, values, offset))


@dataclass(frozen=True)
class SampledThreshold:
    """All entries at or above a threshold that ``ThresholdSearch`` finds at every ``interval``-th call: always k to 2k.

    In between the threshold is reused as it is; where that gives fewer than k or more than 2k, the search is made at
    once. ``tolerance``: see ``ThresholdSearch``. Source: RedSync §3.2 ("sampled").
    """

    interval: int = 5
    tolerance: float = 1e-3

    def __post_init__(self) -> None:
        object.__setattr__(self, "interval", _checked_interval(self.interval))
        check_share(self.tolerance, "tolerance", "the interval of ratios at which the search ends")

    def capacity(self, entry: Residual) -> int:
        """2k, or all there are if that is less."""
        return min(2 * entry.k, entry.size)

    def select(self, entry: Residual, gradient: Floats, indices: Indices, values: Floats, offset: int) -> int:
        """See ``Selection``."""
        if entry.k == entry.size:
            return select_all(entry, gradient, indices, values, offset)
        added: Floats | None = gradient
        if entry.threshold is not None and entry.calls < self.interval:
            count = _reuse(entry, gradient, entry.k, indices, values, offset)
            if count is not None:
                return count
            added = None
        chosen = entry.kernels.accumulate_search(entry.values, added, entry.k, self.tolerance, indices, values, offset)
        return _anew(entry, chosen)


def _reuse(entry: Residual, gradient: Floats, least: int, indices: Indices, values: Floats, offset: int) -> int | None:
    """The fused pass with the entry's threshold. ``None``: not ``least`` to 2k reach it, and all stay."""
    assert entry.threshold is not None
    most = min(2 * entry.k, entry.size)
    indices, values = indices[:most], values[:most]
    count = entry.kernels.accumulate_select(entry.values, gradient, entry.threshold, indices, values, offset)
    if least <= count <= most:
        entry.peak = entry.threshold
        entry.calls += 1
        return count
    moved = min(count, most)
    entry.kernels.put_back(entry.values, indices[:moved], values[:moved], offset)
    return None


def _anew(entry: Residual, chosen: Chosen) -> int:
    count = noted(entry, chosen)
    if entry.threshold is not None:  # not below the smallest normal number: zeros would be sent
        entry.threshold = max(entry.threshold, TINY)
    entry.calls = 1
    return count


def _checked_interval(interval: object) -> int:
    return checked_whole(interval, "interval", 1, None, "calls from one exact threshold to the next")
