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

_STEP: tl.constexpr = tl.constexpr(256)  # of a block's packed entries: there are few, and a program has as many threads


@triton.jit(do_not_specialize=["room"])
def fused_pass(
    residual,
    gradient,
    size,
    bound,  # int64: the lowest key that leaves
    room,
    indices,  # of what left, in whatever order blocks came: uint32[room]
    values,
    cursor,  # int64: how many entries reach the bound, 0 at first
    starts,  # of every block: where its entries lie, and how many they are
    counts,
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
    BLOCK: tl.constexpr,
):
    """residual += gradient; all that reaches ``bound`` is packed and cleared: whole blocks, as long as there is room.

    Reads 8 and writes 4 bytes of every element (without a gradient: reads 4), and writes 8 of every packed entry.
    """
    block = tl.program_id(0)
    where = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = where < size
    if HELD:
        inside = inside & (tl.load(active) > 0)
    x = tl.load(residual + where, mask=inside, other=0.0)
    if ADD:
        x += tl.load(gradient + where, mask=inside, other=0.0)
    bits = x.to(tl.int32, bitcast=True)
    key = tl.where(inside, (bits ^ FLIP) & MASK, -1)
    if MOMENTS:
        magnitude = tl.where(inside & (key > 0), key, 0).to(tl.float32, bitcast=True)
        tl.store(sums + block, tl.sum(magnitude.to(tl.float64)))
        tl.store(sides + block, tl.sum((key > 0).to(tl.int32)))
        tl.store(tops + block, tl.max(key))
        tl.store(largest + block, tl.max(tl.where(inside, bits & 0x7FFFFFFF, 0)))
    if SELECT:
        reached = inside & (key >= tl.load(bound))
        flags = reached.to(tl.int32)
        count = tl.sum(flags)
        # Where a block's entries lie hangs on which block came first; order_blocks() puts them in order.
        start = tl.atomic_add(cursor, count.to(tl.int64), sem="relaxed")
        tl.store(starts + block, start)
        tl.store(counts + block, count)
        moved = reached & (start + count <= room)
        place = start + tl.cumsum(flags, 0) - flags
        tl.store(indices + place, where, mask=moved)
        tl.store(values + place, x, mask=moved)
        if ADD:
            tl.store(residual + where, tl.where(moved, 0.0, x), mask=inside)
        else:
            tl.store(residual + where, tl.zeros_like(x), mask=moved)
    elif ADD:
        tl.store(residual + where, x, mask=inside)


@triton.jit(do_not_specialize=["offset"])
def order_blocks(
    indices,
    values,
    starts,
    counts,
    ends,  # int64, of every block: entries of it and of those before
    usable,  # int64: 0 where nothing is to be done
    to_indices,
    to_values,
    offset,
):
    """Copies what a fused pass packed, block after block: ascending positions, plus ``offset``."""
    block = tl.program_id(0)
    if tl.load(usable) > 0:
        count = tl.load(counts + block)
        start = tl.load(starts + block)
        begin = tl.load(ends + block) - count
        for first in range(0, count, _STEP):
            lane = first + tl.arange(0, _STEP)
            own = lane < count
            index = tl.load(indices + start + lane, mask=own, other=0).to(tl.int64) + offset
            tl.store(to_indices + begin + lane, index, mask=own)
            tl.store(to_values + begin + lane, tl.load(values + start + lane, mask=own, other=0.0), mask=own)


@triton.jit(do_not_specialize=["room"])
def restore_blocks(
    residual,
    room,
    indices,
    values,
    starts,
    counts,
    usable,  # int64: unless it is 0 nothing is done
):
    """Undoes the moves of a fused pass: what it packed is in the residual again."""
    block = tl.program_id(0)
    if tl.load(usable) == 0:
        count = tl.load(counts + block)
        start = tl.load(starts + block)
        if start + count <= room:
            for first in range(0, count, _STEP):
                lane = first + tl.arange(0, _STEP)
                own = lane < count
                position = tl.load(indices + start + lane, mask=own, other=0).to(tl.int64)
                tl.store(residual + position, tl.load(values + start + lane, mask=own, other=0.0), mask=own)


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
