"""Error feedback with Triton kernels. What is not to be done reads and writes nothing of a residual.

None of the functions waits. Each is one launch, however many parts it has; a table is what it knows of them: int64,
made in host memory, to be copied to the device, and good as long as arrays stay where they are. ``faults`` (int32, one
for each gradient) become 1 where something that is not finite is found."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from telegrad.kernels.feedback import Collected, Kept, Moved, Remade
from telegrad.kernels.triton import BLOCK, KINDS, bits_of, by_parts, launch, part_of, rounded, row_of, table_of, widened

# The kernels. 16-bit floats are bits, as in `kernels.triton`; positions have 64 bits.


@triton.jit
def is_finite(x):
    """Of float32."""
    return (x.to(tl.int32, bitcast=True) & 0x7F800000) != 0x7F800000


@triton.jit(do_not_specialize=["parts", "steps"])
def move_velocities(
    table,  # rows: first programs; addresses of velocities; their elements; where gradients begin; their places
    parts,
    steps,
    gradient,
    out,
    momentum,
    active,  # int64, by place: 0 where nothing is to be done
    faults,  # int32, by place
    NESTEROV: tl.constexpr,
    KIND: tl.constexpr,  # of the gradient
    OUT_KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Reads 4 bytes of every element and its gradient, writes 4 and what is passed on; if not active, none. Whole
    blocks that are aligned as such: see ``passes_of_many.fused_pass_of_many``."""
    program = tl.program_id(0)
    part = part_of(table, parts, steps, program)
    first = (program - tl.load(table + part)) * BLOCK
    own = tl.load(row_of(table, parts, 1) + part).to(tl.pointer_type(tl.float32))
    begin = tl.load(row_of(table, parts, 3) + part)
    place = tl.load(row_of(table, parts, 4) + part)
    inside = tl.minimum(tl.load(row_of(table, parts, 2) + part) - first, BLOCK).to(tl.int32)
    inside = tl.where(tl.load(active + place) > 0, inside, 0)
    given, to, fault = gradient + begin, out + begin, faults + place
    lane = tl.arange(0, BLOCK)
    unaligned = (own.to(tl.int64) | given.to(tl.int64) | to.to(tl.int64)) % 16
    if (inside == BLOCK) & (unaligned == 0):
        vectors, their = tl.multiple_of(own + first, 16), tl.multiple_of(given + first, 16)
        whole, passed = tl.full([BLOCK], True, tl.int1), tl.multiple_of(to + first, 16)
        move_block(vectors, their, passed, lane, whole, momentum, fault, NESTEROV, KIND, OUT_KIND)
    else:
        own, given, to = own + first, given + first, to + first
        move_block(own, given, to, lane, lane < inside, momentum, fault, NESTEROV, KIND, OUT_KIND)


@triton.jit
def move_block(
    velocity,
    gradient,
    out,
    lane,
    inside,
    momentum,
    fault,
    NESTEROV: tl.constexpr,
    KIND: tl.constexpr,
    OUT_KIND: tl.constexpr,
):
    """See ``move_velocities``."""
    before = tl.load(velocity + lane, mask=inside, other=0.0)
    given = widened(tl.load(gradient + lane, mask=inside, other=0), KIND)
    if NESTEROV:
        moved = (before + given) * momentum
        passed = given + moved
    else:
        moved = before * momentum + given
        passed = moved
    tl.store(velocity + lane, tl.where(is_finite(moved), moved, 0.0), mask=inside)
    stored = rounded(passed, OUT_KIND)
    tl.store(out + lane, stored, mask=inside)
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
    inside = lane < tl.where(is_broken, 0, tl.minimum(counted, room))
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
    alone = lane < tl.where(is_broken, 1, 0)
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


@triton.jit(do_not_specialize=["parts", "steps"])
def restore_elements(
    table,  # rows: first programs; addresses of arrays; their elements; addresses of what they were
    parts,
    steps,
    wanted,
    BLOCKS: tl.constexpr,  # of a program
    BLOCK: tl.constexpr,
):
    """Reads nothing of arrays unless that is wanted."""
    if tl.load(wanted) > 0:
        program = tl.program_id(0)
        part = part_of(table, parts, steps, program)
        first = (program - tl.load(table + part)) * BLOCKS
        size = tl.load(row_of(table, parts, 2) + part)
        x = tl.load(row_of(table, parts, 1) + part).to(tl.pointer_type(tl.float32))
        before = tl.load(row_of(table, parts, 3) + part).to(tl.pointer_type(tl.float32))
        for block in range(BLOCKS):
            where = (first + block) * BLOCK + tl.arange(0, BLOCK)
            tl.store(x + where, tl.load(before + where, mask=where < size, other=0.0), mask=where < size)


