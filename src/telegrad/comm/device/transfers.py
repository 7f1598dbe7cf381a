"""Transfers: one rank's operations on tensors of one kind of device, as the host-transfer algorithms of Aluminum
(§IV-V) run them: the stream copies to pinned memory and writes a word, the engine sees it, communicates and writes
another, and the stream, which waits for that, copies back. The host only puts this into the stream.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from telegrad import _core
from telegrad.comm.device.runtime import DeviceRuntime, Event, Stream
from telegrad.comm.device.staging import Lease, Staging
from telegrad.comm.device.work import DeviceWork

CHUNK_BYTES = 4 << 20
"""Larger tensors are cut, the same on all ranks, so that a part is communicated while the next is copied. Not yet
chosen by measurements."""


class Part(Protocol):
    """One operation of the engine, and how a stream fills and takes its memory."""

    @property
    def has_input(self) -> bool:
        """Whether it waits for the stream."""

    @property
    def input_bytes(self) -> int: ...

    @property
    def output_bytes(self) -> int: ...

    def spoilt(self, lease: Lease) -> tuple[int, int]:
        """From which address on how many bytes become 0xFF where the operation fails."""

    def stage(self, runtime: DeviceRuntime, stream: Stream, lease: Lease) -> None:
        """Puts into the stream what fills the lease's input."""

    def begin(self, lease: Lease, gate: _core.Gate) -> _core.Request:
        """Hands it to the engine."""

    def fetch(self, runtime: DeviceRuntime, stream: Stream, lease: Lease) -> None:
        """Puts into the stream what takes the result out of the lease's output."""


@dataclass(frozen=True)
class Pieces:
    """A part of contiguous one-dimensional pieces of device tensors, which are copied as they are."""

    inputs: Sequence[Any]
    outputs: Sequence[Any]
    call: Callable[[int, int, _core.Gate], _core.Request]
    """With the addresses of input and output, where the pieces lie one behind the other."""

    @property
    def has_input(self) -> bool:
        return bool(self.inputs)

    @property
    def input_bytes(self) -> int:
        return _bytes_of(self.inputs)

    @property
    def output_bytes(self) -> int:
        return _bytes_of(self.outputs)

    def spoilt(self, lease: Lease) -> tuple[int, int]:
        return lease.output_address, self.output_bytes

    def stage(self, runtime: DeviceRuntime, stream: Stream, lease: Lease) -> None:
        for staged, piece in _placed(lease.input, self.inputs):
            runtime.copy(stream, staged, piece)

    def begin(self, lease: Lease, gate: _core.Gate) -> _core.Request:
        return self.call(lease.input_address, lease.output_address, gate)

    def fetch(self, runtime: DeviceRuntime, stream: Stream, lease: Lease) -> None:
        for staged, piece in _placed(lease.output, self.outputs):
            runtime.copy(stream, piece, staged)


