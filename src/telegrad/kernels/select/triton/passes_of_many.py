"""Triton kernels that do for many residuals at once what those of ``passes`` and ``cuts`` do for one.

A launch takes the host tens of microseconds, longer than the device needs for a small residual. Where each residual
lies, and what is wanted of it, stands in a table (see ``kernels.triton.parts``), made by ``many.reuse_table``; what is
found out on the way lies in arrays of one number for each. Residuals without programs are passed over.

Indices are positions plus the part's offset, and the gradients are one array, in which that is their place, too.
"""

from __future__ import annotations

import triton
import triton.language as tl

from telegrad.kernels.select.triton.passes import (
    add_digits,
    added,
    copy_marked,
    move_blocks,
    ones_of,
    put_digit,
    put_marks,
    tally_blocks,
)
from telegrad.kernels.triton import part_of, row_of

# The table's rows. Of programs, and of what is written by block, the first of each part.
PASSES: tl.constexpr = tl.constexpr(0)
GROUPS: tl.constexpr = tl.constexpr(1)
CUTS: tl.constexpr = tl.constexpr(2)
TALLIES: tl.constexpr = tl.constexpr(3)
RESIDUAL: tl.constexpr = tl.constexpr(4)  # its address
SIZE: tl.constexpr = tl.constexpr(5)
WANTED: tl.constexpr = tl.constexpr(6)  # k
START: tl.constexpr = tl.constexpr(7)  # of its entries among those of all parts
OFFSET: tl.constexpr = tl.constexpr(8)
PLACE: tl.constexpr = tl.constexpr(9)  # in ``active``
THRESHOLD: tl.constexpr = tl.constexpr(10)  # its address: float64
CALLS: tl.constexpr = tl.constexpr(11)  # its address: int64

_SUMMED: tl.constexpr = tl.constexpr(1024)  # totals of groups that are added at once


@triton.jit
def number_of(table, parts, part, ROW: tl.constexpr):
    """What the row says of the part."""
    return tl.load(row_of(table, parts, ROW) + part)


@triton.jit
def residual_of(table, parts, part):
    """Where it begins."""
    return number_of(table, parts, part, RESIDUAL).to(tl.pointer_type(tl.float32))


@triton.jit
def room_of(table, parts, part):
    """The most entries of the part that leave."""
    size = number_of(table, parts, part, SIZE)
    return tl.minimum(2 * number_of(table, parts, part, WANTED), size)


