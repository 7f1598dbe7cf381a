"""DDP's buckets on the host: compressed by this thread, exchanged by the communicator's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

import torch

from telegrad.communicator.work import future_of_all
from telegrad.ddp import nonfinite
from telegrad.ddp.agreement import AgreedStep
from telegrad.ddp.averaging import Averaging, Future
from telegrad.ddp.bucket import Bits, BucketLayout, GradBucket, bits_of, fill, is_current, layout_of, tensor_of
from telegrad.ddp.clipping import HeldBuckets
from telegrad.ddp.exchange import Exchange, Sending
from telegrad.ddp.memory_order import MemoryOrders
from telegrad.ddp.telemetry import StepRecord, write_record


class HostBuckets:
    """As ``Buckets``. ``exchange``: how buckets travel. ``orders``: in which ``averaging.compressor`` has what it
    remembers. ``remedy`` and ``among``: what NonFiniteGradient says."""

    def __init__(
        self, averaging: Averaging, exchange: Exchange, orders: MemoryOrders, *, remedy: str, among: str
    ) -> None:
        self._averaging, self._exchange, self._orders = averaging, exchange, orders
        self._remedy, self._among = remedy, among
        self._telemetry = averaging.telemetry
        self._layouts: dict[int, BucketLayout] = {}
        self._pass: BackwardPass | None = None

    def take(self, bucket: GradBucket) -> Future:
        """Raises ``NonFiniteGradient`` and ``TypeError`` before anything of the bucket is sent."""
        current = self._pass
        if current is None or not current.is_open or bucket.index() == 0:
            current = self._open_pass()
        bits = bits_of(bucket.buffer(), self._averaging.names.get(id(bucket.parameters()[0]), "unknown"))
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
        compressor.set_units(averaging.units.gradient_unit(), averaging.units.rates_of(compressor))
        if self._exchange.topk_states is not None:
            self._exchange.topk_states.set_unit(compressor.gradient_unit)
        step, observed = averaging.progress.step, None
        if self._telemetry is not None and step % self._telemetry.every == 0:
            observed = StepRecord.begin(step, averaging.comm, averaging.stats)
        self._pass = BackwardPass(averaging, self._exchange, observed, self._write, self._raise)
        return self._pass

    def _layout(self, bucket: GradBucket) -> BucketLayout:
        layout = self._layouts.get(bucket.index())
        if layout is None or not is_current(layout, bucket):
            names, compressor = self._averaging.names, self._averaging.compressor
            layout = layout_of(bucket, names, compressor, is_first=layout is None)
            self._layouts[bucket.index()] = layout
            self._orders.follow(bucket, names, compressor)
        return layout

    def _write(self, record: StepRecord) -> None:
        if self._telemetry is not None:
            self._telemetry = write_record(self._telemetry, record)

    def _raise(self, fault: nonfinite.Fault) -> None:
        rank, step = self._averaging.comm.rank, self._averaging.progress.step
        raise nonfinite.error_of(fault, rank, step, remedy=self._remedy, among=self._among)


class BackwardPass:
    """One backward pass, from its first bucket to its last: what of it is held back until all buckets are there, what
    all ranks agree on, and what is recorded of it. ``record``: if it is observed; ``write`` gets it in the end.
    ``raise_fault``: for the policy ``"raise"``."""

    def __init__(
        self,
        averaging: Averaging,
        exchange: Exchange,
        record: StepRecord | None,
        write: Callable[[StepRecord], None],
        raise_fault: Callable[[nonfinite.Fault], None],
    ) -> None:
        self._averaging, self._exchange = averaging, exchange
        compressor, progress = averaging.compressor, averaging.progress
        self._unit = compressor.gradient_unit
        self._sparse = not averaging.warmup.is_dense(progress.warmup_passes)
        self._held = None if averaging.most_norm is None else HeldBuckets(averaging.most_norm)
        self._agreed: AgreedStep | None = None
        if averaging.nonfinite == "skip":
            undoable = [compressor, *exchange.undoable]
            self._agreed = AgreedStep(undoable, self._settle, averaging.failed)
        compressor.residuals.raise_density(averaging.warmup.least_density(progress.warmup_passes))
        self._record, self._write, self._raise_fault = record, write, raise_fault
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
        self.is_open = False
        averaging.close_pass()
        if self._agreed is not None:
            self._agreed.close(averaging.comm)
        else:
            self._settle(dropped=False)

    def leave(self, error: Exception | None = None) -> None:
        """Returns when it is over, undone if it has not had its last bucket. Raises nothing."""
        if self._held is not None and self.is_open:
            self._held.fail(error or RuntimeError("the backward pass ended before its last bucket"))
        self.is_open = False
        if self._agreed is not None:
            self._agreed.leave(error)
        self._record, self._averaging.compressor.observer = None, None

    def _start(self, layout: BucketLayout, bits: Bits) -> Future:
        averaging, compressor, stats = self._averaging, self._averaging.compressor, self._averaging.stats
        sparse = bool(layout.parts) and self._sparse
        fault = nonfinite.find_fault(compressor, layout, bits, sparse)
        stats.buckets += 1
        stats.elements += bits.size
        if fault is not None:
            stats.nonfinite_buckets += 1
            if averaging.nonfinite == "raise":
                self._raise_fault(fault)
        if self._agreed is not None:
            self._agreed.unsound |= fault is not None
            if self._agreed.unsound:
                bits.fill(0)  # the others wait for this bucket; for zeros nothing is compressed
                fault = None
        dense = layout.dense if sparse else layout.members
        nonfinite.correct_around(compressor, bits, dense)
        stats.dense_elements += sum(member.size for member in dense)
        if self._record is not None:
            self._record.add(bits, dense)
        if not sparse:
            return self._outcome(self._exchange.send_densely(bits), layout, bits)
        sending = self._exchange.send(layout, bits, sound=fault is None)
        stats.wanted += layout.wanted
        stats.selected += sending.nnz
        return self._outcome(sending, layout, bits)

    def _outcome(self, sending: Sending, layout: BucketLayout, bits: Bits) -> Future:
        def finish(dropped: bool = False) -> torch.Tensor:
            if dropped:
                fill(bits, self._averaging.dropped_value)
            else:
                sending.write()
            return tensor_of(bits, is_complex=layout.is_complex)

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
