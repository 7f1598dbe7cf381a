"""One training step as a timeline, and steps among more and more ranks: a row for each scheme, plan and collective.

A group's gradients are ready; it is selected, which holds the backward pass up; it begins when the network is free, and
arrives; what came is decompressed when the backward pass is over, as both are the same processor's. All ranks are
alike but for stragglers, for whom everybody waits. Does not know where a way's costs come from.

Groups are named by a plan: cuts of ``telegrad.synchronizer.merge``, all groups sent in one way. Closed forms may take a
millisecond for a size, and plans ask for up to ten thousand sizes; so they are looked for with costs that are
interpolated, and with selection the optimum has fewer places to cut. What a step takes is reckoned without either.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from telegrad.cost.send_method import GroupCost, LinearCost, SendMethod
from telegrad.synchronizer import merge
from telegrad.synchronizer.merge_plan import MergePlan
from telegrad.synchronizer.trace import Trace
from telegrad.tools.advise.sending import Cluster, PhasedWay, way_of
from telegrad.tools.advise.workload import Device, Workload


@dataclass(frozen=True)
class StepGroup:
    """``tensors``: positions in backward order, ascending; they need not be neighbours."""

    tensors: tuple[int, ...]
    way: SendMethod


class GroupTimes(NamedTuple):
    """Of one group, in seconds from the start of the step: its last gradient is there; it is selected; it begins on the
    network; it has arrived; it is summed on all ranks and in its place, of which the last ``decompress_s`` were the
    processor's."""

    way: str
    size: int
    ready_s: float
    selected_s: float
    start_s: float
    arrived_s: float
    finish_s: float
    decompress_s: float = 0.0


@dataclass(frozen=True)
class Step:
    """``compute_s`` is the step of one rank without communication or stragglers, ``forward_s`` and ``backward_s`` those
    of the slowest rank, without compression. ``groups``: as they leave."""

    compute_s: float
    forward_s: float
    backward_s: float
    groups: tuple[GroupTimes, ...]
    step_s: float

    @property
    def exposed_s(self) -> float:
        """By how much the step is longer than forward and backward pass of the slowest rank."""
        return max(0.0, self.step_s - self.forward_s - self.backward_s)

    @property
    def efficiency(self) -> float:
        """Steps a second, as a share of those without communication and stragglers."""
        return self.compute_s / self.step_s if self.step_s > 0 else 1.0

    @property
    def select_s(self) -> float:
        return sum(one.selected_s - one.ready_s for one in self.groups)

    @property
    def communicate_s(self) -> float:
        """Of all groups, hidden or not."""
        return sum(one.arrived_s - one.start_s for one in self.groups)

    @property
    def decompress_s(self) -> float:
        return sum(one.decompress_s for one in self.groups)


def simulate(trace: Trace, groups: Sequence[StepGroup], *, overlap: bool = True, slowdown: float = 1.0) -> Step:
    """The step whose gradients travel in these groups.

    ``overlap``: communication goes on beside the backward pass; without, groups are selected and leave when it is over,
    the next one being selected while one is under way. ``slowdown``: of the slowest rank, whose processor takes so many
    times as long. Raises ``ValueError`` for groups that do not hold each gradient once, and for a slowdown below 1.
    """
    if not 1 <= slowdown < math.inf:
        raise ValueError(f"slowdown={slowdown} must be 1 (no straggler) or more, and finite")
    if sorted(one for group in groups for one in group.tensors) != list(range(len(trace.sizes))):
        raise ValueError(f"groups must hold each of the positions 0 to {len(trace.sizes) - 1} once")
    return _Costed(trace, groups).step(overlap=overlap, slowdown=slowdown)


@dataclass(frozen=True)
class Stragglers:
    """How many times as long as typical the slowest rank's processor takes: ``factor`` always, and beside it the
    largest of as many lognormal draws as there are ranks, exp(``sigma``·z), z normal; ``draws`` steps by ``seed``.

    Raises ``ValueError`` for a factor below 1, a sigma below 0, and for no draws.
    """

    factor: float = 1.0
    sigma: float = 0.0
    seed: int = 0
    draws: int = 200

    def __post_init__(self) -> None:
        if not 1 <= self.factor < math.inf:
            raise ValueError(f"factor={self.factor} must be 1 (no straggler) or more, and finite")
        if not 0 <= self.sigma <= _MOST_SIGMA:
            raise ValueError(f"sigma={self.sigma} must be 0 (no noise) to {_MOST_SIGMA:g}; 0.5 is much")
        if self.draws < 1:
            raise ValueError(f"draws={self.draws} must be at least 1")

    def slowdowns(self, ranks: int) -> list[float]:
        """Of the slowest of so many ranks, one for each step; at least 1."""
        if self.sigma == 0:
            return [self.factor]
        normal = np.random.default_rng(self.seed).standard_normal((self.draws, ranks))
        slowest = np.exp(self.sigma * normal.max(axis=1))
        return [max(1.0, self.factor, float(one)) for one in slowest]


