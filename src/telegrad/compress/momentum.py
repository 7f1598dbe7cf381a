"""Momentum correction: velocities are accumulated before the selection, on each rank from its own gradients.

A residual of plain gradients gives an entry that waited long all its momentum at once, as if it were a single step's.
So each rank has a velocity u = m·u + g, the residual takes up u, and the optimizer itself runs without momentum. Since
velocities add up over ranks, a dense sum of them is ordinary momentum: small tensors and dense steps go the same way.
Sources: RedSync, Algorithm 4 (its Nesterov branch mended), after Deep Gradient Compression, §3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from telegrad.compress.residual import SAFE, Entry, EntryStore, Floats, all_zero, norm
from telegrad.kernels.select.cpu import VelocityStep


@dataclass(slots=True)
class Velocity(Entry):
    """The momentum of one parameter on this rank."""


class Velocities(EntryStore[Velocity]):
    """The velocities of all parameters, compressed or not, all zero at first.

    ``sizes``: elements of each parameter. ``factor``: m in (0, 1). ``nesterov``: u = m·(u + g) and u + g is passed on,
    else u = m·u + g and u. ``masking``: entries that were sent have their velocity set to zero, so that no stale
    direction is repeated."""

    def __init__(
        self, sizes: Mapping[str, int], factor: float, *, nesterov: bool = False, masking: bool = True
    ) -> None:
        self.factor = float(factor)
        self.nesterov = nesterov
        self.masking = masking
        super().__init__(
            "velocity", (Velocity(name, np.zeros(size, np.float32), peak=0.0) for name, size in sizes.items())
        )

    def anew(self, sizes: Mapping[str, int]) -> Velocities:
        """Velocities with the same settings for other parameters, all zero."""
        return Velocities(sizes, self.factor, nesterov=self.nesterov, masking=self.masking)

    def may_overflow(self, name: str, gradient: Floats) -> bool:
        """False where a finite ``gradient`` leaves velocity and contribution far below the largest float32."""
        return not self[name].peak + norm(gradient) < SAFE

    def contribution(self, name: str, gradient: Floats, unit: float) -> Floats:
        """The value that ``apply`` would return, as a new array; changes nothing. It may hold infinities."""
        entry, m = self[name], np.float32(self.factor)
        with np.errstate(over="ignore", invalid="ignore"):
            velocity = entry.values * np.float32(entry.unit / unit)
            if self.nesterov:
                return gradient + m * (velocity + gradient)
            return m * velocity + gradient

    def apply(self, name: str, gradient: Floats, unit: float) -> Floats:
        """Moves the velocity by a finite ``gradient`` in ``unit``, and returns the contribution to the residual or the
        sum.

        That is the velocity's own memory, only to be read, or ``gradient``, overwritten. If the gradient is all zero,
        the parameter took no part: the velocity stays, and the zeros are returned. A velocity that would overflow
        becomes zero; look for that first, with ``contribution``."""
        if all_zero(gradient):
            return gradient
        entry = self[name]
        self.about_to_change(entry)
        if entry.unit != unit:
            entry.rescale(unit)
        m, velocity, size = self.factor, entry.values, norm(gradient)
        huge = not entry.peak + size < SAFE
        with np.errstate(over="ignore", invalid="ignore"):
            if self.nesterov:
                velocity += gradient
                velocity *= np.float32(m)
                gradient += velocity
            else:
                velocity *= np.float32(m)
                velocity += gradient
        if huge:
            result = gradient if self.nesterov else velocity.copy()
            velocity[~np.isfinite(velocity)] = 0
            entry.peak = float(np.abs(velocity).max())
            return result
        entry.peak = m * entry.peak + size
        return gradient if self.nesterov else velocity

    def step(self, name: str, unit: float, *, masks: bool) -> VelocityStep | None:
        """For ``cpu.accumulate_reused``, which then does what ``apply`` and ``clear`` do; ``moved`` is to be called
        afterwards. ``None``: the velocity has another unit, which only ``apply`` converts."""
        entry = self[name]
        if entry.unit != unit:
            return None
        before = self.renew(entry) if self.records or self.is_open else None
        return VelocityStep(entry.values, before, self.factor, self.nesterov, masks and self.masking)

    def moved(self, name: str, added: float) -> None:
        """After a ``step`` by a gradient whose largest magnitude is ``added``."""
        entry = self[name]
        if entry.peak + added < SAFE:
            entry.peak = self.factor * entry.peak + added
        else:
            velocity = entry.values
            velocity[~np.isfinite(velocity)] = 0
            entry.peak = float(np.abs(velocity).max())

    def state_dict(self) -> dict[str, Any]:
        """A copy: per parameter its velocity (float32, flat) and unit; as at ``begin()``."""
        return {entry.name: {"velocity": entry.values.copy(), "unit": entry.unit} for entry in self.settled()}

    def clear(self, name: str, where: npt.NDArray[np.uint32]) -> None:
        """Those entries were sent: with ``masking`` they have no velocity any more."""
        if self.masking:
            self.forget(name, where)

    def forget(self, name: str, where: npt.NDArray[np.uint32]) -> None:
        """Those entries have no velocity any more."""
        entry = self[name]
        self.about_to_change(entry)
        entry.values[where] = 0
