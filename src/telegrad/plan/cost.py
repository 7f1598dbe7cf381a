"""What each dense collective takes on the α-β-γ network, as a closed form. docs/simulation.md describes the network.

The forms are those of the algorithms in core/collectives, and tests hold them against the simulator. Those of the
collectives that reduce are in cost_reductions.py.
"""

from __future__ import annotations

from telegrad.plan.cost_reductions import (
    RING_MESSAGE_BYTES,
    allreduce,
    allreduce_rabenseifner,
    allreduce_recursive_doubling,
    allreduce_ring,
    reduce,
    reduce_scatter,
)
from telegrad.plan.network import ELEMENT_BYTES, Cost, Costs, ceil_log2, check, copying

__all__ = [
    "BULK_BYTES",
    "ELEMENT_BYTES",
    "RING_MESSAGE_BYTES",
    "Cost",
    "Costs",
    "allgather",
    "allreduce",
    "allreduce_rabenseifner",
    "allreduce_recursive_doubling",
    "allreduce_ring",
    "barrier",
    "broadcast",
    "reduce",
    "reduce_scatter",
]

# What core/collectives does; tests compare with it.
BULK_BYTES = 64 << 10  # kBulkBytes of broadcast.cpp


def allgather(ranks: int, size: int, costs: Costs) -> Cost:
    """Ring: (P−1)(α + nβ) for blocks of n = ``size`` bytes. Thakur, Rabenseifner, Gropp (as above), §4.1.

    A rank's own block is copied to its place, and so are those that came before the rank had heard of all others,
    which a barrier beside the ring tells after ⌈log2 P⌉ blocks: (min(⌈log2 P⌉, P−2) + 1)·nγ. With β = 0 a block is as
    fast as the barrier's messages, and the next one too has begun when the barrier's last message comes: one more
    copy. (With α = 0 as well all is one moment, and how many copies there are is the order of events, not a cost.)
    """
    check(ranks, size)
    if ranks == 1:
        return copying(size, costs)
    rounds = ceil_log2(ranks)
    beta_s = costs.pair_s_per_byte(size) if ranks == 2 else costs.beta_s_per_byte
    block_s = costs.alpha_s + size * beta_s
    early = rounds + (block_s == costs.alpha_s)
    copies = min(early, ranks - 2) + 1
    time_s = (ranks - 1) * block_s + copies * size * costs.gamma_s_per_byte
    return Cost(time_s, ranks - 1 + rounds, (ranks - 1) * size)


def broadcast(ranks: int, size: int, costs: Costs) -> Cost:
    """Binomial tree: ⌈log2 P⌉·(α + nβ) where P is a power of two. Thakur, Rabenseifner, Gropp (as above), §4.2.

    A rank sends to its subtrees, the largest first: below 64 KiB one message behind the other in its port, from there
    on each after the one before has arrived. A tree that is not full may be done a little earlier.
    """
    check(ranks, size)
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
    return Cost(time_s, rounds, rounds * size)


def barrier(ranks: int, costs: Costs) -> Cost:
    """Dissemination: ⌈log2 P⌉·α. Hensgen, Finkel, Manber, Int. J. Parallel Programming 17(1), 1988, §3."""
    check(ranks, 0)
    rounds = ceil_log2(ranks)
    return Cost(rounds * costs.alpha_s, rounds, 0)
