"""Ranks that live on nodes: what a sum by two levels takes there, and what the others do, as closed forms.

They are rougher than those of the plain network (docs/two-level.md): inside and between are two plain networks, and of
segments the slower phase counts.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from telegrad.cost.closed_forms import allgather, allreduce, reduce_scatter
from telegrad.cost.network import ELEMENT_BYTES, Cost, Costs, ceil_div, check

# What core/collectives does; tests compare with it.
PART_BYTES = 512 << 10  # TwoLevelTuning::part_bytes
SEGMENTS_MOST = 1024  # kSegmentsMost of allreduce_two_level.cpp
RING_BYTES = 128 << 10  # kRingMessageBytes of choice.cpp


@dataclass(frozen=True)
class Levels:
    """``nodes``: by rank the number of the node that it lives on; ``within``: the costs of the network inside of one.
    The costs that stand beside it are those between two nodes while all ranks of both send at once, as they do in a
    sum; ``alone``: those while one of each does, if they are known: a ring's messages are no faster.

    Raises ``ValueError`` unless some ranks live together and some apart.
    """

    nodes: tuple[int, ...]
    within: Costs
    alone: Costs | None = None

    def __post_init__(self) -> None:
        if not 1 < len(set(self.nodes)) < len(self.nodes):
            raise ValueError(f"nodes={self.nodes} are no two levels: some ranks must share a node, and some must not")

    @property
    def slices(self) -> int:
        """Into which a vector is cut: as many as the smallest node has ranks."""
        return min(Counter(self.nodes).values())

    @property
    def leaving(self) -> float:
        """The share of its ranks whose neighbour to the right in a ring of all ranks lives on another node, in the node
        where that is most."""
        ranks = Counter(self.nodes)
        after = (*self.nodes[1:], self.nodes[0])
        left = Counter(node for node, right in zip(self.nodes, after, strict=True) if node != right)
        return max(left[node] / ranks[node] for node in ranks)

    def flat_costs(self, algorithm: str, costs: Costs) -> Costs:
        """Of the plain network on which an algorithm that knows no nodes takes about as long. Of a ring few messages
        leave a node at once, and share its link; of others in some round all do."""
        if algorithm != "ring":
            return costs
        floors = [one for one in (self.within, self.alone) if one is not None]
        beta = max(costs.beta_s_per_byte * self.leaving, *(one.beta_s_per_byte for one in floors))
        exchange = max(costs.beta_exchange_s_per_byte * self.leaving, *(one.beta_exchange_s_per_byte for one in floors))
        return replace(costs, beta_s_per_byte=beta, beta_exchange_s_per_byte=max(beta, exchange))


def allreduce_on_levels(algorithm: str, levels: Levels, size: int, costs: Costs) -> Cost:
    """Of ``"two_level"`` or an algorithm of ``ALLREDUCES`` on a vector of ``size`` bytes. ``costs``: between nodes."""
    if algorithm == "two_level":
        return allreduce_two_level(levels, size, costs)
    return allreduce(algorithm, len(levels.nodes), size, levels.flat_costs(algorithm, costs))


def allreduce_two_level(levels: Levels, size: int, costs: Costs) -> Cost:
    """With R ranks in each of N nodes, S = R slices and s segments: reduce_scatter and allgather inside of n/s bytes,
    an allreduce of n/(sS) between N ranks; the first reduce_scatter, the last allgather and s times the longest of what
    two segments cannot do at once: what is inside together, what is between, and what both send through a rank's port.

    Of nodes with unlike numbers of ranks the largest counts.
    """
    ranks = len(levels.nodes)
    check(ranks, size)
    nodes, inside = len(set(levels.nodes)), max(Counter(levels.nodes).values())
    segments = min(SEGMENTS_MOST, max(1, ceil_div(size // levels.slices, PART_BYTES)))
    part = _elements(ceil_div(size, segments))
    slice_bytes = _elements(ceil_div(part, levels.slices))
    scatter = reduce_scatter(inside, part, levels.within)
    gather = allgather(inside, slice_bytes, levels.within)
    between = allreduce(between_algorithm(nodes, slice_bytes), nodes, slice_bytes, costs)
    inner_s = scatter.time_s + gather.time_s
    port = (levels.alone or costs).beta_s_per_byte
    port_s = (scatter.bytes_per_rank + gather.bytes_per_rank) * levels.within.beta_s_per_byte
    port_s += between.bytes_per_rank * port
    time_s = inner_s + between.time_s + (segments - 1) * max(inner_s, between.time_s, port_s)
    messages = scatter.messages_per_rank + gather.messages_per_rank + between.messages_per_rank
    sent = scatter.bytes_per_rank + gather.bytes_per_rank + between.bytes_per_rank
    return Cost(time_s, segments * messages, segments * sent)


def between_algorithm(nodes: int, size: int) -> str:
    """What sums a slice of ``size`` bytes among ``nodes`` owners: choose_between() of the core."""
    doubles_most = max(16 << 10, (128 << 10) // nodes) if nodes & (nodes - 1) == 0 else 8 << 10
    if size <= doubles_most:
        return "recursive_doubling"
    return "rabenseifner" if nodes == 2 or size < RING_BYTES * nodes else "ring"


def _elements(size: int) -> int:
    return ceil_div(size, ELEMENT_BYTES) * ELEMENT_BYTES
