"""What ranks give in each call: entries of recorded gradients, selected with residuals as in training, and patterns
made to break bounds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from lab.topk.recording import Recording
from telegrad.compress import Compressor
from telegrad.sparse_vector import SparseVector
from telegrad.sparse_vector.vector import MAX_LENGTH

_BLOCK_STRIDE = 131  # between the gradients of a rank's blocks

Indices = npt.NDArray[np.uint32]


class SelectingRank:
    """One rank's residuals and thresholds: ``density`` of each parameter of ``recording`` is selected, as by DDPState.

    ``selection``: a name in ``telegrad.compress.SELECTIONS``.
    """

    def __init__(self, recording: Recording, density: float, selection: str) -> None:
        self._compressor = Compressor(
            dict(zip(recording.names, recording.sizes, strict=True)), density=density, selection=selection
        )
        ends = np.cumsum(recording.sizes).tolist()
        self._parts = [
            self._compressor.part(name, end - size)
            for name, size, end in zip(recording.names, recording.sizes, ends, strict=True)
        ]
        room = self._compressor.capacity(self._parts)
        self._indices, self._values = np.empty(room, np.uint32), np.empty(room, np.float32)

    def select(self, gradient: npt.NDArray[np.float32]) -> SparseVector:
        """What it gives; all else stays in its residuals."""
        count = self._compressor.compress(self._parts, gradient, self._indices, self._values)
        return SparseVector.trusted(self._indices[:count].copy(), self._values[:count].copy(), gradient.size)

    def take_back(self, left: SparseVector) -> None:
        """What it gave but no sum has kept goes back into its residuals."""
        self._compressor.keep(self._parts, left.raw_indices, left.raw_values)


def wanted(recording: Recording, density: float) -> int:
    """k: how many entries a rank is to select."""
    return sum(max(1, round(density * size)) for size in recording.sizes)


def streams_of(
    recording: Recording, density: float, selection: str, calls: Callable[[int], int], ranks: int
) -> list[list[SparseVector]]:
    """By call, and rank as far as it takes part: ``calls(rank)`` calls. Where all that is selected leaves for good,
    what a rank gives does not depend on how many others there are."""
    found: list[list[SparseVector]] = [[] for _ in range(max(calls(rank) for rank in range(ranks)))]
    for rank in range(ranks):
        selecting = SelectingRank(recording, density, selection)
        for call in range(calls(rank)):
            found[call].append(selecting.select(recording.gradient(rank, call)))
    return found


def side_by_side(
    recording: Recording, density: float, selection: str, calls: int, ranks: int, blocks: int
) -> list[list[SparseVector]]:
    """As ``streams_of``, of a larger model: see ``streams_of_rank``."""
    by_rank = [streams_of_rank(recording, density, selection, calls, rank, blocks) for rank in range(ranks)]
    return [list(streams) for streams in zip(*by_rank, strict=True)]


def streams_of_rank(
    recording: Recording, density: float, selection: str, calls: int, rank: int, blocks: int
) -> list[SparseVector]:
    """By call: of ``blocks`` recorded gradients one after another, each with residuals of its own and on every rank
    others. Raises ``ValueError`` for more elements than a stream has."""
    n = recording.elements
    if blocks * n > MAX_LENGTH:
        raise ValueError(f"blocks={blocks} of {n:,} elements are more than a stream has: use fewer")
    parts: list[list[SparseVector]] = [[] for _ in range(calls)]
    for block in range(blocks):
        selecting = SelectingRank(recording, density, selection)
        for call in range(calls):
            parts[call].append(selecting.select(recording.gradient(rank + _BLOCK_STRIDE * block, call)))
    return [
        SparseVector.trusted(
            np.concatenate([one.raw_indices + np.uint32(n * block) for block, one in enumerate(own)]),
            np.concatenate([one.raw_values for one in own]),
            n * blocks,
        )
        for own in parts
    ]


def _among(begin: int, end: int, k: int, random: np.random.Generator) -> Indices:
    count = min(k, end - begin)
    return np.sort(random.choice(end - begin, count, replace=False)).astype(np.uint32) + np.uint32(begin)


def _one_slice(rank: int, ranks: int, call: int, n: int, k: int, random: np.random.Generator) -> Indices:
    return _among(0, n // ranks, k, random)


def _elsewhere(rank: int, ranks: int, call: int, n: int, k: int, random: np.random.Generator) -> Indices:
    return _among(n - n // 50, n, k, random) if rank == 0 else _among(0, n // 50, k, random)


def _stale(rank: int, ranks: int, call: int, n: int, k: int, random: np.random.Generator) -> Indices:
    at = call % ranks
    return _among(n * at // ranks, n * (at + 1) // ranks, k, random)


def _identical(rank: int, ranks: int, call: int, n: int, k: int, random: np.random.Generator) -> Indices:
    return _among(0, n // 3, k, np.random.default_rng(call))


def _disjoint(rank: int, ranks: int, call: int, n: int, k: int, random: np.random.Generator) -> Indices:
    return _among(n * rank // ranks, n * (rank + 1) // ranks, k, random)


PATTERNS: dict[str, tuple[str, Callable[[int, int, int, int, int, np.random.Generator], Indices]]] = {
    "one-slice": ("all entries of all ranks in one slice", _one_slice),
    "one-rank-elsewhere": ("one rank's entries at the other end", _elsewhere),
    "gone-stale": ("all entries in one slice, in the next call in the next one", _stale),
    "identical": ("all ranks at the same indices", _identical),
    "disjoint": ("each rank in a slice of its own", _disjoint),
}
"""By name: what it is, and the indices of ``rank`` of ``ranks`` in a call."""


def pattern_stream(name: str, rank: int, ranks: int, call: int, n: int, k: int) -> SparseVector:
    """Up to ``k`` entries of ``n``; the larger ones lie together, so that shares of the sum are unlike too."""
    random = np.random.default_rng([rank, call])
    indices = PATTERNS[name][1](rank, ranks, call, n, k, random)
    values = random.standard_normal(indices.size) * np.where(indices < n // 8, 8.0, 1.0)
    return SparseVector.trusted(indices, values.astype(np.float32), n)
