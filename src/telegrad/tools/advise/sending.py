"""Ranks, the network between them, and ways to send a group of gradients there, from closed forms."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from telegrad.compress import ByShape, ParameterInfo
from telegrad.cost.closed_forms import (
    ALLREDUCES,
    HEADER_BYTES,
    TURN_BYTES,
    Levels,
    allgather,
    allgather_sparse,
    allreduce,
    allreduce_topk,
    allreduce_two_level,
    entries_of_sum,
    layout_that_pays,
    message_bytes,
    reduce_scatter_sparse,
)
from telegrad.cost.network import CARD_BYTES, ELEMENT_BYTES, Cost, Costs, ceil_div
from telegrad.cost.send_method import GroupCost, LinearCost, SendMethod
from telegrad.synchronizer.trace import Trace
from telegrad.tools.advise.workload import REUSED_BYTES, Device

NODE = Costs(0.5e-6, 4e-11, gamma_s_per_byte=1e-10)
"""Within a node where nothing else is given: 25 GB/s, an assumption."""


@dataclass(frozen=True)
class Cluster:
    """``costs``: of the network between nodes, ``within``: inside of one. A node's link carries what the ports of its
    ``ranks_per_node`` ranks can, over ``oversubscription``: with as much as ranks, what one port can. ``gloo``: of
    dense sums of all ranks by torch's Gloo, where they were measured. ``value_bytes``: an element in messages; sizes of
    gradients are those of float32 all the same.

    Raises ``ValueError`` for less than one rank, for ranks that do not fill their nodes, and for an oversubscription
    below 1."""

    ranks: int
    costs: Costs
    ranks_per_node: int = 1
    within: Costs = NODE
    oversubscription: float = 1.0
    gloo: LinearCost | None = None
    value_bytes: int = ELEMENT_BYTES

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

    def _of_link(self, factor: float) -> Costs:
        if self.nodes == 1 and self.ranks_per_node > 1:
            return self.within
        return self.costs.with_bytes_times(factor)


@functools.lru_cache(maxsize=512)
def sum_cost(cluster: Cluster) -> GroupCost:
    """Seconds by bytes of a dense sum among the ranks: the fastest of this library's algorithms for each group."""
    if cluster.ranks == 1:
        return _free
    ranks, ring, shared = cluster.ranks, cluster.ring_costs, cluster.shared_costs
    costs = [
        _of_elements(functools.partial(allreduce, name, ranks, costs=ring if name == "ring" else shared), cluster)
        for name in ALLREDUCES
    ]
    if cluster.has_levels:
        nodes = tuple(rank // cluster.ranks_per_node for rank in range(ranks))
        levels = Levels(nodes, cluster.within, cluster.costs)
        costs.append(_of_elements(lambda size: allreduce_two_level(levels, size, shared), cluster))
    return lambda size: min(cost(size) for cost in costs)


def _free(size: int) -> float:
    return 0.0


def _of_elements(cost: Callable[[int], Cost], cluster: Cluster) -> GroupCost:
    """Its seconds, kept, of as many bytes as whole elements have."""

    @functools.lru_cache(maxsize=1 << 16)
    def seconds(size: int) -> float:
        return cost(ceil_div(size * cluster.value_bytes, ELEMENT_BYTES**2) * ELEMENT_BYTES).time_s

    return seconds


# Ways to send a group of gradients on a cluster, from closed forms: dense, sparse, quantised.
# Sparse ways are for random indices: how far a sum fills in is expected, not known. A gradient of n float32 elements
# has n·4 bytes; each rank selects k = density · n of them, or 1.

BUCKET = 1024  # values of QSGD that have one scale
SLICES_EVERY, THRESHOLD_EVERY = 64, 32  # calls of Ok-Topk, τ and τ′
_PIECES_AHEAD = 3  # kPiecesUnderWay of core/collectives/support/pieces.hpp: so much is encoded before anything leaves
_ENTRY_BYTES = 8  # in memory
_COUNTED_RANKS_MOST, _COUNTED_SLICE_BYTES = 64, 1 << 20  # of core/collectives/sparse/cost.cpp
KNOWN_RANKS_MOST = 8  # kExchangingRanksMost there


@dataclass(frozen=True)
class PhasedWay(SendMethod):
    """A way whose ``cost`` tells apart what the processor does at its end. ``delay`` is selection; ``decompress``:
    seconds of the cost in which what has come is added to the gradients, when the backward pass is over."""

    decompress: GroupCost = _free


def dense(cluster: Cluster) -> PhasedWay:
    """All of the gradient."""
    return PhasedWay("dense", sum_cost(cluster))


def sparse(cluster: Cluster, device: Device, density: float) -> PhasedWay:
    """The sum of what all ranks have selected, as this library forms it: owners sum slices, which go to all as entries
    or, filled in, as they are; or recursive doubling; or a dense sum; or, where ranks share nodes, two levels
    (docs/explanation/two-level.md). The shortest. SparCML, §5.3."""
    check_density(density)
    ranks = cluster.ranks
    dense_s = sum_cost(cluster)

    def seconds(n: int, k: int) -> float:
        if ranks == 1:
            return 0.0
        packed, size = _packs(cluster, n, k), n * ELEMENT_BYTES
        flat_s = _flat_s(cluster, n, k, packed, dense_s(size))
        return min(_two_level_s(cluster, n, k, packed), flat_s) if cluster.has_levels else flat_s

    return selected_way("sparse", device, density, seconds, lambda n, k: device.scatter_s(entries_of_sum(ranks, n, k)))


def ok_topk(cluster: Cluster, device: Device, density: float) -> PhasedWay:
    """The k largest of the sum: what a rank sends does not grow with the number of ranks. Mean of 64 calls, of which
    one cuts slices and two find the threshold. Li, Hoefler, PPoPP 2022."""
    check_density(density)
    costs, ranks = cluster.spread_costs, cluster.ranks

    def call(n: int, k: int, *, cut: bool, finds: bool) -> float:
        slices: Literal["reused", "cut"] = "cut" if cut else "reused"
        packed = _packs(cluster, n, k)
        found = allreduce_topk(
            ranks, n, k, k, _narrowed(cluster, costs, n, k, packed), slices=slices, finds_threshold=finds, packed=packed
        )
        return found.time_s

    def seconds(n: int, k: int) -> float:
        if ranks == 1:
            return 0.0
        plain_s = call(n, k, cut=False, finds=False)
        finding_s = call(n, k, cut=False, finds=True) - plain_s
        cutting_s = call(n, k, cut=True, finds=False) - plain_s
        return plain_s + finding_s / THRESHOLD_EVERY + max(0.0, cutting_s) / SLICES_EVERY

    return selected_way("oktopk", device, density, seconds, lambda n, k: device.scatter_s(k))


def gathered(cluster: Cluster, device: Device, density: float) -> PhasedWay:
    """Every rank gets every rank's entries, by this library's allgather, and adds them: k(P − 1) entries."""
    check_density(density)
    costs, ranks = cluster.ring_costs, cluster.ranks

    def seconds(n: int, k: int) -> float:
        narrowed = _narrowed(cluster, costs, n * ranks, k * ranks, False)
        return allgather_sparse(ranks, n, k, narrowed).time_s if ranks > 1 else 0.0

    return selected_way("allgather", device, density, seconds, lambda n, k: device.scatter_s(ranks * k, messages=ranks))


def qsgd(cluster: Cluster, bits: int) -> PhasedWay:
    """Values in so many bits, a scale for each 1,024: each slice's shares to its owner, the encoded sum to all, as this
    library's encoded allreduce does it. Encoding and decoding take γ of the network. Alistarh et al., NeurIPS 2017.

    Raises ``ValueError`` for other than 2, 4 or 8 bits, and for gradients that are not float32."""
    if bits not in (2, 4, 8):
        raise ValueError(f"bits={bits} must be 2, 4 or 8")
    if cluster.value_bytes != ELEMENT_BYTES:
        raise ValueError(f"value_bytes={cluster.value_bytes}: only float32 gradients are quantised")
    ranks, gamma = cluster.ranks, cluster.costs.gamma_s_per_byte

    @functools.lru_cache(maxsize=1 << 16)
    def seconds(size: int) -> float:
        if ranks == 1:
            return 0.0
        values = ceil_div(size // ELEMENT_BYTES, ranks if ranks > 2 else 1)  # two swap their whole vectors
        buckets = ceil_div(values, BUCKET) * BUCKET  # slices are of whole ones
        share = ceil_div(buckets * bits // 8 + buckets // BUCKET * ELEMENT_BYTES, ELEMENT_BYTES) * ELEMENT_BYTES
        one = cluster.spread_costs
        if ranks == 2:
            first_s = min(size, _PIECES_AHEAD * CARD_BYTES * 32 / bits) * gamma
            return one.alpha_s + max(first_s + share * one.beta_s_per_byte, 4 * size * gamma)
        split_s = (ranks - 1) * (one.alpha_s + share * one.beta_s_per_byte)
        gather_s = allgather(ranks, share, cluster.ring_costs).time_s
        # Shares are encoded and added beside what travels, but for the first, and then the sum is decoded.
        first_s = min(size / ranks, _PIECES_AHEAD * CARD_BYTES * 32 / bits) * gamma
        return first_s + max(split_s, 2 * size * gamma) + max(gather_s, size * gamma)

    return PhasedWay(f"qsgd{bits}", seconds)


def low_rank(cluster: Cluster, device: Device, trace: Trace, rank: int) -> PhasedWay:
    """Matrices as the products of two narrow ones, one after the other, and the rest whole, all in 8 bits, as
    ``LowRank`` sends them. Each group has the model's share of both. Vogels et al., NeurIPS 2019, Algorithm 1.

    Raises ``ValueError`` for a rank below 1, and for a trace that does not know its matrices."""
    policy = ByShape(rank)  # as LowRank decides
    if not trace.rows:
        raise ValueError("trace.rows is empty: record the trace again, with this version")
    numbers = whole = products = 0
    for name, size, rows in zip(trace.names, trace.sizes, trace.rows, strict=True):
        elements = size // ELEMENT_BYTES
        columns = elements // rows
        shape = (rows, columns) if rows > 1 else (elements,)
        if policy(ParameterInfo(name, elements, len(shape), False, shape)).rank is None:
            whole += elements
        else:
            numbers, products = numbers + (rows + columns) * min(rank, rows, columns), products + elements
    total = max(1, whole + products)
    encoded = qsgd(cluster, 8).cost
    of_rest = encoded if numbers else sum_cost(cluster)

    def seconds(size: int) -> float:
        half = int(size * numbers / total / 2) // ELEMENT_BYTES * ELEMENT_BYTES
        rest = int(size * whole / total) // ELEMENT_BYTES * ELEMENT_BYTES
        return (2 * encoded(half) if half else 0.0) + (of_rest(rest) if rest else 0.0)

    def multiplied(size: int, factors: int) -> float:
        """Of a group's matrices with so many narrow ones."""
        matrices = size * products / total
        arithmetic_s = 2 * rank * factors * matrices / ELEMENT_BYTES / device.flops_per_s
        return max(arithmetic_s, device.pass_s(factors * matrices, kernels=factors)) if matrices else 0.0

    # P = M Q and Q = Mᵀ P before the sums, P Qᵀ into the gradient and out of the residual behind them.
    return PhasedWay(
        f"lowrank-{rank}",
        lambda size: seconds(size) + multiplied(size, 2),
        lambda size: multiplied(size, 2),
        lambda size: multiplied(size, 2),
    )


def inside_nodes(cluster: Cluster, way: Callable[[Cluster], PhasedWay]) -> PhasedWay:
    """As ``node=`` sends it: dense averages inside of a node, and each rank's share of them in that ``way`` between
    nodes, whose ranks share a link."""
    ranks = cluster.ranks_per_node
    owners = Cluster(cluster.nodes, cluster.shared_costs, value_bytes=cluster.value_bytes)
    inside, between = sum_cost(Cluster(ranks, cluster.within, ranks, cluster.within)), way(owners)

    def share(cost: GroupCost) -> GroupCost:
        return lambda size: cost(ceil_div(size // ELEMENT_BYTES, ranks) * ELEMENT_BYTES)

    cost, delay, decompress = map(share, (between.cost, between.delay, between.decompress))
    return PhasedWay(f"{between.name}-node", lambda size: inside(size) + cost(size), delay, decompress)


def fill_in(ranks: int, elements: int, density: float) -> float:
    """Which share of the sum's entries is there, for random indices."""
    check_density(density)
    return entries_of_sum(ranks, elements, _entries(elements, density)) / elements if elements else 0.0


SCHEMES = ("dense", "sparse", "oktopk", "allgather", "qsgd8", "qsgd4", "qsgd2")
"""What ``way_of`` knows by name."""

SELECTING = frozenset({"sparse", "oktopk", "allgather"})
"""Those of them that send selected entries, so that a density says something."""


def way_of(scheme: str, cluster: Cluster, device: Device, *, density: float) -> PhasedWay:
    """By the name of a scheme. Raises ``ValueError`` for unknown names and for a density that is no share."""
    makers: dict[str, Callable[[], PhasedWay]] = {
        "dense": lambda: dense(cluster),
        "sparse": lambda: sparse(cluster, device, density),
        "oktopk": lambda: ok_topk(cluster, device, density),
        "allgather": lambda: gathered(cluster, device, density),
        **{f"qsgd{bits}": functools.partial(qsgd, cluster, bits) for bits in (2, 4, 8)},
    }
    if scheme not in makers:
        raise ValueError(f"scheme={scheme!r} is not known: use one of {', '.join(SCHEMES)}")
    return makers[scheme]()


def selected_way(
    name: str,
    device: Device,
    density: float,
    moves_s: Callable[[int, int], float],
    adds_s: Callable[[int, int], float],
    *,
    element_bytes: float = REUSED_BYTES,
    kernels: int = 2,
) -> PhasedWay:
    """``moves_s`` and ``adds_s`` of a gradient's elements and of how many of them are selected."""

    def decompress(size: int) -> float:
        n = size // ELEMENT_BYTES
        return adds_s(n, _entries(n, density)) if n else 0.0

    @functools.lru_cache(maxsize=1 << 16)
    def cost(size: int) -> float:
        n = size // ELEMENT_BYTES
        return moves_s(n, _entries(n, density)) + decompress(size) if n else 0.0

    def delay(size: int) -> float:
        return device.select_s(size, element_bytes=element_bytes, kernels=kernels) if size else 0.0

    return PhasedWay(name, cost, delay, decompress)


def _gather_s(ranks: int, slice_: int, slice_bytes: float, memory_bytes: float, costs: Costs) -> float:
    """Slices go round a ring, and are decoded while others come, in batches, where ranks have told each other how long
    they are, else at the end. As core/collectives/sparse/cost.cpp reckons."""
    gamma = costs.gamma_s_per_byte
    sent_s, decode_s = costs.alpha_s + slice_bytes * costs.beta_s_per_byte, slice_bytes * gamma
    counted = ranks <= _COUNTED_RANKS_MOST and slice_ * _ENTRY_BYTES >= _COUNTED_SLICE_BYTES
    others = ranks - 1
    batch = min(others, max(1, math.ceil(TURN_BYTES / slice_bytes))) if counted else others
    return memory_bytes * gamma + batch * sent_s + (others - batch) * max(sent_s, decode_s) + (batch + 1) * decode_s


def _flat_s(cluster: Cluster, n: int, k: float, packed: bool, dense_s: float) -> float:
    """Of slices that owners sum and that go to all, as entries or whole, of doubling, or of a sum of vectors."""
    ranks, gamma = cluster.ranks, cluster.costs.gamma_s_per_byte
    slice_, owned = ceil_div(n, ranks), entries_of_sum(ranks, n, k) / ranks
    width = cluster.value_bytes
    split_costs = _narrowed(cluster, cluster.spread_costs, n, k, packed)
    split_s = reduce_scatter_sparse(ranks, n, k, split_costs, packed=packed).time_s
    known = _known_bytes(ranks, n, k, width) if packed else 0.0
    round_a_ring = cluster.ring_costs
    entries_costs = cluster.spread_costs if _exchanges(ranks, n) else round_a_ring
    entries_s = _gather_s(
        ranks, slice_, _bytes(slice_, owned, packed, width) - known, _ENTRY_BYTES * owned, entries_costs
    )
    all_s = _gather_s(ranks, slice_, slice_ * width, 2 * slice_ * width, round_a_ring)
    made_dense_s = n * ELEMENT_BYTES * gamma
    return min(split_s + min(entries_s, all_s), _doubling_s(cluster, n, k, packed), made_dense_s + dense_s)


def _two_level_s(cluster: Cluster, n: int, k: float, packed: bool) -> float:
    """The split inside of every node, a sum of each slice among its owners, one on each node, and an allgather of the
    slices inside (docs/explanation/two-level.md)."""
    inside, within = cluster.ranks_per_node, cluster.within
    slice_ = ceil_div(n, inside)
    owners = Cluster(cluster.nodes, cluster.shared_costs, value_bytes=cluster.value_bytes)
    split_s = reduce_scatter_sparse(inside, n, k, _narrowed(cluster, within, n, k, False)).time_s
    dense_s = sum_cost(owners)(slice_ * ELEMENT_BYTES)
    between_s = _flat_s(owners, slice_, entries_of_sum(inside, n, k) / inside, packed, dense_s)
    owned = entries_of_sum(cluster.ranks, n, k) / inside
    gather_s = _gather_s(
        inside, slice_, _bytes(slice_, owned, False, cluster.value_bytes), _ENTRY_BYTES * owned, within
    )
    return split_s + between_s + gather_s


def _packs(cluster: Cluster, n: int, k: float) -> bool:
    """Indices, as ``wire="auto"`` does."""
    return layout_that_pays(cluster.shared_costs.beta_s_per_byte, k / n) != "blocked"


def _doubling_s(cluster: Cluster, n: int, k: float, packed: bool) -> float:
    """Recursive doubling of entries that fill in; ranks beyond a power of two fold before and hear the sum after. As
    core/collectives/sparse/cost.cpp reckons: a message is encoded, sent, decoded and added to as much that is held.
    Neighbours meet first: in the first rounds within a node."""
    ranks = cluster.ranks
    rounds = ranks.bit_length() - 1
    folded = ranks != 1 << rounds

    def message_s(streams: float, added: int, distance: int) -> float:
        costs = cluster.within if 2 * distance <= cluster.ranks_per_node else cluster.shared_costs
        entries = entries_of_sum(streams, n, k)
        size, held = _bytes(n, entries, packed, cluster.value_bytes), min(_ENTRY_BYTES * entries, n * ELEMENT_BYTES)
        work_s = ((1 + added) * held + size) * costs.gamma_s_per_byte
        return costs.alpha_s + size * costs.pair_s_per_byte(round(size)) + work_s

    apart = 2 if folded else 1
    time_s = sum(message_s((1 << power) * (ranks / (1 << rounds)), 2, apart << power) for power in range(rounds))
    if folded:
        time_s += message_s(1, 2, 1) + message_s(ranks, 1, 1)
    sum_bytes = min(_ENTRY_BYTES * entries_of_sum(ranks, n, k), n * ELEMENT_BYTES)
    return time_s + sum_bytes * cluster.costs.gamma_s_per_byte


def _exchanges(ranks: int, n: int) -> bool:
    """Whether owners send their slices to every rank, and not round a ring."""
    return ranks <= KNOWN_RANKS_MOST and ceil_div(n, ranks) * _ENTRY_BYTES >= _COUNTED_SLICE_BYTES


def _known_bytes(ranks: int, n: int, k: float, width: int) -> float:
    """What is left out of a packed slice's message to one of few ranks: values that it alone gave, of which it is told
    by a bit for each entry."""
    if not _exchanges(ranks, n):
        return 0.0
    if entries_of_sum(ranks, n, k) * _ENTRY_BYTES > n * ELEMENT_BYTES:
        return 0.0
    given = k / ranks
    return max(0.0, given * (width * (1 - k / n) ** (ranks - 1) - 1 / 8) - 2 * HEADER_BYTES)


def _bytes(range_: int, entries: float, packed: bool, width: int) -> float:
    """Of a message that holds entries, or all values, of ``width`` bytes, where that is shorter."""
    of_entries = message_bytes(range_, entries, packed=packed) - (ELEMENT_BYTES - width) * entries
    return min(of_entries, HEADER_BYTES + range_ * width)


def _narrowed(cluster: Cluster, costs: Costs, n: int, k: float, packed: bool) -> Costs:
    """For closed forms, whose values have 4 bytes: as much less a byte as messages are shorter."""
    share, slice_ = k / cluster.ranks, ceil_div(n, cluster.ranks)
    bytes_ = _bytes(slice_, share, packed, ELEMENT_BYTES)
    return costs.with_bytes_times(_bytes(slice_, share, packed, cluster.value_bytes) / bytes_)


def _entries(elements: int, density: float) -> int:
    return min(elements, max(1, round(density * elements)))


def check_density(density: float) -> None:
    if not 0 < density <= 1:
        raise ValueError(f"density={density} is no share: use a number above 0, up to 1")
