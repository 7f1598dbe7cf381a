"""Triton kernels that select in one residual: passes over all of it, ranking by digits, and random positions.

The fused pass marks the entries that are to leave, and sums over the residual. Marked entries leave in a kernel of
their own, by which time it is known how many there are: nothing need be put back. No kernel waits for another block,
and none holds instructions of one maker's GPUs: the same source serves CUDA and HIP. Positions are 64 bits wide. FLIP
and MASK make of an entry's bits its key (see ``launches.Side``); the key of a lane outside is -1, which reaches
nothing. Marks are bits of words of 32, the lowest bit the first entry's.

Triton adds float32 as IEEE says, denormals included. A GPU differs from a CPU in one thing: a NaN that it computes is
the canonical one, whatever NaN went in."""

from __future__ import annotations

import triton
import triton.language as tl

_SUMMED: tl.constexpr = tl.constexpr(1024)  # totals of groups that are added at once


@triton.jit
def fused_pass(
    residual,
    gradient,
    size,
    bound,  # the lowest key that is marked: int64, or with KNOWN the number itself
    marks,  # uint32, of all blocks
    reached,  # int64: becomes 0, for ``count_marks``
    sums,  # of every block: the side's magnitudes, as doubles
    sides,  # how many entries those are
    tops,  # the side's highest key
    largest,  # the highest key of both sides
    active,  # int64: if HELD, 0 where nothing is to be done
    FLIP: tl.constexpr,
    MASK: tl.constexpr,
    HELD: tl.constexpr,
    ADD: tl.constexpr,
    SELECT: tl.constexpr,
    MOMENTS: tl.constexpr,
    KNOWN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """residual += gradient; all sums that reach ``bound`` are marked.

    Reads 8 and writes 4 bytes of every element (without a gradient: reads 4), and writes a bit."""
    words: tl.constexpr = BLOCK // 32
    block = tl.program_id(0)
    first = block.to(tl.int64) * BLOCK
    # 32 bits: positions of 64 in every lane would take twice the registers.
    lane = tl.arange(0, words)[:, None] * 32 + tl.arange(0, 32)[None, :]
    there = tl.minimum(size - first, BLOCK).to(tl.int32)
    if HELD:
        there = tl.where(tl.load(active) > 0, there, 0)
    inside = lane < there
    x = added(residual + first, gradient + first, lane, inside, ADD)
    bits = x.to(tl.int32, bitcast=True)
    key = tl.where(inside, (bits ^ FLIP) & MASK, -1)
    if MOMENTS:
        magnitude = tl.where(inside & (key > 0), key, 0).to(tl.float32, bitcast=True)
        tl.store(sums + block, tl.sum(magnitude.to(tl.float64)))
        tl.store(sides + block, tl.sum((key > 0).to(tl.int32)))
        tl.store(tops + block, tl.max(key))
        tl.store(largest + block, tl.max(tl.where(inside, bits & 0x7FFFFFFF, 0)))
    if SELECT:
        lowest = bound if KNOWN else tl.load(bound)
        put_marks(marks + first // 32, inside & (key >= lowest), words)
        tl.store(reached, tl.zeros([], tl.int64), mask=block == 0)


@triton.jit
def added(own, gradient, lane, inside, ADD: tl.constexpr):
    """The sums of a block, which are written where they are new."""
    x = tl.load(own + lane, mask=inside, other=0.0)
    if ADD:
        x += tl.load(gradient + lane, mask=inside, other=0.0)
        tl.store(own + lane, x, mask=inside)
    return x


@triton.jit
def put_marks(marks, flags, WORDS: tl.constexpr):
    """Of flags in rows of 32."""
    word = tl.sum(flags.to(tl.int32) << tl.arange(0, 32)[None, :], axis=1)
    tl.store(marks + tl.arange(0, WORDS), word.to(tl.uint32, bitcast=True))


@triton.jit
def ones_of(word):
    """How many bits of each uint32 are set."""
    pairs = word - ((word >> 1) & 0x55555555)
    fours = (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)
    return ((((fours + (fours >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24).to(tl.int32)


@triton.jit(do_not_specialize=["mark_words"])
def count_marks(marks, mark_words, totals, reached, GROUP: tl.constexpr):
    """How many entries are marked in every GROUP words, and in all: added to ``reached``."""
    group = tl.program_id(0)
    at = group.to(tl.int64) * GROUP + tl.arange(0, GROUP)
    total = tl.sum(ones_of(tl.load(marks + at, mask=at < mark_words, other=0))).to(tl.int64)
    tl.store(totals + group, total)
    tl.atomic_add(reached, total, sem="relaxed")


@triton.jit(do_not_specialize=["mark_words", "least", "most", "offset"])
def take_marked(
    residual,
    marks,
    mark_words,
    totals,  # of every group, as ``count_marks`` has them; ENDS: each with all before it
    reached,
    bound,
    usable,  # int64: 0 where nothing is to be done; DECIDE: becomes ``reached`` if that is in [least, most], else 0
    least,
    most,  # the outputs' length: no more are taken
    indices,
    values,
    offset,
    DECIDE: tl.constexpr,
    FEWER: tl.constexpr,  # than ``least`` are enough where the bound is 1, which all of a side reach
    CLEAR: tl.constexpr,
    ENDS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Writes the first ``most`` entries that are marked: ascending positions, plus ``offset``, and values. CLEAR: they
    leave the residual. A program has GROUP words."""
    group = tl.program_id(0)
    if DECIDE:
        found = tl.load(reached)
        enough = found >= least
        if FEWER:
            enough = enough | (tl.load(bound) == 1)
        taken = tl.where(enough & (found <= most), found, 0)
        tl.store(usable, taken, mask=group == 0)
    else:
        taken = tl.load(usable)
    if taken > 0:
        at = group.to(tl.int64) * GROUP + tl.arange(0, GROUP)
        word = tl.load(marks + at, mask=at < mark_words, other=0)
        count = ones_of(word)
        place = (tl.cumsum(count, 0) - count).to(tl.int64)
        if ENDS:
            place += tl.load(totals + group) - tl.sum(count)
        else:
            for first in range(0, group, _SUMMED):
                before = first + tl.arange(0, _SUMMED)
                place += tl.sum(tl.load(totals + before, mask=before < group, other=0))
        copy_marked(residual, at, word, count, place, most, indices, values, offset, CLEAR)


@triton.jit
def copy_marked(residual, at, word, count, place, most, indices, values, offset, CLEAR: tl.constexpr):
    """The entries of words ``at``: those of each, ``count``, from its ``place`` on."""
    for _ in range(tl.max(count)):
        own = (word != 0) & (place < most)
        rest = word & (word - 1)
        position = at * 32 + ones_of((word ^ rest) - 1)
        x = tl.load(residual + position, mask=own, other=0.0)
        tl.store(indices + place, position + offset, mask=own)
        tl.store(values + place, x, mask=own)
        if CLEAR:
            tl.store(residual + position, tl.zeros_like(x), mask=own)
        word = rest
        place += 1


@triton.jit(do_not_specialize=["offset"])
def move_listed(residual, positions, length, indices, values, offset, BLOCK: tl.constexpr):
    """Moves the entries at the first ``length`` (int64, on the device) of ``positions`` (int64, ascending)."""
    lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < tl.load(length)
    position = tl.load(positions + lane, mask=inside, other=0)
    tl.store(indices + lane, position + offset, mask=inside)
    tl.store(values + lane, tl.load(residual + position, mask=inside, other=0.0), mask=inside)
    tl.store(residual + position, tl.zeros([BLOCK], tl.float32), mask=inside)


@triton.jit(do_not_specialize=["size", "offset"])
def put_listed_back(residual, indices, values, size, offset, BLOCK: tl.constexpr):
    """Undoes a move: ``residual[indices - offset] = values``."""
    lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < size
    position = tl.load(indices + lane, mask=inside, other=0).to(tl.int64) - offset
    tl.store(residual + position, tl.load(values + lane, mask=inside, other=0.0), mask=inside)


@triton.jit
def normal_pass(residual, gradient, size, sums, squares, ADD: tl.constexpr, BLOCK: tl.constexpr):
    """residual += gradient; of every block the sum of the sums and of their squares, as doubles."""
    block = tl.program_id(0)
    where = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = where < size
    x = tl.load(residual + where, mask=inside, other=0.0)
    if ADD:
        x += tl.load(gradient + where, mask=inside, other=0.0)
        tl.store(residual + where, x, mask=inside)
    exact = x.to(tl.float64)  # squares of float32 are exact in it: a fused multiplication and addition rounds the same
    tl.store(sums + block, tl.sum(exact))
    tl.store(squares + block, tl.sum(exact * exact))


# Triton kernels that rank: the key of the k-th largest entry by its digits, and the move of all that it cuts off.
# A key has 31 bits. Its digits, of 8, 8, 8 and 7 bits from the top, are found one after the other: a histogram of the
# entries that agree in the digits so far says which one the k-th largest has next. What is ranked, the source, is a
# residual, or the few entries that a fused pass has taken out of it; its length lies on the device, so that the CPU
# need not wait for it.

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
    if UNLESS is not None:  # noqa: SIM102 (a kernel has no "and" that looks at one side alone)
        if tl.load(bound) != UNLESS:
            return
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

    Mostly there are no entries, or few: of blocks behind them nothing is written."""
    tally_blocks(values, tl.load(length), cut, tallies, blocks, tl.program_id(0), tl.num_programs(0), FLIP, MASK, BLOCK)


@triton.jit
def tally_blocks(
    values, size, cut, tallies, blocks, program, programs, FLIP: tl.constexpr, MASK: tl.constexpr, BLOCK: tl.constexpr
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
    the residual."""
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
    active,  # int64: if HELD, 0 where nothing is to be done
    HELD: tl.constexpr,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,  # a power of two, at least `bucket`
):
    """residual += gradient; the largest entries of every bucket leave. A program has ROWS buckets, in registers.

    Reads 8 and writes 4 bytes of every element (without a gradient: reads 4), and writes 8 of every chosen entry."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    where = row * bucket + column
    inside = (column < bucket) & (where < size)
    k = tl.where(row < size // bucket, per_bucket, of_last)  # behind the last row there is nothing to choose
    if HELD:
        takes_part = tl.load(active) > 0
        inside = inside & takes_part
        k = tl.where(takes_part, k, 0)
    x = tl.load(residual + where, mask=inside, other=0.0)
    if ADD:
        x += tl.load(gradient + where, mask=inside, other=0.0)
    key = tl.where(inside, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, -1)
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


# Kernels of one program that make a cut of a threshold: RedSync's search, and that of a normal distribution. They count
# nothing: k entries reach a bound if the k-th largest key does, and more than 2k if the next one after 2k does.


@triton.jit
def key_of(threshold, LOWEST: tl.constexpr):
    """The key of that magnitude, float64; of NaN ``LOWEST``."""
    nearest = tl.where(threshold > 0, threshold, 0.0).to(tl.float32)
    return tl.maximum(nearest.to(tl.int32, bitcast=True), LOWEST).to(tl.int64)


@triton.jit
def put_cut(cut, found, at_k):
    """Of all that reach the bound ``found``; where that is below 0, of the k largest, or of all if there are fewer."""
    kth = tl.load(at_k)
    tl.store(cut, tl.where(found >= 0, found - 1, tl.maximum(kth, 0)))
    tl.store(cut + 1, tl.where((found >= 0) | (kth < 0), 0, tl.load(at_k + 1)))


@triton.jit(do_not_specialize=["halvings"])
def search_cut(
    at_k,  # int64, two: the k-th largest key and its rank among those that equal it; -1: there are fewer
    beyond,  # the same, of the one after 2k
    total,  # float64: of magnitudes
    number,  # int64: how many these are
    top,  # int64: the highest key
    cut,  # int64, two
    halvings,
    LOWEST: tl.constexpr,
):
    """The first mean + ratio (max - mean) that k to 2k entries reach, of so many halvings of the ratio's interval."""
    mean = tl.load(total) / tl.maximum(tl.load(number), 1).to(tl.float64)
    largest = tl.load(top).to(tl.int32).to(tl.float32, bitcast=True).to(tl.float64)
    kth = tl.load(at_k)
    last = tl.load(beyond)
    is_open = (mean - mean == 0) & (largest - largest == 0)  # NaN and infinity say nothing about the others
    low = tl.zeros([], tl.float64)
    high = low + 1.0
    found = kth * 0 - 1
    for _ in range(halvings):
        ratio = low + (high - low) / 2
        bound = key_of(mean + ratio * (largest - mean), LOWEST)
        is_few = bound > kth
        is_many = bound <= last
        found = tl.where(is_open & (found < 0) & ~is_few & ~is_many, bound, found)
        high = tl.where(is_few, ratio, high)
        low = tl.where(is_few | ~is_many, low, ratio)
    put_cut(cut, found, at_k)


@triton.jit
def normal_cut(
    at_k,
    beyond,
    enough,  # as these two, of the fewest entries that are enough
    sums,  # float64: of the entries, of their squares, how many they are, and how many deviations make the threshold
    cut,
    LOWERED_BY: tl.constexpr,
    LOWERED_MOST: tl.constexpr,
):
    """As ``GaussianThreshold``: |mean| + so many deviations, lowered until enough entries reach it."""
    size = tl.load(sums + 2)
    mean = tl.load(sums) / size
    variance = tl.load(sums + 1) / size - mean * mean
    threshold = tl.abs(mean) + tl.load(sums + 3) * tl.sqrt(tl.where(variance < 0, 0.0, variance))
    is_open = threshold - threshold == 0
    last = tl.load(beyond)
    least = tl.load(enough)
    found = last * 0 - 1
    for lowered in range(LOWERED_MOST + 1):
        bound = key_of(threshold, 0)
        is_open = is_open & (bound > last)
        fits = is_open & (found < 0) & ((bound <= least) | (lowered == LOWERED_MOST))
        found = tl.where(fits, bound, found)
        threshold = threshold * LOWERED_BY
    put_cut(cut, found, at_k)


# The Triton kernel of the random sequence that a random subset is made of.


@triton.jit(do_not_specialize=["count", "size", "rank", "stream", "seed_low", "seed_high"])
def draw_positions(positions, count, size, call, rank, stream, seed_low, seed_high, BLOCK: tl.constexpr):
    """The first ``count`` positions of the sequence, each below ``size``, as int64. ``call``: int64, on the device.

    A position is made of two words of Philox4x32-10 (Salmon, Moraes, Dror, Shaw, SC 2011). Counters come in groups of
    16: all their first words are used, then all their second ones, and so on."""
    lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    word = (lane % 32) // 8
    counter = lane // 32 * 16 + lane % 8 * 2
    words: tl.constexpr = 0xFFFFFFFF
    high = tl.zeros([BLOCK], tl.uint64)
    low = tl.zeros([BLOCK], tl.uint64)
    for half in tl.static_range(2):
        w0 = (counter + half).to(tl.uint64) & words
        w1 = tl.zeros([BLOCK], tl.uint64) + (tl.load(call).to(tl.uint64) & words)
        w2 = tl.zeros([BLOCK], tl.uint64) + rank.to(tl.uint64)
        w3 = tl.zeros([BLOCK], tl.uint64) + stream.to(tl.uint64)
        k0 = tl.zeros([BLOCK], tl.uint64) + seed_low.to(tl.uint64)
        k1 = tl.zeros([BLOCK], tl.uint64) + seed_high.to(tl.uint64)
        for _ in range(10):
            a = w0 * 0xD2511F53
            b = w2 * 0xCD9E8D57
            w0 = (b >> 32) ^ w1 ^ k0
            w1 = b & words
            w2 = (a >> 32) ^ w3 ^ k1
            w3 = a & words
            k0 = (k0 + 0x9E3779B9) & words
            k1 = (k1 + 0xBB67AE85) & words
        chosen = tl.where(word == 0, w0, tl.where(word == 1, w1, tl.where(word == 2, w2, w3)))
        if half == 0:
            high = chosen
        else:
            low = chosen
    wide = size.to(tl.uint64)
    position = (high * wide + ((low * wide) >> 32)) >> 32
    tl.store(positions + lane, position.to(tl.int64), mask=lane < count)
