"""Several plans tried one after the other on the live job, of which the fastest is kept: what hooks and copies cost in
Python, and what else runs on a machine, no prediction knows. Decides from numbers that are equal on all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from telegrad.comm import Communicator
from telegrad.plan.merge_plan import MergePlan
from telegrad.train.measured_timeline import MeasuredTimeline

_NOT_WORTH_A_CHANGE = 0.02  # by which another plan's steps must be faster than those of the first


class Trial:
    """``plans``: one at least; the first is the one that is predicted to be the fastest."""

    def __init__(self, plans: Sequence[MergePlan]) -> None:
        self._plans = [*plans]
        self._steps_s: list[float] = []

    @property
    def is_over(self) -> bool:
        """All have been tried, or there is nothing to compare with the first."""
        return len(self._plans) == 1 or len(self._steps_s) == len(self._plans)

    @property
    def plan(self) -> MergePlan:
        """The one to be tried now; once it is over, the one to keep."""
        return self._best() if self.is_over else self._plans[len(self._steps_s)]

    def note(self, step_s: float) -> None:
        """Seconds of a step with ``plan``, the same number on all ranks; 0 where none was measured."""
        self._steps_s.append(step_s)

    def _best(self) -> MergePlan:
        if 0.0 in self._steps_s or not self._steps_s:
            return self._plans[0]
        fastest = int(np.argmin(self._steps_s))
        is_ahead = self._steps_s[fastest] < self._steps_s[0] * (1 - _NOT_WORTH_A_CHANGE)
        return self._plans[fastest if is_ahead else 0]


def agreed_step_s(comm: Communicator, timeline: MeasuredTimeline) -> float:
    """``MeasuredTimeline.undisturbed_step_s()`` of the slowest rank; 0 where a rank has none. Called on all ranks."""
    own_s = timeline.undisturbed_step_s()
    found = np.array([own_s or 0.0, float(own_s is None)])
    comm.all_reduce(found, "max")
    return 0.0 if found[1] else float(found[0])
