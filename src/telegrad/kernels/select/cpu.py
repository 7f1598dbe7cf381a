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

_FLOAT32, _UINT32 = _core.DType.f32, _core.DType.u32


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
    before: Floats | None = None,
) -> int:
    """Moves the entries of magnitude >= ``threshold``; returns how many there are.

    If there are more than the outputs hold, the first ones are moved and the others stay in the residual. ``before``,
    with a gradient: what it is added to, in place of what ``residual`` holds; only read.
    """
    at, gradient_at, indices_at, values_at = _addresses(residual, gradient, indices, values, 0)
    before_at = 0
    if before is not None:
        given = _core.buffer_of(before, False)
        if given is None or given.dtype != _FLOAT32 or given.elements != residual.size or gradient is None:
            _check_before(before, residual, gradient)
        before_at = _address(before) if given is None else given.pointer
    return _core.accumulate_select(
        at, gradient_at, residual.size, threshold, sign, indices_at, values_at, indices.size, offset, before_at
    )


def accumulate_topk(
    residual: Floats, gradient: Floats | None, k: int, indices: Indices, values: Floats, offset: int, sign: Sign = 0
) -> Chosen:
    """Moves exactly the ``k`` (1 to all) entries of largest magnitude; of one sign, all of it if there are fewer."""
    at, gradient_at, indices_at, values_at = _addresses(residual, gradient, indices, values, k, k)
    return Chosen(*_core.accumulate_topk(at, gradient_at, residual.size, k, sign, indices_at, values_at, offset))


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
    at, gradient_at, indices_at, values_at = _addresses(residual, gradient, indices, values, k, k)
    return Chosen(
        *_core.accumulate_trimmed(at, gradient_at, residual.size, k, step, sign, indices_at, values_at, offset)
    )


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
    at, gradient_at, indices_at, values_at = _addresses(
        residual, gradient, indices, values, min(2 * k, len(residual)), k
    )
    return Chosen(
        *_core.accumulate_search(at, gradient_at, residual.size, k, tolerance, sign, indices_at, values_at, offset)
    )


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
    room = residual.size // bucket * per_bucket + of_last
    at, gradient_at, indices_at, values_at = _addresses(residual, gradient, indices, values, room)
    return Chosen(
        *_core.accumulate_buckets(
            at, gradient_at, residual.size, bucket, per_bucket, of_last, indices_at, values_at, offset
        )
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
    at, gradient_at, indices_at, values_at = _addresses(residual, gradient, indices, values, k, k)
    return Chosen(*_core.accumulate_random(at, gradient_at, residual.size, k, *draw, indices_at, values_at, offset))


def accumulate_normal(residual: Floats, gradient: Floats | None) -> tuple[float, float]:
    """Mean and standard deviation of residual + gradient; NaN or infinite where one of the sums is."""
    check_inputs(residual, gradient)
    return _core.accumulate_normal(_address(residual), 0 if gradient is None else _address(gradient), residual.size)


def put_back(residual: Floats, indices: Indices, values: Floats, offset: int) -> None:
    """Undoes a move, which wrote ``indices`` and ``values``: what was taken out of ``residual`` is there again."""
    residual[indices - np.uint32(offset)] = values


def _addresses(
    residual: Floats, gradient: Floats | None, indices: Indices, values: Floats, room: int, k: int | None = None
) -> tuple[int, int, int, int]:
    """Where they lie. Raises as ``check_arguments``, which is asked only where one look does not find all as it must
    be: a bucket takes less time than that."""
    look = _core.buffer_of
    inside, given, to, of = look(residual, True), None, look(indices, True), look(values, True)
    if gradient is not None:
        given = look(gradient, False)
    if (
        inside is not None
        and to is not None
        and of is not None
        and inside.dtype == of.dtype == _FLOAT32
        and to.dtype == _UINT32
        and room <= min(to.elements, of.elements)
        and (k is None or 1 <= k <= inside.elements)
        and (gradient is None or (given is not None and given.dtype == _FLOAT32 and given.elements == inside.elements))
    ):
        return inside.pointer, 0 if given is None else given.pointer, to.pointer, of.pointer
    check_arguments(residual, gradient, indices, values, room, k)
    gradient_at = 0 if gradient is None else _address(gradient)
    return _address(residual), gradient_at, _address(indices), _address(values)


def _check_before(before: Floats, residual: Floats, gradient: Floats | None) -> None:
    check_inputs(residual, None, before=before)
    if before.size != residual.size:
        raise ValueError(f"before has {before.size} entries, residual {residual.size}: give one for each")
    if gradient is None:
        raise ValueError("before is what a gradient is added to: give a gradient, or leave before out")


def _address(x: npt.NDArray[Any]) -> int:
    return int(x.__array_interface__["data"][0])
