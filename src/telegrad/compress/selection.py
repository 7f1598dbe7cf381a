"""What a selection policy is, and those that a user would choose: a policy says which entries of residual + gradient
are sent now.

A policy holds no state of its own: what it must remember of a parameter is in that parameter's Residual. With
``same_sign`` all entries of a call have one sign, by turns positive and negative, so that one mean can stand for all
their values (RedSync §2.1.1, same-sign quantisation). Where fewer entries than k have that sign, all these are sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from telegrad.compress.arguments import check_gain, check_share, checked_whole
from telegrad.compress.residual import Residual
from telegrad.kernels.select import TINY, Array, Chosen, Sign, cpu

Floats = Array
"""float32, of one dimension: a numpy array, or a torch tensor on a GPU; as ``entry.values``, and on the same GPU."""
Indices = Array
"""uint32, of the same kind."""


class Selection(Protocol):
    """A rule that chooses the entries to send."""

    def capacity(self, entry: Residual) -> int:
        """The most entries that ``select`` can return for this parameter."""

    def select(self, entry: Residual, gradient: Floats, indices: Indices, values: Floats, offset: int) -> int:
        """Adds ``gradient`` to the residual and moves the chosen entries out of it; returns how many.

        They are written, by ascending index (+ ``offset``), into ``indices`` and ``values``, which hold
        ``capacity(entry)``. ``entry.peak`` bounds the rest, ``entry.threshold`` is the lowest magnitude that was looked
        for (``None``: there is none). Infinite and NaN sums are the largest entries, NaN above infinity: policies that
        choose by magnitude send them first."""


def noted(entry: Residual, chosen: Chosen) -> int:
    """Takes over into ``entry`` what the selection has found, and returns how many entries it has moved."""
    entry.threshold = chosen.threshold if math.isfinite(chosen.threshold) else None
    entry.peak = math.inf if math.isnan(chosen.peak) else chosen.peak
    return chosen.count


def select_all(entry: Residual, gradient: Floats, indices: Indices, values: Floats, offset: int) -> int:
    """At density 1 nothing is chosen, and nothing stays."""
    entry.kernels.accumulate_all(entry.values, gradient, indices, values, offset)
    entry.peak = 0.0
    return entry.size


@dataclass(frozen=True)
class ReusedThreshold:
    """All entries at or above a threshold that is exact (top-k) at every ``interval``-th call and reused in between.

    In between, it follows the count: threshold *= (count / k) ** ``gain``. The gain is small, because error feedback
    makes the count very sensitive to it. If the count leaves [k/2, 2k], the call falls back to exact top-k at once.
    Otherwise it is one fused pass. Source: RedSync §2.1 ("sampled"), with exact top-k in place of its search."""

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
        k = entry.k
        if k == entry.size:
            return select_all(entry, gradient, indices, values, offset)
        if entry.kernels is cpu:
            return self.select_on_host(entry, gradient, indices, values, offset).moved
        added: Floats | None = gradient
        if entry.threshold is not None and entry.calls < self.interval:
            count = _reuse(entry, gradient, (k + 1) // 2, indices, values, offset)
            if count is not None:
                entry.threshold = max(entry.threshold * (count / k) ** self.gain, TINY)
                return count
            added = None
        return _anew(entry, entry.kernels.accumulate_topk(entry.values, added, k, indices, values, offset))

    def select_on_host(
        self,
        entry: Residual,
        gradient: Floats,
        indices: Indices,
        values: Floats,
        offset: int,
        before: Floats | None = None,
        velocity: cpu.VelocityStep | None = None,
        limit: float = math.nan,
    ) -> cpu.Reused:
        """As ``select``, of a residual in host memory that does not send all. Other arguments: as for
        ``cpu.accumulate_reused``; where that is not sound, the entry's threshold and calls are as before."""
        threshold, k = entry.threshold, entry.k
        found = cpu.accumulate_reused(
            entry.values,
            gradient,
            k,
            threshold,
            indices,
            values,
            offset,
            is_due=entry.calls >= self.interval,
            before=before,
            velocity=velocity,
            limit=limit,
        )
        if not found.sound:
            return found
        if found.exact or threshold is None:
            entry.threshold = max(found.threshold, TINY) if math.isfinite(found.threshold) else None
            entry.peak = math.inf if math.isnan(found.peak) else found.peak
            entry.calls = 1
        else:
            entry.peak = threshold
            entry.threshold = max(threshold * (found.moved / k) ** self.gain, TINY)
            entry.calls += 1
        return found


