"""How a bucket travels: at most one dense sum, one sparse exchange, and a gathering for each tensor whose entries have
one sign. NaN and infinity: whose they are, and how they are sent. What sums that keep a part leave to the next step.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from telegrad import _core
from telegrad.communicator import Communicator, GTopkState, Work
from telegrad.communicator.topk import TopkState
from telegrad.compress import Compressor, PlacedResidual
from telegrad.ddp.bucket import Bits, BucketLayout, ParameterSpan, rounded_to_bf16, tensor_of
from telegrad.ddp.options import BoundedTopk, Combine, OkTopk
from telegrad.ddp.telemetry import DDPStats
from telegrad.errors import NonFiniteGradient
from telegrad.kernels.floats import as_float32, count_nonfinite
from telegrad.sparse_vector import SparseVector

_NONE = np.zeros(0, np.intp)
NONFINITE_POLICIES = ("raise", "skip", "send")
WHOLE_WIRE = "int8"  # of a layout's whole parts
_BF16_LIMIT = 2.0**128 - 2.0**119  # from here on a float32 is rounded to an infinite bfloat16


class Fault(NamedTuple):
    """What is wrong with a bucket: the first parameter concerned, and a clause that names it."""

    parameter: str
    text: str


def find_fault(compressor: Compressor, layout: BucketLayout, bits: Bits, sparse: bool) -> Fault | None:
    """Looks before anything is changed. ``sparse``: the bucket's parts will be added to their residuals."""
    if compressor.momentum is not None and sparse and bits.dtype == np.float32 and _are_small(compressor, layout, bits):
        return None
    if bits.dtype == np.float32:
        at = _core.buffer_of(bits, False)
        assert at is not None
        is_faulty = _core.count_nonfinite(at.pointer, bits.size, _core.DType.f32) > 0
    else:
        is_faulty = count_nonfinite(bits) > 0
    if is_faulty:
        for name, offset, size in layout.members:
            count = count_nonfinite(bits[offset : offset + size])
            if count:
                return Fault(name, f"{count} of {size} entries in the gradient of {name!r} are NaN or infinite")
    if sparse:
        flat = bits if bits.dtype == np.float32 else as_float32(bits)
        if compressor.may_overflow(layout.parts, flat):
            where = compressor.overflowing(layout.parts, flat, _limit(bits))
            for part in layout.parts:
                name, size = part.entry.name, part.entry.values.size
                count = int(np.count_nonzero((where >= part.offset) & (where < part.offset + size)))
                if count:
                    return _overflow("residual", "residual + gradient", name, count, size, bits)
    if compressor.momentum is not None:
        for name, offset, size in layout.dense if sparse else layout.members:
            gradient = as_float32(bits[offset : offset + size])
            if size and compressor.momentum.may_overflow(name, gradient):
                total = compressor.momentum.contribution(name, gradient, compressor.gradient_unit)
                count = int(np.count_nonzero(~(np.abs(total) < np.float32(_limit(bits)))))
                if count:
                    return _overflow("velocity", "its sum with the gradient", name, count, size, bits)
    return None


def _are_small(compressor: Compressor, layout: BucketLayout, bits: Floats) -> bool:
    """With momentum: whether norms, which are needed anyhow, show that all is finite and nothing can overflow."""
    momentum = compressor.momentum
    assert momentum is not None
    return not compressor.may_overflow(layout.parts, bits) and not any(
        momentum.may_overflow(name, bits[offset : offset + size]) for name, offset, size in layout.dense if size
    )


def _overflow(what: str, total: str, name: str, count: int, size: int, bits: Bits) -> Fault:
    dtype = "float32" if bits.dtype == np.float32 else "bfloat16"
    return Fault(
        name,
        f"the {what} of {name!r} overflowed: {count} of {size} entries of {total} are infinite in {dtype}, though both "
        "are finite",
    )


REMEDY = (
    "lower the learning rate or clip, or choose nonfinite='skip' (all ranks drop such a step) or 'send' (the optimizer "
    "sees it)"
)
REMEDY_WITHOUT_SKIP = "lower the learning rate or clip, or choose nonfinite='send' (the optimizer sees it)"


