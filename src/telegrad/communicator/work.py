"""Work, an operation in flight as torch.distributed knows it, and the thread that turns finished ones into futures.

The core's engine never takes Python's lock. It puts the token of a finished request into a queue; the one completion
thread of the process sleeps on that queue without the lock and calls what was left for the token.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from telegrad import _core
from telegrad.communicator.operands import checked_number
from telegrad.errors import TimeoutExpired

if TYPE_CHECKING:
    import torch

    from telegrad.communicator.base import CommunicatorBase


Method = TypeVar("Method", bound=Callable[..., Any])


def with_fast_path(method: Method) -> Method:
    """``all_reduce`` or ``wait``, whose plainest calls the core takes itself."""
    return cast(Method, functools.update_wrapper(_core.FastPath(method), method))


_process = os.getpid()
_POLL_S = 60.0  # the queue wakes the thread; this only bounds the sleep


def process_id() -> int:
    """This process's; looked up again in every forked child."""
    return _process


def never_destroy(native: object) -> None:
    """Keeps a native object for the life of the process. For forked children: its threads do not exist there."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(native))


class CompletionThread:
    """Calls a function for each request, once that is over (successful or not), on one daemon thread."""

    def __init__(self) -> None:
        self._queue = _core.CompletionQueue()
        self._tokens = itertools.count()
        self._waiting: dict[int, tuple[_core.Request, Callable[[], None]]] = {}
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="telegrad-completion", daemon=True)
        self._thread.start()

    def watch(self, request: _core.Request, call: Callable[[], None]) -> None:
        """Calls ``call`` on the thread when ``request`` is over; soon, if it already is."""
        token = next(self._tokens)
        self._waiting[token] = (request, call)
        self._queue.watch(request, token)

    @property
    def is_current(self) -> bool:
        """Whether this thread is it."""
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """Ends the thread after what is over by now has been called."""
        self._closing = True
        self._queue.close()
        if not self.is_current:
            self._thread.join(timeout=10.0)

    def abandon(self) -> None:
        """For a forked child."""
        never_destroy(self._queue)

    def _run(self) -> None:
        while True:
            tokens = self._queue.next(_POLL_S)
            for token in tokens:
                _, call = self._waiting.pop(token)
                try:
                    call()
                except BaseException:  # a caller's fault must not stop the other futures
                    sys.excepthook(*sys.exc_info())
            if self._closing and not tokens:
                return


_lock = threading.Lock()
_thread: CompletionThread | None = None


def completion_thread() -> CompletionThread:
    """The process's thread, started when first asked for."""
    global _thread
    with _lock:
        if _thread is None:
            _thread = CompletionThread()
        return _thread


def stop_completion_thread() -> None:
    """For the end of the interpreter, after all communicators are closed."""
    global _thread
    with _lock:
        thread, _thread = _thread, None
    if thread is not None:
        thread.close()


def _forget_after_fork() -> None:
    global _thread, _lock, _process
    _process = os.getpid()
    if _thread is not None:
        _thread.abandon()
    _thread, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_after_fork)


