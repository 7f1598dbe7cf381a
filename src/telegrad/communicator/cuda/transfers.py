"""Transfers: one rank's operations on tensors of one kind of device, as the host-transfer algorithms of Aluminum
(§IV-V) run them: the stream copies to pinned memory and writes a word, the engine sees it, communicates and writes
another, and the stream, which waits for that, copies back. The host only puts this into the stream.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from telegrad import _core
from telegrad.communicator.cuda.nccl import SumWork
from telegrad.communicator.cuda.runtime import DeviceRuntime, Event, Stream, StreamPool
from telegrad.communicator.cuda.staging import FastPath, Lease, Staging, fast_path_of
from telegrad.communicator.work import Work, check_timeout
from telegrad.errors import TransportError

if TYPE_CHECKING:
    import torch

# Operations on device tensors in flight.


class DeviceWork(Work):
    """One that was started with ``async_op=True`` on device tensors: streams wait for it, and the host never does."""

    def __init__(
        self,
        requests: Sequence[_core.Request],
        operation: str,
        rank: int,
        result: Any,
        device: Any,
        runtime: DeviceRuntime,
        stream: Stream,
        event: Event,
        held: Any,
    ) -> None:
        super().__init__(requests[0], operation, rank, lambda _: result)
        self._requests = requests
        self._device = device
        self._runtime = runtime
        self._stream = stream
        self._event = event
        self._held = held

    def wait(self, timeout_s: float | None = None) -> bool:
        """Makes the device's current stream wait for the operation; returns True, at once.

        ``timeout_s`` is checked and not used: nothing waits here. Raises what the operation failed with, if that is
        known by now; otherwise ``Communicator.synchronize()`` or the next operation does.
        """
        if timeout_s is not None:
            check_timeout(timeout_s, "timeout_s")
        self._check_process()
        self._runtime.wait_event(self._runtime.current_stream(self._device), self._event)
        self.raise_failure()
        return True

    def raise_failure(self) -> None:
        """Raises what the operation failed with, if that is known by now."""
        for request in self._requests:
            if request.done():
                request.wait(0.0)

    def communicated(self) -> bool:
        """Blocks the host until this rank's part of the communication is over; the result may still be copied. Raises
        what it failed with. Whose stream never comes to the operation waits for ever."""
        self._check_process()
        for request in self._requests:
            request.wait()
        return True

    @property
    def request(self) -> _core.Request:
        """The engine's, of an operation of one part."""
        return self._requests[0]

    def then(self, compute: Callable[[], object], tensors: Sequence[Any]) -> None:
        """Puts what ``compute`` has the device do behind the operation, as a part of it. ``tensors``: all that it
        uses."""
        for tensor in tensors:
            self._runtime.keep(tensor, self._stream)
        with self._runtime.on(self._stream):
            compute()
        self._event = self._runtime.record(self._stream)

    def timed_end(self) -> Event:
        """A timed event of the runtime's, which passes once the result is on the device. Called before anything else is
        begun."""
        return self._runtime.record_timed(self._stream)

    def is_completed(self) -> bool:
        """True once the result is on the device, also when the operation failed: then it is NaN."""
        return self._runtime.passed(self._event)

    def span_s(self) -> tuple[float, float] | None:
        """When the engine began and when it ended, copies not counted; see Work."""
        spans = [request.span_s() for request in self._requests]
        known = [span for span in spans if span is not None]
        if len(known) < len(spans):
            return None
        return min(begun for begun, _ in known), max(ended for _, ended in known)

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of ``result()``, complete at once: ``future.wait()`` makes the current stream wait, as ``wait()``
        does. After a failure the tensor is NaN, and the error comes from where ``wait()`` says."""
        return self.future_of(self._made())

    def future_of(self, value: Any) -> torch.futures.Future[Any]:
        """As ``get_future()``, of another tensor of the device or a list of them."""
        self._check_process()
        self.raise_failure()
        future: torch.futures.Future[Any] = self._runtime.future(self._device)
        self.complete(future, value)
        return future

    def complete(self, future: torch.futures.Future[Any], value: Any) -> None:
        """Gives ``value`` to a future that the runtime has made; who waits for it waits for this operation."""
        self._runtime.complete(future, self._stream, value)


class GroupSumWork(DeviceWork):
    """A sum that a group of torch's communicates. What the engine has of it is the ranks' calls, and their failures."""

    def communicated(self) -> bool:
        """Blocks the host until the sum is over, on the device too. Raises what is known by then to have failed."""
        super().communicated()
        self._runtime.wait_on_host(self._event)
        return True

    def span_s(self) -> tuple[float, float] | None:
        """``None``: only the device knows."""
        return None


CHUNK_BYTES = 4 << 20
"""Larger tensors are cut, the same on all ranks, so that a part is communicated while the next is copied. Not yet
chosen by measurements."""

_LATE_S = 5.0  # by which the network may be behind the devices
_CROWDED = 64  # requests that are held, before those behind the first are looked at


class StagedOperation(Protocol):
    """One operation of the engine, and how a stream fills and takes its memory."""

    @property
    def has_input(self) -> bool:
        """Whether it waits for the stream."""

    @property
    def input_bytes(self) -> int: ...

    @property
    def output_bytes(self) -> int: ...

    def prepare(self, runtime: DeviceRuntime, stream: Stream, lease: Lease) -> None:
        """Loads the kernels that it needs: loading one may wait for all streams of the device, and of those one may
        wait for a peer by the time it is needed."""

    def spoilt(self, lease: Lease) -> tuple[int, int]:
        """From which address on how many bytes become 0xFF where the operation fails."""

    def stage(self, runtime: DeviceRuntime, stream: Stream, lease: Lease) -> None:
        """Puts into the stream what fills the lease's input."""

    def begin(self, lease: Lease, gate: _core.Gate) -> _core.Request:
        """Hands it to the engine."""

    def fetch(self, runtime: DeviceRuntime, stream: Stream, lease: Lease) -> None:
        """Puts into the stream what takes the result out of the lease's output."""