def error_of(fault: Fault, rank: int, step: int, *, remedy: str = REMEDY, among: str = "") -> NonFiniteGradient:
    """The error for the policy ``"raise"``. ``among``: which ranks ``rank`` counts, if not all."""
    return NonFiniteGradient(
        f"rank {rank}{among}, step {step}: {fault.text}: {remedy}",
        rank=rank,
        parameter=fault.parameter,
    )


def compress_around(
    compressor: Compressor, layout: BucketLayout, bits: Bits, *, mask: bool = True
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.float32]]:
    """Compresses the bucket and sends along what is not finite, and no residual holds. A gradient's NaN or infinity
    leaves the residual alone; where residual + gradient overflows, the infinity goes and the residual is zero. ``bits``
    may be overwritten. ``mask``: see ``Compressor.compress``. Returns ascending indices, and values."""
    flat = as_float32(bits)
    inside = np.zeros(flat.size, bool)
    for part in layout.selected:
        inside[part.offset : part.offset + part.entry.values.size] = True
    faulty = np.flatnonzero(inside & ~np.isfinite(flat)).astype(np.uint32)
    faulty_values = flat[faulty]
    flat[faulty] = 0
    overflowing = np.setdiff1d(compressor.overflowing(layout.selected, flat, _limit(bits)), faulty)
    overflowing_values = np.copysign(np.float32(np.inf), compressor.take(layout.selected, flat, overflowing))
    indices, values = layout.scratch()
    count = compressor.compress(layout.selected, flat, indices, values, mask=mask)
    indices, values = indices[:count], values[:count]
    replaced = np.isin(indices, np.concatenate([faulty, overflowing]))
    compressor.keep(layout.selected, indices[replaced], values[replaced])
    indices = np.concatenate([indices[~replaced], faulty, overflowing])
    values = np.concatenate([values[~replaced], faulty_values, overflowing_values])
    order = np.argsort(indices)
    return indices[order], values[order]


def correct_around(compressor: Compressor, bits: Bits, members: Iterable[ParameterSpan]) -> None:
    """With momentum: makes of the gradients of ``members``, which are to be summed densely, what is to be summed. NaN
    and infinity stay what they are, and no velocity holds such a value afterwards."""
    if compressor.momentum is None:
        return
    for name, offset, size in members:
        own = bits[offset : offset + size]
        gradient = as_float32(own)
        faulty = np.flatnonzero(~np.isfinite(gradient)) if count_nonfinite(own) else _NONE
        kept = own[faulty]
        gradient[faulty] = 0
        if size:
            compressor.correct(name, gradient)
        if gradient is not own:
            own[:] = rounded_to_bf16(gradient)
        own[faulty] = kept


def _limit(bits: Bits) -> float:
    return math.inf if bits.dtype == np.float32 else _BF16_LIMIT


Places = list[list[Any]]  # [name, offset, size] of each part
MakeState = Callable[[int, Places], TopkState]
"""Called with k, and where the parameters lie."""


class PlacedState(NamedTuple):  # a state, and where the parameters lie that it is of
    places: Places
    state: TopkState


class LeftState(NamedTuple):  # what calls have left, and where the parameters lay then
    places: Places
    left: dict[str, Any]

    def fitting(self, places: Places) -> dict[str, Any]:
        """Of the same parameters in these places."""
        if places == self.places or "slices" not in self.left:
            return self.left
        squares = dict(zip((place[0] for place in self.places), self.left.get("squares", ()), strict=False))
        moved = {"squares": [squares[place[0]] for place in places if squares], "tensors": _tensors(places)}
        return {**self.left, "slices": [], **moved}


