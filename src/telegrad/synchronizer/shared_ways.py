"""Cuts, and the way of each group, where computation and communication share processors: a sum that runs beside the
backward pass takes longer than one after it, and a way may hold the backward pass up (``joint``, which is not exact).
Other plans are in telegrad.synchronizer.merge. Does not know how anything was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from telegrad.cost.send_method import GroupCost, SendMethod
from telegrad.synchronizer import merge
from telegrad.synchronizer.joint import Floats, Frontier, Integers, costs_of
from telegrad.synchronizer.merge_plan import MergePlan

_BOUNDS, _LEAST_BOUNDS, _TENSORS = 8, 3, 2_000
"""Of the total delay so many are tried, besides 0 and those of plans that were found; fewer with many tensors."""
_WIDE, _MOST = 64, 6_000
"""Pairs that are kept: of each prefix, and of all prefixes together."""
_SLACK = 1 + 1e-9


class _SharedCosts(NamedTuple):
    """Of the groups that end at one position, by way and first tensor."""

    idle: Floats
    busy: Floats
    delay: Floats


def optimal(sizes: Sequence[int], backward_times: Sequence[float], *, idle: GroupCost, busy: GroupCost) -> MergePlan:
    """The cut by which the last group ends first; of several such cuts, always the same one.

    ``sizes``, ``backward_times``, errors: as for ``telegrad.synchronizer.merge.optimal``. ``idle``: what a group costs
    once the backward pass is over, ``busy``: while it goes on, which counts as ``idle`` where it is less. A group that
    begins before the end of the backward pass and does not finish until then has done the share of it that the time was
    of ``busy``; the rest takes its share of ``idle``. The plan's ``costs`` are what its groups then take. Exact."""
    ready = merge.ready_times(sizes, backward_times)

    def ends(start: Floats, held: Sequence[int]) -> Floats:
        alone = merge.costs_of_sizes(idle, held)
        return ends_of(start, alone, np.maximum(merge.costs_of_sizes(busy, held), alone), ready[-1])

    stops = merge.earliest_stops(sizes, ready, ends)
    return of_cuts("optimal", sizes, backward_times, stops, idle=idle, busy=busy)


def of_cuts(
    scheme: str,
    sizes: Sequence[int],
    backward_times: Sequence[float],
    stops: Sequence[int],
    *,
    idle: GroupCost,
    busy: GroupCost,
) -> MergePlan:
    """As ``planned``, of one way that has no name."""
    ways = [SendMethod("", idle, busy=busy)] * len(stops)
    return replace(planned(scheme, sizes, backward_times, stops, ways), ways=())


def ends_of(start: Floats, alone: Floats, beside: Floats, over_s: float) -> Floats:
    """When groups end that begin at ``start`` and take ``alone`` seconds after ``over_s``, and ``beside`` before it."""
    before = np.clip(over_s - start, 0.0, beside)
    left = 1.0 - np.divide(before, beside, out=np.zeros_like(beside), where=beside > 0)
    return np.where(beside > 0, start + before + left * alone, start)


