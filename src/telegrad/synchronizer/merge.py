"""Which gradients travel together: cuts of a backward pass into groups, each of which is one message to the collective.

Tensors are numbered in the order in which the backward pass makes their gradients. A group can leave when its last
gradient is there, and groups leave one after another, so what a cut costs follows from the sizes, the times of the
backward pass and what a group costs. All plans of one profile and one cost can be compared. Does not know how a group
is sent, nor how anything was measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise

import numpy as np

from telegrad.cost.send_method import GroupCost, SendMethod, check_amount, no_delay, seconds_of
from telegrad.synchronizer.joint import Floats, search
from telegrad.synchronizer.merge_plan import MergePlan

DDP_CAP_MB, DDP_FIRST_MB = 25.0, 1.0
"""PyTorch's DistributedDataParallel: ``bucket_cap_mb``, and what its first bucket has."""

_MIB = 1 << 20


def wfbp(sizes: Sequence[int], backward_times: Sequence[float], *, cost: GroupCost) -> MergePlan:
    """Each tensor by itself (wait-free backpropagation). Arguments and errors as for ``optimal``."""
    return of_cuts("wfbp", sizes, backward_times, range(1, len(sizes) + 1), cost=cost)


def single(sizes: Sequence[int], backward_times: Sequence[float], *, cost: GroupCost) -> MergePlan:
    """All in one message, after the backward pass (SyncEASGD). Arguments and errors as for ``optimal``."""
    return of_cuts("single", sizes, backward_times, [len(sizes)] if len(sizes) else [], cost=cost)


def fixed(
    sizes: Sequence[int],
    backward_times: Sequence[float],
    *,
    cost: GroupCost,
    cap_mb: float = DDP_CAP_MB,
    first_mb: float | None = None,
) -> MergePlan:
    """Groups that end with the tensor by which they have ``cap_mb`` MiB or more, the first one ``first_mb`` (``None``:
    1 where ``cap_mb`` is 25, else ``cap_mb``), as in DistributedDataParallel. Other arguments and errors as for
    ``optimal``; ``ValueError`` for a cap below 0."""
    if first_mb is None:
        first_mb = DDP_FIRST_MB if cap_mb == DDP_CAP_MB else cap_mb
    for name, cap in (("cap_mb", cap_mb), ("first_mb", first_mb)):
        if not cap >= 0:
            raise ValueError(f"{name}={cap} must be 0 or more MiB: 0 sends each tensor by itself")
    stops, held, cap = [], 0, first_mb
    for position, size in enumerate(sizes):
        held += size
        if held >= cap * _MIB or position == len(sizes) - 1:
            stops.append(position + 1)
            held, cap = 0, cap_mb
    return of_cuts("fixed", sizes, backward_times, stops, cost=cost)


def greedy(sizes: Sequence[int], backward_times: Sequence[float], *, cost: GroupCost) -> MergePlan:
    """MG-WFBP: a tensor waits for the next one if that is there before what is saved by sending both together has
    passed. Shi, Chu, Li, "MG-WFBP: Merging gradients wisely for efficient communication", TPDS 2021, Algorithm 1.

    The saving is the latency where ``cost`` is a + b·bytes, as in the paper, but for rounding. It looks one tensor
    ahead, so it is not the best cut, whatever the paper's Theorem 1 says. Arguments and errors as for ``optimal``.
    """
    ready = ready_times(sizes, backward_times)
    stops, held, free = [], 0, 0.0
    for position, size in enumerate(sizes):
        held += size
        start = max(free, ready[position])
        if position + 1 < len(sizes):
            following = sizes[position + 1]
            saved = seconds_of(cost, held) + seconds_of(cost, following) - seconds_of(cost, held + following)
            if ready[position + 1] < start + saved:
                continue
        stops.append(position + 1)
        free, held = start + seconds_of(cost, held), 0
    return of_cuts("greedy", sizes, backward_times, stops, cost=cost)


def optimal(
    sizes: Sequence[int],
    backward_times: Sequence[float],
    *,
    cost: GroupCost,
    delay: GroupCost | None = None,
) -> MergePlan:
    """The cut by which the last group ends first; of several such cuts, always the same one.

    ``sizes``: bytes of each gradient, ``backward_times``: seconds that the backward pass takes for it after the one
    before, both in backward order. ``cost``: of a group, any function of its bytes. ``delay``: by how much a group
    holds the backward pass up when its last gradient is there (compression on the same processor); counted in the plan.

    Exact: F(i) = min over j < i of max(F(j), R(i)) + cost(j+1..i), R(i) being when gradient i is there; with ``delay``
    as ``joint`` has it. L²/2 calls of ``cost`` for L tensors.
    Raises ``ValueError`` for lists of different lengths, and where a size, time or cost is negative or not finite.
    """
    ready = ready_times(sizes, backward_times)
    if delay is None:
        stops = earliest_stops(sizes, ready, lambda start, held: start + costs_of_sizes(cost, held))
    else:
        stops = [stop for stop, _ in search([0, *accumulate(sizes)], ready, [SendMethod("", cost, delay)])]
    return of_cuts("optimal", sizes, backward_times, stops, cost=cost, delay=delay)


