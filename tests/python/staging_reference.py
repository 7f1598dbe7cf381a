"""The oracle of ``telegrad.kernels.staging.triton``: one entry after the other."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from rounded_floats import narrowed, widened

from telegrad.kernels.staging import DENSE
from telegrad.sparse_vector.formats import as_bits

Vector = npt.NDArray[Any]


def stage(
    indices: Vector, values: Vector, count: Vector, to_count: Vector, to_indices: Vector, to_values: Vector
) -> None:
    """See ``triton.stage``."""
    to_count[0] = count[0]
    for place in range(min(int(count[0]), len(indices))):
        index = int(indices[place])
        to_indices[place] = index if 0 <= index < 2**32 else 2**32 - 1
        to_values[place] = values[place]


def write_sum(out: Vector, form: Vector, dense: Vector, indices: Vector, values: Vector, absent: float) -> None:
    """See ``triton.write_sum``."""
    if form[0] == DENSE:
        out[:] = dense
    elif form[0] < 0:
        out.view(np.uint8).fill(0xFF)
    else:
        out[:] = as_bits(absent, out.dtype)
        scatter_set(out, indices, values, form)


def add_sum(out: Vector, form: Vector, dense: Vector, indices: Vector, values: Vector) -> None:
    """See ``triton.add_sum``."""
    if form[0] == DENSE:
        out += dense
    else:
        scatter_add(out, indices, values, form)


def scatter_add(dense: Vector, indices: Vector, values: Vector, held: Vector) -> None:
    """``dense[index] += value``, rounded once, of the first ``held`` entries."""
    for index, value in _entries(indices, values, held):
        place = slice(int(index), int(index) + 1)
        with np.errstate(all="ignore"):
            total = widened(dense[place]) + widened(np.array([value], values.dtype))
        dense[place] = narrowed(total, dense.dtype)


def scatter_set(dense: Vector, indices: Vector, values: Vector, held: Vector) -> None:
    """``dense[index] = value`` of the first ``held`` entries."""
    for index, value in _entries(indices, values, held):
        dense[int(index)] = value


def _entries(indices: Vector, values: Vector, held: Vector) -> list[tuple[Any, Any]]:
    return list(zip(indices, values, strict=True))[: max(0, int(held[0]))]
