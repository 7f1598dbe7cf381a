"""What every implementation of scattering must do: what the oracle does, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np

from telegrad.kernels.quantise.naive import narrowed
from telegrad.kernels.scatter import naive

DTYPES = ("float32", "float16", "uint16")  # the last one holds bfloat16
SIZES = (0, 1, 7, 63, 64, 65, 200)
FUNCTIONS = ("scatter_add", "scatter_set", "clear")
ODD = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -3e38, 65504.0, 1e-7, 1.0], np.float32)


def vector(size: int, dtype: str, seed: int) -> np.ndarray:
    """Half of it ordinary, half of it odd."""
    rng = np.random.default_rng(seed)
    values = np.where(rng.random(size) < 0.5, rng.standard_normal(size), rng.choice(ODD, size))
    return narrowed(values.astype(np.float32), np.dtype(dtype))


HELD = (None, 0, 1, 64, 130, 2**40, -1, -2)


def check(
    kernels: Any, name: str, dtype: str, count: int, index_type: type, base: int, held: int | None = None
) -> None:
    """``count`` entries of 500; what lies before and behind the written vector is not touched."""
    room = np.full(600, -1, np.dtype(f"int{8 * np.dtype(dtype).itemsize}")).view(dtype)
    room[50:550] = vector(500, dtype, count)
    got, expected = room.copy(), room.copy()
    rng = np.random.default_rng(count + 1)
    indices = (np.sort(rng.choice(500, count, replace=False)) + base).astype(index_type)
    values = vector(count, dtype, count + 2)
    given = (indices,) if name == "clear" else (indices, values)
    if held is not None:  # what lies behind those that count must not be looked at
        end = min(max(held, 0), count)
        indices[end:], values[end:] = base + 499, np.array(-1, f"int{8 * values.itemsize}").view(dtype)
    counted = None if held is None else np.array([held], np.int64)
    getattr(kernels, name)(got[50:550], *given, base, counted)
    getattr(naive, name)(expected[50:550], *given, base, counted)
    assert got.tobytes() == expected.tobytes()


def check_faults(kernels: Any) -> None:
    """Of runs that are damaged in every way, and of some that are not."""
    runs = [
        *([], [0], [9], [0, 9], list(range(10))),
        *([10], [0, 10], [3, 3], [4, 3], [0, 1, 1, 2, 2], [5, 9, 2**32 - 1], [7, 8, 0]),
    ]
    for index_type, more in ((np.uint32, []), (np.int64, [[-1], [-(2**63), 2**63 - 1], [2**40, 3]])):
        for size, base in ((10, 0), (0, 0), (4, 3), (10, 2**32 - 12)):
            arrays = [np.array(run, index_type) for run in runs + more]
            assert kernels.faults_of(arrays, size, base) == naive.faults_of(arrays, size, base)
    assert kernels.faults_of([], 10, 0) == []
    assert kernels.faults_of([np.array([1, 3], np.uint32)], 10, 0) == [0]
