"""Triton kernels that read a whole residual: the fused pass, in which the chosen entries leave it, and sums over it.

No kernel waits for another block, and none holds instructions of one maker's GPUs: the same source serves CUDA and HIP.
Positions are 64 bits wide. FLIP and MASK make of an entry's bits its key (see ``sources.Side``); the key of a lane
outside is -1, which reaches nothing.

Triton adds float32 as IEEE says, denormals included. What a GPU does otherwise than a CPU: a NaN that it computes is
the canonical one, whatever NaN went in.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LANES: tl.constexpr = tl.constexpr(16)  # of a block's packed entries, which are few
_SUMMED: tl.constexpr = tl.constexpr(1024)  # totals of groups that are added at once


@triton.jit(do_not_specialize=["room"])
def fused_pass(
    residual,
    gradient,
    size,
    bound,  # the lowest key that leaves: int64, or with KNOWN the number itself
    room,
    indices,  # of what left, in whatever order blocks came: uint32[room]
    values,
    cursor,  # int64: how many entries reach the bound, 0 at first
    starts,  # of every block: where its entries lie, and how many they are
    counts,
    totals,  # int64, of every GROUP blocks, if that is not 0: how many entries of theirs reach the bound, 0 at first
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
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """residual += gradient; all that reaches ``bound`` is packed and cleared: whole blocks, as long as there is room.

    Reads 8 and writes 4 bytes of every element (without a gradient: reads 4), and writes 8 of every packed entry.
    """
    block = tl.program_id(0)
    first = block.to(tl.int64) * BLOCK
    lane = tl.arange(0, BLOCK)  # 32 bits: positions of 64 in every lane would take twice the registers
    inside = lane < tl.minimum(size - first, BLOCK).to(tl.int32)
    if HELD:
        inside = inside & (tl.load(active) > 0)
    own = residual + first
    x = tl.load(own + lane, mask=inside, other=0.0)
    if ADD:
        x += tl.load(gradient + first + lane, mask=inside, other=0.0)
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
        reached = inside & (key >= lowest)
        flags = reached.to(tl.int32)
        count = tl.sum(flags)
        # Where a block's entries lie hangs on which block came first; order_blocks() puts them in order.
        start = tl.atomic_add(cursor, count.to(tl.int64), sem="relaxed")
        tl.store(starts + block, start)
        tl.store(counts + block, count)
        if GROUP > 0:
            tl.atomic_add(totals + block // GROUP, count.to(tl.int64), sem="relaxed")
        moved = reached & (start + count <= room)
        place = tl.cumsum(flags, 0) - flags
        tl.store(indices + start + place, first + lane, mask=moved)
        tl.store(values + start + place, x, mask=moved)
        if ADD:
            tl.store(own + lane, tl.where(moved, 0.0, x), mask=inside)
        else:
            tl.store(own + lane, tl.zeros_like(x), mask=moved)
    elif ADD:
        tl.store(own + lane, x, mask=inside)


@triton.jit(do_not_specialize=["blocks", "least", "room", "offset"])
def order_blocks(
    indices,
    values,
    starts,
    counts,
    totals,
    blocks,
    reached,  # int64: how many entries were packed, if all had room
    bound,
    usable,  # int64: 0 where nothing is to be done; DECIDE: becomes ``reached`` if that is in [least, room], else 0
    least,
    room,
    to_indices,
    to_values,
    offset,
    DECIDE: tl.constexpr,
    FEWER: tl.constexpr,  # than ``least`` are enough where the bound is 1, which all of a side reach
    GROUP: tl.constexpr,
):
    """Copies what a fused pass packed, block after block: ascending positions, plus ``offset``. A program has GROUP
    blocks; what lies before them the totals of the groups before tell."""
    group = tl.program_id(0)
    if DECIDE:
        found = tl.load(reached)
        enough = found >= least
        if FEWER:
            enough = enough | (tl.load(bound) == 1)
        taken = tl.where(enough & (found <= room), found, 0)
        tl.store(usable, taken, mask=group == 0)
    else:
        taken = tl.load(usable)
    if taken > 0:
        block = group * GROUP + tl.arange(0, GROUP)
        count = tl.load(counts + block, mask=block < blocks, other=0)
        start = tl.load(starts + block, mask=block < blocks, other=0)
        begin = tl.cumsum(count, 0).to(tl.int64) - count
        for first in range(0, group, _SUMMED):
            before = first + tl.arange(0, _SUMMED)
            begin += tl.sum(tl.load(totals + before, mask=before < group, other=0))
        for first in range(0, tl.max(count), _LANES):
            lane = (first + tl.arange(0, _LANES))[None, :]
            own = lane < count[:, None]
            source = start[:, None] + lane
            target = begin[:, None] + lane
            index = tl.load(indices + source, mask=own, other=0).to(tl.int64) + offset
            tl.store(to_indices + target, index, mask=own)
            tl.store(to_values + target, tl.load(values + source, mask=own, other=0.0), mask=own)


@triton.jit(do_not_specialize=["room", "blocks"])
def restore_blocks(
    residual,
    room,
    indices,
    values,
    starts,
    counts,
    blocks,
    usable,  # int64: unless it is 0 nothing is done
    GROUP: tl.constexpr,
):
    """Undoes the moves of a fused pass: what it packed is in the residual again."""
    if tl.load(usable) == 0:
        block = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
        start = tl.load(starts + block, mask=block < blocks, other=0)
        count = tl.load(counts + block, mask=block < blocks, other=0)
        count = tl.where(start + count <= room, count, 0)
        for first in range(0, tl.max(count), _LANES):
            lane = (first + tl.arange(0, _LANES))[None, :]
            own = lane < count[:, None]
            source = start[:, None] + lane
            position = tl.load(indices + source, mask=own, other=0).to(tl.int64)
            tl.store(residual + position, tl.load(values + source, mask=own, other=0.0), mask=own)


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
