"""What the ranks of test_forked_ranks.py tell of themselves."""

from __future__ import annotations

import atexit
import gc
import json
import os
import random
import signal
import socket
import sys
import tempfile
import threading

import numpy as np


def tell() -> None:
    signals = {number: str(signal.getsignal(number)).partition(" at ")[0] for number in signal.valid_signals()}
    facts = {
        "is_a_child": os.getppid() == int(os.environ["TELEGRAD_LAUNCHER"]),
        "leads": os.getpgid(0) == os.getpid(),
        "session": os.getsid(0),
        "folder": os.getcwd(),
        "cores": sorted(os.sched_getaffinity(0)),
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "signals": signals,
        "descriptors": sorted(os.listdir("/proc/self/fd"), key=int)[:-1],  # without the one that lists them
        "inheritable": os.get_inheritable(int(os.environ["TELEGRAD_EXCHANGE"])),
        "stdin": os.readlink("/proc/self/fd/0"),
        "streams": [(stream.line_buffering, stream.errors, stream.encoding) for stream in (sys.stdout, sys.stderr)],
        "environment": {name: os.environ[name] for name in os.environ if name not in ("TELEGRAD_EXCHANGE", "LC_CTYPE")},
        "argv": sys.argv,
        "path": sys.path,
        "main": sys.modules["__main__"].__spec__.name,  # type: ignore[union-attr]
        "temporary": tempfile.gettempdir(),
        "threads": threading.active_count(),
        "tasks": len(os.listdir("/proc/self/task")),
        "collects": gc.isenabled(),
        "torch": "torch" in sys.modules,
        "interfaces": sorted(name for _, name in socket.if_nameindex()),
        "interfaces_shown": sorted(os.listdir("/sys/class/net")),
        "memory": os.readlink("/proc/self/ns/ipc"),
    }
    print(json.dumps(facts))


def draw() -> None:
    import torch

    torch_draw = torch.rand(1, dtype=torch.float64).item()
    print(json.dumps([random.random(), np.random.rand(), torch_draw, hash("a word")]))


def say_goodbye() -> None:
    atexit.register(print, "goodbye")
    print("half a line", end=" ")


def end_by(signal_name: str) -> None:
    print("unwritten unless PYTHONUNBUFFERED", end="")
    os.kill(os.getpid(), getattr(signal, signal_name))


def exit_with(status: str) -> None:
    sys.exit(int(status))


def fail() -> None:
    raise LookupError("a mistake of this rank")


def show_command() -> None:
    with open("/proc/self/cmdline") as command:
        print(command.read().replace("\0", " "))
