"""Which entries of a residual are sent: one pass adds the gradient, and moves the chosen entries out.

Entries are ranked by their magnitude, as the bits of a float32 order it: a NaN is larger than infinity, so that it is
chosen first rather than hiding in a residual for ever. Among equal ones the lowest index is first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Sign = Literal[0, 1, -1]
"""Which entries can be chosen: 0: all; 1: positive ones only; -1: negative ones only. A zero is neither."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """What a selection did."""

    count: int  # entries moved
    threshold: float  # the lowest magnitude that was looked for
    peak: float  # no magnitude that stays in the residual is larger
