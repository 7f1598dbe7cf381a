"""DDP's buckets on a device: averaged in streams, while the host goes on."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from telegrad.communicator.cuda.runtime import LateRead, has_runtime, runtime_of
from telegrad.communicator.cuda.transfers import DeviceWork
from telegrad.ddp.backward_pass import Averaging, Future, clip_tensors
from telegrad.ddp.bucket import BucketLayout, GradBucket, check_reducible, is_current, layout_of
from telegrad.ddp.cuda.exchange import CudaExchange
from telegrad.ddp.cuda.faults import LateFaults

_REMEDY = (
    "the averages of that step were NaN or infinite on all ranks, and the optimizer may have had them: go on from a "
    "state of before; nonfinite='skip' drops such steps on all ranks, 'send' lets the optimizer see them"
)


class _Verdict(NamedTuple):
    """On one pass: above 0 where some rank wants it dropped, and the sum that says so."""

    dropped: LateRead
    work: DeviceWork


class _HeldBucket(NamedTuple):
    """A bucket whose future somebody has, and which is not yet what it says."""

    layout: BucketLayout
    buffer: torch.Tensor
    future: Future


class DeviceBuckets:
    """As ``Buckets``: averaged in streams, while the host goes on. ``compression``: how buckets travel. Of each pass it
    is known in order whether it was dropped; with ``"skip"`` once the host knows."""

    def __init__(self, averaging: Averaging, compression: CudaExchange) -> None:
        self._averaging, self._compression = averaging, compression
        self._comm, self._nonfinite, self._most_norm = averaging.comm, averaging.nonfinite, averaging.most_norm
        self._layouts: dict[int, BucketLayout] = {}
        self._faults = LateFaults(averaging.comm, averaging.stats, _REMEDY, averaging.among)
        self._verdicts: deque[_Verdict] = deque()
        self._last_verdict: DeviceWork | None = None
        self._unstarted: list[_HeldBucket] = []  # of the pass, with a norm
        self._held: list[_HeldBucket] = []  # of the pass, with "skip"
        self._faulty: list[torch.Tensor] = []
        self._sums: list[DeviceWork] = []  # of the pass, with "skip", where nodes sum over another communicator

    def prepare(self, tensors: Iterable[torch.Tensor]) -> None:
        """As ``CudaExchange.prepare``."""
        self._compression.prepare(tensors)

    def take(self, bucket: GradBucket) -> Future:
        """The future is complete by the end of the pass's last call, and who waits for it makes the current stream
        wait. Raises what is known by now to have gone wrong before: ``NonFiniteGradient``, ``TransportError``."""
        if bucket.index() == 0:
            self._averaging.open_pass()
        self.look()
        if bucket.index() == 0:
            self._open_pass()
        buffer = bucket.buffer()
        name = self._averaging.names.get(next(map(id, bucket.parameters()), 0), "unknown")
        check_reducible(buffer, name, on_device=True)
        if not has_runtime(buffer.device.type):
            raise TypeError(f"the gradient of {name!r} is on {buffer.device}: train on the CPU or on CUDA")
        layout = self._layouts.get(bucket.index())
        if layout is None or not is_current(layout, bucket):
            layout = self._layouts[bucket.index()] = layout_of(
                bucket, self._averaging.names, self._compression.compressor
            )
        if self._most_norm is None:
            work = self._start(layout, buffer)
            future = work.future_of(buffer) if self._nonfinite != "skip" else self._hold(layout, buffer, self._held)
        else:
            future = self._hold(layout, buffer, self._unstarted)
        if bucket.is_last():
            self._close_pass()
            self._averaging.close_pass()
            self._averaging.progress.warmup_passes += 1  # of dropped ones too: only so do all ranks know it at once
        return future

    def synchronize(self) -> None:
        """As ``Buckets.synchronize``: raises ``NonFiniteGradient`` and ``TransportError``."""
        self._comm.synchronize()
        self.look(wait=True)

    def look(self, *, wait: bool = False) -> None:
        """Takes in what the host can know by now; ``wait``: all of what has been called. Raises ``NonFiniteGradient``
        and ``TransportError``."""
        if wait:
            self._close_reads()  # of a pass that was broken off
        self._settle(wait=wait)
        self._compression.take_counts(wait=wait)
        self._compression.telemetry.write(wait=wait)
        self._faults.check(wait=wait)
        if self._compression.scale is not None:
            self._compression.scale.check(wait=wait)

    def settle(self) -> None:
        """As ``Buckets.settle``. Raises ``TransportError``, again and again."""
        self._settle(wait=True)

    def leave(self, error: Exception | None = None) -> None:
        """The next pass leaves one that was broken off."""

    def _settle(self, *, wait: bool) -> None:
        while self._verdicts and (wait or self._verdicts[0].dropped.is_known):
            dropped, work = self._verdicts[0]
            found = dropped.values()
            work.communicated()  # the stream has passed it; after a failure nobody ever knows, and each call says so
            self._verdicts.popleft()
            self._settle_pass(dropped=bool(found[0] > 0))

    def save(self) -> None:
        """Writes what is remembered into the compressor, for which the host waits."""
        self._compression.settle()
        self._compression.save()

    def forget(self) -> None:
        """What is not yet known of earlier passes is of no account; what is remembered is the compressor's."""
        self._faults.forget()
        if self._compression.scale is not None:
            self._compression.scale.forget()
        self._compression.telemetry.forget()
        self._verdicts.clear()
        self._last_verdict = None
        self._compression.forget()

    def _open_pass(self) -> None:
        averaging, passes = self._averaging, self._averaging.progress.warmup_passes
        self._held, self._faulty, self._unstarted, self._sums = [], [], [], []  # of a pass that was broken off
        if self._last_verdict is not None:
            self._last_verdict.wait()  # what it undoes is undone before it changes
        self._close_reads()  # of a pass that was broken off
        self._compression.settle()
        if (sums := self._compression.sums) is not None and self._nonfinite == "skip":
            self._settle(wait=True)
            self._compression.take_counts(wait=True)  # of a pass that was broken off, too
            sums.drop_step()
            sums.begin()
        self._compression.feedback.apply_reverts()
        if self._compression.scale is not None:
            self._compression.scale.begin()
        self._compression.telemetry.begin(passes)
        compressor = averaging.compressor
        if self._compression.remembers:
            compressor.set_units(1.0, averaging.scales.rates())  # what the host knows of them
        compressor.residuals.raise_density(averaging.warmup.least_density(passes))
        self._compression.open_pass()
        if self._nonfinite == "skip":
            self._compression.feedback.begin()

    def _start(self, layout: BucketLayout, buffer: torch.Tensor) -> DeviceWork:
        progress = self._averaging.progress
        sparse = not self._averaging.warmup.is_dense(progress.warmup_passes)
        started = self._compression.start(layout, buffer, sparse=sparse, looks=self._nonfinite != "send")
        if started.faulty is not None and self._nonfinite == "raise":
            self._faults.add(started.names, started.faulty, progress.step, remembered=self._compression.remembers)
        elif started.faulty is not None and self._nonfinite == "skip":
            self._faulty.append(started.faulty.any())
        if self._nonfinite == "skip" and self._compression.comm is not self._comm:
            self._sums.append(started.work)
        return started.work

    def _close_pass(self) -> None:
        unstarted, self._unstarted = self._unstarted, []
        if self._most_norm is not None:
            scale = self._compression.scale
            unit = None if scale is None else scale.unit(unstarted[0].buffer)
            clip_tensors((one.buffer for one in unstarted), self._most_norm, unit)
        for one in unstarted:
            work = self._start(one.layout, one.buffer)
            if self._nonfinite == "skip":
                self._held.append(one)
            else:
                work.complete(one.future, one.buffer)
        self._close_reads()
        self._compression.telemetry.close()
        if self._nonfinite == "skip":
            self._agree()
        else:
            self._settle_pass(dropped=False)

    def _close_reads(self) -> None:
        self._compression.close_pass()
        self._faults.close()

    def _settle_pass(self, *, dropped: bool) -> None:
        self._averaging.settle(dropped=dropped)
        if (sums := self._compression.sums) is not None:
            sums.drop_step() if dropped else sums.keep_step()
        self._compression.telemetry.settled(dropped)

    def _hold(self, layout: BucketLayout, buffer: torch.Tensor, held: list[_HeldBucket]) -> Future:
        future: Future = runtime_of(buffer.device.type).future(buffer.device)
        held.append(_HeldBucket(layout, buffer, future))
        return future

    def _agree(self) -> None:
        """The averages of the pass stay, or become ``dropped_value``, on all ranks, or NaN where the ranks could not
        agree: in the stream, behind the sums. What is remembered stays, or becomes what it was."""
        held, faulty, self._held, self._faulty = self._held, self._faulty, [], []
        sums, self._sums = self._sums, []
        like, feedback = held[0].buffer, self._compression.feedback
        with torch.no_grad():
            own = torch.stack(faulty).any() if faulty else like.new_zeros((), dtype=torch.bool)
            dropped = own.to(torch.int32).view(1)
        work: DeviceWork = self._comm.all_reduce(dropped, "max", async_op=True)
        reads: list[LateRead] = []

        def drop() -> None:
            for of_bucket in sums:  # those of one communicator end in order
                of_bucket.wait()
            with torch.no_grad():
                is_dropped, is_unknown = dropped > 0, dropped < 0  # integers of a sum that failed are -1
                for one in held:
                    one.buffer.masked_fill_(is_dropped, self._averaging.dropped_value).masked_fill_(
                        is_unknown, math.nan
                    )
                feedback.undo(dropped)
            reads.append(LateRead(dropped))

        work.then(drop, [dropped, *(one.buffer for one in held), *feedback.close_step()])
        for one in held:
            work.complete(one.future, one.buffer)
        self._verdicts.append(_Verdict(reads[0], work))
        self._last_verdict = work


def check_options(options: Mapping[str, Any], parameters: Iterable[torch.nn.Parameter]) -> None:
    """Raises ``TypeError``, with the remedy, for options of DDPState that do not fit parameters on devices.
    ``options``: clip_norm and nonfinite."""
    devices = {one.device for one in parameters}
    alone = {"nonfinite='skip'": options["nonfinite"] == "skip", "clip_norm=": options["clip_norm"] is not None}
    for what, given in alone.items():
        if given and len(devices) > 1:
            raise TypeError(
                f"parameters are on {', '.join(sorted(map(str, devices)))}: {what} takes those of one device; "
                "leave it out, or use nonfinite='raise' or 'send'"
            )
