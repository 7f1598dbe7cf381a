"""The process's completion thread: turns finished operations into finished futures.

The core's engine never takes Python's lock. It puts the token of a finished request into a queue; the one thread here
sleeps on that queue without the lock and calls what was left for the token.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import sys
import threading
from collections.abc import Callable

from telegrad import _core

_POLL_S = 60.0  # the queue wakes the thread; this only bounds the sleep


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
    global _thread, _lock
    if _thread is not None:
        _thread.abandon()
    _thread, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_after_fork)