_MOST_SIGMA = 100.0  # exp of that times what a normal draw may be is finite
NONE = Stragglers()


def expected(
    trace: Trace, groups: Sequence[StepGroup], ranks: int, *, overlap: bool = True, stragglers: Stragglers = NONE
) -> Step:
    """The step of median slowdown, with the means of all steps as ``step_s``, ``forward_s`` and ``backward_s``, so that
    ``exposed_s`` is their mean, too. Errors as for ``simulate``."""
    slowdowns = sorted(stragglers.slowdowns(ranks))
    typical = simulate(trace, groups, overlap=overlap, slowdown=slowdowns[len(slowdowns) // 2])
    if len(slowdowns) == 1:
        return typical
    costed = _Costed(trace, groups)
    steps = [costed.step(overlap=overlap, slowdown=one) for one in slowdowns]
    step_s, forward_s, backward_s = (
        math.fsum(times) / len(steps)
        for times in zip(*((one.step_s, one.forward_s, one.backward_s) for one in steps), strict=True)
    )
    return replace(typical, step_s=step_s, forward_s=forward_s, backward_s=backward_s)


class _Costed:
    """Groups in the order in which they are ready, each with what its way takes."""

    def __init__(self, trace: Trace, groups: Sequence[StepGroup]) -> None:
        self._trace = trace
        self._costs: list[tuple[int, str, int, float, float, float]] = []
        for group in sorted(groups, key=lambda one: one.tensors[-1]):
            size = sum(trace.sizes[one] for one in group.tensors)
            way = group.way
            decompress_s = way.decompress(size) if isinstance(way, PhasedWay) else 0.0
            move_s = way.cost(size) - decompress_s
            self._costs.append((group.tensors[-1], way.name, size, way.delay(size), move_s, decompress_s))

    def step(self, *, overlap: bool, slowdown: float) -> Step:
        trace, costs = self._trace, self._costs
        forward_s = trace.forward_s * slowdown
        backward_s = sum(trace.backward_times) * slowdown
        processor_s, done = forward_s, 0
        if not overlap:
            processor_s, done = forward_s + backward_s, len(trace.sizes)
        ready: list[tuple[float, float]] = []
        for last, _, _, delay_s, _, _ in costs:
            while done <= last:
                processor_s += trace.backward_times[done] * slowdown
                done += 1
            ready.append((processor_s, processor_s + delay_s * slowdown))
            processor_s += delay_s * slowdown
        for one in trace.backward_times[done:]:
            processor_s += one * slowdown
        network_s, times = 0.0, []
        for (_, name, size, _, move_s, unpack_s), (ready_s, selected_s) in zip(costs, ready, strict=True):
            start_s = max(network_s, selected_s)
            network_s = start_s + move_s
            finish_s = network_s
            if unpack_s > 0:
                processor_s = finish_s = max(processor_s, network_s) + unpack_s * slowdown
            times.append(GroupTimes(name, size, ready_s, selected_s, start_s, network_s, finish_s, unpack_s * slowdown))
        end_s = max([processor_s, *(one.finish_s for one in times)])
        return Step(trace.compute_s, forward_s, backward_s, tuple(times), end_s)


_PER_DOUBLING = 4
_UNITS = 64


_MERGED: dict[str, Callable[..., MergePlan]] = {
    "fixed": merge.fixed,
    "wfbp": merge.wfbp,
    "single": merge.single,
    "greedy": merge.greedy,
}
PLANS = (*_MERGED, "optimal")
"""How gradients are merged, by name: see ``telegrad.synchronizer.merge``."""


def planned(trace: Trace, plan: str, way: SendMethod) -> list[StepGroup]:
    """The groups of the plan of that name, all sent in one way. ``optimal`` counts selection, and decompression as if
    it kept the network busy; of its groups and those of the other plans, those whose step is the shortest.

    Raises ``ValueError`` for an unknown name.
    """
    if plan not in PLANS:
        raise ValueError(f"plan={plan!r} is not known: use one of {', '.join(PLANS)}")
    if plan in _MERGED:
        cost = _quick(way.cost) if plan == "greedy" else way.cost
        return _groups(_MERGED[plan](trace.sizes, trace.backward_times, cost=cost), way)
    found = [_optimal(trace, way), *(planned(trace, name, way) for name in _MERGED)]
    return min(found, key=lambda groups: simulate(trace, groups).step_s)


def _optimal(trace: Trace, way: SendMethod) -> list[StepGroup]:
    sizes, times = trace.sizes, trace.backward_times
    cost = _quick(way.cost)
    if not any(map(way.delay, sizes)):
        return _groups(merge.optimal(sizes, times, cost=cost), way)
    ends = _units(sizes)
    starts = [0, *ends[:-1]]
    joined = [sum(sizes[a:b]) for a, b in zip(starts, ends, strict=True)]
    spans = [math.fsum(times[a:b]) for a, b in zip(starts, ends, strict=True)]
    found = merge.optimal(joined, spans, cost=cost, delay=way.delay)
    return [StepGroup(tuple(range(starts[group[0]], ends[group[-1]])), way) for group in found.groups]


def _groups(plan: MergePlan, way: SendMethod) -> list[StepGroup]:
    return [StepGroup(tensors, way) for tensors in plan.groups]


@functools.lru_cache(maxsize=64)
def _quick(cost: GroupCost) -> GroupCost:
    return cost if isinstance(cost, LinearCost) else interpolated(cost)


def interpolated(cost: GroupCost) -> GroupCost:
    """``cost`` on straight lines between four sizes for each doubling, asked for as they are needed."""

    @functools.cache
    def at(step: int) -> tuple[int, float]:
        size = math.ceil(2 ** (step / _PER_DOUBLING) / 4) * 4
        return size, cost(size)

    def seconds(size: int) -> float:
        if size < 16:
            return cost(size)
        step = math.floor(_PER_DOUBLING * math.log2(size))
        (below, below_s), (above, above_s) = at(step), at(step + 1)
        if size < below:
            (below, below_s), (above, above_s) = at(step - 1), (below, below_s)
        return below_s + (above_s - below_s) * (size - below) / (above - below)

    return seconds


def _units(sizes: Sequence[int]) -> list[int]:
    """Where neighbours that together have a 64th of all bytes end."""
    least, held, ends = sum(sizes) / _UNITS, 0, []
    for end, size in enumerate(sizes, 1):
        held += size
        if held >= least or end == len(sizes):
            ends.append(end)
            held = 0
    return ends


Row = dict[str, Any]


@dataclass(frozen=True)
class StepSweep:
    """What is asked. ``global_samples``: of all ranks together (strong scaling); ``None``: each rank has the
    workload's own."""

    workload: Workload
    cluster_of: Callable[[int], Cluster]
    device: Device
    ranks: Sequence[int]
    schemes: Sequence[str] = ("dense",)
    plans: Sequence[str] = ("fixed",)
    density: float = 0.01
    global_samples: float | None = None
    overlap: bool = True
    stragglers: Stragglers = NONE

    def rows(self) -> Iterator[Row]:
        """By ranks, scheme and plan. ``speedup``: of samples a second over one rank with the whole global
        mini-batch, or, in weak scaling, with its own. Raises ``ValueError`` for what does not exist."""
        alone = self.workload if self.global_samples is None else self.workload.of(self.global_samples)
        per_s_alone = alone.samples / alone.trace.compute_s if alone.trace.compute_s else 0.0
        for count in self.ranks:
            here = self.workload if self.global_samples is None else self.workload.of(self.global_samples / count)
            cluster = self.cluster_of(count)
            for scheme in self.schemes:
                yield from self._rows(here, cluster, scheme, per_s_alone)

    def _rows(self, here: Workload, cluster: Cluster, scheme: str, per_s_alone: float) -> Iterator[Row]:
        way = way_of(scheme, cluster, self.device, density=self.density)
        for plan in self.plans:
            groups = planned(here.trace, plan, way)
            step = expected(here.trace, groups, cluster.ranks, overlap=self.overlap, stragglers=self.stragglers)
            per_s = cluster.ranks * here.samples / step.step_s if step.step_s else 0.0
            yield {
                "model": here.model,
                "ranks": cluster.ranks,
                "samples": here.samples,
                "scheme": scheme,
                "plan": plan,
                "overlap": self.overlap,
                **times_of(step, cluster.ranks),
                "samples_per_s": per_s,
                "speedup": per_s / per_s_alone if per_s_alone else 1.0,
            }


def times_of(step: Step, ranks: int) -> Row:
    """A step's figures for a row; ``speedup``: samples a second of all ranks over those of one alone."""
    return {
        "groups": len(step.groups),
        "compute_s": step.compute_s,
        "step_s": step.step_s,
        "exposed_s": step.exposed_s,
        "select_s": step.select_s,
        "communicate_s": step.communicate_s,
        "decompress_s": step.decompress_s,
        "efficiency": step.efficiency,
        "speedup": ranks * step.efficiency,
    }
