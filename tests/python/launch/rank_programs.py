"""What the ranks of test_ranks.py do."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import time

from telegrad.launch import rank_and_size
from telegrad.launch.joining import MAX_BLOB_BYTES, SocketExchange


def _exchange() -> SocketExchange:
    rank, size = rank_and_size()
    return SocketExchange(int(os.environ["TELEGRAD_EXCHANGE"]), rank, size, 30.0)


def swap(rounds: str) -> None:
    rank, _ = rank_and_size()
    exchange = _exchange()
    for number in range(int(rounds)):
        blobs = exchange(bytes([rank]) * (rank * 1000 + number))
        print(
            [len(blob) for blob in blobs],
            {bytes(blob[:1]) for blob in blobs[1:]} == {bytes([r]) for r in range(1, len(blobs))},
        )


def leave_before_joining() -> None:
    if rank_and_size()[0] == 1:
        sys.exit(0)
    _exchange()(b"here")


def say_too_much() -> None:
    _exchange()(bytes(MAX_BLOB_BYTES + 1))


def fail_on_rank_1() -> None:
    if rank_and_size()[0] == 1:
        raise LookupError("a mistake of rank 1")
    time.sleep(60)


def hang_in_this_function() -> None:
    print("ready", flush=True)
    time.sleep(60)


def ignore_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print(os.getpid(), flush=True)
    time.sleep(60)


def map_a_file(path: str) -> None:
    with open(path, "w+b") as file:
        file.truncate(mmap.PAGESIZE)
        mapped = mmap.mmap(file.fileno(), mmap.PAGESIZE)
    print("ready", flush=True)
    time.sleep(60)
    mapped.close()


def leave_a_child() -> None:
    child = subprocess.Popen(["sleep", "60"])
    print(child.pid, flush=True)


def print_environment(name: str) -> None:
    print(os.environ.get(name, ""), end="")
