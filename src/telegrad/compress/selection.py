"""Selection policies: which entries of residual + gradient are sent now.

A policy holds no state of its own: what it must remember of a parameter is in that parameter's Residual.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from telegrad.compress.residual import Residual
from telegrad.ops.select import cpu

Floats = npt.NDArray[np.float32]
Indices = npt.NDArray[np.uint32]


class Selection(Protocol):
    """How entries are chosen."""

    def capacity(self, entry: Residual) -> int:
        """The most entries that ``select`` can return for this parameter."""

    def select(self, entry: Residual, gradient: Floats, indices: Indices, values: Floats, offset: int) -> int:
        """Adds ``gradient`` to the residual and moves the chosen entries out of it; returns how many.

        They are written, by ascending index (+ ``offset``), into ``indices`` and ``values``, which hold
        ``capacity(entry)``. The sums must be finite. ``entry.peak`` bounds what stays.
        """


@dataclass(frozen=True)
class ExactTopK:
    """The k entries of largest magnitude, ties to the lowest index; always exactly k."""

    def capacity(self, entry: Residual) -> int:
        return entry.k

    def select(self, entry: Residual, gradient: Floats, indices: Indices, values: Floats, offset: int) -> int:
        if entry.k == entry.values.size:
            return _select_all(entry, gradient, indices, values, offset)
        cpu.accumulate(entry.values, gradient)
        entry.threshold = cpu.select_topk(entry.values, entry.k, indices, values, offset)
        entry.peak = max(entry.threshold, cpu.TINY)
        return entry.k


@dataclass(frozen=True)
class ReusedThreshold:
    """All entries at or above a threshold that is exact (top-k) at every ``interval``-th call and reused in between.

    Between, it follows the count gently: threshold *= (count / k) ** 0.1; error feedback makes the count very
    sensitive to it. Where the count leaves [k/2, 2k], the call falls back to exact top-k at once. One fused pass
    otherwise. Source: RedSync §3.2 ("sampled"), with exact top-k in place of its search.
    """

    interval: int = 8
    gain: float = 0.1

    def __post_init__(self) -> None:
        if isinstance(self.interval, bool) or not isinstance(self.interval, (int, np.integer)):
            raise TypeError(f"interval={self.interval!r} must be an int: calls from one exact threshold to the next")
        object.__setattr__(self, "interval", operator.index(self.interval))
        if self.interval < 1:
            raise ValueError(f"interval={self.interval} must be at least 1: 1 evaluates the threshold at every call")

    def capacity(self, entry: Residual) -> int:
        return min(2 * entry.k, entry.values.size)

    def select(self, entry: Residual, gradient: Floats, indices: Indices, values: Floats, offset: int) -> int:
        if entry.k == entry.values.size:
            return _select_all(entry, gradient, indices, values, offset)
        if entry.threshold is None or entry.calls >= self.interval:
            cpu.accumulate(entry.values, gradient)
        else:
            most = self.capacity(entry)
            indices, values = indices[:most], values[:most]
            count = cpu.accumulate_select(entry.values, gradient, entry.threshold, indices, values, offset)
            if entry.k <= 2 * count and count <= most:
                entry.peak = entry.threshold
                entry.threshold = max(entry.threshold * (count / entry.k) ** self.gain, cpu.TINY)
                entry.calls += 1
                return count
            moved = min(count, most)
            cpu.put_back(entry.values, indices[:moved], values[:moved], offset)
        entry.peak = entry.threshold = max(cpu.select_topk(entry.values, entry.k, indices, values, offset), cpu.TINY)
        entry.calls = 1
        return entry.k


def _select_all(entry: Residual, gradient: Floats, indices: Indices, values: Floats, offset: int) -> int:
    """At density 1 nothing is chosen and nothing stays."""
    size = entry.values.size
    indices[:size] = np.arange(offset, offset + size, dtype=np.uint32)
    np.add(entry.values, gradient, out=values[:size])
    entry.values.fill(0)
    entry.peak = 0.0
    return size
