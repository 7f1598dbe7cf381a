"""DDP's buckets on the host, from a backward pass's first to its last: what averaging takes, the same as on a device;
gradients held for clipping; and the step that all ranks keep or drop together.

``HostBuckets`` compresses by this thread, and the communicator's exchanges."""

from __future__ import annotations

import contextlib
import math
import numbers
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from telegrad.communicator import Communicator, Work
from telegrad.communicator.work import future_of_all
from telegrad.compress import Compressor
from telegrad.ddp.bucket import (
    Bits,
    BucketLayout,
    GradBucket,
    bits_of,
    fill,
    has_current_density,
    layout_of,
    rounded_to_bf16,
    tensor_of,
)
from telegrad.ddp.exchange import Exchange, Sending, correct_around, error_of, find_fault
from telegrad.ddp.gradient_scales import GradientScales
from telegrad.ddp.low_rank import FirstRound, LowRankRounds
from telegrad.ddp.options import Warmup
from telegrad.ddp.rank_state import MemoryOrders
from telegrad.ddp.telemetry import DDPStats, StepRecord, Telemetry, write_record
from telegrad.errors import TransportError
from telegrad.kernels.floats import as_float32

Future = torch.futures.Future[torch.Tensor]


@dataclass(slots=True)
class Progress:
    """How far training has come. ``step``: backward passes that were averaged, without dropped ones. ``skipped``:
    whether the last one was dropped on all ranks. ``warmup_passes``: those that count for a warm-up."""

    step: int = 0
    warmup_passes: int = 0
    skipped: bool = False


@dataclass(frozen=True)
class Averaging:
    """``names``: parameters' names by id. ``most_norm``: to which this rank scales the gradients of a pass down, all
    together; ``None``: never. ``nonfinite``: the policy; ``dropped_value``: what averages of a dropped pass are;
    ``remedy`` (of gradients on the host) and ``among``: what NonFiniteGradient says.
    ``open_pass`` is called before a pass changes what ``compressor`` remembers, ``close_pass`` after its last bucket,
    ``failed`` with the error of an operation."""

    comm: Communicator
    names: Mapping[int, str]
    compressor: Compressor
    scales: GradientScales
    warmup: Warmup
    most_norm: float | None
    nonfinite: str
    dropped_value: float
    remedy: str
    among: str
    telemetry: Telemetry | None
    stats: DDPStats
    progress: Progress
    open_pass: Callable[[], None]
    close_pass: Callable[[], None]
    failed: Callable[[Exception], None]

    def settle(self, *, dropped: bool) -> None:
        """A pass was kept or dropped, on all ranks."""
        self.progress.skipped = dropped
        self.progress.step += not dropped
        self.stats.skipped_steps += dropped


class Buckets(Protocol):
    """Averages buckets of DDP that lie on the host, or on a device."""

    def take(self, bucket: GradBucket) -> Future:
        """Starts the average of a bucket; the future gives its buffer with the average in it."""

    def synchronize(self) -> None:
        """Waits until all that was called is over, where ``backward()`` has not. Raises what has gone wrong in it."""

    def settle(self) -> None:
        """Waits until it is known of all passes whether they were dropped."""

    def save(self) -> None:
        """Writes what is remembered into the compressor, without what can still be undone."""

    def leave(self, error: Exception | None = None) -> None:
        """Ends a pass that has not had its last bucket, its futures with ``error``. Raises nothing."""

    def forget(self) -> None:
        """From now on the compressor's is what counts, as after a state was loaded into it."""

    def prepare(self, tensors: Iterable[torch.Tensor]) -> None:
        """Gets ready for gradients that lie where these do."""


Start = Callable[[BucketLayout, Bits], torch.futures.Future[torch.Tensor]]


