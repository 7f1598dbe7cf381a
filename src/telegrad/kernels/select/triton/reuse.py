"""Triton kernels that decide, for many residuals at once, whether a threshold is used again, and what it is next.

In torch's operations each of these is a dozen launches, which take longer than the passes over all but long residuals.
"""

from __future__ import annotations

import triton
import triton.language as tl

from telegrad.kernels.select.triton.passes_of_many import CALLS, PLACE, SIZE, THRESHOLD, WANTED
from telegrad.kernels.triton.parts import row_of

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
    HELD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Entries that reach a threshold are taken if they are k/2 to the most there may be; those that reach a bound of a
    sample are ranked if they are k to what ``ranked.room_of`` says. BEYOND no entry reaches."""
    part = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = part < parts
    found = tl.load(reached + part, mask=inside, other=0)
    k = said_of(table, parts, part, inside, WANTED)
    size = said_of(table, parts, part, inside, SIZE)
    wanted = tl.load(reuses + part, mask=inside, other=0) > 0
    taken = tl.where(wanted & (2 * found >= k) & (found <= tl.minimum(2 * k, size)), found, 0)
    room = tl.minimum(size, tl.maximum(2 * k, size // 64))
    ranked = tl.where((~wanted) & (found >= k) & (found <= room), found, 0)
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