@triton.jit(do_not_specialize=["parts", "steps"])
def fused_pass_of_many(
    table,
    parts,
    steps,
    gradient,
    bounds,  # int64, of each part the lowest key that is marked
    marks,  # uint32, of all blocks of all parts
    reached,  # int64: becomes 0, for ``count_marks_of_many``
    active,  # int64: if HELD, 0 where nothing is to be done
    FLIP: tl.constexpr,
    MASK: tl.constexpr,
    HELD: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """As ``fused_pass`` with SELECT. Whole blocks whose vectors are aligned are read and written as such, which takes
    a mask that does not tell their elements apart."""
    words: tl.constexpr = BLOCK // 32
    program = tl.program_id(0)
    part = part_of(table, parts, steps, program)
    block = program - number_of(table, parts, part, PASSES)
    first = block.to(tl.int64) * BLOCK
    inside = tl.minimum(number_of(table, parts, part, SIZE) - first, BLOCK).to(tl.int32)
    if HELD:
        takes_part = tl.load(active + number_of(table, parts, part, PLACE)) > 0
        inside = tl.where(takes_part, inside, 0)
    own = residual_of(table, parts, part)
    given = gradient + number_of(table, parts, part, OFFSET)
    lowest = tl.load(bounds + part)
    into = marks + program.to(tl.int64) * words
    lane = tl.arange(0, words)[:, None] * 32 + tl.arange(0, 32)[None, :]
    if (inside == BLOCK) & ((own.to(tl.int64) | given.to(tl.int64)) % 16 == 0):
        # Pointers of their own: what is said of one holds wherever that is used.
        vectors, their = tl.multiple_of(own + first, 16), tl.multiple_of(given + first, 16)
        mark_block(vectors, their, lane, tl.full([words, 32], True, tl.int1), lowest, into, FLIP, MASK, ADD, words)
    else:
        mark_block(own + first, given + first, lane, lane < inside, lowest, into, FLIP, MASK, ADD, words)
    tl.store(reached + part, tl.zeros([], tl.int64), mask=block == 0)


@triton.jit
def mark_block(
    own,
    gradient,
    lane,
    inside,
    lowest,
    marks,
    FLIP: tl.constexpr,
    MASK: tl.constexpr,
    ADD: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Adds the gradient to a block, and marks what reaches ``lowest``."""
    x = added(own, gradient, lane, inside, ADD)
    key = (x.to(tl.int32, bitcast=True) ^ FLIP) & MASK
    put_marks(marks, inside & (key >= lowest), WORDS)


@triton.jit
def marked(table, parts, part, marks, group, WORDS: tl.constexpr, GROUP: tl.constexpr):
    """The words of the part's group, and where they are among those of the part. WORDS: of a block."""
    begin = number_of(table, parts, part, PASSES) * WORDS
    words = number_of(table, parts, part + 1, PASSES) * WORDS - begin
    at = group.to(tl.int64) * GROUP + tl.arange(0, GROUP)
    return at, tl.load(marks + begin + at, mask=at < words, other=0)


@triton.jit(do_not_specialize=["parts", "steps"])
def count_marks_of_many(
    table,
    parts,
    steps,
    marks,
    totals,  # int64, of every group
    reached,
    WORDS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """As ``count_marks``."""
    program = tl.program_id(0)
    part = part_of(row_of(table, parts, GROUPS), parts, steps, program)
    group = program - number_of(table, parts, part, GROUPS)
    _, word = marked(table, parts, part, marks, group, WORDS, GROUP)
    total = tl.sum(ones_of(word)).to(tl.int64)
    tl.store(totals + program, total)
    tl.atomic_add(reached + part, total, sem="relaxed")


@triton.jit(do_not_specialize=["parts", "steps"])
def take_marked_of_many(
    table,
    parts,
    steps,
    marks,
    totals,
    usable,  # int64: 0 where nothing is to be done
    indices,
    values,
    WORDS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """As ``take_marked`` with CLEAR; a part's entries go where its own begin."""
    program = tl.program_id(0)
    part = part_of(row_of(table, parts, GROUPS), parts, steps, program)
    if tl.load(usable + part) > 0:
        begin = number_of(table, parts, part, GROUPS)
        group = program - begin
        at, word = marked(table, parts, part, marks, group, WORDS, GROUP)
        count = ones_of(word)
        place = (tl.cumsum(count, 0) - count).to(tl.int64)
        for first in range(0, group, _SUMMED):
            before = first + tl.arange(0, _SUMMED)
            place += tl.sum(tl.load(totals + begin + before, mask=before < group, other=0))
        start, offset = number_of(table, parts, part, START), number_of(table, parts, part, OFFSET)
        residual, most = residual_of(table, parts, part), room_of(table, parts, part)
        copy_marked(residual, at, word, count, place, most, indices + start, values + start, offset, True)


@triton.jit
def cut_program_of(table, parts, steps):
    """The part that this program ranks or cuts, its number among the part's programs, and how many these are."""
    part = part_of(row_of(table, parts, CUTS), parts, steps, tl.program_id(0))
    first = number_of(table, parts, part, CUTS)
    return part, tl.program_id(0) - first, number_of(table, parts, part + 1, CUTS) - first


@triton.jit(do_not_specialize=["parts", "steps"])
def count_digits_of_many(
    table,
    parts,
    steps,
    lengths,  # int64, of each part how many of its elements are ranked
    found,  # int64, two of each
    histograms,  # int64, zeros: the part's of this digit lie every STRIDE numbers
    STRIDE: tl.constexpr,
    FLIP: tl.constexpr,
    MASK: tl.constexpr,
    LOWEST: tl.constexpr,
    SHIFT: tl.constexpr,
    WIDTH: tl.constexpr,
    FIRST: tl.constexpr,
    CUT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """As ``count_digits``."""
    part, program, programs = cut_program_of(table, parts, steps)
    values, k = residual_of(table, parts, part), number_of(table, parts, part, WANTED)
    size, own, histogram = tl.load(lengths + part), found + 2 * part, histograms + part * STRIDE
    if size > 0:
        add_digits(values, size, own, histogram, program, programs, FLIP, MASK, LOWEST, SHIFT, WIDTH, FIRST, BLOCK)
        put_digit(histogram, own, k, programs, WIDTH, FIRST, CUT)
    else:  # mostly there is nothing to rank: then the cut is behind all there is
        tl.store(own, tl.zeros([], tl.int64), mask=program == 0)
        tl.store(own + 1, tl.zeros([], tl.int64), mask=program == 0)


@triton.jit(do_not_specialize=["parts", "steps"])
def count_cut_of_many(
    table,
    parts,
    steps,
    lengths,
    cut,  # int64, two of each
    tallies,  # int64, two of each block of all parts
    FLIP: tl.constexpr,
    MASK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """As ``count_cut``."""
    part, program, programs = cut_program_of(table, parts, steps)
    before = number_of(table, parts, part, TALLIES)
    blocks = number_of(table, parts, part + 1, TALLIES) - before
    values, size, own = residual_of(table, parts, part), tl.load(lengths + part), cut + 2 * part
    tally_blocks(values, size, own, tallies + 2 * before, blocks, program, programs, FLIP, MASK, BLOCK)


@triton.jit(do_not_specialize=["parts", "steps"])
def move_cut_of_many(
    table,
    parts,
    steps,
    lengths,
    cut,
    tallies,
    indices,
    moved,
    totals,  # int64: of each part, how many are cut off
    FLIP: tl.constexpr,
    MASK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """As ``move_cut``."""
    part, program, programs = cut_program_of(table, parts, steps)
    before = number_of(table, parts, part, TALLIES)
    blocks = number_of(table, parts, part + 1, TALLIES) - before
    residual, start = residual_of(table, parts, part), number_of(table, parts, part, START)
    move_blocks(
        residual,
        indices,
        residual,
        tl.load(lengths + part),
        cut + 2 * part,
        tallies + 2 * before,
        blocks,
        room_of(table, parts, part),
        indices + start,
        moved + start,
        totals + part,
        number_of(table, parts, part, OFFSET),
        program,
        programs,
        FLIP,
        MASK,
        False,
        False,
        False,
        BLOCK,
    )


# Triton kernels that decide, for many residuals at once, whether a threshold is used again, and what it is next.
# In torch's operations each of these is a dozen launches, which take longer than the passes over all but long
# residuals.

BEYOND = 1 << 31
"""A key that no entry reaches."""


@triton.jit
def said_of(table, parts, part, inside, ROW: tl.constexpr):
    """What the table says of these parts."""
    return tl.load(row_of(table, parts, ROW) + part, mask=inside, other=0)


@triton.jit
def takes_part(table, parts, part, inside, active):
    """Which of them do."""
    return tl.load(active + said_of(table, parts, part, inside, PLACE), mask=inside, other=0) > 0


@triton.jit(do_not_specialize=["parts", "interval"])
def set_bounds(table, parts, bounds, reuses, interval, BEYOND: tl.constexpr, BLOCK: tl.constexpr):
    """Into ``bounds``, int64, the key of each threshold that is to be used again, BEYOND where it is not; into
    ``reuses``, int64, 1 or 0."""
    part = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = part < parts
    threshold = said_of(table, parts, part, inside, THRESHOLD).to(tl.pointer_type(tl.float64))
    calls = said_of(table, parts, part, inside, CALLS).to(tl.pointer_type(tl.int64))
    kept = tl.load(threshold, mask=inside, other=0.0)
    wanted = (kept > 0) & (tl.load(calls, mask=inside, other=0) < interval)
    key = kept.to(tl.float32).to(tl.int32, bitcast=True).to(tl.int64)
    tl.store(bounds + part, tl.where(wanted, key, BEYOND), mask=inside)
    tl.store(reuses + part, wanted.to(tl.int64), mask=inside)


@triton.jit(do_not_specialize=["parts"])
def decide_reuse(
    table,
    parts,
    reuses,
    reached,  # int64: how many entries reach each bound
    active,  # int64, by place: if HELD, 0 where nothing is to be done
    usable,  # int64: becomes ``reached`` where these are taken, else 0
    listed,  # int64: or where these are ranked, as a sample has found a bound
    lengths,  # int64: or all there are, where all are ranked
    SEARCHES: tl.constexpr,  # thresholds are searched for
    HELD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Entries that reach a threshold are taken if they are k/2 (SEARCHES: k) to the most there may be; those that reach
    a bound of a sample are ranked if they are k (2k + 1) to what ``launches.room_of`` says. BEYOND no entry reaches."""
    part = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = part < parts
    found = tl.load(reached + part, mask=inside, other=0)
    k = said_of(table, parts, part, inside, WANTED)
    size = said_of(table, parts, part, inside, SIZE)
    wanted = tl.load(reuses + part, mask=inside, other=0) > 0
    scarce = k if SEARCHES else (k + 1) // 2
    least = 2 * k + 1 if SEARCHES else k
    taken = tl.where(wanted & (found >= scarce) & (found <= tl.minimum(2 * k, size)), found, 0)
    room = tl.minimum(size, tl.maximum(2 * least, size // 64))
    ranked = tl.where((~wanted) & (found >= least) & (found <= room), found, 0)
    ranks = (taken == 0) & (ranked == 0)
    if HELD:
        ranks = ranks & takes_part(table, parts, part, inside, active)
    tl.store(usable + part, taken, mask=inside)
    tl.store(listed + part, ranked, mask=inside)
    tl.store(lengths + part, tl.where(ranks, size, 0), mask=inside)


@triton.jit(do_not_specialize=["parts"])
def follow_reuse(
    table,
    parts,
    usable,
    cuts,  # int64, two of each: where a ranking has cut
    active,
    moved,  # int64: how many entries that has moved; becomes how many were moved at all
    GAIN: tl.constexpr,
    TINY: tl.constexpr,
    HELD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Thresholds that were used follow the count: * (count / k) ** GAIN; others become the lowest magnitude moved."""
    part = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = part < parts
    threshold = said_of(table, parts, part, inside, THRESHOLD).to(tl.pointer_type(tl.float64))
    calls = said_of(table, parts, part, inside, CALLS).to(tl.pointer_type(tl.int64))
    taken = tl.load(usable + part, mask=inside, other=1)
    k = tl.maximum(said_of(table, parts, part, inside, WANTED), 1)
    kept = tl.load(threshold, mask=inside, other=0.0)
    number = tl.load(calls, mask=inside, other=0)
    ratio = tl.maximum(taken, 1).to(tl.float64) / k.to(tl.float64)
    corrected = tl.maximum(kept * tl.exp(GAIN * tl.log(ratio)), TINY)
    last = tl.load(cuts + 2 * part, mask=inside, other=0)
    ties = tl.load(cuts + 2 * part + 1, mask=inside, other=0)
    bits = tl.where(ties > 0, last, last + 1).to(tl.int32)
    lowest = tl.maximum(bits.to(tl.float32, bitcast=True).to(tl.float64), TINY)
    is_finite = (bits & 0x7F800000) != 0x7F800000
    follows = tl.where(taken > 0, corrected, tl.where(is_finite, lowest, 0.0))
    number_next = tl.where(taken > 0, number + 1, 1)
    if HELD:
        changes = takes_part(table, parts, part, inside, active)
        follows = tl.where(changes, follows, kept)
        number_next = tl.where(changes, number_next, number)
    tl.store(threshold, follows, mask=inside)
    tl.store(calls, number_next, mask=inside)
    tl.store(moved + part, taken + tl.load(moved + part, mask=inside, other=0), mask=inside)
