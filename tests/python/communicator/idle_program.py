"""What the ranks of test_idle.py do: nothing, as most communicators do most of the time."""

from __future__ import annotations

import sys
import time

import numpy as np

from telegrad.launch import join


def rest(seconds: str) -> None:
    with join() as comm:
        comm.all_reduce(np.ones(1000, np.float32))
        comm.barrier()
        before_s, start_s = time.process_time(), time.monotonic()
        time.sleep(float(seconds))
        used_s, passed_s = time.process_time() - before_s, time.monotonic() - start_s
        print(used_s / passed_s)
        sys.stdout.flush()
        comm.barrier()
