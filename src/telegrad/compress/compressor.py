"""Compressor: the gradients of several parameters become one sparse stream over their common index space."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from telegrad.compress.residual import Residual, ResidualStore
from telegrad.compress.selection import Selection
from telegrad.compress.selections import selection_named

_LOOK = 1 << 14  # entries per look for a value that is not zero
# A finite gradient can push a residual over the largest float32 only if the residual is at least half a unit in the
# last place of that, 2**103 (of the largest bfloat16: 2**119). No training in good health is near.
_CANNOT_OVERFLOW = 2.0**100

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
    ``selection``: a name in ``SELECTIONS``; ``interval``: calls from one exact threshold to the next, of those that
    reuse it (``None``: their own default).
    Raises ``ValueError`` or ``TypeError`` for bad arguments.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        *,
        density: float = 0.01,
        selection: str = "reused",
        interval: int | None = None,
    ) -> None:
        self.policy: Selection = selection_named(selection, interval)
        self.residuals = ResidualStore(sizes, density)

    def part(self, name: str, offset: int) -> Part:
        """Parameter ``name`` at ``offset`` of the index space. Raises ``ValueError`` for an unknown name."""
        return Part(self.residuals[name], offset)

    def capacity(self, parts: Iterable[Part]) -> int:
        """The most entries that ``compress`` can return for ``parts``."""
        return sum(self.policy.capacity(part.entry) for part in parts)

    def compress(self, parts: Sequence[Part], flat: Floats, indices: Indices, values: Floats) -> int:
        """Selects from the gradients that lie in ``flat``; returns the number of entries.

        ``flat``: float32, the whole index space, free of NaN and infinity, and nothing in it is ``overflowing``.
        ``parts`` are ordered by offset; ``indices`` and ``values`` hold ``capacity(parts)``. What is not selected
        stays in the residuals. A gradient of nothing but zeros means that the parameter took no part in this step:
        its residual stays as it is and nothing is sent for it, because the result might not be applied.
        """
        count = 0
        for part in parts:
            entry, offset = part.entry, part.offset
            gradient = flat[offset : offset + entry.values.size]
            if gradient[0] != 0 or not _all_zero(gradient):
                self.residuals.about_to_change(entry)
                count += self.policy.select(entry, gradient, indices[count:], values[count:], offset)
        return count

    def keep(self, parts: Sequence[Part], indices: Indices, values: Floats) -> None:
        """Adds to the residuals what did not leave after all, such as the rounding errors of what was sent.

        ``indices`` are ascending positions of the common index space, all inside ``parts``.
        """
        for part, own in _by_part(parts, indices):
            entry, where = part.entry, indices[own] - np.uint32(part.offset)
            self.residuals.about_to_change(entry)
            entry.values[where] += values[own]
            entry.peak = max(entry.peak, float(np.abs(entry.values[where]).max()))

    def overflowing(self, parts: Sequence[Part], flat: Floats, limit: float = math.inf) -> Indices:
        """Where residual + gradient would reach ``limit``, ascending; ``flat`` as for ``compress``.

        Looks at entries only where residuals are so large that it could be: no residual in good health is. Without
        a call of this, ``compress`` of finite gradients can leave infinities in the residuals.
        """
        found = [np.zeros(0, np.uint32)]
        for part in parts:
            entry, offset = part.entry, part.offset
            if entry.peak < _CANNOT_OVERFLOW:
                continue
            gradient = flat[offset : offset + entry.values.size]
            if not _all_zero(gradient):
                with np.errstate(over="ignore"):
                    total = np.abs(entry.values + gradient)
                found.append((np.flatnonzero(total >= np.float32(limit)) + offset).astype(np.uint32))
        return np.concatenate(found)

    def may_overflow(self, parts: Iterable[Part]) -> bool:
        """False where ``overflowing`` finds nothing whatever the gradients are: then it need not be called."""
        return any(part.entry.peak >= _CANNOT_OVERFLOW for part in parts)

    def take(self, parts: Sequence[Part], flat: Floats, indices: Indices) -> Floats:
        """residual + gradient at ``indices``, which are as in ``keep``; both are zero there afterwards."""
        taken = flat[indices]
        flat[indices] = 0
        for part, own in _by_part(parts, indices):
            where = indices[own] - np.uint32(part.offset)
            self.residuals.about_to_change(part.entry)
            with np.errstate(over="ignore"):
                taken[own] += part.entry.values[where]
            part.entry.values[where] = 0
        return taken

    def begin(self) -> None:
        """Opens a step that can be undone: see ``keep_step`` and ``drop_step``. Costs a copy of what it changes."""
        self.residuals.begin()

    def keep_step(self) -> None:
        """Closes the open step, if there is one."""
        self.residuals.keep_step()

    def drop_step(self) -> None:
        """Undoes the open step, if there is one: residuals, thresholds and calls are bitwise as at ``begin()``."""
        self.residuals.drop_step()

    def state_dict(self) -> dict[str, Any]:
        """A copy of all state, as plain numpy arrays and numbers; of an open step it says nothing."""
        return self.residuals.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes a ``state_dict()`` over. Raises ``ValueError`` naming the parameters that do not fit."""
        self.residuals.load_state_dict(state)


def _by_part(parts: Iterable[Part], indices: Indices) -> Iterator[tuple[Part, slice]]:
    """Which of the ascending ``indices`` are whose; parts without any are left out."""
    for part in parts:
        ends = np.array([part.offset, part.offset + part.entry.values.size], np.uint32)
        first, last = np.searchsorted(indices, ends)
        if first < last:
            yield part, slice(int(first), int(last))


def _all_zero(x: Floats) -> bool:
    return not any(x[start : start + _LOOK].any() for start in range(0, x.size, _LOOK))
