"""Cuts of a backward pass where computation and communication share processors: a sum that runs beside the backward
pass takes longer than one that runs after it. Other plans are in telegrad.synchronizer.merge. Does not know how
anything was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np

from telegrad.cost.send_method import GroupCost, seconds_of
from telegrad.synchronizer.merge import of_cuts
from telegrad.synchronizer.merge_plan import MergePlan


def optimal(sizes: Sequence[int], backward_times: Sequence[float], *, idle: GroupCost, busy: GroupCost) -> MergePlan:
    """The cut by which the last group ends first; of several such cuts, always the same one.

    ``sizes``, ``backward_times``, errors: as for ``telegrad.synchronizer.merge.optimal``. ``idle``: what a group costs
    once the backward pass is over, ``busy``: while it goes on, which counts as ``idle`` where it is less. A group that
    begins before the end of the backward pass and does not finish until then has done the share of it that the time was
    of ``busy``; the rest takes its share of ``idle``. The plan's ``costs`` are what its groups then take.

    Exact: a group that begins later ends later, so F(i) = min over j < i of end(max(F(j), R(i)), j+1..i)."""
    ready, prefix = _checked(sizes, backward_times, idle, busy)
    count = len(ready)
    over_s = ready[-1] if ready else 0.0
    finish, last = np.zeros(count + 1), [0] * (count + 1)
    for stop in range(1, count + 1):
        held = [prefix[stop] - before for before in prefix[:stop]]
        alone = _costs(idle, held)
        beside = np.maximum(_costs(busy, held), alone)
        ends = ends_of(np.maximum(finish[:stop], ready[stop - 1]), alone, beside, over_s)
        last[stop] = int(ends.argmin())
        finish[stop] = ends[last[stop]]
    stops = []
    stop = count
    while stop:
        stops.append(stop)
        stop = last[stop]
    return planned("optimal", sizes, backward_times, stops[::-1], idle=idle, busy=busy)


def planned(
    scheme: str,
    sizes: Sequence[int],
    backward_times: Sequence[float],
    stops: Sequence[int],
    *,
    idle: GroupCost,
    busy: GroupCost,
) -> MergePlan:
    """The plan whose groups end before these positions; other arguments and errors as for ``optimal``, and
    ``ValueError`` for stops that do not rise to ``len(sizes)``."""
    ready, prefix = _checked(sizes, backward_times, idle, busy)
    plan = of_cuts(scheme, sizes, backward_times, stops, cost=idle)
    over_s = ready[-1] if ready else 0.0
    costs, free = [], 0.0
    for begin, stop in pairwise([0, *stops]):
        size = prefix[stop] - prefix[begin]
        start = max(free, ready[stop - 1])
        alone = float(idle(size))
        beside = max(seconds_of(busy, size), alone)
        free = float(ends_of(np.array(start), np.array(alone), np.array(beside), over_s))
        costs.append(free - start)
    return replace(plan, costs=tuple(costs))


def _checked(
    sizes: Sequence[int], backward_times: Sequence[float], idle: GroupCost, busy: GroupCost
) -> tuple[list[float], list[int]]:
    """When each gradient is there, and how many bytes are there before it; ``of_cuts`` checks the arguments."""
    for cost in (idle, busy):
        of_cuts("wfbp", sizes, backward_times, range(1, len(sizes) + 1), cost=cost)
    return list(accumulate(map(float, backward_times))), [0, *accumulate(sizes)]


def _costs(cost: GroupCost, sizes: Sequence[int]) -> np.ndarray:
    """Raises ``ValueError`` for what is no time."""
    costs = np.array([cost(size) for size in sizes])
    if not (np.isfinite(costs).all() and (costs >= 0).all()):
        for size in sizes:
            seconds_of(cost, size)
    return costs


def ends_of(start: np.ndarray, alone: np.ndarray, beside: np.ndarray, over_s: float) -> np.ndarray:
    """When groups end that begin at ``start`` and take ``alone`` seconds after ``over_s``, and ``beside`` before it."""
    before = np.clip(over_s - start, 0.0, beside)
    left = 1.0 - np.divide(before, beside, out=np.zeros_like(beside), where=beside > 0)
    return np.where(beside > 0, start + before + left * alone, start)