class TopkStates:
    """One for each bucket, of sums that ``combine`` names, which ``make`` makes.

    A bucket is known by its parameters: DDP lays the first pass of a process out in another order. Where only that
    differs, slices are cut anew, and the rest stays."""

    def __init__(self, combine: str, make: MakeState) -> None:
        self._combine, self._make = combine, make
        self._held: dict[frozenset[str], PlacedState] = {}
        self._unit = 1.0
        self._before: dict[frozenset[str], LeftState] | None = None  # at ``begin()``

    def begin(self) -> None:
        """Opens a step that can be undone."""
        self._before = {names: LeftState(held.places, held.state.state_dict()) for names, held in self._held.items()}

    def keep_step(self) -> None:
        """Closes the open step."""
        self._before = None

    def drop_step(self) -> None:
        """Undoes the open step, if there is one. A state in use is of a sum that has failed, and of no more use."""
        before, self._before = self._before, None
        if before is None:
            return
        for names, held in self._held.items():
            past = before.get(names) or LeftState(held.places, self._make(held.state.k, held.places).state_dict())
            if not held.state.in_use:
                held.state.load_state_dict(past.fitting(held.places))

    def set_unit(self, unit: float) -> None:
        """What 1 in the sums is worth from now on, as ``Compressor.set_units`` has it: thresholds follow."""
        ratio, self._unit = self._unit / unit, unit
        if ratio == 1:
            return
        for held in self._held.values():
            held.state.load_state_dict(_times(held.state.state_dict(), ratio))

    def of(self, parts: Sequence[PlacedResidual]) -> TopkState:
        """A state for the sums of ``parts``, with what their last sum has left, if it was of as many entries."""
        places: Places = [[part.entry.name, int(part.offset), part.entry.size] for part in parts]
        state = self._make(sum(part.entry.k for part in parts), places)
        names = frozenset(part.entry.name for part in parts)
        before = self._held.get(names)
        if before is not None:
            state.load_state_dict(LeftState(before.places, before.state.state_dict()).fitting(places))
        # A parameter is in one bucket at a time: those that had one of these are gone.
        self._held = {other: held for other, held in self._held.items() if other.isdisjoint(names)}
        self._held[names] = PlacedState(places, state)
        return state

    def state_dict(self) -> tuple[dict[str, Any], ...]:
        """A copy, as plain values, where 1 is worth 1; a tuple, which torch.distributed.checkpoint keeps in one piece.
        Raises ``ValueError`` while a sum is under way."""
        return tuple(
            {
                "combine": self._combine,
                "places": [list(place) for place in held.places],
                **_times(held.state.state_dict(), self._unit),
            }
            for held in self._held.values()
        )

    def load(self, fitting: Mapping[frozenset[str], PlacedState]) -> None:
        """Takes over what ``fitting`` has found, instead of what is held."""
        self._held, self._unit = dict(fitting), 1.0

    def fitting(self, saved: Any) -> dict[frozenset[str], PlacedState]:
        """What a ``state_dict()`` has of such sums, for ``load``. Raises ``ValueError`` for what is none."""
        if not isinstance(saved, Sequence) or isinstance(saved, str):
            raise ValueError(f"state['sums'] is a {type(saved).__name__}: it must come from state_dict()")
        held: dict[frozenset[str], PlacedState] = {}
        for number, one in enumerate(saved):
            if not isinstance(one, Mapping) or not _are_places(one.get("places")):
                raise ValueError(f"state['sums'][{number}] has no places of parameters: it must come from state_dict()")
            if one.get("combine") != self._combine:
                continue
            try:
                places = [list(place) for place in one["places"]]
                state = self._make(one.get("k", 0), places)
                state.load_state_dict(one)
            except (TypeError, ValueError) as error:
                raise ValueError(f"state['sums'][{number}]: {error}") from error
            held[frozenset(place[0] for place in places)] = PlacedState(places, state)
        return held


def topk_states_of(combine: Combine) -> TopkStates | None:
    """For ``TopK``'s ``combine``; ``None`` where sums keep everything."""
    if combine == "gtopk":
        return TopkStates(combine, lambda k, _: GTopkState(k))
    if combine == "oktopk" or isinstance(combine, OkTopk):
        kept = OkTopk() if isinstance(combine, str) else combine
        return TopkStates("oktopk", lambda k, places: kept.state(k, _tensors(places)))
    if combine == "bounded" or isinstance(combine, BoundedTopk):
        fixed = BoundedTopk() if isinstance(combine, str) else combine
        return TopkStates("bounded", lambda k, _: fixed.state(k))
    return None


def _times(past: dict[str, Any], ratio: float) -> dict[str, Any]:
    """What a call has left, in another unit."""
    squares = {"squares": [one * ratio**2 for one in past["squares"]]} if "squares" in past else {}
    return {**past, **squares, "threshold": past["threshold"] * ratio} if "threshold" in past else past


