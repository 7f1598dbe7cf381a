"""Triton kernels of error feedback. 16-bit floats are bits, as in ``ops.triton.floats``; positions are 64 bits wide."""

from __future__ import annotations

import triton
import triton.language as tl

from telegrad.ops.triton.floats import rounded, widened
from telegrad.ops.triton.parts import part_of, row_of


@triton.jit
def is_finite(x):
    """Of float32."""
    return (x.to(tl.int32, bitcast=True) & 0x7F800000) != 0x7F800000


@triton.jit
def move_velocity(
    velocity,
    gradient,
    out,
    size,
    momentum,
    active,  # int64: 0 where nothing is to be done
    fault,
    NESTEROV: tl.constexpr,
    KIND: tl.constexpr,  # of the gradient
    OUT_KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Reads 4 bytes of every element and its gradient, writes 4 and what is passed on; if not active, none."""
    where = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (where < size) & (tl.load(active) > 0)
    before = tl.load(velocity + where, mask=inside, other=0.0)
    given = widened(tl.load(gradient + where, mask=inside, other=0), KIND)
    if NESTEROV:
        moved = (before + given) * momentum
        passed = given + moved
    else:
        moved = before * momentum + given
        passed = moved
    tl.store(velocity + where, tl.where(is_finite(moved), moved, 0.0), mask=inside)
    stored = rounded(passed, OUT_KIND)
    tl.store(out + where, stored, mask=inside)
    bad = inside & (~(is_finite(moved) & is_finite(widened(stored, OUT_KIND))))
    tl.atomic_or(fault, 1, mask=tl.max(bad.to(tl.int32)) > 0, sem="relaxed")


@triton.jit(do_not_specialize=["parts", "steps"])
def collect_entries(
    table,
    parts,
    steps,
    indices,
    values,
    counts,  # by part, as ends
    broken,  # by place, as faults
    ends,
    to_indices,
    to_values,
    faults,
    most,  # if LIMITS, which is for float32
    KIND: tl.constexpr,
    MASKS: tl.constexpr,
    LIMITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Reads 8 bytes of every entry that there is, and writes as many, and 4 at its place in residual or velocity.

    Rows of the table: 0 and 1: first programs, of this and of ``clear_nonfinite``; 2, 3: where a part's chosen entries
    begin and end; 4: its index in the sum; 5: its place among gradients; 6: elements of the residual; 7, 8: addresses
    of residual and velocity.
    """
    program = tl.program_id(0)
    part = part_of(table, parts, steps, program)
    lane = (program - tl.load(table + part)) * BLOCK + tl.arange(0, BLOCK)
    start = tl.load(row_of(table, parts, 2) + part)
    room = tl.load(row_of(table, parts, 3) + part) - start
    offset = tl.load(row_of(table, parts, 4) + part)
    place = tl.load(row_of(table, parts, 5) + part)
    residual = tl.load(row_of(table, parts, 7) + part).to(tl.pointer_type(tl.float32))
    counted = tl.load(counts + part)
    is_broken = tl.load(broken + place) > 0
    inside = (lane < counted) & (lane < room) & (~is_broken)
    index = tl.load(indices + start + lane, mask=inside, other=0)
    x = tl.load(values + start + lane, mask=inside, other=0.0)
    stored = x
    if KIND != 0:
        stored = rounded(x, KIND)
    finite = is_finite(widened(stored, KIND))
    if LIMITS:
        stored = tl.where(finite, tl.minimum(tl.maximum(x, -most), most), x)
    leaves = widened(stored, KIND)
    position = index.to(tl.int64) - offset
    if KIND != 0:
        tl.store(residual + position, x - leaves, mask=inside & finite)
    if LIMITS:
        tl.store(residual + position, x - leaves, mask=inside & finite & (tl.abs(x) > most))
    if MASKS:
        velocity = tl.load(row_of(table, parts, 8) + part).to(tl.pointer_type(tl.float32))
        tl.store(velocity + position, tl.zeros_like(x), mask=inside)
    end = tl.load(ends + part)
    to = end - counted + lane
    tl.store(to_indices + to, index, mask=inside)
    tl.store(to_values + to, stored, mask=inside)
    tl.atomic_or(faults + place, 1, mask=tl.max((inside & (~finite)).to(tl.int32)) > 0, sem="relaxed")
    alone = is_broken & (lane == 0)
    last = end - 1 + lane
    tl.store(to_indices + last, (tl.zeros_like(lane) + offset).to(tl.uint32), mask=alone)
    nothing = rounded(tl.full([BLOCK], float("nan"), tl.float32), KIND)
    tl.store(to_values + last, nothing, mask=alone)


@triton.jit(do_not_specialize=["parts", "steps"])
def clear_nonfinite(table, parts, steps, faults, BLOCK: tl.constexpr):
    """Reads no residual unless there is a fault."""
    program = tl.program_id(0)
    firsts = row_of(table, parts, 1)
    part = part_of(firsts, parts, steps, program)
    if tl.load(faults + tl.load(row_of(table, parts, 5) + part)) != 0:
        where = (program - tl.load(firsts + part)) * BLOCK + tl.arange(0, BLOCK)
        residual = tl.load(row_of(table, parts, 7) + part).to(tl.pointer_type(tl.float32))
        inside = where < tl.load(row_of(table, parts, 6) + part)
        x = tl.load(residual + where, mask=inside, other=0.0)
        tl.store(residual + where, tl.zeros_like(x), mask=inside & (~is_finite(x)))


@triton.jit
def restore_elements(x, before, size, wanted, BLOCK: tl.constexpr):
    """Reads nothing unless that is wanted."""
    where = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (where < size) & (tl.load(wanted) > 0)
    tl.store(x + where, tl.load(before + where, mask=inside, other=0.0), mask=inside)


@triton.jit
def set_unit(unit, wanted, ratio, threshold, HAS_THRESHOLD: tl.constexpr):
    """One program."""
    before, after = tl.load(unit), tl.load(wanted)
    largest = tl.full([], 1e300, tl.float64)
    fits = (after > 0) & (after.to(tl.int64, bitcast=True) < 0x7FF0000000000000)
    divisor = tl.where(fits, after, before)
    moved = tl.minimum(before / divisor, largest)
    tl.store(ratio, moved)
    tl.store(unit, divisor)
    if HAS_THRESHOLD:
        held = tl.load(threshold) * moved
        inside = (held > 0) & (held <= 3.4028234663852886e38)
        tl.store(threshold, tl.where(inside, held, 0.0))


@triton.jit
def rescale_elements(x, size, ratio, BLOCK: tl.constexpr):
    """Reads nothing if the ratio is 1. A product of float32 is exact in float64: it is rounded once."""
    where = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    given = tl.load(ratio)
    bits = given.to(tl.int64, bitcast=True)  # of numbers above 0 they have their order
    inside = (where < size) & (bits != (1023 << 52))
    near = (bits > ((1023 - 100) << 52)) & (bits < ((1023 + 100) << 52))
    factor = tl.where(near, given.to(tl.float32).to(tl.float64), given)
    product = tl.load(x + where, mask=inside, other=0.0).to(tl.float64) * factor
    largest = tl.full([BLOCK], 3.4028234663852886e38, tl.float64)
    limited = tl.minimum(tl.maximum(product, -largest), largest)
    tl.store(x + where, limited.to(tl.float32), mask=inside)
