"""Pinned host memory for operations on device tensors: buffers, and the words by which streams and engine meet.

Both are lent to one operation and used again once its stream has passed. Nothing here waits.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from telegrad import _core
from telegrad.comm.device.runtime import DeviceRuntime, Event, Stream

KEPT_BYTES = 512 << 20
"""So much is kept for later operations; what exceeds it goes back to torch."""

NOTE_BYTES = 8

_SMALLEST = 4096
_PAGE = 4096
_NOTE = 16  # where a line has it
_LINE = 64  # words of a cache line of their own: two writers do not meet in one


@dataclass
class Words:
    """A pair of 32-bit words: ``ready`` is the stream's to write, ``done`` the engine's. Their values count up. Beside
    each lie ``NOTE_BYTES`` of the same writer's, pinned tensors of bytes, for what says what the buffers hold."""

    ready: int
    done: int
    given: Any
    told: Any
    value: int = 0


@dataclass(frozen=True)
class Lease:
    """What one operation stages its input and output in, apart from each other; ``None``: it has none."""

    words: Words
    input: Any
    output: Any

    @property
    def input_address(self) -> int:
        return 0 if self.input is None else int(self.input.data_ptr())

    @property
    def output_address(self) -> int:
        return 0 if self.output is None else int(self.output.data_ptr())


@dataclass
class Counts:
    """What a Staging has done so far."""

    allocated: int = 0
    reused: int = 0
    dropped: int = 0
    kept_bytes: int = 0


class Staging:
    """The buffers and words of one runtime. Any thread may call."""

    def __init__(self, runtime: DeviceRuntime, kept_bytes: int = KEPT_BYTES) -> None:
        self.counts = Counts()
        self._runtime = runtime
        self._kept_bytes = kept_bytes
        self._lock = threading.Lock()
        self._buffers: dict[int, list[Any]] = {}  # free ones, by length
        self._words: list[Words] = []
        self._pages: list[Any] = []
        self._lent: dict[Stream, deque[tuple[Event, Lease, _core.Request]]] = {}

    def lease_all(self, lengths: Sequence[tuple[int, int]]) -> list[Lease]:
        """All that an operation needs, or an error before any of it has begun."""
        leases: list[Lease] = []
        with self._lock:
            self._take_back()
            try:
                for each in lengths:
                    leases.append(self._lease(*each))
            except BaseException:
                for lease in leases:
                    self._regain(lease)
                raise
        return leases

    def lease(self, input_bytes: int, output_bytes: int) -> Lease:
        """Words, and buffers of at least these lengths; ``None`` instead of an empty one."""
        return self.lease_all([(input_bytes, output_bytes)])[0]

    def _lease(self, input_bytes: int, output_bytes: int) -> Lease:
        if not self._words:
            self._add_page()
        words = self._words.pop()
        words.value = (words.value + 1) & 0xFFFFFFFF
        return Lease(words, self._buffer(input_bytes), self._buffer(output_bytes))

    def _regain(self, lease: Lease) -> None:
        self._words.append(lease.words)
        for buffer in (lease.input, lease.output):
            self._keep(buffer)

    def give_back(
        self, stream: Stream, event: Event, leases: Sequence[Lease], requests: Sequence[_core.Request]
    ) -> None:
        """Takes each lease back once ``event`` has passed; by then its request is done."""
        with self._lock:
            lent = self._lent.setdefault(stream, deque())
            lent.extend((event, lease, request) for lease, request in zip(leases, requests, strict=True))

    def _take_back(self) -> None:
        for stream, lent in list(self._lent.items()):
            while lent and self._runtime.passed(lent[0][0]):
                _, lease, request = lent.popleft()
                if _succeeded(request):
                    self._regain(lease)
                else:
                    self._words.append(lease.words)
                    self.counts.dropped += 1  # the network may still use the buffers
            if not lent:
                del self._lent[stream]

    def _keep(self, buffer: Any) -> None:
        if buffer is None:
            return
        length = buffer.numel()
        if self.counts.kept_bytes + length > self._kept_bytes:
            self.counts.dropped += 1
            return
        self.counts.kept_bytes += length
        self._buffers.setdefault(length, []).append(buffer)

    def _buffer(self, nbytes: int) -> Any:
        if nbytes == 0:
            return None
        length = max(_SMALLEST, 1 << (nbytes - 1).bit_length())
        free = self._buffers.get(length)
        if free:
            self.counts.reused += 1
            self.counts.kept_bytes -= length
            return free.pop()
        self.counts.allocated += 1
        return self._runtime.pinned(length)

    def _add_page(self) -> None:
        page = self._runtime.pinned(_PAGE)
        page.zero_()
        self._pages.append(page)
        first = page.data_ptr()
        notes = [page[at + _NOTE : at + _NOTE + NOTE_BYTES] for at in range(0, _PAGE, _LINE)]
        pairs = zip(range(first, first + _PAGE, 2 * _LINE), notes[::2], notes[1::2], strict=True)
        self._words = [Words(at, at + _LINE, given, told) for at, given, told in pairs]


_lock = threading.Lock()
_stagings: dict[DeviceRuntime, Staging] = {}


def staging_of(runtime: DeviceRuntime) -> Staging:
    """The one that all communicators of this process share."""
    with _lock:
        staging = _stagings.get(runtime)
        if staging is None:
            staging = _stagings[runtime] = Staging(runtime)
        return staging


def _succeeded(request: _core.Request) -> bool:
    try:
        return request.wait(0.0)
    except Exception:
        return False