@triton.jit(do_not_specialize=["parts"])
def set_units(
    table,  # rows: first programs, of ``rescale_elements``; addresses of arrays; their elements; of units, thresholds
    parts,
    wanted,  # float64
    ratios,  # float64, by part
    BLOCK: tl.constexpr,
):
    """A threshold without an address is none."""
    part = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = part < parts
    unit = tl.load(row_of(table, parts, 3) + part, mask=inside, other=0).to(tl.pointer_type(tl.float64))
    threshold = tl.load(row_of(table, parts, 4) + part, mask=inside, other=0)
    before, after = tl.load(unit, mask=inside, other=1.0), tl.load(wanted)
    largest = tl.full([BLOCK], 1e300, tl.float64)
    fits = (after > 0) & (after.to(tl.int64, bitcast=True) < 0x7FF0000000000000)
    divisor = tl.where(fits, after, before)
    moved = tl.minimum(before / divisor, largest)
    tl.store(ratios + part, moved, mask=inside)
    tl.store(unit, divisor, mask=inside)
    held = threshold.to(tl.pointer_type(tl.float64))
    has_threshold = inside & (threshold != 0)
    scaled = tl.load(held, mask=has_threshold, other=0.0) * moved
    is_held = (scaled > 0) & (scaled <= 3.4028234663852886e38)
    tl.store(held, tl.where(is_held, scaled, 0.0), mask=has_threshold)


