"""Ranks, the network between them, and what a dense sum takes there by each collective that has a formula."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from telegrad.cost import linear_cost
from telegrad.cost.cost_reductions import ALLREDUCES, allreduce
from telegrad.cost.levels import Levels, allreduce_two_level
from telegrad.cost.network import ELEMENT_BYTES, Cost, Costs, ceil_div
from telegrad.cost.way import GroupCost

NODE = Costs(0.5e-6, 4e-11, gamma_s_per_byte=1e-10)
"""Within a node where nothing else is given: 25 GB/s, an assumption."""


@dataclass(frozen=True)
class Cluster:
    """``costs``: of the network between nodes, ``within``: inside of one. A node's link carries what the ports of its
    ``ranks_per_node`` ranks can, over ``oversubscription``: with as much as ranks, what one port can.

    Raises ``ValueError`` for less than one rank, for ranks that do not fill their nodes, and for an oversubscription
    below 1.
    """

    ranks: int
    costs: Costs
    ranks_per_node: int = 1
    within: Costs = NODE
    oversubscription: float = 1.0

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ValueError(f"ranks={self.ranks} must be at least 1")
        if self.ranks_per_node < 1 or self.ranks % self.ranks_per_node:
            raise ValueError(
                f"ranks_per_node={self.ranks_per_node} does not divide ranks={self.ranks}: give a number from 1 up "
                "that does, so that all nodes are alike"
            )
        if not 1 <= self.oversubscription < math.inf:
            raise ValueError(f"oversubscription={self.oversubscription} must be 1 (none) or more, and finite")

    @property
    def nodes(self) -> int:
        return self.ranks // self.ranks_per_node

    @property
    def has_levels(self) -> bool:
        """Whether some ranks share a node, and some do not."""
        return 1 < self.nodes < self.ranks

    @property
    def ring_costs(self) -> Costs:
        """Of a ring through all ranks in order: a node's link has one message each way."""
        return self._of_link(max(1.0, self.oversubscription / self.ranks_per_node))

    @property
    def shared_costs(self) -> Costs:
        """Of any other pattern: all ranks of a node send through its link at once."""
        return self._of_link(self.oversubscription)

    @property
    def spread_costs(self) -> Costs:
        """Of messages of every rank to every other: those within the node do not pass its link."""
        if self.ranks == 1:
            return self.costs
        leaving = (self.ranks - self.ranks_per_node) / (self.ranks - 1)
        costs = self._of_link(self.oversubscription * leaving)
        if not self.has_levels:
            return costs
        inside_s = (1 - leaving) * self.within.beta_s_per_byte
        exchange_s = costs.beta_exchange_s_per_byte
        return replace(
            costs,
            beta_s_per_byte=costs.beta_s_per_byte + inside_s,
            beta_exchange_s_per_byte=exchange_s + inside_s if exchange_s else 0.0,
        )

    @property
    def link_costs(self) -> Costs:
        """Of a node that sends and receives as one."""
        return self._of_link(self.oversubscription / self.ranks_per_node)

    def _of_link(self, factor: float) -> Costs:
        if self.nodes == 1 and self.ranks_per_node > 1:
            return self.within
        return self.costs.with_bytes_times(factor)


_RINGS = ("ring",)
_CHEAPEST_OF = ("ring", "recursive-doubling", "halving-doubling", "double-binary-trees")
_OWN = {f"telegrad-{name.replace('_', '-')}": name for name in ALLREDUCES}
ON_LEVELS = "telegrad-two-level"
COLLECTIVES = (
    *linear_cost.COLLECTIVES,
    "cheapest",
    "two-level",
    "two-level-trees",
    *_OWN,
    ON_LEVELS,
    "telegrad",
)
"""How dense vectors may be summed: the literature's formulas; ``cheapest``: of its ring, doublings and trees the
fastest for each group; ``two-level``: rings within nodes and between them, or trees between; this library's own
algorithms, and ``telegrad``: the fastest of them for each group. Where ranks have no nodes in common, or all are on
one, ``telegrad-two-level`` is ``telegrad``, as in the library."""


def sum_cost(cluster: Cluster, collective: str) -> GroupCost:
    """Seconds by bytes of a dense sum among the ranks. Raises ``ValueError`` for a name that is not in
    ``COLLECTIVES``."""
    if collective not in COLLECTIVES:
        raise ValueError(f"collective={collective!r} is not known: use one of {', '.join(COLLECTIVES)}")
    if cluster.ranks == 1:
        return _free
    if collective in linear_cost.COLLECTIVES:
        return linear_cost.COLLECTIVES[collective](cluster.ranks, _costs_for(cluster, collective))
    if collective == "cheapest":
        return _fastest([sum_cost(cluster, name) for name in _CHEAPEST_OF])
    if collective in ("two-level", "two-level-trees"):
        between = "ring" if collective == "two-level" else "double-binary-trees"
        return linear_cost.two_level(cluster.nodes, cluster.ranks_per_node, cluster.link_costs, cluster.within, between)
    if collective == ON_LEVELS and cluster.has_levels:
        return _on_levels(cluster)
    if collective in ("telegrad", ON_LEVELS):
        return _fastest([sum_cost(cluster, name) for name in _own_of(cluster)])
    return _own(_OWN[collective], cluster.ranks, _costs_for(cluster, _OWN[collective]))


def chosen_collective(cluster: Cluster, collective: str, size: int) -> str:
    """Which one ``cheapest`` or ``telegrad`` takes for so many bytes; any other is itself."""
    among = {"cheapest": _CHEAPEST_OF, "telegrad": _own_of(cluster)}.get(collective)
    if among is None or cluster.ranks == 1:
        return collective
    return min(among, key=lambda name: sum_cost(cluster, name)(size))


def _own_of(cluster: Cluster) -> tuple[str, ...]:
    return (*_OWN, ON_LEVELS) if cluster.has_levels else tuple(_OWN)


def _free(size: int) -> float:
    return 0.0


def _costs_for(cluster: Cluster, collective: str) -> Costs:
    return cluster.ring_costs if collective in _RINGS else cluster.shared_costs


def _fastest(costs: list[Callable[[int], float]]) -> GroupCost:
    return lambda size: min(cost(size) for cost in costs)


@functools.lru_cache(maxsize=512)
def _own(name: str, ranks: int, costs: Costs) -> GroupCost:
    return _of_elements(lambda size: allreduce(name, ranks, size, costs))


@functools.lru_cache(maxsize=64)
def _on_levels(cluster: Cluster) -> GroupCost:
    nodes = tuple(rank // cluster.ranks_per_node for rank in range(cluster.ranks))
    levels = Levels(nodes, cluster.within, cluster.costs)
    return _of_elements(lambda size: allreduce_two_level(levels, size, cluster.shared_costs))


def _of_elements(cost: Callable[[int], Cost]) -> GroupCost:
    """Its seconds, kept, of as many bytes as whole elements have."""

    @functools.lru_cache(maxsize=1 << 16)
    def seconds(size: int) -> float:
        return cost(ceil_div(size, ELEMENT_BYTES) * ELEMENT_BYTES).time_s

    return seconds