def cuts(elements: int, itemsize: int, copies: int = 1) -> Iterator[slice]:
    """The chunks of a vector, ``copies`` of which are communicated at once; of an empty one an empty chunk."""
    step = max(1, CHUNK_BYTES // (itemsize * copies))
    for first in range(0, max(elements, 1), step):
        yield slice(first, min(first + step, elements))


class Transfers:
    """The operations of one communicator."""

    def __init__(self, runtime: DeviceRuntime, staging: Staging, rank: int) -> None:
        self._runtime = runtime
        self._staging = staging
        self._rank = rank
        self._internal: dict[Any, Stream] = {}  # by device and lane: what async_op=True runs in
        self._to_host: dict[Any, Stream] = {}  # by what waits for them: copies of chunks, beside those of results
        self._lock = threading.Lock()
        self._outstanding: deque[_core.Request] = deque()  # _lock
        self._told = False  # _lock: somebody has heard of the first failure

    def run(
        self,
        operation: str,
        device: Any,
        parts: Sequence[Part],
        tensors: Sequence[Any],
        hold: Callable[[_core.Request, Any], None],
        abort: Callable[[str], None],
        *,
        result: Any,
        async_op: bool,
        lane: Hashable = None,
    ) -> DeviceWork | None:
        """Puts an operation into the current stream, or with ``async_op`` into one of this communicator's own: that of
        its ``lane``, whose operations end in the order in which they are called, and wait for no other lane's.

        ``hold`` keeps what the network may touch. ``abort`` ends the communicator's operations on all ranks: called if
        this breaks off after a part has begun, whose number the other ranks would take for another's. Raises what an
        earlier one failed with.
        """
        self.raise_failure()
        runtime = self._runtime
        stream = runtime.current_stream(device)
        to_host = stream
        if async_op:
            # Inputs do not wait behind other operations' results: those may come from peers who wait for these inputs.
            called = runtime.record(stream)
            stream = self._after(called, self._internal, (device, lane), device, tensors)
            to_host = self._after(called, self._to_host, stream, device, tensors)
        elif sum(1 for part in parts if part.has_input) > 1:
            to_host = self._after(runtime.record(stream), self._to_host, stream, device, tensors)
        leases = self._staging.lease_all([(part.input_bytes, part.output_bytes) for part in parts])
        requests: list[_core.Request] = []
        copied: list[Event | None] = []
        try:
            for part, lease in zip(parts, leases, strict=True):
                request = self._begin(to_host, part, lease)
                requests.append(request)
                with self._lock:
                    self._outstanding.append(request)
                hold(request, lease)
                copied.append(None if to_host is stream else runtime.record(to_host))
            for part, lease, event in zip(parts, leases, copied, strict=True):
                if event is not None:  # the words order this already, but CUDA does not know that
                    runtime.wait_event(stream, event)
                runtime.wait_value(stream, lease.words.done, lease.words.value)
                part.fetch(runtime, stream, lease)
            over = runtime.record(stream)
        except BaseException as error:
            if requests:
                abort(f"{operation} of device tensors broke off: {type(error).__name__}: {error}")
            raise
        self._staging.give_back(stream, over, leases, requests)
        if not async_op:
            return None
        return DeviceWork(requests, operation, self._rank, result, device, runtime, stream, over, tensors)

    def raise_failure(self) -> None:
        """Raises what an operation failed with, if that is known by now; again and again."""
        with self._lock:
            while self._outstanding and self._outstanding[0].done():
                try:
                    self._outstanding[0].wait(0.0)  # one that failed stays the first
                except Exception:
                    self._told = True
                    raise
                self._outstanding.popleft()

    def untold_failure(self) -> str | None:
        """What an operation failed with that nobody has heard of."""
        if self._told:
            return None
        try:
            self.raise_failure()
        except Exception as error:
            return str(error)
        return None

    def synchronize(self) -> None:
        """Waits until the engine is done with all operations. Raises what the first that failed did."""
        self.raise_failure()
        with self._lock:
            outstanding = list(self._outstanding)
        for request in outstanding:
            request.wait()
        self.raise_failure()

    def _after(self, event: Event, streams: dict[Any, Stream], key: Any, device: Any, tensors: Sequence[Any]) -> Stream:
        """One of ``streams``, which waits for the event and may use the tensors."""
        stream = streams.get(key)
        if stream is None:
            stream = streams[key] = self._runtime.new_stream(device)
        self._runtime.wait_event(stream, event)
        for tensor in tensors:
            self._runtime.keep(tensor, stream)
        return stream

    # Into the stream first: an operation whose gate nobody opens would hold up all ranks.
    def _begin(self, stream: Stream, part: Part, lease: Lease) -> _core.Request:
        words = lease.words
        part.stage(self._runtime, stream, lease)
        if part.has_input:
            self._runtime.write_value(stream, words.ready, words.value)
        gate = _core.Gate(words.ready if part.has_input else 0, words.done, words.value, *part.spoilt(lease))
        return part.begin(lease, gate)


def _bytes_of(pieces: Sequence[Any]) -> int:
    nbytes = 0
    for piece in pieces:
        nbytes += piece.nbytes
    return nbytes


def _placed(buffer: Any, pieces: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """Each piece with its place in the buffer, seen as its dtype."""
    first = 0
    for piece in pieces:
        nbytes = piece.nbytes
        if nbytes:
            yield buffer[first : first + nbytes].view(piece.dtype), piece
        first += nbytes