class _Queued:
    """An operation that is being put into streams: what it has by now, if it breaks off."""

    __slots__ = ("caller", "leases", "requests", "results", "to_host")

    def __init__(self, caller: Stream) -> None:
        self.caller = self.results = self.to_host = caller
        self.leases: list[Lease] = []  # that have not been given back
        self.requests: list[_core.Request] = []


class Transfers:
    """The operations of one communicator. ``peers_apart``: other ranks are never called by a thread of this process."""

    def __init__(
        self, runtime: DeviceRuntime, staging: Staging, pool: StreamPool, rank: int, *, peers_apart: bool
    ) -> None:
        self._runtime, self._staging, self._pool = runtime, staging, pool
        self._rank = rank
        self._peers_apart = peers_apart
        self._lock = threading.Lock()
        self._streams: dict[Hashable, tuple[Any, Stream]] = {}  # with their devices
        self._outstanding: deque[tuple[_core.Request, Lease | None]] = deque()  # _lock; what the network may touch
        self._last_in_group: Any = None  # the event after the last operation that a group of torch's communicates
        self._unknown: list[tuple[Sequence[Stream], list[Lease], Any]] = []  # what the engine has, or has not
        self._crowded = _CROWDED
        self._fast_path: FastPath | None = None  # of the first device that had one
        self._core: Any = None  # of that
        self._has_no_fast_path = False
        self._closed = False  # _lock
        self._told = False  # _lock: somebody has heard of the first failure

    def run(
        self,
        operation: str,
        device: Any,
        parts: Sequence[StagedOperation],
        tensors: Sequence[Any],
        abort: Callable[[str], None],
        *,
        result: Any,
        async_op: bool,
        lane: Hashable = None,
    ) -> DeviceWork | None:
        """Puts an operation into the current stream, or with ``async_op`` into one of this communicator's own: that of
        its ``lane``, whose operations end in the order in which they are called, and wait for no other lane's. ``None``
        is that of operations that all ranks call.

        ``abort`` ends the communicator's operations on all ranks: called if this breaks off after a part has begun,
        whose number the other ranks would take for another's. The host waits where as much pinned memory is under way
        as there may be, if that ends without this thread; otherwise that is a ``MemoryError``. Raises what an earlier
        operation failed with.
        """
        runtime = self._runtime
        with self._entered(device) as queued:
            try:
                if async_op:
                    has_input = any(part.has_input for part in parts)
                    self._leave(queued, device, tensors, lane, has_input=has_input, in_parts=len(parts) > 1)
                elif len(parts) > 1 and sum(part.has_input for part in parts) > 1:
                    # Inputs do not wait for results before them.
                    queued.to_host = self._own(device, queued.caller)
                    runtime.wait_event(queued.to_host, runtime.record(queued.caller))
                over = self._put(queued, parts, lane)
            except BaseException as error:
                self._break_off(queued, tensors, operation, error, abort)
                raise
        if not async_op:
            return None
        return DeviceWork(
            queued.requests, operation, self._rank, result, device, runtime, queued.results, over, tensors
        )

    def run_in_group(
        self,
        operation: str,
        device: Any,
        announce: Callable[[], _core.Request],
        begin: Callable[[Stream], SumWork],
        finish: Callable[[Stream], None],
        tensors: Sequence[Any],
        abort: Callable[[str], None],
        *,
        result: Any,
        async_op: bool,
    ) -> DeviceWork | None:
        """As ``run``, of an operation that a group of torch's communicates. ``begin`` puts it into the device, behind
        what is in the stream that it is given, which is the current one; ``finish`` what is left to do into that of
        results. ``announce`` tells the engine of the call: a rank that does not make it, or dies, is heard of by that.
        """
        runtime = self._runtime
        with self._entered(device) as queued:
            if async_op:
                self._leave(queued, device, tensors, None, has_input=True, in_parts=False)
            request = announce()
            try:
                with self._lock:
                    self._outstanding.append((request, None))
                with runtime.on(queued.to_host):
                    work = begin(queued.to_host)
                with runtime.on(queued.results):
                    work.wait()
                finish(queued.results)
                self._last_in_group = over = runtime.record(queued.results)
            except BaseException as error:  # the others have begun it
                abort(f"{operation} of device tensors broke off: {type(error).__name__}: {error}")
                raise
        if not async_op:
            return None
        return GroupSumWork([request], operation, self._rank, result, device, runtime, queued.results, over, tensors)

    @contextlib.contextmanager
    def _entered(self, device: Any) -> Iterator[_Queued]:
        """Raises what an earlier operation failed with; inside, the runtime is about ``device``."""
        if self._outstanding or self._fast_path is not None:
            self.raise_failure()
        self._runtime.enter(device)
        try:
            yield _Queued(self._runtime.current_stream(device))
        finally:
            self._runtime.leave()

    def fast_path(self, core: _core.Communicator, x: Any, *, async_op: bool) -> _core.DeviceFastPath | None:
        """For the next operations like one of ``x`` that was just called: what lets the core put them into streams
        itself, with memory for one more of them; ``None``: it cannot, or has another device's."""
        # What cannot be lent is no error of the operation's, which has been called by now.
        with contextlib.suppress(Exception):
            short = self._fast_path_for(core, x.device)
            if short is None or short.device != x.device:
                return None
            runtime = self._runtime
            runtime.enter(x.device)
            try:
                stream = runtime.current_stream(x.device)
                if async_op:
                    stream = self._own(x.device, (None, "results"))
                    short.lend_streams(self._own(x.device, (None, "inputs")), stream)
                short.lend(stream, x.nbytes)
            finally:
                runtime.leave()
            return short.way
        return None

    def _fast_path_for(self, core: _core.Communicator, device: Any) -> FastPath | None:
        with self._lock:
            if self._closed:
                return None
            if self._fast_path is None and not self._has_no_fast_path:
                self._core = core
                self._fast_path = fast_path_of(self._runtime, self._staging, device)
                self._has_no_fast_path = self._fast_path is None
            return self._fast_path

    def begin_shortly(self, member: Any, x: Any, op: str) -> DeviceWork | None:
        """Has the core put a sum of ``x`` into streams of the communicator's own; ``None``: that is not for it."""
        short, runtime, device = self._fast_path, self._runtime, x.device
        if short is None or short.device != device:
            return None
        runtime.keep(x, short.results)  # before a stream has it: what breaks off half-way may leave it there
        request = short.way.all_reduce(member, self._core, x, op, True)
        if request is None:
            return None
        try:
            over = runtime.record(short.results)
            return DeviceWork([request], "all_reduce", self._rank, x, device, runtime, short.results, over, (x,))
        except BaseException as error:  # the others have begun it
            member.abort(f"all_reduce of device tensors broke off: {type(error).__name__}: {error}")
            raise

    def raise_failure(self) -> None:
        """Raises what an operation failed with, if that is known by now; again and again."""
        with self._lock:
            self._take_over()
            outstanding = self._outstanding
            while outstanding and outstanding[0][0].done():
                self._check(outstanding[0][0])
                outstanding.popleft()
            if len(outstanding) >= self._crowded:  # one that is long under way is before all others
                for request, _ in outstanding:
                    if request.done():
                        self._check(request)
                self._outstanding = deque(entry for entry in outstanding if not entry[0].done())
                self._crowded = 2 * len(self._outstanding) + _CROWDED

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
        """Waits until all operations are communicated. Raises what the first that failed did."""
        self.raise_failure()
        with self._lock:
            self._take_over()
            outstanding = list(self._outstanding)
        for request, _ in outstanding:
            request.wait()
        self.raise_failure()
        if self._last_in_group is not None:
            self._runtime.wait_on_host(self._last_in_group)

    def conclude(self) -> None:
        """Before the engine ends: where the device is through with what groups of torch's communicate, all ranks have
        called it, and the engine may only not have heard of that yet."""
        if self._last_in_group is None or not self._runtime.passed(self._last_in_group):
            return
        until_s = time.monotonic() + _LATE_S
        for request, lease in list(self._outstanding):
            if lease is None:
                with contextlib.suppress(TransportError):
                    request.wait(max(until_s - time.monotonic(), 0.0))

    def close(self) -> None:
        """Gives back what it has of the process's: for a communicator whose engine touches nothing any more."""
        for streams, leases, tensors in self._unknown:
            for lease in leases:
                lease.handed = False
            self._give_up(streams, leases, tensors)
        with self._lock:
            self._closed = True
            streams_held, self._streams = self._streams, {}
            self._outstanding.clear()
            if self._fast_path is not None:
                self._fast_path.close(self._core)
        for device, stream in streams_held.values():
            self._pool.give_back(device, stream)

    def _take_over(self) -> None:
        """With the lock: what the core has begun itself."""
        if self._fast_path is not None:
            self._outstanding.extend(self._fast_path.outstanding(self._core))

    def _check(self, request: _core.Request) -> None:
        try:
            request.wait(0.0)  # one that failed stays the first
        except Exception:
            self._told = True
            if self._fast_path is not None:
                self._fast_path.way.stop()  # this is what every later call has to say
            raise

    # Inputs do not wait behind other operations' results: those may come from peers who wait for these inputs.
    def _leave(
        self, queued: _Queued, device: Any, tensors: Sequence[Any], lane: Hashable, *, has_input: bool, in_parts: bool
    ) -> None:
        """From the caller's stream to this communicator's own."""
        runtime = self._runtime
        called = runtime.record(queued.caller)
        results = self._own(device, (lane, "results"))
        queued.to_host = queued.results = results
        if has_input:
            queued.to_host = self._own(device, (lane, "inputs"))
            runtime.wait_event(queued.to_host, called)
        if in_parts or queued.to_host is results:
            runtime.wait_event(results, called)
        # The stream of inputs needs no more: that of results waits for it.
        for at, tensor in enumerate(tensors):
            if not any(tensor is other for other in tensors[:at]):
                runtime.keep(tensor, results)

    def _own(self, device: Any, name: Hashable) -> Stream:
        held = self._streams.get((device, name))
        if held is None:
            with self._lock:
                held = self._streams.get((device, name))
                if held is None:
                    if self._closed:  # it would never be given back
                        raise ValueError(f"this Communicator (rank {self._rank}) is closed: make a new one")
                    held = self._streams[device, name] = (device, self._pool.take(device))
        return held[1]

    def _put(self, queued: _Queued, parts: Sequence[StagedOperation], lane: Hashable) -> Any:
        """The whole operation; returns the event after it."""
        staging = self._staging
        is_message = lane is not None
        # Another rank that this thread calls, and a peer that may wait for what this thread does next, would wait for
        # ever while this thread does.
        may_wait = self._peers_apart and not is_message
        at = 0
        while True:
            rest = parts[at:] if at else parts
            sizes = [(part.input_bytes, part.output_bytes) for part in rest]
            staging.lease(sizes, queued.leases, is_message=is_message, may_wait=may_wait, has_begun=at > 0)
            at += len(queued.leases)
            over = self._put_some(queued, rest)
            staging.give_back(queued.results, over, queued.leases)
            queued.leases = []
            if at == len(parts):
                return over

    def _put_some(self, queued: _Queued, parts: Sequence[StagedOperation]) -> Any:
        """Those that have a lease."""
        runtime, leases = self._runtime, queued.leases
        to_host, results = queued.to_host, queued.results
        parts[0].prepare(runtime, to_host, leases[0])
        for part, lease in zip(parts, leases, strict=False):
            words = lease.words
            part.stage(runtime, to_host, lease)
            # Into the stream first: an operation whose gate nobody opens would hold up all ranks.
            if part.has_input:
                runtime.write_value(to_host, words.ready, words.value)
            gate = _core.Gate(words.ready if part.has_input else 0, words.done, words.value, *part.spoilt(lease))
            lease.handed = True
            try:
                lease.request = request = part.begin(lease, gate)
            except (TransportError, TypeError, ValueError):  # refused; after any other, a signal's too, nobody knows
                lease.handed = False
                raise
            queued.requests.append(request)
        self._note(leases)
        staged = None
        if to_host is not results:
            staged = runtime.record(to_host)
            if len(leases) == 1:
                runtime.wait_event(results, staged)
        for part, lease in zip(parts, leases, strict=False):
            runtime.wait_value(results, lease.words.done, lease.words.value)
            part.fetch(runtime, results, lease)
        if staged is not None and len(leases) > 1:
            runtime.wait_event(results, staged)
        return runtime.record(results)

    def _note(self, leases: Sequence[Lease]) -> None:
        with self._lock:
            self._outstanding.extend((lease.request, lease) for lease in leases if lease.request is not None)

    def _break_off(
        self,
        queued: _Queued,
        tensors: Sequence[Any],
        operation: str,
        error: BaseException,
        abort: Callable[[str], None],
    ) -> None:
        """Nobody uses memory before streams and engine are done with what they have of the operation."""
        leases = queued.leases
        if queued.requests or any(lease.handed for lease in leases):
            abort(f"{operation} of device tensors broke off: {type(error).__name__}: {error}")
        if not leases:
            return
        self._note(leases)
        streams = list(dict.fromkeys((queued.caller, queued.to_host, queued.results)))
        unknown = [lease for lease in leases if lease.handed and lease.request is None]
        if unknown:  # until close(), after which the engine has nothing
            self._unknown.append((streams, unknown, tensors))
        self._give_up(streams, [lease for lease in leases if lease not in unknown], tensors)

    def _give_up(self, streams: Sequence[Stream], leases: list[Lease], tensors: Any) -> None:
        try:
            events = [self._runtime.record(stream) for stream in streams]
        except BaseException:
            self._staging.break_off(None, leases, tensors)
        else:
            self._staging.break_off(events, leases, tensors)


