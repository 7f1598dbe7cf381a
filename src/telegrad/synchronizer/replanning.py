"""When a Synchronizer plans again: decisions from numbers that are equal on all ranks. Does not measure."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from telegrad.communicator import Communicator
from telegrad.synchronizer.merge_plan import MergePlan

LOOK_EVERY = 20
"""Passes between two looks at the measured times."""

_IN_A_ROW = 2  # looks that must agree, as one may have met a disturbance
_MOST_LOOKS = 64
_LEAST_SHARE = 0.05  # of a pass: what changes by less is not worth a plan


@dataclass(frozen=True)
class Times:
    """Of a pass: its backward pass alone, and the time in which sums were under way."""

    backward_s: float
    network_s: float

    @classmethod
    def of_plan(cls, plan: MergePlan) -> Times:
        """As predicted."""
        return cls(plan.backward_s, sum(plan.costs))


def departure(measured: Times, expected: Times) -> float:
    """By which factor, 1 or more, times have left what was expected, up or down: the larger one of the backward pass
    and of the sums. What has changed by less than a twentieth of the expected pass counts as 1."""
    whole_s = max(expected.backward_s, expected.network_s)
    found = 1.0
    for now_s, before_s in (
        (measured.backward_s, expected.backward_s),
        (measured.network_s, expected.network_s),
    ):
        if abs(now_s - before_s) > _LEAST_SHARE * whole_s:
            found = max(found, now_s / before_s if before_s else math.inf, before_s / now_s if now_s else math.inf)
    return found


class Replanning:
    """Looks at the times every so often, and says when to plan again: when they have left what was expected by more
    than ``factor`` in two looks in a row.

    What is expected is the plan's prediction; of plans made again, what their first look has found if that is off by
    more than ``factor``: what planning again did not bring into line is no reason to do so once more. And after each of
    them twice as many looks pass before the next, up to 64, so that noise cannot keep a job planning.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._expected: Times | None = None
        self._is_first = True  # plan: its prediction is believed
        self._unseen = False  # the plan has not been looked at yet
        self._looks_to_rest, self._rest = 1, 0
        self._in_a_row = 0

    def planned(self, plan: MergePlan) -> None:
        """There is a plan."""
        self._expected = Times.of_plan(plan)
        self._unseen = not self._is_first
        self._is_first = False
        self._in_a_row = 0

    def look(self, measured: Times) -> bool:
        """Whether to plan again. Numbers, and the calls, are the same on all ranks."""
        if self._expected is None:
            return False
        far = departure(measured, self._expected) > self._factor
        if self._unseen:
            self._unseen = False
            if far:
                self._expected = measured
            self._rest = self._looks_to_rest
            self._looks_to_rest = min(2 * self._looks_to_rest, _MOST_LOOKS)
            return False
        if self._rest:
            self._rest -= 1
            return False
        self._in_a_row = self._in_a_row + 1 if far else 0
        return self._in_a_row >= _IN_A_ROW


def agreed_times(comm: Communicator, own: tuple[float, float] | None) -> Times | None:
    """From each rank's ``MeasuredTimeline.totals()``, the same on all ranks: the backward pass of the slowest, and the
    sums of the rank on which they take least, as the others wait there for it too. ``None`` where no rank has any.
    Called on all ranks."""
    backward_s, network_s = (0.0, np.inf) if own is None else own
    found = np.array([backward_s, -network_s])
    comm.all_reduce(found, "max")
    return Times(float(found[0]), -float(found[1])) if np.isfinite(found).all() else None


def checked_factor(value: float | None) -> float | None:
    """``value`` as a ``replan_factor``: above 1, or ``None``; else ``TypeError`` or ``ValueError``."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"replan_factor={value!r} must be a number, or None: never")
    if not 1 < value < math.inf:
        raise ValueError(f"replan_factor={value} must be above 1 and finite, or None: never")
    return float(value)
