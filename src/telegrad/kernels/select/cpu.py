"""Selection with the core's kernels. Arrays are as ``arguments`` demands.

What functions have in common: ``gradient`` is added to ``residual`` (``None``: nothing is). The chosen entries are
moved out of it: written, in ascending order, into ``indices`` (position + ``offset``) and ``values``; zero in the
residual. ``sign``: only entries of that sign can be chosen.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from telegrad import _core
from telegrad.kernels.select import Chosen, Sign
from telegrad.kernels.select.arguments import check_arguments, check_buckets, check_inputs

Floats = npt.NDArray[np.float32]
Indices = npt.NDArray[np.uint32]


def accumulate(residual: Floats, gradient: Floats) -> None:
    """``residual += gradient``."""
    check_inputs(residual, gradient)
    _core.accumulate(_address(residual), _address(gradient), residual.size)


def accumulate_all(residual: Floats, gradient: Floats, indices: Indices, values: Floats, offset: int) -> None:
    """Moves every entry."""
    size = residual.size
    check_arguments(residual, gradient, indices, values, size)
    indices[:size] = np.arange(offset, offset + size, dtype=np.uint32)
    np.add(residual, gradient, out=values[:size])
    residual.fill(0)


def accumulate_select(
    residual: Floats,
    gradient: Floats | None,
    threshold: float,
    indices: Indices,
    values: Floats,
    offset: int,
    sign: Sign = 0,
) -> int:
    """Moves the entries of magnitude >= ``threshold``; returns how many there are.

    If there are more than the outputs hold, the first ones are moved and the others stay in the residual.
    """
    check_arguments(residual, gradient, indices, values, 0)
    return _core.accumulate_select(
        *_inputs(residual, gradient), threshold, sign, _address(indices), _address(values), indices.size, offset
    )


def accumulate_topk(
    residual: Floats, gradient: Floats | None, k: int, indices: Indices, values: Floats, offset: int, sign: Sign = 0
) -> Chosen:
    """Moves exactly the ``k`` (1 to all) entries of largest magnitude; of one sign, all of it if there are fewer."""
    check_arguments(residual, gradient, indices, values, k, k)
    arrays = _inputs(residual, gradient)
    return Chosen(*_core.accumulate_topk(*arrays, k, sign, _address(indices), _address(values), offset))


def accumulate_trimmed(
    residual: Floats,
    gradient: Floats | None,
    k: int,
    step: float,
    indices: Indices,
    values: Floats,
    offset: int,
    sign: Sign = 0,
) -> Chosen:
    """The entries of ``accumulate_topk``, ranked among those of magnitude >= mean + ratio (max - mean) alone.

    The ratio is the first of 1 - step, 1 - 2 step, … 0 that ``k`` entries reach. Source: RedSync, Algorithm 2,
    corrected.
    """
    check_arguments(residual, gradient, indices, values, k, k)
    arrays = _inputs(residual, gradient)
    return Chosen(*_core.accumulate_trimmed(*arrays, k, step, sign, _address(indices), _address(values), offset))


def accumulate_search(
    residual: Floats,
    gradient: Floats | None,
    k: int,
    tolerance: float,
    indices: Indices,
    values: Floats,
    offset: int,
    sign: Sign = 0,
) -> Chosen:
    """Moves all entries of magnitude >= mean + ratio (max - mean), with a ratio in [0, 1] for which they are k to 2k.

    It is found by bisection. Where that ends without one, at an interval of ``tolerance``, as among ties: exactly
    the entries of ``accumulate_topk``. Source: RedSync, Algorithm 3, corrected.
    """
    check_arguments(residual, gradient, indices, values, min(2 * k, residual.size), k)
    arrays = _inputs(residual, gradient)
    return Chosen(*_core.accumulate_search(*arrays, k, tolerance, sign, _address(indices), _address(values), offset))


def accumulate_buckets(
    residual: Floats,
    gradient: Floats | None,
    bucket: int,
    per_bucket: int,
    of_last: int,
    indices: Indices,
    values: Floats,
    offset: int,
) -> Chosen:
    """Moves the ``per_bucket`` largest of every ``bucket`` consecutive entries, and the ``of_last`` of what is left."""
    check_buckets(residual.size, bucket, per_bucket, of_last)
    check_arguments(residual, gradient, indices, values, residual.size // bucket * per_bucket + of_last)
    arrays = _inputs(residual, gradient)
    return Chosen(
        *_core.accumulate_buckets(*arrays, bucket, per_bucket, of_last, _address(indices), _address(values), offset)
    )


def accumulate_random(
    residual: Floats,
    gradient: Floats | None,
    k: int,
    draw: tuple[int, int, int, int],
    indices: Indices,
    values: Floats,
    offset: int,
) -> Chosen:
    """Moves ``k`` random entries, the same ones for the same ``draw``: seed (64 bits), call, rank, stream (32 bits)."""
    check_arguments(residual, gradient, indices, values, k, k)
    arrays = _inputs(residual, gradient)
    return Chosen(*_core.accumulate_random(*arrays, k, *draw, _address(indices), _address(values), offset))


def accumulate_normal(residual: Floats, gradient: Floats | None) -> tuple[float, float]:
    """Mean and standard deviation of residual + gradient; NaN or infinite where one of the sums is."""
    check_inputs(residual, gradient)
    return _core.accumulate_normal(*_inputs(residual, gradient))


def put_back(residual: Floats, indices: Indices, values: Floats, offset: int) -> None:
    """Undoes a move, which wrote ``indices`` and ``values``: what was taken out of ``residual`` is there again."""
    residual[indices - np.uint32(offset)] = values


def _inputs(residual: Floats, gradient: Floats | None) -> tuple[int, int, int]:
    return _address(residual), 0 if gradient is None else _address(gradient), residual.size


def _address(x: npt.NDArray[Any]) -> int:
    return int(x.__array_interface__["data"][0])
