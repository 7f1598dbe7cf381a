"""What a rank remembers of gradients on a device: residuals, velocities and thresholds there. Saved and loaded through
the Compressor of host memory, so that a state says nothing of where it was made.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from telegrad.communicator.cuda.runtime import LateRead, runtime_of
from telegrad.compress import Compressor, Residual
from telegrad.compress.residual import Entry
from telegrad.ddp.gradient_scales import check_scale
from telegrad.kernels.feedback import Kept, Remade, kernels_of


class LossScale:
    """Asked in each backward pass, of whose scale it speaks from ``begin`` on."""

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self._scaler = scaler
        self._scales: dict[tuple[torch.device, float], torch.Tensor] = {}
        self._looks: deque[LateRead] = deque()

    def begin(self) -> None:
        """Of another pass."""
        self._scales = {}

    def unit(self, like: torch.Tensor, rate: float = 1.0) -> torch.Tensor:
        """``rate`` / scale on the device of ``like``, float64, of one element; not to be written. A scale that is no
        number above 0 gives none above 0 that is finite."""
        found = self._scales.get((like.device, rate))
        if found is None:
            with torch.no_grad():
                found = self._inverse(like) if rate == 1.0 else self.unit(like) * rate
            self._scales[like.device, rate] = found
        return found

    def check(self, *, wait: bool = False) -> None:
        """Raises ``ValueError`` for a scale of which the host knows by now that it is none; ``wait``: for all."""
        while self._looks and (wait or self._looks[0].is_known):
            check_scale(float(self._looks.popleft().values()[0]))

    def forget(self) -> None:
        """Drops the scales that have not been looked at."""
        self._looks.clear()

    def _inverse(self, like: torch.Tensor) -> torch.Tensor:
        # 1, scaled as a loss is: the scaler's only public way to its scale for which nobody waits.
        scale = self._scaler.scale(like.new_ones(1, dtype=torch.float32))
        assert isinstance(scale, torch.Tensor)
        self._looks.append(LateRead(scale))
        return scale.double().reciprocal()


class DeviceTables:
    """By name; each stays on its device as long as nothing in it changes."""

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[Any, torch.Tensor]] = {}

    def of(
        self, name: Hashable, contents: object, make: Callable[[], torch.Tensor], like: torch.Tensor
    ) -> torch.Tensor:
        """The table of that name on the device of ``like``, int64. ``contents``: what it is of; where that, or the
        device, is another than last time, what ``make`` gives, in host memory, is copied there in the current
        stream."""
        contents = (like.device, contents)
        known = self._known.get(name)
        if known is not None and known[0] == contents:
            return known[1]
        runtime, rows = runtime_of(like.device.type), make()
        pinned = runtime.pinned(rows.nbytes).view(torch.int64)
        pinned.copy_(rows)
        made: torch.Tensor = like.new_empty(rows.numel(), dtype=torch.int64)
        runtime.copy(runtime.current_stream(like.device), made, pinned)
        self._known[name] = contents, made
        return made


_LARGEST = float(np.finfo(np.float32).max)


class Confirmed(NamedTuple):
    """A copy of what is remembered; ``unit``: if the host knows it."""

    values: torch.Tensor
    small: list[torch.Tensor]
    unit: float | None
    k: int


@dataclass(slots=True, eq=False)
class Remembered:
    """One parameter's array there: float32, flat; ``values * unit`` is what it says. ``unit``: where the loss has a
    scale, or a step that changes it may be undone, a tensor, float64, of one element. ``before`` and ``small_before``:
    if it ``is_kept``, what it was when the step began that may yet be undone. ``confirmed``: what it was when it was
    last confirmed, if it has changed since."""

    values: torch.Tensor
    unit: float | torch.Tensor
    is_kept: bool = False
    before: torch.Tensor | None = None
    small_before: list[torch.Tensor] | None = None
    confirmed: Confirmed | None = None
    wanted: torch.Tensor | None = None  # the unit that it has been given last
    spare: list[torch.Tensor] = field(default_factory=list)  # memory of an earlier ``confirmed``

    @property
    def small(self) -> list[torch.Tensor]:
        """What is remembered beside the values, of one element each."""
        return [self.unit] if isinstance(self.unit, torch.Tensor) else []

    @property
    def kept(self) -> list[torch.Tensor]:
        """What it was when the step began, if it ``is_kept``: of ``[values, *small]``."""
        assert self.before is not None
        return [self.before, *(self.small_before or ())]

    @property
    def remade(self) -> Remade:
        """What changes with its unit, which is a tensor."""
        assert isinstance(self.unit, torch.Tensor)
        return Remade(self.values, self.unit, None)

    def rescale(self, unit: float) -> None:
        """Says the same in another unit, above 0, of which the host knows. What float32 cannot hold becomes its
        largest number."""
        if unit != self.unit:
            assert isinstance(self.unit, float)
            self.values.mul_(min(self.unit / unit, _LARGEST)).clamp_(-_LARGEST, _LARGEST)
            self.unit = unit


@dataclass(slots=True, eq=False)
class DeviceResidual(Remembered):
    """``threshold`` (float64, 0: none) and ``calls`` (int64) of its selection, one element each, hold for ``k``."""

    k: int = 0
    threshold: Any = None
    calls: Any = None

    @property
    def small(self) -> list[torch.Tensor]:
        return [self.threshold, self.calls, *Remembered.small.__get__(self)]

    @property
    def remade(self) -> Remade:
        return Remade(self.values, self.unit, self.threshold)

    def rescale(self, unit: float) -> None:
        if unit != self.unit:
            assert isinstance(self.unit, float)
            moved = self.threshold * min(self.unit / unit, 1e300)
            self.threshold.copy_(torch.where(moved <= _LARGEST, moved, torch.zeros_like(moved)))
            Remembered.rescale(self, unit)


class DeviceFeedback:
    """``compressor``: whose parameters, units and k these are; what it holds itself is where the device begins, and
    what ``save`` writes. ``scale``: of the loss, by which units are divided. All else is put into the current stream,
    and the host does not wait for it."""

    def __init__(self, compressor: Compressor, scale: LossScale | None) -> None:
        self._compressor, self._scale = compressor, scale
        self._residuals: dict[str, DeviceResidual] = {}
        self._velocities: dict[str, Remembered] = {}
        self._is_open = False
        self._records = False
        self._reverted: list[Remembered] = []  # but for the copies, which the stream has not been given yet
        self._scales: dict[tuple[torch.device, float], torch.Tensor] = {}  # of the step that is open
        self._changed: list[Remembered] = []
        self._tables = DeviceTables()

    def residual(self, entry: Residual, like: torch.Tensor) -> DeviceResidual:
        """That of a parameter whose gradient is on the device of ``like``, about to change: in this step's unit, which
        is above 0, and with a threshold for this step's k."""
        return self.residuals([entry], like)[0]

    def residuals(self, entries: Sequence[Residual], like: torch.Tensor) -> list[DeviceResidual]:
        """Those of several, by as many launches as of one."""
        found = [self._residual(entry, like) for entry in entries]
        self._use([(held, self._compressor.unit_of(entry)) for held, entry in zip(found, entries, strict=True)], like)
        return found

    def _residual(self, entry: Residual, like: torch.Tensor) -> DeviceResidual:
        held = self._residuals.get(entry.name)
        if held is None:
            threshold = like.new_full((1,), entry.threshold or 0.0, dtype=torch.float64)
            calls = like.new_full((1,), entry.calls, dtype=torch.int64)
            values = _copied(entry, like)
            held = DeviceResidual(values, entry.unit, k=entry.k, threshold=threshold, calls=calls)
            self._residuals[entry.name] = held
        if held.k != entry.k:
            held.k = entry.k
            held.threshold.zero_()
            held.calls.zero_()
        return held

    def about_to_change(self, ones: Sequence[Remembered]) -> None:
        """Of what somebody else has: with all that changes in an open step it is undone, but never reverted."""
        if self._is_open:
            self._keep(ones)

    def waits(self, entry: Residual) -> bool:
        """Whether something may wait, as far as the host knows."""
        return entry.name in self._residuals or entry.peak != 0

    def velocities(self, names: Sequence[str], like: torch.Tensor) -> list[torch.Tensor]:
        """As ``residuals``, of which there are some with momentum."""
        momentum = self._compressor.momentum
        assert momentum is not None
        found = []
        for name in names:
            held = self._velocities.get(name)
            if held is None:
                entry = momentum[name]
                held = self._velocities[name] = Remembered(_copied(entry, like), entry.unit)
            found.append(held)
        self._use([(held, self._compressor.gradient_unit) for held in found], like)
        return [held.values for held in found]

    def begin(self) -> None:
        """Opens a step that can be undone, at the cost of a copy of all that it changes, for which memory is kept from
        then on. One that is open is undone."""
        self._undo_open_step()
        self._is_open, self._scales = True, {}

    def close_step(self) -> list[torch.Tensor]:
        """What has changed since ``begin`` may still be undone by ``undo``, which uses these tensors."""
        self._is_open = False
        return [tensor for one in self._changed for tensor in _tensors_of(one)]

    def undo(self, wanted: torch.Tensor) -> None:
        """If ``wanted`` (int32, one element) is above 0, all is as at ``begin``."""
        changed, self._changed = self._changed, []
        for device in {one.values.device for one in changed}:
            self._restore([one for one in changed if one.values.device == device], wanted)
        _restore_small(changed, wanted)
        for one in changed:
            one.is_kept = False
            if self._records and one.confirmed is None:  # dropped or not, it was that
                assert one.before is not None
                one.confirmed = _confirmed(one, one.before, one.small_before or [])
                one.before, one.small_before = None, None

    def record(self, on: bool) -> None:
        """As ``Revertible.record``: costs a copy on the device."""
        self._records = on

    def unconfirmed(self) -> list[str]:
        """As ``Revertible.unconfirmed``, without what was reverted and waits for ``apply_reverts``."""
        return [*dict.fromkeys(name for name, _ in self._undecided())]

    def confirm(self, names: Sequence[str]) -> None:
        """As ``Revertible.confirm``."""
        for one in self._changed_since_confirmed(names):
            assert one.confirmed is not None
            one.spare, one.confirmed = [one.confirmed.values], None

    def revert(self, names: Sequence[str]) -> None:
        """As ``Revertible.revert``; ``apply_reverts`` gives it to the stream, before anything else changes."""
        self._reverted += self._changed_since_confirmed(names)

    def apply_reverts(self) -> None:
        """What was reverted is so in the current stream."""
        reverted, self._reverted = self._reverted, []
        copies = []
        for one in reverted:
            copy, one.confirmed = one.confirmed, None
            assert copy is not None
            if copy.unit is not None:
                one.unit = copy.unit
            if isinstance(one, DeviceResidual):
                one.k = copy.k
            one.wanted, one.spare = None, [copy.values]
            copies.append(([one.values, *one.small], [copy.values, *copy.small]))
        _copy_all(copies)

    def _all(self) -> Iterator[tuple[str, Remembered]]:
        yield from self._residuals.items()
        yield from self._velocities.items()

    def _changed_since_confirmed(self, names: Sequence[str]) -> list[Remembered]:
        wanted = {*names}
        return [one for name, one in self._undecided() if name in wanted]

    def _undecided(self) -> list[tuple[str, Remembered]]:
        reverted = {*map(id, self._reverted)}
        return [(name, one) for name, one in self._all() if one.confirmed is not None and id(one) not in reverted]

    def save(self) -> None:
        """Writes all into the compressor, without a step that is open and what is not confirmed. The host waits for
        the current streams."""
        self._undo_open_step()
        self.apply_reverts()
        for entry in self._compressor.residuals.settled():  # as a change of k is recorded by the host
            held = self._residuals.get(entry.name)
            if held is None:
                continue
            _read_into(entry, held)
            k, small = (held.k, held.small) if held.confirmed is None else (held.confirmed.k, held.confirmed.small)
            threshold, calls = (LateRead(one).values().item() for one in small[:2])
            fits = k == entry.k
            entry.threshold, entry.calls = (threshold if threshold > 0 and fits else None), (calls if fits else 0)
        if self._compressor.momentum is not None:
            for name, velocity in self._velocities.items():
                _read_into(self._compressor.momentum[name], velocity)

    def forget(self) -> None:
        """The compressor's is what counts."""
        self._residuals, self._velocities = {}, {}
        self._tables = DeviceTables()
        self._is_open, self._changed, self._reverted = False, [], []

    def _use(self, changing: Sequence[tuple[Remembered, float]], like: torch.Tensor) -> None:
        """They are about to change, each in this unit without the loss's."""
        if self._scale is None and not (self._is_open and self._compressor.feedback == "steps"):
            self._keep([one for one, _ in changing])
            for one, unit in changing:
                one.rescale(unit)
            return
        rescaled: dict[int, list[Remembered]] = {}
        for one, _ in changing:
            if not isinstance(one.unit, torch.Tensor):
                one.unit = like.new_full((1,), one.unit, dtype=torch.float64)
        self._keep([one for one, _ in changing])
        for one, unit in changing:
            wanted = self._unit(like, unit)
            if one.wanted is not wanted:  # once in a pass
                one.wanted = wanted
                rescaled.setdefault(id(wanted), []).append(one)
        for of_unit in rescaled.values():
            self._rescale(of_unit)

    def _rescale(self, ones: Sequence[Remembered]) -> None:
        """In their stream, to the unit that they all want."""
        parts, wanted = [one.remade for one in ones], ones[0].wanted
        arrays = [one for part in parts for one in part if one is not None]
        kernels, values = kernels_of(parts[0].values), parts[0].values
        addresses = [(one.data_ptr(), one.numel()) for one in arrays]
        table = self._tables.of(("unit", addresses[0]), addresses, lambda: kernels.unit_table(parts), values)
        ratios = values.new_empty(len(parts), dtype=torch.float64)

        def rescale(table: torch.Tensor, wanted: torch.Tensor, ratios: torch.Tensor) -> None:
            kernels.change_units(parts, table, wanted, ratios)
            kernels.rescale(parts, table, ratios)

        runtime = runtime_of(values.device.type)
        runtime.launch(runtime.current_stream(values.device), rescale, table, wanted, ratios)

    def _restore(self, ones: Sequence[Remembered], wanted: torch.Tensor) -> None:
        """Their arrays, of one device."""
        parts = [Kept(one.values, one.before) for one in ones]
        kernels, values = kernels_of(parts[0].values), parts[0].values
        addresses = [(one.data_ptr(), one.numel()) for part in parts for one in part]
        table = self._tables.of(("before", addresses[0]), addresses, lambda: kernels.kept_table(parts), values)
        runtime = runtime_of(values.device.type)

        def restore(table: torch.Tensor, wanted: torch.Tensor) -> None:
            kernels.restore(parts, table, wanted)

        runtime.launch(runtime.current_stream(values.device), restore, table, wanted)

    def _unit(self, like: torch.Tensor, unit: float) -> torch.Tensor:
        """On the device, where a step that is undone gives the unit back, too."""
        if self._scale is not None:
            return self._scale.unit(like, unit)
        found = self._scales.get((like.device, unit))
        if found is None:
            found = self._scales[like.device, unit] = like.new_full((1,), unit, dtype=torch.float64)
        return found

    def _keep(self, ones: Sequence[Remembered]) -> None:
        """What they are, if a step is open, until it is over: by as few launches as of one."""
        if not self._is_open:
            if self._records:
                self._keep_confirmed([one for one in ones if one.confirmed is None])
            return
        changing = [one for one in ones if not one.is_kept]
        if not changing:
            return
        for one in changing:
            if one.before is None:
                one.before = one.spare.pop() if one.spare else torch.empty_like(one.values)
            if one.small_before is None or len(one.small_before) < len(one.small):  # the unit has become a tensor
                one.small_before = [torch.empty_like(small) for small in one.small]
            one.is_kept = True
        self._changed += changing
        _copy_all((one.kept, [one.values, *one.small]) for one in changing)

    def _keep_confirmed(self, ones: Sequence[Remembered]) -> None:
        """What they are, by as few launches as of one."""
        for one in ones:
            values = one.spare.pop() if one.spare else torch.empty_like(one.values)
            one.confirmed = _confirmed(one, values, [torch.empty_like(small) for small in one.small])
        _copy_all(
            ([one.confirmed.values, *one.confirmed.small], [one.values, *one.small])
            for one in ones
            if one.confirmed is not None
        )

    def _undo_open_step(self) -> None:
        if self._is_open and self._changed:
            self.undo(self._changed[0].values.new_ones(1, dtype=torch.int32))
        for one in self._changed:
            one.is_kept = False  # nobody has asked whether to undo it
        self._is_open, self._changed = False, []


