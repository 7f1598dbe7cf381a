"""The timeline of a job: when operations were submitted, begun and over on each rank, and when callers waited.

Each communicator's core records in memory; here its records become events of the Chrome trace format, which Perfetto
opens. All ranks of one host write into one file, which is valid JSON after each of them: its first line says what job
it is of, then comes one event a line.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from telegrad import _core
from telegrad.communicator.nodes import machine_id

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
        if head is not None and head["boot"] != machine_id() and head["job"] == job:
            return False
        if head is not None and head["boot"] == machine_id() and head["begun_s"] >= _process_start_s():
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
        "boot": machine_id(),
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


def _process_start_s() -> float:
    """When this process began, by ``CLOCK_BOOTTIME``."""
    ticks = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    return int(ticks) / os.sysconf("SC_CLK_TCK")


TRACE = "TELEGRAD_TRACE"
"""Names the file; unset: nothing is recorded."""

MOST_OPERATIONS = 16_384
"""A rank keeps its last so many operations and as many waits: about 3 MB, and 15 MB in the file."""

# By process: a process is one row of the timeline, also with several communicators: its rank in the first that it made.
# The ranks of Communicator.local() are rows of their own.
_rows: dict[int, int] = {}


def start_trace(core: Any) -> Path | None:
    """Records what ``core`` does from now on if ``TELEGRAD_TRACE`` is set; returns the file it goes to."""
    name = os.environ.get(TRACE)
    if not name or not isinstance(core, _core.Communicator):  # simulated ranks have another clock
        return None
    path = Path(name).absolute()
    if reason := _why_not_written(path):
        warnings.warn(f"{TRACE}={name!r} cannot be written ({reason}), so nothing is traced", stacklevel=2)
        return None
    core.start_trace(MOST_OPERATIONS)
    _rows.setdefault(os.getpid(), core.rank)
    return path


def _why_not_written(path: Path) -> str:
    """Empty where a file can be written there."""
    if path.is_dir():
        return "it is a folder: name a file in it"
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        return f"no permission to write {path if path.exists() else f'into {path.parent}'}"
    return ""


def write_trace(path: Path, core: _core.Communicator) -> None:
    """Adds to the file what was recorded by ``core``, which is closed. Warns if that fails."""
    communicator, row = f"{core.epoch:08x}", core.rank if core.driver == "local" else _rows[os.getpid()]
    try:
        append_events(path, communicator, events(core.traced(), core.rank, row, communicator))
    except (OSError, ValueError) as error:
        warnings.warn(f"rank {core.rank} leaves no trace in {path}: {error}", stacklevel=2)


def events(traced: dict[str, Any], rank: int, row: int, communicator: str) -> Iterator[dict[str, Any]]:
    """The events of one communicator, from what ``_core.Communicator.traced()`` returns."""
    pid = os.getpid()
    yield _name("process_name", row, f"rank {row} ({socket.gethostname()}, {pid})")
    yield {"ph": "M", "name": "process_sort_index", "pid": row, "args": {"sort_index": row}}
    operations, waits = traced["operations"], traced["waits"]
    for number, operation in enumerate(operations):
        yield from _operation(operation, row, f"{communicator}-{pid}-{rank}-{number}", communicator)
    for thread in sorted({wait[1] for wait in waits}):
        yield _name("thread_name", row, f"waits of thread {thread}", tid=thread)
    for name, thread, begin_s, end_s in waits:
        slice_us = {"ts": _us(begin_s), "dur": _us(end_s - begin_s)}
        yield {"ph": "X", "cat": "wait", "name": f"wait for {name}", "pid": row, "tid": thread, **slice_us}
    for what, oldest_s in (("operations", operations and operations[0][8]), ("waits", waits and waits[0][2])):
        if dropped := traced[f"{what}_dropped"]:
            text = f"{dropped} earlier {what} of communicator {communicator} are not shown"
            yield {"ph": "i", "s": "p", "name": text, "pid": row, "tid": 0, "ts": _us(oldest_s)}


def _operation(operation: tuple[Any, ...], row: int, identity: str, communicator: str) -> Iterator[dict[str, Any]]:
    name, dtype, reduction, algorithm, root, count, nbytes, sequence, submitted_s, begun_s, ended_s, failed = operation
    facts = {
        "communicator": communicator,
        "sequence": sequence,
        "algorithm": algorithm,
        "dtype": dtype,
        "count": count,
        "bytes": nbytes,
        "reduction": reduction,
        "root": root,
        "failed": failed or None,
    }
    event = {"cat": "operation", "id": identity, "pid": row, "tid": 0}
    arguments = {key: value for key, value in facts.items() if value is not None}
    yield {"ph": "b", "name": name, **event, "ts": _us(submitted_s), "args": arguments}
    if begun_s is not None:
        yield {"ph": "b", "name": "queued", **event, "ts": _us(submitted_s)}
        yield {"ph": "e", "name": "queued", **event, "ts": _us(begun_s)}
    yield {"ph": "e", "name": name, **event, "ts": _us(ended_s)}


def _name(kind: str, row: int, name: str, **where: int) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": row, **where, "args": {"name": name}}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
