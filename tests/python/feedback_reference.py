"""The oracle of ``telegrad.kernels.feedback.triton``: numpy, one entry after the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from rounded_floats import narrowed

from telegrad.kernels.feedback import Collected, Kept, Moved, Remade
from telegrad.kernels.floats import as_float32

Vector = npt.NDArray[Any]

_LARGEST = float(np.finfo(np.float32).max)


def accumulate_velocities(
    parts: Sequence[Moved],
    table: object,
    gradient: Vector,
    out: Vector,
    momentum: float,
    active: Vector,
    faults: Vector,
    nesterov: bool,
) -> None:
    """See ``triton.accumulate_velocities``; ``table`` is not looked at."""
    m = np.float32(momentum)
    for part in parts:
        if not active[part.place]:
            continue
        own, velocity = slice(part.offset, part.offset + part.velocity.size), part.velocity
        given = as_float32(gradient[own])
        with np.errstate(over="ignore", invalid="ignore"):
            moved = (velocity + given) * m if nesterov else velocity * m + given
            passed = given + moved if nesterov else moved
        velocity[:] = np.where(np.isfinite(moved), moved, np.float32(0))
        out[own] = narrowed(passed, out.dtype)
        if not (np.isfinite(moved).all() and np.isfinite(as_float32(out[own])).all()):
            faults[part.place] = 1


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
    """See ``triton.collect``; ``table`` is not looked at."""
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
    """See ``triton.clear_faults``; ``table`` is not looked at."""
    for part in parts:
        if faults[part.place]:
            part.residual[~np.isfinite(part.residual)] = 0


def restore(parts: Sequence[Kept], table: object, wanted: Vector) -> None:
    """See ``triton.restore``; ``table`` is not looked at."""
    if wanted[0] > 0:
        for part in parts:
            part.values[:] = part.before


def change_units(parts: Sequence[Remade], table: object, wanted: Vector, ratios: Vector) -> None:
    """See ``triton.change_units``; ``table`` is not looked at."""
    ratios[:] = 1.0
    if not 0 < wanted[0] < np.inf:
        return
    for number, part in enumerate(parts):
        with np.errstate(over="ignore"):
            ratios[number] = min(part.unit[0] / wanted[0], 1e300)
        part.unit[0] = wanted[0]
        if part.threshold is not None:
            moved = part.threshold[0] * ratios[number]
            part.threshold[0] = moved if 0 < moved <= _LARGEST else 0.0


def rescale(parts: Sequence[Remade], table: object, ratios: Vector) -> None:
    """See ``triton.rescale``; ``table`` is not looked at."""
    for part, ratio in zip(parts, ratios, strict=True):
        if ratio != 1:
            near = 2.0**-100 < ratio < 2.0**100
            factor = np.float64(np.float32(ratio)) if near else ratio
            part.values[:] = np.clip(part.values.astype(np.float64) * factor, -_LARGEST, _LARGEST)
