"""CommunicatorBase: one rank's hold on the core's communicator, from its first operation to its close, and the end of
those that nobody closed: at the interpreter's exit, and in forked children.

It keeps tensors alive while the network may touch them; which operations there are, it must not know.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from types import TracebackType
from typing import Any, Self, TypedDict, cast

from telegrad import _core
from telegrad.communicator.cuda.runtime import pool_of, runtime_of
from telegrad.communicator.cuda.staging import staging_of, succeeded
from telegrad.communicator.cuda.transfers import Begin, DeviceWork, StagedOperation, Transfers
from telegrad.communicator.operands import on_device
from telegrad.communicator.trace import start_trace, write_trace
from telegrad.communicator.work import Work, never_destroy, process_id, stop_completion_thread
from telegrad.errors import TransportError

forked_from_joined = False
"""Whether this process was forked from one that was joined to others over UCX: its thread for what comes from the
network is not here, and UCX does not begin another."""

# Strong references: the network must not lose its buffers because a variable went out of scope.
_open: dict[int, CommunicatorBase] = {}


def opened(communicator: CommunicatorBase) -> None:
    """From here on the communicator lives until ``closed()``."""
    _open[id(communicator)] = communicator


def closed(communicator: CommunicatorBase) -> None:
    """The communicator takes care of itself again."""
    _open.pop(id(communicator), None)


def _close_all() -> None:
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    communicators = list(_open.values())
    # Peers hear on all of them that this rank goes, before it waits for them on one.
    for communicator in communicators:
        if error is not None:  # an exception ends this process: the peers should hear why, and at once
            reason = f"rank {communicator.rank} ended: {type(error).__name__}: {error}"
            _attempt(communicator, functools.partial(communicator.abort, reason))
        _attempt(communicator, communicator._part)
    for communicator in communicators:
        _attempt(communicator, communicator.close)
    stop_completion_thread()
    _core.leave_threads_behind()


def _attempt(communicator: CommunicatorBase, call: Callable[[], None]) -> None:
    try:
        call()
    except Exception as failure:
        print(f"telegrad: closing {communicator!r} at exit failed: {failure}", file=sys.stderr)


def _forget_after_fork() -> None:
    global forked_from_joined
    forked_from_joined = forked_from_joined or any(one.driver == "ucx" for one in _open.values())
    for communicator in _open.values():
        never_destroy(communicator._core)
        communicator._live = None
    _open.clear()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_forget_after_fork)


class Stats(TypedDict):
    """The counters of one rank for a communicator and those that were split from it. Messages and bytes are payloads of
    operations, without headers and heartbeats."""

    operations: int
    """Begun so far."""
    in_flight: int
    """Of these, not yet over."""
    messages_refused: int
    """Connections and messages that did not prove ``TELEGRAD_JOB_KEY``."""
    messages_sent: int
    messages_received: int
    bytes_sent: int
    bytes_received: int
    bytes_sent_to: list[int]
    """By rank; this rank's own entry is 0."""
    bytes_received_from: list[int]
    """By rank."""
    waiting_s: float
    """Seconds that threads of the program spent in blocking calls and in ``Work.wait()``, added up. Simulated ranks do
    not wait."""


class CommunicatorCounts:
    """The counters of a communicator, and of all that were split from it, also of those that are closed.

    ``parent``: of the communicator that it was split from, in which its ranks are ``members``.
    """

    def __init__(
        self, core: _core.Communicator, parent: CommunicatorCounts | None = None, members: Sequence[int] = ()
    ) -> None:
        self._core: _core.Communicator | None = core  # until it is closed
        self._parent, self._members = parent, members
        self._own: Stats = core.counters()  # when it was closed
        self._of_closed = _nothing_like(self._own)
        self.parts: list[CommunicatorCounts] = []
        if parent is not None:
            with _counting:
                parent.parts.append(self)

    def own(self) -> Stats:
        """Of this communicator alone."""
        core = self._core
        found: Stats = self._own if core is None else core.counters()
        return found

    def total(self) -> Stats:
        """With all that were split from it."""
        with _counting:
            total, parts = _sum_of(_nothing_like(self._own), self._of_closed), [*self.parts]
        _sum_of(total, self.own())
        for one in parts:
            _sum_of(total, one.total(), one._members)
        return total

    def close(self) -> None:
        """The communicator is closed."""
        if self._core is not None:
            last: Stats = self._core.counters()
            last["in_flight"] = 0
            self._own, self._core = last, None
            with _counting:
                self._leave_to_parent()

    def _leave_to_parent(self) -> None:
        parent = self._parent
        if parent is None or self._core is not None or self.parts or self not in parent.parts:
            return
        parent.parts.remove(self)
        _sum_of(parent._of_closed, self._own, self._members)
        _sum_of(parent._of_closed, self._of_closed, self._members)
        parent._leave_to_parent()


_counting = threading.Lock()


def _nothing_like(stats: Stats) -> Stats:
    zeros = {key: [0] * len(value) if isinstance(value, list) else 0 for key, value in stats.items()}
    return cast(Stats, zeros)


