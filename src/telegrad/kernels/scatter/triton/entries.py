"""Triton kernels that go over a stream's entries. Positions are 64 bits wide."""

from __future__ import annotations

import triton
import triton.language as tl

from telegrad.kernels.triton.floats import canonical, rounded, widened


@triton.jit(do_not_specialize=["count", "size", "base"])
def scatter_entries(
    dense,
    indices,
    values,
    count,
    size,
    base,
    held,  # int64: how many of the ``count`` entries there are
    HOW: tl.constexpr,
    KIND: tl.constexpr,
    HELD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """dense[index - base] = value (HOW = 0), dense[index - base] + value (1) or 0 (2)."""
    lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < count
    if HELD:
        inside = inside & (lane < tl.load(held))
    position = tl.load(indices + lane, mask=inside, other=0).to(tl.int64) - base
    own = inside & (position >= 0) & (position < size)
    if HOW == 0:
        tl.store(dense + position, tl.load(values + lane, mask=own, other=0), mask=own)
    elif HOW == 1:
        there = widened(tl.load(dense + position, mask=own, other=0), KIND)
        added = widened(tl.load(values + lane, mask=own, other=0), KIND)
        tl.store(dense + position, rounded(canonical(there + added), KIND), mask=own)
    else:
        tl.store(dense + position, tl.zeros([BLOCK], dense.dtype.element_ty), mask=own)


@triton.jit(do_not_specialize=["count", "size", "base"])
def count_faults(indices, count, size, base, faults, BLOCK: tl.constexpr):
    """Adds to ``faults`` (int64) how many indices are not above the one before, or not in [base, base + size)."""
    lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < count
    index = tl.load(indices + lane, mask=inside, other=0).to(tl.int64)
    follows = inside & (lane > 0)
    before = tl.load(indices + lane - 1, mask=follows, other=0).to(tl.int64)
    # Below `base` the difference is not looked at: it may be beyond 64 bits.
    placed = (index >= base) & (index - base < size)
    wrong = inside & ((placed == 0) | (follows & (index <= before)))
    tl.atomic_add(faults, tl.sum(wrong.to(tl.int64)), sem="relaxed")
