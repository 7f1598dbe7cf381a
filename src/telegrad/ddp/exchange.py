"""How a bucket travels: at most one dense sum, one sparse exchange, and a gathering for each tensor whose entries have
one sign."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from telegrad import _core
from telegrad.communicator import Communicator, Work
from telegrad.compress import Compressor, Part
from telegrad.ddp import nonfinite
from telegrad.ddp.bucket import Bits, BucketLayout, rounded_to_bf16, tensor_of
from telegrad.ddp.options import OkTopk
from telegrad.ddp.stats import DDPStats
from telegrad.ddp.topk_states import topk_states_of
from telegrad.kernels.nonfinite.naive import as_float32
from telegrad.sparse_vector import SparseVector

Floats = npt.NDArray[np.float32]
Entries = tuple[npt.NDArray[np.uint32], Floats]

_MOST = {_core.ValueEncoding.f16: float(np.finfo(np.float16).max), _core.ValueEncoding.bf16: 2.0**128 - 2.0**120}
"""What these encodings of a value hold at most; others hold any float32."""


@dataclass(slots=True)
class Sending:
    """A bucket under way. When all ``works`` are over, ``write`` completes its buffer, and ``keep``, called if
    the step is kept, gives the residuals what rounding has lost and what the sum has not kept. ``nnz``: entries that
    left sparsely."""

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
    """Sends buckets. ``wire``: how messages hold the entries, as for ``all_reduce``; ``encoding``: of the values of
    gradients there. ``combine``: as for ``TopK``. ``stats`` are kept up to date. ``topk_states``: of layouts that have
    none yet, where sums keep a part. Raises ``ValueError`` as ``check_used``.
    """

    def __init__(
        self,
        comm: Communicator,
        compressor: Compressor,
        wire: str,
        encoding: _core.ValueEncoding,
        combine: str | OkTopk,
        stats: DDPStats,
    ) -> None:
        self._comm = comm
        self._compressor = compressor
        self._wire = wire
        self._stats = stats
        self._rounds = encoding != _core.ValueEncoding.native
        self.topk_states = topk_states_of(combine)
        self.undoable = () if self.topk_states is None else (self.topk_states,)
        check_used(compressor, wire, combine)
        self._exchange_entries = self._sum if self.topk_states is None else self._sum_and_cut
        if combine == "allgather":
            self._exchange_entries = self._gather_all
        self._most = most_of(encoding)

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

    def send(self, layout: BucketLayout, bits: Bits, *, sound: bool) -> Sending:
        """Dense members densely, all others compressed. ``sound``: no NaN, no infinity, nothing overflows."""
        sending = Sending([])
        if layout.dense_runs:
            self._send_dense_members(layout, bits, sending)
        comes_back = self.topk_states is not None  # some of what is summed: its velocity stays
        if sound:
            flat, scratch = as_float32(bits), layout.scratch()
            entries = self._select(layout.signed, flat, scratch, mask=not comes_back)
            used = entries[0].size
            gathered = []
            for part in layout.one_signed:
                own = self._select((part,), flat, (scratch[0][used:], scratch[1][used:]), mask=True)
                used += own[0].size
                gathered.append(own)
        else:
            everything = nonfinite.compress_around(self._compressor, layout, bits, mask=not comes_back)
            gathered = [_inside(part, everything) for part in layout.one_signed]
            entries = _outside(layout.one_signed, everything)
            for part, own in zip(layout.one_signed, gathered if comes_back else (), strict=False):
                self._compressor.mask((part,), own[0])
        errors = layout.error_scratch() if self._rounds or layout.one_signed else None
        if layout.signed:
            stream = self._stream_of(layout, bits, entries)
            sending.nnz += entries[0].size
            self._exchange_entries(layout, bits, stream, errors if self._rounds else None, sending)
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
        for part in layout.parts:
            self._compressor.release(part, bits)
        runs = [slice(part.offset, part.offset + part.entry.values.size) for part in layout.parts]
        values = np.concatenate([bits[run] for run in runs])
        beyond, excess = _cut(values, _MOST[_core.ValueEncoding.bf16] if wire == "bf16" else math.inf)
        lost = np.empty_like(values)
        sending.works.append(self._comm.all_reduce(values, "avg", wire=wire, error=lost, async_op=True))

        def write() -> None:
            for run, own in _pieces(runs, values):
                bits[run] = own

        def keep() -> None:
            errors = layout.error_scratch()
            lost[beyond] += excess
            for run, own in _pieces(runs, np.nan_to_num(lost, copy=False, posinf=0, neginf=0)):
                errors[run] = own
            self._compressor.keep_all(layout.parts, errors)

        sending.writes.append(write)
        sending.keeps.append(keep)
        return sending

    def _select(self, parts: tuple[Part, ...], flat: Floats, scratch: Entries, *, mask: bool) -> Entries:
        count = self._compressor.compress(parts, flat, *scratch, mask=mask)
        return scratch[0][:count], scratch[1][:count]

    def _send_dense_members(self, layout: BucketLayout, bits: Bits, sending: Sending) -> None:
        dense = np.concatenate([bits[run] for run in layout.dense_runs])
        sending.works.append(self._comm.all_reduce(tensor_of(dense), "avg", async_op=True))

        def write() -> None:
            for run, own in _pieces(layout.dense_runs, dense):
                bits[run] = own

        sending.writes.append(write)

    def _stream_of(self, layout: BucketLayout, bits: Bits, entries: Entries) -> SparseVector:
        """The entries as they leave; what that changes goes back into the residuals."""
        indices, values = entries
        encoded: Bits = values
        if bits.dtype != np.float32:
            encoded, lost = _rounded(values)
            self._compressor.keep(layout.parts, indices, lost)
        elif self._most < math.inf:
            self._keep_excess(layout, indices, values)
        return SparseVector.trusted(indices, encoded, bits.size, of_torch=True)

    def _sum(
        self, layout: BucketLayout, bits: Bits, stream: SparseVector, errors: Floats | None, sending: Sending
    ) -> None:
        work = self._comm.all_reduce_into(
            stream,
            tensor_of(bits),
            "avg",
            async_op=True,
            wire=self._wire,
            error=errors,
        )
        assert work is not None
        sending.works.append(work)

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
            self._stats.kept += report.selected
            self._stats.overflow += report.overflow
            self._stats.words_sent += report.words_sent
            self._stats.words_received += report.words_received

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
            total = self._average_of(work.result(), slice(0, bits.size))
            for part in layout.signed:
                where = slice(part.offset, part.offset + part.entry.values.size)
                bits[where] = total[where] if bits.dtype == np.float32 else rounded_to_bf16(total[where])

        sending.writes.append(write)

    def _average_of(self, streams: list[SparseVector], where: slice) -> Floats:
        """Of all ranks' entries, which all lie in that range; added in the order of ranks."""
        total = np.zeros(where.stop - where.start, np.float32)
        for one in streams:
            total[one.raw_indices - np.uint32(where.start)] += as_float32(one.raw_values)
        total /= np.float32(self._comm.world_size)
        return total

    def _keep_excess(self, layout: BucketLayout, indices: npt.NDArray[np.uint32], values: Floats) -> None:
        """What the wire would make infinite goes as the most that it holds; the rest waits."""
        beyond, excess = _cut(values, self._most)
        if beyond.size:
            self._compressor.keep(layout.parts, indices[beyond], excess)

    def _gather(self, part: Part, bits: Bits, entries: Entries, errors: Floats | None, sending: Sending) -> None:
        """RedSync's exchange: every rank gets every rank's indices and mean, so nothing is rounded twice."""
        indices, values = entries
        sending.nnz += indices.size
        stream = SparseVector.trusted(indices, values, bits.size)
        work = self._comm.all_gather(stream, async_op=True, wire="mean", error=errors)
        sending.works.append(work)
        where = slice(part.offset, part.offset + part.entry.values.size)

        def write() -> None:
            total = self._average_of(work.result(), where)
            bits[where] = total if bits.dtype == np.float32 else rounded_to_bf16(total)

        sending.writes.append(write)


def check_used(compressor: Compressor, values: str, combine: str | OkTopk) -> None:
    """Raises ``ValueError`` for ``values`` or ``combine`` where all compressed tensors go as the mean of one sign, each
    gathered."""
    parts = [compressor.part(one.name, 0) for one in compressor.residuals]
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


def _inside(part: Part, entries: Entries) -> Entries:
    first, last = np.searchsorted(entries[0], np.array([part.offset, part.offset + part.entry.values.size], np.uint32))
    return entries[0][first:last], entries[1][first:last]


def _outside(parts: tuple[Part, ...], entries: Entries) -> Entries:
    keep = np.ones(entries[0].size, bool)
    for part in parts:
        keep &= (entries[0] < part.offset) | (entries[0] >= part.offset + part.entry.values.size)
    return entries[0][keep], entries[1][keep]
