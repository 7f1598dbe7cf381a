"""Received entries into a dense vector: added, written, or their places cleared.

``dense``: float32, float16 or bfloat16, contiguous. ``indices``: uint32 or int64, ``values``: of the dtype of
``dense``; one of each for an entry; strictly increasing. ``base`` is the index of ``dense[0]``, so that a slice of a
vector can be written. ``held``, int64, one element beside ``dense``: how many entries count, of those that are given;
below 0 none, ``None``: all. So a GPU tells nobody how many it has. Sums are computed in float32 and rounded once; a NaN
is the one quiet NaN. numpy has no bfloat16: there it is uint16.

``cpu`` does it for numpy arrays with the core's kernels, ``triton`` for torch tensors on a GPU, and ``naive`` is the
oracle of both, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from telegrad.kernels.placement import is_on_gpu

Array = Any
"""A numpy array, or a torch tensor on a GPU."""


class Kernels(Protocol):
    """The functions for arrays of one kind. All but the first need indices that are in order and inside ``dense``."""

    def faults_of(self, runs: Sequence[Array], size: int, base: int) -> list[int]:
        """Of every run of indices, how many are not greater than the one before, or not in [base, base + size)."""

    def scatter_add(
        self, dense: Array, indices: Array, values: Array, base: int = 0, held: Array | None = None
    ) -> None:
        """``dense[index - base] += value``."""

    def scatter_set(
        self, dense: Array, indices: Array, values: Array, base: int = 0, held: Array | None = None
    ) -> None:
        """``dense[index - base] = value``."""

    def clear(self, dense: Array, indices: Array, base: int = 0, held: Array | None = None) -> None:
        """``dense[index - base] = 0``."""


def kernels_of(dense: Array) -> Kernels:
    """The functions for arrays such as ``dense``: by where it lies. Raises as ``placement.is_on_gpu``."""
    if is_on_gpu(dense, "dense"):
        from telegrad.kernels.scatter import triton

        return triton
    from telegrad.kernels.scatter import cpu

    return cpu


def add_streams(dense: Array, streams: Sequence[tuple[Array, Array]], base: int = 0) -> None:
    """Adds received streams, each its indices and values, one after the other: the same bits in every run.

    All are checked before the first is added; a GPU is waited for once. Raises ``ValueError`` where one has not as many
    values as indices, or indices that are not strictly increasing or lie outside ``dense``: ``dense`` is as it was.
    """
    for number, (indices, values) in enumerate(streams):
        if len(indices) != len(values):
            raise ValueError(
                f"stream {number} has {len(indices)} indices but {len(values)} values: give one value for each index"
            )
    kernels = kernels_of(dense)
    size = len(dense)
    faults = kernels.faults_of([indices for indices, _ in streams], size, base)
    for number, count in enumerate(faults):
        if count:
            raise ValueError(
                f"stream {number} has {count} indices that are not above the one before, or not in {base} to "
                f"{base + size - 1}: what was received is damaged, or belongs to another vector; nothing was added"
            )
    for indices, values in streams:
        kernels.scatter_add(dense, indices, values, base)
