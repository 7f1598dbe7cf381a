"""The search for the cut and the ways by which the last group ends first, where groups may hold the backward pass up.

What a group costs later groups is two numbers: when the network is free, and how late the backward pass is. So of each
prefix all pairs are kept of which none is better in both, and which can still lead to the best plan. Does not know what
a plan is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from telegrad.cost.send_method import SendMethod, no_delay

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

_QUICK, _MOST = 4, 20_000
"""Pairs that are kept: of each prefix in the quick search, and of all prefixes together in the thorough one."""
_SLACK = 1 + 1e-9
"""Bounds add the same numbers in another order."""
_FINITE = float(np.finfo(np.float64).max)
_WEIGHTS = np.array([1.0, 0.0, 0.5, 0.75, 0.9, 0.97, 0.25, 0.1])[:, None]


class _JointCosts(NamedTuple):
    """Of the groups that end at one position, by way and first tensor; an infinite cost: not to be used."""

    cost: Floats
    delay: Floats


class _Found(NamedTuple):
    """Groups and ways, and when the last one ends; ``exact``: no pair was left out that could have been better."""

    groups: list[tuple[int, int]]
    end: float
    exact: bool


class Frontier:
    """Pairs of prefixes: when the network is free of their last group, how late the backward pass is then, and which
    groups and ways led there. The first one is of no group."""

    def __init__(self) -> None:
        self.end, self.late = np.zeros(1), np.zeros(1)
        self.prefix, self._before, self._way = (np.zeros(1, np.int64) for _ in range(3))

    def add(
        self,
        stop: int,
        found: Sequence[tuple[Floats, Floats, Integers, Integers]],
        next_s: float | None,
        thinned: Callable[[Integers, Floats, Floats], Integers],
    ) -> Integers:
        """Pairs of the prefix ``stop``, of which none is better in both: ends, delays, pairs before them, and ways.
        ``next_s``: when the next gradient is there without delays. ``thinned`` chooses among them where there are too
        many. Returns the numbers of those that are kept."""
        end, late, before, way = (np.concatenate(parts) for parts in zip(*found, strict=True))
        # The next gradient comes no sooner than that: until then it does not matter when the network was free.
        kept = thinned(undominated(end if next_s is None else np.maximum(end, next_s + late), late), end, late)
        first = self.end.size
        self.end, self.late = np.concatenate([self.end, end[kept]]), np.concatenate([self.late, late[kept]])
        self.prefix = np.concatenate([self.prefix, np.full(kept.size, stop)])
        self._before = np.concatenate([self._before, before[kept]])
        self._way = np.concatenate([self._way, way[kept]])
        return np.arange(first, first + kept.size)

    def first_to_end(self, stop: int) -> tuple[list[tuple[int, int]], float]:
        """The groups and ways of the pair of this prefix that ends first, and when; none: infinity."""
        finals = np.flatnonzero(self.prefix == stop)
        if not finals.size:
            return [], math.inf
        pair, groups = int(finals[self.end[finals].argmin()]), []
        end = float(self.end[pair])
        while pair:
            groups.append((int(self.prefix[pair]), int(self._way[pair])))
            pair = int(self._before[pair])
        return groups[::-1], end


def search(
    prefix: Sequence[int], ready: Sequence[float], ways: Sequence[SendMethod], dense: Sequence[int] | None = None
) -> list[tuple[int, int]]:
    """Where groups end, and which of the ``ways`` each takes; of several such plans, always the same one.

    ``prefix``: bytes of the first 0, 1, … tensors, and ``dense`` those that no way compresses (``None``: none);
    ``ready``: when each gradient is there. L²/2 calls of each way's
    cost and delay, and as many numbers of memory.
    """
    if not ready:
        return []
    table = [costs_of(prefix, dense, stop, ways) for stop in range(1, len(ready) + 1)]
    best = _best([_usable(costs) for costs in table], ready)
    if not best.exact:  # then at least no worse than with any one way
        for way in range(len(ways) if len(ways) > 1 else 0):
            of_way = [_JointCosts(cost[way : way + 1], delay[way : way + 1]) for cost, delay in table]
            if _bounds(of_way, ready[-1])[:, 0].max() > best.end * _SLACK:
                continue
            alone = _best(of_way, ready)
            if alone.end < best.end:
                best = alone._replace(groups=[(stop, way) for stop, _ in alone.groups])
    return best.groups


def _best(table: Sequence[_JointCosts], ready: Sequence[float]) -> _Found:
    bounds = _bounds(table, ready[-1])
    quick = _swept(table, ready, bounds, math.inf, _QUICK)
    if quick.exact:
        return quick
    thorough = _swept(table, ready, bounds, quick.end * _SLACK, max(_QUICK, _MOST // len(table)))
    return min(thorough, quick, key=lambda found: found.end)._replace(exact=thorough.exact)


def costs_of(prefix: Sequence[int], dense: Sequence[int] | None, stop: int, ways: Sequence[SendMethod]) -> _JointCosts:
    """Of the groups that end before tensor ``stop``. Raises ``ValueError`` as ``SendMethod.cost_of``."""
    sizes = [prefix[stop] - before for before in prefix[:stop]]
    held = [0] * stop if dense is None else [dense[stop] - before for before in dense[:stop]]
    costs = _JointCosts(np.zeros((len(ways), stop)), np.zeros((len(ways), stop)))
    for number, way in enumerate(ways):
        cost, delay, beside = way.cost, way.delay, way.beside
        if beside is None:
            taken = sizes
            costs.cost[number] = [cost(size) for size in sizes]
        else:
            taken = [size - apart for size, apart in zip(sizes, held, strict=True)]
            pairs = zip(taken, held, strict=True)
            costs.cost[number] = [beside(apart) + (cost(size) if size else 0.0) for size, apart in pairs]
        if delay is not no_delay:
            costs.delay[number] = [delay(size) if size else 0.0 for size in taken]
        for row, checked in ((costs.cost[number], way.cost_of), (costs.delay[number], way.delay_of)):
            if not (np.isfinite(row).all() and (row >= 0).all()):
                for size, apart in zip(sizes, held, strict=True):
                    checked(size, apart)
    return costs


def _usable(costs: _JointCosts) -> _JointCosts:
    """Infinite where another way costs and delays no more; of equal ways the first one stays."""
    cost, delay = costs.cost.copy(), costs.delay
    for number in range(len(cost)):
        for other in range(len(cost)):
            no_worse = (costs.cost[other] <= costs.cost[number]) & (delay[other] <= delay[number])
            if other > number:
                no_worse &= (costs.cost[other] < costs.cost[number]) | (delay[other] < delay[number])
            if other != number:
                cost[number, no_worse] = math.inf
    return _JointCosts(cost, delay)


def _bounds(table: Sequence[_JointCosts], backward_s: float) -> Floats:
    """By weight w and prefix: w·(end of its last group) + (1−w)·(delay so far) + this is no later than any end.

    The last group ends no sooner than all groups take on the network one after another, and no sooner than the backward
    pass with all delays, and then the last group: so for each w not before their weighted mean, which is a sum over
    groups, and has a least one by dynamic programming.
    """
    count, w = len(table), _WEIGHTS
    bounds = np.full((len(w), count + 1), math.inf)
    bounds[:, count] = 0
    for stop in range(count, 0, -1):
        for cost, delay in zip(*table[stop - 1], strict=True):
            usable = np.flatnonzero(np.isfinite(cost))
            cost, delay = cost[usable], delay[usable]
            of_group = w * cost + (1 - w) * (delay + (cost + backward_s if stop == count else 0.0))
            bounds[:, usable] = np.minimum(bounds[:, usable], of_group + bounds[:, stop : stop + 1])
    return bounds


def _swept(table: Sequence[_JointCosts], ready: Sequence[float], bounds: Floats, most: float, wide: int) -> _Found:
    """The best plan that ends at ``most`` or before; none: it ends at infinity. ``wide``: how many pairs of a prefix
    are kept at most, those with the least bounds."""
    count, exact, pairs = len(table), True, Frontier()
    least_after = _least_after(table, bounds) if most < math.inf else None
    open_ = np.zeros(1, np.int64)  # pairs that a group may still begin at

    def thinned(kept: Integers, end: Floats, late: Floats) -> Integers:
        nonlocal exact
        if kept.size <= wide:
            return kept
        exact = False
        least = (_WEIGHTS * end[kept] + (1 - _WEIGHTS) * late[kept] + bounds[:, stop : stop + 1]).max(axis=0)
        return kept[np.sort(np.argsort(least, kind="stable")[:wide])]

    for stop in range(1, count + 1):
        if least_after is not None:
            open_ = open_[pairs.end[open_] + least_after[stop - 1, pairs.prefix[open_]] <= most]
        found = []
        for way, (cost, delay) in enumerate(zip(*table[stop - 1], strict=True)):
            held = pairs.prefix[open_]
            late = pairs.late[open_] + delay[held]
            end = np.maximum(pairs.end[open_], ready[stop - 1] + late) + cost[held]
            which = np.flatnonzero(end <= min(most, _FINITE))
            for w, rest in (
                zip(_WEIGHTS[:, 0], bounds[:, stop], strict=True) if stop < count and most < math.inf else ()
            ):
                which = which[w * end[which] + (1 - w) * late[which] + rest <= most]
            if which.size:
                found.append((end[which], late[which], open_[which], np.full(which.size, way)))
        if found:
            added = pairs.add(stop, found, ready[stop] if stop < count else None, thinned)
            open_ = np.concatenate([open_, added])
    return _Found(*pairs.first_to_end(count), exact)


def _least_after(table: Sequence[_JointCosts], bounds: Floats) -> Floats:
    """By position − 1 and first tensor: what the network has to do at least, when a group from that tensor on ends at
    that position or a later one."""
    least = np.full((len(table), len(table)), math.inf)
    for position in reversed(range(len(table))):
        least[position, : position + 1] = table[position].cost.min(axis=0) + bounds[0, position + 1]
        if position + 1 < len(table):
            np.minimum(least[position], least[position + 1], out=least[position])
    return least


def undominated(free: Floats, late: Floats) -> Integers:
    """Of all pairs those of which no other is better in one and no worse in the other; of equal ones the first."""
    candidates = np.arange(free.size)
    for of in (free, late, free + late):  # most are dominated by one of these: only the others are worth sorting
        best = candidates[of[candidates].argmin()]
        worse = (free[candidates] >= free[best]) & (late[candidates] >= late[best]) & (candidates != best)
        worse &= (free[candidates] > free[best]) | (late[candidates] > late[best]) | (candidates > best)
        candidates = candidates[~worse]
    order = candidates[np.lexsort((candidates, late[candidates], free[candidates]))]
    before = np.minimum.accumulate(np.concatenate([[math.inf], late[order]]))[:-1]
    return order[late[order] < before]
