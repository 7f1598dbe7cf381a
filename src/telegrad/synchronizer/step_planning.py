"""What a Synchronizer plans while it trains: after which passes times are taken, a plan is made, made once more, tried
against others, timed in its own groups and, when measured times leave it, made anew. Does not know how groups are
sent."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import numpy as np
from torch import nn

from telegrad.communicator import Communicator
from telegrad.cost.send_method import GroupCost
from telegrad.synchronizer.clocks import Clock, PausedClock
from telegrad.synchronizer.compression import GroupCompression
from telegrad.synchronizer.group_planning import AutoPlan, GroupPlanner, names_of
from telegrad.synchronizer.measured_timeline import NOT_TYPICAL, WINDOW, MeasuredTimeline
from telegrad.synchronizer.merge_plan import MergePlan
from telegrad.synchronizer.profile import StepProfile
from telegrad.synchronizer.replanning import LOOK_EVERY, Replanning, Times, Trial, agreed_step_s, agreed_times
from telegrad.synchronizer.trace import Trace


class StepPlanning:
    """Of a ``model`` whose passes ``comm`` averages. ``compression``: as the Synchronizer's. ``leaves_at_end``: no
    gradient is sent before the backward pass is over. ``clock``: by which passes are timed, on all ranks of one kind;
    where it tells times later than it marks them, what is to be decided waits until all ranks know them, some passes
    later, and no host waits for a device. ``device_cost``: as a GroupPlanner's. Called on all ranks, alike; the hooks
    that take times stay on ``model`` until ``options.after`` passes are over, or until ``close()``.
    """

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        options: AutoPlan,
        *,
        compression: GroupCompression | None,
        leaves_at_end: bool = False,
        clock: Clock | None = None,
        device_cost: GroupCost | None = None,
    ) -> None:
        self._clock = clock or PausedClock()
        self.plan: MergePlan | None = None
        self.trace: Trace | None = None
        self.replans = 0
        self._model: nn.Module | None = model
        self._comm, self._scheme, self._plan_after = comm, options.scheme, options.after
        self._turn_passes = NOT_TYPICAL + max(1, (options.after - NOT_TYPICAL) // 2)
        self._planner = GroupPlanner(options.scheme, compression, device_cost)
        self._leaves_at_end = leaves_at_end
        is_auto, factor = options.scheme == "auto", options.replan_factor
        self._replanning = Replanning(factor) if is_auto and factor is not None else None
        self._trial: Trial | None = None
        self._profile: StepProfile | None = None
        self._plan_at = self._planned_at = 0
        self._timed_in: MergePlan | None = None  # whose groups the passes had that ``trace`` is of
        self._is_of_kept = False  # the profile is of the groups that are kept
        self._begin_profile(0)

    @property
    def waits_for(self) -> int | None:
        """At the end of which pass there will be a plan; ``None`` unless times are taken now."""
        return self._plan_at if self._profile is not None else None

    @property
    def is_settled(self) -> bool:
        """Whether neither times are taken nor plans are tried now."""
        return self._profile is None and self._trial is None

    def leave_out(self, seconds: float) -> None:
        """Have just passed, in which this thread has compressed: plans count that by itself."""
        if isinstance(self._clock, PausedClock):
            self._clock.leave_out(seconds)

    def close(self) -> None:
        """Takes no more times, and lets go of the model."""
        self._end_profile()
        self._model = None

    def after(self, passes: int, timeline: MeasuredTimeline) -> MergePlan | None:
        """The plan whose groups are to be used from now on, after so many ``passes`` of which ``timeline`` has the
        last; ``None``: as before. Warns with ``RuntimeWarning`` where no times could be taken."""
        if self._profile is not None:
            if passes < self._plan_at:
                return None
            self._profile.__exit__(None, None, None)
            return self._planned(passes, timeline) if self._all_know(self._profile.is_known) else None
        if self._trial is not None:
            if passes - self._planned_at < self._turn_passes:
                return None
            if not self._all_know(timeline.passes >= min(self._turn_passes - NOT_TYPICAL, WINDOW)):
                return None
            self._trial.note(agreed_step_s(self._comm, timeline))
            return self._tried(self._trial, passes, timeline)
        if self._replanning is not None and (passes - self._planned_at) % LOOK_EVERY == 0:
            measured = agreed_times(self._comm, timeline.totals(LOOK_EVERY))
            if measured is not None and self._replanning.look(measured):
                self.replans += 1
                self._planner.forget(self._slower(measured))
                self._begin_profile(passes)
        return None

    def groups_of(self, plan: MergePlan, parameters: Iterable[str]) -> list[list[str]]:
        """The names in each of its groups; what no pass has used so far is in the last one."""
        assert self.trace is not None
        return names_of(plan, self.trace, parameters)

    def _all_know(self, known: bool) -> bool:
        """Whether every rank does. A process's own clock is known at once."""
        if isinstance(self._clock, PausedClock):
            return True
        found = np.array([known], np.int32)
        self._comm.all_reduce(found, "min")
        return bool(found[0])

    def _slower(self, measured: Times) -> float:
        """By which factor sums have become so."""
        assert self.plan is not None
        expected_s = Times.of_plan(self.plan).network_s
        return measured.network_s / expected_s if expected_s > 0 and measured.network_s > 0 else 1.0

    def _begin_profile(self, passes: int) -> None:
        assert self._model is not None
        self._plan_at = passes + self._plan_after
        self._timed_in = self.plan
        self._profile = StepProfile(self._model, clock=self._clock)
        self._profile.__enter__()

    def _end_profile(self) -> None:
        if self._profile is not None:
            self._profile.__exit__(None, None, None)
            self._profile = None

    def _planned(self, passes: int, timeline: MeasuredTimeline) -> MergePlan | None:
        profile = self._profile
        assert profile is not None
        self._end_profile()
        try:
            trace = profile.trace(self._comm)
        except RuntimeError as error:  # on all ranks
            if self._is_of_kept:
                return self._settled(passes)
            warnings.warn(
                f"groups stay as they are, because no times were taken ({error}; with torch.compile give the "
                "Synchronizer the compiled module, or use model.compile())",
                RuntimeWarning,
                2,
            )
            self._replanning = None
            return None
        earlier, refines = self.trace, self._planner.has_costs
        if not refines:
            self._planner.measure(self._comm, most_bytes=max(trace.bytes, 1))
        elif earlier is not None and {*earlier.names} == {*trace.names}:
            trace = trace.in_order(earlier.names)
        if self._is_of_kept:
            return self._timed_again(trace, passes)
        kept = self.plan if earlier is not None and earlier.names == trace.names else None
        self.trace, sent = trace, self._as_sent(trace)
        plan = self._planner.plan(sent, self._comm, kept=kept)
        if not refines:
            self._adopted(plan, passes)
            self._begin_profile(passes)  # in these groups, whose sums hold other gradients up than those before
            return plan
        rivals = self._planner.rivals(plan, sent, self._comm) if self._scheme == "auto" else []
        return self._tried(Trial([plan, *rivals]), passes, timeline)

    def _tried(self, trial: Trial, passes: int, timeline: MeasuredTimeline) -> MergePlan:
        self._trial = None if trial.is_over else trial
        if self._trial is not None:
            timeline.restart()  # where two turns of the same groups follow each other
        plan = self._adopted(trial.plan, passes)
        if not trial.is_over:
            return plan
        if self._timed_in is not None and self._timed_in.groups == plan.groups:
            return self._settled(passes)
        self._is_of_kept = True  # how long gradients take hangs on the groups that leave beside them
        self._begin_profile(passes)
        return plan

    def _timed_again(self, trace: Trace, passes: int) -> MergePlan:
        assert self.plan is not None
        assert self.trace is not None
        if trace.names == self.trace.names:
            self.trace, self.plan = trace, self._planner.again(self.plan, self._as_sent(trace), self._comm)
        return self._settled(passes)

    def _as_sent(self, trace: Trace) -> Trace:
        return trace.all_at_once() if self._leaves_at_end else trace

    def _settled(self, passes: int) -> MergePlan:
        """The plan that is kept, from now on with these times."""
        assert self.plan is not None
        self._is_of_kept = False
        if self._replanning is not None:
            self._replanning.planned(self.plan)
        return self._adopted(self.plan, passes)

    def _adopted(self, plan: MergePlan, passes: int) -> MergePlan:
        self.plan, self._planned_at = plan, passes
        return plan
