"""Compressor: the gradients of several parameters become one sparse stream over their common index space."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from telegrad import _core
from telegrad.compress.momentum import Velocities
from telegrad.compress.policies import selection_named
from telegrad.compress.residual import SAFE, Residual, ResidualStore, all_zero, norm
from telegrad.compress.selection import ReusedThreshold, Selection

FEEDBACK = ("gradients", "steps")

Floats = npt.NDArray[np.float32]
Indices = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class PlacedResidual:
    """A parameter's place in the index space: its residual and its first index."""

    entry: Residual
    offset: int


class Observation(NamedTuple):
    """The result of one call of ``compress`` for one parameter. Norms are Euclidean, in the gradients' unit."""

    name: str
    elements: int
    k: int
    selected: int
    gradient_norm: float
    residual_norm: float  # of what stays
    threshold: float | None


class Compressor:
    """Error feedback with a selection policy for each parameter, and momentum correction if it is wanted.

    - ``sizes``: elements of each parameter by name.
    - ``density``: the share of each parameter's entries that is sent; ``densities``: of parameters that have another
      one.
    - ``selection``: a name in ``SELECTIONS``; ``selections``: policies of parameters that have another one.
    - ``interval``: calls between two exact thresholds, for selections that reuse one (``None``: their own default).
    - ``feedback``: residuals hold ``"gradients"``, or ``"steps"``: gradients times their learning rate (SparCML,
      Algorithm 1; see ``set_units``).
    - ``momentum``: the velocities of these and maybe other parameters.
    - ``matrices`` and ``whole``: names of parameters of which nothing is selected: somebody else takes from their
      residuals. Those of ``whole`` have a residual for rounding errors alone, which an earlier state may not have.

    Raises ``ValueError`` or ``TypeError`` for bad arguments."""

    def __init__(
        self,
        sizes: Mapping[str, int],
        *,
        density: float = 0.01,
        selection: str = "reused",
        interval: int | None = None,
        densities: Mapping[str, float] | None = None,
        selections: Mapping[str, Selection] | None = None,
        feedback: str = "gradients",
        momentum: Velocities | None = None,
        matrices: Iterable[str] = (),
        whole: Iterable[str] = (),
    ) -> None:
        if feedback not in FEEDBACK:
            raise ValueError(f"feedback={feedback!r} does not exist: use one of {', '.join(FEEDBACK)}")
        self.policy = selection_named(selection, interval)
        self.residuals = ResidualStore(sizes, density, densities)
        self.momentum = momentum
        self.matrices, self.whole = frozenset(matrices), frozenset(whole)
        self.feedback = feedback
        self.observer: Callable[[Observation], None] | None = None
        self._policies = dict(selections or {})
        self.gradient_unit = 1.0
        self._step_sizes: Mapping[str, float] = {}

    def set_units(self, gradient_unit: float, step_sizes: Mapping[str, float] | None = None) -> None:
        """Sets the unit of gradients from now on; residuals and velocities are rescaled when they are next needed.

        ``gradient_unit``: above 0; 1 / scale if the loss is multiplied by a scale. ``step_sizes``: the learning rates
        by parameter, at least 0, with ``feedback="steps"``. At a rate of 0 nothing is added to a residual and nothing
        is sent."""
        self.gradient_unit = gradient_unit
        self._step_sizes = step_sizes or {}

    def policy_of(self, entry: Residual) -> Selection:
        """The selection of this parameter."""
        return self._policies.get(entry.name, self.policy)

    def selects(self, name: str) -> bool:
        """Whether entries of this parameter are chosen."""
        return name in self.residuals and name not in self.matrices and name not in self.whole

    def remembers(self, name: str) -> bool:
        """Whether there is a residual or a velocity of this parameter."""
        return name in self.residuals or (self.momentum is not None and name in self.momentum)

    def one_signed(self, part: PlacedResidual) -> bool:
        """Whether all entries of a call have the same sign."""
        return getattr(self.policy_of(part.entry), "same_sign", False)

    def part(self, name: str, offset: int) -> PlacedResidual:
        """Parameter ``name`` at ``offset`` of the index space. Raises ``ValueError`` for an unknown name."""
        return PlacedResidual(self.residuals[name], offset)

    def capacity(self, parts: Iterable[PlacedResidual]) -> int:
        """The most entries that ``compress`` can return for ``parts``."""
        return sum(self.policy_of(part.entry).capacity(part.entry) for part in parts)

    def compress(
        self, parts: Sequence[PlacedResidual], flat: Floats, indices: Indices, values: Floats, *, mask: bool = True
    ) -> int:
        """Selects from the gradients in ``flat``; returns the number of entries. The other entries stay in the
        residuals.

        ``flat``: float32, the whole index space, free of NaN and infinity, and nothing in it is ``overflowing``; with
        Nesterov momentum it is overwritten. ``parts`` are ordered by offset; ``indices`` and ``values`` hold
        ``capacity(parts)``. If a gradient is all zero, the parameter took no part in this step: its residual stays as
        it is and nothing is sent for it. ``mask=False``: with momentum, selected entries keep their velocity until
        ``mask`` is called with the entries that were sent."""
        count = 0
        for part in parts:
            entry, offset = part.entry, part.offset
            gradient = flat[offset : offset + entry.values.size]
            if gradient[0] != 0 or not all_zero(gradient):
                count += self._compress_one(entry, gradient, indices[count:], values[count:], offset, mask) or 0
        return count

    def compress_unchecked(
        self, parts: Sequence[PlacedResidual], flat: Floats, indices: Indices, values: Floats, *, mask: bool = True
    ) -> int | None:
        """As ``compress``, of gradients that nobody has looked at yet, in the same pass over memory.

        ``None``: nothing is done. Then a gradient holds NaN or infinity, something might overflow, or what changes
        could not be undone: look at the gradients, and call ``compress``."""
        if self.observer is not None or not all(self._can_undo(part.entry) for part in parts):
            return None
        count, momentum = 0, self.momentum
        for place, part in enumerate(parts):
            entry, offset = part.entry, part.offset
            gradient = flat[offset : offset + entry.values.size]
            if gradient[0] != 0 or not all_zero(gradient):
                limit = math.inf if momentum is None else SAFE - momentum[entry.name].peak
                found = self._compress_one(entry, gradient, indices[count:], values[count:], offset, mask, limit)
                if found is None:
                    for done in parts[: place + 1]:
                        for store in self._stores():
                            store.take_back(done.entry.name)
                    return None
                count += found
        return count

    def _can_undo(self, entry: Residual) -> bool:
        """Whether a fused pass, all of it, is right for this residual, and leaves what was there before untouched."""
        name, unit, momentum = entry.name, self.gradient_unit, self.momentum
        if not (
            self.residuals.renews(name)
            and entry.peak < SAFE
            and unit * self._step_sizes.get(name, 1.0) == entry.unit
            and isinstance(self._policies.get(name, self.policy), ReusedThreshold)
            and entry.k < len(entry.values)
        ):
            return False
        if momentum is None:
            return True
        velocity = momentum[name]
        return momentum.renews(name) and velocity.unit == unit and velocity.peak < SAFE

    def _compress_one(
        self,
        entry: Residual,
        gradient: Floats,
        indices: Indices,
        values: Floats,
        offset: int,
        mask: bool,
        limit: float = math.nan,
    ) -> int | None:
        """``None``: a magnitude of the gradient is ``limit`` or above, or NaN."""
        given = norm(gradient) if self.observer is not None else 0.0
        name, momentum, store = entry.name, self.momentum, self.residuals
        selection = self._policies.get(name, self.policy)
        unit = self.gradient_unit * self._step_sizes.get(name, 1.0)
        fused = selection if isinstance(selection, ReusedThreshold) and entry.k < len(entry.values) else None
        velocity = None
        if momentum is not None:
            if fused is not None and unit == entry.unit:
                velocity = momentum.step(name, self.gradient_unit, masks=mask)
            if velocity is None:
                gradient = momentum.apply(name, gradient, self.gradient_unit)
        if fused is not None and unit == entry.unit:  # the usual case: one pass over memory, and nothing is copied
            before = store.renew(entry) if store.records or store.is_open else None
            found = fused.select_on_host(entry, gradient, indices, values, offset, before, velocity, limit)
            if not found.sound:
                return None
            count = found.moved
            if momentum is not None and velocity is not None:
                momentum.moved(name, found.added)
        elif self._prepare(entry):
            count = selection.select(entry, gradient, indices, values, offset)
        else:
            return 0
        if velocity is None and mask and momentum is not None:
            momentum.clear(name, indices[:count] - np.uint32(offset))
        if self.observer is not None:
            unit = self.gradient_unit
            threshold = None if entry.threshold is None else entry.threshold * unit
            left = norm(entry.values) * unit
            self.observer(Observation(entry.name, entry.values.size, entry.k, count, given * unit, left, threshold))
        return count

    @property
    def masks(self) -> bool:
        """Whether velocities are forgotten where entries leave."""
        return self.momentum is not None and self.momentum.masking

    def mask(self, parts: Sequence[PlacedResidual], indices: Indices) -> None:
        """Those entries have left after ``compress(…, mask=False)``. ``indices`` as in ``keep``."""
        if self.momentum is not None:
            for part, own in _by_part(parts, indices):
                self.momentum.clear(part.entry.name, indices[own] - np.uint32(part.offset))

    def unit_of(self, entry: Residual) -> float:
        """The unit of this residual from now on; 0: nothing is added or sent."""
        return self.gradient_unit * self._step_sizes.get(entry.name, 1.0)

    def _prepare(self, entry: Residual) -> bool:
        """Makes ready for a change in the unit of this step; False if that is 0 and nothing can change."""
        unit = self.unit_of(entry)
        if unit > 0:
            self.residuals.about_to_change(entry)
            if unit != entry.unit:
                entry.rescale(unit)
        return unit > 0

    def add_matrix(self, part: PlacedResidual, gradient: Floats, lines: Floats, out: Floats) -> bool:
        """Adds a finite ``gradient`` to the residual, and in the same pass over memory writes lines @ residual.T into
        ``out``; False, and nothing is changed, where the step's unit is 0. The residual is a matrix by rows, of as many
        columns as ``lines``."""
        entry, before = part.entry, None
        if self.unit_of(entry) == entry.unit:
            before = self.residuals.renew(entry)
        if before is None:
            if not self._prepare(entry):
                return False
            before = entry.values
        rank, columns = lines.shape
        read = before.ctypes.data, gradient.ctypes.data, lines.ctypes.data
        written = entry.values.ctypes.data, out.ctypes.data
        entry.peak = math.sqrt(_core.add_and_multiply(*read, entry.size // columns, columns, rank, *written))
        return True

    def subtract_product(self, part: PlacedResidual, basis: Floats, lines: Floats) -> None:
        """Takes basis @ lines, both by rows, off the residual, a matrix of as many rows and columns."""
        entry = part.entry
        if self._prepare(entry):
            (rows, rank), columns = basis.shape, lines.shape[1]
            memory = basis.ctypes.data, lines.ctypes.data
            entry.peak = math.sqrt(_core.subtract_product(*memory, rows, columns, rank, entry.values.ctypes.data))

    def correct(self, name: str, gradient: Floats) -> None:
        """With momentum: makes of a finite ``gradient`` that is to be summed densely what is to be summed, in place."""
        if self.momentum is not None:
            contribution = self.momentum.apply(name, gradient, self.gradient_unit)
            if contribution is not gradient:
                gradient[:] = contribution

    def keep(self, parts: Sequence[PlacedResidual], indices: Indices, values: Floats) -> None:
        """Adds to the residuals what did not leave after all, such as the rounding errors of what was sent.

        ``indices`` are ascending positions of the common index space, all inside ``parts``."""
        for part, own in _by_part(parts, indices):
            entry, where = part.entry, indices[own] - np.uint32(part.offset)
            if self._prepare(entry):
                entry.values[where] += values[own]
                entry.peak = max(entry.peak, float(np.abs(entry.values[where]).max()))

    def keep_all(self, parts: Sequence[PlacedResidual], errors: Floats) -> None:
        """As ``keep``, of ``errors`` for the whole index space, most of them zero."""
        for part in parts:
            entry = part.entry
            own = errors[part.offset : part.offset + entry.values.size]
            if not all_zero(own) and self._prepare(entry):
                entry.values += own
                entry.peak += norm(own)

    def overflowing(self, parts: Sequence[PlacedResidual], flat: Floats, limit: float = math.inf) -> Indices:
        """The indices, ascending, at which residual + gradient (with momentum: + its contribution) would reach
        ``limit``.

        ``flat`` as for ``compress``. It reads entries only if they are so large that they could. Without a call of
        this, ``compress`` of finite gradients can leave infinities in the residuals."""
        found = [np.zeros(0, np.uint32)]
        for part in parts:
            gradient = flat[part.offset : part.offset + part.entry.values.size]
            if self.may_overflow((part,), flat) and not all_zero(gradient):
                total = np.abs(self._total(part.entry, gradient))
                found.append((np.flatnonzero(~(total < np.float32(limit))) + part.offset).astype(np.uint32))
        return np.concatenate(found)

    def may_overflow(self, parts: Iterable[PlacedResidual], flat: Floats) -> bool:
        """False where ``overflowing`` finds nothing: then it need not be called."""
        gradient_unit, step_sizes, momentum = self.gradient_unit, self._step_sizes, self.momentum
        for part in parts:
            entry = part.entry
            unit = gradient_unit * step_sizes.get(entry.name, 1.0)
            if unit > 0 and not entry.peak * min(entry.unit / unit, SAFE) < SAFE:
                return True
            if momentum is not None:
                gradient = flat[part.offset : part.offset + entry.values.size]
                if momentum.may_overflow(entry.name, gradient):
                    return True
        return False

    def _total(self, entry: Residual, gradient: Floats) -> Floats:
        with np.errstate(over="ignore", invalid="ignore"):
            if self.momentum is not None:
                gradient = self.momentum.contribution(entry.name, gradient, self.gradient_unit)
            unit = self.unit_of(entry)
            if unit <= 0:
                return gradient
            if unit == entry.unit:
                return entry.values + gradient
            return (entry.values.astype(np.float64) * min(entry.unit / unit, 1e300) + gradient).astype(np.float32)

    def take(self, parts: Sequence[PlacedResidual], flat: Floats, indices: Indices) -> Floats:
        """residual + gradient at ``indices``, which are as in ``keep``; both, and velocities, are zero there then."""
        taken = flat[indices]
        for part, own in _by_part(parts, indices):
            entry, where = part.entry, indices[own] - np.uint32(part.offset)
            taken[own] = self._total(entry, flat[part.offset : part.offset + entry.values.size])[where]
            if self.unit_of(entry) > 0:  # else what waits is not part of the total
                self.residuals.about_to_change(entry)
                entry.values[where] = 0
            if self.momentum is not None:
                self.momentum.forget(entry.name, where)
        flat[indices] = 0
        return taken

    def release(self, part: PlacedResidual, flat: Floats) -> Floats:
        """Adds the residual to the gradient in ``flat``, which is sent dense: the residual is then zero. Returns the
        addend.

        The residual stays as it is where the gradient is NaN or infinite. All of it stays if the gradient is all zero
        or the step's unit 0."""
        entry = part.entry
        gradient = flat[part.offset : part.offset + entry.values.size]
        if entry.peak == 0 or all_zero(gradient) or not self._prepare(entry):
            return np.zeros_like(gradient)
        released = np.where(np.isfinite(gradient), entry.values, np.float32(0))
        with np.errstate(over="ignore", invalid="ignore"):
            gradient += released
        entry.values -= released
        entry.peak = float(np.abs(entry.values).max())
        entry.threshold, entry.calls = None, 0  # of a residual that was there before
        return released

    def begin(self) -> None:
        """Opens a step that can be undone: see ``keep_step`` and ``drop_step``. Costs memory as large as what it
        changes, and but for residuals of a ``ReusedThreshold`` a copy."""
        for store in self._stores():
            store.begin()

    def keep_step(self) -> None:
        """Closes the open step, if there is one."""
        for store in self._stores():
            store.keep_step()

    def drop_step(self) -> None:
        """Undoes the open step, if there is one: all that is remembered is bitwise as at ``begin()``."""
        for store in self._stores():
            store.drop_step()

    def record(self, on: bool) -> None:
        """Whether what changes from now on can be undone by ``revert``, parameter by parameter, until ``confirm``.
        Costs as ``begin`` does, once between two ``confirm``."""
        for store in self._stores():
            store.records = on

    def unconfirmed(self) -> list[str]:
        """The parameters of which something would be undone."""
        found = self.residuals.unconfirmed()
        return found if self.momentum is None else [*dict.fromkeys(found + self.momentum.unconfirmed())]

    def confirm(self, names: Sequence[str]) -> None:
        """Keeps the present residuals and velocities of these parameters."""
        for store in self._stores():
            store.confirm(names)

    def revert(self, names: Sequence[str]) -> None:
        """Residuals and velocities of these parameters are bitwise as when last confirmed."""
        for store in self._stores():
            store.revert(names)

    def _stores(self) -> tuple[ResidualStore | Velocities, ...]:
        return (self.residuals,) if self.momentum is None else (self.residuals, self.momentum)

    def state_dict(self) -> dict[str, Any]:
        """A copy of all state, as plain numpy arrays and numbers; without an open step, and what is not confirmed."""
        state = {**self.residuals.state_dict(), "feedback": self.feedback}
        return state if self.momentum is None else {**state, "velocities": self.momentum.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any], *, least_density: float = 0.0) -> None:
        """Takes a ``state_dict()`` over; nothing is changed if it does not fit.

        ``least_density``: as the warm-up has it at the step to which the state belongs (``ResidualStore``).
        Raises ``ValueError`` naming the parameters that do not fit, and for a state of another feedback, or with
        velocities where there is no momentum, or the other way round."""
        state = self._with_whole(state)
        residuals = self.residuals.check(state)
        feedback, velocities = state.get("feedback", "gradients"), state.get("velocities")
        if feedback != self.feedback:
            raise ValueError(
                f"state has residuals of {feedback}, but feedback={self.feedback!r}: load it with feedback={feedback!r}"
            )
        if self.momentum is None:
            if velocities is not None:
                raise ValueError("state has velocities, but there is no momentum: give the momentum it was saved with")
        else:
            if not isinstance(velocities, Mapping):
                raise ValueError("state has no 'velocities': it was saved without momentum, so go on without")
            self.momentum.take_over(self.momentum.fitting(velocities, "state['velocities']"), velocities)
        self.residuals.raise_density(least_density)  # thresholds hold for the k that this gives
        self.residuals.load_checked(state, residuals)

    def _with_whole(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """With residuals of zeros for parameters that had none where the state was saved."""
        saved = state.get("parameters") if isinstance(state, Mapping) else None
        if not isinstance(saved, Mapping):
            return state
        empty = {"unit": 1.0, "threshold": None, "calls": 0}
        added = {name: {"residual": np.zeros(self.residuals[name].size, np.float32), **empty} for name in self.whole}
        return {**state, "parameters": {**added, **saved}}


def _by_part(parts: Iterable[PlacedResidual], indices: Indices) -> Iterator[tuple[PlacedResidual, slice]]:
    """Which of the ascending ``indices`` are whose; parts without any are left out."""
    for part in parts:
        ends = np.array([part.offset, part.offset + part.entry.values.size], np.uint32)
        first, last = np.searchsorted(indices, ends)
        if first < last:
            yield part, slice(int(first), int(last))
