"""Groups for a step, by the name of a plan: cuts of ``telegrad.plan.merge``, all groups sent in one way.

Closed forms may take a millisecond for a size, and plans ask for up to ten thousand sizes; so they are looked for with
costs that are interpolated, and with selection the optimum has fewer places to cut. What a step takes is reckoned
without either.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

from telegrad.plan import merge
from telegrad.plan.linear_cost import LinearCost
from telegrad.plan.merge_plan import MergePlan
from telegrad.plan.step import StepGroup, simulate
from telegrad.plan.trace import Trace
from telegrad.plan.way import GroupCost, Way

_PER_DOUBLING = 4
_UNITS = 64


_MERGED: dict[str, Callable[..., MergePlan]] = {
    "fixed": merge.fixed,
    "wfbp": merge.wfbp,
    "single": merge.single,
    "greedy": merge.greedy,
}
PLANS = (*_MERGED, "optimal")
"""How gradients are merged, by name: see ``telegrad.plan.merge``."""


def planned(trace: Trace, plan: str, way: Way) -> list[StepGroup]:
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


def _optimal(trace: Trace, way: Way) -> list[StepGroup]:
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


def _groups(plan: MergePlan, way: Way) -> list[StepGroup]:
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
