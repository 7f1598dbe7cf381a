"""What the core needs to begin the plainest operations on device tensors itself: memory that is lent to it, and
somebody who takes over what it has begun. It must not know of the operations.
"""

from __future__ import annotations

import threading
from typing import Any

from telegrad import _core
from telegrad.communicator.cuda.runtime import DeviceRuntime, Event, Stream
from telegrad.communicator.cuda.staging import Lease, Staging, rounded

MOST_BYTES = 64 << 20
"""Lent to one communicator's short way, beside what operations that are under way may have."""

_MOST_OF_ONE_LENGTH = 16
_SHARE = 8  # where these may have little: one such part of it at most


class ShortWay:
    """The core's for the tensors of one device, ``way``, and what has been lent to it. Any thread may call."""

    def __init__(self, runtime: DeviceRuntime, staging: Staging, way: _core.DeviceShortWay, device: Any) -> None:
        self.way, self.device = way, device
        self.results: Stream | None = None  # of operations that have streams of their own
        self._runtime, self._staging = runtime, staging
        self._lock = threading.Lock()
        self._slots: dict[int, tuple[Lease, Event]] = {}  # _lock; by the way's numbers
        self._lent: dict[int, int] = {}  # _lock; slots, by the length of their buffers
        self._lends = True  # _lock

    def lend(self, stream: Stream, nbytes: int) -> None:
        """Memory for one more operation of such a length, if it has not enough: on which ``stream`` may be, and no
        other."""
        length = rounded(nbytes)
        most = min(MOST_BYTES, self._staging.most_bytes // _SHARE)
        with self._lock:
            used = sum(2 * length * count for length, count in self._lent.items())
            if not self._lends or self._lent.get(length, 0) >= _MOST_OF_ONE_LENGTH or used + 2 * length > most:
                return
            leases: list[Lease] = []
            try:
                self._staging.lease([(length, length)], leases)
            except MemoryError:  # as much is under way as may be
                return
            (lease,) = leases
            event = None
            try:
                event = self._runtime.record(stream)
                number = self._runtime.lend(self.way, lease, event)
            except BaseException:
                self._staging.break_off(None, leases, event)
                raise
            if number is None:
                self._lends = False
                self._staging.give_back(self, event, leases)
                return
            self._slots[number] = (lease, event)
            self._lent[length] = self._lent.get(length, 0) + 1
            self._staging.set_apart(lease)

    def lend_streams(self, inputs: Stream, results: Stream) -> None:
        """For operations with ``async_op=True``; those of the communicator, so that results come in order."""
        if self.results is None:
            self.results = results  # whoever finds the way to have streams needs this one
            self._runtime.lend_streams(self.way, inputs, results)

    def outstanding(self, core: _core.Communicator) -> list[tuple[_core.Request, Lease]]:
        """What it has begun, and nobody knows yet to have succeeded, oldest first; told once."""
        with self._lock:
            return [(request, self._slots[number][0]) for request, number in self.way.take_outstanding(core)]

    def close(self, core: _core.Communicator) -> None:
        """Gives back what was lent, once the streams have passed: for a communicator whose engine is at its end."""
        with self._lock:
            self._lends = False
            self.way.close()
            for number, (lease, event) in self._slots.items():
                lease.words.value, lease.request, is_lost = self.way.slot(number, core)
                lease.handed = lease.request is not None
                self._staging.count_again(lease)
                if is_lost:
                    self._staging.break_off(None, [lease], event)
                else:
                    self._staging.give_back(self, event, [lease])
            self._slots.clear()


def short_way_of(runtime: DeviceRuntime, staging: Staging, device: Any) -> ShortWay | None:
    """One for tensors of ``device``, if its runtime has such a way."""
    way = runtime.short_way(device)
    return None if way is None else ShortWay(runtime, staging, way, device)
