"""The oracle of ``triton``: numpy, one entry after the other."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

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
    indices: Vector,
    values: Vector,
    count: Vector,
    broken: Vector,
    end: Vector,
    residual: Vector,
    velocity: Vector | None,
    to_indices: Vector,
    to_values: Vector,
    fault: Vector,
    offset: int,
    most: float = math.inf,
) -> None:
    """See ``Kernels.collect``."""
    if broken[0]:
        to_indices[end[0] - 1] = offset
        to_values[end[0] - 1 : end[0]] = narrowed(np.array([np.nan], np.float32), to_values.dtype)
        return
    first = int(end[0] - count[0])
    for entry in range(int(count[0])):
        place, where = first + entry, int(indices[entry]) - offset
        to_indices[place] = indices[entry]
        to_values[place : place + 1] = narrowed(values[entry : entry + 1], to_values.dtype)
        leaves = as_float32(to_values[place : place + 1])[0]
        if not np.isfinite(leaves):
            fault[0] = 1
        elif to_values.dtype != np.float32:
            residual[where] = values[entry] - leaves
        elif abs(leaves) > most:
            to_values[place] = np.copysign(np.float32(most), leaves)
            residual[where] = leaves - to_values[place]
        if velocity is not None:
            velocity[where] = 0


def clear_faults(residual: Vector, fault: Vector) -> None:
    """See ``Kernels.clear_faults``."""
    if fault[0]:
        residual[~np.isfinite(residual)] = 0


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
