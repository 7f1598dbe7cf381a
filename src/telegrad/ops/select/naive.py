"""The oracle of ``cpu``: the same functions in plain numpy, slow and obvious."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Indices = npt.NDArray[np.uint32]


def topk_threshold(x: Floats, k: int) -> float:
    """The k-th largest magnitude of ``x`` (1 <= k <= len(x), no NaN)."""
    return float(np.sort(np.abs(x))[-k])


def accumulate(residual: Floats, gradient: Floats) -> None:
    """``residual += gradient``."""
    residual += gradient


def accumulate_select(
    residual: Floats, gradient: Floats, threshold: float, indices: Indices, values: Floats, offset: int
) -> int:
    """Adds ``gradient`` to ``residual``, then moves the entries of magnitude >= ``threshold`` out of it.

    They are written in ascending order into ``indices`` (position + ``offset``) and ``values``. Returns how many there
    are. If there are more than these hold, the first ones are moved and the others stay in the residual.
    """
    residual += gradient
    return _move(residual, np.flatnonzero(np.abs(residual) >= np.float32(threshold)), indices, values, offset)


def select_topk(residual: Floats, k: int, indices: Indices, values: Floats, offset: int) -> float:
    """Moves exactly the ``k`` entries of largest magnitude out of ``residual``, ties to the lowest index.

    They are written as in ``accumulate_select``. Returns the k-th magnitude. Magnitudes below the smallest normal
    float32 count as zero.
    """
    magnitude = np.abs(residual)
    ranked = np.where(magnitude < np.finfo(np.float32).tiny, np.float32(0), magnitude)
    chosen = np.argsort(-ranked, kind="stable")[:k]
    threshold = float(magnitude[chosen[-1]])
    _move(residual, np.sort(chosen), indices, values, offset)
    return threshold


def _move(residual: Floats, chosen: npt.NDArray[np.intp], indices: Indices, values: Floats, offset: int) -> int:
    moved = chosen[: len(indices)]
    indices[: len(moved)] = moved + offset
    values[: len(moved)] = residual[moved]
    residual[moved] = 0
    return len(chosen)
