"""Scattering with the core's kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from telegrad import _core

Vector = npt.NDArray[Any]

_DTYPES = {"float32": _core.DType.f32, "float16": _core.DType.f16, "uint16": _core.DType.bf16}


def faults_of(runs: Sequence[Vector], size: int, base: int) -> list[int]:
    return [_faults(run, size, base) for run in runs]


def scatter_add(dense: Vector, indices: Vector, values: Vector, base: int = 0, held: Vector | None = None) -> None:
    _scatter(True, dense, indices, values, base, held)


def scatter_set(dense: Vector, indices: Vector, values: Vector, base: int = 0, held: Vector | None = None) -> None:
    _scatter(False, dense, indices, values, base, held)


def clear(dense: Vector, indices: Vector, base: int = 0, held: Vector | None = None) -> None:
    dense[_first(indices, held).astype(np.int64) - base] = 0


def _first(indices: Vector, held: Vector | None) -> Vector:
    return indices if held is None else indices[: max(0, int(held[0]))]


def _scatter(adds: bool, dense: Vector, indices: Vector, values: Vector, base: int, held: Vector | None) -> None:
    narrow = _first(indices, held).astype(np.uint32, copy=False)  # a copy of int64
    _core.scatter(
        adds,
        _address(dense),
        dense.size,
        _DTYPES[dense.dtype.name],
        _address(narrow),
        _address(values),
        narrow.size,
        base,
    )


def _faults(run: Vector, size: int, base: int) -> int:
    wrong = (run < base) | (run > base + size - 1) if size else np.ones(run.size, np.bool_)
    wrong[1:] |= run[1:] <= run[:-1]
    return int(np.count_nonzero(wrong))


def _address(x: Vector) -> int:
    return int(x.__array_interface__["data"][0])