# Device tensors are cut into operations of the engine.

Begin = Callable[[int, int, Any, _core.Gate | None], _core.Request]
"""With the addresses of input and output, how long they are, and the gate; without one, of host memory."""

Piece = tuple[Any, int, int]
"""A contiguous tensor of a device, from which of its bytes on, and how many."""


def flat(x: Any) -> Any:
    """``x`` in one dimension, without its history."""
    if x.requires_grad:  # as of host tensors, autograd learns nothing of what is communicated
        x = x.detach()
    return x if x.dim() == 1 else x.view(-1)


class Pieces:
    """A Part of pieces that are copied as they are. ``begin`` gets the addresses at which inputs and outputs lie, one
    behind the other, and ``length``."""

    __slots__ = ("_begin", "_inputs", "_length", "_outputs", "has_input", "input_bytes", "output_bytes")

    def __init__(self, inputs: Sequence[Piece], outputs: Sequence[Piece], begin: Begin, length: Any) -> None:
        self._inputs, self._outputs, self._begin, self._length = inputs, outputs, begin, length
        self.has_input = len(inputs) != 0
        self.input_bytes = _bytes_of(inputs)
        self.output_bytes = _bytes_of(outputs)

    def prepare(self, runtime: DeviceRuntime, stream: Stream, lease: Lease) -> None:
        """Copies need no kernels."""

    def spoilt(self, lease: Lease) -> tuple[int, int]:
        return lease.output_address, self.output_bytes

    def stage(self, runtime: DeviceRuntime, stream: Stream, lease: Lease) -> None:
        address = lease.input_address
        for x, first, nbytes in self._inputs:
            if nbytes:
                runtime.copy_to_host(stream, address, x, first, nbytes)
                address += nbytes

    def begin(self, lease: Lease, gate: _core.Gate) -> _core.Request:
        return self._begin(lease.input_address, lease.output_address, self._length, gate)

    def fetch(self, runtime: DeviceRuntime, stream: Stream, lease: Lease) -> None:
        address = lease.output_address
        for x, first, nbytes in self._outputs:
            if nbytes:
                runtime.copy_to_device(stream, x, first, address, nbytes)
                address += nbytes


