"""Which entries of a residual are sent: one pass adds the gradient, and moves the chosen entries out.

Entries are ranked by their magnitude, as the bits of a float32 order it: a NaN is larger than infinity, so that it is
chosen first rather than hiding in a residual for ever. Among equal ones the lowest index is first.

``cpu`` does it for numpy arrays, ``triton`` for torch tensors on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
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
    """The selections for arrays of one kind. Arguments, and what each promises, are said in ``cpu``."""

    accumulate_all: Callable[..., None]
    accumulate_select: Callable[..., int]
    accumulate_topk: Callable[..., Chosen]
    accumulate_trimmed: Callable[..., Chosen]
    accumulate_search: Callable[..., Chosen]
    accumulate_buckets: Callable[..., Chosen]
    accumulate_random: Callable[..., Chosen]
    accumulate_normal: Callable[..., tuple[float, float]]
    put_back: Callable[..., None]


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
