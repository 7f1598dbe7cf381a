"""Streams that communicators take and give back, so that there are no more than were needed at once."""

from __future__ import annotations

import threading
from typing import Any

from telegrad.communicator.cuda.runtime import DeviceRuntime, Event, Stream


class StreamPool:
    """The streams of one runtime. Any thread may call."""

    def __init__(self, runtime: DeviceRuntime) -> None:
        self._runtime = runtime
        self._lock = threading.Lock()
        self._idle: dict[Any, list[tuple[Event, Stream]]] = {}  # by device, with what is still in them

    def take(self, device: Any) -> Stream:
        """One that has nothing to do: an idle one, or a new one."""
        with self._lock:
            idle = self._idle.setdefault(device, [])
            for at, (event, stream) in enumerate(idle):
                if self._runtime.passed(event):
                    del idle[at]
                    return stream
        return self._runtime.new_stream(device)

    def give_back(self, device: Any, stream: Stream) -> None:
        """It is taken again once all that is in it by now is over."""
        try:
            event = self._runtime.record(stream)
        except Exception:  # of a device that does nothing any more nobody takes a stream
            return
        with self._lock:
            self._idle.setdefault(device, []).append((event, stream))


_lock = threading.Lock()
_pools: dict[DeviceRuntime, StreamPool] = {}


def pool_of(runtime: DeviceRuntime) -> StreamPool:
    """The one that all communicators of this process share."""
    with _lock:
        pool = _pools.get(runtime)
        if pool is None:
            pool = _pools[runtime] = StreamPool(runtime)
        return pool
