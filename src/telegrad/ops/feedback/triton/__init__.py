"""Error feedback with Triton kernels. What is not to be done reads and writes nothing of a residual."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from telegrad.ops.feedback import Collected
from telegrad.ops.feedback.triton.updates import (
    clear_nonfinite,
    collect_entries,
    move_velocity,
    rescale_elements,
    restore_elements,
    set_unit,
)
from telegrad.ops.triton import BLOCK, launch
from telegrad.ops.triton.floats import KINDS, bits_of

_CLEARED = 8192
"""Elements of one program that clears: mostly it has only to find out that it need not, which takes some loads, each of
them behind the last one."""


def accumulate_velocity(
    velocity: torch.Tensor,
    gradient: torch.Tensor,
    out: torch.Tensor,
    momentum: float,
    active: torch.Tensor,
    fault: torch.Tensor,
    nesterov: bool,
) -> None:
    """See ``Kernels.accumulate_velocity``."""
    kinds = {"KIND": KINDS[gradient.dtype], "OUT_KIND": KINDS[out.dtype]}
    given = (bits_of(gradient), bits_of(out), velocity.numel(), momentum, active, fault)
    _over(velocity.numel(), move_velocity, velocity, *given, NESTEROV=nesterov, **kinds)


def table(parts: Sequence[Collected]) -> torch.Tensor:
    """See ``Kernels.table``. Its rows are those of ``updates.collect_entries``."""
    residuals = [part.residual for part in parts]
    velocities = [part.residual if part.velocity is None else part.velocity for part in parts]
    rows = [
        [0, *accumulate(_collecting(part) for part in parts)],
        [0, *accumulate(_clearing(part) for part in parts)],
        [*(part.start for part in parts), 0],
        [*(part.stop for part in parts), 0],
        [*(part.offset for part in parts), 0],
        [*(part.place for part in parts), 0],
        [*(one.numel() for one in residuals), 0],
        [*(one.data_ptr() for one in residuals), 0],
        [*(one.data_ptr() for one in velocities), 0],
    ]
    return torch.tensor(rows, dtype=torch.int64).view(-1)


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
        table,
        *(len(parts), len(parts).bit_length(), indices, values, counts, broken, ends),
        *(to_indices, bits_of(to_values), faults, most),
        KIND=KINDS[to_values.dtype],
        MASKS=masks,
        LIMITS=limits,
        BLOCK=BLOCK,
    )


def clear_faults(parts: Sequence[Collected], table: torch.Tensor, faults: torch.Tensor) -> None:
    """See ``Kernels.clear_faults``."""
    launch(
        clear_nonfinite, sum(map(_clearing, parts)), table, len(parts), len(parts).bit_length(), faults, BLOCK=_CLEARED
    )


def restore(x: torch.Tensor, before: torch.Tensor, wanted: torch.Tensor) -> None:
    """See ``Kernels.restore``."""
    _over(x.numel(), restore_elements, x, before, x.numel(), wanted)


def change_unit(unit: torch.Tensor, wanted: torch.Tensor, ratio: torch.Tensor, threshold: torch.Tensor | None) -> None:
    """See ``Kernels.change_unit``."""
    launch(
        set_unit, 1, unit, wanted, ratio, unit if threshold is None else threshold, HAS_THRESHOLD=threshold is not None
    )


def rescale(x: torch.Tensor, ratio: torch.Tensor) -> None:
    """See ``Kernels.rescale``."""
    _over(x.numel(), rescale_elements, x, x.numel(), ratio)


def _over(elements: int, kernel: Any, x: torch.Tensor, *arguments: Any, **options: Any) -> None:
    launch(kernel, _blocks_of(elements), x, *arguments, **options, BLOCK=BLOCK)


def _blocks_of(elements: int, block: int | None = None) -> int:
    return max(1, -(-elements // (block or BLOCK)))


def _collecting(part: Collected) -> int:
    """Programs for its entries."""
    return _blocks_of(part.stop - part.start)


def _clearing(part: Collected) -> int:
    """Programs for its residual."""
    return _blocks_of(part.residual.numel(), _CLEARED)
