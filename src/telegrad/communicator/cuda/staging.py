"""Pinned host memory for operations on device tensors: buffers, and the words by which streams and engine meet.

Both are lent to one operation and used again once its streams have passed and the engine is done with them. How much is
lent at once is bounded.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from telegrad import _core
from telegrad.communicator.cuda.runtime import DeviceRuntime, Event, Stream

KEPT_BYTES = 512 << 20
"""So much is kept for later operations; what exceeds it goes back to torch."""

PINNED_BYTES = "TELEGRAD_PINNED_BYTES"
"""Names the most that operations which are under way may have together, in the process; beside it is what is set apart
(``fast_path``)."""

DEFAULT_PINNED_BYTES = 2 << 30

NOTE_BYTES = 16

_SMALLEST = 4096
_PAGE = 4096
_NOTE = 16  # where a line has it
_LINE = 64  # words of a cache line of their own: two writers do not meet in one
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 20e-6, 1e-3  # of a host that waits for memory


class Words:
    """A pair of 32-bit words: ``ready`` is the stream's to write, ``done`` the engine's. Their values count up. Beside
    each lie ``NOTE_BYTES`` of the same writer's, pinned tensors of bytes, for what says what the buffers hold."""

    __slots__ = ("done", "given", "ready", "told", "value")

    def __init__(self, ready: int, done: int, given: Any, told: Any) -> None:
        self.ready, self.done, self.given, self.told = ready, done, given, told
        self.value = 0


class Lease:
    """What one operation stages its input and output in, apart from each other; ``None``, at address 0: it has none."""

    __slots__ = (
        "handed",
        "input",
        "input_address",
        "is_lent",
        "is_message",
        "key",
        "nbytes",
        "output",
        "output_address",
        "request",
        "views",
        "words",
    )

    def __init__(self, words: Words, key: tuple[int, int], input: Any, output: Any) -> None:
        self.words, self.key, self.nbytes = words, key, key[0] + key[1]
        self.input, self.output = input, output
        self.input_address = 0 if input is None else int(input.data_ptr())
        self.output_address = 0 if output is None else int(output.data_ptr())
        self.request: _core.Request | None = None  # of the operation that has it
        self.handed = False  # the engine may have it, also where there is no request
        self.views: dict[Hashable, Any] = {}  # of its buffers, as operations have made them, which mostly come again
        self.is_message = False
        self.is_lent = False


@dataclass
class Counts:
    """What a Staging has done so far, in leases, and what it has now."""

    allocated: int = 0
    reused: int = 0
    dropped: int = 0
    kept_bytes: int = 0
    lent_bytes: int = 0
    messages: int = 0
    """Leases of operations that wait for one peer."""


# Leases, and which use of theirs it is that is over: one that is given back twice counts once.
_Lent = tuple[Event, Sequence[Lease], list[int]]