def _tensors(places: Places) -> list[list[int]]:
    return [place[1:] for place in places]


def _are_places(value: object) -> bool:
    return isinstance(value, Sequence) and all(
        isinstance(one, Sequence) and [type(entry) for entry in one] == [str, int, int] for one in value
    )


Floats = npt.NDArray[np.float32]
Entries = tuple[npt.NDArray[np.uint32], Floats]

_MOST = {_core.ValueEncoding.f16: float(np.finfo(np.float16).max), _core.ValueEncoding.bf16: 2.0**128 - 2.0**120}
"""What these encodings of a value hold at most; others hold any float32."""


@dataclass(slots=True)
class Sending:
    """A bucket under way. When all ``works`` are over, ``write`` completes its buffer, and ``keep``, if the step is
    kept, gives the residuals what was not sent after all. ``nnz``: entries that left sparsely."""

    works: list[Work]
    nnz: int = 0
    writes: list[Callable[[], None]] = field(default_factory=list)
    keeps: list[Callable[[], None]] = field(default_factory=list)

    def write(self) -> None:
        """Puts into the buffer what the network did not write."""
        for one in self.writes:
            one()

    def keep(self) -> None:
        for one in self.keeps:
            one()


class Exchange:
    """Sends buckets. ``wire``: how messages hold the entries, as for ``all_reduce``; ``encoding``: of their values.
    ``combine``: as for ``TopK``; entries that are gathered are averaged over ``average``, and their values scaled by
    ``clip``, as DiLoCo says. ``stats`` are kept up to date. Raises ``ValueError`` as ``check_used``."""

    def __init__(
        self,
        comm: Communicator,
        compressor: Compressor,
        wire: str,
        encoding: _core.ValueEncoding,
        combine: Combine,
        stats: DDPStats,
        *,
        average: str = "ranks",
        clip: str | None = None,
    ) -> None:
        self._comm = comm
        self._of_senders, self._clips = average == "senders", clip is not None
        self._compressor = compressor
        self._wire = wire
        self._stats = stats
        self._rounds = encoding != _core.ValueEncoding.native
        self.topk_states = topk_states_of(combine)
        self.undoable = () if self.topk_states is None else (self.topk_states,)
        check_used(compressor, wire, combine)
        self._sums_all = combine == "allreduce"
        self._gathers = combine == "allgather"
        self._most = most_of(encoding)

    def move_to(self, comm: Communicator) -> None:
        """Buckets travel there from now on."""
        self._comm = comm

    def send_densely(self, bits: Bits) -> Sending:
        """The average of everything, in place."""
        return Sending([self._comm.all_reduce(tensor_of(bits), "avg", async_op=True)])

    def send_with_what_waits(self, layout: BucketLayout, bits: Bits) -> Sending:
        """As ``send_densely``, with the residuals of the compressed members, which are zero then but for what rounding
        to bfloat16 loses."""
        flat = as_float32(bits)
        for part in layout.parts:
            self._compressor.release(part, flat)
        if flat is not bits:
            bits[:], lost = _rounded(flat)
            self._compressor.keep_all(layout.parts, lost)
        return self.send_densely(bits)

    def compress_unchecked(self, layout: BucketLayout, bits: Bits) -> int | None:
        """Compresses a bucket that nobody has looked at; the same pass over memory finds out whether it is sound.

        Returns the number of entries, for ``send``; ``None``: nothing has changed, and ``find_fault`` is to look."""
        store, momentum = self._compressor.residuals, self._compressor.momentum
        if not (store.records or store.is_open) or bits.dtype != np.float32 or layout.one_signed or layout.matrices:
            return None
        for name, offset, size in layout.dense:
            own = bits[offset : offset + size]
            if count_nonfinite(own) or (momentum is not None and size and momentum.may_overflow(name, own)):
                return None
        indices, values = layout.scratch()
        mask = self.topk_states is None
        return self._compressor.compress_unchecked(layout.selected, bits, indices, values, mask=mask)

    def send(self, layout: BucketLayout, bits: Bits, *, sound: bool, compressed: int | None = None) -> Sending:
        """Dense members densely, those of which entries are selected compressed. ``sound``: no NaN, no infinity,
        nothing overflows. ``compressed``: what ``compress_unchecked`` has returned for it."""
        sending = Sending([])
        if layout.whole:
            self._send_rounded(layout.whole, bits, WHOLE_WIRE, sending)
        if layout.dense_runs:
            self._send_dense_members(layout, bits, sending)
        if not layout.selected:
            return sending
        comes_back = self.topk_states is not None  # some of what is summed: its velocity stays
        gathered: list[Entries] = []
        if compressed is not None:
            entries = layout.indices[:compressed], layout.values[:compressed]
        elif sound:
            if layout.outcome is None or layout.outcome.done():
                scratch = layout.indices, layout.values
            else:
                scratch = layout.scratch()
            flat = bits if bits.dtype == np.float32 else as_float32(bits)
            used = self._compressor.compress(layout.signed, flat, *scratch, mask=not comes_back)
            entries = scratch[0][:used], scratch[1][:used]
            for part in layout.one_signed:
                own = self._select((part,), flat, (scratch[0][used:], scratch[1][used:]), mask=True)
                used += own[0].size
                gathered.append(own)
        else:
            everything = compress_around(self._compressor, layout, bits, mask=not comes_back)
            gathered = [_inside(part, everything) for part in layout.one_signed]
            entries = _outside(layout.one_signed, everything)
            for part, own in zip(layout.one_signed, gathered if comes_back else (), strict=False):
                self._compressor.mask((part,), own[0])
        errors = layout.error_scratch() if self._rounds or layout.one_signed else None
        if layout.signed:
            indices, values = self._as_sent(layout, bits, entries)
            sending.nnz += indices.size
            lost = errors if self._rounds else None
            if self._sums_all:
                sending.works.append(self._comm._begin_average_into(indices, values, bits, self._wire, lost))
            else:
                stream = SparseVector.trusted(indices, values, bits.size, of_torch=True)
                exchange_entries = self._gather_all if self._gathers else self._sum_and_cut
                exchange_entries(layout, bits, stream, lost, sending)
        for part, own in zip(layout.one_signed, gathered, strict=True):
            self._gather(part, bits, own, errors, sending)
        if errors is not None:
            sending.keeps.append(functools.partial(self._compressor.keep_all, layout.parts, errors))
        return sending

    def send_quantised(self, layout: BucketLayout, bits: Bits, wire: str) -> Sending:
        """Compressed members with their residuals, all values in that ``wire`` of dense sums; what that loses waits.
        Dense members as they are. ``bits`` are float32."""
        sending = Sending([])
        if layout.dense_runs:
            self._send_dense_members(layout, bits, sending)
        self._send_rounded(layout.parts, bits, wire, sending)
        return sending

    def _send_rounded(self, parts: Sequence[PlacedResidual], bits: Bits, wire: str, sending: Sending) -> None:
        """Sends those members with their residuals, as a part of ``sending``. Residuals stay as they were where an
        average is not finite though this rank's own values are."""
        flat = as_float32(bits)
        released = np.concatenate([self._compressor.release(part, flat) for part in parts])
        runs = [slice(part.offset, part.offset + part.entry.values.size) for part in parts]
        values = np.concatenate([flat[run] for run in runs])
        released[~np.isfinite(values)] = 0
        beyond, excess = _cut(values, _MOST[_core.ValueEncoding.bf16] if wire == "bf16" else math.inf)
        lost = np.empty_like(values)
        sending.works.append(self._comm.all_reduce(values, "avg", wire=wire, error=lost, async_op=True))

        def write() -> None:
            for run, own in _pieces(runs, values):
                bits[run] = own if flat is bits else rounded_to_bf16(own)

        def keep() -> None:
            lost[beyond] += excess
            kept = np.where(np.isfinite(values), np.nan_to_num(lost, copy=False, posinf=0, neginf=0), released)
            for part, (_, own) in zip(parts, _pieces(runs, kept), strict=True):
                self._compressor.keep_all((PlacedResidual(part.entry, 0),), own)

        sending.writes.append(write)
        sending.keeps.append(keep)

    def _select(self, parts: tuple[PlacedResidual, ...], flat: Floats, scratch: Entries, *, mask: bool) -> Entries:
        count = self._compressor.compress(parts, flat, *scratch, mask=mask)
        return scratch[0][:count], scratch[1][:count]

    def _send_dense_members(self, layout: BucketLayout, bits: Bits, sending: Sending) -> None:
        """The average of those members, as a part of ``sending``."""
        dense = np.concatenate([bits[run] for run in layout.dense_runs])
        whole = dense if dense.dtype == np.float32 else tensor_of(dense)
        sending.works.append(self._comm.all_reduce(whole, "avg", async_op=True))

        def write() -> None:
            for run, own in _pieces(layout.dense_runs, dense):
                bits[run] = own

        sending.writes.append(write)

    def _as_sent(self, layout: BucketLayout, bits: Bits, entries: Entries) -> tuple[npt.NDArray[np.uint32], Bits]:
        """The entries as they leave; what that changes goes back into the residuals."""
        indices, values = entries
        if bits.dtype != np.float32:
            encoded, lost = _rounded(values)
            self._compressor.keep(layout.parts, indices, lost)
            return indices, encoded
        if self._most < math.inf:
            self._keep_excess(layout, indices, values)
        return indices, values

    def _sum_and_cut(
        self, layout: BucketLayout, bits: Bits, stream: SparseVector, errors: Floats | None, sending: Sending
    ) -> None:
        if layout.topk is None:
            assert self.topk_states is not None
            layout.topk = self.topk_states.of(layout.signed)
        work = self._comm.all_reduce_topk(stream, layout.topk, "avg", wire=self._wire, error=errors, async_op=True)
        sending.works.append(work)
        bits.fill(0)

        def write() -> None:
            total, _, report = work.result()
            bits[total.raw_indices] = total.raw_values
            self._stats.add_sum(report)

        def keep() -> None:
            left = work.result().left
            values = as_float32(left.raw_values)
            finite = np.isfinite(values)  # of what is not, all ranks know from the sum
            self._compressor.keep(layout.parts, left.raw_indices[finite], values[finite])
            if self._compressor.masks:
                own = stream.raw_indices
                self._compressor.mask(layout.parts, own[~np.isin(own, left.raw_indices, assume_unique=True)])

        sending.writes.append(write)
        sending.keeps.append(keep)

    def _gather_all(
        self, layout: BucketLayout, bits: Bits, stream: SparseVector, errors: Floats | None, sending: Sending
    ) -> None:
        work = self._comm.all_gather(stream, async_op=True, wire=self._wire, error=errors)
        sending.works.append(work)
        bits.fill(0)

        def write() -> None:
            total = self._average_of(work.result(), layout.signed, slice(0, bits.size))
            for part in layout.signed:
                where = slice(part.offset, part.offset + part.entry.values.size)
                bits[where] = total[where] if bits.dtype == np.float32 else rounded_to_bf16(total[where])

        sending.writes.append(write)

    def _average_of(self, streams: list[SparseVector], parts: Sequence[PlacedResidual], where: slice) -> Floats:
        """Of all ranks' entries, which all are of ``parts`` and in that range; added in the order of ranks."""
        total = np.zeros(where.stop - where.start, np.float32)
        senders = np.zeros_like(total) if self._of_senders else np.float32(self._comm.world_size)
        all_values = [as_float32(one.raw_values) for one in streams]
        if self._clips:
            all_values = _clipped(streams, all_values, parts)
        for one, values in zip(streams, all_values, strict=True):
            places = one.raw_indices - np.uint32(where.start)
            total[places] += values
            if isinstance(senders, np.ndarray):
                senders[places] += 1
        total /= np.maximum(senders, np.float32(1))
        return total

    def _keep_excess(self, layout: BucketLayout, indices: npt.NDArray[np.uint32], values: Floats) -> None:
        """What the wire would make infinite goes as the most that it holds; the rest waits."""
        beyond, excess = _cut(values, self._most)
        if beyond.size:
            self._compressor.keep(layout.parts, indices[beyond], excess)

    def _gather(
        self, part: PlacedResidual, bits: Bits, entries: Entries, errors: Floats | None, sending: Sending
    ) -> None:
        """RedSync's exchange: every rank gets every rank's indices and mean, so nothing is rounded twice."""
        indices, values = entries
        sending.nnz += indices.size
        size = part.entry.values.size
        where = slice(part.offset, part.offset + size)
        stream = SparseVector.trusted(indices - np.uint32(part.offset), values, size)
        lost = None if errors is None else errors[where]
        work = self._comm.all_gather(stream, async_op=True, wire="mean", error=lost)
        sending.works.append(work)

        def write() -> None:
            total = self._average_of(work.result(), (PlacedResidual(part.entry, 0),), slice(0, size))
            bits[where] = total if bits.dtype == np.float32 else rounded_to_bf16(total)

        sending.writes.append(write)


