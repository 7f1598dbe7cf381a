"""Error feedback: what was not sent waits in a residual, a flat float32 array for each parameter, whose changes in a
step can be undone.

Keyed by the parameter's name, never by bucket: DDP rebuilds its buckets after the first iteration.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from telegrad.kernels.select import SelectionKernels, kernels_of

Floats = npt.NDArray[np.float32]

SAFE = 2.0**100
"""A finite gradient can push what is smaller over the largest float32 only if it is larger itself: half a unit in the
last place of that is 2**103 (of the largest bfloat16: 2**119). No training in good health is near."""

_LARGEST = float(np.finfo(np.float32).max)


@dataclass(slots=True)
class Entry:
    """One parameter's array. ``values * unit`` is what it says; the unit follows a loss scale or a learning rate."""

    name: str
    values: Floats
    unit: float = field(default=1.0, kw_only=True)
    peak: float = field(default=math.inf, kw_only=True)
    """No magnitude is larger; infinite: nobody has looked. Whoever adds to ``values`` raises it."""

    @property
    def size(self) -> int:
        """How many elements the parameter has."""
        return len(self.values)

    def rescale(self, unit: float) -> None:
        """Converts to another unit (above 0). Values too large for float32 become its largest number."""
        ratio = min(self.unit / unit, 1e300)
        self.unit = unit
        if ratio == 1:
            return
        if math.isinf(self.peak):  # just loaded: it must round as if it were not
            self.peak = float(np.abs(self.values).max())
        if 1 / SAFE < ratio < SAFE and self.peak * ratio < SAFE:
            self.values *= np.float32(ratio)
            self.peak *= ratio
        else:
            self.values[:] = np.clip(self.values.astype(np.float64) * ratio, -_LARGEST, _LARGEST)
            self.peak = float(np.abs(self.values).max())


E = TypeVar("E", bound=Entry)


