"""What each collective takes on the α-β-γ network of docs/explanation/simulation.md, as a closed form.

The forms are those of the algorithms in core/collectives, and tests hold them against the simulator. First come
allgather and the operations that reduce, then those on sparse vectors, which are less exact.
All are for P ranks; γ counts where bytes are copied or added.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from telegrad.cost.network import (
    CARD_BYTES,
    ELEMENT_BYTES,
    Cost,
    Costs,
    ceil_div,
    ceil_log2,
    check,
    copying,
    folded_rounds_s,
    halving_of_elements_s,
    pieces_s,
    stream_s,
    two_lanes_s,
)

# What core/collectives does; tests compare with it.
SHORT_BYTES = 32 << 10  # kShortBytes of allgather.cpp
CARD_PIECES_MOST = 64  # kCardPiecesMost of allgather_ring.cpp
LONG_PIECE_BYTES = 512 << 10  # kLongPieceBytes of allgather_ring.cpp
ALLGATHER_PIECES_MOST = 16  # kPiecesMost of allgather_ring.cpp
PIECES_UNDER_WAY = 2  # kUnderWay of allgather_ring.cpp


def allgather(ranks: int, size: int, costs: Costs) -> Cost:
    """Up to 32 KiB, Bruck's algorithm: ⌈log2 P⌉·α + (P−1)·nβ + P·nγ. Bruck et al., IEEE Transactions on Parallel and
    Distributed Systems 8(11), 1997, §4. Among two ranks, and above, a ring: (P−1)(α + nβ). Thakur, Rabenseifner, Gropp,
    Int. J. High Performance Computing Applications 19(1), 2005, §4.1.

    Round the ring a block goes in pieces of 60 KiB, two under way; one of more than 64 such goes in pieces of 512 KiB,
    16 at most. The first ones leave
    beside a barrier and are taken when it is over, and the own block is copied then; with two ranks there is none, the
    first piece tells.
    """
    check(ranks, size)
    if ranks == 1:
        return copying(size, costs)
    rounds = ceil_log2(ranks)
    if size <= SHORT_BYTES and (ranks > 2 or size == 0):
        return _allgather_bruck(ranks, size, costs)
    pieces = ceil_div(size, CARD_BYTES)
    if pieces > CARD_PIECES_MOST:
        pieces = min(ceil_div(size, LONG_PIECE_BYTES), ALLGATHER_PIECES_MOST)
    piece = ceil_div(size, pieces)
    under_way = min(PIECES_UNDER_WAY, pieces)
    work_s = size * costs.gamma_s_per_byte
    if ranks == 2:
        port_s = piece * costs.pair_s_per_byte(piece * under_way)
        time_s = max(stream_s(pieces, under_way, costs.alpha_s, port_s), costs.alpha_s + port_s + work_s)
        return Cost(time_s, size)
    port_s = piece * costs.beta_s_per_byte
    left = (ranks - 1) * pieces - under_way
    time_s = heard_s(rounds, costs.alpha_s, under_way * port_s)
    time_s += max(stream_s(left, under_way, costs.alpha_s, port_s), work_s)
    return Cost(time_s, (ranks - 1) * size)


def _allgather_bruck(ranks: int, size: int, costs: Costs) -> Cost:
    time_s, have = 0.0, 1
    while have < ranks:
        more = min(have, ranks - have)
        length = more * size
        beta_s = costs.pair_s_per_byte(length) if 2 * have == ranks else costs.beta_s_per_byte
        step_s = costs.alpha_s + length * beta_s
        time_s += max(step_s, size * costs.gamma_s_per_byte) if have == 1 else step_s
        have += more
    return Cost(time_s + ranks * size * costs.gamma_s_per_byte, (ranks - 1) * size)


def heard_s(rounds: int, alpha_s: float, busy_s: float) -> float:
    """Of a barrier of which all but the first message queue behind what keeps the ports busy from the start."""
    return max(rounds * alpha_s, (rounds - 1) * alpha_s + busy_s)


# Collectives that reduce.

# What core/collectives does; tests compare with it.
MEMORY_MESSAGE_BYTES = 256 << 10  # kMemoryMessageBytes of lanes.hpp
DOUBLING_MESSAGE_BYTES, DOUBLING_SEGMENTS_MOST = CARD_BYTES, 300  # kDoublingTuning
HALVING_PIECES_MOST = 1024  # kPiecesMost of halving.hpp
RING_BLOCK_BYTES = 256 << 10  # kRingBlockBytes of reduce_scatter.cpp
_SHOWS = 0.002


def allreduce(algorithm: str, ranks: int, size: int, costs: Costs) -> Cost:
    """Of the algorithm of that name on a vector of ``size`` bytes, from one place to another. Raises ``ValueError`` for
    a name that is none of ``ALLREDUCES``."""
    if algorithm not in ALLREDUCES:
        raise ValueError(f"algorithm={algorithm!r} has no closed form: use {', '.join(ALLREDUCES)}")
    return ALLREDUCES[algorithm](ranks, size, costs)


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
    return Cost(time_s, _ring_bytes(ranks, elements))


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
    return Cost(time_s, (rounds + (folded > 0)) * size)


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
    sent = elements - _arc(ranks, elements, 1)
    time_s = halving_s(ranks, elements, costs)
    for reach, distance in _halving_rounds(ranks):
        sent += _arc(ranks, elements, reach - distance)
        exchanges = 2 * distance == ranks
        time_s += _round_s(ranks, elements, reach - distance, costs, works=False, exchanges=exchanges)
    return Cost(_or_by_element(time_s, ranks, elements, costs, gathers=True), sent * ELEMENT_BYTES)


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
    pieces = _halving_pieces(ranks, elements, blocks)
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


def _halving_pieces(ranks: int, elements: int, blocks: int) -> int:
    """In how many pieces a round of the halving sends its message."""
    return min(HALVING_PIECES_MOST, max(1, ceil_div(elements * ELEMENT_BYTES * blocks // ranks, CARD_BYTES)))


ALLREDUCES: dict[str, Callable[[int, int, Costs], Cost]] = {
    "ring": allreduce_ring,
    "recursive_doubling": allreduce_recursive_doubling,
    "rabenseifner": allreduce_rabenseifner,
}


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
        return Cost(halving_s(ranks, elements, costs), (elements - kept) * ELEMENT_BYTES)
    steps = ranks - 1
    block = ceil_div(elements, ranks) * ELEMENT_BYTES
    segments = _segments(block, CARD_BYTES)
    longest = ceil_div(block // ELEMENT_BYTES, segments) * ELEMENT_BYTES
    beta_s = costs.pair_s_per_byte(longest * min(2, segments)) if ranks == 2 else costs.beta_s_per_byte
    time_s = two_lanes_s(
        segments, steps, costs.alpha_s, longest * beta_s, longest * costs.gamma_s_per_byte, passes_on=False
    )
    return Cost(time_s, (elements - elements // ranks) * ELEMENT_BYTES)


# Operations on sparse vectors. The forms of sparse allreduces, by which ranks choose, are in
# core/collectives/sparse/cost.cpp.
# For P ranks and float32 vectors of `dimension` n with `entries` k each, at random indices. How many entries meet
# is expected, not known: tests hold the forms against the simulator within 15 %.

PACKED_INDEX_BITS = 1.6
"""Beyond log2 of 1/density, about; the entropy of uniform indices is 1.44 beyond it."""

BLOCK_ELEMENTS = 65_536
"""Whose entries have indices of 16 bits, where they are not packed."""

# What core/collectives does; tests compare with it.
HEADER_BYTES = 32  # StreamHeader
SHORT_MESSAGE_BYTES = 32 << 10  # kShortMessageBytes of allgather_short.hpp
TURN_BYTES = 32 << 10  # Transport::kTurnBytes
SHORT_SHARE_BYTES = 32 << 10  # kShortBytes of sparse/split.cpp
SHARES_UNDER_WAY = 16  # kWindow of sparse/split.cpp
DOUBLED_SHARE_BYTES = 64 << 10  # kDoubledShareBytes of topk/allgather_shares.hpp
UNCOUNTED_SHARE_LEAST = 36  # kUncountedShareLeast of topk/oktopk.cpp
_THRESHOLD_COUNTS = 256  # about
_VARINT_BYTES = 2  # of most counts of entries
_ENTRY_BYTES = 8  # in memory
_COUNT_BYTES = 8


def message_bytes(range_: int, entries: float, *, packed: bool = False) -> int:
    """Of so many entries of a range of indices: these in 16 or 32 bits each, whichever is shorter, or ``packed``, and
    values as they are."""
    count = round(entries)
    if packed and 0 < count < range_:
        indices = math.ceil(count * (math.log2(range_ / count) + PACKED_INDEX_BITS) / 8)
    else:
        indices = min(4 * count, _padded(4 * ceil_div(range_, BLOCK_ELEMENTS)) + 2 * count)
    return HEADER_BYTES + _padded(indices) + _padded(ELEMENT_BYTES * count)


def entries_of_sum(ranks: float, dimension: int, entries: float) -> float:
    """K: expected entries of the union of independent vectors: n(1 − (1 − k/n)^P). SparCML §5.1 defines K."""
    if dimension == 0:
        return 0.0
    return dimension * -math.expm1(ranks * math.log1p(-entries / dimension)) if entries < dimension else dimension


def allgather_sparse(ranks: int, dimension: int, entries: int, costs: Costs, *, packed: bool = False) -> Cost:
    """Up to 32 KiB a message, Bruck's algorithm: ⌈log2 P⌉·α + (P−1)kβ, and the work, kγ to encode and P·kγ to decode.
    Longer ones go round a ring after rounds that find that out, (⌈log2 P⌉ + P − 1)α + (P−1)·kβ, and are decoded while
    others come. Raises ``ValueError`` for sizes that make no sense. Source: SparCML §5.2.
    """
    _check(ranks, dimension, entries)
    message = message_bytes(dimension, entries, packed=packed)
    encode_s = entries * _ENTRY_BYTES * costs.gamma_s_per_byte
    decode_s = message * costs.gamma_s_per_byte
    if message <= SHORT_MESSAGE_BYTES:
        rounds = _short_rounds(ranks, message, costs)
        return Cost(encode_s + rounds.time_s + ranks * decode_s, rounds.bytes_per_rank)
    rounds = _short_rounds(ranks, 0, costs)
    pass_s = _passing_s(message, ranks == 2, costs)
    time_s = encode_s + rounds.time_s + (ranks - 1) * max(pass_s, decode_s) + decode_s
    return Cost(time_s, rounds.bytes_per_rank + (ranks - 1) * (message + _length_bytes(message)))


def reduce_scatter_sparse(ranks: int, dimension: int, entries: float, costs: Costs, *, packed: bool = False) -> Cost:
    """The split: every rank sends every other its entries of the slice that this one owns, (P−1)α + k(P−1)/P·β, with
    short ones (P−1)/16·α; work kγ to encode, kγ to decode, kγ to add. Raises ``ValueError`` for sizes that make no
    sense. Source: SparCML §5.3.2, the first half of SSAR_Split_allgather.
    """
    _check(ranks, dimension, entries)
    owned = entries_of_sum(ranks, dimension, entries) / ranks
    split = _split(ranks, dimension, entries, costs, packed)
    kept_s = owned * _ENTRY_BYTES * costs.gamma_s_per_byte
    return Cost(split.time_s + kept_s, split.bytes_per_rank)


def allreduce_topk(
    ranks: int,
    dimension: int,
    entries: int,
    keep: int,
    costs: Costs,
    *,
    slices: Literal["reused", "cut"],
    finds_threshold: bool,
    packed: bool = False,
) -> Cost:
    """Ok-Topk of a sum that keeps k′ = ``keep``: (2P + O(log P))α + 2(k + k′)(P−1)/P·β in words, for alike shares.

    A call allreduces P + 1 counts, unless it reuses slices for long shares. It splits, gathers two counts of each rank
    and the kept shares. If slices are ``"cut"``, two histograms are allreduced too. A call that ``finds_threshold``, as
    every 32nd, allreduces 256 counts two or three times. Raises ``ValueError`` for sizes that make no sense. Source:
    Li, Hoefler, PPoPP 2022, §3.1, as docs/explanation/algorithms.md has it.
    """
    _check(ranks, dimension, entries)
    if keep < 1:
        raise ValueError(f"keep={keep} must be at least 1")
    gamma = costs.gamma_s_per_byte
    found = entries_of_sum(ranks, dimension, entries)
    held, kept = found / ranks, min(keep, found) / ranks
    split = _split(ranks, dimension, entries, costs, packed)
    parts = [(split, 1.0), (_gather_shares(ranks, ceil_div(dimension, ranks), kept, costs, packed), 1.0)]
    work_s = held * ELEMENT_BYTES * gamma  # taking what is kept
    if slices == "cut" or finds_threshold or keep < UNCOUNTED_SHARE_LEAST * ranks:
        parts.append((_sum_of_counts(ranks, ranks + 1, costs), 1.0))
    if slices == "cut" and entries:
        parts.append((_sum_of_counts(ranks, _bins(ranks, entries), costs), 2.0))
    if finds_threshold:
        sums = 2 if entries <= _THRESHOLD_COUNTS else 3  # exponents, a digit of many, and what is left
        parts.append((_sum_of_counts(ranks, min(entries, _THRESHOLD_COUNTS), costs), sums))
        work_s += sums * held * ELEMENT_BYTES * gamma
    parts.append((_counts_of_ranks(ranks, costs), 1.0))
    work_s += (ranks * kept + entries) * _ENTRY_BYTES * gamma  # what is left
    return Cost(
        time_s=sum(part.time_s * times for part, times in parts) + work_s,
        bytes_per_rank=round(sum(part.bytes_per_rank * times for part, times in parts)),
    )


def _check(ranks: int, dimension: int, entries: float) -> None:
    if ranks < 1:
        raise ValueError(f"ranks={ranks} must be at least 1")
    if not 0 <= entries <= dimension:
        raise ValueError(f"entries={entries} must be between 0 and dimension={dimension}")


def _padded(count: int) -> int:
    return (count + 7) // 8 * 8


def _message_pieces(message: int) -> int:
    return 1 if message < CARD_BYTES else ceil_div(message + _COUNT_BYTES, CARD_BYTES)


def _length_bytes(message: int) -> int:
    """A message in several pieces begins with its length."""
    return 0 if message < CARD_BYTES else _COUNT_BYTES


def _passing_s(message: int, exchange: bool, costs: Costs) -> float:
    """To another rank while as much comes; ``exchange``: from the same one."""
    pieces = _message_pieces(message)
    port_s = message / pieces * costs.beta_s_per_byte
    beta_s = costs.pair_s_per_byte(message // pieces) if exchange else costs.beta_s_per_byte
    return pieces_s(pieces, costs.alpha_s, port_s, message / pieces * beta_s)


def _short_rounds(ranks: int, message: int, costs: Costs) -> Cost:
    """Bruck's rounds of messages with their lengths; empty ones, but for these, where ``message`` is 0."""
    time_s, have, sent = 0.0, 1, 0
    while have < ranks:
        more = min(have, ranks - have)
        length = _padded(4 * more) + more * message
        time_s += more * message * costs.gamma_s_per_byte + _passing_s(length, 2 * have == ranks, costs)
        sent += length + _length_bytes(length)
        have += more
    return Cost(time_s, sent)


