"""What each dense collective takes on the α-β-γ network, as a closed form. docs/simulation.md describes the network.

The forms are those of the algorithms in core/collectives, and tests hold them against the simulator. A message of b
bytes costs α + bβ (one port out and one port in per rank), work on b bytes costs bγ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from telegrad.plan.recurrences import folded_rounds_s, two_lanes_s

# What core/collectives does; tests compare with it.
ELEMENT_BYTES = 4
RING_MESSAGE_BYTES = 256 << 10  # RingTuning::message_bytes
BULK_BYTES = 64 << 10  # kBulkBytes of broadcast.cpp


@dataclass(frozen=True)
class Costs:
    """The plain network. ``alpha_s``: latency of a message; ``beta_s_per_byte``: time of a byte in a port;
    ``beta_exchange_s_per_byte``: the same while two ranks send to each other at once, 0 if it is no different;
    ``gamma_s_per_byte``: time of a byte in the processor.

    Raises ``ValueError`` for a cost that is negative, infinite or no number, and for an exchange that is faster than
    one way.
    """

    alpha_s: float = 1e-6
    beta_s_per_byte: float = 1e-10
    beta_exchange_s_per_byte: float = 0.0
    gamma_s_per_byte: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            cost = getattr(self, field.name)
            if not 0 <= cost < math.inf:
                raise ValueError(f"{field.name}={cost} is no cost: give a finite number of seconds, 0 or more")
        if 0 < self.beta_exchange_s_per_byte < self.beta_s_per_byte:
            raise ValueError(
                f"beta_exchange_s_per_byte={self.beta_exchange_s_per_byte} is below beta_s_per_byte="
                f"{self.beta_s_per_byte}: two ways at once are no faster; give at least that, or 0 for the same"
            )

    def pair_s_per_byte(self, size: int) -> float:
        """Time of a byte in the port in of a rank whose port out is, as a message of ``size`` bytes comes, still busy
        with one for the same peer: only messages longer than the latency meet."""
        meet = size * self.beta_s_per_byte > self.alpha_s
        return self.beta_exchange_s_per_byte if meet and self.beta_exchange_s_per_byte else self.beta_s_per_byte


@dataclass(frozen=True)
class Cost:
    """Of one operation: until the last rank is done, and what the rank that sends most does send."""

    time_s: float
    messages_per_rank: int
    bytes_per_rank: int


def allreduce(algorithm: str, ranks: int, size: int, costs: Costs) -> Cost:
    """Of ``ring`` or ``recursive_doubling`` on a vector of ``size`` bytes, from one place to another. Raises
    ``ValueError`` for other names."""
    if algorithm == "ring":
        return allreduce_ring(ranks, size, costs)
    if algorithm == "recursive_doubling":
        return allreduce_recursive_doubling(ranks, size, costs)
    raise ValueError(f"algorithm={algorithm!r} has no closed form: use ring or recursive_doubling")


def allreduce_ring(ranks: int, size: int, costs: Costs) -> Cost:
    """2(P−1)(α + n/P·β) + (P−1)/P·nγ for one segment. Patarasuk, Yuan, J. Parallel and Distributed Computing 69(2),
    2009, §4.

    n is cut into S = ⌈n/(P·256 KiB)⌉ segments, each with blocks of b bytes (the longest, as every step waits for it),
    and two lanes work on every other segment each. Up to bγ = bβ they keep in step: a lane's step in which blocks are
    added takes the longer of what it needs alone, α + bβ + bγ, and of the ports' time for both lanes, 2bβ; a step in
    which sums are passed on takes max(α + bβ, 2bβ). After the last step of the first lane the second still has
    min(α, bβ) to go. A last segment without a partner takes what one segment takes.

    Above bγ = bβ the lanes wait for each other in the processor as well as in the ports: ``two_lanes_s`` follows them.
    """
    _check(ranks, size)
    if ranks == 1:
        return _copy(size, costs)
    steps = ranks - 1
    segments = max(1, _ceil(size, RING_MESSAGE_BYTES * ranks))
    elements = size // ELEMENT_BYTES
    longest = _ceil(_ceil(elements, segments), ranks) * ELEMENT_BYTES
    beta_s = costs.pair_s_per_byte(longest * min(2, segments)) if ranks == 2 else costs.beta_s_per_byte
    alpha_s, port_s, work_s = costs.alpha_s, longest * beta_s, longest * costs.gamma_s_per_byte

    alone_s = steps * (2 * (alpha_s + port_s) + work_s)
    pairs, single = divmod(segments, 2)
    if pairs == 0:
        time_s = alone_s
    elif work_s <= port_s:
        adding_s = max(alpha_s + port_s + work_s, 2 * port_s)
        passing_s = max(alpha_s + port_s, 2 * port_s)
        time_s = pairs * steps * (adding_s + passing_s) + (alone_s if single else min(alpha_s, port_s))
    else:
        time_s = two_lanes_s(segments, steps, alpha_s, port_s, work_s)
    return Cost(time_s, 2 * steps * segments, _ring_bytes(ranks, elements, segments))


def _ring_bytes(ranks: int, elements: int, segments: int) -> int:
    """Everything twice, but once a rank's own block and once its right neighbour's: least of rank P − 2."""
    least, larger = divmod(elements, segments)
    kept = sum(
        count * sum((whole + ranks - 1 - block) // ranks for block in (ranks - 2, ranks - 1))
        for count, whole in ((larger, least + 1), (segments - larger, least))
    )
    return (2 * elements - kept) * ELEMENT_BYTES


def allreduce_recursive_doubling(ranks: int, size: int, costs: Costs) -> Cost:
    """log2 P·(α + nβ + nγ). Thakur, Rabenseifner, Gropp, Int. J. High Performance Computing Applications 19(1), 2005,
    §4.5.

    Where P is not a power of two, 2^m < P < 2^(m+1): m rounds, before them a fold that costs α + nβ + nγ, after them
    α + nβ to tell the folded ranks. Rounds are exchanges; but who waited for the fold meets some who have sent long
    ago, and with an exchange β of its own ``folded_rounds_s`` then follows who meets whom.
    """
    _check(ranks, size)
    if ranks == 1:
        return _copy(size, costs)
    rounds = ranks.bit_length() - 1
    folded = ranks - (1 << rounds)
    beta_s, exchange_s = costs.beta_s_per_byte, costs.pair_s_per_byte(size)
    alpha_s, work_s = costs.alpha_s, size * costs.gamma_s_per_byte
    fold_s = (alpha_s + size * beta_s + work_s) if folded else 0.0
    if folded and exchange_s != beta_s:
        time_s = folded_rounds_s(rounds, folded, fold_s, alpha_s, size * beta_s, size * exchange_s, work_s)
    else:
        time_s = fold_s + rounds * (alpha_s + size * exchange_s + work_s)
    if folded:
        time_s += alpha_s + size * beta_s
    messages = rounds + (folded > 0)
    return Cost(time_s, messages, messages * size)


def allgather(ranks: int, size: int, costs: Costs) -> Cost:
    """Ring: (P−1)(α + nβ) for blocks of n = ``size`` bytes. Thakur, Rabenseifner, Gropp (as above), §4.1.

    A rank's own block is copied to its place, and so are those that came before the rank had heard of all others,
    which a barrier beside the ring tells after ⌈log2 P⌉ blocks: (min(⌈log2 P⌉, P−2) + 1)·nγ. With β = 0 a block is as
    fast as the barrier's messages, and the next one too has begun when the barrier's last message comes: one more
    copy. (With α = 0 as well all is one moment, and how many copies there are is the order of events, not a cost.)
    """
    _check(ranks, size)
    if ranks == 1:
        return _copy(size, costs)
    rounds = _ceil_log2(ranks)
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
    _check(ranks, size)
    rounds = _ceil_log2(ranks)
    port_s = size * costs.beta_s_per_byte
    round_s = costs.alpha_s + port_s
    next_s = round_s if size >= BULK_BYTES else port_s  # from one send of a rank to its next
    tree = ranks  # the ranks below and including one; the farthest subtree is again such a tree, the others are full
    time_s = before_s = 0.0
    while tree > 1:
        distance = 1 << (_ceil_log2(tree) - 1)
        depth = distance.bit_length() - 1
        if depth > 0:  # the second send goes to the largest full subtree
            time_s = max(time_s, before_s + next_s + round_s + (depth - 1) * round_s)
        before_s += round_s
        time_s = max(time_s, before_s)
        tree -= distance
    return Cost(time_s, rounds, rounds * size)


def barrier(ranks: int, costs: Costs) -> Cost:
    """Dissemination: ⌈log2 P⌉·α. Hensgen, Finkel, Manber, Int. J. Parallel Programming 17(1), 1988, §3."""
    _check(ranks, 0)
    rounds = _ceil_log2(ranks)
    return Cost(rounds * costs.alpha_s, rounds, 0)


def _copy(size: int, costs: Costs) -> Cost:
    """One rank alone, whose result is its input in another place."""
    return Cost(size * costs.gamma_s_per_byte, 0, 0)


def _ceil(whole: int, part: int) -> int:
    return (whole + part - 1) // part


def _ceil_log2(ranks: int) -> int:
    return (ranks - 1).bit_length()


def _check(ranks: int, size: int) -> None:
    if ranks < 1:
        raise ValueError(f"ranks={ranks} must be at least 1")
    if size < 0 or size % ELEMENT_BYTES:
        raise ValueError(f"size={size} is no vector of 4-byte floats: use a multiple of {ELEMENT_BYTES}, 0 or more")
