"""What averaging DDP's buckets takes, the same on the host and on a device: options, counters, and the protocol of both
implementations, ``HostBuckets`` and ``DeviceBuckets``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from telegrad.communicator import Communicator
from telegrad.compress import Compressor
from telegrad.ddp.bucket import GradBucket
from telegrad.ddp.options import Warmup
from telegrad.ddp.stats import DDPStats
from telegrad.ddp.telemetry import Telemetry
from telegrad.ddp.units import Units

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
    together; ``None``: never. ``nonfinite``: the policy; ``dropped_value``: what averages of a dropped pass are.
    ``open_pass`` is called before a pass changes what ``compressor`` remembers, ``close_pass`` after its last bucket,
    ``failed`` with the error of an operation."""

    comm: Communicator
    names: Mapping[int, str]
    compressor: Compressor
    units: Units
    warmup: Warmup
    most_norm: float | None
    nonfinite: str
    dropped_value: float
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
