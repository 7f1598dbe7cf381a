"""How a Synchronizer cuts its gradients into groups: from the times of a step and from sums that are timed on the live
communicator, the same on all ranks. Does not know when to plan."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import nn

from telegrad.communicator import Communicator
from telegrad.communicator.texts import all_gather_text, own_error_first
from telegrad.compress import Compressor, Velocities
from telegrad.compress.arguments import checked_count
from telegrad.cost.send_method import GroupCost, SendMethod
from telegrad.ddp.bucket import ParameterSpan, layout_of_members
from telegrad.ddp.exchange import Exchange
from telegrad.ddp.options import check_choice
from telegrad.ddp.telemetry import DDPStats
from telegrad.synchronizer import merge, shared_ways
from telegrad.synchronizer.compression import GroupCompression
from telegrad.synchronizer.merge_plan import MergePlan
from telegrad.synchronizer.replanning import checked_factor
from telegrad.synchronizer.trace import Trace
from telegrad.tuning.group_cost import (
    Begun,
    group_cost_while_computing,
    measured_group_cost,
    measured_way,
    way_cost_while_computing,
)

PLANS: dict[str, Callable[..., MergePlan]] = {
    "auto": merge.optimal,
    "optimal": merge.optimal,
    "greedy": merge.greedy,
    "fixed": merge.fixed,
    "wfbp": merge.wfbp,
    "single": merge.single,
}
"""By name; see telegrad.synchronizer.merge."""

TIMED = ("auto", "optimal", "greedy")
"""Those that need the times of the model."""

_LAYER_MIB, _LAYERS = 0.25, 32  # of small groups: at least so large, at most about so many


@dataclass(frozen=True)
class AutoPlan:
    """Groups that follow from measured times. ``scheme``: ``"auto"``, ``"optimal"`` or ``"greedy"``. ``after``: passes
    before the first plan, and before each new one; a turn of a trial has half as many plus one. ``replan_factor``: by
    which measured times must differ from the prediction for a new plan; ``None``: there is none."""

    scheme: str = "auto"
    after: int = 10
    replan_factor: float | None = 1.5

    def __post_init__(self) -> None:
        check_choice(self.scheme, "scheme", TIMED)
        if checked_count(self.after, "after") < 3:
            raise ValueError(f"after={self.after} must be at least 3: the first two passes are not typical")
        checked_factor(self.replan_factor)


_PARTS = (2, 4)


def _even(parts: int) -> Callable[..., MergePlan]:
    """A plan of about so many groups of even sizes."""

    def cut(sizes: Sequence[int], backward_times: Sequence[float], *, cost: GroupCost) -> MergePlan:
        plan = merge.fixed(sizes, backward_times, cost=cost, cap_mb=sum(sizes) / parts / 2**20)
        return replace(plan, scheme="even")

    return cut


_RIVALS = (merge.single, merge.fixed, merge.greedy, *map(_even, _PARTS))

_NOT_WORTH_A_CHANGE = 0.05  # by which other groups must be ahead of those that there are; times are not better known


class GroupPlanner:
    """``scheme``: one of ``TIMED``. ``compression``: of the gradients, if any. ``device_cost``: of a dense sum on the
    device where they are, if they are on one. All ranks call all methods, alike."""

    def __init__(self, scheme: str, compression: GroupCompression | None, device_cost: GroupCost | None = None) -> None:
        self._scheme, self._compression, self._device_cost = scheme, compression, device_cost
        self._costs: _DenseCosts | _WayCosts | None = None

    @property
    def has_costs(self) -> bool:
        """Whether sums have been timed."""
        return self._costs is not None

    def measure(self, comm: Communicator, *, most_bytes: int) -> None:
        """Times sums of up to so many bytes; none on a device. Raises ``ValueError`` for ``most_bytes`` below 1."""
        if self._device_cost is not None:
            self._costs = _DenseCosts(self._scheme, self._device_cost, self._device_cost)
        elif self._compression is None:
            idle = measured_group_cost(comm, most_bytes=most_bytes)
            busy = group_cost_while_computing(comm, most_bytes=most_bytes)
            self._costs = _DenseCosts(self._scheme, idle, busy)
        else:
            self._costs = _WayCosts(self._compression, comm, most_bytes)

    def forget(self, slower: float) -> None:
        """Sums must be timed anew. Those on a device, where nothing must wait for that, count as ``slower`` times as
        long as before."""
        self._costs, cost = None, self._device_cost
        if cost is not None:
            self._device_cost = lambda size: slower * cost(size)

    def plan(self, trace: Trace, comm: Communicator, *, kept: MergePlan | None) -> MergePlan:
        """Made on rank 0, for all: plans of large models take seconds, and processors may round differently. ``kept``:
        the plan of the same gradients that there is, which stays unless another one is well ahead. What goes wrong
        on rank 0 is raised there, and as ``RuntimeError`` on the others."""

        def make(costs: _DenseCosts | _WayCosts) -> list[MergePlan]:
            plan = costs.best(trace)
            if kept is not None:
                again = _again(costs, kept, trace)
                if again.finish_s <= plan.finish_s * (1 + _NOT_WORTH_A_CHANGE):
                    plan = again
            return [plan]

        return self._from_rank_0(make, trace, comm)[0]

    def again(self, plan: MergePlan, trace: Trace, comm: Communicator) -> MergePlan:
        """The same groups with the times of ``trace``, which has the same gradients. Errors as for ``plan``."""
        return self._from_rank_0(lambda costs: [_again(costs, plan, trace)], trace, comm)[0]

    def rivals(self, plan: MergePlan, trace: Trace, comm: Communicator) -> list[MergePlan]:
        """Plans of other groups of the same gradients, which measured steps may prefer to ``plan``; none with
        compression. Errors as for ``plan``."""

        def make(costs: _DenseCosts | _WayCosts) -> list[MergePlan]:
            found = {plan.groups: plan}
            for rival in costs.rivals(trace):
                found.setdefault(rival.groups, rival)
            return [*found.values()][1:]

        return self._from_rank_0(make, trace, comm)

    def _from_rank_0(
        self, make: Callable[[_DenseCosts | _WayCosts], list[MergePlan]], trace: Trace, comm: Communicator
    ) -> list[MergePlan]:
        costs = self._costs
        assert costs is not None
        made, error, told = [], None, ""
        if comm.rank == 0:
            try:
                made = make(costs)
                told = json.dumps({"plans": [[one.scheme, _stops(one), costs.ways_of(one)] for one in made]})
            except Exception as found:  # whatever it is, the others must not wait for a plan
                error, told = found, json.dumps({"error": f"{type(found).__name__}: {found}"})
        with own_error_first(error):
            said = json.loads(all_gather_text(comm, told)[0])
        if error is not None:
            raise error
        if "error" in said:
            raise RuntimeError(f"rank 0 could not plan: {said['error']}")
        return made or [costs.plan_of(scheme, trace, stops, ways) for scheme, stops, ways in said["plans"]]


def first_groups(
    plan: str | Sequence[Sequence[str]], parameters: Mapping[str, nn.Parameter], *, small: bool = False
) -> list[list[str]]:
    """Those of a plan that needs no times, of parameters in the opposite order, or the named ones. ``small``: those of
    a timed one are about as small as layers, else of DDP's sizes. ``ValueError`` where these are no groups of all
    ``parameters``."""
    if not isinstance(plan, str):
        return checked_groups(plan, parameters)
    names = [*reversed([*parameters])]
    sizes = [parameters[name].numel() * parameters[name].element_size() for name in names]
    cap_mb = max(sum(sizes) / _LAYERS / 2**20, _LAYER_MIB) if small else merge.DDP_CAP_MB
    cap = {"cap_mb": min(cap_mb, merge.DDP_CAP_MB)} if plan in TIMED else {}
    cut = PLANS["fixed" if plan in TIMED else plan](sizes, [0.0] * len(sizes), cost=lambda _: 0.0, **cap)
    return [[names[position] for position in group] for group in cut.groups]


def names_of(plan: MergePlan, trace: Trace, parameters: Iterable[str]) -> list[list[str]]:
    """The plan's groups, the last of which also has what no pass has used so far."""
    groups = [[trace.names[position] for position in group] for group in plan.groups]
    used = {*trace.names}
    groups[-1] += [name for name in parameters if name not in used]
    return groups


