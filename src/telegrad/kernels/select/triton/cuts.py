"""Triton kernels that rank: the key of the k-th largest entry by its digits, and the move of all that it cuts off.

A key has 31 bits. Its digits, of 8, 8, 8 and 7 bits from the top, are found one after the other: a histogram of the
entries that agree in the digits so far says which one the k-th largest has next. What is ranked, the source, is a
residual, or the few entries that a fused pass has taken out of it; its length lies on the device, so that the CPU need
not wait for it.
"""

from __future__ import annotations

import triton
import triton.language as tl

_ADDED: tl.constexpr = tl.constexpr(1024)  # counts of blocks at once


@triton.jit
def narrowed(counted, digits, rank, WIDTH: tl.constexpr):
    """The next digit of the key of that rank, behind those so far, and its rank among the entries that have it too."""
    digit = tl.arange(0, 1 << WIDTH)
    at_least = tl.sum(counted) - tl.cumsum(counted, 0) + counted
    found = tl.sum((at_least >= rank).to(tl.int32)) - 1  # -1: there are fewer than that
    above = tl.sum(tl.where(digit == found + 1, at_least, 0))
    return tl.where(found < 0, -1, (digits << WIDTH) | found), rank - above


@triton.jit(do_not_specialize=["rank"])
def sample_bound(
    residual,
    gradient,
    size,
    words,  # int64[SAMPLE], of 31 random bits
    rank,
    bound,  # int64
    ADD: tl.constexpr,
    FLIP: tl.constexpr,
    MASK: tl.constexpr,
    SAMPLE: tl.constexpr,
    UNLESS: tl.constexpr,  # the bound stays what it is unless it is this; None: it has none
):
    """The greatest key of 20 bits, and zeros behind them, that more than ``rank`` of the sampled sums reach; at least
    1. By one program. The bits that it leaves out are a 4,096th of a sum."""
    if UNLESS is None:
        put_sample_bound(residual, gradient, size, words, rank, bound, ADD, FLIP, MASK, SAMPLE)
    else:
        if tl.load(bound) == UNLESS:
            put_sample_bound(residual, gradient, size, words, rank, bound, ADD, FLIP, MASK, SAMPLE)


@triton.jit
def put_sample_bound(
    residual,
    gradient,
    size,
    words,
    rank,
    bound,
    ADD: tl.constexpr,
    FLIP: tl.constexpr,
    MASK: tl.constexpr,
    SAMPLE: tl.constexpr,
):
    """See ``sample_bound``."""
    where = (tl.load(words + tl.arange(0, SAMPLE)) * size) >> 31
    x = tl.load(residual + where)
    if ADD:
        x += tl.load(gradient + where)
    key = (x.to(tl.int32, bitcast=True) ^ FLIP) & MASK
    found = tl.zeros([], tl.int32)
    bit = tl.full([], 1 << 30, tl.int32)
    for _ in range(20):
        probe = found | bit
        reached = tl.sum((key >= probe).to(tl.int32))
        found = tl.where(reached > rank, probe, found)
        bit = bit >> 1
    tl.store(bound, tl.maximum(found, 1).to(tl.int64))


