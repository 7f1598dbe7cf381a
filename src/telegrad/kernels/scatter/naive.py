"""The oracle of ``cpu`` and ``triton``: one entry after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from telegrad.kernels.quantise.naive import narrowed, widened

Vector = npt.NDArray[Any]


def faults_of(runs: Sequence[Vector], size: int, base: int) -> list[int]:
    return [_faults([int(index) for index in run], size, base) for run in runs]


def _faults(run: list[int], size: int, base: int) -> int:
    before = [-(2**64), *run]
    return sum(not (base <= index < base + size and index > last) for index, last in zip(run, before, strict=False))


def scatter_add(dense: Vector, indices: Vector, values: Vector, base: int = 0, held: Vector | None = None) -> None:
    for index, value in _entries(indices, values, held):
        place = slice(int(index) - base, int(index) - base + 1)
        with np.errstate(all="ignore"):
            total = widened(dense[place]) + widened(np.array([value], values.dtype))
        dense[place] = narrowed(total, dense.dtype)


def scatter_set(dense: Vector, indices: Vector, values: Vector, base: int = 0, held: Vector | None = None) -> None:
    for index, value in _entries(indices, values, held):
        dense[int(index) - base] = value


def clear(dense: Vector, indices: Vector, base: int = 0, held: Vector | None = None) -> None:
    for index, _ in _entries(indices, indices, held):
        dense[int(index) - base] = 0


def _entries(indices: Vector, values: Vector, held: Vector | None) -> list[tuple[Any, Any]]:
    entries = list(zip(indices, values, strict=True))
    return entries if held is None else entries[: max(0, int(held[0]))]
