"""When a plan is made anew, and how plans are tried in turns beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from telegrad.communicator import Communicator
from telegrad.synchronizer.measured_timeline import MeasuredTimeline
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


# Several plans tried on the live job in short turns, of which the fastest is kept: what hooks and copies cost in
# Python, and what else runs on a machine, no prediction knows. Decides from numbers that are equal on all ranks.

ROUNDS = 12
"""In each, every plan that is left takes one turn."""

_NOT_WORTH_A_CHANGE = 0.01  # by which another plan's steps must be faster than those of the first
_LEAST_ERROR = 0.1  # of a difference after one round; after n of them an n-th: a few turns may agree by chance
_OF_A_MEDIAN = 1.25 * 1.4826  # standard error of a median, by the median absolute deviation over √n


class Trial:
    """``plans``: one at least; the first is the one that is predicted to be the fastest.

    Plans take turns in ``rounds`` rounds, every other one in the opposite order, and compared is what they took in two
    such rounds: what is slow for a while, or grows slower, is so for all of them. After each two those are
    left out whose steps are longer than the fastest's by more than twice the standard error of that difference.
    """

    def __init__(self, plans: Sequence[MergePlan], *, rounds: int = ROUNDS) -> None:
        self._plans = [*plans]
        self._rounds = rounds
        self._left: list[int] = [*range(len(self._plans))]
        self._turn = 0  # in this round, of ``_left``
        self._round: list[float] = []
        self._log_s = np.zeros((0, len(self._plans)))  # by round and plan, of rounds in which all were measured
        self._rounds_over = 0

    @property
    def is_over(self) -> bool:
        """The fastest is known, as far as turns can tell."""
        return len(self._left) == 1 or self._rounds_over == self._rounds

    @property
    def plan(self) -> MergePlan:
        """The one to be tried now; once it is over, the one to keep."""
        return self._plans[self._best() if self.is_over else self._order()[self._turn]]

    def note(self, step_s: float) -> None:
        """Mean seconds of a step of this turn of ``plan``, the same number on all ranks; 0 where none was measured:
        the round is not counted then."""
        self._round.append(step_s)
        self._turn += 1
        if self._turn < len(self._left):
            return
        if all(self._round):
            row = np.full((1, len(self._plans)), np.nan)
            row[0, self._order()] = np.log(self._round)
            self._log_s = np.concatenate([self._log_s, row])
            if len(self._log_s) % 2 == 0:
                self._leave_out()
        self._turn, self._round = 0, []
        self._rounds_over += 1

    def _order(self) -> list[int]:
        return self._left[:: -1 if len(self._log_s) % 2 else 1]

    def _leave_out(self) -> None:
        fastest = self._fastest()
        left = []
        for one in self._left:
            behind, error = self._behind(one, fastest)
            in_half = np.quantile(self._log_s[:, one] - self._log_s[:, fastest], 0.5, method="lower")
            if min(behind, in_half) <= 2 * error:  # one turn that met a disturbance must not decide
                left.append(one)
        self._left = left

    def _compared(self) -> npt.NDArray[np.float64]:
        """By pair of rounds in opposite orders, and plan."""
        whole = len(self._log_s) // 2 * 2
        if not whole:
            return self._log_s
        pairs: npt.NDArray[np.float64] = self._log_s[:whole].reshape(-1, 2, len(self._plans)).mean(axis=1)
        return pairs

    def _fastest(self) -> int:
        times = self._compared()[:, self._left]
        beside_others = np.median(times - times.mean(axis=1, keepdims=True), axis=0)
        return self._left[int(np.argmin(beside_others))]

    def _behind(self, plan: int, other: int) -> tuple[float, float]:
        """By which part steps of ``plan`` are longer than those of ``other``, and the standard error of that."""
        times = self._compared()
        apart = times[:, plan] - times[:, other]
        middle = float(np.median(apart))
        spread = float(np.median(np.abs(apart - middle)))
        return middle, max(_OF_A_MEDIAN * spread / np.sqrt(apart.size), _LEAST_ERROR / len(self._log_s))

    def _best(self) -> int:
        if not len(self._log_s):
            return 0
        fastest = self._fastest()
        if 0 in self._left and self._behind(0, fastest)[0] <= _NOT_WORTH_A_CHANGE:
            return 0
        return fastest


def agreed_step_s(comm: Communicator, timeline: MeasuredTimeline) -> float:
    """``MeasuredTimeline.mean_step_s()`` of the slowest rank; 0 where a rank has none. Called on all ranks."""
    own_s = timeline.mean_step_s()
    found = np.array([own_s or 0.0, float(own_s is None)])
    comm.all_reduce(found, "max")
    return 0.0 if found[1] else float(found[0])