class HeldBuckets:
    """The buckets of one backward pass. ``most``: the norm above which this rank's gradient is scaled down; infinite:
    never."""

    def __init__(self, most: float) -> None:
        self._most = most
        self._held: list[tuple[BucketLayout, Bits, torch.futures.Future[None]]] = []
        self._outcomes: list[torch.futures.Future[torch.Tensor]] = []
        self._error: Exception | None = None

    def hold(self, layout: BucketLayout, bits: Bits) -> torch.futures.Future[torch.Tensor]:
        """A future of the bucket's average, which is not yet started."""
        started: torch.futures.Future[None] = torch.futures.Future()
        place = len(self._held)
        self._held.append((layout, bits, started))

        def conclude(_: torch.futures.Future[None]) -> torch.Tensor:
            if self._error is not None:
                raise self._error
            return self._outcomes[place].value()

        return started.then(conclude)

    def release(self, start: Start, gradient_unit: float) -> float:
        """Clips all buckets and starts them, in their order; returns the factor.

        ``gradient_unit``: what 1 in a gradient is worth to ``most``. A norm that is not finite clips nothing: NaN and
        infinity are the policy's."""
        norm = self._norm() * gradient_unit if self._most < math.inf else math.inf
        factor = self._most / norm if self._most < norm < math.inf else 1.0
        for layout, bits, started in self._held:
            if factor < 1:
                _scale(bits, factor)
            outcome = start(layout, bits)
            self._outcomes.append(outcome)
            outcome.then(lambda _, started=started: started.set_result(None))  # type: ignore[misc]
        return factor

    def _norm(self) -> float:
        """The same bits whatever buckets the parameters are in: DDP rebuilds its own, and a restored state must clip
        as the one that was saved. So each parameter counts for itself, and ``fsum`` does not mind the order."""
        squares = []
        for layout, bits, _ in self._held:
            flat = as_float32(bits)
            squares += [_squares(flat[one.offset : one.offset + one.size]) for one in layout.members]
        return math.sqrt(math.fsum(squares))

    def fail(self, error: Exception) -> None:
        """Ends the futures of buckets that were never started."""
        self._error = error
        for _, _, started in self._held[len(self._outcomes) :]:
            started.set_result(None)
        self._held = self._held[: len(self._outcomes)]


def checked_norm(clip_norm: float | None) -> float | None:
    """``clip_norm`` as a float above 0, or ``None``; else ``TypeError`` or ``ValueError``."""
    if clip_norm is None:
        return None
    if isinstance(clip_norm, bool) or not isinstance(clip_norm, numbers.Real):
        raise TypeError(f"clip_norm={clip_norm!r} must be a number above 0, or None")
    if not 0 < clip_norm < math.inf:
        raise ValueError(f"clip_norm={clip_norm} must be above 0 and finite; None clips nothing")
    return float(clip_norm)


def clip_own(parameters: Iterable[torch.nn.Parameter], most: float) -> None:
    """Scales the gradients of these parameters down to a norm of ``most``, all together; not where theirs is not
    finite."""
    held = [one for one in parameters if one.grad is not None]
    norm = torch.nn.utils.get_total_norm([one.grad for one in held if one.grad is not None])
    if math.isfinite(norm):
        torch.nn.utils.clip_grads_with_norm_(held, most, norm)


def clip_together(parameters: Iterable[torch.nn.Parameter], most: float) -> None:
    """As ``clip_own``, on a device: in the current stream, without waiting for it."""
    clip_tensors([one.grad for one in parameters if one.grad is not None], most)


def clip_tensors(gradients: Iterable[torch.Tensor], most: float, unit: torch.Tensor | None = None) -> torch.Tensor:
    """Scales them down to a norm of ``most``, all together, in the current stream; not where theirs is not finite.
    Returns the factor.
    ``unit``: what 1 in a gradient is worth to ``most``, float64, one element; ``None``: 1."""
    given = [*gradients]
    with torch.no_grad():
        norms = torch.stack([torch.linalg.vector_norm(one, dtype=torch.float64) for one in given])
        norm = torch.linalg.vector_norm(norms)
        if unit is not None:
            norm = norm * unit.view(())
        factor = torch.where(norm.isfinite() & (norm > most), most / norm, torch.ones_like(norm))
        for one in given:
            one.mul_(factor)
    return factor


def _squares(x: npt.NDArray[Any]) -> float:
    with np.errstate(over="ignore", invalid="ignore"):
        quick = float(np.dot(x, x)) if x.dtype != np.float16 else math.inf
        return quick if math.isfinite(quick) else float(np.square(x.astype(np.float64)).sum())


def _scale(bits: Bits, factor: float) -> None:
    scaled = as_float32(bits)
    if scaled is bits:
        scaled *= scaled.dtype.type(factor)
    else:
        bits[:] = rounded_to_bf16(scaled * np.float32(factor))


class Undoable(Protocol):
    """What remembers something from step to step, as a Compressor does."""

    def begin(self) -> None:
        """Opens a step that can be undone."""

    def keep_step(self) -> None:
        """Closes the open step."""

    def drop_step(self) -> None:
        """Undoes the open step, if there is one."""


