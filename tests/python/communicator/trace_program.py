"""What the ranks of test_trace.py do."""

from __future__ import annotations

import os
import signal

import numpy as np

from telegrad.errors import TransportError
from telegrad.launch import join


def work() -> None:
    with join() as comm:
        x = np.ones(1000, np.float32)
        flying = [comm.all_reduce(np.ones(100, np.float32), async_op=True) for _ in range(3)]
        comm.all_reduce(x, algorithm="ring")
        for one in flying:
            one.wait()


def one_dies() -> None:
    comm = join()
    comm.barrier()
    try:
        comm.barrier()  # who has come through knows that the others have finished the first
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        comm.all_reduce(np.ones(8, np.float32))
    except TransportError:
        print("heard")