def joint(
    sizes: Sequence[int],
    backward_times: Sequence[float],
    *,
    ways: Sequence[SendMethod],
    dense: Sequence[int] | None = None,
) -> MergePlan:
    """As ``telegrad.synchronizer.merge.joint``, arguments and errors too, with ``SendMethod.busy``: what a group costs
    while the backward pass goes on, as ``optimal`` has it. The plan's ``costs`` are what its groups then take.

    When the backward pass is over depends on the delays of all groups. So for a bound of their sum the best plan within
    it is searched as if it were reached, which no plan within it takes longer than; and the bounds are 0, some more,
    and those of the plans that this finds. Exact where no way has a delay. Otherwise it is the best of these plans and
    of ``merge.joint``'s, thus exact with equal costs where that is; and where L tensors leave more than 6,000 / L
    (at most 64) pairs of end and delay of a prefix, some are left out.
    """
    plain = merge.joint(sizes, backward_times, ways=ways, dense=dense)
    if not sizes or all(way.busy is None for way in ways):
        return plain

    def of(found: Sequence[tuple[int, int]]) -> MergePlan:
        taken = [ways[number] for _, number in found]
        return planned("joint", sizes, backward_times, [stop for stop, _ in found], taken, dense=dense)

    numbers = {way.name: number for number, way in enumerate(ways)}
    stops = [group[-1] + 1 for group in plain.groups]
    best = of([*zip(stops, [numbers[name] for name in plain.ways], strict=True)])
    ready = [*accumulate(map(float, backward_times))]
    table = _table(sizes, dense, ways)
    whole = max(way.delay_of(sum(sizes), sum(dense or ())) for way in ways)
    most = 1.25 * max(whole, *(sum(one.delays) for one in (best, plain)))
    tried: set[float] = set()
    parts = max(_LEAST_BOUNDS, min(_BOUNDS, _TENSORS // len(sizes)))
    bounds = [most * part / parts for part in range(parts + 1)]
    while bounds:
        bound = bounds.pop()
        if bound in tried:
            continue
        tried.add(bound)
        found = _search(table, ready, bound)
        if not found:
            continue
        plan = of(found)
        if plan.finish_s < best.finish_s:
            best = plan
            bounds.append(sum(plan.delays))
    return best


def planned(
    scheme: str,
    sizes: Sequence[int],
    backward_times: Sequence[float],
    stops: Sequence[int],
    ways: Sequence[SendMethod],
    *,
    dense: Sequence[int] | None = None,
) -> MergePlan:
    """The plan of these groups and ways, as ``telegrad.synchronizer.merge.of_ways``, errors too."""
    plan = merge.of_ways(scheme, sizes, backward_times, stops, ways, dense=dense)
    prefix, apart = [0, *accumulate(sizes)], [0, *accumulate(dense or [0] * len(sizes))]
    ready = [*accumulate(map(float, backward_times))]
    over_s = (ready[-1] if ready else 0.0) + sum(plan.delays)
    costs, free, late = [], 0.0, 0.0
    for (begin, stop), way, alone, delay in zip(pairwise([0, *stops]), ways, plan.costs, plan.delays, strict=True):
        late += delay
        start = max(free, ready[stop - 1] + late)
        beside = max(alone, way.busy_of(prefix[stop] - prefix[begin], apart[stop] - apart[begin]))
        free = float(ends_of(np.array(start), np.array(alone), np.array(beside), over_s))
        costs.append(free - start)
    return replace(plan, costs=tuple(costs))


def _table(sizes: Sequence[int], dense: Sequence[int] | None, ways: Sequence[SendMethod]) -> list[_SharedCosts]:
    prefix, apart = [0, *accumulate(sizes)], [0, *accumulate(dense or [0] * len(sizes))]
    slow = [
        SendMethod(f"{way.name} busy", way.busy or way.cost, beside=way.busy_beside or way.beside) for way in ways
    ]  # without delays, which are those of ``ways``
    table = []
    for stop in range(1, len(prefix)):
        idle, delay = costs_of(prefix, apart, stop, ways)
        table.append(_SharedCosts(idle, np.maximum(costs_of(prefix, apart, stop, slow).cost, idle), delay))
    return table


def _search(table: Sequence[_SharedCosts], ready: Sequence[float], bound: float) -> list[tuple[int, int]]:
    """Where groups end and their ways, for the plan that ends first if all delays together are no more than ``bound``
    and the backward pass is as late as that; nothing where no plan is within it."""
    count, over_s, pairs = len(table), ready[-1] + bound, Frontier()
    wide = max(4, min(_WIDE, _MOST // count))

    def thinned(kept: Integers, _: Floats, __: Floats) -> Integers:
        return kept if kept.size <= wide else kept[np.linspace(0, kept.size - 1, wide).astype(np.int64)]

    for stop in range(1, count + 1):
        found = []
        for way, (idle, busy, delay) in enumerate(zip(*table[stop - 1], strict=True)):
            late = pairs.late + delay[pairs.prefix]
            which = np.flatnonzero(late <= bound * _SLACK)
            held, late = pairs.prefix[which], late[which]
            start = np.maximum(pairs.end[which], ready[stop - 1] + late)
            if which.size:
                ends = ends_of(start, idle[held], busy[held], over_s)
                found.append((ends, late, which, np.full(which.size, way)))
        if found:
            pairs.add(stop, found, ready[stop] if stop < count else None, thinned)
    return pairs.first_to_end(count)[0]
