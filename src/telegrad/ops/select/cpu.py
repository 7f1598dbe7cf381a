"""Selection with the core's kernels. Arrays are contiguous float32 and uint32; callers have checked that."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from telegrad import _core

Floats = npt.NDArray[np.float32]
Indices = npt.NDArray[np.uint32]

TINY = float(np.finfo(np.float32).tiny)
"""Smallest normal float32. A threshold is never below it: with flush-to-zero everything would pass."""

_zeros = np.zeros(0, np.float32)  # never written, so its pages stay the system's one zero page


def topk_threshold(x: Floats, k: int) -> float:
    """The k-th largest magnitude of ``x`` (1 <= k <= len(x), no NaN): exact, by radix selection."""
    return _core.topk_threshold(_address(x), x.size, k)


def accumulate(residual: Floats, gradient: Floats) -> None:
    """``residual += gradient``."""
    _core.accumulate(_address(residual), _address(gradient), residual.size)


def accumulate_select(
    residual: Floats, gradient: Floats, threshold: float, indices: Indices, values: Floats, offset: int
) -> int:
    """Adds ``gradient`` to ``residual``, then moves the entries of magnitude >= ``threshold`` out of it.

    They are written in ascending order into ``indices`` (position + ``offset``) and ``values``. Returns how many there
    are. If there are more than these hold, the first ones are moved and the others stay in the residual.
    """
    return _core.accumulate_select(
        _address(residual),
        _address(gradient),
        residual.size,
        threshold,
        _address(indices),
        _address(values),
        indices.size,
        offset,
    )


def put_back(residual: Floats, indices: Indices, values: Floats, offset: int) -> None:
    """Undoes a move: what was taken out of ``residual`` is there again."""
    residual[indices - np.uint32(offset)] = values


def select_topk(residual: Floats, k: int, indices: Indices, values: Floats, offset: int) -> float:
    """Moves exactly the ``k`` entries of largest magnitude out of ``residual``, ties to the lowest index.

    They are written as in ``accumulate_select``. Returns the k-th magnitude. Magnitudes below the smallest normal
    float32 count as zero.
    """
    threshold = topk_threshold(residual, k)
    nothing = _zeros_like(residual)
    indices, values = indices[:k], values[:k]
    found = accumulate_select(residual, nothing, threshold, indices, values, offset)
    if found == k and (threshold >= TINY or k == residual.size):
        return threshold
    # Entries equal to the threshold compete for the last places: first all that exceed it, then the lowest of the
    # equal ones.
    moved = min(found, k)
    put_back(residual, indices[:moved], values[:moved], offset)
    above = max(float(np.nextafter(np.float32(threshold), np.float32(np.inf))), TINY)
    larger = accumulate_select(residual, nothing, above, indices, values, offset)
    if threshold >= TINY:
        accumulate_select(residual, nothing, threshold, indices[larger:], values[larger:], offset)
    else:  # zeros: what was just moved is zero too, and must not be taken twice
        lowest = np.setdiff1d(np.arange(k), indices[:larger] - np.uint32(offset))[: k - larger]
        indices[larger:], values[larger:] = lowest + offset, residual[lowest]
        residual[lowest] = 0
    order = np.argsort(indices, kind="stable")
    indices[:], values[:] = indices[order], values[order]
    return threshold


def _zeros_like(x: Floats) -> Floats:
    global _zeros
    if _zeros.size < x.size:
        _zeros = np.zeros(x.size, np.float32)
    return _zeros[: x.size]


def _address(x: npt.NDArray[Any]) -> int:
    return int(x.__array_interface__["data"][0])
