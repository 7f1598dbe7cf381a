"""What the collectives that reduce take on the α-β-γ network, as closed forms; see cost.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from telegrad.cost.network import ELEMENT_BYTES, Cost, Costs, ceil_div, check, copying
from telegrad.cost.recurrences import CARD_BYTES, folded_rounds_s, halving_of_elements_s, pieces_s, two_lanes_s

# What core/collectives does; tests compare with it.
MEMORY_MESSAGE_BYTES = 256 << 10  # kMemoryMessageBytes of lanes.hpp
DOUBLING_MESSAGE_BYTES, DOUBLING_SEGMENTS_MOST = CARD_BYTES, 300  # kDoublingTuning
PIECES_MOST = 1024  # kPiecesMost of halving.hpp
RING_BLOCK_BYTES = 256 << 10  # kRingBlockBytes of reduce_scatter.cpp
PAIR_TREE_BYTES, TREE_BYTES, LEAST_BLOCK_BYTES = 32 << 10, 16 << 10, 256  # of reduce.cpp
_SHOWS = 0.002


def allreduce(algorithm: str, ranks: int, size: int, costs: Costs) -> Cost:
    """Of the algorithm of that name on a vector of ``size`` bytes, from one place to another. Raises ``ValueError`` for
    a name that is none of ``ALLREDUCES``."""
    if algorithm not in ALLREDUCES:
        raise ValueError(f"algorithm={algorithm!r} has no closed form: use {', '.join(ALLREDUCES)}")
    return ALLREDUCES[algorithm](ranks, size, costs)


def allreduce_s(algorithm: str, ranks: int, size: int, costs: Costs) -> float:
    """``allreduce(…).time_s``, but without the messages, which take longer to count than all the rest. Raises as it."""
    if algorithm != "rabenseifner" or ranks == 1:
        return allreduce(algorithm, ranks, size, costs).time_s
    check(ranks, size)
    return _rabenseifner_s(ranks, size // ELEMENT_BYTES, costs)


def allreduce_ring(ranks: int, size: int, costs: Costs, *, message_bytes: int = CARD_BYTES) -> Cost:
    """2(P−1)(α + n/P·β) + (P−1)/P·nγ for one segment. Patarasuk, Yuan, J. Parallel and Distributed Computing 69(2),
    2009, §4.

    n is cut into ⌈n/(P·m)⌉ segments, m = ``message_bytes`` (``MEMORY_MESSAGE_BYTES`` within a host), or one more where
    that is odd and not 1, each with blocks of b bytes (the longest, as every step waits for it), and two lanes work on
    every other segment each. Up to bγ = bβ they keep in step: a lane's step in which blocks are added takes the longer
    of what it needs alone, α + bβ + bγ, and of the ports' time for both lanes, 2bβ; a step in which sums are passed on
    takes max(α + bβ, 2bβ). After the last step of the first lane the second still has min(α, bβ) to go.

    Above bγ = bβ the lanes wait for each other in the processor as well as in the ports: ``two_lanes_s`` follows them.
    """
    check(ranks, size)
    if ranks == 1:
        return copying(size, costs)
    steps = ranks - 1
    segments = _segments(ceil_div(size, ranks), message_bytes)
    elements = size // ELEMENT_BYTES
    longest = ceil_div(ceil_div(elements, segments), ranks) * ELEMENT_BYTES
    beta_s = costs.pair_s_per_byte(longest * min(2, segments)) if ranks == 2 else costs.beta_s_per_byte
    alpha_s, port_s, work_s = costs.alpha_s, longest * beta_s, longest * costs.gamma_s_per_byte

    if segments == 1:
        time_s = steps * (2 * (alpha_s + port_s) + work_s)
    elif work_s <= port_s:
        adding_s = max(alpha_s + port_s + work_s, 2 * port_s)
        passing_s = max(alpha_s + port_s, 2 * port_s)
        time_s = segments // 2 * steps * (adding_s + passing_s) + min(alpha_s, port_s)
    else:
        time_s = two_lanes_s(segments, steps, alpha_s, port_s, work_s)
    return Cost(time_s, 2 * steps * segments, _ring_bytes(ranks, elements))


def _segments(size: int, message_bytes: int) -> int:
    """In how many parts a vector or block goes through the rounds: one, or as many for each of two lanes."""
    segments = max(1, ceil_div(size, message_bytes))
    return segments if segments == 1 else ceil_div(segments, 2) * 2


def _ring_bytes(ranks: int, elements: int) -> int:
    """Everything twice, but once a rank's own block and once its right neighbour's: least of rank P − 2."""
    kept = sum((elements + ranks - 1 - block) // ranks for block in (ranks - 2, ranks - 1))
    return (2 * elements - kept) * ELEMENT_BYTES


def allreduce_recursive_doubling(ranks: int, size: int, costs: Costs) -> Cost:
    """log2 P·(α + nβ + nγ). Thakur, Rabenseifner, Gropp, Int. J. High Performance Computing Applications 19(1), 2005,
    §4.5.

    Where P is not a power of two, 2^m < P < 2^(m+1): m rounds, before them a fold that costs α + nβ + nγ, after them
    α + nβ to tell the folded ranks. Rounds are exchanges; but who waited for the fold meets some who have sent long
    ago, and with an exchange β of its own ``folded_rounds_s`` then follows who meets whom.

    Where it is one, n is cut into ⌈n/60 KiB⌉ segments, 300 at most, or one more where that is odd and not 1, on which
    two lanes work as in a ring.
    """
    check(ranks, size)
    if ranks == 1:
        return copying(size, costs)
    rounds = ranks.bit_length() - 1
    folded = ranks - (1 << rounds)
    segments = 1 if folded else min(_segments(size, DOUBLING_MESSAGE_BYTES), DOUBLING_SEGMENTS_MOST)
    longest = ceil_div(size // ELEMENT_BYTES, segments) * ELEMENT_BYTES
    beta_s, exchange_s = costs.beta_s_per_byte, costs.pair_s_per_byte(longest * min(2, segments))
    alpha_s, work_s = costs.alpha_s, size * costs.gamma_s_per_byte
    fold_s = (alpha_s + size * beta_s + work_s) if folded else 0.0
    if segments > 1:
        time_s = two_lanes_s(
            segments, rounds, alpha_s, longest * exchange_s, longest * costs.gamma_s_per_byte, passes_on=False
        )
    elif folded and exchange_s != beta_s:
        time_s = folded_rounds_s(rounds, folded, fold_s, alpha_s, size * beta_s, size * exchange_s, work_s)
    else:
        time_s = fold_s + rounds * (alpha_s + size * exchange_s + work_s)
    if folded:
        time_s += alpha_s + size * beta_s
    return Cost(time_s, rounds * segments + (folded > 0), (rounds + (folded > 0)) * size)


def allreduce_rabenseifner(ranks: int, size: int, costs: Costs) -> Cost:
    """2⌈log2 P⌉α + 2(P−1)/P·nβ and what of (P−1)/P·nγ does not overlap, for any P. Rabenseifner, ICCS 2004, LNCS 3036,
    §2; on the circulant graph of Träff, arXiv:2410.14234.

    The halving (``halving_s``), and its rounds in reverse without work. Every round is taken to wait for a longest
    message; where single elements count, ``halving_of_elements_s`` follows all ranks.
    """
    check(ranks, size)
    if ranks == 1:
        return copying(size, costs)
    elements = size // ELEMENT_BYTES
    messages, sent = _halving_messages(ranks, elements), elements - _arc(ranks, elements, 1)
    for reach, distance in _halving_rounds(ranks):
        blocks = reach - distance
        messages = messages + _messages(ranks, elements, np.arange(ranks), blocks)
        sent += _arc(ranks, elements, blocks)
    return Cost(_rabenseifner_s(ranks, elements, costs), int(messages.max()), sent * ELEMENT_BYTES)


def _rabenseifner_s(ranks: int, elements: int, costs: Costs) -> float:
    time_s = halving_s(ranks, elements, costs)
    for reach, distance in _halving_rounds(ranks):
        exchanges = 2 * distance == ranks
        time_s += _round_s(ranks, elements, reach - distance, costs, works=False, exchanges=exchanges)
    return _or_by_element(time_s, ranks, elements, costs, gathers=True)


def halving_s(ranks: int, elements: int, costs: Costs) -> float:
    """Until every one of ``ranks`` > 1 ranks has its own block, ⌈n/P⌉ elements or less, reduced.

    Meanwhile the block in the middle of an odd number is copied. Only the first round of an even P is between two.
    """
    time_s = 0.0
    for reach, distance in _halving_rounds(ranks):
        blocks = reach - distance
        copied = _arc(ranks, elements, 1) if reach == ranks and blocks < distance else 0
        copy_s = copied * ELEMENT_BYTES * costs.gamma_s_per_byte
        exchanges = 2 * distance == ranks
        time_s += _round_s(ranks, elements, blocks, costs, works=True, exchanges=exchanges, copy_s=copy_s)
    return _or_by_element(time_s, ranks, elements, costs, gathers=False)


def _round_s(
    ranks: int, elements: int, blocks: int, costs: Costs, *, works: bool, exchanges: bool, copy_s: float = 0.0
) -> float:
    """A round whose longest message has b bytes, in k pieces of equal length: about α + max(bβ + bγ/k, bβ/k + bγ)."""
    pieces = _pieces(ranks, elements, blocks)
    piece_bytes = _arc(ranks, elements, blocks) * ELEMENT_BYTES / pieces
    port_s = piece_bytes * costs.beta_s_per_byte
    exchange_s = piece_bytes * (costs.beta_exchange_s_per_byte or costs.beta_s_per_byte) if exchanges else port_s
    work_s = piece_bytes * costs.gamma_s_per_byte if works else 0.0
    return pieces_s(pieces, costs.alpha_s, port_s, exchange_s, work_s, copy_s)


def _or_by_element(time_s: float, ranks: int, elements: int, costs: Costs, *, gathers: bool) -> float:
    """``time_s``, unless an element more in every message is a part of it that shows."""
    port_s, work_s, exchange_s = (
        per_byte * ELEMENT_BYTES
        for per_byte in (
            costs.beta_s_per_byte,
            costs.gamma_s_per_byte,
            costs.beta_exchange_s_per_byte or costs.beta_s_per_byte,
        )
    )
    rounds = (ranks - 1).bit_length() * (1 + gathers)
    whole = elements * ELEMENT_BYTES < 2 * CARD_BYTES  # messages are
    if elements % ranks == 0 or not whole or rounds * (exchange_s + work_s) <= _SHOWS * time_s:
        return time_s
    return halving_of_elements_s(ranks, elements, costs.alpha_s, port_s, exchange_s, work_s, gathers=gathers)


def _halving_messages(ranks: int, elements: int) -> npt.NDArray[np.int64]:
    """Of each rank."""
    near = ceil_div(ranks, 2)
    first = _messages(ranks, elements, (np.arange(ranks) + near) % ranks, ranks - near)
    later = list(_halving_rounds(ranks))[1:]
    return first + sum(_pieces(ranks, elements, reach - distance) for reach, distance in later)


def _messages(ranks: int, elements: int, first: npt.NDArray[np.int64], blocks: int) -> npt.NDArray[np.int64]:
    """That take so many blocks, by the first of them: one for each piece, and one more where the end of the vector lies
    within a piece."""
    least, larger = divmod(elements, ranks)

    def begin(block: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return block * least + np.minimum(block, larger)

    pieces = _pieces(ranks, elements, blocks)
    before = elements - begin(first)
    behind = begin(np.maximum(first + blocks - ranks, 0))
    length, longer = np.divmod(before + behind, pieces)
    in_longer = before <= longer * (length + 1)
    into_piece = np.where(in_longer, before % (length + 1), (before - longer) % np.maximum(length, 1))
    return pieces + ((behind > 0) & (before > 0) & (into_piece > 0)).astype(np.int64)


def _halving_rounds(ranks: int) -> Iterator[tuple[int, int]]:
    """Of each round how many blocks a rank still has, and how far it sends the rear half of them."""
    reach = ranks
    while reach > 1:
        yield reach, ceil_div(reach, 2)
        reach = ceil_div(reach, 2)


def _arc(ranks: int, elements: int, blocks: int) -> int:
    """The most elements that so many neighbouring blocks have."""
    least, larger = divmod(elements, ranks)
    return blocks * least + min(blocks, larger)


def _pieces(ranks: int, elements: int, blocks: int) -> int:
    """In how many pieces a round of the halving sends its message."""
    return min(PIECES_MOST, max(1, ceil_div(elements * ELEMENT_BYTES * blocks // ranks, CARD_BYTES)))


ALLREDUCES: dict[str, Callable[[int, int, Costs], Cost]] = {
    "ring": allreduce_ring,
    "recursive_doubling": allreduce_recursive_doubling,
    "rabenseifner": allreduce_rabenseifner,
}


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
    if size < max(PAIR_TREE_BYTES if ranks == 2 else TREE_BYTES, LEAST_BLOCK_BYTES * ranks):
        return Cost(_tree_s(ranks, size, costs), 1, size)
    elements = size // ELEMENT_BYTES
    filled = elements - elements // ranks
    time_s = halving_s(ranks, elements, costs) + costs.alpha_s + filled * ELEMENT_BYTES * costs.beta_s_per_byte
    return Cost(time_s, int(_halving_messages(ranks, elements).max()) + 1, size)


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


def reduce_scatter(ranks: int, size: int, costs: Costs) -> Cost:
    """Of ``size`` bytes in blocks that are alike: by halving, ⌈log2 P⌉α + (P−1)/P·nβ and what of (P−1)/P·nγ does not
    overlap, or from 256 KiB a block on round a ring, (P−1)(α + n/P·β) and so on for each segment, as the first half of
    ``allreduce_ring``.
    """
    check(ranks, size)
    if ranks == 1:
        return copying(size, costs)
    elements = size // ELEMENT_BYTES
    if elements // ranks * ELEMENT_BYTES < RING_BLOCK_BYTES:
        kept = elements // ranks
        messages = int(_halving_messages(ranks, elements).max())
        return Cost(halving_s(ranks, elements, costs), messages, (elements - kept) * ELEMENT_BYTES)
    steps = ranks - 1
    block = ceil_div(elements, ranks) * ELEMENT_BYTES
    segments = _segments(block, CARD_BYTES)
    longest = ceil_div(block // ELEMENT_BYTES, segments) * ELEMENT_BYTES
    beta_s = costs.pair_s_per_byte(longest * min(2, segments)) if ranks == 2 else costs.beta_s_per_byte
    time_s = two_lanes_s(
        segments, steps, costs.alpha_s, longest * beta_s, longest * costs.gamma_s_per_byte, passes_on=False
    )
    return Cost(time_s, steps * segments, (elements - elements // ranks) * ELEMENT_BYTES)