class AgreedStep:
    """One backward pass. It keeps the step of what is ``undoable``, or undoes it: dropped, failed or abandoned passes
    are undone.

    ``settled`` gets the verdict, dropped or not, before any future completes; ``failed`` the error of an operation.
    Both run on the completion thread."""

    def __init__(
        self, undoable: Sequence[Undoable], settled: Callable[[bool], None], failed: Callable[[Exception], None]
    ) -> None:
        self.unsound = False  # this rank wants the step to be dropped
        self._undoable = undoable
        self._settled = settled
        self._failed = failed
        self._works: list[Work] = []
        self._keeps: list[Callable[[], None]] = []
        self._gate: torch.futures.Future[None] = torch.futures.Future()  # done when the verdict or the error is known
        self._verdict: torch.futures.Future[None] | None = None
        self._dropped = False
        self._error: Exception | None = None
        for one in undoable:
            one.begin()

    def _drop(self) -> None:
        for one in self._undoable:
            one.drop_step()

    @property
    def closed(self) -> bool:
        """True once it has had its last bucket."""
        return self._verdict is not None

    def outcome(
        self, works: list[Work], finish: Callable[[bool], torch.Tensor], keep: Callable[[], None]
    ) -> torch.futures.Future[torch.Tensor]:
        """A future of ``finish(dropped)`` for one bucket, which takes these ``works``; ``keep`` runs before the verdict
        is known to anybody, unless the pass is dropped."""
        self._works += works
        self._keeps.append(keep)

        def conclude(_: torch.futures.Future[None]) -> torch.Tensor:
            if self._error is not None:
                raise self._error
            return finish(self._dropped)

        return self._gate.then(conclude)

    def close(self, comm: Communicator) -> None:
        """Asks all ranks, after the last bucket."""
        flag = np.array([self.unsound], np.float32)
        works = [*self._works, comm.all_reduce(flag, "sum", async_op=True)]

        def settle() -> None:
            self._dropped = bool(flag[0])
            if self._dropped:
                self._drop()
            else:
                for keep in self._keeps:
                    keep()
                for one in self._undoable:
                    one.keep_step()
            self._settled(self._dropped)

        def fail(error: Exception) -> None:
            self._error = error
            self._drop()
            self._failed(error)

        self._verdict = future_of_all(works, settle, fail)
        self._verdict.then(lambda _: self._gate.set_result(None))

    def leave(self, error: Exception | None = None) -> None:
        """Returns when the pass is over. One without its last bucket ends here, undone, its futures with ``error``.

        Raises nothing."""
        if self._verdict is not None:
            with contextlib.suppress(Exception):
                self._verdict.wait()
        elif not self._gate.done():
            for work in self._works:  # the network may still read the buckets' memory
                with contextlib.suppress(Exception):
                    work.wait()
            self._drop()
            self._error = error or RuntimeError("the backward pass ended before its last bucket: the step is dropped")
            self._gate.set_result(None)


class TwoRounds:
    """The buckets of a pass of low rank: their second rounds start when the pass has had its last bucket, in the same
    order on all ranks."""

    def __init__(self, low_rank: LowRankRounds) -> None:
        self._low_rank = low_rank
        self._first: deque[FirstRound] = deque()
        self.second = HeldBuckets(math.inf)

    def begin(self, exchange: Exchange, layout: BucketLayout, bits: Bits, *, sound: bool) -> Future:
        """Starts the first round of a bucket; the future is of both."""
        self._first.append(self._low_rank.begin(exchange, layout, bits, sound=sound))
        return self.second.hold(layout, bits)

    def go_on(self, start: Start) -> TransportError | None:
        """Starts all second rounds. What first rounds have failed with is what the futures fail with, as those of
        other operations."""
        try:
            self.second.release(start, 1.0)
        except TransportError as error:
            self.fail(error)
            return error
        return None

    def finish_first(self) -> Sending:
        """Ends the oldest first round, and starts the second one of its bucket."""
        return self._low_rank.finish(self._first.popleft())

    def fail(self, error: Exception) -> None:
        """Ends the futures of second rounds that were never started."""
        self.second.fail(error)
        for first in self._first:  # the network may still use their memory
            with contextlib.suppress(Exception):
                first.wait()