@triton.jit(do_not_specialize=["k"])
def find_kth_of_few(
    values,
    length,
    k,
    found,
    FLIP: tl.constexpr,
    MASK: tl.constexpr,
    LOWEST: tl.constexpr,
    CUT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """All digits, of entries that one program holds in registers. Reads 4 bytes of every entry. CUT: zeros where
    there are fewer than k."""
    where = tl.arange(0, BLOCK)
    inside = where < tl.load(length)
    key = (tl.load(values + where, mask=inside, other=0.0).to(tl.int32, bitcast=True) ^ FLIP) & MASK
    member = inside & (key >= LOWEST)
    digits, rank = narrowed(tl.histogram((key >> 23) & 0xFF, 256, mask=member), 0, k, 8)
    member = member & ((key >> 23) == digits)
    digits, rank = narrowed(tl.histogram((key >> 15) & 0xFF, 256, mask=member), digits, rank, 8)
    member = member & ((key >> 15) == digits)
    digits, rank = narrowed(tl.histogram((key >> 7) & 0xFF, 256, mask=member), digits, rank, 8)
    member = member & ((key >> 7) == digits)
    digits, rank = narrowed(tl.histogram(key & 0x7F, 128, mask=member), digits, rank, 7)
    if CUT:
        rank = tl.where(digits < 0, 0, rank)
        digits = tl.where(digits < 0, 0, digits)
    tl.store(found, digits.to(tl.int64))
    tl.store(found + 1, rank.to(tl.int64))


@triton.jit(do_not_specialize=["k"])
def count_digits(
    values,
    length,  # int64
    found,  # two int64: the k-th largest key's digits so far (-1: there are fewer), its rank among the entries left
    histogram,  # int64, zeros: of every digit, and behind those how many programs have counted
    k,
    FLIP: tl.constexpr,
    MASK: tl.constexpr,
    LOWEST: tl.constexpr,
    SHIFT: tl.constexpr,
    WIDTH: tl.constexpr,
    FIRST: tl.constexpr,
    CUT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """How many entries have each next digit, and the next digit of the k-th largest key. Reads 4 bytes of every entry.
    FIRST: nothing has been found yet. CUT: as of find_kth_of_few."""
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    size = tl.load(length)
    add_digits(values, size, found, histogram, program, programs, FLIP, MASK, LOWEST, SHIFT, WIDTH, FIRST, BLOCK)
    put_digit(histogram, found, k, programs, WIDTH, FIRST, CUT)


@triton.jit
def add_digits(
    values,
    size,
    found,
    histogram,
    program,
    programs,
    FLIP: tl.constexpr,
    MASK: tl.constexpr,
    LOWEST: tl.constexpr,
    SHIFT: tl.constexpr,
    WIDTH: tl.constexpr,
    FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What ``program``, of so many ``programs``, counts."""
    bins: tl.constexpr = 1 << WIDTH
    digits = size * 0
    if not FIRST:
        digits = tl.load(found)
    counted = tl.zeros([bins], tl.int32)
    for start in range(program * BLOCK, size, programs * BLOCK):
        where = start + tl.arange(0, BLOCK)
        inside = where < size
        bits = tl.load(values + where, mask=inside, other=0.0).to(tl.int32, bitcast=True)
        key = (bits ^ FLIP) & MASK
        member = inside & (key >= LOWEST) & ((key >> (SHIFT + WIDTH)) == digits)
        counted += tl.histogram((key >> SHIFT) & (bins - 1), bins, mask=member)
    # Not "> 0", which is never true in what Triton 3.8.0 compiles for HIP: its bounds of a histogram are wrong.
    tl.atomic_add(histogram + tl.arange(0, bins), counted.to(tl.int64), mask=counted != 0, sem="relaxed")


@triton.jit
def put_digit(histogram, found, k, programs, WIDTH: tl.constexpr, FIRST: tl.constexpr, CUT: tl.constexpr):
    """Behind those that have been found, by whichever program has counted last. None waits for another."""
    tl.debug_barrier()  # all threads have added before one says so
    before = tl.atomic_add(histogram + (1 << WIDTH), 1, sem="acq_rel")
    if before == programs - 1:
        # From where the others added, not from a cache.
        counted = tl.load(histogram + tl.arange(0, 1 << WIDTH), volatile=True)
        if FIRST:
            digits, rank = narrowed(counted, 0, k, WIDTH)
        else:
            digits, rank = narrowed(counted, tl.load(found), tl.load(found + 1), WIDTH)
        if CUT:
            rank = tl.where(digits < 0, 0, rank)
            digits = tl.where(digits < 0, 0, digits)
        tl.store(found, digits.to(tl.int64))
        tl.store(found + 1, rank.to(tl.int64))


@triton.jit(do_not_specialize=["blocks"])
def count_cut(
    values,
    length,  # int64
    cut,  # int64: all entries of greater keys are cut off, and so many of those whose key this is
    tallies,  # int64, two rows of ``blocks``
    blocks,
    FLIP: tl.constexpr,
    MASK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """How many entries of every block have a greater key than the cut's, and, behind these, how many that one.

    Mostly there are no entries, or few: of blocks behind them nothing is written.
    """
    tally_blocks(values, tl.load(length), cut, tallies, blocks, tl.program_id(0), tl.num_programs(0), FLIP, MASK, BLOCK)


@triton.jit
def tally_blocks(
    values,
    size,
    cut,
    tallies,
    blocks,
    program,
    programs,
    FLIP: tl.constexpr,
    MASK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What ``program``, of so many ``programs``, has to say."""
    for block in range(program, tl.cdiv(size, BLOCK).to(tl.int32), programs):
        where = tl.full([], BLOCK, tl.int64) * block + tl.arange(0, BLOCK)
        inside = where < size
        key = (tl.load(values + where, mask=inside, other=0.0).to(tl.int32, bitcast=True) ^ FLIP) & MASK
        last = tl.load(cut)
        tl.store(tallies + block, tl.sum((inside & (key > last)).to(tl.int32)).to(tl.int64))
        tl.store(tallies + blocks + block, tl.sum((inside & (key == last)).to(tl.int32)).to(tl.int64))


@triton.jit(do_not_specialize=["blocks", "room", "offset"])
def move_cut(
    residual,
    positions,  # of the source's entries in the residual, uint32
    values,
    length,
    cut,
    tallies,  # int64, as count_cut wrote them; ENDS: each with all before it in both rows, whatever was not written
    blocks,
    room,
    indices,
    moved,
    total,  # of one element: how many are cut off
    offset,
    FLIP: tl.constexpr,
    MASK: tl.constexpr,
    LISTED: tl.constexpr,
    ALONE: tl.constexpr,  # there is one block, which needs no tallies
    ENDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes, in order, the first ``room`` entries that the cut cuts off, and how many it does.

    What is cut off becomes zero in the residual. LISTED: the source is a copy of entries of it. Otherwise ``values`` is
    the residual.
    """
    move_blocks(
        residual,
        positions,
        values,
        tl.load(length),
        cut,
        tallies,
        blocks,
        room,
        indices,
        moved,
        total,
        offset,
        tl.program_id(0),
        tl.num_programs(0),
        FLIP,
        MASK,
        LISTED,
        ALONE,
        ENDS,
        BLOCK,
    )


@triton.jit
def move_blocks(
    residual,
    positions,
    values,
    size,
    cut,
    tallies,
    blocks,
    room,
    indices,
    moved,
    total,
    offset,
    program,
    programs,
    FLIP: tl.constexpr,
    MASK: tl.constexpr,
    LISTED: tl.constexpr,
    ALONE: tl.constexpr,
    ENDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What ``program``, of so many ``programs``, moves."""
    used = tl.cdiv(size, BLOCK).to(tl.int32)
    tl.store(total, tl.zeros([], tl.int64), mask=(program == 0) & (used == 0))
    for block in range(program, used, programs):
        where = tl.full([], BLOCK, tl.int64) * block + tl.arange(0, BLOCK)
        inside = where < size
        x = tl.load(values + where, mask=inside, other=0.0)
        key = (x.to(tl.int32, bitcast=True) ^ FLIP) & MASK
        last = tl.load(cut)
        ties = tl.load(cut + 1)
        greater = inside & (key > last)
        ones = (inside & (key == last)).to(tl.int32)
        above = tl.sum(greater.to(tl.int32)).to(tl.int64)
        equals = tl.sum(ones).to(tl.int64)
        if ALONE:
            greater_end = above
            equal_end = equals
        elif ENDS:
            greater_end = tl.load(tallies + block)
            equal_end = tl.load(tallies + blocks + block) - tl.load(tallies + blocks - 1)
        else:
            greater_end = above
            equal_end = equals
            for start in range(0, block, _ADDED):
                at = start + tl.arange(0, _ADDED)
                greater_end += tl.sum(tl.load(tallies + at, mask=at < block, other=0))
                equal_end += tl.sum(tl.load(tallies + blocks + at, mask=at < block, other=0))
        tl.store(total, greater_end + tl.minimum(equal_end, ties), mask=block == used - 1)
        equal_before = equal_end - equals
        chosen = greater | ((ones > 0) & (equal_before + tl.cumsum(ones, 0) <= ties))
        flags = chosen.to(tl.int32)
        place = greater_end - above + tl.minimum(equal_before, ties) + tl.cumsum(flags, 0) - flags
        chosen = chosen & (place < room)
        position = where
        if LISTED:
            position = tl.load(positions + where, mask=inside, other=0).to(tl.int64)
        tl.store(residual + position, tl.zeros_like(x), mask=chosen)
        tl.store(indices + place, position + offset, mask=chosen)
        tl.store(moved + place, x, mask=chosen)


@triton.jit(do_not_specialize=["per_bucket", "of_last", "offset"])
def bucket_pass(
    residual,
    gradient,
    size,
    bucket,
    per_bucket,
    of_last,
    indices,
    values,
    peaks,  # of every program: the highest key that stays
    offset,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,  # a power of two, at least `bucket`
):
    """residual += gradient; the largest entries of every bucket leave. A program has ROWS buckets, in registers.

    Reads 8 and writes 4 bytes of every element (without a gradient: reads 4), and writes 8 of every chosen entry.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    where = row * bucket + column
    inside = (column < bucket) & (where < size)
    x = tl.load(residual + where, mask=inside, other=0.0)
    if ADD:
        x += tl.load(gradient + where, mask=inside, other=0.0)
    key = tl.where(inside, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, -1)
    k = tl.where(row < size // bucket, per_bucket, of_last)  # behind the last row there is nothing to choose
    cut = tl.zeros([ROWS, 1], tl.int32)  # the highest key that k entries have at least, bit by bit from the top
    bit = tl.full([ROWS, 1], 1 << 30, tl.int32)
    for _ in range(31):
        probe = cut | bit
        enough = tl.sum((key >= probe).to(tl.int32), axis=1, keep_dims=True) >= k
        cut = tl.where(enough, probe, cut)
        bit = bit >> 1
    greater = key > cut
    ones = (key == cut).to(tl.int32)
    ties = k - tl.sum(greater.to(tl.int32), axis=1, keep_dims=True)
    chosen = greater | ((ones > 0) & (tl.cumsum(ones, 1) <= ties))
    flags = chosen.to(tl.int32)
    place = row * per_bucket + tl.cumsum(flags, 1) - flags
    tl.store(indices + place, where + offset, mask=chosen)
    tl.store(values + place, x, mask=chosen)
    if ADD:
        tl.store(residual + where, tl.where(chosen, 0.0, x), mask=inside)
    else:
        tl.store(residual + where, tl.zeros_like(x), mask=chosen)
    tl.store(peaks + tl.program_id(0), tl.max(tl.where(k > 0, cut, 0)))
