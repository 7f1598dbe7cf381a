"""Compressor: the gradients of several parameters become one sparse stream over their common index space."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from telegrad.compress.residual import Residual, ResidualStore
from telegrad.compress.selection import ExactTopK, ReusedThreshold, Selection

SELECTIONS = ("reused", "topk")
_LOOK = 1 << 14  # entries per look for a value that is not zero

Floats = npt.NDArray[np.float32]
Indices = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Part:
    """A parameter's place in the index space: its residual and its first index."""

    entry: Residual
    offset: int


class Compressor:
    """Error feedback with a selection policy.

    ``sizes``: elements of each parameter by name. ``density``: the share of each parameter's entries that is sent.
    ``selection``: ``"topk"`` (exact) or ``"reused"`` (a threshold evaluated exactly at every ``interval``-th call).
    Raises ``ValueError`` or ``TypeError`` for bad arguments.
    """

    def __init__(
        self, sizes: Mapping[str, int], *, density: float = 0.01, selection: str = "reused", interval: int = 8
    ) -> None:
        if selection not in SELECTIONS:
            raise ValueError(f"selection={selection!r} does not exist: use one of {', '.join(SELECTIONS)}")
        reused = ReusedThreshold(interval)  # made in any case: it checks the interval
        self.policy: Selection = ExactTopK() if selection == "topk" else reused
        self.residuals = ResidualStore(sizes, density)

    def part(self, name: str, offset: int) -> Part:
        """Parameter ``name`` at ``offset`` of the index space. Raises ``ValueError`` for an unknown name."""
        return Part(self.residuals[name], offset)

    def capacity(self, parts: Iterable[Part]) -> int:
        """The most entries that ``compress`` can return for ``parts``."""
        return sum(self.policy.capacity(part.entry) for part in parts)

    def compress(self, parts: Sequence[Part], flat: Floats, indices: Indices, values: Floats) -> int:
        """Selects from the gradients that lie in ``flat``; returns the number of entries.

        ``flat``: float32, the whole index space, free of NaN and infinity. ``parts`` are ordered by offset;
        ``indices`` and ``values`` hold ``capacity(parts)``. What is not selected stays in the residuals. A gradient
        of nothing but zeros means that the parameter took no part in this step: its residual stays as it is and
        nothing is sent for it, because the result might not be applied.
        """
        count = 0
        for part in parts:
            entry, offset = part.entry, part.offset
            gradient = flat[offset : offset + entry.values.size]
            if gradient[0] != 0 or not _all_zero(gradient):
                count += self.policy.select(entry, gradient, indices[count:], values[count:], offset)
        return count

    def keep(self, parts: Sequence[Part], indices: Indices, values: Floats) -> None:
        """Adds to the residuals what did not leave after all, such as the rounding errors of what was sent.

        ``indices`` are ascending positions of the common index space, all inside ``parts``.
        """
        for part in parts:
            offset, size = part.offset, part.entry.values.size
            first, last = np.searchsorted(indices, np.array([offset, offset + size], np.uint32))
            part.entry.values[indices[first:last] - np.uint32(offset)] += values[first:last]

    def state_dict(self) -> dict[str, Any]:
        """A copy of all state, as plain numpy arrays and numbers."""
        return self.residuals.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes a ``state_dict()`` over. Raises ``ValueError`` naming the parameters that do not fit."""
        self.residuals.load_state_dict(state)


def _all_zero(x: Floats) -> bool:
    return not any(x[start : start + _LOOK].any() for start in range(0, x.size, _LOOK))
