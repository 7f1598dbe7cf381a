"""Triton kernels between a GPU's memory and pinned memory of the host. Values are bits. Positions are 64 bits wide."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["room"])
def stage_entries(indices, values, count, room, to_count, to_indices, to_values, BLOCK: tl.constexpr):
    """Copies ``count`` and the entries that it counts, as far as there is ``room``. ``to_*``: pinned."""
    lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    counted = tl.load(count).to(tl.int64)
    if tl.program_id(0) == 0:
        tl.store(to_count, counted)
    inside = (lane < counted) & (lane < room)
    index = tl.load(indices + lane, mask=inside, other=0).to(tl.int64)
    fits = (index >= 0) & (index < 0xFFFFFFFF)
    tl.store(to_indices + lane, tl.where(fits, index, 0xFFFFFFFF).to(tl.uint32), mask=inside)
    tl.store(to_values + lane, tl.load(values + lane, mask=inside, other=0), mask=inside)


@triton.jit(do_not_specialize=["size", "absent"])
def begin_sum(out, form, dense, size, absent, DENSE: tl.constexpr, BLOCK: tl.constexpr):
    """All of ``out``: ``dense`` (pinned) if form is DENSE, ``absent`` if entries are to come, else ones in all bits."""
    lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < size
    shape = tl.load(form)
    there = tl.load(dense + lane, mask=lane < tl.where(shape == DENSE, size, 0), other=0)
    without = tl.where(shape < 0, -1, absent).to(out.dtype.element_ty)
    tl.store(out + lane, tl.where(shape == DENSE, there, without), mask=inside)


@triton.jit(do_not_specialize=["size"])
def add_dense(out, form, dense, size, DENSE: tl.constexpr, BLOCK: tl.constexpr):
    """``out`` += ``dense`` (pinned) if form is DENSE; otherwise reads nothing."""
    lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < tl.where(tl.load(form) == DENSE, size, 0)
    added = tl.load(dense + lane, mask=inside, other=0.0)
    tl.store(out + lane, tl.load(out + lane, mask=inside, other=0.0) + added, mask=inside)