class _DenseCosts:
    """``idle``: of sums alone, ``busy``: while all ranks compute."""

    def __init__(self, scheme: str, idle: GroupCost, busy: GroupCost) -> None:
        self._scheme, self._idle, self._busy = scheme, idle, busy

    def best(self, trace: Trace) -> MergePlan:
        if self._scheme == "greedy":
            cut = merge.greedy(trace.sizes, trace.backward_times, cost=self._idle)
            return self.plan_of("greedy", trace, _stops(cut), self.ways_of(cut))
        return shared_ways.optimal(trace.sizes, trace.backward_times, idle=self._idle, busy=self._busy)

    def plan_of(self, scheme: str, trace: Trace, stops: Sequence[int], ways: Sequence[int]) -> MergePlan:
        costs = {"idle": self._idle, "busy": self._busy}
        return shared_ways.of_cuts(scheme, trace.sizes, trace.backward_times, stops, **costs)

    def ways_of(self, plan: MergePlan) -> list[int]:
        return [1] * len(plan.groups)

    def rivals(self, trace: Trace) -> list[MergePlan]:
        cuts = (rule(trace.sizes, trace.backward_times, cost=self._idle) for rule in _RIVALS)
        return [self.plan_of(cut.scheme, trace, _stops(cut), self.ways_of(cut)) for cut in cuts]