def _sum_of(total: Stats, other: Stats, members: Sequence[int] = ()) -> Stats:
    """``total``, to which ``other`` is added. ``members``: the ranks there of the ranks of ``other``, if others."""
    into, added = cast(dict[str, Any], total), cast(dict[str, Any], other)
    for key, value in added.items():
        if isinstance(value, list):
            for peer, count in zip(members or range(len(value)), value, strict=True):
                into[key][peer] += count
        else:
            into[key] += value
    return total


_CROWDED = 64  # operations whose tensors are kept, before those behind the first are looked at


class CommunicatorBase:
    """The common part of all operations of a Communicator, and its end."""

    def __init__(self, core: _core.Communicator) -> None:
        self._core = core
        self._counts = CommunicatorCounts(core)
        self._process = process_id()
        self._live: _core.Communicator | None = core  # until close(), and not in a forked child
        self._closed = False
        self._over = False  # it has failed: what is called from now on never reaches the network
        self._lock = threading.Lock()
        self._kept: deque[tuple[_core.Request, Any]] = deque()  # with the tensors that the network may touch
        self._abandoned: list[Any] = []  # the same of calls that a signal ended
        self._untouched = False  # closed: the network touches nothing any more
        self._crowded = _CROWDED
        self._transfers: dict[str, Transfers] = {}  # by kind of device
        self._dependents: weakref.WeakSet[CommunicatorBase] = (
            weakref.WeakSet()
        )  # which a program knows by this one alone
        self._device_fast_path: _core.DeviceFastPath | None = None  # by which the core begins sums itself
        self._trace_path = start_trace(core)
        opened(self)

    @property
    def rank(self) -> int:
        """This rank, in [0, world_size)."""
        return self._core.rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self._core.size

    @property
    def driver(self) -> str:
        """The network in use: ``"ucx"``, ``"mpi"`` or ``"local"``."""
        return self._core.driver

    def stats(self, *, own: bool = False) -> Stats:
        """The counters of this rank since it joined: of this communicator, and of those that were split from it.

        A Synchronizer has one of these. They count after they were closed, too. ``own``: of this communicator alone.
        """
        self._usable()
        return self._counts.own() if own else self._counts.total()

    def synchronize(self) -> None:
        """Waits until all operations on device tensors that were called here have been communicated.

        Raises the error of the first that failed. It does not wait for CUDA streams, which still copy results to the
        device. ``close()`` ends operations that are under way, so call this first, or wait for the stream."""
        self._usable()
        for transfers in list(self._transfers.values()):
            transfers.synchronize()

    def abort(self, reason: str = "aborted by its program") -> None:
        """Ends all operations on all ranks with a ``TransportError`` that says ``reason``. Operations that this rank
        has finished are finished by the others too, if within 5 s. Call ``close()`` afterwards. Raises ``TypeError``
        unless ``reason`` is a string."""
        if not isinstance(reason, str):
            raise TypeError(f"reason={reason!r} must be a str, which the other ranks' errors will say")
        core = self._live  # once: another thread may close it
        if core is not None:
            core.abort(reason.encode(errors="backslashreplace").decode())
            for one in list(self._dependents):
                one.abort(reason)

    def close(self) -> None:
        """Leaves the group; operations still running fail.

        A second call does nothing. It never raises for a failed peer. It warns (``RuntimeWarning``) if an operation on
        device tensors has failed and no call has raised that."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._live is None:  # it belongs to the process that forked this one
            return
        self._live = None
        closed(self)
        for one in list(self._dependents):  # ranks that wait there would not come to close this one
            one._part()
        for transfers in self._transfers.values():
            transfers.conclude()
        self._core.close()
        self._counts.close()
        with self._lock:
            self._untouched, kept, self._kept = True, self._kept, deque()
        kept.clear()
        self._abandoned.clear()
        if self._trace_path is not None:
            write_trace(self._trace_path, self._core)
        failures = [transfers.untold_failure() for transfers in self._transfers.values()]
        self._device_fast_path = None
        for transfers in self._transfers.values():
            transfers.close()
        for failure in failures:
            if failure is not None:
                warnings.warn(
                    f"an operation on device tensors has failed, and its tensor holds no result: {failure}; call "
                    "synchronize() before close() to hear of it in time",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def _part(self) -> None:
        """The part of ``close()`` that waits for nobody: peers hear that this rank goes."""
        if self._live is not None:
            for transfers in self._transfers.values():
                transfers.conclude()
            self._core.part()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is not None:
                self.abort(f"{type(error).__name__} on rank {self.rank}: {error}")
        finally:
            self.close()

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        return f"Communicator(rank={self.rank}, world_size={self.world_size}, driver={self.driver!r}{state})"

    def __reduce__(self) -> Any:
        raise TypeError("a Communicator cannot be pickled or copied: make one in each process with from_torch()")

    def _work(self, request: _core.Request, operation: str, held: Any, finish: Callable[[_core.Request], Any]) -> Work:
        if self._kept:
            self._let_go()
        return Work(request, operation, self._core.rank, finish, held, None if self._over else self)

    def _begun(self, request: _core.Request, operation: str, held: Any, result: Any, async_op: bool) -> Work | None:
        """With ``async_op`` a Work of ``result``, else waits."""
        if async_op:
            return self._work(request, operation, held, lambda _: result)
        self._block(request, held)
        return None

    def _run(
        self,
        operation: str,
        begin: Begin,
        at: tuple[int, int, Any],
        parts: Callable[[], list[StagedOperation]],
        tensors: tuple[Any, ...],
        result: Any,
        async_op: bool,
        lane: Hashable = None,
    ) -> Work | None:
        """An operation that ``begin`` hands to the engine. In host memory it is begun at once, with the addresses and
        the length ``at``; on a device, where ``parts()`` are staged. ``tensors``: all that it uses, some of them
        perhaps ``None``."""
        used = tuple(tensor for tensor in tensors if tensor is not None)
        if on_device(used[0]):
            return self._run_on_device(operation, parts(), used, result, async_op, lane)
        return self._begun(begin(*at, None), operation, tensors, result, async_op)

    def _block(self, request: _core.Request, held: Any) -> None:
        try:
            request.wait()
        except BaseException as error:  # also Ctrl-C: the network may still use the tensors
            if not self._over:
                self._keep(request, held)
            self._over = self._over or isinstance(error, TransportError)
            raise

    def _run_on_device(
        self,
        operation: str,
        parts: list[StagedOperation],
        tensors: tuple[Any, ...],
        result: Any,
        async_op: bool,
        lane: Hashable = None,
    ) -> DeviceWork | None:
        """Puts it into a stream; returns a Work with ``async_op``. ``tensors``: all on one device.
        ``lane``: of operations that may have to wait for one another; None is that of all ranks' ones."""
        device = tensors[0].device
        transfers = self._transfers_of(operation, tensors)
        return transfers.run(operation, device, parts, tensors, self.abort, result=result, async_op=async_op, lane=lane)

    def _begin_shortly(self, x: Any, op: str) -> DeviceWork | None:
        """See ``Transfers.begin_shortly``. Called by the core, where ``_device_fast_path`` has streams."""
        if not _is_plain(x):
            return None
        transfers = self._transfers.get(x.device.type)
        return None if transfers is None else transfers.begin_shortly(self, x, op)

    def _transfers_of(self, operation: str, tensors: tuple[Any, ...]) -> Transfers:
        """Raises ``ValueError`` for tensors that an operation must not write."""
        device_type = tensors[0].device.type
        transfers = self._transfers.get(device_type)
        if transfers is None:
            transfers = self._new_transfers(operation, device_type)
        for tensor in tensors:
            if tensor.is_inference() and not sys.modules["torch"].is_inference_mode_enabled():
                raise ValueError(
                    f"{operation}() was given a tensor that was made in inference mode, which nothing may write "
                    "outside of it: call it there, or give a clone"
                )
        return transfers

    def _new_transfers(self, operation: str, device_type: str) -> Transfers:
        if self.driver == "sim":
            raise ValueError(f"{operation}() of device tensors needs real time: give simulated ranks host tensors")
        with self._lock:
            if self._closed:  # its streams would stay
                self._usable()
            if device_type not in self._transfers:
                runtime = runtime_of(device_type)
                self._transfers[device_type] = Transfers(
                    runtime,
                    staging_of(runtime),
                    pool_of(runtime),
                    self.rank,
                    peers_apart=self.driver != "local" or self.world_size == 1,
                )
            return self._transfers[device_type]

    def _keep(self, request: _core.Request, held: Any) -> None:
        """Keeps the tensors of an operation that nobody else keeps until it has succeeded, and somewhat longer; those
        of a failed one until close(). Called from wherever a Work ends: in any thread, also within itself."""
        if self._untouched:
            return
        self._kept.append((request, held))
        self._let_go()

    def _let_go(self) -> None:
        """Of what is kept for operations that have succeeded: the oldest, and all where there are many."""
        if self._over or not self._lock.acquire(blocking=False):
            return
        try:
            kept = self._kept
            while kept and kept[0][0].done() and not self._over:
                self._over = not succeeded(kept[0][0])
                if not self._over:
                    kept.popleft()
            if len(kept) >= self._crowded:  # one that is long under way is before all others
                for _ in range(len(kept)):
                    entry = kept.popleft()
                    if not entry[0].done() or not succeeded(entry[0]):
                        kept.append(entry)
                self._crowded = 2 * len(kept) + _CROWDED
        finally:
            self._lock.release()

    def _usable(self) -> _core.Communicator:
        core = self._live
        if core is not None:
            return core
        if self._process != process_id():
            raise ValueError(
                f"this Communicator belongs to process {self._process}, which forked this one: start child "
                "processes that need one of their own with the 'spawn' method"
            )
        raise ValueError(f"this Communicator (rank {self._core.rank}) is closed: make a new one")


def _is_plain(x: Any) -> bool:
    """Whether it is a tensor of torch's own class: others may have streams, or memory, of another kind."""
    torch = sys.modules["torch"]
    return type(x) is torch.Tensor or type(x) is torch.nn.Parameter
