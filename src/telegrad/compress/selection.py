"""What a selection policy is: it says which entries of residual + gradient are sent now.

A policy holds no state of its own: what it must remember of a parameter is in that parameter's Residual.
"""

from __future__ import annotations

import math
from typing import Protocol

from telegrad.compress.residual import Residual
from telegrad.kernels.select import Array, Chosen

Floats = Array
"""float32, of one dimension: a numpy array, or a torch tensor on a GPU; as ``entry.values``, and on the same GPU."""
Indices = Array
"""uint32, of the same kind."""


class Selection(Protocol):
    """How entries are chosen."""

    def capacity(self, entry: Residual) -> int:
        """The most entries that ``select`` can return for this parameter."""

    def select(self, entry: Residual, gradient: Floats, indices: Indices, values: Floats, offset: int) -> int:
        """Adds ``gradient`` to the residual and moves the chosen entries out of it; returns how many.

        They are written, by ascending index (+ ``offset``), into ``indices`` and ``values``, which hold
        ``capacity(entry)``. ``entry.peak`` bounds what stays, ``entry.threshold`` is the lowest magnitude that was
        looked for (``None``: there is no such). Where sums are infinite or NaN, those entries are the largest, NaN
        above infinity: policies that choose by magnitude send them first.
        """


def noted(entry: Residual, chosen: Chosen) -> int:
    """Takes over into ``entry`` what the selection has found, and returns how many entries it has moved."""
    entry.threshold = chosen.threshold if math.isfinite(chosen.threshold) else None
    entry.peak = math.inf if math.isnan(chosen.peak) else chosen.peak
    return chosen.count


def select_all(entry: Residual, gradient: Floats, indices: Indices, values: Floats, offset: int) -> int:
    """At density 1 nothing is chosen and nothing stays."""
    entry.kernels.accumulate_all(entry.values, gradient, indices, values, offset)
    entry.peak = 0.0
    return entry.size
