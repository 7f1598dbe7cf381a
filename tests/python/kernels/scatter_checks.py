"""What every implementation of scattering must do: what the oracle does, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import staging_reference
from rounded_floats import narrowed

DTYPES = ("float32", "float16", "uint16")  # the last one holds bfloat16
FUNCTIONS = ("scatter_add", "scatter_set")
ODD = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -3e38, 65504.0, 1e-7, 1.0], np.float32)
HELD = (0, 1, 64, 130, 2**40, -1, -2)


def vector(size: int, dtype: str, seed: int) -> np.ndarray:
    """Half of it ordinary, half of it odd."""
    rng = np.random.default_rng(seed)
    values = np.where(rng.random(size) < 0.5, rng.standard_normal(size), rng.choice(ODD, size))
    return narrowed(values.astype(np.float32), np.dtype(dtype))


def check(kernels: Any, name: str, dtype: str, count: int, index_type: type, held: int) -> None:
    """``held`` of ``count`` entries of 500; what lies before and behind the written vector is not touched."""
    room = np.full(600, -1, np.dtype(f"int{8 * np.dtype(dtype).itemsize}")).view(dtype)
    room[50:550] = vector(500, dtype, count)
    got, expected = room.copy(), room.copy()
    rng = np.random.default_rng(count + 1)
    indices = np.sort(rng.choice(500, count, replace=False)).astype(index_type)
    values = vector(count, dtype, count + 2)
    end = min(max(held, 0), count)  # what lies behind those that count must not be looked at
    indices[end:], values[end:] = 499, np.array(-1, f"int{8 * values.itemsize}").view(dtype)
    counted = np.array([held], np.int64)
    getattr(kernels, name)(got[50:550], indices, values, counted)
    getattr(staging_reference, name)(expected[50:550], indices, values, counted)
    assert got.tobytes() == expected.tobytes()