def _split(ranks: int, dimension: int, entries: float, costs: Costs, packed: bool) -> Cost:
    gamma, others = costs.gamma_s_per_byte, ranks - 1
    share = entries / ranks
    message = message_bytes(ceil_div(dimension, ranks), share, packed=packed)
    share_s, decode_s, alpha_s = share * _ENTRY_BYTES * gamma, message * gamma, costs.alpha_s
    reduce_s = ranks * share_s
    sent = others * (message + _length_bytes(message))
    if ranks == 1:
        return Cost(reduce_s, 0)
    if share * _ENTRY_BYTES < SHORT_SHARE_BYTES:
        port_s = message * (costs.pair_s_per_byte(message) if ranks == 2 else costs.beta_s_per_byte)
        batch = min(others, SHARES_UNDER_WAY, math.ceil(TURN_BYTES / max(share * _ENTRY_BYTES, 1e-9)))
        encoded_s = (others - batch) * share_s + alpha_s + port_s
        travel_s = max(stream_s(others, SHARES_UNDER_WAY, alpha_s, port_s), encoded_s)
        return Cost(batch * share_s + travel_s + others * decode_s + reduce_s, sent)
    pass_s = _passing_s(message, ranks == 2, costs)
    time_s = share_s + pass_s + (others - 1) * max(pass_s, share_s + decode_s) + decode_s + reduce_s
    return Cost(time_s, sent)


