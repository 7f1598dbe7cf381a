"""One training step as a timeline, and steps among more and more ranks: a row for each scheme and plan.

A group's gradients are ready; it is selected, which holds the backward pass up; it begins when the network is free, and
arrives; what came is decompressed when the backward pass is over, as both are the same processor's. All ranks are
alike. Does not know where a way's costs come from.

Groups are named by a plan: cuts of ``telegrad.synchronizer.merge``, all groups sent in one way. Closed forms may take a
millisecond for a size, and plans ask for up to ten thousand sizes; so they are looked for with costs that are
interpolated, and with selection the optimum has fewer places to cut. What a step takes is reckoned without either.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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
    """``compute_s`` is the step of one rank without communication, ``forward_s`` and ``backward_s`` its parts, without
    compression. ``groups``: as they leave."""

    compute_s: float
    forward_s: float
    backward_s: float
    groups: tuple[GroupTimes, ...]
    step_s: float

    @property
    def exposed_s(self) -> float:
        """By how much the step is longer than forward and backward pass."""
        return max(0.0, self.step_s - self.forward_s - self.backward_s)

    @property
    def efficiency(self) -> float:
        """Steps a second, as a share of those without communication."""
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


def simulate(trace: Trace, groups: Sequence[StepGroup], *, overlap: bool = True) -> Step:
    """The step whose gradients travel in these groups.

    ``overlap``: communication goes on beside the backward pass; without, groups are selected and leave when it is over,
    the next one being selected while one is under way. Raises ``ValueError`` for groups that do not hold each gradient
    once.
    """
    if sorted(one for group in groups for one in group.tensors) != list(range(len(trace.sizes))):
        raise ValueError(f"groups must hold each of the positions 0 to {len(trace.sizes) - 1} once")
    backward_s = sum(trace.backward_times)
    processor_s, done = trace.forward_s, 0
    if not overlap:
        processor_s, done = trace.forward_s + backward_s, len(trace.sizes)
    ready: list[tuple[StepGroup, int, float, float]] = []
    for group in sorted(groups, key=lambda one: one.tensors[-1]):
        size = sum(trace.sizes[one] for one in group.tensors)
        while done <= group.tensors[-1]:
            processor_s += trace.backward_times[done]
            done += 1
        ready_s, processor_s = processor_s, processor_s + group.way.delay(size)
        ready.append((group, size, ready_s, processor_s))
    for one in trace.backward_times[done:]:
        processor_s += one
    network_s, times = 0.0, []
    for group, size, ready_s, selected_s in ready:
        unpack_s = group.way.decompress(size) if isinstance(group.way, PhasedWay) else 0.0
        start_s = max(network_s, selected_s)
        network_s = finish_s = start_s + group.way.cost(size) - unpack_s
        if unpack_s > 0:
            processor_s = finish_s = max(processor_s, network_s) + unpack_s
        times.append(GroupTimes(group.way.name, size, ready_s, selected_s, start_s, network_s, finish_s, unpack_s))
    end_s = max([processor_s, *(one.finish_s for one in times)])
    return Step(trace.compute_s, trace.forward_s, backward_s, tuple(times), end_s)


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
            step = simulate(here.trace, groups, overlap=self.overlap)
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
