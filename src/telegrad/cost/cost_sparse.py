"""What operations on sparse streams take on the α-β-γ network, as closed forms; those of sums are in
core/collectives/sparse/cost.cpp, by which ranks choose.

For P ranks and float32 streams of ``dimension`` n with ``entries`` k each, at random indices. How many entries meet is
expected, not known: tests hold the forms against the simulator within 15 %.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from telegrad.cost.network import ELEMENT_BYTES, Cost, Costs, ceil_div, ceil_log2
from telegrad.cost.recurrences import CARD_BYTES, pieces_s, stream_s

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
BINS_LEAST = 1024  # kBinsLeast of pooled_slices.cpp
THRESHOLD_COUNTS = 256  # kBuckets of topk/threshold.cpp
_ENTRY_BYTES = 8  # in memory
_COUNT_BYTES = 8


@dataclass(frozen=True)
class TopkCost(Cost):
    """``words_per_rank``: the most of indices and values, a word each, that a rank sends or receives."""

    words_per_rank: int


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
    """K, how many of so many independent streams together may be expected: n(1 − (1 − k/n)^P). SparCML §5.3."""
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
        return Cost(encode_s + rounds.time_s + ranks * decode_s, rounds.messages_per_rank, rounds.bytes_per_rank)
    rounds = _short_rounds(ranks, 0, costs)
    pass_s = _passing_s(message, ranks == 2, costs)
    time_s = encode_s + rounds.time_s + (ranks - 1) * max(pass_s, decode_s) + decode_s
    messages = rounds.messages_per_rank + (ranks - 1) * _pieces(message)
    return Cost(time_s, messages, rounds.bytes_per_rank + (ranks - 1) * (message + _length_bytes(message)))


def reduce_scatter_sparse(ranks: int, dimension: int, entries: float, costs: Costs, *, packed: bool = False) -> Cost:
    """The split: every rank sends every other its entries of the slice that this one owns, (P−1)α + k(P−1)/P·β, with
    short ones (P−1)/16·α; work kγ to encode, kγ to decode, kγ to add. Raises ``ValueError`` for sizes that make no
    sense. Source: SparCML §5.3.2, the first half of SSAR_Split_allgather.
    """
    _check(ranks, dimension, entries)
    owned = entries_of_sum(ranks, dimension, entries) / ranks
    split = _split(ranks, dimension, entries, costs, packed)
    kept_s = owned * _ENTRY_BYTES * costs.gamma_s_per_byte
    return Cost(split.time_s + kept_s, split.messages_per_rank, split.bytes_per_rank)


def allreduce_topk(
    ranks: int,
    dimension: int,
    entries: int,
    keep: int,
    costs: Costs,
    *,
    slices: Literal["reused", "cut", "recut"],
    finds_threshold: bool,
    packed: bool = False,
) -> TopkCost:
    """Ok-Topk of a sum that keeps k′ = ``keep``: (2P + O(log P))α + 2(k + k′)(P−1)/P·β in words, for alike shares.

    A call that reuses slices and threshold allreduces P + 1 counts, splits, gathers two counts of each rank and the
    kept shares. Where slices are ``"cut"``, as at every 64th call, histograms of 1,024 bins are allreduced instead,
    until no boundary lies in one with more than P entries; where they are ``"recut"`` because an owner would get too
    much, both. A call that ``finds_threshold`` anew, as every 32nd, also allreduces 256 counts four times. Raises
    ``ValueError`` for sizes that make no sense. Source: Li, Hoefler, PPoPP 2022, §3.1, as docs/algorithms.md has it.
    """
    _check(ranks, dimension, entries)
    if keep < 1:
        raise ValueError(f"keep={keep} must be at least 1")
    gamma = costs.gamma_s_per_byte
    found = entries_of_sum(ranks, dimension, entries)
    held, kept = found / ranks, min(keep, found) / ranks
    split = _split(ranks, dimension, entries, costs, packed)
    parts = [(split, 1.0), (_gather_shares(ranks, ceil_div(dimension, ranks), kept, costs, packed), 1.0)]
    work_s = 2 * held * ELEMENT_BYTES * gamma  # counting and taking what is kept
    if slices != "cut":
        parts.append((_sum_of_counts(ranks, ranks + 1, costs), 1.0))
    if slices != "reused":
        parts += [(_sum_of_counts(ranks, bins, costs), likely) for bins, likely in _histograms(ranks, entries)]
    if finds_threshold:
        parts.append((_sum_of_counts(ranks, THRESHOLD_COUNTS, costs), float(ELEMENT_BYTES)))
        work_s += ELEMENT_BYTES * held * ELEMENT_BYTES * gamma
    parts.append((_counts_of_ranks(ranks, costs), 1.0))
    work_s += (ranks * kept + entries) * _ENTRY_BYTES * gamma  # what is left
    return TopkCost(
        time_s=sum(part.time_s * times for part, times in parts) + work_s,
        messages_per_rank=round(sum(part.messages_per_rank * times for part, times in parts)),
        bytes_per_rank=round(sum(part.bytes_per_rank * times for part, times in parts)),
        words_per_rank=round(2 * (entries + ranks * kept) * (ranks - 1) / ranks),
    )


def _check(ranks: int, dimension: int, entries: float) -> None:
    if ranks < 1:
        raise ValueError(f"ranks={ranks} must be at least 1")
    if not 0 <= entries <= dimension:
        raise ValueError(f"entries={entries} must be between 0 and dimension={dimension}")


def _padded(count: int) -> int:
    return (count + 7) // 8 * 8


def _pieces(message: int) -> int:
    return 1 if message < CARD_BYTES else ceil_div(message + _COUNT_BYTES, CARD_BYTES)


def _length_bytes(message: int) -> int:
    """A message in several pieces begins with its length."""
    return 0 if message < CARD_BYTES else _COUNT_BYTES


def _passing_s(message: int, exchange: bool, costs: Costs) -> float:
    """To another rank while as much comes; ``exchange``: from the same one."""
    pieces = _pieces(message)
    port_s = message / pieces * costs.beta_s_per_byte
    beta_s = costs.pair_s_per_byte(message // pieces) if exchange else costs.beta_s_per_byte
    return pieces_s(pieces, costs.alpha_s, port_s, message / pieces * beta_s)


def _short_rounds(ranks: int, message: int, costs: Costs) -> Cost:
    """Bruck's rounds of messages with their lengths; empty ones, but for these, where ``message`` is 0."""
    time_s, have, messages, sent = 0.0, 1, 0, 0
    while have < ranks:
        more = min(have, ranks - have)
        length = _padded(4 * more) + more * message
        time_s += more * message * costs.gamma_s_per_byte + _passing_s(length, 2 * have == ranks, costs)
        messages += _pieces(length)
        sent += length + _length_bytes(length)
        have += more
    return Cost(time_s, messages, sent)


