"""The timeline of a job: when operations were submitted, begun and over on each rank, and when callers waited.

Each communicator's core records in memory; here its records become events of the Chrome trace format, which Perfetto
opens. All ranks of one host write into one file, which is valid JSON after each of them.
"""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from telegrad import _core
from telegrad.communicator.trace_file import append_events

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
