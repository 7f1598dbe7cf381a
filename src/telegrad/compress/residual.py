"""Error feedback: what was not sent waits in a residual, one for each parameter and keyed by its name."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from telegrad.compress.entries import Entry, EntryStore
from telegrad.kernels.select import SelectionKernels, kernels_of


@dataclass(slots=True)
class Residual(Entry):
    """What one parameter has not sent yet, with the state of its selection."""

    k: int
    threshold: float | None = None  # of the last call; None: evaluate it exactly
    calls: int = 0  # since the threshold was last evaluated exactly

    @property
    def kernels(self) -> SelectionKernels:
        """The selections that run where the residual lies."""
        return kernels_of(self.values)

    def rescale(self, unit: float) -> None:
        """As ``Entry.rescale``; the threshold follows."""
        if self.threshold is not None:
            self.threshold *= min(self.unit / unit, 1e300)
            if not 0 < self.threshold <= float(np.finfo(np.float32).max):
                self.threshold = None
        Entry.rescale(self, unit)


class ResidualStore(EntryStore[Residual]):
    """The residuals of all compressed parameters, all zero at first.

    ``sizes``: elements of each parameter. ``density``: in (0, 1]; k = max(1, round(density * size)). ``densities``: of
    those parameters that have another one.
    """

    def __init__(self, sizes: Mapping[str, int], density: float, densities: Mapping[str, float] | None = None) -> None:
        self._density = check_density(density)
        self._densities = {name: check_density(one) for name, one in (densities or {}).items()}
        super().__init__(
            "residual",
            (
                Residual(name, np.zeros(size, np.float32), _share(self._density_of(name), size), peak=0.0)
                for name, size in sizes.items()
            ),
        )

    @property
    def density(self) -> float:
        """The share of each parameter's entries that k is, where it has no other."""
        return self._density

    def raise_density(self, least: float) -> None:
        """From now on k is as for a density of at least ``least``; 0: as for its own. For a warm-up.

        Where k changes, the threshold is evaluated anew.
        """
        for entry in self:
            k = _share(max(least, self._density_of(entry.name)), entry.values.size)
            if k != entry.k:
                self.about_to_change(entry)
                entry.k, entry.threshold, entry.calls = k, None, 0

    def _density_of(self, name: str) -> float:
        return self._densities.get(name, self._density)

    def state_dict(self) -> dict[str, Any]:
        """A copy: per parameter its residual (float32, flat), its unit, threshold and calls, and k.

        Of an open step it says nothing: it is the state at ``begin()``.
        """
        return {
            "density": self._density,
            "parameters": {
                entry.name: {
                    "residual": entry.values.copy(),
                    "unit": entry.unit,
                    "threshold": entry.threshold,
                    "calls": entry.calls,
                    "k": entry.k,
                }
                for entry in self.settled()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes a ``state_dict()`` over and closes an open step; nothing is changed if it does not fit.

        Thresholds taken for another k are evaluated anew. Raises ``ValueError`` naming the parameters that are
        missing, unknown, of another size, or damaged.
        """
        self.load_checked(state, self.check(state))

    def check(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The arrays of a state that fits, for ``load_checked``; changes nothing. Raises as ``load_state_dict``."""
        if not isinstance(state, Mapping) or not isinstance(state.get("parameters"), Mapping):
            raise ValueError("state has no 'parameters': it must come from state_dict()")
        given: Mapping[str, Any] = state["parameters"]
        arrays = self.fitting(given, "state['parameters']")
        for name, entry in given.items():
            _check_selection(entry, f"state['parameters'][{name!r}]")
        return arrays

    def load_checked(self, state: Mapping[str, Any], arrays: dict[str, Any]) -> None:
        """Takes over what ``check`` has found to fit."""
        given: Mapping[str, Any] = state["parameters"]
        same_density = state.get("density") == self._density
        self.take_over(arrays, given)
        for entry in self:
            saved = given[entry.name]
            same = saved["k"] == entry.k if "k" in saved else same_density
            entry.threshold = saved["threshold"] if same else None
            entry.calls = operator.index(saved["calls"]) if same else 0


def check_density(density: float) -> float:
    """``density`` as a float if it is in (0, 1]; else ``TypeError`` or ``ValueError``."""
    if isinstance(density, bool) or not isinstance(density, numbers.Real):
        raise TypeError(f"density={density!r} must be a number in (0, 1]: the share of entries to send")
    if not 0 < density <= 1:
        raise ValueError(f"density={density} must be in (0, 1]: 0.01 sends one entry in a hundred")
    return float(density)


def _share(density: float, size: int) -> int:
    return max(1, round(density * size))


def _check_selection(entry: Mapping[str, Any], where: str) -> None:
    if not {"threshold", "calls"} <= entry.keys():
        raise ValueError(f"{where} must have a threshold and calls: it must come from state_dict()")
    threshold, calls = entry["threshold"], entry["calls"]
    if threshold is not None and not (isinstance(threshold, float) and threshold >= 0):
        raise ValueError(f"{where}['threshold'] is {threshold!r}: it must be None or a float of at least 0")
    if isinstance(calls, bool) or not isinstance(calls, (int, np.integer)) or calls < 0:
        raise ValueError(f"{where}['calls'] is {calls!r}: it must be an int of at least 0")