class Work(_core.WorkState):
    """One collective that was started with ``async_op=True``. Its tensors stay referenced until it is over."""

    __slots__ = ("__weakref__",)

    def __init__(
        self,
        request: _core.Request,
        operation: str,
        rank: int,
        finish: Callable[[_core.Request], Any] | None,
        held: Any = None,
        member: CommunicatorBase | None = None,
    ) -> None:
        """For telegrad's own use. ``finish`` makes the result, always the same one; ``None``: it is ``held``, the
        tensors, which ``member`` keeps if the Work goes before the operation is over."""
        self._request = request
        self._operation = operation
        self._rank = rank
        self._finish = finish
        self._held = held
        self._member = member

    @with_fast_path
    def wait(self, timeout_s: float | None = None) -> bool:
        """Blocks until the operation is over; returns True.

        ``timeout_s``: seconds to wait here; ``None``: only the communicator's own timeout applies. Raises
        ``TimeoutExpired`` if the operation is still running then; it continues, so wait again, or abort the
        communicator. Raises ``ValueError`` for a bad ``timeout_s`` or in a forked child, and the operation's own error:
        ``TransportError`` and its subclasses."""
        if timeout_s is not None:
            timeout_s = check_timeout(timeout_s, "timeout_s")
        self._check_process()
        if not self._request.wait(timeout_s):
            raise TimeoutExpired(
                f"{self._operation} on rank {self._rank} is still running after timeout_s={timeout_s} s: wait "
                "longer, or end it on all ranks with communicator.abort()",
                rank=self._rank,
                operation=self._operation,
            )
        if self._finish is not None:
            self._held = None
        return True

    def _check_process(self) -> None:
        if self._process != _process:
            raise ValueError(
                f"this {self._operation} belongs to process {self._process}, which forked this one: wait there"
            )

    def is_completed(self) -> bool:
        """True once the operation is over, also when it failed."""
        return self._request.done()

    def span_s(self) -> tuple[float, float] | None:
        """When this rank's part of the operation began and ended, in seconds of ``time.perf_counter()``; ``None``
        unless it has succeeded. It is as exact as the engine's looks at the clock, one in every turn. For simulated
        communicators it means nothing."""
        return self._request.span_s()

    def source(self) -> int | None:
        """The rank whose message a ``recv`` got; ``None`` until it is over, and for every other operation."""
        return self._request.source()

    def result(self) -> Any:
        """Waits and returns the result: the tensor that was written, the gathered tensor, or the new sparse vector."""
        self.wait()
        return self._made()

    def _made(self) -> Any:
        return self._held if self._finish is None else self._finish(self._request)

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of ``result()``, completed by telegrad's completion thread.

        A callback of ``then`` runs on that thread too: it must be short and must not wait for other futures.
        ``future.wait()`` raises the operation's own error. For a DDP hook chain with ``then`` (``.then(lambda f:
        f.value())``) so that DDP sees an error as one. Raises ``ImportError`` without torch."""
        try:
            import torch
        except ImportError as error:
            raise ImportError(
                "get_future() needs torch: pip install 'telegrad[torch]', or use wait() and result()"
            ) from error
        future: torch.futures.Future[Any] = torch.futures.Future()

        def complete() -> None:
            try:
                result = self.result()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self._check_process()
        completion_thread().watch(self._request, complete)
        return future

    def __repr__(self) -> str:
        return f"Work({self._operation}, rank={self._rank}, {'completed' if self.is_completed() else 'running'})"


def once(finish: Callable[[_core.Request], Any]) -> Callable[[_core.Request], Any]:
    """``finish``, which takes what can be taken once: called by the first, for all who ask."""
    lock = threading.Lock()
    results: list[Any] = []

    def finish_once(request: _core.Request) -> Any:
        with lock:
            if not results:
                results.append(finish(request))
            return results[0]

    return finish_once


def future_of_all(
    works: Sequence[Work], finish: Callable[[], Any], failed: Callable[[Exception], None]
) -> torch.futures.Future[Any]:
    """A future of ``finish()``, which runs on the completion thread once all ``works`` succeeded.

    An error is raised inside ``then``, so that DDP, which reads futures in C++, reports its type's name and message;
    ``failed`` gets the error itself.
    """
    import torch

    over: torch.futures.Future[None] = torch.futures.Future()
    open_works = [len(works)]  # only the completion thread touches it

    def count_down() -> None:
        open_works[0] -= 1
        if open_works[0] == 0:
            over.set_result(None)

    def conclude(_: torch.futures.Future[None]) -> Any:
        try:
            for work in works:
                work.wait()
            return finish()
        except Exception as error:
            failed(error)
            raise

    outcome = over.then(conclude)
    for work in works:
        completion_thread().watch(work._request, count_down)
    return outcome


def check_timeout(value: float, argument: str) -> float:
    """``value`` if it is a number of seconds above 0, else ``TypeError`` or ``ValueError``."""
    seconds = checked_number(value, argument, "a number of seconds")
    if math.isnan(seconds) or seconds <= 0:
        raise ValueError(f"{argument}={value} must be above 0 seconds")
    return seconds
