"""Communicator: the ranks of a job and the collectives between them, in the manner of torch.distributed."""

from __future__ import annotations

import json
import os
import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from telegrad import _core
from telegrad.comm import lifetime
from telegrad.comm.coo import is_coo, stream_of_coo
from telegrad.comm.reduction import DENSE_ALGORITHMS, SPARSE_ALGORITHMS, algorithm_of, reduction_of
from telegrad.comm.rendezvous import Exchange, check_interface, find_peers
from telegrad.comm.reports import report_folder, report_on_signal
from telegrad.comm.tensors import address, empty_like, movable, reducible
from telegrad.comm.work import Work, check_timeout
from telegrad.errors import TransportError
from telegrad.stream import SparseStream

_DTYPES = {"f32": _core.DType.f32, "bf16": _core.DType.bf16}


class Communicator:
    """One rank's membership in a group of ranks. Made by ``from_torch()`` or ``local()``.

    All ranks call the same operations in the same order. Each operation checks its arguments before anything is sent
    (``TypeError``, ``ValueError``) and raises ``TransportError`` or a subclass when a peer or the network fails; the
    error names the culprit, the same on all survivors, and the communicator can only be closed afterwards. Tensors are
    torch's (CPU) or numpy's, contiguous, and not copied. An open communicator is closed at the interpreter's exit;
    after ``os.fork()`` it is of no use in the child.
    """

    def __init__(self, core: _core.Communicator) -> None:
        self._core = core
        self._process = os.getpid()
        self._closed = False
        self._over = False  # it has failed: what is called from now on never reaches the network
        self._lock = threading.Lock()
        self._in_flight: deque[tuple[_core.Request, Any]] = deque()  # with the tensors that the network may touch
        lifetime.opened(self)

    @classmethod
    def from_torch(
        cls,
        group: Any = None,
        *,
        timeout_s: float = 1800.0,
        liveness_timeout_s: float | None = 8.0,
        interface: str | None = None,
        join_timeout_s: float = 300.0,
    ) -> Communicator:
        """Joins the ranks of a torch process group (``None``: the whole job), which all call this.

        Works inside ``torchrun``, whether or not ``torch.distributed`` is initialised, on any number of nodes.
        ``timeout_s`` bounds each operation; ``liveness_timeout_s``, the same on all ranks, says after how long a silent
        process is dead (``None``: never, for debuggers); ``interface`` names the network interface; ``join_timeout_s``
        bounds the wait for peers. Raises ``RendezvousError`` if no peers are found, ``TransportError`` if one fails
        meanwhile, ``ImportError`` without torch or UCX, ``ValueError`` for bad arguments.
        """
        _check_options(timeout_s, liveness_timeout_s, interface)
        check_timeout(join_timeout_s, "join_timeout_s")
        peers = find_peers(group, join_timeout_s=join_timeout_s)
        return cls.from_exchange(
            peers.rank,
            peers.size,
            peers.exchange,
            timeout_s=timeout_s,
            liveness_timeout_s=liveness_timeout_s,
            interface=interface,
        )

    @classmethod
    def from_exchange(
        cls,
        rank: int,
        size: int,
        exchange: Exchange,
        *,
        timeout_s: float = 1800.0,
        liveness_timeout_s: float | None = 8.0,
        interface: str | None = None,
    ) -> Communicator:
        """Joins ``size`` ranks that find each other by ``exchange``.

        It takes this rank's bytes and returns every rank's, by rank; it is called once. The other arguments and the
        errors are those of ``from_torch``.
        """
        _check_options(timeout_s, liveness_timeout_s, interface)
        for name, value in (("rank", rank), ("size", size)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name}={value!r} must be an int")
        if not callable(exchange):
            raise TypeError(
                f"exchange={exchange!r} must be callable: it takes this rank's bytes and returns every rank's"
            )
        if not 0 <= rank < size:
            raise ValueError(f"rank={rank} of size={size} is no rank: use an int in [0, size)")
        if not hasattr(_core.Communicator, "ucx"):
            raise ImportError(
                "this telegrad was built without UCX (TELEGRAD_UCX=none), so it reaches no other process: install "
                "it again with `pip install .` (bundles UCX) or `pip install . -C cmake.define.TELEGRAD_UCX=system`"
            )
        report_on_signal()
        return cls(
            _core.Communicator.ucx(rank, size, exchange, timeout_s, liveness_timeout_s, interface, report_folder())
        )

    @classmethod
    def local(cls, n: int, *, timeout_s: float = 1800.0) -> list[Communicator]:
        """``n`` ranks inside this process: for tests, and to try things out.

        Use each from its own thread, or all from one thread with ``async_op=True``.
        """
        if isinstance(n, bool) or not isinstance(n, int):
            raise TypeError(f"n={n!r} must be an int: the number of ranks")
        if n < 1:
            raise ValueError(f"n={n} must be at least 1: the number of ranks")
        check_timeout(timeout_s, "timeout_s")
        report_on_signal()
        return [cls(core) for core in _core.Communicator.local(n, timeout_s, report_folder())]

    @property
    def rank(self) -> int:
        """This rank, in [0, world_size)."""
        return self._core.rank

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self._core.size

    @property
    def driver(self) -> str:
        """The network in use: ``"ucx"`` or ``"local"``."""
        return self._core.driver

    def all_reduce(
        self,
        x: Any,
        op: Any = "sum",
        *,
        algorithm: str = "auto",
        async_op: bool = False,
        switch_factor: float = 1.0,
    ) -> Any:
        """Reduces ``x`` over all ranks; every rank gets the same bits.

        A dense ``x`` (float32, or torch bfloat16, any shape, the same on all ranks) is overwritten with the result,
        and ``None`` returned. For a SparseStream or a ``torch.sparse_coo`` tensor the result is a new one, returned;
        ranks may hold any number of entries. With ``async_op=True`` a Work is returned; ``work.result()`` gives the
        tensor or stream. ``op``: ``"sum"`` or ``"avg"``. ``algorithm``: ``"auto"``, dense ``"ring"`` or
        ``"recursive_doubling"``, sparse ``"split_allgather"``. ``switch_factor``: a sparse sum is held densely once
        it has more than this times the number of entries at which both take the same bytes.
        """
        if isinstance(x, SparseStream):
            return self._reduce_stream(x, op, algorithm, switch_factor, async_op, lambda total: total)
        if is_coo(x):
            stream, back = stream_of_coo(x)
            return self._reduce_stream(stream, op, algorithm, switch_factor, async_op, back)
        core, buffer = self._usable(), reducible(x, "x")
        reduction, chosen = reduction_of(op), algorithm_of(algorithm, DENSE_ALGORITHMS)
        request = core.all_reduce(
            buffer.pointer, buffer.pointer, buffer.elements, buffer.dtype, reduction, chosen, not async_op
        )
        if async_op:
            return self._work(request, "all_reduce", x, lambda _: x)
        self._block(request, x)
        return None

    def all_reduce_into(
        self,
        stream: SparseStream,
        out: Any,
        op: Any = "sum",
        *,
        algorithm: str = "auto",
        async_op: bool = False,
        switch_factor: float = 1.0,
    ) -> Work | None:
        """Writes the dense reduction of all ranks' streams into ``out``.

        ``out``: ``stream.n`` elements of the values' dtype, any shape. Faster than making a sparse result dense; it
        must not share memory with the stream.
        """
        if not isinstance(stream, SparseStream):
            raise TypeError(
                f"stream is a {type(stream).__name__}: it must be a SparseStream; dense tensors go to all_reduce()"
            )
        core, buffer = self._usable(), reducible(out, "out")
        dtype = _DTYPES[stream.dtype]
        if buffer.dtype != dtype:
            raise TypeError(f"out has dtype {out.dtype} but the stream holds {stream.dtype}: give both the same")
        if buffer.elements != stream.n:
            raise ValueError(
                f"out has {buffer.elements} elements but the stream has n={stream.n}: give them the same length"
            )
        indices, values = stream.raw_indices, stream.raw_values
        for part in (indices, values):
            if address(part) < buffer.pointer + buffer.nbytes and buffer.pointer < address(part) + part.nbytes:
                raise ValueError("out shares memory with the stream: give it memory of its own")
        request = core.all_reduce_sparse_into(
            address(indices),
            address(values),
            indices.size,
            stream.n,
            dtype,
            reduction_of(op),
            algorithm_of(algorithm, SPARSE_ALGORITHMS),
            _checked_factor(switch_factor),
            buffer.pointer,
            not async_op,
        )
        held = (indices, values, out)
        if async_op:
            return self._work(request, "all_reduce_into", held, lambda _: out)
        self._block(request, held)
        return None

    def all_gather(self, x: Any, *, async_op: bool = False) -> Any:
        """All ranks' ``x`` (any dtype; the same shape and dtype on all), stacked: shape ``(world_size, *x.shape)``."""
        core, buffer = self._usable(), movable(x, "x", writable=False)
        out = empty_like(x, (self.world_size, *x.shape))
        request = core.all_gather(
            buffer.pointer, movable(out, "out").pointer, buffer.nbytes, buffer.dtype, not async_op
        )
        if async_op:
            return self._work(request, "all_gather", (x, out), lambda _: out)
        self._block(request, (x, out))
        return out

    def broadcast(self, x: Any, root: int, *, async_op: bool = False) -> Work | None:
        """Overwrites ``x`` (any dtype; same shape and dtype on all ranks) with rank ``root``'s."""
        if isinstance(root, bool) or not isinstance(root, int) or not 0 <= root < self.world_size:
            raise ValueError(f"root={root!r} is no rank: use an int in [0, {self.world_size})")
        core, buffer = self._usable(), movable(x, "x", writable=root != self.rank)
        request = core.broadcast(buffer.pointer, buffer.nbytes, buffer.dtype, root, not async_op)
        if async_op:
            return self._work(request, "broadcast", x, lambda _: x)
        self._block(request, x)
        return None

    def barrier(self, *, async_op: bool = False) -> Work | None:
        """Returns once every rank has called it."""
        request = self._usable().barrier(not async_op)
        if async_op:
            return self._work(request, "barrier", None, lambda _: None)
        self._block(request, None)
        return None

    def stats(self) -> dict[str, int]:
        """What this rank has sent and received since it joined: operations, messages, bytes."""
        return dict(self._usable().counters())

    def report(self) -> dict[str, Any]:
        """What this rank knows of its last operations and of its peers: who called what, and who waits for whom.

        The same is written to a file in ``TELEGRAD_REPORT_DIR`` by every rank when an operation times out, and when the
        process gets SIGUSR1 (``TELEGRAD_REPORT_SIGNAL`` names another signal, or ``none``). ``telegrad report`` merges
        those of all ranks into one verdict; docs/errors.md describes the form.
        """
        report: dict[str, Any] = json.loads(self._usable().report())
        return report

    def abort(self, reason: str = "aborted by its program") -> None:
        """Ends all operations on all ranks with a ``TransportError`` that says ``reason``. ``close()`` is left to
        do.
        """
        if not self._closed and self._process == os.getpid():
            self._core.abort(reason)

    def close(self) -> None:
        """Leaves the group; operations still running fail.

        A second call does nothing. Never raises for a failed peer.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._process != os.getpid():
            return
        lifetime.closed(self)
        self._core.close()
        self._in_flight.clear()  # the network touches nothing any more

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.abort(f"{type(error).__name__} on rank {self.rank}: {error}")
        self.close()

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        return f"Communicator(rank={self.rank}, world_size={self.world_size}, driver={self.driver!r}{state})"

    def __reduce__(self) -> Any:
        raise TypeError("a Communicator cannot be pickled or copied: make one in each process with from_torch()")

    def _reduce_stream(
        self,
        stream: SparseStream,
        op: Any,
        algorithm: str,
        switch_factor: float,
        async_op: bool,
        convert: Callable[[SparseStream], Any],
    ) -> Any:
        core = self._usable()
        indices, values = stream.raw_indices, stream.raw_values
        request = core.all_reduce_sparse(
            address(indices),
            address(values),
            indices.size,
            stream.n,
            _DTYPES[stream.dtype],
            reduction_of(op),
            algorithm_of(algorithm, SPARSE_ALGORITHMS),
            _checked_factor(switch_factor),
            not async_op,
        )

        def finish(done: _core.Request) -> Any:
            sum_indices, sum_values = done.sparse_result()
            return convert(SparseStream.trusted(sum_indices, sum_values, stream.n, of_torch=stream.of_torch))

        if async_op:
            return self._work(request, "all_reduce", (indices, values), finish)
        self._block(request, (indices, values))
        return finish(request)

    def _work(self, request: _core.Request, operation: str, held: Any, finish: Callable[[_core.Request], Any]) -> Work:
        if not self._over:
            self._hold(request, held)
        return Work(request, operation, self._core.rank, finish)

    def _block(self, request: _core.Request, held: Any) -> None:
        try:
            request.wait()
        except BaseException as error:  # also Ctrl-C: the network may still use the tensors
            if not self._over:
                self._hold(request, held)
            self._over = self._over or isinstance(error, TransportError)
            raise

    def _hold(self, request: _core.Request, held: Any) -> None:
        """Keeps tensors alive until their request succeeded; those of a failed one until close()."""
        with self._lock:
            flying = self._in_flight
            while flying and flying[0][0].done():
                if not _succeeded(flying[0][0]):
                    self._over = True
                    break
                flying.popleft()
            flying.append((request, held))

    def _usable(self) -> _core.Communicator:
        if self._process != os.getpid():
            raise ValueError(
                f"this Communicator belongs to process {self._process}, which forked this one: make a new one here, "
                "or start child processes with the 'spawn' method"
            )
        if self._closed:
            raise ValueError(f"this Communicator (rank {self._core.rank}) is closed: make a new one")
        return self._core


def _succeeded(request: _core.Request) -> bool:
    try:
        return request.wait(0.0)
    except Exception:
        return False


def _check_options(timeout_s: float, liveness_timeout_s: float | None, interface: str | None) -> None:
    check_timeout(timeout_s, "timeout_s")
    if liveness_timeout_s is not None:
        check_timeout(liveness_timeout_s, "liveness_timeout_s")
    check_interface(interface)


def _checked_factor(value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"switch_factor={value!r} must be a number")
    if not value >= 0:
        raise ValueError(
            f"switch_factor={value} must not be negative: 1.0 switches to dense where both take the same bytes"
        )
    return float(value)