def _gather_shares(ranks: int, slice_: int, kept: float, costs: Costs, packed: bool) -> Cost:
    """Shares of so many entries each: short ones by Bruck's rounds, others round a ring."""
    message = message_bytes(slice_, kept, packed=packed)
    encode_s, decode_s = kept * _ENTRY_BYTES * costs.gamma_s_per_byte, message * costs.gamma_s_per_byte
    longest = HEADER_BYTES + kept * _ENTRY_BYTES + 16  # not packed
    if longest <= DOUBLED_SHARE_BYTES:
        rounds = _short_rounds(ranks, message, costs)
        return Cost(encode_s + rounds.time_s + ranks * decode_s, rounds.bytes_per_rank)
    pass_s, others = _passing_s(message, ranks == 2, costs), ranks - 1
    if message >= TURN_BYTES:
        time_s = encode_s + others * max(pass_s, decode_s) + decode_s
    else:  # taken in batches
        time_s = encode_s + others * pass_s + 2 * decode_s
    return Cost(time_s, others * (message + _length_bytes(message)))


def _sum_of_counts(ranks: int, counts: int, costs: Costs) -> Cost:
    """Recursive doubling of so many integers; ranks beyond a power of two fold before and hear the sum after."""
    size = counts * _VARINT_BYTES
    rounds = ranks.bit_length() - 1
    folds = ranks != 1 << rounds
    work_s = size * costs.gamma_s_per_byte
    time_s = rounds * (costs.alpha_s + size * costs.pair_s_per_byte(size) + work_s)
    if folds:
        time_s += 2 * (costs.alpha_s + size * costs.beta_s_per_byte) + work_s
    return Cost(time_s, (rounds + folds) * size)