def whole(x: Any) -> Piece:
    """All of it."""
    return x, 0, x.nbytes


def element_parts(x: Any, out: Any, begin: Begin) -> list[StagedOperation]:
    """For an operation that turns elements of ``x`` into those of ``out`` at the same places. ``out``: ``None`` on a
    rank that takes nothing. Lengths: in elements."""
    elements, item = x.numel(), x.element_size()
    if elements * item <= CHUNK_BYTES and out is not None:
        piece = (x, 0, elements * item)
        return [Pieces((piece,), (piece if out is x else (out, 0, elements * item),), begin, elements)]
    parts: list[StagedOperation] = []
    for first, length in cuts(elements, item):
        own = first * item, length * item
        parts.append(Pieces(((x, *own),), () if out is None else ((out, *own),), begin, length))
    return parts


def scattered_parts(
    x: Any, block: Any, lengths: list[int], begin: Begin, *, at_once: bool = False
) -> list[StagedOperation]:
    """For one that turns the blocks of ``x``, of ``lengths`` elements, into this rank's ``block``. ``x``: ``None`` on a
    rank that gives nothing. ``at_once``: in one part. Lengths: of the blocks of a part, in elements."""
    if at_once or len(set(lengths)) > 1:  # chunks of unequal blocks would lie differently on each rank
        return [Pieces([] if x is None else [whole(x)], [whole(block)], begin, lengths)]
    ranks, item = len(lengths), block.element_size()
    parts: list[StagedOperation] = []
    for first, length in cuts(lengths[0], item, ranks):
        nbytes = length * item
        pieces = [] if x is None else _of_each(x, lengths[0] * item, ranks, first * item, nbytes)
        parts.append(Pieces(pieces, [(block, first * item, nbytes)], begin, [length] * ranks))
    return parts


