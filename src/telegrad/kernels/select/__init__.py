"""Which entries of a residual are sent: one pass adds the gradient, and moves the chosen entries out.

Entries are ranked by their magnitude, as the bits of a float32 order it: a NaN is larger than infinity, so that it is
chosen first rather than hiding in a residual for ever. Among equal ones the lowest index is first.

``cpu`` does it for numpy arrays, ``triton`` for torch tensors on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from telegrad.kernels.placement import is_on_gpu

Sign = Literal[0, 1, -1]
"""Which entries can be chosen: 0: all; 1: positive ones only; -1: negative ones only. A zero is neither."""

Array = Any
"""A numpy array, or a torch tensor on a GPU."""

TINY = float(np.finfo(np.float32).tiny)
"""Smallest normal float32. A threshold that is reused is never below it: with flush-to-zero everything would pass."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """What a selection did."""

    count: int  # entries moved
    threshold: float  # the lowest magnitude that was looked for
    peak: float  # no magnitude that stays in the residual is larger


class SelectionKernels(Protocol):
    """The selections for arrays of one kind. What each promises is said in ``cpu``."""

    def accumulate_all(self, residual: Array, gradient: Array, indices: Array, values: Array, offset: int) -> None: ...

    def accumulate_select(
        self,
        residual: Array,
        gradient: Array | None,
        threshold: float,
        indices: Array,
        values: Array,
        offset: int,
        sign: Sign = 0,
    ) -> int: ...

    def accumulate_topk(
        self,
        residual: Array,
        gradient: Array | None,
        k: int,
        indices: Array,
        values: Array,
        offset: int,
        sign: Sign = 0,
    ) -> Chosen: ...

    def accumulate_trimmed(
        self,
        residual: Array,
        gradient: Array | None,
        k: int,
        step: float,
        indices: Array,
        values: Array,
        offset: int,
        sign: Sign = 0,
    ) -> Chosen: ...

    def accumulate_search(
        self,
        residual: Array,
        gradient: Array | None,
        k: int,
        tolerance: float,
        indices: Array,
        values: Array,
        offset: int,
        sign: Sign = 0,
    ) -> Chosen: ...

    def accumulate_buckets(
        self,
        residual: Array,
        gradient: Array | None,
        bucket: int,
        per_bucket: int,
        of_last: int,
        indices: Array,
        values: Array,
        offset: int,
    ) -> Chosen: ...

    def accumulate_random(
        self,
        residual: Array,
        gradient: Array | None,
        k: int,
        draw: tuple[int, int, int, int],
        indices: Array,
        values: Array,
        offset: int,
    ) -> Chosen: ...

    def accumulate_normal(self, residual: Array, gradient: Array | None) -> tuple[float, float]: ...

    def put_back(self, residual: Array, indices: Array, values: Array, offset: int) -> None: ...


def kernels_of(residual: Array) -> SelectionKernels:
    """The selections for arrays such as ``residual``: by where it lies.

    Raises as ``placement.is_on_gpu``.
    """
    if is_on_gpu(residual, "residual"):
        from telegrad.kernels.select import triton

        return triton
    from telegrad.kernels.select import cpu

    return cpu


def queues_of(residual: Array) -> Any:
    """The module of selections that nobody waits for, ``triton``, for a tensor on a GPU.

    Raises as ``placement.is_on_gpu``; ``TypeError`` for a numpy array.
    """
    if not is_on_gpu(residual, "residual"):
        raise TypeError("residual is a numpy array, whose selections nobody queues: give a tensor on a GPU")
    from telegrad.kernels.select import triton

    return triton