@dataclass(frozen=True)
class SampledThreshold:
    """All entries at or above a threshold that ``ThresholdSearch`` finds at every ``interval``-th call: always k to 2k.

    In between the threshold is reused as it is; where that gives fewer than k or more than 2k, the search is made at
    once. ``tolerance``: see ``ThresholdSearch``. Source: RedSync §2.1 ("sampled")."""

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
    most = min(2 * entry.k, len(entry.values))
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


class _OfMagnitude:
    """Chooses by magnitude anew in every call, as ``_find`` does."""

    same_sign: bool
    _most = 1  # of k
    _find: Callable[..., Chosen]

    def capacity(self, entry: Residual) -> int:
        """So many times k, or all there are if that is less."""
        return min(self._most * entry.k, entry.size)

    def select(self, entry: Residual, gradient: Floats, indices: Indices, values: Floats, offset: int) -> int:
        """See ``Selection``."""
        if entry.k == entry.size and not self.same_sign:
            return select_all(entry, gradient, indices, values, offset)
        entry.calls += self.same_sign
        sign: Sign = 0 if not self.same_sign else 1 if entry.calls % 2 == 1 else -1
        return noted(entry, self._find(entry, gradient, indices, values, offset, sign))


@dataclass(frozen=True)
class ExactTopK(_OfMagnitude):
    """The k entries of largest magnitude, ties to the lowest index; always exactly k (``same_sign``: at most k)."""

    same_sign: bool = False

    def _find(self, entry: Residual, gradient: Floats, *given: Any) -> Chosen:
        return entry.kernels.accumulate_topk(entry.values, gradient, entry.k, *given)


@dataclass(frozen=True)
class TrimmedTopK(_OfMagnitude):
    """The same entries as ``ExactTopK``, found among those of magnitude >= mean + ratio (max - mean) alone.

    The ratio is the first of 1 - step, 1 - 2 step, … 0 that k entries reach. ``step``: in (0, 1). Source: RedSync,
    Algorithm 2, with the mistakes of its printed form corrected."""

    step: float = 0.2
    same_sign: bool = False

    def __post_init__(self) -> None:
        check_share(self.step, "step", "by how much the ratio falls from one try to the next")

    def _find(self, entry: Residual, gradient: Floats, *given: Any) -> Chosen:
        return entry.kernels.accumulate_trimmed(entry.values, gradient, entry.k, self.step, *given)


@dataclass(frozen=True)
class ThresholdSearch(_OfMagnitude):
    """All entries of magnitude >= mean + ratio (max - mean): k to 2k, with a ratio in [0, 1] found by bisection.

    If there is no such ratio, or none is found before the interval is ``tolerance`` (in (0, 1)) wide, as among ties, it
    sends the entries of ``ExactTopK``. So there are always k to 2k (``same_sign``: or all of that sign, if fewer).
    Source: RedSync, Algorithm 3, with the mistakes of its printed form corrected."""

    tolerance: float = 1e-3
    same_sign: bool = False
    _most = 2

    def __post_init__(self) -> None:
        check_share(self.tolerance, "tolerance", "the interval of ratios at which the search ends")

    def _find(self, entry: Residual, gradient: Floats, *given: Any) -> Chosen:
        return entry.kernels.accumulate_search(entry.values, gradient, entry.k, self.tolerance, *given)
