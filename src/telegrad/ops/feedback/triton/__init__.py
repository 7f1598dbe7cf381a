"""Error feedback with Triton kernels. What is not to be done reads and writes nothing of a residual."""

from __future__ import annotations

import math
from typing import Any

import torch

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


def collect(
    indices: torch.Tensor,
    values: torch.Tensor,
    count: torch.Tensor,
    broken: torch.Tensor,
    end: torch.Tensor,
    residual: torch.Tensor,
    velocity: torch.Tensor | None,
    to_indices: torch.Tensor,
    to_values: torch.Tensor,
    fault: torch.Tensor,
    offset: int,
    most: float = math.inf,
) -> None:
    """See ``Kernels.collect``."""
    room = indices.numel()
    masked = residual if velocity is None else velocity
    to = (to_indices, bits_of(to_values), fault, offset, most)
    kinds = {"KIND": KINDS[to_values.dtype], "MASKS": velocity is not None, "LIMITS": most < math.inf}
    _over(room, collect_entries, indices, values, room, count, broken, end, residual, masked, *to, **kinds)


def clear_faults(residual: torch.Tensor, fault: torch.Tensor) -> None:
    """See ``Kernels.clear_faults``."""
    _over(residual.numel(), clear_nonfinite, residual, residual.numel(), fault)


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
    launch(kernel, max(1, -(-elements // BLOCK)), x, *arguments, **options, BLOCK=BLOCK)
