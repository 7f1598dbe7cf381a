"""What the host reads of a device once for a whole pass, and what was not finite there, of which it hears later."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from telegrad.communicator import Communicator
from telegrad.communicator.cuda.runtime import LateRead, Stream, runtime_of
from telegrad.ddp.exchange import Fault, error_of
from telegrad.ddp.telemetry import DDPStats

T = TypeVar("T")


class _Read(NamedTuple, Generic[T]):
    """``sizes``: of those in ``abouts``."""

    abouts: list[T]
    sizes: list[int]
    read: LateRead


class GatheredReads(Generic[T]):
    """Small tensors of one dtype, each with what the host knows about it."""

    def __init__(self) -> None:
        self._open: dict[tuple[torch.device, Stream], tuple[list[T], list[torch.Tensor]]] = {}
        self._reads: deque[_Read[T]] = deque()

    def add(self, about: T, tensor: torch.Tensor) -> None:
        """``tensor``: flat, as the current stream has it by ``close``."""
        stream = runtime_of(tensor.device.type).current_stream(tensor.device)
        abouts, tensors = self._open.setdefault((tensor.device, stream), ([], []))
        abouts.append(about)
        tensors.append(tensor)

    def close(self) -> None:
        """Reads all that was added, when its streams come to here."""
        taken, self._open = self._open, {}
        for (device, stream), (abouts, tensors) in taken.items():
            sizes = [tensor.numel() for tensor in tensors]
            with runtime_of(device.type).on(stream):
                together = torch.cat(tensors) if len(tensors) > 1 else tensors[0]
                self._reads.append(_Read(abouts, sizes, LateRead(together)))

    def known(self, *, wait: bool) -> Iterator[tuple[T, Any]]:
        """What the host can know by now, each once, as host tensors; ``wait``: all that was closed."""
        while self._reads and (wait or self._reads[0].read.is_known):
            one = self._reads.popleft()
            yield from zip(one.abouts, one.read.values().split(one.sizes), strict=True)

    def forget(self) -> None:
        """What is not yet known is of no account."""
        self._open.clear()
        self._reads.clear()


# What was not finite in buckets on a device, of which the host hears later.


class _Look(NamedTuple):
    """At one bucket."""

    names: list[str]
    step: int
    remembered: bool


class LateFaults:
    """Of the policy ``"raise"``. ``remedy`` and ``among``: as for ``error_of``."""

    def __init__(self, comm: Communicator, stats: DDPStats, remedy: str, among: str = "") -> None:
        self.comm, self._stats, self._remedy, self._among = comm, stats, remedy, among
        self._looks: GatheredReads[_Look] = GatheredReads()

    def add(self, names: list[str], faulty: torch.Tensor, step: int, *, remembered: bool) -> None:
        """``faulty``: by parameter, on the device, whether there is something in it that is not finite. ``remembered``:
        what waits of it may have overflowed, too."""
        self._looks.add(_Look(names, step, remembered), faulty)

    def close(self) -> None:
        """The host reads what was added, which changes from here on."""
        self._looks.close()

    def check(self, *, wait: bool = False) -> None:
        """Raises ``NonFiniteGradient`` for what the host can know by now; ``wait``: for all that was closed."""
        for (names, step, remembered), found in self._looks.known(wait=wait):
            if found.any():
                self._stats.nonfinite_buckets += 1
                name = names[int(found.nonzero()[0])]
                text = f"the gradient of {name!r} has entries that are NaN or infinite"
                if remembered:
                    text += ", or what waits of it has overflowed"
                raise error_of(Fault(name, text), self.comm.rank, step, remedy=self._remedy, among=self._among)

    def forget(self) -> None:
        """What is not yet known is of no account."""
        self._looks.forget()
