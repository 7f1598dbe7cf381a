"""Error feedback: what was not sent waits in a residual, one for each parameter and keyed by its name.

Never keyed by bucket: DDP rebuilds its buckets after the first iteration.
"""

from __future__ import annotations

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
            self._by_name[name] = Residual(name, np.zeros(size, np.float32), max(1, round(density * size)))

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

    def state_dict(self) -> dict[str, Any]:
        """A copy: per parameter its residual (float32, flat, in memory order), threshold and calls; and the density."""
        return {
            "density": self._density,
            "parameters": {
                entry.name: {"residual": entry.values.copy(), "threshold": entry.threshold, "calls": entry.calls}
                for entry in self
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes a ``state_dict()`` over; nothing is changed if it does not fit.

        Thresholds taken at another density are evaluated anew. Raises ``ValueError`` naming the parameters that are
        missing, unknown, or of another size.
        """
        given: Mapping[str, Any] = state["parameters"]
        missing = [name for name in self._by_name if name not in given]
        unknown = [name for name in given if name not in self._by_name]
        if missing or unknown:
            raise ValueError(
                f"state has no residual for {_listed(missing)}, and one too many for {_listed(unknown)}: load it "
                "into the same model with the same small_tensor_elements"
            )
        arrays = {name: np.asarray(entry["residual"]) for name, entry in given.items()}
        for entry in self:
            array = arrays[entry.name]
            if array.shape != entry.values.shape or array.dtype != np.float32:
                raise ValueError(
                    f"state['parameters'][{entry.name!r}]['residual'] is {array.dtype} of shape {array.shape}, but "
                    f"the parameter needs float32 of shape {entry.values.shape}: load it into the model that it was "
                    "saved from"
                )
        same_density = state["density"] == self._density
        for entry in self:
            entry.values[:] = arrays[entry.name]
            entry.threshold = given[entry.name]["threshold"] if same_density else None
            entry.calls = int(given[entry.name]["calls"]) if same_density else 0


def check_density(density: float) -> float:
    """``density`` as a float if it is in (0, 1]; else ``TypeError`` or ``ValueError``."""
    if isinstance(density, bool) or not isinstance(density, (int, float)):
        raise TypeError(f"density={density!r} must be a number in (0, 1]: the share of entries to send")
    if not 0 < density <= 1:
        raise ValueError(f"density={density} must be in (0, 1]: 0.01 sends one entry in a hundred")
    return float(density)


def _listed(names: list[str]) -> str:
    if not names:
        return "no parameter"
    return ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