def check_used(compressor: Compressor, values: str, combine: Combine) -> None:
    """Raises ``ValueError`` for ``values`` or ``combine`` where all compressed tensors go as the mean of one sign, each
    gathered."""
    parts = [compressor.part(one.name, 0) for one in compressor.residuals if compressor.selects(one.name)]
    if not parts or not all(map(compressor.one_signed, parts)):
        return
    for name, value, without in (("values", values, ("auto", "mean")), ("combine", combine, ("allreduce",))):
        if value not in without:
            raise ValueError(
                f"{name}={value!r} is not used with same_sign=True: every compressed tensor goes as the mean of one "
                "sign, which all ranks gather; leave one of the two out"
            )


def most_of(encoding: _core.ValueEncoding) -> float:
    """The largest float32 that a wire does not make infinite, so that no more of one is sent at once."""
    return _MOST.get(encoding, math.inf)


def _pieces(runs: Sequence[slice], values: Floats) -> Iterator[tuple[slice, Floats]]:
    """What of ``values``, which are those of ``runs`` one after another, belongs to each."""
    start = 0
    for run in runs:
        size = run.stop - run.start
        yield run, values[start : start + size]
        start += size


def _cut(values: Floats, most: float) -> tuple[npt.NDArray[np.intp], Floats]:
    """Makes finite values at most that large: which ones, and what that takes from them."""
    if most == math.inf or not values.size or (values.max() <= most and values.min() >= -most):
        return np.zeros(0, np.intp), np.zeros(0, np.float32)
    beyond = np.flatnonzero(np.isfinite(values) & (np.abs(values) > most))
    held = np.copysign(np.float32(most), values[beyond])
    excess, values[beyond] = values[beyond] - held, held
    return beyond, excess


