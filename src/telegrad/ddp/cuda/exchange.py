"""How a bucket on a device travels, in streams: its dense members in one dense sum, the entries of all others in one
sparse sum. The host knows where things lie and how much there can be, and waits for nothing."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch

from telegrad import _core
from telegrad.communicator import Communicator, DeviceEntries
from telegrad.communicator.cuda.runtime import DeviceRuntime, LateRead, Stream, has_runtime, runtime_of
from telegrad.communicator.cuda.transfers import DeviceWork
from telegrad.communicator.operands import encoding_of
from telegrad.communicator.topk import BoundedTopkState, TopkReport, TopkState
from telegrad.compress import Compressor, PlacedResidual
from telegrad.ddp.bucket import BucketLayout, ParameterSpan
from telegrad.ddp.cuda.captured_work import CapturedWork
from telegrad.ddp.cuda.faults import GatheredReads
from telegrad.ddp.cuda.feedback import DeviceFeedback, DeviceTables, LossScale, Remembered, copied
from telegrad.ddp.cuda.selection import QueuedEntries, QueuedSelection, queue_selections
from telegrad.ddp.cuda.telemetry import DeviceTelemetry
from telegrad.ddp.exchange import WHOLE_WIRE, TopkStates, most_of
from telegrad.ddp.low_rank import LowRankRounds, MatrixShape, first_factor, order_of
from telegrad.ddp.options import Combine
from telegrad.ddp.telemetry import DDPStats
from telegrad.kernels.feedback import Collected, Moved, kernels_of
from telegrad.kernels.select import queues_of


class Addend(NamedTuple):
    """A parameter's. ``gradient``: its part of the bucket, float32, which becomes the average; ``residual``: as long,
    ``None`` where nothing of it waits in this step; ``used``: one element, 0 where the gradient takes no part."""

    gradient: torch.Tensor
    residual: torch.Tensor | None
    used: torch.Tensor


class QuantisedSum(NamedTuple):
    """``overflowed``: for each addend, whether it and what waits are infinite together."""

    work: DeviceWork
    overflowed: torch.Tensor


def sum_quantised(comm: Communicator, addends: Sequence[Addend], wire: str, most: float) -> QuantisedSum:
    """Begins to average. NaN and infinity go as they are. Their residuals stay; so do those of averages that are not
    finite. A larger number than ``most``, the wire's largest, goes as ``most``, and the residual keeps the rest."""
    gradients = [one.gradient for one in addends]
    sizes = [one.numel() for one in gradients]
    values = torch.cat(gradients)
    finite = values.isfinite()
    waiting = torch.cat([_waiting(one) for one in addends])
    released = torch.where(finite, waiting, torch.zeros_like(waiting))
    values.add_(released)
    overflowed = finite & values.isinf()
    of_each = torch.stack([part.any() for part in torch.split(overflowed, sizes)])
    excess = None
    if most < math.inf:
        values, excess = _cut(values, most)
    kept = [one.residual for one in addends if one.residual is not None]

    def of_kept(whole: torch.Tensor) -> list[torch.Tensor]:
        parts = zip(torch.split(whole, sizes), addends, strict=True)
        return [part for part, one in parts if one.residual is not None]

    if kept:
        torch._foreach_sub_(kept, of_kept(released))
    released.masked_fill_(overflowed, 0.0)
    lost = torch.empty_like(values)
    work: DeviceWork = comm.all_reduce(values, "avg", wire=wire, error=lost, async_op=True)

    def take() -> None:
        with torch.no_grad():
            torch._foreach_copy_(gradients, torch.split(values, sizes))
            if excess is not None:
                lost.add_(excess)
            if kept:
                left = torch.where(values.isfinite(), lost.nan_to_num_(0.0, 0.0, 0.0), released)
                torch._foreach_add_(kept, of_kept(left))

    work.then(take, [values, lost, released, *gradients, *kept, *([] if excess is None else [excess])])
    return QuantisedSum(work, of_each)


def _waiting(one: Addend) -> torch.Tensor:
    return torch.zeros_like(one.gradient) if one.residual is None else one.residual * one.used


def _cut(values: torch.Tensor, most: float) -> tuple[torch.Tensor, torch.Tensor]:
    """With finite values that are at most that large; and what that takes from them."""
    held = torch.where(values.isfinite(), values.clamp(-most, most), values)
    return held, (values - held).nan_to_num_(0.0, 0.0, 0.0)


class Plan(NamedTuple):
    """``filled``: members that are not empty; ``parts``: those that are compressed now; ``dense``: members that are
    not; ``waiting``: parts that are among these, and take along what waits."""

    layout: BucketLayout
    filled: Sequence[ParameterSpan]
    parts: tuple[PlacedResidual, ...]
    dense: tuple[ParameterSpan, ...]
    waiting: tuple[PlacedResidual, ...]
    looks: bool

    @property
    def has_work(self) -> bool:
        """Whether there is something to be done but with velocities."""
        return bool(self.parts or self.waiting or self.looks)


class Leaving(NamedTuple):
    """The entries of ``parts``, one behind the other; ``ends``: int64, where those of each end. ``one_signed``: of this
    part alone, whose entries all have one sign."""

    entries: DeviceEntries
    ends: torch.Tensor
    parts: Sequence[PlacedResidual]
    one_signed: PlacedResidual | None

    @property
    def first(self) -> int:
        """The element of the bucket that its indices count from."""
        return 0 if self.one_signed is None else self.one_signed.offset


class Made(NamedTuple):
    """``faulty``: by filled member, if anybody looks. ``dense``: what is sent beside entries that leave, if there is
    any."""

    faulty: torch.Tensor | None
    leaving: Sequence[Leaving] = ()
    dense: torch.Tensor | None = None


