"""What error feedback does around a selection on a GPU: velocities before it; after it the entries of several residuals
become one list, and what leaves is rounded; and a step can be undone.

Whether a gradient takes part, how many entries it gives, and whether a step is undone is known to the GPU alone: these
are numbers of one element, which kernels read, so that nobody waits. On CPUs compressors do this themselves. Gradients
and what leaves are float32 or bfloat16 (numpy has none: uint16 there), all else is float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from telegrad.kernels import is_on_gpu

Array = Any
"""A numpy array, for the oracle; or a contiguous torch tensor on a GPU, of one dimension."""


class Collected(NamedTuple):
    """One of the residuals that entries have left. Those from ``start`` to ``stop`` are its own, of which there may be
    fewer; their indices begin at ``offset``. ``velocity``: of all parts or of none. ``place``: of its gradient, among
    those that were looked at."""

    residual: Array
    velocity: Array | None
    start: int
    stop: int
    offset: int
    place: int


class Moved(NamedTuple):
    """One of the velocities that gradients move. ``offset``: where its gradient begins among all; ``place``: as of
    ``Collected``."""

    velocity: Array
    offset: int
    place: int


class Remade(NamedTuple):
    """One of the arrays whose unit (float64, one element) changes. ``threshold``: as ``unit``, if there is one."""

    values: Array
    unit: Array
    threshold: Array | None


class Kept(NamedTuple):
    """One of the arrays that may have to be again what they were."""

    values: Array
    before: Array


def kernels_of(x: Array) -> Any:
    """The module of functions, ``triton``, for tensors such as ``x``. Raises as ``is_on_gpu``;
    ``TypeError`` for a numpy array."""
    if not is_on_gpu(x, "x"):
        raise TypeError("x is a numpy array, whose error feedback is a Compressor's: give a tensor on a GPU")
    from telegrad.kernels.feedback import triton

    return triton
