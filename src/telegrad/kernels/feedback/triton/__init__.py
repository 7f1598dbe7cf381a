"""Error feedback with Triton kernels. What is not to be done reads and writes nothing of a residual."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from telegrad.kernels.feedback import Collected, Kept, Moved, Remade
from telegrad.kernels.feedback.triton.updates import (
    clear_nonfinite,
    collect_entries,
    move_velocities,
    rescale_elements,
    restore_elements,
    set_units,
)
from telegrad.kernels.triton import BLOCK, by_parts, launch, table_of
from telegrad.kernels.triton.floats import KINDS, bits_of

_CLEARED = 8192
"""Elements of one program that clears: mostly it has only to find out that it need not, which takes some loads, each of
them behind the last one."""

_BLOCKS = 8  # that a program restores or rescales, for the same reason

_PARTS = 128  # units that one program changes


def velocity_table(parts: Sequence[Moved]) -> torch.Tensor:
    """See ``Kernels.velocity_table``. Its rows are those of ``updates.move_velocities``."""
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
    """See ``Kernels.accumulate_velocities``."""
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
    """See ``Kernels.table``. Its rows are those of ``updates.collect_entries``."""
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
    """See ``Kernels.collect``."""
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
    """See ``Kernels.clear_faults``."""
    launch(clear_nonfinite, sum(map(_clearing, parts)), *by_parts(table, parts), faults, BLOCK=_CLEARED)


def kept_table(parts: Sequence[Kept]) -> torch.Tensor:
    """See ``Kernels.kept_table``. Its rows are those of ``updates.restore_elements``."""
    return _table_of_idle([part.values for part in parts], [part.before.data_ptr() for part in parts])


def restore(parts: Sequence[Kept], table: torch.Tensor, wanted: torch.Tensor) -> None:
    """See ``Kernels.restore``."""
    programs = sum(_idle(part.values) for part in parts)
    launch(restore_elements, programs, *by_parts(table, parts), wanted, BLOCKS=_BLOCKS, BLOCK=BLOCK)


def unit_table(parts: Sequence[Remade]) -> torch.Tensor:
    """See ``Kernels.unit_table``. Its rows are those of ``updates.set_units``."""
    return _table_of_idle(
        [part.values for part in parts],
        [part.unit.data_ptr() for part in parts],
        [0 if part.threshold is None else part.threshold.data_ptr() for part in parts],
    )


def change_units(parts: Sequence[Remade], table: torch.Tensor, wanted: torch.Tensor, ratios: torch.Tensor) -> None:
    """See ``Kernels.change_units``."""
    launch(set_units, -(-len(parts) // _PARTS), table, len(parts), wanted, ratios, warps=1, BLOCK=_PARTS)


def rescale(parts: Sequence[Remade], table: torch.Tensor, ratios: torch.Tensor) -> None:
    """See ``Kernels.rescale``."""
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
