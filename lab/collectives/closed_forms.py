"""Closed forms of the collectives by whose cost the library chooses nothing: moves of data, the barrier, the reduction.

As those of ``telegrad.cost.closed_forms``: for P ranks and blocks (broadcast, reduce: a vector) of n = ``size`` bytes;
γ counts where bytes are copied or added. With α = 0 what happens at one moment has an order that no formula knows.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from telegrad.cost import Cost, Costs
from telegrad.cost.closed_forms import allgather, halving_s, heard_s, reduce_scatter
from telegrad.cost.network import CARD_BYTES, ELEMENT_BYTES, ceil_div, ceil_log2, check, copying, pieces_s, stream_s
from telegrad.tools.sim.measure import SPARSE, Point, closed_form, forms_hold

# What core/collectives does; tests compare with it.
BULK_BYTES = 64 << 10  # kBulkBytes of broadcast.cpp
CHAIN_LATENCY_BYTES = 10_000  # kLatencyBytes of broadcast_chain.cpp
CHAIN_LONG_BYTES = 64 << 10  # kLongBytes
CHAIN_LEAST_BYTES = 16 << 10  # kLeastPieceBytes
CHAIN_UNDER_WAY = 4  # kUnderWay
TREE_RANKS = 16  # kRanksLeast of rooted_tree.hpp
ROOTED_TREE_BYTES = 2048  # kBlockBytesMost
ROOT_UNDER_WAY = 16  # kUnderWay of gather.cpp and scatter.cpp
BRUCK_RANKS = 16  # kBruckRanksLeast of all_to_all.cpp
BRUCK_BYTES = 512  # kBruckBytesMost
EXCHANGE_UNDER_WAY = 16  # kUnderWayMost
OVERLAP_BYTES = 32 << 10  # kOverlapBytesMost
EXCHANGE_PIECES = 1 << 14  # kExchangeBlocksSteps
PAIR_TREE_BYTES, REDUCE_TREE_BYTES, LEAST_BLOCK_BYTES = 32 << 10, 16 << 10, 256  # of reduce.cpp


def gather(ranks: int, size: int, costs: Costs) -> Cost:
    """Directly: α + (P−1)·nβ. Among 16 ranks or more, up to 2 KiB, up a binomial tree: ⌈log2 P⌉·α + (P−1)·nβ. Thakur,
    Rabenseifner, Gropp (as above), §4.

    What the root holds it copies to its place; in the tree everybody copies their own block first, and the root all.
    """
    check(ranks, size)
    if ranks == 1:
        return copying(size, costs)
    alpha_s, port_s, work_s = costs.alpha_s, size * costs.beta_s_per_byte, size * costs.gamma_s_per_byte
    if ranks >= TREE_RANKS and size <= ROOTED_TREE_BYTES:
        ready_s = [0.0] * ranks
        for self in range(ranks - 1, -1, -1):
            heads = sorted((ready_s[child] + alpha_s, below) for child, below in _children(self, ranks))
            free_s = 0.0
            for head_s, below in heads:
                free_s = max(free_s, head_s) + below * port_s
            ready_s[self] = max(free_s, work_s) if heads else 0.0
        return Cost(ready_s[0] + ranks * work_s, max(below for _, below in _children(0, ranks)) * size)
    last_posted_s = alpha_s + (ranks - 1 - ROOT_UNDER_WAY) * port_s if ranks - 1 > ROOT_UNDER_WAY else 0.0
    return Cost(max(alpha_s + (ranks - 1) * port_s, last_posted_s + work_s), size)


def scatter(ranks: int, size: int, costs: Costs) -> Cost:
    """Directly, 16 messages under way: α + (P−1)·nβ, with small n (P−1)/16·α. Among 16 ranks or more, up to 2 KiB, down
    a binomial tree: ⌈log2 P⌉·α + (P−1)·nβ. Thakur, Rabenseifner, Gropp (as above), §4.2.

    The root copies its own block to its place; in the tree it copies all first, and all that pass on their own.
    """
    check(ranks, size)
    if ranks == 1:
        return copying(size, costs)
    alpha_s, port_s, work_s = costs.alpha_s, size * costs.beta_s_per_byte, size * costs.gamma_s_per_byte
    if ranks >= TREE_RANKS and size <= ROOTED_TREE_BYTES:
        ready_s = [0.0] * ranks
        ready_s[0] = ranks * work_s
        last_s = 0.0
        for self in range(ranks):
            children = _children(self, ranks)
            done_s = ready_s[self] + (work_s if children else 0.0)
            out_free_s = ready_s[self]
            for child, below in reversed(children):
                ready_s[child] = out_free_s + alpha_s + below * port_s
                out_free_s += below * port_s
                done_s = max(done_s, ready_s[child])
            last_s = max(last_s, done_s)
        return Cost(last_s, (ranks - 1) * size)
    time_s = stream_s(ranks - 1, ROOT_UNDER_WAY, alpha_s, port_s)
    last_posted_s = stream_s(ranks - 1 - ROOT_UNDER_WAY, ROOT_UNDER_WAY, alpha_s, port_s)
    return Cost(max(time_s, last_posted_s + work_s), (ranks - 1) * size)


def _children(self: int, ranks: int) -> list[tuple[int, int]]:
    """Of a rank in the binomial tree, counted from the root: each with how many are below it, itself included."""
    span = self & -self if self else 1 << ceil_log2(ranks)
    distances = (1 << power for power in range(span.bit_length() - 1))
    children = [self + distance for distance in distances if self + distance < ranks]
    return [(child, min(child - self, ranks - child)) for child in children]


def all_to_all(ranks: int, size: int, costs: Costs) -> Cost:
    """Pairwise, up to 32 KiB with 16 messages under way: α + (P−1)·nβ, with small n (P−1)/16·α; longer blocks round by
    round, in pieces of 60 KiB: (⌈log2 P⌉ + P − 1)α + (P−1)·nβ. Thakur, Rabenseifner, Gropp (as
    above), §4.4. Among 16 ranks or more, up to 512 bytes, Bruck's algorithm: ⌈log2 P⌉(α + P/2·nβ + P·nγ) + 2P·nγ. Bruck
    et al. (as above), §3.

    Pairwise, the first messages leave beside a barrier and are taken when it is over, and the own block is copied then;
    with two ranks there is none, the one message tells.
    """
    check(ranks, size)
    if ranks == 1:
        return copying(size, costs)
    alpha_s, work_s, rounds = costs.alpha_s, size * costs.gamma_s_per_byte, ceil_log2(ranks)
    if ranks >= BRUCK_RANKS and size <= BRUCK_BYTES:
        time_s, sent = 2 * ranks * work_s, 0
        for bit in (1 << power for power in range(rounds)):
            blocks = sum(1 for place in range(ranks) if place & bit)
            beta_s = costs.pair_s_per_byte(blocks * size) if 2 * bit == ranks else costs.beta_s_per_byte
            time_s += alpha_s + blocks * size * beta_s + 2 * blocks * work_s
            sent += blocks * size
        return Cost(time_s, sent)
    if size > OVERLAP_BYTES:
        pieces = min(ceil_div(size, CARD_BYTES), max(1, EXCHANGE_PIECES // ranks))
        port_s, exchange_s = (
            size / pieces * beta for beta in (costs.beta_s_per_byte, costs.pair_s_per_byte(size // pieces))
        )
        time_s = (ranks - 1) * pieces_s(pieces, alpha_s, port_s, port_s)
        if ranks % 2 == 0:  # half way round two ranks send to each other
            time_s += pieces_s(pieces, alpha_s, port_s, exchange_s) - pieces_s(pieces, alpha_s, port_s, port_s)
        if ranks == 2:
            return Cost(time_s + work_s, size)
        return Cost(rounds * alpha_s + max(time_s, work_s), (ranks - 1) * size)
    if ranks == 2:
        return Cost(alpha_s + size * costs.pair_s_per_byte(size) + work_s, size)
    port_s, under_way = size * costs.beta_s_per_byte, EXCHANGE_UNDER_WAY
    first = min(under_way, ranks - 1)
    time_s = heard_s(rounds, alpha_s, first * port_s)
    time_s += max(stream_s(ranks - 1 - first, under_way, alpha_s, port_s), work_s)
    if ranks % 2 == 0:  # half way round two ranks send to each other
        time_s += size * (costs.pair_s_per_byte(size) - costs.beta_s_per_byte)
    return Cost(time_s, (ranks - 1) * size)


def broadcast_pieces(ranks: int, size: int) -> int:
    """Into how many pieces a vector is cut that goes along the chain; 1: it goes down the tree."""
    if ranks < 3 or size < CHAIN_LONG_BYTES:
        return 1
    best = int(math.sqrt(size * CHAIN_LATENCY_BYTES / max(1.0, ranks - 2.0)))
    pieces = ceil_div(size, min(max(best, CHAIN_LEAST_BYTES), CARD_BYTES))
    chain = CHAIN_LATENCY_BYTES + size + (ranks - 2) * (CHAIN_LATENCY_BYTES + size / pieces)
    return pieces if chain < ceil_log2(ranks) * (CHAIN_LATENCY_BYTES + size) else 1


def broadcast(ranks: int, size: int, costs: Costs) -> Cost:
    """Binomial tree: ⌈log2 P⌉·(α + nβ) where P is a power of two. Thakur, Rabenseifner, Gropp (as above), §4.2. Long
    vectors go along a chain, in pieces of b bytes, four under way: nβ + α + (P−2)(α + bβ). Pjesivac-Grbovic et al.,
    Cluster Computing 10(2), 2007, §3.

    In the tree a rank sends to its subtrees, the largest first: below 64 KiB one message behind the other in its port,
    from there on each after the one before has arrived. A tree that is not full may be done a little earlier.
    """
    check(ranks, size)
    pieces = broadcast_pieces(ranks, size)
    if pieces > 1:
        piece_s = ceil_div(size, pieces) * costs.beta_s_per_byte
        time_s = stream_s(pieces, CHAIN_UNDER_WAY, costs.alpha_s, piece_s)
        return Cost(time_s + (ranks - 2) * (costs.alpha_s + piece_s), size)
    rounds = ceil_log2(ranks)
    port_s = size * costs.beta_s_per_byte
    round_s = costs.alpha_s + port_s
    next_s = round_s if size >= BULK_BYTES else port_s  # from one send of a rank to its next
    tree = ranks  # the ranks below and including one; the farthest subtree is again such a tree, the others are full
    time_s = before_s = 0.0
    while tree > 1:
        distance = 1 << (ceil_log2(tree) - 1)
        depth = distance.bit_length() - 1
        if depth > 0:  # the second send goes to the largest full subtree
            time_s = max(time_s, before_s + next_s + round_s + (depth - 1) * round_s)
        before_s += round_s
        time_s = max(time_s, before_s)
        tree -= distance
    return Cost(time_s, rounds * size)


def barrier(ranks: int, costs: Costs) -> Cost:
    """Dissemination: ⌈log2 P⌉·α. Hensgen, Finkel, Manber, Int. J. Parallel Programming 17(1), 1988, §3."""
    check(ranks, 0)
    rounds = ceil_log2(ranks)
    return Cost(rounds * costs.alpha_s, 0)


def reduce(ranks: int, size: int, costs: Costs) -> Cost:
    """To a root: a binomial tree, ⌈log2 P⌉(α + nβ + nγ) for a P that is a power of two, or from some length on the
    halving and a gather, (⌈log2 P⌉ + 1)α + 2(P−1)/P·nβ and what of the work does not overlap. Thakur, Rabenseifner,
    Gropp, Int. J. High Performance Computing Applications 19(1), 2005, §4.4.

    The tree's is exact. The other is where blocks are alike, as that of ``allreduce_rabenseifner``; where an exchange
    has a β of its own, blocks of P = 2 that are longer than the latency may take a little less.
    """
    check(ranks, size)
    if ranks == 1:
        return copying(size, costs)
    if size < max(PAIR_TREE_BYTES if ranks == 2 else REDUCE_TREE_BYTES, LEAST_BLOCK_BYTES * ranks):
        return Cost(_tree_s(ranks, size, costs), size)
    elements = size // ELEMENT_BYTES
    filled = elements - elements // ranks
    time_s = halving_s(ranks, elements, costs) + costs.alpha_s + filled * ELEMENT_BYTES * costs.beta_s_per_byte
    return Cost(time_s, size)


def _tree_s(ranks: int, size: int, costs: Costs) -> float:
    """When the root of a tree of so many ranks has its sum. Its children send when they have theirs, and wait for its
    port in the order in which they come; it takes them the nearest first."""
    port_s, work_s = size * costs.beta_s_per_byte, size * costs.gamma_s_per_byte
    rounds = (ranks - 1).bit_length()
    if ranks == 1 << rounds:
        return rounds * (costs.alpha_s + port_s + work_s)
    heads_s = [_tree_s(min(1 << i, ranks - (1 << i)), size, costs) + costs.alpha_s for i in range(rounds)]
    arrives_s = [0.0] * rounds
    free_s = done_s = 0.0
    for child in sorted(range(rounds), key=heads_s.__getitem__):
        free_s = arrives_s[child] = max(heads_s[child], free_s) + port_s
    for arrived_s in arrives_s:
        done_s = max(done_s, arrived_s) + work_s
    return done_s


_EXCHANGE_MOST = 2.0  # times β; then some forms are more than 1 % off
_NOT_ALIKE = ("all_to_all", "reduce")  # some of their messages meet one the other way, others do not
FORMS: dict[str, Callable[[int, int, Costs], Cost]] = {
    "allgather": allgather,
    "gather": gather,
    "scatter": scatter,
    "all_to_all": all_to_all,
    "broadcast": broadcast,
    "reduce": reduce,
    "reduce_scatter": reduce_scatter,
    "barrier": lambda ranks, size, costs: barrier(ranks, costs),
}


def form_of(point: Point) -> Cost | None:
    """What theory says, where it has a formula that holds: of dense operations, as ``closed_form`` has it of one."""
    if point.operation in ("allreduce", *SPARSE):
        return closed_form(point)
    most = 1.0 if point.operation in _NOT_ALIKE else _EXCHANGE_MOST
    holds = forms_hold(point.network, most)
    return FORMS[point.operation](point.ranks, point.size, point.network.costs) if holds else None