class HostBuckets:
    """As ``Buckets``. ``exchange``: how buckets travel; ``low_rank``: of those that do so in two rounds. ``orders``: in
    which ``averaging.compressor`` has what it remembers."""

    def __init__(
        self, averaging: Averaging, exchange: Exchange, orders: MemoryOrders, low_rank: LowRankRounds | None
    ) -> None:
        self._averaging, self._exchange, self._orders, self._low_rank = averaging, exchange, orders, low_rank
        self._telemetry = averaging.telemetry
        compressor = averaging.compressor
        self._has_units = (
            averaging.scales.can_change or compressor.momentum is not None or compressor.feedback == "steps"
        )
        self._densities_change = averaging.warmup.steps > 0
        self._layouts: dict[int, BucketLayout] = {}
        self._pass: BackwardPass | None = None

    def take(self, bucket: GradBucket) -> Future:
        """Raises ``NonFiniteGradient`` and ``TypeError`` before anything of the bucket is sent."""
        current = self._pass
        if current is None or not current.is_open or bucket.index() == 0:
            current = self._open_pass()
        buffer = bucket.buffer()
        if buffer.dtype == torch.float32 and buffer.layout == torch.strided:
            bits: Bits = buffer.numpy()
        else:
            bits = bits_of(buffer, self._averaging.names.get(next(map(id, bucket.parameters()), 0), "unknown"))
        outcome = current.take(self._layout(bucket), bits)
        if bucket.is_last():
            current.close()
        return outcome

    def prepare(self, tensors: Iterable[torch.Tensor]) -> None:
        """There is nothing to prepare."""

    def synchronize(self) -> None:
        """``backward()`` has waited."""

    def settle(self) -> None:
        """Futures are not complete before it is known."""

    def save(self) -> None:
        """Waits for what ranks agree on; the compressor has it all."""
        if self._pass is not None and not self._pass.is_open:
            self._pass.leave()

    def leave(self, error: Exception | None = None) -> None:
        """As ``Buckets.leave``."""
        if self._pass is not None:
            self._pass.leave(error)
            self._pass = None
        for layout in self._layouts.values():  # of a pass that was broken off: its operations still use residuals
            if layout.outcome is not None and not layout.outcome.done():
                with contextlib.suppress(Exception):
                    layout.outcome.wait()

    def forget(self) -> None:
        """Thresholds of sums are those that were loaded."""
        for layout in self._layouts.values():
            layout.topk = None

    def _open_pass(self) -> BackwardPass:
        self.leave()
        averaging, compressor = self._averaging, self._averaging.compressor
        averaging.open_pass()
        if self._has_units:
            compressor.set_units(averaging.scales.gradient_unit(), averaging.scales.rates())
        if self._exchange.topk_states is not None:
            self._exchange.topk_states.set_unit(compressor.gradient_unit)
        step, observed = averaging.progress.step, None
        if self._telemetry is not None and step % self._telemetry.every == 0:
            observed = StepRecord.begin(step, averaging.comm, averaging.stats)
        self._pass = BackwardPass(averaging, self._exchange, self._low_rank, observed, self._write)
        return self._pass

    def _layout(self, bucket: GradBucket) -> BucketLayout:
        layout = self._layouts.get(bucket.index())
        if (
            layout is None
            or layout.identity != tuple(map(id, bucket.parameters()))
            or (self._densities_change and not has_current_density(layout))
        ):
            names, compressor = self._averaging.names, self._averaging.compressor
            layout = layout_of(bucket, names, compressor, is_first=layout is None)
            self._layouts[bucket.index()] = layout
            self._orders.follow(bucket, names, compressor)
        return layout

    def _write(self, record: StepRecord) -> None:
        if self._telemetry is not None:
            self._telemetry = write_record(self._telemetry, record)


