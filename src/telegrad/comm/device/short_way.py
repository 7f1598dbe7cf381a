"""What the core needs to begin the plainest operations on device tensors itself: memory that is lent to it, and
somebody who takes over what it has begun. It must not know of the operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from telegrad import _core
from telegrad.comm.device.runtime import DeviceRuntime, Event, Stream
from telegrad.comm.device.staging import Lease, Staging, rounded

MOST_BYTES = 64 << 20
"""Lent to one communicator's short way, of operations that are short."""

_MOST_OF_ONE_LENGTH = 16
_SHARE = 8  # of the memory that may be lent at all, at most one such part


class ShortWay:
    """The core's for the tensors of one device, ``way``, and what has been lent to it."""

    def __init__(self, runtime: DeviceRuntime, staging: Staging, way: _core.DeviceShortWay, device: Any) -> None:
        self.way, self.device = way, device
        self._runtime, self._staging = runtime, staging
        self.results: Stream | None = None  # of operations that have streams of their own
        self._joint: Event | None = None
        self._slots: list[tuple[Lease, Event]] = []
        self._lent: dict[int, int] = {}  # slots, by the length of their buffers

    def lend(self, stream: Stream, nbytes: int) -> None:
        """Memory for one more operation of such a length, if it has not enough: on which ``stream`` may be, and no
        other."""
        length = rounded(nbytes)
        used = sum(2 * length * count for length, count in self._lent.items())
        if self._lent.get(length, 0) >= _MOST_OF_ONE_LENGTH or used + 2 * length > MOST_BYTES:
            return
        counts = self._staging.counts
        if 2 * length > (self._staging.most_bytes - counts.lent_bytes) // _SHARE:
            return
        leases: list[Lease] = []
        self._staging.lease([(length, length)], leases)
        (lease,) = leases
        event = self._runtime.record(stream)
        self._slots.append((lease, event))
        self._lent[length] = self._lent.get(length, 0) + 1
        self._runtime.lend(self.way, lease, event)

    def lend_streams(self, inputs: Stream, results: Stream) -> None:
        """For operations with ``async_op=True``; those of the communicator, so that results come in order."""
        if self.results is None:
            self._joint = self._runtime.record(results)
            self._runtime.lend_streams(self.way, inputs, results, self._joint)
            self.results = results

    def outstanding(self, core: _core.Communicator) -> list[tuple[_core.Request, Lease]]:
        """What it has begun, and nobody knows yet to have succeeded, oldest first; told once."""
        return [(request, self._slots[number][0]) for request, number in self.way.take_outstanding(core)]

    def close(self, core: _core.Communicator) -> None:
        """Gives back what was lent, once the streams have passed: for a communicator whose engine is at its end."""
        for number, (lease, event) in enumerate(self._slots):
            lease.words.value, lease.request, is_lost = self.way.slot(number, core)
            lease.handed = lease.request is not None
            if is_lost:
                self._staging.break_off(None, [lease], None)
            else:
                self._staging.give_back(self, event, [lease])
        self._slots.clear()


def short_way_of(runtime: DeviceRuntime, staging: Staging, tensors: Sequence[Any]) -> ShortWay | None:
    """One for the device of ``tensors``, if its runtime has such a way."""
    device = tensors[0].device
    way = runtime.short_way(device)
    return None if way is None else ShortWay(runtime, staging, way, device)
