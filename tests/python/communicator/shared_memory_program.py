"""A rank that joins, sums, and prints as JSON whether it shares memory with all others, and has segments of UCX's."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from telegrad.launch import join


def meet() -> None:
    with join(timeout_s=30.0, join_timeout_s=30.0) as communicator:
        x = np.ones(1 << 20, np.float32)
        communicator.all_reduce(x)
        mapped = Path("/proc/self/maps").read_text()
        found = {
            "sum": float(x[-1]),
            "shares_memory": communicator._usable().shares_memory,
            "has_segments": "ucx_shm_posix" in mapped or "SYSV" in mapped,
        }
    print(json.dumps(found), flush=True)