def _split(ranks: int, dimension: int, entries: float, costs: Costs, packed: bool) -> Cost:
    gamma, others = costs.gamma_s_per_byte, ranks - 1
    share = entries / ranks
    message = message_bytes(ceil_div(dimension, ranks), share, packed=packed)
    share_s, decode_s, alpha_s = share * _ENTRY_BYTES * gamma, message * gamma, costs.alpha_s
    reduce_s = ranks * share_s
    sent = others * (message + _length_bytes(message))
    if ranks == 1:
        return Cost(reduce_s, 0, 0)
    if share * _ENTRY_BYTES < SHORT_SHARE_BYTES:
        port_s = message * (costs.pair_s_per_byte(message) if ranks == 2 else costs.beta_s_per_byte)
        batch = min(others, SHARES_UNDER_WAY, math.ceil(TURN_BYTES / max(share * _ENTRY_BYTES, 1e-9)))
        encoded_s = (others - batch) * share_s + alpha_s + port_s
        travel_s = max(stream_s(others, SHARES_UNDER_WAY, alpha_s, port_s), encoded_s)
        return Cost(batch * share_s + travel_s + others * decode_s + reduce_s, others, sent)
    pass_s = _passing_s(message, ranks == 2, costs)
    time_s = share_s + pass_s + (others - 1) * max(pass_s, share_s + decode_s) + decode_s + reduce_s
    return Cost(time_s, others * _pieces(message), sent)


