"""What the ranks of test_exit.py do: rank 1 leaves in some way while rank 0 waits for it."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from typing import Any

import numpy as np

from telegrad import Communicator
from telegrad.communicator import groups
from telegrad.errors import TransportError
from telegrad.launch import join


def leave(how: str) -> None:
    comm = join()
    if how == "exit among others":
        for _ in range(3):  # which close before the one that is waited in
            comm.split(0)
        comm = comm.split(0) or comm
    if comm.rank == 1:
        comm.barrier()
        time.sleep(0.3)  # rank 0 is waiting by then
        if how == "exception":
            raise LookupError("no such file: data.bin")
        if how == "with":
            with comm:
                raise LookupError("no such file: data.bin")
        sys.exit(0)
    start_s = time.monotonic()
    try:
        comm.barrier()  # a slow rank may hear of the end here already
        start_s = time.monotonic()
        comm.all_reduce(np.ones(8, np.float32))
    except TransportError as error:
        print(f"{time.monotonic() - start_s} {error}")
    else:
        print("no error")


def interrupted(call: str) -> None:
    comm = join()
    connected = groups._connected

    def connect(*arguments: Any) -> Any:
        if comm.rank == 1:
            time.sleep(30)
        print("waiting", flush=True)
        return connected(*arguments)

    groups._connected = connect
    try:
        if call == "split":
            comm.split(0)
        if comm.rank == 1:
            time.sleep(30)
        print("waiting", flush=True)
        comm.all_reduce(np.ones(8, np.float32))
    except KeyboardInterrupt:
        print("interrupted", flush=True)


def daemon_threads() -> None:
    """Ends while threads that nobody waits for are in calls, or come out of them."""
    rank, _silent = Communicator.local(2)
    entered = threading.Barrier(3)

    def call_and_wait(async_op: bool) -> None:
        entered.wait()
        with contextlib.suppress(TransportError):
            work = rank.all_reduce(np.ones(8, np.float32), async_op=async_op)
            work.wait() if work else None

    for async_op in (False, True):
        threading.Thread(target=call_and_wait, args=(async_op,), daemon=True).start()
    entered.wait()
    time.sleep(0.05)  # in their calls by then