def gathered_parts(x: Any, out: Any, lengths: list[int] | None, ranks: int, begin: Begin) -> list[StagedOperation]:
    """For one that puts all ranks' ``x`` into ``out``: ``None`` on a rank that takes nothing. ``lengths``: in bytes,
    where they are unequal. Lengths: of this rank's input, in bytes."""
    if lengths is not None:
        return [Pieces([whole(x)], [] if out is None else [whole(out)], begin, x.nbytes)]
    item = x.element_size()
    parts: list[StagedOperation] = []
    for first, length in cuts(x.numel(), item, ranks):
        nbytes = length * item
        pieces = [] if out is None else _of_each(out, x.nbytes, ranks, first * item, nbytes)
        parts.append(Pieces([(x, first * item, nbytes)], pieces, begin, nbytes))
    return parts


def exchanged_parts(x: Any, out: Any, ranks: int, begin: Begin) -> list[StagedOperation]:
    """For one that gives block r of ``x`` to rank r, and puts what this rank gets into ``out``, in equal blocks.
    Lengths: of all blocks of a part, in bytes."""
    item, block = x.element_size(), x.nbytes // ranks
    parts: list[StagedOperation] = []
    for first, length in cuts(x.numel() // ranks, item, ranks):
        given, taken = (_of_each(one, block, ranks, first * item, length * item) for one in (x, out))
        parts.append(Pieces(given, taken, begin, ranks * length * item))
    return parts


def _of_each(x: Any, block: int, ranks: int, first: int, nbytes: int) -> list[Piece]:
    """The same part of each rank's block, whose length is ``block`` bytes."""
    return [(x, rank * block + first, nbytes) for rank in range(ranks)]


def broadcast_parts(x: Any, is_root: bool, begin: Begin) -> list[StagedOperation]:
    """For one that copies the root's ``x``: the input there, and the output elsewhere. Lengths: in bytes."""
    item = x.element_size()
    parts: list[StagedOperation] = []
    for first, length in cuts(x.numel(), item):
        piece = [(x, first * item, length * item)]
        given, taken = (piece, []) if is_root else ([], piece)
        parts.append(Pieces(given, taken, begin, length * item))
    return parts


def cuts(elements: int, itemsize: int, copies: int = 1) -> list[tuple[int, int]]:
    """The first elements and lengths of a vector's chunks, ``copies`` of which are communicated at once; of an empty
    one an empty chunk."""
    step = max(1, CHUNK_BYTES // (itemsize * copies))
    return [(first, min(step, elements - first)) for first in range(0, max(elements, 1), step)]


def _bytes_of(pieces: Sequence[Piece]) -> int:
    nbytes = 0
    for piece in pieces:
        nbytes += piece[2]
    return nbytes