class Staging:
    """The buffers and words of one runtime. Any thread may call."""

    def __init__(
        self, runtime: DeviceRuntime, kept_bytes: int = KEPT_BYTES, most_bytes: int = DEFAULT_PINNED_BYTES
    ) -> None:
        self.counts = Counts()
        self.most_bytes = most_bytes
        self._runtime = runtime
        self._kept_bytes = kept_bytes
        self._lock = threading.Lock()
        self._shelves: dict[tuple[int, int], list[Lease]] = {}  # free ones, by the lengths of their buffers
        self._words: list[Words] = []
        self._pages: list[Any] = []
        self._lent: dict[Stream, deque[_Lent]] = {}
        self._broken_off: list[tuple[Sequence[Event], _Lent, Any]] = []  # with what the streams still use
        self._stranded: list[Any] = []  # nobody will know when streams are done with them

    def lease(
        self,
        sizes: Sequence[tuple[int, int]],
        leases: list[Lease],
        *,
        is_message: bool = False,
        may_wait: bool = False,
        has_begun: bool = False,
    ) -> None:
        """Words, and buffers of at least these lengths for input and output, into ``leases``: for all of ``sizes``, or,
        with ``may_wait``, for as many of the first ones as there is room for; then the host waits until there is some
        for one: not beside messages, whose peers may wait for what this thread does next, unless the operation
        ``has_begun`` and must go on. Raises ``MemoryError`` where that does not help, or is not allowed. What it holds
        after an error is the caller's to give back.
        """
        keys = [(rounded(given), rounded(taken)) for given, taken in sizes]
        with self._lock:
            self._lend(keys, leases, is_message)
            if len(leases) == len(keys):
                return
            may_wait = has_begun or (may_wait and self.counts.messages == 0)
            if not may_wait or max(map(sum, keys)) > self.most_bytes:
                message = self._refusal(keys, leases)
                for lease in leases:
                    self._regain(lease)
                leases.clear()
                raise MemoryError(message)
        pause_s = _SHORTEST_PAUSE_S
        while not leases:
            time.sleep(pause_s)
            pause_s = min(2.0 * pause_s, _LONGEST_PAUSE_S)
            with self._lock:
                self._lend(keys, leases, is_message)

    def set_apart(self, lease: Lease) -> None:
        """It is lent for long: others need not wait for it, as it does not count among what may be lent."""
        with self._lock:
            self._end(lease)

    def count_again(self, lease: Lease) -> None:
        """One that was set apart is to be given back as all others."""
        with self._lock:
            lease.is_lent = True
            self.counts.lent_bytes += lease.nbytes

    def give_back(self, stream: Stream, event: Event, leases: Sequence[Lease]) -> None:
        """Takes them back once ``event`` has passed; by then their requests are done."""
        values = [lease.words.value for lease in leases]
        with self._lock:
            lent = self._lent.get(stream)
            if lent is None:
                lent = self._lent[stream] = deque()
            lent.append((event, leases, values))

    def break_off(self, events: Sequence[Event] | None, leases: Sequence[Lease], used: Any) -> None:
        """Takes those back that were not given back, once all ``events`` have passed and requests are done. ``used``:
        what streams may still use until then. ``events``: ``None`` where nobody can know when: they are never used
        again."""
        values = [lease.words.value for lease in leases]
        with self._lock:
            if events is not None:
                self._broken_off.append((events, (None, leases, values), used))
                return
            self._stranded.append((leases, used))
            for lease in leases:
                self._end(lease)

    def _lend(self, keys: Sequence[tuple[int, int]], leases: list[Lease], is_message: bool) -> None:
        if self._lent or self._broken_off:
            self._take_back()
        counts = self.counts
        for key in keys:
            nbytes = key[0] + key[1]
            if counts.lent_bytes + nbytes > self.most_bytes:
                break
            free = self._shelves.get(key)
            if free:
                leases.append(free.pop())
                counts.reused += 1
                counts.kept_bytes -= nbytes
            else:
                leases.append(self._made(key))
            lease = leases[-1]
            lease.words.value = (lease.words.value + 1) & 0xFFFFFFFF
            lease.is_lent, lease.is_message = True, is_message
            counts.lent_bytes += nbytes
            counts.messages += is_message

    def _take_back(self) -> None:
        passed = self._runtime.passed
        for stream, lent in list(self._lent.items()):
            while lent and passed(lent[0][0]):
                self._take(lent.popleft())
            if not lent:
                del self._lent[stream]
        if self._broken_off:
            self._broken_off = [entry for entry in self._broken_off if not self._is_over(*entry)]

    def _is_over(self, events: Sequence[Event], lent: _Lent, used: Any) -> bool:
        requests = [lease.request for lease in lent[1] if lease.request is not None]
        if not all(map(self._runtime.passed, events)) or not all(request.done() for request in requests):
            return False
        self._take(lent)
        return True

    def _take(self, lent: _Lent) -> None:
        _, leases, values = lent
        for lease, value in zip(leases, values, strict=True):
            if lease.is_lent and lease.words.value == value:
                self._regain(lease)

    def _regain(self, lease: Lease) -> None:
        self._end(lease)
        request, handed = lease.request, lease.handed
        lease.request, lease.handed = None, False
        counts = self.counts
        if handed and (request is None or not succeeded(request)):
            self._words.append(lease.words)
            counts.dropped += 1  # the network may still use the buffers
            return
        if counts.kept_bytes + lease.nbytes > self._kept_bytes and not self._make_room(lease):
            self._words.append(lease.words)
            counts.dropped += 1
            return
        counts.kept_bytes += lease.nbytes
        self._shelves.setdefault(lease.key, []).append(lease)

    def _end(self, lease: Lease) -> None:
        if lease.is_lent:
            lease.is_lent = False
            self.counts.lent_bytes -= lease.nbytes
            self.counts.messages -= lease.is_message

    def _make_room(self, lease: Lease) -> bool:
        """Drops others that are free, of lengths that are not in use any more as likely as not."""
        counts = self.counts
        for key, free in self._shelves.items():
            while key != lease.key and free and counts.kept_bytes + lease.nbytes > self._kept_bytes:
                other = free.pop()
                self._words.append(other.words)
                counts.kept_bytes -= other.nbytes
                counts.dropped += 1
        return counts.kept_bytes + lease.nbytes <= self._kept_bytes

    def _made(self, key: tuple[int, int]) -> Lease:
        buffers = [self._runtime.pinned(length) if length else None for length in key]
        if not self._words:
            self._add_page()
        self.counts.allocated += 1
        return Lease(self._words.pop(), key, *buffers)

    def _add_page(self) -> None:
        page = self._runtime.pinned(_PAGE)
        page.zero_()
        first = page.data_ptr()
        notes = [page[at + _NOTE : at + _NOTE + NOTE_BYTES] for at in range(0, _PAGE, _LINE)]
        pairs = zip(range(first, first + _PAGE, 2 * _LINE), notes[::2], notes[1::2], strict=True)
        self._pages.append(page)
        self._words = [Words(at, at + _LINE, given, told) for at, given, told in pairs]

    def _refusal(self, keys: Sequence[tuple[int, int]], leases: Sequence[Lease]) -> str:
        needed, counts = sum(map(sum, keys)), self.counts
        others = counts.lent_bytes - sum(lease.nbytes for lease in leases)
        beside = ", some of them of messages, whose peers may wait for this rank" if counts.messages else ""
        return (
            f"the operation needs {needed} bytes of pinned memory, {others} are under way{beside}, and "
            f"{PINNED_BYTES}={self.most_bytes} is the most: set it higher, call synchronize() between operations, or "
            "give smaller tensors"
        )


