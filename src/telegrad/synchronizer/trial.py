"""Several plans tried on the live job in short turns, of which the fastest is kept: what hooks and copies cost in
Python, and what else runs on a machine, no prediction knows. Decides from numbers that are equal on all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from telegrad.communicator import Communicator
from telegrad.synchronizer.measured_timeline import MeasuredTimeline
from telegrad.synchronizer.merge_plan import MergePlan

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
