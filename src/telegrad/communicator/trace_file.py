"""A JSON file that several processes of a host append events to: valid after each, also where one dies while it writes.

The first line is the head, then comes one event a line. It must not know what an event means.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_END = b"\n]}\n"
_KIND = "telegrad trace 1"
_HEAD_MOST_BYTES = 4096


def append_events(path: Path, job: str, events: Iterable[dict[str, Any]]) -> None:
    """Adds ``events`` to the file at ``path``, which is made if it does not exist.

    A file of an earlier job is replaced: one that was begun before this process, or before this boot. ``job`` names
    something that only processes of this job know; where hosts share a folder, those that come second write to a file
    with their host's name. Raises ``OSError``, and ``ValueError`` for a file of another kind.
    """
    lines = b",\n".join(json.dumps(event, separators=(",", ":")).encode() for event in events)
    if not _append(path, job, lines):
        elsewhere = path.with_name(f"{path.stem}-{socket.gethostname()}{path.suffix}")
        if not _append(elsewhere, "", lines):
            raise ValueError(f"{elsewhere} belongs to another host")


def _append(path: Path, job: str, lines: bytes) -> bool:
    """False if another host of the same job writes to this file."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # until the descriptor is closed
        head = _head_of(descriptor, path)
        if head is not None and head["boot"] != _boot() and head["job"] == job:
            return False
        if head is not None and head["boot"] == _boot() and head["begun_s"] >= _process_start_s():
            at, separator = _end_of_events(descriptor)
        else:
            os.ftruncate(descriptor, 0)
            at, separator = 0, _new_head(job)
        try:
            _write(descriptor, separator + lines + _END, at)
        except OSError:  # such as a full disk
            if at > 0:
                os.ftruncate(descriptor, at)
                _write(descriptor, _END, at)
            raise
        return True
    finally:
        os.close(descriptor)


def _new_head(job: str) -> bytes:
    about = {
        "kind": _KIND,
        "host": socket.gethostname(),
        "boot": _boot(),
        "begun_s": time.clock_gettime(time.CLOCK_BOOTTIME),
        "job": job,
    }
    return b'{"displayTimeUnit":"ns","otherData":' + json.dumps(about).encode() + b',"traceEvents":[\n'


def _head_of(descriptor: int, path: Path) -> dict[str, Any] | None:
    """None for an empty file."""
    first = os.pread(descriptor, _HEAD_MOST_BYTES, 0)
    if not first:
        return None
    try:
        head = json.loads(first.partition(b"\n")[0] + b"]}")["otherData"]
        if head["kind"] == _KIND:
            return {"boot": str(head["boot"]), "begun_s": float(head["begun_s"]), "job": str(head["job"])}
    except (ValueError, KeyError, TypeError):
        pass
    raise ValueError(f"{path} is there and is no trace of telegrad: remove it, or name another file")


def _end_of_events(descriptor: int) -> tuple[int, bytes]:
    """Where the next event goes, and what comes before it."""
    size = os.fstat(descriptor).st_size
    if os.pread(descriptor, len(_END), size - len(_END)) == _END:
        return size - len(_END), b",\n"
    # Its last writer died while it wrote: what has no line end is incomplete.
    with os.fdopen(os.dup(descriptor), "rb") as file:
        file.seek(0)
        text = file.read()
    kept = text[: text.rfind(b"\n") + 1].rstrip(b",\n")
    os.ftruncate(descriptor, len(kept))
    return len(kept), b"\n" if kept.endswith(b"[") else b",\n"


def _write(descriptor: int, text: bytes, at: int) -> None:
    rest = memoryview(text)
    while rest:
        written = os.pwrite(descriptor, rest, at)
        rest, at = rest[written:], at + written


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _process_start_s() -> float:
    """When this process began, by ``CLOCK_BOOTTIME``."""
    ticks = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    return int(ticks) / os.sysconf("SC_CLK_TCK")
