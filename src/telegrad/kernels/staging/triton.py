"""Staging with Triton kernels, which read and write pinned memory where it lies: what is not there does not travel.

Bytes over the bus: of every staged entry 4 and its value; of a sparse sum as many, of a dense one its values. In the
GPU's memory: of every staged entry its index and value; of a sum all of ``out`` once, and 32 bytes around each place
of an entry that no neighbour shares."""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from telegrad.kernels.staging import DENSE
from telegrad.kernels.triton import BLOCK, KINDS, bits_of, canonical, launch, rounded, widened
from telegrad.sparse_vector.formats import as_bits

# Triton kernels between a GPU's memory and pinned memory of the host. Values are bits. Positions are 64 bits wide.


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


@triton.jit(do_not_specialize=["count", "size"])
def scatter_entries(
    dense,
    indices,
    values,
    count,
    size,
    held,  # int64: how many of the ``count`` entries there are
    ADDS: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """dense[index] = value, or dense[index] + value where ADDS."""
    lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (lane < count) & (lane < tl.load(held))
    position = tl.load(indices + lane, mask=inside, other=0).to(tl.int64)
    own = inside & (position >= 0) & (position < size)
    if ADDS:
        there = widened(tl.load(dense + position, mask=own, other=0), KIND)
        added = widened(tl.load(values + lane, mask=own, other=0), KIND)
        tl.store(dense + position, rounded(canonical(there + added), KIND), mask=own)
    else:
        tl.store(dense + position, tl.load(values + lane, mask=own, other=0), mask=own)


_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def stage(
    indices: torch.Tensor,
    values: torch.Tensor,
    count: torch.Tensor,
    to_count: torch.Tensor,
    to_indices: torch.Tensor,
    to_values: torch.Tensor,
) -> None:
    """``to_count[0] = count[0]``; as many entries as that says, of those that are given, into the other two.

    ``count`` (int32 or int64) has one element. What begins with ``to_`` is pinned: int64, uint32, and as
    ``values``. An int64 index beyond 32 bits becomes 2**32 - 1, which no stream has."""
    room = indices.numel()
    targets = (to_count, to_indices, _bits(to_values))
    launch(stage_entries, max(1, -(-room // BLOCK)), indices, _bits(values), count, room, *targets, BLOCK=BLOCK)


def write_sum(
    out: torch.Tensor,
    form: torch.Tensor,
    dense: torch.Tensor,
    indices: torch.Tensor,
    values: torch.Tensor,
    absent: float,
) -> None:
    """Writes all of ``out``: the sum that ``form`` (int64, one element, on the GPU) tells of.

    A dense one is in ``dense``. Entries, in the first of ``indices`` (uint32) and ``values``, are written over
    ``absent``. Of one that failed, ones in all bits: NaN. These three are pinned."""
    size = out.numel()
    if size == 0:
        return
    given = (_bits(out), form, _bits(dense), size, _bits_of(absent, out.dtype))
    launch(begin_sum, -(-size // BLOCK), *given, DENSE=DENSE, BLOCK=BLOCK)
    scatter_set(out, indices, values, form)


def add_sum(
    out: torch.Tensor, form: torch.Tensor, dense: torch.Tensor, indices: torch.Tensor, values: torch.Tensor
) -> None:
    """Adds to ``out``, float32, what ``form`` tells of, which lies as for ``write_sum``; nothing of what failed."""
    size = out.numel()
    if size == 0:
        return
    launch(add_dense, -(-size // BLOCK), out, form, dense, size, DENSE=DENSE, BLOCK=BLOCK)
    scatter_add(out, indices, values, form)


def scatter_add(dense: torch.Tensor, indices: torch.Tensor, values: torch.Tensor, held: torch.Tensor) -> None:
    """``dense[index] += value`` of the first ``held`` entries (int64, beside ``dense``), whose indices differ.

    Sums are computed in float32 and rounded once; a NaN is the one quiet NaN. A place outside ``dense`` is not
    touched. Entries may also lie in pinned memory. Does not wait."""
    _scatter(dense, indices, values, held, adds=True)


def scatter_set(dense: torch.Tensor, indices: torch.Tensor, values: torch.Tensor, held: torch.Tensor) -> None:
    """``dense[index] = value``; all else as ``scatter_add``."""
    _scatter(dense, indices, values, held, adds=False)


def _scatter(dense: torch.Tensor, indices: torch.Tensor, values: torch.Tensor, held: torch.Tensor, adds: bool) -> None:
    count = indices.numel()
    if count:
        given, kind = (bits_of, KINDS[dense.dtype]) if adds else (_bits, 0)
        arguments = (given(dense), indices, given(values), count, dense.numel(), held)
        launch(scatter_entries, -(-count // BLOCK), *arguments, ADDS=adds, KIND=kind, BLOCK=BLOCK)


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(_BITS[x.element_size()])


def _bits_of(number: float, dtype: torch.dtype) -> int:
    """As a signed integer of its width. ``number``: 0, 1 or an infinity, of integers their largest or least one."""
    name = "uint16" if dtype == torch.bfloat16 else str(dtype).removeprefix("torch.")
    return int(as_bits(number, np.dtype(name)).view(f"i{dtype.itemsize}"))