def _gather_shares(ranks: int, slice_: int, kept: float, costs: Costs, packed: bool) -> Cost:
    """Shares of so many entries each: short ones by Bruck's rounds, others round a ring."""
    message = message_bytes(slice_, kept, packed=packed)
    encode_s, decode_s = kept * _ENTRY_BYTES * costs.gamma_s_per_byte, message * costs.gamma_s_per_byte
    longest = HEADER_BYTES + kept * _ENTRY_BYTES + 16  # not packed
    if longest <= SHORT_MESSAGE_BYTES:
        rounds = _short_rounds(ranks, message, costs)
        return Cost(encode_s + rounds.time_s + ranks * decode_s, rounds.messages_per_rank, rounds.bytes_per_rank)
    pass_s, others = _passing_s(message, ranks == 2, costs), ranks - 1
    if message >= TURN_BYTES:
        time_s = encode_s + others * max(pass_s, decode_s) + decode_s
    else:  # taken in batches
        time_s = encode_s + others * pass_s + 2 * decode_s
    return Cost(time_s, others * _pieces(message), others * (message + _length_bytes(message)))


def _sum_of_counts(ranks: int, counts: int, costs: Costs) -> Cost:
    """Recursive doubling of so many integers; ranks beyond a power of two fold before and hear the sum after."""
    size = counts * _COUNT_BYTES
    rounds = ranks.bit_length() - 1
    folds = ranks != 1 << rounds
    work_s = size * costs.gamma_s_per_byte
    time_s = rounds * (costs.alpha_s + size * costs.pair_s_per_byte(size) + work_s)
    if folds:
        time_s += 2 * (costs.alpha_s + size * costs.beta_s_per_byte) + work_s
    messages = rounds + folds
    return Cost(time_s, messages, messages * size)


def _counts_of_ranks(ranks: int, costs: Costs) -> Cost:
    """Bruck's allgather of two integers."""
    rounds, size = ceil_log2(ranks), 2 * _COUNT_BYTES
    time_s = rounds * costs.alpha_s + (ranks - 1) * size * costs.beta_s_per_byte
    return Cost(time_s + ranks * size * costs.gamma_s_per_byte, rounds, (ranks - 1) * size)


def _histograms(ranks: int, entries: int) -> list[tuple[int, float]]:
    """How many bins each level has, and how likely it comes to it: until no bin with a boundary has more than P."""
    if ranks == 1 or entries == 0:
        return []
    bins = max(BINS_LEAST, 4 * ranks)
    level = 1 << (bins.bit_length() - 1)
    levels, in_bin, cuts, likely = [(level + 1, 1.0)], ranks * entries / level, float(ranks - 1), 1.0
    while likely > 0.01 and len(levels) < 40:
        crowded = _share_above(ranks - 1, in_bin)  # of the others in the bin of an entry
        likely *= 1 - (1 - crowded) ** max(1.0, cuts)
        cuts = max(1.0, cuts * crowded)
        each = max(4, 1 << ((bins // max(1, round(cuts))).bit_length() - 1))
        levels.append((round(cuts) * each, likely))
        in_bin /= each
    return levels


def _share_above(most: int, expected: float) -> float:
    """Of Poisson distributed counts with that mean."""
    if expected > 200:
        return 0.5 * math.erfc((most + 0.5 - expected) / math.sqrt(2 * expected))
    term = math.exp(-expected)
    below = term
    for count in range(1, most + 1):
        term *= expected / count
        below += term
    return max(0.0, 1 - below)
