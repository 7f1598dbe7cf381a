"""A process that has imported what ranks import, and from which ranks are forked: it saves each of them the imports.

``python rank_server.py DESCRIPTOR MODULE…``. A message of forked_ranks.py on the socket ``DESCRIPTOR`` says what a rank
is to run, and brings its descriptors; the answer is the new process's id. The rank is forked twice, so that it is an
orphan, which the kernel gives to the pytest process (forked_ranks.py). This process must have no second thread, must
have made nothing that a fork shares by mistake, and stands for all that ``python -m telegrad.launch.rank_main`` does
before its first line.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import json
import operator
import os
import runpy
import signal
import socket
import sys
import tempfile
import threading
import time
import types
from typing import Any

MOST_BYTES = 1 << 18
MOST_DESCRIPTORS = 16
READY = b"ready"
SAMPLE_S = 0.002
"""Of ranks' sums that a synchronizer times for a plan, while it computes: 40 ms took half of the processor time of its
tests, none of which knows what plan comes out."""
_PR_SET_PDEATHSIG = 1
_CLONE_NEWNS, _CLONE_NEWIPC, _CLONE_NEWNET = 0x20000, 0x8000000, 0x40000000
_MS_REC, _MS_SLAVE, _MNT_DETACH = 0x4000, 0x80000, 2


def serve(connection: socket.socket) -> dict[str, Any] | None:
    """What to run, in each new rank; None, in the server, once nobody asks any more."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, MOST_BYTES, MOST_DESCRIPTORS)
        if not message:
            return None
        reading, writing = os.pipe()
        between = os.fork()
        if between == 0:
            between = os.getpid()
            rank = os.fork()
            if rank:
                os.write(writing, str(rank).encode())
                os._exit(0)
            while os.getppid() == between:
                time.sleep(0.0002)
            asked: dict[str, Any] = json.loads(message)
            _place(dict(zip(asked["descriptors"], descriptors, strict=True)))
            return asked
        for descriptor in (writing, *descriptors):
            os.close(descriptor)
        os.waitpid(between, 0)  # from here on the rank is the pytest process's
        connection.send(os.read(reading, 32))
        os.close(reading)


def _place(descriptors: dict[int, int]) -> None:
    """Gives each its number, and closes all others."""
    above = 1 + max(*descriptors, *map(int, os.listdir("/proc/self/fd")))
    moved = {number: fcntl.fcntl(descriptor, fcntl.F_DUPFD, above) for number, descriptor in descriptors.items()}
    os.closerange(3, above)
    for number, descriptor in moved.items():
        os.dup2(descriptor, number)
    os.closerange(above, 1 + max(moved.values()))


def _enter(network: str, memory: str = "") -> None:
    """Does what ``ip netns exec`` and ``nsenter --ipc`` do: among the former is a ``/sys`` that shows the network."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(name: str, *arguments: Any) -> None:
        if getattr(libc, name)(*arguments) < 0:
            raise OSError(ctypes.get_errno(), f"{name}{arguments}")

    for path, kind in ((f"/run/netns/{network}", _CLONE_NEWNET), (memory, _CLONE_NEWIPC)):
        if path:
            with open(path) as namespace:
                call("setns", namespace.fileno(), kind)
    call("unshare", _CLONE_NEWNS)
    call("mount", b"none", b"/", None, _MS_SLAVE | _MS_REC, None)
    call("umount2", b"/sys", _MNT_DETACH)
    call("mount", network.encode(), b"/sys", b"sysfs", 0, None)


def become(asked: dict[str, Any], paths: list[str]) -> None:
    """Makes this process what a fresh one with this environment would be, and runs the rank."""
    os.setpgid(0, 0)
    if asked["namespaces"]:
        _enter(**asked["namespaces"])
    os.chdir(asked["folder"])
    os.sched_setaffinity(0, asked["cores"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    sys.argv[:] = ["-m", *asked["arguments"]]
    own = os.environ.get("PYTHONPATH", "").split(os.pathsep) if os.environ.get("PYTHONPATH") else []
    sys.path[:] = list(dict.fromkeys([os.getcwd(), *own, *paths]))
    importlib.invalidate_caches()
    tempfile.tempdir = None  # TMPDIR may be another
    for name, seed in (("numpy", "random.seed"), ("torch", "seed")):  # Python's own generator sees to itself
        if name in sys.modules:
            operator.attrgetter(seed)(sys.modules[name])()
    sys.modules["__main__"] = types.ModuleType("__main__")
    signal.pthread_sigmask(signal.SIG_SETMASK, asked["blocked"])
    runpy._run_module_as_main("telegrad.launch.rank_main")  # type: ignore[attr-defined]  # what ``-m`` calls
    if "torch" in sys.modules:
        _exit_quickly()


def _exit_quickly() -> None:
    """As Python exits, but for taking its modules apart: of torch that copies most of the server's memory."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def main() -> None:
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    connection = socket.socket(fileno=int(sys.argv[1]))
    for module in sys.argv[2:]:
        importlib.import_module(module)
    if "telegrad.synchronizer" in sys.modules:
        importlib.import_module("telegrad.tuning.group_cost")._SAMPLE_S = SAMPLE_S
    threads = os.listdir("/proc/self/task")
    if len(threads) > 1:
        raise SystemExit(f"{sys.argv[2:]} started {len(threads) - 1} threads, which a forked rank would not have")
    left_open = {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, connection.fileno()}
    if any(os.path.exists(f"/proc/self/fd/{number}") for number in left_open):
        raise SystemExit(f"{sys.argv[2:]} left descriptors open: {sorted(left_open)}")
    gc.collect()
    gc.freeze()  # else the first collection in each rank would copy the pages of all objects
    # The signal is sent when the thread ends that has started this process; from here on the socket's end says it.
    libc.prctl(_PR_SET_PDEATHSIG, 0)
    connection.send(READY)
    paths = sys.path[1:]  # without this file's folder
    asked = serve(connection)
    if asked is not None:
        connection.detach()  # closed, and its number may be another's
        become(asked, paths)


if __name__ == "__main__":
    main()