def _counts_of_ranks(ranks: int, costs: Costs) -> Cost:
    """Bruck's allgather of two integers."""
    rounds, size = ceil_log2(ranks), 2 * _VARINT_BYTES
    time_s = rounds * costs.alpha_s + (ranks - 1) * size * costs.beta_s_per_byte
    return Cost(time_s + ranks * size * costs.gamma_s_per_byte, (ranks - 1) * size)


def _bins(ranks: int, entries: int) -> int:
    """Of a histogram: as many as divide a fair share into parts that are smaller than what chance brings."""
    enough = max(ranks, round(3 * math.sqrt(entries)))
    return ranks * (1 << max(1, math.ceil(math.log2(max(1.0, entries / enough)))))


# The layout of sparse messages: the one whose saved bytes are worth its computation.

_PACKED_INDEX_S, _PACKED_VALUE_S = 2e-9, 1.5e-9
"""An entry's share of packing and unpacking."""
_PACKED_VALUE_SAVES_BYTES = 0.7
"""Of a float32 or bfloat16 gradient."""


def layout_that_pays(beta_s_per_byte: float, density: float, dtype: str = "f32") -> str:
    """What ``wire="auto"`` takes where a byte on the network takes so many seconds, and a stream has entries at this
    share of its indices: ``"blocked"``, ``"indices"`` or ``"packed"``, by the bytes that each saves (of indices the
    more, the denser they are, down to 1.44 bits and what the format adds) and the time that packing takes."""
    if density <= 0:
        return "blocked"
    packed_bytes = (math.log2(1 / min(density, 1.0)) + PACKED_INDEX_BITS) / 8
    blocked_bytes = min(4.0, 2 + 4 / (BLOCK_ELEMENTS * density))
    of_indices_s = max(0.0, blocked_bytes - packed_bytes) * beta_s_per_byte - _PACKED_INDEX_S
    of_values_s = 0.0
    if dtype in ("f32", "bf16"):
        of_values_s = _PACKED_VALUE_SAVES_BYTES * beta_s_per_byte - _PACKED_VALUE_S
    gains_s = {"blocked": 0.0, "indices": of_indices_s, "packed": of_indices_s + of_values_s}
    return max(gains_s, key=gains_s.__getitem__)


# Allreduces of ranks that live on nodes, by two levels and by the other algorithms. They are rougher than those of the
# plain network (docs/results/two-level.md): inside and between are two plain networks, and of segments the slower
# phase counts.

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
    sent = scatter.bytes_per_rank + gather.bytes_per_rank + between.bytes_per_rank
    return Cost(time_s, segments * sent)


def between_algorithm(nodes: int, size: int) -> str:
    """What sums a slice of ``size`` bytes among ``nodes`` owners: choose_between() of the core."""
    doubles_most = max(16 << 10, (128 << 10) // nodes) if nodes & (nodes - 1) == 0 else 8 << 10
    if size <= doubles_most:
        return "recursive_doubling"
    return "rabenseifner" if nodes == 2 or size < RING_BYTES * nodes else "ring"


def _elements(size: int) -> int:
    return ceil_div(size, ELEMENT_BYTES) * ELEMENT_BYTES
