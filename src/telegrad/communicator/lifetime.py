"""The end of communicators that nobody closed: at the interpreter's exit, and in forked children."""

from __future__ import annotations

import atexit
import functools
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from telegrad import _core
from telegrad.communicator.completion import never_destroy, stop_completion_thread

if TYPE_CHECKING:
    from telegrad.communicator.member import Member

process = os.getpid()
"""This process's id; looked up again in every forked child."""

forked_from_joined = False
"""Whether this process was forked from one that was joined to others over UCX: its thread for what comes from the
network is not here, and UCX does not begin another."""

# Strong references: the network must not lose its buffers because a variable went out of scope.
_open: dict[int, Member] = {}


def opened(communicator: Member) -> None:
    """From here on the communicator lives until ``closed()``."""
    _open[id(communicator)] = communicator


def closed(communicator: Member) -> None:
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


def _attempt(communicator: Member, call: Callable[[], None]) -> None:
    try:
        call()
    except Exception as failure:
        print(f"telegrad: closing {communicator!r} at exit failed: {failure}", file=sys.stderr)


def _forget_after_fork() -> None:
    global process, forked_from_joined
    process = os.getpid()
    forked_from_joined = forked_from_joined or any(one.driver == "ucx" for one in _open.values())
    for communicator in _open.values():
        never_destroy(communicator._core)
        communicator._live = None
    _open.clear()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_forget_after_fork)