class _WayCosts:
    def __init__(self, compression: GroupCompression, comm: Communicator, most_bytes: int) -> None:
        self._compression = compression
        self._ways = measured_ways(compression, comm, most_bytes=most_bytes)

    def best(self, trace: Trace) -> MergePlan:
        return shared_ways.joint(trace.sizes, trace.backward_times, ways=self._ways, dense=self._dense(trace))

    def plan_of(self, scheme: str, trace: Trace, stops: Sequence[int], ways: Sequence[int]) -> MergePlan:
        taken = [self._ways[number - 1] for number in ways]
        return shared_ways.planned(scheme, trace.sizes, trace.backward_times, stops, taken, dense=self._dense(trace))

    def ways_of(self, plan: MergePlan) -> list[int]:
        numbers = {way.name: number for number, way in enumerate(self._ways, 1)}
        return [numbers[name] for name in plan.ways]

    def rivals(self, trace: Trace) -> list[MergePlan]:
        return []

    def _dense(self, trace: Trace) -> list[int]:
        """Bytes of each gradient that no way compresses."""
        sizes = zip(trace.names, trace.sizes, strict=True)
        return [0 if self._compression.compresses(name) else size for name, size in sizes]


def _again(costs: _DenseCosts | _WayCosts, plan: MergePlan, trace: Trace) -> MergePlan:
    return costs.plan_of(plan.scheme, trace, _stops(plan), costs.ways_of(plan))


def _stops(plan: MergePlan) -> list[int]:
    return [group[-1] + 1 for group in plan.groups]


def checked_groups(groups: Any, parameters: Mapping[str, nn.Parameter]) -> list[list[str]]:
    """``groups`` as lists of names, each of ``parameters`` once. Raises ``ValueError`` otherwise."""
    is_list = isinstance(groups, Sequence) and all(
        isinstance(group, Sequence) and not isinstance(group, str) and group for group in groups
    )
    if not is_list:
        raise ValueError(f"plan={groups!r} must be a name or lists of names of parameters, none of them empty")
    named = [name for group in groups for name in group]
    for name in named:
        if name not in parameters:
            raise ValueError(f"plan names {name!r}, which is no parameter of model that requires a gradient")
    if len(set(named)) < len(named):
        raise ValueError("plan names a parameter twice: each gradient travels once")
    if missing := [name for name in parameters if name not in set(named)]:
        raise ValueError(f"plan leaves {missing[0]!r} out: every parameter that requires a gradient must be in it")
    return [[*group] for group in groups]


# What it takes to send a group in each way, measured on a live communicator: the ways of a joint plan.

_Prepare = Callable[[], Callable[[], Begun]]

_NAME = "probe"
_GRADIENTS, _SETTLING = 64, 8
"""How many gradients are drawn, and how many are compressed before the first is sent: residuals begin empty."""


def measured_ways(compression: GroupCompression, comm: Communicator, *, most_bytes: int) -> list[SendMethod]:
    """Those of ``compression.ways``; the same on all ranks but for rounding.

    Those that compress are of random float32 gradients in one tensor, and their delay is what that takes on this rank's
    thread; sparse ones are at the density that all compressed parameters have together, with the selection of the
    largest. Called on all ranks, alike, after the plans' ``after``. Raises ``ValueError`` for ``most_bytes``
    below 1.
    """
    dense = measured_group_cost(comm, most_bytes=most_bytes)
    busy = group_cost_while_computing(comm, most_bytes=most_bytes)
    ways = []
    for name in compression.ways:
        if name == "dense":
            ways.append(SendMethod(name, dense, busy=busy))
            continue
        probe = _probe_of(compression, comm, name)
        alone = measured_way(comm, name, probe, most_bytes=most_bytes, beside=dense)
        of_busy = way_cost_while_computing(comm, probe, most_bytes=most_bytes)
        ways.append(replace(alone, busy=of_busy, busy_beside=busy))
    return ways


def _probe_of(compression: GroupCompression, comm: Communicator, way: str) -> Callable[[int], _Prepare]:
    largest = max(compression.compressor.residuals, key=lambda one: one.values.size)
    selection = compression.compressor.policy_of(largest)
    given = compression.compressor.momentum

    def of_length(elements: int) -> _Prepare:
        momentum: Velocities | None = None if given is None else given.anew({_NAME: elements})
        compressor = Compressor(
            {_NAME: elements}, density=compression.density, selections={_NAME: selection}, momentum=momentum
        )
        exchange = Exchange(comm, compressor, compression.values, compression.encoding, compression.combine, DDPStats())
        layout = layout_of_members([ParameterSpan(_NAME, 0, elements)], elements, compressor)
        drawn = np.random.default_rng(comm.rank).standard_normal(elements + _GRADIENTS, np.float32)  # ranks' differ
        bits = np.empty(elements, np.float32)
        calls = 0

        def prepare() -> Callable[[], Begun]:
            # Another gradient in each call: one that repeats itself makes thresholds useless that are kept from call
            # to call.
            nonlocal calls
            bits[:] = drawn[calls % _GRADIENTS :][:elements]
            calls += 1
            return start

        def start() -> Begun:
            if way == "sparse":
                sending = exchange.send(layout, bits, sound=True)
            else:
                sending = exchange.send_quantised(layout, bits, way)

            def conclude() -> None:
                sending.keep()
                sending.write()

            return Begun(sending.works, conclude)

        for _ in range(_SETTLING):
            prepare()
            compressor.compress(layout.parts, bits, *layout.scratch())
        return prepare

    return of_length