@triton.jit(do_not_specialize=["parts", "steps"])
def rescale_elements(table, parts, steps, ratios, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """Reads nothing where the ratio is 1. A product of float32 is exact in float64: it is rounded once. The table is
    that of ``set_units``; a program has so many BLOCKS."""
    program = tl.program_id(0)
    part = part_of(table, parts, steps, program)
    given = tl.load(ratios + part)
    bits = given.to(tl.int64, bitcast=True)  # of numbers above 0 they have their order
    if bits != (1023 << 52):
        x = tl.load(row_of(table, parts, 1) + part).to(tl.pointer_type(tl.float32))
        size = tl.load(row_of(table, parts, 2) + part)
        first = (program - tl.load(table + part)) * BLOCKS
        near = (bits > ((1023 - 100) << 52)) & (bits < ((1023 + 100) << 52))
        factor = tl.where(near, given.to(tl.float32).to(tl.float64), given)
        largest = tl.full([BLOCK], 3.4028234663852886e38, tl.float64)
        for block in range(BLOCKS):
            where = (first + block) * BLOCK + tl.arange(0, BLOCK)
            product = tl.load(x + where, mask=where < size, other=0.0).to(tl.float64) * factor
            limited = tl.minimum(tl.maximum(product, -largest), largest)
            tl.store(x + where, limited.to(tl.float32), mask=where < size)


_CLEARED = 8192
"""Elements of one program that clears: mostly it has only to find out that it need not, which takes some loads, each of
them behind the last one."""

_BLOCKS = 8  # that a program restores or rescales, for the same reason

_PARTS = 128  # units that one program changes


def velocity_table(parts: Sequence[Moved]) -> torch.Tensor:
    """For ``accumulate_velocities``. Its rows are those of ``move_velocities``."""
    velocities = [part.velocity for part in parts]
    return table_of(
        [[_blocks_of(one.numel()) for one in velocities]],
        [one.data_ptr() for one in velocities],
        [one.numel() for one in velocities],
        [part.offset for part in parts],
        [part.place for part in parts],
    )


def accumulate_velocities(
    parts: Sequence[Moved],
    table: torch.Tensor,
    gradient: torch.Tensor,
    out: torch.Tensor,
    momentum: float,
    active: torch.Tensor,
    faults: torch.Tensor,
    nesterov: bool,
) -> None:
    """velocity = momentum · velocity + gradient, which is also written to ``out``; with ``nesterov``
    momentum · (velocity + gradient), and gradient + that to ``out``.

    ``gradient`` and ``out``: of all parts, and maybe more; the latter float32 or as the former, which it may be.
    Where a velocity overflows it becomes 0. ``active``: int64, by place; where it is 0, nothing is done."""
    programs = sum(_blocks_of(part.velocity.numel()) for part in parts)
    given = (bits_of(gradient), bits_of(out), momentum, active, faults)
    launch(
        move_velocities,
        programs,
        *by_parts(table, parts),
        *given,
        KIND=KINDS[gradient.dtype],
        OUT_KIND=KINDS[out.dtype],
        NESTEROV=nesterov,
        BLOCK=BLOCK,
    )


def table(parts: Sequence[Collected]) -> torch.Tensor:
    """For ``collect`` and ``clear_faults``. Its rows are those of ``collect_entries``."""
    residuals = [part.residual for part in parts]
    velocities = [part.residual if part.velocity is None else part.velocity for part in parts]
    return table_of(
        [[*map(_collecting, parts)], [*map(_clearing, parts)]],
        [part.start for part in parts],
        [part.stop for part in parts],
        [part.offset for part in parts],
        [part.place for part in parts],
        [one.numel() for one in residuals],
        [one.data_ptr() for one in residuals],
        [one.data_ptr() for one in velocities],
    )


def collect(
    parts: Sequence[Collected],
    table: torch.Tensor,
    indices: torch.Tensor,
    values: torch.Tensor,
    counts: torch.Tensor,
    broken: torch.Tensor,
    ends: torch.Tensor,
    to_indices: torch.Tensor,
    to_values: torch.Tensor,
    faults: torch.Tensor,
    most: float = math.inf,
) -> None:
    """Of each part copies the first ``counts`` of its entries to where they end before ``ends``; as ``to_values``
    holds them.

    Entries have left ``residual``: what rounding loses goes back to it, and ``velocity`` becomes 0 there. Of a
    finite float32 beyond ``most`` that much goes, and the rest goes back, too. Where ``broken`` is not 0 the count
    is 0, and one NaN is written, at ``offset``. ``counts`` and ``ends`` are int64, by part; ``broken``, int64, and
    ``faults`` are by ``place``. Indices are uint32; ``to_indices`` and ``to_values`` are all parts'."""
    masks, limits = parts[0].velocity is not None, most < math.inf
    launch(
        collect_entries,
        sum(map(_collecting, parts)),
        *by_parts(table, parts),
        *(indices, values, counts, broken, ends),
        *(to_indices, bits_of(to_values), faults, most),
        KIND=KINDS[to_values.dtype],
        MASKS=masks,
        LIMITS=limits,
        BLOCK=BLOCK,
    )


def clear_faults(parts: Sequence[Collected], table: torch.Tensor, faults: torch.Tensor) -> None:
    """Of each part whose fault is not 0 what is not finite becomes 0."""
    launch(clear_nonfinite, sum(map(_clearing, parts)), *by_parts(table, parts), faults, BLOCK=_CLEARED)


def kept_table(parts: Sequence[Kept]) -> torch.Tensor:
    """For ``restore``. Its rows are those of ``restore_elements``."""
    return _table_of_idle([part.values for part in parts], [part.before.data_ptr() for part in parts])


def restore(parts: Sequence[Kept], table: torch.Tensor, wanted: torch.Tensor) -> None:
    """If ``wanted`` (int32, one element) is above 0, all ``values`` become what they were ``before``."""
    programs = sum(_idle(part.values) for part in parts)
    launch(restore_elements, programs, *by_parts(table, parts), wanted, BLOCKS=_BLOCKS, BLOCK=BLOCK)


def unit_table(parts: Sequence[Remade]) -> torch.Tensor:
    """For ``change_units`` and ``rescale``. Its rows are those of ``set_units``."""
    return _table_of_idle(
        [part.values for part in parts],
        [part.unit.data_ptr() for part in parts],
        [0 if part.threshold is None else part.threshold.data_ptr() for part in parts],
    )


def change_units(parts: Sequence[Remade], table: torch.Tensor, wanted: torch.Tensor, ratios: torch.Tensor) -> None:
    """Each ``unit`` becomes ``wanted`` (float64, one element), and of ``ratios`` (float64, by part) its own what an
    array in it must be multiplied by to say the same, at most 1e300; its ``threshold`` is multiplied, and becomes 0
    where float32 cannot hold it. Where ``wanted`` is not above 0 and finite, ratios are 1, and nothing changes."""
    launch(set_units, -(-len(parts) // _PARTS), table, len(parts), wanted, ratios, warps=1, BLOCK=_PARTS)


def rescale(parts: Sequence[Remade], table: torch.Tensor, ratios: torch.Tensor) -> None:
    """Each ``values`` times its ratio, unless that is 1. What float32 cannot hold becomes its largest number."""
    programs = sum(_idle(part.values) for part in parts)
    launch(rescale_elements, programs, *by_parts(table, parts), ratios, BLOCKS=_BLOCKS, BLOCK=BLOCK)


def _blocks_of(elements: int, block: int | None = None) -> int:
    return max(1, -(-elements // (block or BLOCK)))


def _table_of_idle(arrays: Sequence[torch.Tensor], *numbers: Sequence[int]) -> torch.Tensor:
    programs = [_idle(one) for one in arrays]
    return table_of([programs], [one.data_ptr() for one in arrays], [one.numel() for one in arrays], *numbers)


def _idle(x: torch.Tensor) -> int:
    """Programs that mostly do nothing."""
    return _blocks_of(x.numel(), _BLOCKS * BLOCK)


def _collecting(part: Collected) -> int:
    """Programs for its entries."""
    return _blocks_of(part.stop - part.start)


def _clearing(part: Collected) -> int:
    """Programs for its residual."""
    return _blocks_of(part.residual.numel(), _CLEARED)