class BackwardPass:
    """One backward pass, from its first bucket to its last: what of it is held back until all buckets are there, what
    all ranks agree on, and what is recorded of it. ``record``: if it is observed; ``write`` gets it in the end."""

    def __init__(
        self,
        averaging: Averaging,
        exchange: Exchange,
        low_rank: LowRankRounds | None,
        record: StepRecord | None,
        write: Callable[[StepRecord], None],
    ) -> None:
        self._averaging, self._exchange = averaging, exchange
        compressor, passes = averaging.compressor, averaging.progress.warmup_passes
        self._unit = compressor.gradient_unit
        self._sparse = True
        if averaging.warmup.steps:
            self._sparse = not averaging.warmup.is_dense(passes)
            compressor.residuals.raise_density(averaging.warmup.least_density(passes))
        self._held = None if averaging.most_norm is None else HeldBuckets(averaging.most_norm)
        self._rounds = TwoRounds(low_rank) if low_rank is not None and self._sparse else None
        self._agreed: AgreedStep | None = None
        if averaging.nonfinite == "skip":
            undoable = [compressor, *exchange.undoable]
            self._agreed = AgreedStep(undoable, self._settle, averaging.failed)
        self._record, self._write = record, write
        compressor.observer = None if record is None else record.tensors.append
        self.is_open = True

    def take(self, layout: BucketLayout, bits: Bits) -> Future:
        """Starts the average of one bucket, or holds it until the gradient's norm is known."""
        return self._start(layout, bits) if self._held is None else self._held.hold(layout, bits)

    def close(self) -> None:
        """It has had its last bucket."""
        averaging = self._averaging
        if self._held is not None:
            averaging.stats.clipped_steps += self._held.release(self._start, self._unit) < 1
        failure = None if self._rounds is None else self._rounds.go_on(self._start_second_round)
        self.is_open = False
        averaging.close_pass()
        if failure is not None:
            averaging.failed(failure)
        if self._agreed is not None and failure is not None:
            self._agreed.leave(failure)
        elif self._agreed is not None:
            self._agreed.close(averaging.comm)
        else:
            self._settle(dropped=False)

    def leave(self, error: Exception | None = None) -> None:
        """Returns when it is over, undone if it has not had its last bucket. Raises nothing."""
        if self.is_open:
            error_of_held = error or RuntimeError("the backward pass ended before its last bucket")
            if self._held is not None:
                self._held.fail(error_of_held)
            if self._rounds is not None:
                self._rounds.fail(error_of_held)
        self.is_open = False
        if self._agreed is not None:
            self._agreed.leave(error)
        self._record, self._averaging.compressor.observer = None, None

    def _start(self, layout: BucketLayout, bits: Bits) -> Future:
        averaging, compressor, stats = self._averaging, self._averaging.compressor, self._averaging.stats
        sparse = bool(layout.parts) and self._sparse
        compressed = None
        if sparse and self._rounds is None and (self._agreed is None or not self._agreed.unsound):
            compressed = self._exchange.compress_unchecked(layout, bits)
        fault = find_fault(compressor, layout, bits, sparse) if compressed is None else None
        stats.buckets += 1
        stats.elements += bits.size
        if fault is not None:
            stats.nonfinite_buckets += 1
            if averaging.nonfinite == "raise":
                said = {"remedy": averaging.remedy, "among": averaging.among}
                raise error_of(fault, averaging.comm.rank, averaging.progress.step, **said)
        if self._agreed is not None:
            self._agreed.unsound |= fault is not None
            if self._agreed.unsound:
                bits.fill(0)  # the others wait for this bucket; for zeros nothing is compressed
                fault = None
        if compressor.momentum is not None:
            correct_around(compressor, bits, layout.dense if sparse else layout.members)
        stats.dense_elements += layout.dense_elements if sparse else layout.member_elements
        if self._record is not None:
            self._record.add(bits, layout.dense if sparse else layout.members)
        if not sparse:
            return self._outcome(self._exchange.send_densely(bits), layout, bits)
        if self._rounds is not None:
            return self._rounds.begin(self._exchange, layout, bits, sound=fault is None)
        sending = self._exchange.send(layout, bits, sound=fault is None, compressed=compressed)
        stats.wanted += layout.wanted
        stats.selected += sending.nnz
        return self._outcome(sending, layout, bits)

    def _start_second_round(self, layout: BucketLayout, bits: Bits) -> Future:
        assert self._rounds is not None
        sending = self._rounds.finish_first()
        self._averaging.stats.wanted += layout.wanted
        self._averaging.stats.selected += sending.nnz
        return self._outcome(sending, layout, bits)

    def _outcome(self, sending: Sending, layout: BucketLayout, bits: Bits) -> Future:
        def finish(dropped: bool = False) -> torch.Tensor:
            if dropped:
                fill(bits, self._averaging.dropped_value)
            else:
                sending.write()
            return tensor_of(bits)

        def finish_and_keep() -> torch.Tensor:
            sending.keep()
            return finish()

        if self._agreed is not None:
            layout.outcome = self._agreed.outcome(sending.works, finish, sending.keep)
        else:
            layout.outcome = future_of_all(sending.works, finish_and_keep, self._averaging.failed)
        return layout.outcome

    def _settle(self, dropped: bool) -> None:
        self._averaging.settle(dropped=dropped)
        self._averaging.progress.warmup_passes += not dropped
        record, self._record, self._averaging.compressor.observer = self._record, None, None
        if record is not None:
            record.close(dropped=dropped)
            self._write(record)
