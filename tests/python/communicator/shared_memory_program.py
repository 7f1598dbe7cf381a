"""A rank that joins, sums, and prints as JSON whether it shares memory with all others, and has segments of UCX's."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
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


def _own_tcp_sockets() -> int:
    """That this process holds."""
    inodes = set()
    for version in ("tcp", "tcp6"):
        lines = Path(f"/proc/self/net/{version}").read_text().splitlines()[1:]
        inodes |= {f"socket:[{line.split()[9]}]" for line in lines}
    held = []
    for one in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one by which they are listed
            held.append(os.readlink(one))
    return len(inodes.intersection(held))


def split() -> None:
    """How many TCP sockets a group takes, and its sum; ranks that say so have no memory left for it."""
    with join(timeout_s=30.0, join_timeout_s=30.0) as communicator:
        communicator.barrier()
        before = _own_tcp_sockets()
        if os.environ.get("FILLED"):
            subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", "/dev/shm"], check=True)
        with communicator.split(communicator.rank // 2) as part:
            x = np.ones(1 << 20, np.float32)
            part.all_reduce(x)
            part.barrier()
            found = {"sum": float(x[-1]), "tcp": _own_tcp_sockets() - before, "memory": part._usable().shares_memory}
            communicator.barrier()  # nobody has closed its part
    print(json.dumps(found), flush=True)
