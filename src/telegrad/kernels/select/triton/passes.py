"""Triton kernels that read a whole residual: the fused pass, which marks what is to leave, and sums over it.

What is marked leaves in a kernel of its own, by which time it is known how much there is: nothing need be put back.
No kernel waits for another block, and none holds instructions of one maker's GPUs: the same source serves CUDA and HIP.
Positions are 64 bits wide. FLIP and MASK make of an entry's bits its key (see ``sources.Side``); the key of a lane
outside is -1, which reaches nothing. Marks are bits of words of 32, the lowest bit the first entry's.

Triton adds float32 as IEEE says, denormals included. What a GPU does otherwise than a CPU: a NaN that it computes is
the canonical one, whatever NaN went in.
"""

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

    Reads 8 and writes 4 bytes of every element (without a gradient: reads 4), and writes a bit.
    """
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


@triton.jit(do_not_specialize=["size", "offset"])
def move_listed(residual, positions, size, indices, values, offset, BLOCK: tl.constexpr):
    """Moves the entries at ``positions`` (int64, ascending)."""
    lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < size
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