def _rounded(values: Floats) -> tuple[Bits, Floats]:
    """As bfloat16, and what that loses."""
    encoded = rounded_to_bf16(values)
    with np.errstate(invalid="ignore"):  # what is infinite is sent so: nothing of it is lost
        lost = np.where(np.isfinite(as_float32(encoded)), values - as_float32(encoded), np.float32(0))
    return encoded, lost


def _clipped(streams: list[SparseVector], values: list[Floats], parts: Sequence[PlacedResidual]) -> list[Floats]:
    """Of each part every rank's values, scaled down to the median norm of those ranks that sent any of it."""
    clipped = [one.copy() for one in values]
    for part in parts:
        ends = np.array([part.offset, part.offset + part.entry.values.size], np.uint32)
        runs = [slice(*np.searchsorted(one.raw_indices, ends)) for one in streams]
        # Sums one by one, which round alike on all CPUs, as a dot product does not.
        norms = [
            math.sqrt(np.cumsum(np.square(one[run], dtype=np.float64))[-1]) if run.stop > run.start else 0.0
            for one, run in zip(clipped, runs, strict=True)
        ]
        most = float(np.median([norm for norm in norms if norm > 0] or [0.0]))
        for one, run, norm in zip(clipped, runs, norms, strict=True):
            if norm > most:
                one[run] *= np.float32(most / norm)
    return clipped


def _inside(part: PlacedResidual, entries: Entries) -> Entries:
    first, last = np.searchsorted(entries[0], np.array([part.offset, part.offset + part.entry.values.size], np.uint32))
    return entries[0][first:last], entries[1][first:last]


def _outside(parts: tuple[PlacedResidual, ...], entries: Entries) -> Entries:
    keep = np.ones(entries[0].size, bool)
    for part in parts:
        keep &= (entries[0] < part.offset) | (entries[0] >= part.offset + part.entry.values.size)
    return entries[0][keep], entries[1][keep]