class EntryStore(Generic[E]):
    """Entries by name, in the order in which they were given. ``kind``: what the arrays are, for messages and states.

    It can undo two things, and keeps what an entry was before its first change for either. A step that is open, between
    ``begin()`` and ``keep_step()`` or ``drop_step()``. And, with ``records``, everything since an entry was last told
    that it stays: ``confirm()`` says so, ``revert()`` undoes it."""

    def __init__(self, kind: str, entries: Iterable[E]) -> None:
        self.kind = kind
        self._by_name: dict[str, E] = {}
        for entry in entries:
            if entry.values.size < 1:
                raise ValueError(f"sizes[{entry.name!r}]=0: a parameter with a {kind} needs at least one element")
            self._by_name[entry.name] = entry
        first = next(iter(self._by_name.values()), None)  # all are of one class
        self._fields = [] if first is None else [one.name for one in dataclasses.fields(first)]
        self.records = False
        self.is_open = False
        self._before: dict[str, E] = {}  # what the open step has changed, as it was
        self._confirmed: dict[str, E] = {}  # what has changed since it was confirmed, as it was
        self._copies: dict[str, list[Floats]] = {}  # memory for these, kept from step to step

    def __getitem__(self, name: str) -> E:
        try:
            return self._by_name[name]
        except KeyError:
            raise ValueError(f"parameter {name!r} has no {self.kind}: name it when the compressor is made") from None

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def __iter__(self) -> Iterator[E]:
        return iter(self._by_name.values())

    def __len__(self) -> int:
        return len(self._by_name)

    def begin(self) -> None:
        """Opens a step that can be undone. Costs memory as large as each array that the step changes."""
        self.drop_step()
        self.is_open = True

    def about_to_change(self, entry: E) -> None:
        """To be called before ``entry`` changes; copies it where a change may be undone and is the first."""
        name = entry.name
        if self.is_open:
            if name not in self._before:
                self._before[name] = self._copy(entry)
        elif self.records and name not in self._confirmed:
            self._confirmed[name] = self._copy(entry)

    def renew(self, entry: E) -> Floats | None:
        """As ``about_to_change``, before a change that writes every value and so needs no copy: where a copy would be
        due, ``entry.values`` becomes memory that holds nothing yet, and what they were is returned, to be read only."""
        name = entry.name
        if self.is_open:
            kept = self._before
        elif self.records:
            kept = self._confirmed
        else:
            return None
        if name in kept:
            return None
        before, free = entry.values, self._copies.get(name)
        fresh = free.pop() if free else np.empty_like(before)
        kept[name] = self._twin(entry)
        entry.values = fresh
        return before

    def take_back(self, name: str) -> None:
        """Undoes the last ``renew`` of this entry, which has returned an array: it is as it was before."""
        kept = self._before if self.is_open else self._confirmed
        if name in kept:
            self._restore(kept.pop(name))

    def renews(self, name: str) -> bool:
        """Whether ``renew`` would give this entry other memory."""
        return name not in self._before if self.is_open else self.records and name not in self._confirmed

    def keep_step(self) -> None:
        """Closes the open step, if there is one. With ``records`` it can still be undone by ``revert``."""
        before, self._before, self.is_open = self._before, {}, False
        for name, held in before.items():
            if self.records and name not in self._confirmed:
                self._confirmed[name] = held
            else:
                self._free(held)

    def drop_step(self) -> None:
        """Undoes the open step, if there is one: all is bitwise as it was at ``begin()``."""
        before, self._before, self.is_open = self._before, {}, False
        for held in before.values():
            self._restore(held)

    def unconfirmed(self) -> list[str]:
        """The names of the entries that ``revert`` would change."""
        return [*self._confirmed]

    def confirm(self, names: Iterable[str]) -> None:
        """What these entries are now stays. Names of others are passed over."""
        for name in names:
            if name in self._confirmed:
                self._free(self._confirmed.pop(name))

    def revert(self, names: Iterable[str]) -> None:
        """These entries are bitwise as they were when last confirmed. Names of others are passed over."""
        for name in names:
            if name in self._confirmed:
                self._restore(self._confirmed.pop(name))

    def settled(self) -> list[E]:
        """All entries, without what is not confirmed, and as at ``begin()`` of an open step. Not copies."""
        return [self._confirmed.get(entry.name) or self._before.get(entry.name, entry) for entry in self]

    def _copy(self, entry: E) -> E:
        free = self._copies.get(entry.name)
        values = free.pop() if free else np.empty_like(entry.values)
        np.copyto(values, entry.values)
        held = self._twin(entry)
        held.values = values
        return held

    def _twin(self, entry: E) -> E:
        held = object.__new__(type(entry))
        for name in self._fields:
            setattr(held, name, getattr(entry, name))
        return held

    def _restore(self, held: E) -> None:
        entry = self._by_name[held.name]
        changed = entry.values
        for name in self._fields:
            setattr(entry, name, getattr(held, name))
        held.values = changed
        self._free(held)

    def _free(self, held: E) -> None:
        self._copies.setdefault(held.name, []).append(held.values)

    def fitting(self, given: Mapping[str, Any], where: str) -> dict[str, Floats]:
        """The arrays in ``given``, a mapping of a state at ``where``, if it fits this store.

        Raises ``ValueError`` naming the parameters that are missing, unknown, of another size, or damaged."""
        missing = [name for name in self._by_name if name not in given]
        unknown = [name for name in given if name not in self._by_name]
        if missing or unknown:
            wrong = [f"no {self.kind} for {_listed(missing)}"] if missing else []
            wrong += [f"a {self.kind} of {_listed(unknown)}, for which there is none here"] if unknown else []
            raise ValueError(
                f"state has {', and '.join(wrong)}: load it into the same model with the same parameters frozen and "
                "the same compress="
            )
        arrays = {name: self._array_of(name, entry, f"{where}[{name!r}]") for name, entry in given.items()}
        for entry in self:
            array, place = arrays[entry.name], f"{where}[{entry.name!r}][{self.kind!r}]"
            if array.shape != entry.values.shape or array.dtype != np.float32:
                raise ValueError(
                    f"{place} is {array.dtype} of shape {array.shape}, but the parameter needs float32 of shape "
                    f"{entry.values.shape}: load it into the model that it was saved from"
                )
            if not np.isfinite(array).all():
                raise ValueError(
                    f"{place} holds NaN or infinity, which no {self.kind} does: the state is damaged, load an earlier "
                    "one"
                )
        return arrays

    def _array_of(self, name: str, entry: object, where: str) -> npt.NDArray[Any]:
        if not isinstance(entry, Mapping) or self.kind not in entry:
            raise ValueError(f"{where} must have a {self.kind}: it must come from state_dict()")
        unit = entry.get("unit", 1.0)
        if not isinstance(unit, float) or not 0 < unit < math.inf:
            raise ValueError(f"{where}['unit'] is {unit!r}: it must be a float above 0")
        try:
            return np.asarray(entry[self.kind])
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where}[{self.kind!r}] is no float32 array: {error}") from error

    def take_over(self, arrays: Mapping[str, Floats], given: Mapping[str, Any]) -> None:
        """Fills in what ``fitting`` has found, with its units, and closes an open step; all of it is confirmed."""
        self.keep_step()
        self.confirm(self.unconfirmed())
        for entry in self:
            entry.values[:] = arrays[entry.name]
            entry.unit = given[entry.name].get("unit", 1.0)
            entry.peak = math.inf


def all_zero(x: Floats) -> bool:
    """True if a gradient has nothing in it: its parameter took no part in this step."""
    return x[0] == 0 and not any(x[start : start + _LOOK].any() for start in range(0, x.size, _LOOK))


def norm(x: Floats) -> float:
    """The Euclidean norm, a bound of every magnitude; infinite where float32 cannot tell."""
    with np.errstate(over="ignore"):
        return math.sqrt(float(np.dot(x, x)))


_LOOK = 1 << 14  # entries per look for a value that is not zero


def _listed(names: list[str]) -> str:
    return ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


@dataclass(slots=True)
class Residual(Entry):
    """The unsent gradient of one parameter, with the state of its selection."""

    k: int
    threshold: float | None = None  # of the last call; None: evaluate it exactly
    calls: int = 0  # since the threshold was last evaluated exactly
    kernels: SelectionKernels = field(init=False, repr=False, compare=False)
    """The selections that run where the residual lies."""

    def __post_init__(self) -> None:
        self.kernels = kernels_of(self.values)

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
    those parameters that have another one."""

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

        If k changes, the threshold is evaluated anew."""
        for entry in self:
            k = _share(max(least, self._density_of(entry.name)), entry.values.size)
            if k != entry.k:
                self.about_to_change(entry)
                entry.k, entry.threshold, entry.calls = k, None, 0

    def _density_of(self, name: str) -> float:
        return self._densities.get(name, self._density)

    def state_dict(self) -> dict[str, Any]:
        """A copy: per parameter its residual (float32, flat), its unit, threshold and calls, and k.

        If a step is open, it is the state at ``begin()``."""
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
        missing, unknown, of another size, or damaged."""
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