def joint(
    sizes: Sequence[int],
    backward_times: Sequence[float],
    *,
    ways: Sequence[SendMethod],
    dense: Sequence[int] | None = None,
) -> MergePlan:
    """The cut, and the way in which each group goes, by which the last group ends first; of several such plans, always
    the same one. ``dense``: of each gradient, the bytes that no way compresses, for ways that send them ``beside``
    (``None``: none).

    The same recurrence over all pairs of (end of the last group, delay so far) of which none is better in both, without
    those that cannot lead to a better plan than a quick search has found. Exact where so no more than 20,000 / L pairs
    of any prefix of the L tensors are left; where there are more, those with the least lower bounds are kept, and the
    plan is at least no later than ``optimal`` with any one of the ``ways``. L²/2 calls of each way's cost and delay,
    and 8 L² bytes for each way. Arguments and errors otherwise as for ``optimal``; ``ValueError`` where there is no
    way, and where two have one name.
    """
    if not ways or len({way.name for way in ways}) < len(ways):
        raise ValueError(f"ways={[way.name for way in ways]} must be one or more, each with a name of its own")
    ready = ready_times(sizes, backward_times)
    dense = _checked_dense(sizes, dense)
    found = search([0, *accumulate(sizes)], ready, ways, [0, *accumulate(dense)])
    stops, taken = [stop for stop, _ in found], [ways[number] for _, number in found]
    return of_ways("joint", sizes, backward_times, stops, taken, dense=dense)


def of_cuts(
    scheme: str,
    sizes: Sequence[int],
    backward_times: Sequence[float],
    stops: Iterable[int],
    *,
    cost: GroupCost,
    delay: GroupCost | None = None,
) -> MergePlan:
    """The plan whose groups end before these positions, the last of them ``len(sizes)``; other arguments and errors as
    for ``optimal``."""
    stops = [*stops]
    plan = of_ways(scheme, sizes, backward_times, stops, [SendMethod("", cost, delay or no_delay)] * len(stops))
    return dataclasses.replace(plan, ways=())


def of_ways(
    scheme: str,
    sizes: Sequence[int],
    backward_times: Sequence[float],
    stops: Iterable[int],
    ways: Sequence[SendMethod],
    *,
    dense: Sequence[int] | None = None,
) -> MergePlan:
    """As ``of_cuts``, with the way of each group, and ``dense`` as for ``joint``. ``ValueError`` also unless there is a
    way for each."""
    ready_times(sizes, backward_times)
    dense = _checked_dense(sizes, dense)
    edges = [0, *stops]
    if any(a >= b for a, b in pairwise(edges)) or edges[-1] != len(sizes):
        raise ValueError(f"stops={edges[1:]} must rise from above 0 to len(sizes)={len(sizes)}")
    if len(ways) != len(edges) - 1:
        raise ValueError(f"ways has {len(ways)} entries for {len(edges) - 1} groups: give one of each")
    held = [(way, sum(sizes[a:b]), sum(dense[a:b])) for (a, b), way in zip(pairwise(edges), ways, strict=True)]
    return MergePlan(
        scheme,
        tuple(map(int, sizes)),
        tuple(map(float, backward_times)),
        tuple(tuple(range(a, b)) for a, b in pairwise(edges)),
        tuple(way.cost_of(*amounts) for way, *amounts in held),
        tuple(way.delay_of(*amounts) for way, *amounts in held),
        tuple(way.name for way in ways),
    )


Ends = Callable[[Floats, Sequence[int]], Floats]
"""When groups end, by when each may begin and how many bytes it has."""


def earliest_stops(sizes: Sequence[int], ready: Sequence[float], ends: Ends) -> list[int]:
    """Where the groups of the cut end whose last group ends first: F(i) = min over j < i of the end of group j+1..i,
    which begins at max(F(j), ``ready`` of i). Exact if a group that begins later ends no sooner."""
    prefix, finish = [0, *accumulate(sizes)], np.zeros(len(ready) + 1)
    last = [0] * len(finish)
    for stop in range(1, len(finish)):
        held = [prefix[stop] - before for before in prefix[:stop]]
        found = ends(np.maximum(finish[:stop], ready[stop - 1]), held)
        last[stop] = int(found.argmin())
        finish[stop] = found[last[stop]]
    stops, stop = [], len(ready)
    while stop:
        stops.append(stop)
        stop = last[stop]
    return stops[::-1]


def costs_of_sizes(cost: GroupCost, sizes: Sequence[int]) -> Floats:
    """Raises ``ValueError`` for what is no time."""
    costs = np.array([cost(size) for size in sizes], np.float64)
    if not (np.isfinite(costs).all() and (costs >= 0).all()):
        for size in sizes:
            seconds_of(cost, size)
    return costs


def ready_times(sizes: Sequence[int], backward_times: Sequence[float]) -> list[float]:
    """When each gradient is there, from the start of the backward pass. Raises ``ValueError`` as ``optimal``."""
    if len(sizes) != len(backward_times):
        raise ValueError(f"sizes has {len(sizes)} tensors and backward_times {len(backward_times)}: give one of each")
    for name, values in (("sizes", sizes), ("backward_times", backward_times)):
        for position, value in enumerate(values):
            check_amount(f"{name}[{position}]", value)
    for position, size in enumerate(sizes):
        if size != int(size):
            raise ValueError(f"sizes[{position}] is {size}: it must be whole bytes")
    return list(accumulate(map(float, backward_times)))


def _checked_dense(sizes: Sequence[int], dense: Sequence[int] | None) -> Sequence[int]:
    if dense is None:
        return [0] * len(sizes)
    if len(dense) != len(sizes) or not all(0 <= held <= size for held, size in zip(dense, sizes, strict=True)):
        raise ValueError(f"dense={[*dense]} must have a number for each of the {len(sizes)} sizes, and none above it")
    return dense
