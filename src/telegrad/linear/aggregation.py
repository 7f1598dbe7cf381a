"""How what ranks have computed meets: sums of gradients, and changes of coordinates that all ranks gather."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from telegrad import Communicator, SparseVector
from telegrad.linear.losses import F32

U32 = npt.NDArray[np.uint32]
Slices = list[int]
"""Where each rank's slice of the features begins, and behind them the number of features."""


class Aggregation(Protocol):
    """How ranks' gradients meet, where it is not by ``comm.all_reduce`` of sparse streams: for comparisons."""

    def prepare(self, gradient: SparseVector) -> Any:
        """Counts as computing."""

    def sum(self, prepared: Any) -> SparseVector:
        """Counts as communication."""


class SumInFlight(Protocol):
    def result(self) -> Any:
        """Waits for the sum, a ``SparseVector``."""


@runtime_checkable
class OverlappedAggregation(Aggregation, Protocol):
    """One whose sums can travel while the next gradient is computed."""

    def begin(self, prepared: Any) -> SumInFlight:
        """Returns at once."""


class SparseSum:
    """Sparse gradients, summed without loss. Without ``comm`` there is one rank."""

    def __init__(self, comm: Communicator | None) -> None:
        self._comm = comm

    def prepare(self, gradient: SparseVector) -> SparseVector:
        return gradient

    def sum(self, prepared: SparseVector) -> SparseVector:
        total: SparseVector = prepared if self._comm is None else self._comm.all_reduce(prepared)
        return total

    def begin(self, prepared: SparseVector) -> SumInFlight:
        if self._comm is None:
            return _Arrived(prepared)
        work: SumInFlight = self._comm.all_reduce(prepared, async_op=True)
        return work


class _Arrived:
    def __init__(self, stream: SparseVector) -> None:
        self._stream = stream

    def result(self) -> SparseVector:
        return self._stream


@runtime_checkable
class Gathering(Protocol):
    """How the changes of coordinates reach all ranks. Rank r's are in its slice of the features, rising."""

    def prepare(self, indices: U32, changes: F32, slices: Slices) -> Any:
        """Counts as computing."""

    def gather(self, prepared: Any) -> tuple[U32, F32]:
        """All ranks' indices and changes, rising; changes of 0 may be left out. Counts as communication."""


class SparseGather:
    """Indices and changes by ``comm.all_gather`` of sparse streams: what ``train`` does unless told otherwise."""

    def __init__(self, comm: Communicator | None) -> None:
        self._comm = comm

    def prepare(self, indices: U32, changes: F32, slices: Slices) -> SparseVector:
        return SparseVector.trusted(indices, changes, slices[-1])

    def gather(self, prepared: SparseVector) -> tuple[U32, F32]:
        every: list[SparseVector] = [prepared] if self._comm is None else self._comm.all_gather(prepared)
        return np.concatenate([one.raw_indices for one in every]), np.concatenate([one.raw_values for one in every])


class DenseGather:
    """Whole slices of the model's change as dense vectors, the paper's other way: for comparisons.

    ``all_gather(slice, lengths)`` returns all ranks' slices as one float32 vector of all features; ``lengths`` are the
    elements of each rank's, which are this rank's own ``slice.size`` at its rank. By default it is telegrad's own.
    """

    def __init__(self, comm: Communicator, all_gather: Callable[[F32, list[int]], F32] | None = None) -> None:
        self._rank = comm.rank
        self._all_gather = all_gather or (lambda x, lengths: comm.all_gather(x, counts=lengths))

    def prepare(self, indices: U32, changes: F32, slices: Slices) -> tuple[F32, list[int]]:
        lengths = np.diff(slices).tolist()
        own = np.zeros(lengths[self._rank], np.float32)
        own[indices - np.uint32(slices[self._rank])] = changes
        return own, lengths

    def gather(self, prepared: tuple[F32, list[int]]) -> tuple[U32, F32]:
        changes = self._all_gather(*prepared)
        indices = np.flatnonzero(changes).astype(np.uint32)
        return indices, changes[indices]
