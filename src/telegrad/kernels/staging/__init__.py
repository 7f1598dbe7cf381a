"""Entries of a GPU into memory that host and GPU share, and sums from there into a dense tensor.

How many entries there are is known to the GPU alone, and what form a sum has to whoever made it: both are words in
memory, which kernels read, so that nobody waits for anybody. Only entries that there are cross the bus.

``indices``: uint32 or int64; ``values`` and dense vectors: what a SparseVector holds (of bfloat16 numpy has uint16).
CPUs need none of this."""

from __future__ import annotations

from typing import Any, Protocol

from telegrad.kernels.placement import is_on_gpu

Array = Any
"""A numpy array, for the oracle; or a torch tensor on a GPU, or in pinned memory where that is said."""

DENSE = -2
"""The form of a sum that is dense; one of 0 or more is how many entries it has; any other says that it failed."""


class StagingKernels(Protocol):
    """What moves entries and sums. None of them waits."""

    def stage(
        self, indices: Array, values: Array, count: Array, to_count: Array, to_indices: Array, to_values: Array
    ) -> None:
        """``to_count[0] = count[0]``; as many entries as that says, of those that are given, into the other two.

        ``count`` (int32 or int64) has one element. What begins with ``to_`` is pinned: int64, uint32, and as
        ``values``. An int64 index beyond 32 bits becomes 2**32 - 1, which no stream has."""

    def write_sum(self, out: Array, form: Array, dense: Array, indices: Array, values: Array, absent: float) -> None:
        """Writes all of ``out``: the sum that ``form`` (int64, one element, on the GPU) tells of.

        A dense one is in ``dense``. Entries, in the first of ``indices`` (uint32) and ``values``, are written over
        ``absent``. Of one that failed, ones in all bits: NaN. These three are pinned."""

    def add_sum(self, out: Array, form: Array, dense: Array, indices: Array, values: Array) -> None:
        """Adds to ``out``, float32, what ``form`` tells of, which lies as for ``write_sum``; nothing of what failed."""


def kernels_of(x: Array) -> StagingKernels:
    """The functions for tensors such as ``x``. Raises as ``placement.is_on_gpu``; ``TypeError`` for a numpy array."""
    if not is_on_gpu(x, "x"):
        raise TypeError("x is a numpy array, which nothing needs to stage: give a tensor on a GPU")
    from telegrad.kernels.staging import triton

    return triton