_lock = threading.Lock()
_stagings: dict[DeviceRuntime, Staging] = {}


def staging_of(runtime: DeviceRuntime) -> Staging:
    """The one that all communicators of this process share. Raises ``ValueError`` for a bad TELEGRAD_PINNED_BYTES."""
    with _lock:
        staging = _stagings.get(runtime)
        if staging is None:
            staging = _stagings[runtime] = Staging(runtime, most_bytes=_most_bytes())
        return staging


def _most_bytes() -> int:
    given = os.environ.get(PINNED_BYTES)
    if given is None:
        return DEFAULT_PINNED_BYTES
    if not given.isdecimal() or int(given) < 2 * _SMALLEST:
        raise ValueError(f"{PINNED_BYTES}={given!r} must be a number of bytes, {2 * _SMALLEST} or more")
    return int(given)


def rounded(nbytes: int) -> int:
    """How long a buffer for so many bytes is: a power of two, so that few lengths are kept."""
    if nbytes <= _SMALLEST:
        return _SMALLEST if nbytes else 0
    return 1 << (nbytes - 1).bit_length()


def succeeded(request: _core.Request) -> bool:
    """Whether it is over, and has not failed."""
    try:
        return request.wait(0.0)
    except Exception:
        return False


# Memory that is lent to the core, with which it begins the plainest operations on device tensors itself.

MOST_BYTES = 64 << 20
"""Lent to one communicator's fast path, beside what operations that are under way may have."""

_MOST_OF_ONE_LENGTH = 16
_SHARE = 8  # where these may have little: one such part of it at most


class FastPath:
    """The core's for the tensors of one device, ``way``, and what has been lent to it. Any thread may call."""

    def __init__(self, runtime: DeviceRuntime, staging: Staging, way: _core.DeviceFastPath, device: Any) -> None:
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


def fast_path_of(runtime: DeviceRuntime, staging: Staging, device: Any) -> FastPath | None:
    """One for tensors of ``device``, if its runtime has such a way."""
    way = runtime.fast_path(device)
    return None if way is None else FastPath(runtime, staging, way, device)
