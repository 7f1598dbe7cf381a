"""Error feedback: what was not sent waits in a residual, one for each parameter and keyed by its name.

Never keyed by bucket: DDP rebuilds its buckets after the first iteration.

A step can be undone: between ``begin()`` and ``keep_step()`` or ``drop_step()`` the store copies each residual before
its first change.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(slots=True)
class Residual:
    """What one parameter has not sent yet, with the state of its selection."""

    name: str
    values: npt.NDArray[np.float32]
    k: int
    threshold: float | None = None  # of the last call; None: evaluate it exactly
    calls: int = 0  # since the threshold was last evaluated exactly
    peak: float = math.inf  # no magnitude is larger; infinite: nobody has looked. Whoever adds to ``values`` raises it


class ResidualStore:
    """The residuals of all compressed parameters, all zero at first.

    ``sizes``: elements of each parameter. ``density``: in (0, 1]; k = max(1, round(density * size)).
    """

    def __init__(self, sizes: Mapping[str, int], density: float) -> None:
        self._density = check_density(density)
        self._by_name: dict[str, Residual] = {}
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"sizes[{name!r}]={size}: a compressed parameter needs at least one element")
            k = max(1, round(self._density * size))
            self._by_name[name] = Residual(name, np.zeros(size, np.float32), k, peak=0.0)
        self._open = False
        self._before: dict[str, Residual] = {}  # what the open step has changed, as it was
        self._copies: dict[str, npt.NDArray[np.float32]] = {}  # memory for that, kept from step to step

    def __getitem__(self, name: str) -> Residual:
        try:
            return self._by_name[name]
        except KeyError:
            raise ValueError(f"parameter {name!r} has no residual: name it when the compressor is made") from None

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def __iter__(self) -> Iterator[Residual]:
        return iter(self._by_name.values())

    def __len__(self) -> int:
        return len(self._by_name)

    @property
    def density(self) -> float:
        """The share of each parameter's entries that k is."""
        return self._density

    def begin(self) -> None:
        """Opens a step that can be undone. Costs a copy of each residual that the step changes."""
        self.drop_step()
        self._open = True

    def about_to_change(self, entry: Residual) -> None:
        """To be called before ``entry`` changes; copies it if a step is open that has not changed it yet."""
        if self._open and entry.name not in self._before:
            if entry.name not in self._copies:
                self._copies[entry.name] = np.empty_like(entry.values)
            np.copyto(self._copies[entry.name], entry.values)
            self._before[entry.name] = dataclasses.replace(entry, values=self._copies[entry.name])

    def keep_step(self) -> None:
        """Closes the open step, if there is one; it cannot be undone any more."""
        self._open = False
        self._before.clear()

    def drop_step(self) -> None:
        """Undoes the open step, if there is one: all is bitwise as it was at ``begin()``."""
        for before in self._before.values():
            entry = self._by_name[before.name]
            np.copyto(entry.values, before.values)
            entry.threshold, entry.calls, entry.peak = before.threshold, before.calls, before.peak
        self.keep_step()

    def state_dict(self) -> dict[str, Any]:
        """A copy: per parameter its residual (float32, flat, in memory order), threshold and calls; and the density.

        Of an open step it says nothing: it is the state at ``begin()``.
        """
        entries = [self._before.get(entry.name, entry) for entry in self]
        return {
            "density": self._density,
            "parameters": {
                entry.name: {"residual": entry.values.copy(), "threshold": entry.threshold, "calls": entry.calls}
                for entry in entries
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes a ``state_dict()`` over and closes an open step; nothing is changed if it does not fit.

        Thresholds taken at another density are evaluated anew. Raises ``ValueError`` naming the parameters that are
        missing, unknown, of another size, or damaged.
        """
        if not isinstance(state, Mapping) or not isinstance(state.get("parameters"), Mapping):
            raise ValueError("state has no 'parameters': it must come from state_dict()")
        given: Mapping[str, Any] = state["parameters"]
        missing = [name for name in self._by_name if name not in given]
        unknown = [name for name in given if name not in self._by_name]
        if missing or unknown:
            raise ValueError(
                f"state has no residual for {_listed(missing)}, and one too many for {_listed(unknown)}: load it "
                "into the same model with the same small_tensor_elements"
            )
        arrays = {name: _residual_of(name, entry) for name, entry in given.items()}
        for entry in self:
            array = arrays[entry.name]
            if array.shape != entry.values.shape or array.dtype != np.float32:
                raise ValueError(
                    f"state['parameters'][{entry.name!r}]['residual'] is {array.dtype} of shape {array.shape}, but "
                    f"the parameter needs float32 of shape {entry.values.shape}: load it into the model that it was "
                    "saved from"
                )
            if not np.isfinite(array).all():
                raise ValueError(
                    f"state['parameters'][{entry.name!r}]['residual'] holds NaN or infinity, which no residual "
                    "does: the state is damaged, load an earlier one"
                )
        self.keep_step()
        same_density = state.get("density") == self._density
        for entry in self:
            entry.values[:] = arrays[entry.name]
            entry.threshold = given[entry.name]["threshold"] if same_density else None
            entry.calls = operator.index(given[entry.name]["calls"]) if same_density else 0
            entry.peak = math.inf


def check_density(density: float) -> float:
    """``density`` as a float if it is in (0, 1]; else ``TypeError`` or ``ValueError``."""
    if isinstance(density, bool) or not isinstance(density, numbers.Real):
        raise TypeError(f"density={density!r} must be a number in (0, 1]: the share of entries to send")
    if not 0 < density <= 1:
        raise ValueError(f"density={density} must be in (0, 1]: 0.01 sends one entry in a hundred")
    return float(density)


def _residual_of(name: str, entry: object) -> npt.NDArray[Any]:
    where = f"state['parameters'][{name!r}]"
    if not isinstance(entry, Mapping) or not {"residual", "threshold", "calls"} <= entry.keys():
        raise ValueError(f"{where} must have a residual, a threshold and calls: it must come from state_dict()")
    threshold, calls = entry["threshold"], entry["calls"]
    if threshold is not None and not (isinstance(threshold, float) and threshold >= 0):
        raise ValueError(f"{where}['threshold'] is {threshold!r}: it must be None or a float of at least 0")
    if isinstance(calls, bool) or not isinstance(calls, (int, np.integer)) or calls < 0:
        raise ValueError(f"{where}['calls'] is {calls!r}: it must be an int of at least 0")
    try:
        return np.asarray(entry["residual"])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}['residual'] is no float32 array: {error}") from error


def _listed(names: list[str]) -> str:
    if not names:
        return "no parameter"
    return ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