def _tensors_of(one: Remembered) -> list[torch.Tensor]:
    return [one.values, *one.small, *one.kept]


def _confirmed(one: Remembered, values: torch.Tensor, small: list[torch.Tensor]) -> Confirmed:
    unit = one.unit if isinstance(one.unit, float) else None
    return Confirmed(values, small, unit, one.k if isinstance(one, DeviceResidual) else 0)


def _copy_all(copies: Iterable[tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]]) -> None:
    """Each of the first into, from the second: by a launch for each dtype."""
    pairs = [pair for into, from_ in copies for pair in zip(into, from_, strict=True)]
    for dtype in (torch.float32, torch.float64, torch.int64):
        if of_dtype := [pair for pair in pairs if pair[0].dtype == dtype]:
            torch._foreach_copy_([into for into, _ in of_dtype], [from_ for _, from_ in of_dtype])


def _restore_small(changed: Sequence[Remembered], wanted: torch.Tensor) -> None:
    """If ``wanted`` is above 0; of all at once, as each alone is a launch for a number."""
    for now, before in _small_by_dtype(changed):
        restored = torch.where(wanted > 0, torch.cat(before), torch.cat(now))
        torch._foreach_copy_(now, [*restored.split(1)])  # type: ignore[no-untyped-call]


def _small_by_dtype(changed: Sequence[Remembered]) -> Iterator[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """What they are, and were."""
    pairs = [pair for one in changed for pair in zip(one.small, one.small_before or (), strict=True)]
    for dtype in (torch.float64, torch.int64):
        of_dtype = [pair for pair in pairs if pair[0].dtype == dtype]
        if of_dtype:
            yield [now for now, _ in of_dtype], [before for _, before in of_dtype]


def _copied(entry: Entry, like: torch.Tensor) -> torch.Tensor:
    """The array on the device of ``like``."""
    if entry.peak == 0:
        return like.new_zeros(entry.size, dtype=torch.float32)
    return copied(entry.values, like)


def copied(values: npt.NDArray[np.float32], like: torch.Tensor) -> torch.Tensor:
    """A flat array on the device of ``like``."""
    runtime = runtime_of(like.device.type)
    pinned = runtime.pinned(values.nbytes).view(torch.float32)
    pinned.copy_(torch.from_numpy(values))
    made = like.new_empty(values.size, dtype=torch.float32)
    runtime.copy(runtime.current_stream(like.device), made, pinned)
    return made


def _read_into(entry: Entry, held: Remembered) -> None:
    copy = held.confirmed
    entry.values[:] = LateRead(held.values if copy is None else copy.values).values().numpy()
    unit = held.unit
    if copy is not None:
        unit = copy.small[-1] if copy.unit is None else copy.unit
    entry.unit = unit if isinstance(unit, float) else float(LateRead(unit).values()[0])
    entry.peak = np.inf
