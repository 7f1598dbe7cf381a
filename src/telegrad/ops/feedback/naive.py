"""The oracle of ``triton``: numpy, one entry after the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from telegrad.ops.feedback import Collected
from telegrad.ops.nonfinite.naive import as_float32
from telegrad.ops.quantise.naive import narrowed

Vector = npt.NDArray[Any]

_LARGEST = float(np.finfo(np.float32).max)


def accumulate_velocity(
    velocity: Vector,
    gradient: Vector,
    out: Vector,
    momentum: float,
    active: Vector,
    fault: Vector,
    nesterov: bool,
) -> None:
    """See ``Kernels.accumulate_velocity``."""
    if not active[0]:
        return
    m, given = np.float32(momentum), as_float32(gradient)
    with np.errstate(over="ignore", invalid="ignore"):
        moved = (velocity + given) * m if nesterov else velocity * m + given
        passed = given + moved if nesterov else moved
    velocity[:] = np.where(np.isfinite(moved), moved, np.float32(0))
    out[:] = narrowed(passed, out.dtype)
    if not (np.isfinite(moved).all() and np.isfinite(as_float32(out)).all()):
        fault[0] = 1


def collect(
    parts: Sequence[Collected],
    table: object,
    indices: Vector,
    values: Vector,
    counts: Vector,
    broken: Vector,
    ends: Vector,
    to_indices: Vector,
    to_values: Vector,
    faults: Vector,
    most: float = math.inf,
) -> None:
    """See ``Kernels.collect``; ``table`` is not looked at."""
    for part, count, end in zip(parts, counts, ends, strict=True):
        if broken[part.place]:
            to_indices[end - 1] = part.offset
            to_values[end - 1 : end] = narrowed(np.array([np.nan], np.float32), to_values.dtype)
            continue
        for entry in range(int(count)):
            place, chosen = int(end - count) + entry, part.start + entry
            where = int(indices[chosen]) - part.offset
            to_indices[place] = indices[chosen]
            to_values[place : place + 1] = narrowed(values[chosen : chosen + 1], to_values.dtype)
            leaves = as_float32(to_values[place : place + 1])[0]
            if not np.isfinite(leaves):
                faults[part.place] = 1
            elif to_values.dtype != np.float32:
                part.residual[where] = values[chosen] - leaves
            elif abs(leaves) > most:
                to_values[place] = np.copysign(np.float32(most), leaves)
                part.residual[where] = leaves - to_values[place]
            if part.velocity is not None:
                part.velocity[where] = 0


def clear_faults(parts: Sequence[Collected], table: object, faults: Vector) -> None:
    """See ``Kernels.clear_faults``; ``table`` is not looked at."""
    for part in parts:
        if faults[part.place]:
            part.residual[~np.isfinite(part.residual)] = 0


def restore(x: Vector, before: Vector, wanted: Vector) -> None:
    """See ``Kernels.restore``."""
    if wanted[0] > 0:
        x[:] = before


def change_unit(unit: Vector, wanted: Vector, ratio: Vector, threshold: Vector | None) -> None:
    """See ``Kernels.change_unit``."""
    ratio[0] = 1.0
    if not 0 < wanted[0] < np.inf:
        return
    with np.errstate(over="ignore"):
        ratio[0] = min(unit[0] / wanted[0], 1e300)
    unit[0] = wanted[0]
    if threshold is not None:
        moved = threshold[0] * ratio[0]
        threshold[0] = moved if 0 < moved <= _LARGEST else 0.0


def rescale(x: Vector, ratio: Vector) -> None:
    """See ``Kernels.rescale``."""
    if ratio[0] == 1:
        return
    near = 2.0**-100 < ratio[0] < 2.0**100
    factor = np.float64(np.float32(ratio[0])) if near else ratio[0]
    x[:] = np.clip(x.astype(np.float64) * factor, -_LARGEST, _LARGEST)