class Found:
    """What a bucket's gradients are like, on the device. ``places``: by name, those of one element each in ``active``
    (int64: there is something in the gradient, and all of it is finite), and in ``faults`` (int32, zeros at first).
    ``broken``: by parameter, whether its gradient is not finite."""

    def __init__(self, filled: Sequence[ParameterSpan], buffer: torch.Tensor) -> None:
        """``filled``: at least one."""
        gradients = [buffer[one.offset : one.offset + one.size] for one in filled]
        # The largest magnitude is NaN or infinite where an entry is, and cannot overflow as a sum can.
        most = torch.stack([*torch._foreach_norm(gradients, math.inf)])
        finite = most < math.inf  # which no NaN is
        self.places = {one.name: slice(number, number + 1) for number, one in enumerate(filled)}
        self.broken = finite.logical_not()
        self.active = ((most > 0) & finite).to(torch.int64)
        self.faults = most.new_zeros(len(filled), dtype=torch.int32)


def filled_of(layout: BucketLayout) -> list[ParameterSpan]:
    """Members that are not empty."""
    return [one for one in layout.members if one.size]


def name_of(layout: BucketLayout) -> str:
    """No two buckets that there are at a time have the same."""
    return layout.members[0].name


class Started(NamedTuple):
    """A bucket under way. ``names``: of its parameters; ``faulty``: for each, on the device, whether its gradient is
    not finite, or its residual or velocity overflows; ``None``: nobody has looked."""

    work: DeviceWork
    names: list[str]
    faulty: torch.Tensor | None


class DeviceMatrix(NamedTuple):
    """One that travels as a product. ``residual``: as a matrix, with the gradient in it where ``used``; ``lines``: Q by
    columns; ``of_p`` and ``of_q``: what columns of P and Q are divided by. ``used``, ``overflows``: one element."""

    part: PlacedResidual
    shape: MatrixShape
    residual: torch.Tensor
    lines: torch.Tensor
    of_p: torch.Tensor
    of_q: torch.Tensor
    used: torch.Tensor
    overflows: torch.Tensor


class DeviceFirstRound(NamedTuple):
    """A bucket whose P are being averaged, in ``sums``; those that travel as they are lie in the last one."""

    buffer: torch.Tensor
    matrices: list[DeviceMatrix]
    order: list[int]  # of the matrices in the sums
    known: int  # how many of them travel in fewer bits
    sums: list[torch.Tensor]
    work: DeviceWork
    norms: Sequence[torch.Tensor]  # of the gradients in the order of ``matrices``; empty: nobody wants them


