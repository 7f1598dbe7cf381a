"""Entries of a GPU into memory that host and GPU share, and sums from there into a dense tensor.

How many entries there are is known to the GPU alone, and what form a sum has to whoever made it: both are words in
memory, which kernels read, so that nobody waits for anybody. Only entries that there are cross the bus.

``indices``: uint32 or int64; ``values`` and dense vectors: what a SparseVector holds (of bfloat16 numpy has uint16).
CPUs need none of this."""

from __future__ import annotations

from typing import Any

from telegrad.kernels import is_on_gpu

Array = Any
"""A numpy array, for the oracle; or a torch tensor on a GPU, or in pinned memory where that is said."""

DENSE = -2
"""The form of a sum that is dense; one of 0 or more is how many entries it has; any other says that it failed."""


def kernels_of(x: Array) -> Any:
    """The module of functions, ``triton``, for tensors such as ``x``. None of them waits. Raises as
    ``is_on_gpu``; ``TypeError`` for a numpy array."""
    if not is_on_gpu(x, "x"):
        raise TypeError("x is a numpy array, which nothing needs to stage: give a tensor on a GPU")
    from telegrad.kernels.staging import triton

    return triton
