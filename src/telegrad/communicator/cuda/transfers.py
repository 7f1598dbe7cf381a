"""Transfers: one rank's operations on tensors of one kind of device, as the host-transfer algorithms of Aluminum
(§IV-V) run them: the stream copies to pinned memory and writes a word, the engine sees it, communicates and writes
another, and the stream, which waits for that, copies back. The host only puts this into the stream.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

from telegrad import _core
from telegrad.communicator.cuda.nccl import GroupWork
from telegrad.communicator.cuda.runtime import DeviceRuntime, Stream
from telegrad.communicator.cuda.short_way import ShortWay, short_way_of
from telegrad.communicator.cuda.staging import Lease, Staging
from telegrad.communicator.cuda.streams import StreamPool
from telegrad.communicator.cuda.work import DeviceWork, GroupSumWork
from telegrad.errors import TransportError

CHUNK_BYTES = 4 << 20
"""Larger tensors are cut, the same on all ranks, so that a part is communicated while the next is copied. Not yet
chosen by measurements."""

_LATE_S = 5.0  # by which the network may be behind the devices
_CROWDED = 64  # requests that are held, before those behind the first are looked at


class Part(Protocol):
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
        self._short_way: ShortWay | None = None  # of the first device that had one
        self._core: Any = None  # of that
        self._has_no_short_way = False
        self._closed = False  # _lock
        self._told = False  # _lock: somebody has heard of the first failure

    def run(
        self,
        operation: str,
        device: Any,
        parts: Sequence[Part],
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
        if self._outstanding or self._short_way is not None:
            self.raise_failure()
        runtime = self._runtime
        runtime.enter(device)
        try:
            queued = _Queued(runtime.current_stream(device))
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
        finally:
            runtime.leave()
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
        begin: Callable[[Stream], GroupWork],
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
        if self._outstanding or self._short_way is not None:
            self.raise_failure()
        runtime = self._runtime
        runtime.enter(device)
        try:
            queued = _Queued(runtime.current_stream(device))
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
        finally:
            runtime.leave()
        if not async_op:
            return None
        return GroupSumWork([request], operation, self._rank, result, device, runtime, queued.results, over, tensors)

    def short_way(self, core: _core.Communicator, x: Any, *, async_op: bool) -> _core.DeviceShortWay | None:
        """For the next operations like one of ``x`` that was just called: what lets the core put them into streams
        itself, with memory for one more of them; ``None``: it cannot, or has another device's."""
        # What cannot be lent is no error of the operation's, which has been called by now.
        with contextlib.suppress(Exception):
            short = self._short_way_for(core, x.device)
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

    def _short_way_for(self, core: _core.Communicator, device: Any) -> ShortWay | None:
        with self._lock:
            if self._closed:
                return None
            if self._short_way is None and not self._has_no_short_way:
                self._core = core
                self._short_way = short_way_of(self._runtime, self._staging, device)
                self._has_no_short_way = self._short_way is None
            return self._short_way

    def begin_shortly(self, member: Any, x: Any, op: str) -> DeviceWork | None:
        """Has the core put a sum of ``x`` into streams of the communicator's own; ``None``: that is not for it."""
        short, runtime, device = self._short_way, self._runtime, x.device
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
            if self._short_way is not None:
                self._short_way.close(self._core)
        for device, stream in streams_held.values():
            self._pool.give_back(device, stream)

    def _take_over(self) -> None:
        """With the lock: what the core has begun itself."""
        if self._short_way is not None:
            self._outstanding.extend(self._short_way.outstanding(self._core))

    def _check(self, request: _core.Request) -> None:
        try:
            request.wait(0.0)  # one that failed stays the first
        except Exception:
            self._told = True
            if self._short_way is not None:
                self._short_way.way.stop()  # this is what every later call has to say
            raise

    # Inputs do not wait behind other operations' results: those may come from peers who wait for these inputs.
    def _leave(
        self,
        queued: _Queued,
        device: Any,
        tensors: Sequence[Any],
        lane: Hashable,
        *,
        has_input: bool,
        in_parts: bool,
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

    def _put(self, queued: _Queued, parts: Sequence[Part], lane: Hashable) -> Any:
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

    def _put_some(self, queued: _Queued, parts: Sequence[Part]) -> Any:
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
