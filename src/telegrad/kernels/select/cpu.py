"""Selection with the core's kernels. Arrays are as ``check_arguments`` demands.

What functions have in common: ``gradient`` is added to ``residual`` (``None``: nothing is). The chosen entries are
moved out of it: written, in ascending order, into ``indices`` (position + ``offset``) and ``values``; zero in the
residual. ``sign``: only entries of that sign can be chosen.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from telegrad import _core
from telegrad.kernels.select import Chosen, Sign, check_arguments, check_buckets, check_inputs

Floats = npt.NDArray[np.float32]
Indices = npt.NDArray[np.uint32]

_FLOAT32, _UINT32 = _core.DType.f32, _core.DType.u32
_NO_VELOCITY = (None, None, 0.0, False, False)


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
    given, out = _addresses(residual, gradient, indices, values, 0)
    return _core.accumulate_select(*given, threshold, sign, *out, indices.size, offset)


class VelocityStep(NamedTuple):
    """A velocity u, which a gradient g moves: u = ``factor``·u + g, which is then added to the residual. With
    ``nesterov`` u = factor·(u + g), and u + g is added. ``before``: what u was, if ``values`` do not hold it; only
    read. ``masks``: u becomes zero where entries leave."""

    values: Floats
    before: Floats | None
    factor: float
    nesterov: bool
    masks: bool


class Reused(NamedTuple):
    """What ``accumulate_reused`` did. Where it is not ``sound``, the rest says nothing."""

    sound: bool
    exact: bool  # by a new threshold
    moved: int  # entries
    threshold: float  # the lowest magnitude that was looked for
    peak: float  # no magnitude that stays is larger; NaN: NaN was moved
    added: float  # the largest magnitude of the gradient, where there is a velocity or a finite limit


def accumulate_reused(
    residual: Floats,
    gradient: Floats,
    k: int,
    threshold: float | None,
    indices: Indices,
    values: Floats,
    offset: int,
    *,
    is_due: bool = False,
    before: Floats | None = None,
    velocity: VelocityStep | None = None,
    limit: float = math.nan,
) -> Reused:
    """Moves the entries of magnitude >= ``threshold`` if they are k/2 to 2k, else those of ``accumulate_topk``; so it
    does without a threshold (``None``), and where a new one ``is_due``. Memory is passed over once, as a rule.

    ``before``: what the gradient is added to, in place of what ``residual`` holds; only read. ``limit``: it ends where
    a magnitude of the gradient is at least that, or NaN (NaN: there is no limit); what was to be written is undefined
    then. So it needs ``before``, also of the velocity.
    """
    step: tuple[Any, Any, float, bool, bool] = _NO_VELOCITY if velocity is None else velocity
    wanted = (k, (k + 1) // 2, threshold or 0.0, is_due)
    found = _core.accumulate_reused(residual, before, gradient, *step, *wanted, indices, values, offset, limit)
    if found is None:
        _check_reused(residual, gradient, k, indices, values, before, velocity)
    assert found is not None
    return Reused._make(found)


def accumulate_topk(
    residual: Floats, gradient: Floats | None, k: int, indices: Indices, values: Floats, offset: int, sign: Sign = 0
) -> Chosen:
    """Moves exactly the ``k`` (1 to all) entries of largest magnitude; of one sign, all of it if there are fewer."""
    given, out = _addresses(residual, gradient, indices, values, k, k)
    return Chosen(*_core.accumulate_topk(*given, k, sign, *out, offset))


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
    given, out = _addresses(residual, gradient, indices, values, k, k)
    return Chosen(*_core.accumulate_trimmed(*given, k, step, sign, *out, offset))


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
    given, out = _addresses(residual, gradient, indices, values, min(2 * k, len(residual)), k)
    return Chosen(*_core.accumulate_search(*given, k, tolerance, sign, *out, offset))


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
    given, out = _addresses(residual, gradient, indices, values, room)
    return Chosen(*_core.accumulate_buckets(*given, bucket, per_bucket, of_last, *out, offset))


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
    given, out = _addresses(residual, gradient, indices, values, k, k)
    return Chosen(*_core.accumulate_random(*given, k, *draw, *out, offset))


def accumulate_normal(residual: Floats, gradient: Floats | None) -> tuple[float, float]:
    """Mean and standard deviation of residual + gradient; NaN or infinite where one of the sums is."""
    check_inputs(residual, gradient)
    return _core.accumulate_normal(_address(residual), 0 if gradient is None else _address(gradient), residual.size)


def put_back(residual: Floats, indices: Indices, values: Floats, offset: int) -> None:
    """Undoes a move, which wrote ``indices`` and ``values``: what was taken out of ``residual`` is there again."""
    residual[indices - np.uint32(offset)] = values


def _addresses(
    residual: Floats, gradient: Floats | None, indices: Indices, values: Floats, room: int, k: int | None = None
) -> tuple[tuple[int, int, int], tuple[int, int]]:
    """Addresses and length of residual and gradient, and addresses of the outputs. Raises as ``check_arguments``,
    which is asked only where one look does not find all as it must be: a bucket takes less time than that."""
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
        return (inside.pointer, 0 if given is None else given.pointer, residual.size), (to.pointer, of.pointer)
    check_arguments(residual, gradient, indices, values, room, k)
    gradient_at = 0 if gradient is None else _address(gradient)
    return (_address(residual), gradient_at, residual.size), (_address(indices), _address(values))


def _check_reused(
    residual: Floats,
    gradient: Floats,
    k: int,
    indices: Indices,
    values: Floats,
    before: Floats | None,
    velocity: VelocityStep | None,
) -> None:
    check_arguments(residual, gradient, indices, values, min(2 * k, residual.size), k)
    given = {"before": before}
    if velocity is not None:
        given |= {"velocity.values": velocity.values, "velocity.before": velocity.before}
    for name, one in given.items():
        if one is not None:
            check_inputs(residual, None, **{name: one})
            if one.size != residual.size:
                raise ValueError(f"{name} has {one.size} entries, residual {residual.size}: give one for each")


def _address(x: npt.NDArray[Any]) -> int:
    return int(x.__array_interface__["data"][0])