class DeviceLowRank:
    """The two rounds of ``low_rank`` on a device, in streams. A matrix is ``fresh`` until the host has seen that its Q
    has changed: it looks, and waits, after the first pass, the second, the fourth and so on, as other ranks do.
    ``telemetry`` and ``scale``: as for a CudaExchange."""

    def __init__(
        self,
        comm: Communicator,
        low_rank: LowRankRounds,
        feedback: DeviceFeedback,
        telemetry: DeviceTelemetry,
        scale: LossScale | None,
    ) -> None:
        self._comm, self._low_rank, self._feedback = comm, low_rank, feedback
        self._telemetry, self._scale = telemetry, scale
        self.forget()

    def forget(self) -> None:
        """What ``low_rank`` has in host memory is what counts."""
        self._factors: dict[str, Remembered] = {}
        self._first: dict[str, torch.Tensor] = {}
        self._fresh = {*self._low_rank.fresh}
        self._passes, self._has_begun = 0, False

    def save(self) -> None:
        """Writes Q to host memory."""
        held = {
            name: LateRead(one.values).values().numpy().reshape(self._low_rank.shapes[name].rank, -1).T
            for name, one in self._factors.items()
        }
        self._low_rank.load({**self._low_rank.factors, **held})

    def open_pass(self) -> None:
        """What is undone of the pass before is undone."""
        if not self._has_begun:
            return
        self._passes, self._has_begun = self._passes + 1, False
        fresh = [name for name in self._factors if name in self._fresh]
        if fresh and self._passes & (self._passes - 1) == 0:
            with torch.no_grad():
                changed = [(self._factors[name].values != self._first[name]).any() for name in fresh]
                found = LateRead(torch.stack(changed).to(torch.int32)).values().tolist()
            known = [name for name, is_changed in zip(fresh, found, strict=True) if is_changed]
            self._fresh.difference_update(known)
            for name in known:
                del self._first[name]

    def begin(self, layout: BucketLayout, buffer: torch.Tensor, found: Found) -> DeviceFirstRound:
        """As on the host: adds the gradients to the residuals, and starts the averages of P."""
        self._has_begun = True
        parts = layout.matrices
        shapes = [self._low_rank.shapes[part.entry.name] for part in parts]
        residuals = self._feedback.residuals([part.entry for part in parts], buffer)
        factors = [self._factor(part.entry.name, buffer) for part in parts]
        self._feedback.about_to_change(factors)
        lines = [one.values.view(shape.rank, shape.columns) for one, shape in zip(factors, shapes, strict=True)]
        matrices, averages = [], []
        squares = in_batches([one.T for one in lines], lambda x: halved(x.double().square_()))
        for part, shape, held, own, square in zip(parts, shapes, residuals, lines, squares, strict=True):
            _, exponents = torch.frexp(square)
            of_p = power_of_two(exponents - shape.rows.bit_length() // 2)
            of_q = power_of_two((exponents >> 1) - shape.columns.bit_length() // 2)
            place = found.places[part.entry.name]
            active, broken = found.active[place] > 0, found.broken[place]
            total = held.values + buffer[part.offset : part.offset + part.entry.size]
            overflows = active & total.isfinite().all().logical_not()
            used = active & overflows.logical_not()
            held.values.copy_(torch.where(used, total, held.values))
            residual = held.values.view(shape.rows, shape.columns)
            p = torch.mm(own / of_p[:, None], residual.T)
            p = torch.where(used, p, torch.zeros_like(p)).masked_fill_(broken | overflows, math.nan)
            matrices.append(DeviceMatrix(part, shape, residual, own, of_p, of_q, used, overflows))
            averages.append(p)
        fresh = [part.entry.name in self._fresh for part in parts]
        order = order_of([part.entry.name for part in parts], fresh)
        known = len(parts) - sum(fresh) if self._low_rank.wire is not None else 0
        sums, work = self._average([averages[number] for number in order], known)
        norms: Sequence[torch.Tensor] = ()
        if self._telemetry.observes:
            gradients = [buffer[part.offset : part.offset + part.entry.size] for part in parts]
            norms = torch._foreach_norm(gradients, dtype=torch.float32)
        return DeviceFirstRound(buffer, matrices, order, known, sums, work, norms)

    def _observe(self, first: DeviceFirstRound) -> None:
        """After the second round."""
        if first.norms:
            matrices = first.matrices
            tensors = [(one.part.entry.name, one.part.entry.size, one.shape.words) for one in matrices]
            unit = None if self._scale is None else self._scale.unit(first.buffer)
            active = torch.cat([one.used for one in matrices])
            self._telemetry.add_matrices(tensors, [one.residual for one in matrices], first.norms, active, unit)

    def finish(self, first: DeviceFirstRound) -> DeviceWork:
        """Makes bases of P and averages Q; then the averages are in the buffer, and what is not in the residuals."""
        matrices, buffer = [first.matrices[number] for number in first.order], first.buffer
        works: list[DeviceWork] = []

        def go_on() -> None:
            with torch.no_grad():
                works.append(self._second_round(first, matrices))

        held = [one for matrix in matrices for one in (matrix.residual, matrix.lines, *matrix[4:])]
        first.work.then(go_on, [*first.sums, *held, *first.norms, buffer])
        return works[0]

    def _second_round(self, first: DeviceFirstRound, matrices: Sequence[DeviceMatrix]) -> DeviceWork:
        """In the stream of the first one's results, to which all that is made here belongs."""
        buffer = first.buffer
        averages = _parted(first.sums, [(one.shape.rank, one.shape.rows) for one in matrices])
        sound = [p.isfinite().all() for p in averages]
        cleaned = [torch.where(is_sound, p, torch.zeros_like(p)).T for p, is_sound in zip(averages, sound, strict=True)]
        bases = in_batches(cleaned, orthonormal_columns)
        for number, (one, p) in enumerate(zip(matrices, cleaned, strict=True)):
            before = self._first.get(one.part.entry.name)
            if before is not None:
                is_first = (one.lines.reshape(-1) == before).all()
                bases[number] = torch.where(is_first, first_rows(p), bases[number])
        given, taken = [], []
        for one, basis, is_sound in zip(matrices, bases, sound, strict=True):
            q = torch.mm(basis.T, one.residual) / one.of_q[:, None]
            q = torch.where(one.used & is_sound, q, torch.zeros_like(q))
            finite = q.isfinite().all()
            given.append(q.masked_fill(finite.logical_not(), math.nan))
            taken.append(torch.where(finite, q, torch.zeros_like(q)))
        errors = buffer.new_zeros(sum(one.numel() for one in given), dtype=torch.float32)
        lost = torch.split(errors, [one.numel() for one in given])
        sums, work = self._average(given, first.known, errors)

        def conclude() -> None:
            with torch.no_grad():
                averages = _parted(sums, [(one.shape.rank, one.shape.columns) for one in matrices])
                for one, basis, is_sound, q, own, error in zip(
                    matrices, bases, sound, averages, taken, lost, strict=True
                ):
                    unit, part = one.of_q[:, None], one.part
                    left = (error.view_as(own).nan_to_num(0.0, 0.0, 0.0) - own) * unit
                    one.residual.add_(product_of(basis, left))
                    average = q * unit
                    made = product_of(basis, average).masked_fill_(is_sound.logical_not(), math.nan)
                    buffer[part.offset : part.offset + part.entry.size].copy_(made.view(-1))
                    _start_next_from(one.lines, average)
                self._observe(first)

        work.then(conclude, [*sums, errors, buffer])
        return work

    def _factor(self, name: str, like: torch.Tensor) -> Remembered:
        """Q by columns."""
        held = self._factors.get(name)
        if held is None:
            lines = np.ascontiguousarray(self._low_rank.factors[name].T).reshape(-1)
            held = self._factors[name] = Remembered(copied(lines, like), 1.0)
            if name in self._fresh:
                first = first_factor(name, self._low_rank.shapes[name])
                self._first[name] = copied(np.ascontiguousarray(first.T).reshape(-1), like)
        return held

    def _average(
        self, matrices: Sequence[torch.Tensor], known: int, lost: torch.Tensor | None = None
    ) -> tuple[list[torch.Tensor], DeviceWork]:
        """Starts it. The first ``known`` of them travel in fewer bits; what that loses is written to the first elements
        of ``lost``."""
        groups = [group for group in (matrices[:known], matrices[known:]) if group]
        sums = [torch.cat([one.reshape(-1) for one in group]) for group in groups]
        for number, one in enumerate(sums):
            if number == 0 and known:
                error = None if lost is None else lost[: one.numel()]
                work = self._comm.all_reduce(one, "avg", wire=self._low_rank.wire, error=error, async_op=True)
            else:
                work = self._comm.all_reduce(one, "avg", async_op=True)
        return sums, work


def _parted(sums: Sequence[torch.Tensor], shapes: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    """Matrices that lie one after another in ``sums``, each in one of them."""
    found, left = [], [*sums]
    start = 0
    for rows, columns in shapes:
        if start == left[0].numel():
            left.pop(0)
            start = 0
        found.append(left[0][start : start + rows * columns].view(rows, columns))
        start += rows * columns
    return found


def _start_next_from(lines: torch.Tensor, average: torch.Tensor) -> None:
    """As on the host: a line that has nothing in it would give nothing for ever."""
    usable = average.isfinite().all(dim=1) & (average != 0).any(dim=1)
    made = torch.where(usable[:, None], average, lines)
    [squares] = in_batches([made.T], lambda x: halved(x.double().square_()))
    exponents = torch.frexp(squares)[1] >> 1
    shortest = exponents.masked_fill(usable.logical_not(), 1 << 20).min()
    made = torch.where(usable[:, None], made, made * power_of_two(shortest - exponents, 100)[:, None])
    lines.copy_(torch.where(usable.any(), made, lines))


def power_of_two(exponents: torch.Tensor, most: int = 60) -> torch.Tensor:
    """float32, from the bits that it has: exact on every device. ``most``: magnitude of the exponents, as on the
    host."""
    return ((exponents.clamp(-most, most).to(torch.int32) + 127) << 23).view(torch.float32)


def in_batches(matrices: Sequence[torch.Tensor], compute: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    """What ``compute`` makes of each of these (rows, columns), by as few launches as of one: of those with about as
    many rows at once, (matrices, rows, columns), with zeros in the rest, rows a power of two."""
    groups: dict[int, list[int]] = {}
    for number, one in enumerate(matrices):
        groups.setdefault(1 << (len(one) - 1).bit_length(), []).append(number)
    found: dict[int, torch.Tensor] = {}
    for rows, numbers in groups.items():
        columns = max(matrices[number].shape[1] for number in numbers)
        padded = [
            torch.nn.functional.pad(one, (0, columns - one.shape[1], 0, rows - len(one)))
            for one in (matrices[number] for number in numbers)
        ]
        for number, made in zip(numbers, compute(torch.stack(padded)), strict=True):
            own = matrices[number]
            found[number] = made[: len(own), : own.shape[1]] if made.dim() == 2 else made[: own.shape[1]]
    return [found[number] for number in range(len(found))]


def halved(x: torch.Tensor) -> torch.Tensor:
    """The sum over the second dimension, a power of two, whose halves are added again and again: the same bits on every
    device."""
    while x.shape[1] > 1:
        half = x.shape[1] // 2
        x = x[:, :half] + x[:, half:]
    return x[:, 0]


def orthonormal_columns(matrices: torch.Tensor) -> torch.Tensor:
    """As ``telegrad.ddp.low_rank.orthonormal``, of each of (matrices, rows, columns), whose rows are a power of two."""
    made = matrices.double()
    squares = halved(made * made)
    for number in range(made.shape[2]):
        own = made[:, :, number].clone()
        products = halved(own[:, :, None] * made[:, :, number:])
        square = products[:, :1]
        usable = square > squares[:, number : number + 1] * 1e-12  # as on the host
        unit = torch.where(usable, 1 / square.sqrt(), torch.zeros_like(square))
        own *= unit
        made[:, :, number] = own
        if number + 1 < made.shape[2]:
            shares = products[:, 1:] * unit
            made[:, :, number + 1 :] -= own[:, :, None] * shares[:, None, :]
    return made.float()


def first_rows(columns: torch.Tensor) -> torch.Tensor:
    """As ``telegrad.ddp.low_rank.first_basis``."""
    found = (columns != 0).any(1)
    chosen = columns.new_ones(columns.shape[1], dtype=torch.int64).cumsum(0) - 1
    count = found.sum()
    used = count.clamp(max=columns.shape[1])
    places = chosen * count // used.clamp(min=1)
    is_row = ((found.cumsum(0) - 1)[:, None] == places[None]) & found[:, None] & (chosen < used)[None]
    return is_row.to(columns.dtype)


def product_of(basis: torch.Tensor, lines: torch.Tensor) -> torch.Tensor:
    """Their product, whose terms are added in order: the same bits on every device, and on the host."""
    made = basis[:, :1] * lines[:1]
    for number in range(1, len(lines)):
        made += basis[:, number : number + 1] * lines[number : number + 1]
    return made


def _put_after(work: DeviceWork, places: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    def put() -> None:
        with torch.no_grad():
            torch._foreach_copy_([*places], [*values])

    work.then(put, [*places, *values])


class CudaExchange:
    """``compressor``: which parameters are compressed, and how; of the others a bucket is the dense sum. ``wire``: how
    messages hold entries, ``encoding``: their values; what that loses waits in residuals. ``stats`` are kept up to
    date, ``selected`` as far as the host knows. ``scale``: of the loss, which the compressor's units know nothing of.
    ``telemetry``: which its owner begins and closes. ``low_rank``: of those that are sent as matrices. ``combine``: as
    for ``TopK``; ``sums``: the states of sums that keep a part. The host waits where such a sum, of the same bucket and
    the pass before, is not over."""

    def __init__(
        self,
        comm: Communicator,
        compressor: Compressor,
        wire: str,
        encoding: _core.ValueEncoding,
        combine: Combine,
        sums: TopkStates | None,
        stats: DDPStats,
        low_rank: LowRankRounds | None,
        telemetry: DeviceTelemetry,
        scale: LossScale | None = None,
    ) -> None:
        self.comm, self.compressor, self._wire, self._stats = comm, compressor, wire, stats
        self._rounds, self._most = encoding != _core.ValueEncoding.native, most_of(encoding)
        self.combine, self.sums, self.scale, self.telemetry = combine, sums, scale, telemetry
        self.feedback = DeviceFeedback(compressor, scale)
        self._counts: GatheredReads[None] = GatheredReads()
        self._keeping: list[DeviceWork] = []
        self._states: dict[str, tuple[BucketLayout, TopkState]] = {}
        self._summing: dict[str, DeviceWork] = {}
        self._tables = DeviceTables()
        self._captured: CapturedWork[Made] = CapturedWork()
        self._low_rank = None if low_rank is None else DeviceLowRank(comm, low_rank, self.feedback, telemetry, scale)

    def prepare(self, tensors: Iterable[torch.Tensor]) -> None:
        """Gives their devices what selections need there. The host waits once for each device: otherwise it would
        where a long gradient is first compressed, in the middle of a backward pass."""
        if not len(self.compressor.residuals):
            return
        for device, one in {one.device: one for one in tensors}.items():
            if has_runtime(device.type):
                like = one.detach().new_empty(1)
                runtime, stream = _stream_of(like)
                runtime.launch(stream, queues_of(like).prepare, like)

    @property
    def remembers(self) -> bool:
        """Whether gradients leave something to later passes."""
        return len(self.compressor.residuals) > 0 or self.compressor.momentum is not None

    def settle(self) -> None:
        """What is put into the current stream from here on finds in residuals what sums under way have lost."""
        keeping, self._keeping = self._keeping, []
        for work in keeping:
            work.wait()

    def start(
        self,
        layout: BucketLayout,
        buffer: torch.Tensor,
        *,
        sparse: bool,
        looks: bool,
        releases: bool = False,
        wire: str | None = None,
    ) -> Started:
        """Begins to average ``buffer`` in place. ``sparse``: its parts are compressed; ``looks``: for faults, even
        where nothing else needs that; ``releases``: what is sent densely takes along what waits. ``wire``: in which all
        values of its parts go instead."""
        self._stats.buckets += 1
        self._stats.elements += sum(one.size for one in layout.members)
        parts = layout.selected if sparse else ()
        dense = layout.dense if sparse else layout.members
        self._stats.dense_elements += sum(one.size for one in (dense if wire is None else layout.dense))
        self.telemetry.add_bucket(layout, buffer, sparse=sparse)
        with torch.no_grad():
            if wire is not None:
                return self._start_quantised(layout, buffer, wire)
            if sparse and (layout.matrices or layout.whole):
                return self._start_low_rank(layout, buffer, looks=looks)
            releases = releases and not sparse
            waiting = tuple(one for one in layout.parts if releases and self.feedback.waits(one.entry))
            plan = Plan(layout, filled_of(layout), parts, dense, waiting, looks)
            made = self._prepared(plan, buffer) if plan.has_work or self.compressor.momentum is not None else None
            if not parts:
                work: DeviceWork = self.comm.all_reduce(buffer, "avg", async_op=True)
            else:
                self._stats.wanted += layout.wanted
                assert made is not None
                work = self._send(layout, buffer, made)
            faulty = None if made is None else made.faulty
            return Started(work, [] if faulty is None else [one.name for one in plan.filled], faulty)

    def forget(self) -> None:
        """What is remembered is the compressor's, and lies elsewhere from here on."""
        self.feedback.forget()
        self._states = {}
        if self._low_rank is not None:
            self._low_rank.forget()
        self._captured.forget()  # first: it has the addresses of tables
        self._tables = DeviceTables()

    def open_pass(self) -> None:
        """Behind ``settle``, and what is undone of the pass before."""
        if self._low_rank is not None:
            self._low_rank.open_pass()

    def save(self) -> None:
        """Writes all that is remembered to host memory, for which the host waits."""
        if self.sums is not None:
            self.sums.drop_step()
        self.feedback.save()
        if self._low_rank is not None:
            self._low_rank.save()

    def close_pass(self) -> None:
        """What buckets have left on the device for the host to know is read, before the next pass changes it."""
        self._counts.close()

    def take_counts(self, *, wait: bool) -> None:
        """Adds to ``stats`` what is known by now; ``wait``: all of passes that were closed."""
        for _, found in self._counts.known(wait=wait):
            self._stats.selected += int(found)
        for name, work in [*self._summing.items()]:
            if wait or work.request.done():
                self._finish_sum(name)

    def _finish_sum(self, name: str) -> None:
        """Waits for that bucket's sum, if one is under way that keeps a part. Raises what it failed with."""
        work = self._summing.pop(name, None)
        if work is None:
            return
        work.communicated()
        self._stats.add_sum(TopkReport(*work.request.topk_result()[2]))

    def _prepared(self, plan: Plan, buffer: torch.Tensor) -> Made | None:
        """What a stream makes of the bucket before anything of it is communicated; ``None``: there is nothing in it."""
        if not plan.filled:
            return None

        def make() -> Made:
            faulty = buffer.new_empty(len(plan.filled), dtype=torch.bool) if plan.looks else None
            if not plan.parts:
                return Made(faulty)
            layout, leaving = plan.layout, []
            for parts, alone in ((layout.signed, None), *(((one,), one) for one in layout.one_signed)):
                taken = self._used(parts)
                room = self.compressor.capacity(taken)
                ends = (buffer.new_empty if taken else buffer.new_zeros)(len(taken) or 1, dtype=torch.int64)
                dtype = buffer.dtype if alone is None else torch.float32  # as means are
                given = buffer.new_empty(room, dtype=torch.uint32), buffer.new_empty(room, dtype=dtype), ends[-1:]
                length = layout.elements if alone is None else alone.entry.size
                if parts:
                    leaving.append(Leaving(DeviceEntries(*given, length), ends, taken, alone))
            elements = sum(run.stop - run.start for run in plan.layout.dense_runs)
            return Made(faulty, leaving, buffer.new_empty(elements) if elements else None)

        def prepare(made: Made) -> None:
            found = Found(plan.filled, buffer)
            self._correct(plan.dense, buffer, found)
            for part in plan.waiting:
                self._release(part, buffer, found)
            if plan.parts:
                self._select(plan, buffer, found, made.leaving)
            if made.dense is not None:
                torch.cat([buffer[run] for run in plan.layout.dense_runs], out=made.dense)
            if made.faulty is not None:
                torch.logical_or(found.broken, found.faults != 0, out=made.faulty)

        about = self._about_to_change(plan, buffer)
        return self._captured.run(
            name_of(plan.layout), plan.layout, about, buffer, make, prepare, replays=not self.telemetry.observes
        )

    def _about_to_change(self, plan: Plan, buffer: torch.Tensor) -> Hashable:
        """Has the current stream make what is remembered fit for this pass; returns all that the rest depends on but
        the plan's layout and the contents of tensors."""
        entries = [part.entry for part in (*self._used(plan.parts), *self._used(plan.waiting))]
        residuals = self.feedback.residuals(entries, buffer)
        tensors = [buffer, *(one for held in residuals for one in (held.values, held.threshold, held.calls))]
        if self.compressor.momentum is not None:
            names = [one.name for one in plan.dense if one.size] + [part.entry.name for part in plan.parts]
            tensors += self.feedback.velocities(names, buffer)
        addresses = tuple(one.data_ptr() for one in tensors)
        chosen = tuple((entry.name, entry.k) for entry in entries)
        return plan.parts is plan.layout.selected, plan.looks, buffer.dtype, addresses, chosen

    def _correct(self, members: tuple[ParameterSpan, ...], buffer: torch.Tensor, found: Found) -> None:
        """With momentum: makes of gradients that are to be summed densely what is to be summed, in place."""
        if self.compressor.momentum is not None:
            filled = [(one.name, one.offset) for one in members if one.size]
            self._move_velocities(filled, buffer, buffer, found)

    def keep(self, part: PlacedResidual, values: torch.Tensor) -> None:
        """Adds to the residual what did not leave after all; ``values``: finite, of all of the parameter."""
        if self.compressor.unit_of(part.entry) > 0:
            with torch.no_grad():
                self.feedback.residual(part.entry, values).values.add_(values)

    def _release(self, part: PlacedResidual, buffer: torch.Tensor, found: Found) -> None:
        """Adds what waits to a gradient that is summed densely. Nothing waits then, but for what bfloat16 rounds off;
        or all of it, if the gradient takes no part."""
        if self.compressor.unit_of(part.entry) <= 0:
            return
        own = buffer[part.offset : part.offset + part.entry.size]
        held = self.feedback.residual(part.entry, buffer)
        active = found.active[found.places[part.entry.name]] > 0
        total = own.float() + held.values
        sent = total.to(own.dtype)
        lost = torch.where(sent.isfinite(), total - sent.float(), torch.zeros_like(total))
        own.copy_(torch.where(active, sent, own))
        held.values.copy_(torch.where(active, lost, held.values))
        held.threshold.copy_(torch.where(active, torch.zeros_like(held.threshold), held.threshold))
        held.calls.copy_(torch.where(active, torch.zeros_like(held.calls), held.calls))

    def _move_velocities(
        self, members: Sequence[tuple[str, int]], gradient: torch.Tensor, out: torch.Tensor, found: Found
    ) -> None:
        """``members``: names, and where they begin in both."""
        momentum = self.compressor.momentum
        if not members:
            return
        assert momentum is not None
        velocities = self.feedback.velocities([name for name, _ in members], gradient)
        parts = [
            Moved(velocity, offset, found.places[name].start)
            for velocity, (name, offset) in zip(velocities, members, strict=True)
        ]
        kernels, factor, nesterov = kernels_of(gradient), momentum.factor, momentum.nesterov
        contents = [(part.velocity.data_ptr(), part.velocity.numel(), *part[1:]) for part in parts]
        table = self._tables.of(("move", members[0]), contents, lambda: kernels.velocity_table(parts), gradient)
        runtime, stream = _stream_of(gradient)

        def move(*given: torch.Tensor) -> None:
            table, gradient, out, active, faults = given
            kernels.accumulate_velocities(parts, table, gradient, out, factor, active, faults, nesterov)

        runtime.launch(stream, move, table, gradient, out, found.active, found.faults)

    def _send(self, layout: BucketLayout, buffer: torch.Tensor, made: Made) -> DeviceWork:
        if made.dense is not None:
            self.comm.all_reduce(made.dense, "avg", async_op=True)
        for leaving in made.leaving:  # that of all elements is first: the others write over it
            entries, alone = leaving.entries, leaving.one_signed
            self._counts.add(None, entries.count)
            loses = self._rounds or self.sums is not None or alone is not None
            lost = buffer.new_zeros(entries.length, dtype=torch.float32) if loses else None
            if alone is not None:
                own = buffer[alone.offset : alone.offset + alone.entry.size]
                mean = own if own.dtype == torch.float32 else own.float()
                work: DeviceWork = self.comm._begin_entries_average(entries, mean, "mean", lost, None)
                if mean is not own:
                    work.then(functools.partial(own.copy_, mean), [own, mean])
            else:
                work = self._average_signed(layout, buffer, entries, lost)
                if self.sums is not None and lost is not None:
                    self._mask_sent(leaving, lost, work)
            if lost is not None:
                self._keep_lost(leaving, lost, work)
        self._put_dense_members(layout, buffer, made.dense, work)
        self._captured.read_by(name_of(layout), work)
        return work

    def _average_signed(
        self, layout: BucketLayout, buffer: torch.Tensor, entries: DeviceEntries, lost: torch.Tensor | None
    ) -> DeviceWork:
        """As ``combine`` says."""
        work: DeviceWork
        if self.combine == "allreduce":
            work = self.comm.all_reduce(entries, "avg", out=buffer, wire=self._wire, error=lost, async_op=True)
        elif self.sums is None:
            work = self.comm._begin_entries_average(entries, buffer, self._wire, lost, None)
        else:
            name = name_of(layout)
            self._finish_sum(name)  # which leaves its state to this one
            known = self._states.get(name)
            if known is None or known[0] is not layout:
                known = self._states[name] = layout, self.sums.of(layout.signed)
            wire = "raw" if isinstance(known[1], BoundedTopkState) else self._wire
            work = self._summing[name] = self.comm._begin_entries_average(entries, buffer, wire, lost, known[1])
        return work

    def _mask_sent(self, leaving: Leaving, lost: torch.Tensor, work: DeviceWork) -> None:
        """Where an entry has left and has not come back, its velocity is forgotten. What comes back is lost as it was
        given, unless gTopk has dropped a sum that has it."""
        if not self.compressor.masks or not leaving.parts:
            return
        entries = leaving.entries
        velocities = self.feedback.velocities([part.entry.name for part in leaving.parts], lost)

        def mask() -> None:
            with torch.no_grad():
                positions = entries.indices.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
                is_entry = torch.ones_like(positions).cumsum(0) <= entries.count
                positions = torch.where(is_entry, positions, torch.zeros_like(positions))
                back = lost[positions]
                stays = back == entries.values.float() if self._rounds else back != 0
                sent = torch.zeros_like(lost).index_add_(0, positions, (is_entry & ~stays).float()) > 0
                for part, velocity in zip(leaving.parts, velocities, strict=True):
                    velocity.masked_fill_(sent[part.offset : part.offset + part.entry.size], 0.0)

        work.then(mask, [lost, entries.indices, entries.values, entries.count, *velocities])

    def _start_quantised(self, layout: BucketLayout, buffer: torch.Tensor, wire: str) -> Started:
        found = Found(filled_of(layout), buffer)
        self._correct(layout.members, buffer, found)
        dense = None
        if layout.dense_runs:
            dense = torch.cat([buffer[run] for run in layout.dense_runs])
            self.comm.all_reduce(dense, "avg", async_op=True)
        gradients = [buffer[part.offset : part.offset + part.entry.size] for part in layout.parts]
        work, overflowed = self._sum_with_what_waits(layout.parts, gradients, found, wire)
        self._put_dense_members(layout, buffer, dense, work)
        self._keeping.append(work)
        names = [*found.places, *(part.entry.name for part in layout.parts)]
        return Started(work, names, torch.cat([found.broken | (found.faults != 0), overflowed]))

    def _sum_with_what_waits(
        self, parts: Sequence[PlacedResidual], gradients: Sequence[torch.Tensor], found: Found, wire: str
    ) -> QuantisedSum:
        """Of these ``gradients`` in float32, which are those of ``parts``."""
        shares = ((found.active > 0) | found.broken).to(torch.float32)  # a gradient of zeros takes no part
        entries = [part.entry for part in self._used(parts)]
        held = self.feedback.residuals(entries, gradients[0])
        residuals = {entry.name: one.values for entry, one in zip(entries, held, strict=True)}
        addends = [
            Addend(gradient, residuals.get(part.entry.name), shares[found.places[part.entry.name]])
            for part, gradient in zip(parts, gradients, strict=True)
        ]
        return sum_quantised(self.comm, addends, wire, most_of(encoding_of(wire)))

    def _start_low_rank(self, layout: BucketLayout, buffer: torch.Tensor, *, looks: bool) -> Started:
        """Entries, which are written over the whole buffer, leave between the two rounds of the matrices."""
        assert self._low_rank is not None
        filled = filled_of(layout)
        found = Found(filled, buffer)
        first = self._low_rank.begin(layout, buffer, found) if layout.matrices else None
        faulty, dense = found.broken, None
        overflowed = [] if first is None else [one.overflows for one in first.matrices]
        places = [buffer[part.offset : part.offset + part.entry.size] for part in layout.whole]
        whole = [one.to(torch.float32, copy=True) for one in places]
        work: DeviceWork | None = None
        if whole:
            work, of_whole = self._sum_with_what_waits(layout.whole, whole, found, WHOLE_WIRE)
            overflowed.append(of_whole)
        if layout.selected:
            made = self._prepared(Plan(layout, filled, layout.selected, layout.dense, (), looks=True), buffer)
            assert made is not None
            assert made.faulty is not None
            faulty = made.faulty
            work = self._send(layout, buffer, made)
        elif layout.dense_runs:
            dense = torch.cat([buffer[run] for run in layout.dense_runs])
            work = self.comm.all_reduce(dense, "avg", async_op=True)
        if first is not None:
            work = self._low_rank.finish(first)
            self._stats.selected += sum(one.shape.words for one in first.matrices)
        assert work is not None
        self._put_dense_members(layout, buffer, dense, work)
        if whole:
            _put_after(work, places, whole)
        self._keeping.append(work)
        self._stats.wanted += layout.wanted
        names = [one.name for one in filled] + [part.entry.name for part in (*layout.matrices, *layout.whole)]
        return Started(work, names, torch.cat([faulty, *overflowed]) if looks else None)

    def _put_dense_members(
        self, layout: BucketLayout, buffer: torch.Tensor, sums: torch.Tensor | None, work: DeviceWork
    ) -> None:
        """``work``: of a later sum; those of one communicator come on one stream, in their order."""
        if sums is not None:
            places = [buffer[run] for run in layout.dense_runs]
            _put_after(work, places, torch.split(sums, [one.numel() for one in places]))

    def _keep_lost(self, leaving: Leaving, lost: torch.Tensor, work: DeviceWork) -> None:
        parts, first = leaving.parts, leaving.first
        residuals = [held.values for held in self.feedback.residuals([part.entry for part in parts], lost)]
        errors = [lost[part.offset - first : part.offset - first + part.entry.size] for part in parts]

        def keep() -> None:
            with torch.no_grad():
                torch._foreach_add_(residuals, errors)

        if parts:
            work.then(keep, [lost, *residuals])
            self._keeping.append(work)

    def _select(self, plan: Plan, buffer: torch.Tensor, found: Found, all_leaving: Sequence[Leaving]) -> None:
        """Of parts of which nothing can be chosen nothing is taken up, and nothing sent."""
        given = self._norms(plan.layout, buffer)  # before momentum overwrites what it is of
        gradient = buffer
        if self.compressor.momentum is not None:
            gradient = self._corrected(plan.parts, buffer, found)
        broken = found.broken.to(torch.int64)
        for leaving in all_leaving:
            taken, first = leaving.parts, leaving.first
            starts = [0, *accumulate(self.compressor.capacity([part]) for part in taken)]
            chosen = QueuedEntries(
                gradient[first : first + leaving.entries.length],
                buffer.new_empty(starts[-1], dtype=torch.uint32),
                buffer.new_empty(starts[-1], dtype=torch.float32),
                buffer.new_zeros(len(taken), dtype=torch.int64),
                found.active,
            )
            residuals = self.feedback.residuals([part.entry for part in taken], buffer)
            choices = [
                QueuedSelection(
                    *(self.compressor.policy_of(part.entry), part.entry, held),
                    *(start, part.offset - first, found.places[part.entry.name].start),
                )
                for part, held, start in zip(taken, residuals, starts[:-1], strict=True)
            ]
            queue_selections(choices, chosen, self._tables, *_stream_of(buffer))
            if given is not None:
                unit = None if self.scale is None else self.scale.unit(buffer)
                self.telemetry.add_selections(choices, chosen, [given[part.entry.name] for part in taken], unit)
            if taken:
                of_taken = torch.cat([broken[found.places[part.entry.name]] for part in taken])
                torch.cumsum(chosen.counts + of_taken, 0, out=leaving.ends)
                parts = self._collected(leaving, starts, found, buffer)
                table = self._table_of(taken[0].entry.name, parts)
                own = (chosen.indices, chosen.values, chosen.counts)
                to = (leaving.entries.indices, leaving.entries.values)
                most = self._most if leaving.one_signed is None else math.inf
                self._collect(parts, table, (*own, broken, leaving.ends, *to, found.faults), most)

    def _norms(self, layout: BucketLayout, buffer: torch.Tensor) -> dict[str, torch.Tensor] | None:
        """Of the gradients that selections will be from, by name; ``None``: nobody wants them."""
        if not self.telemetry.observes:
            return None
        parts = self._used(layout.selected)
        gradients = [buffer[part.offset : part.offset + part.entry.size] for part in parts]
        norms = torch._foreach_norm(gradients, dtype=torch.float32) if gradients else ()
        return {part.entry.name: norm for part, norm in zip(parts, norms, strict=True)}

    def _used(self, parts: Sequence[PlacedResidual]) -> list[PlacedResidual]:
        """Those of which something can be chosen."""
        return [part for part in parts if self.compressor.unit_of(part.entry) > 0]

    def _corrected(self, parts: Sequence[PlacedResidual], buffer: torch.Tensor, found: Found) -> torch.Tensor:
        """What momentum makes of the gradients of ``parts``, float32, where these lie, which it overwrites if it
        can."""
        made = buffer if buffer.dtype == torch.float32 else buffer.new_empty(buffer.numel(), dtype=torch.float32)
        self._move_velocities([(part.entry.name, part.offset) for part in parts], buffer, made, found)
        return made

    def _collected(self, leaving: Leaving, starts: Sequence[int], found: Found, like: torch.Tensor) -> list[Collected]:
        """What is to be known of the residuals of parts whose chosen entries begin at ``starts``."""
        parts, comes_back = leaving.parts, self.sums is not None and leaving.one_signed is None
        residuals = [held.values for held in self.feedback.residuals([part.entry for part in parts], like)]
        velocities: Sequence[torch.Tensor | None] = [None] * len(parts)
        if self.compressor.masks and not comes_back:
            velocities = self.feedback.velocities([part.entry.name for part in parts], like)
        return [
            Collected(residual, velocity, start, stop, part.offset - leaving.first, found.places[part.entry.name].start)
            for part, residual, velocity, (start, stop) in zip(
                parts, residuals, velocities, pairwise(starts), strict=True
            )
        ]

    def _collect(
        self, parts: list[Collected], table: torch.Tensor, tensors: tuple[torch.Tensor, ...], most: float
    ) -> None:
        """The entries of all parts, one behind the other; what does not leave, and what must not stay, is seen to."""
        kernels = kernels_of(parts[0].residual)
        runtime, stream = _stream_of(parts[0].residual)

        def collect(*given: torch.Tensor) -> None:
            table, indices, values, counts, broken, ends, to_indices, to_values, faults = given
            taken = (indices, values, counts, broken, ends)
            kernels.collect(parts, table, *taken, to_indices, to_values, faults, most)
            kernels.clear_faults(parts, table, faults)

        runtime.launch(stream, collect, table, *tensors)

    def _table_of(self, name: str, parts: list[Collected]) -> torch.Tensor:
        """``name``: of the first part."""
        like = parts[0].residual
        arrays = [one for part in parts for one in (part.residual, part.velocity) if one is not None]
        contents = [(one.data_ptr(), one.numel()) for one in arrays], [part[2:] for part in parts]
        return self._tables.of(("collect", name), contents, lambda: kernels_of(like).table(parts), like)


def _stream_of(x: torch.Tensor) -> tuple[DeviceRuntime, Stream]:
    runtime = runtime_of(x.device.type)
    return runtime, runtime.current_stream(x.device)
