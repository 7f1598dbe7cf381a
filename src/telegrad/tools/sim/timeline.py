"""A run's activities as a trace that Perfetto (ui.perfetto.dev) and Chrome (chrome://tracing) open.

Trace Event Format: one process per rank with a track for each of port out, port in and processor; an arrow for each
message; the critical path, where it is given, as a process of its own above all.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from telegrad.tools.sim.critical_path import COMPUTE, RECEIVE, SEND, Stretch, messages_of
from telegrad.tools.sim.measure import Activities

_TRACKS = {SEND: (1, "port out"), RECEIVE: (2, "port in"), COMPUTE: (3, "processor")}
_MICROSECONDS = 1e6


def write_trace(path: Path, activities: Activities, critical_path: Sequence[Stretch] = ()) -> int:
    """Writes the trace; the number of its events. Raises ``ValueError`` for messages without a receive, ``OSError``."""
    count = 0
    with path.open("w") as file:
        file.write('{"displayTimeUnit": "ns", "traceEvents": [\n')
        for event in trace_events(activities, critical_path):
            file.write((",\n" if count else "") + json.dumps(event, allow_nan=False))
            count += 1
        file.write("\n]}\n")
    return count


def trace_events(activities: Activities, critical_path: Sequence[Stretch] = ()) -> Iterator[dict[str, Any]]:
    """The events one by one: names of ranks and tracks, what happened on them, arrows. Times in microseconds."""
    ranks = sorted({int(rank) for rank in activities.rank})
    path_process = (max(ranks) if ranks else 0) + 1
    if critical_path:
        yield _named("process_name", path_process, 0, "critical path")
        yield {"name": "process_sort_index", "ph": "M", "pid": path_process, "tid": 0, "args": {"sort_index": -1}}
        yield from (_of_path(one, path_process) for one in critical_path)
    for rank in ranks:
        yield _named("process_name", rank, 0, f"rank {rank}")
        yield {"name": "process_sort_index", "ph": "M", "pid": rank, "tid": 0, "args": {"sort_index": rank}}
        for track, name in _TRACKS.values():
            yield _named("thread_name", rank, track, name)

    columns = (activities.kind, activities.rank, activities.peer, activities.operation, activities.step)
    values = zip(*(column.tolist() for column in columns), activities.bytes.tolist(), strict=True)
    times = zip(activities.start_s.tolist(), activities.end_s.tolist(), strict=True)
    for (kind, rank, peer, operation, step, size), (start_s, end_s) in zip(values, times, strict=True):
        names = {SEND: f"to {peer}", RECEIVE: f"from {peer}", COMPUTE: "work"}
        about = {"bytes": size} if kind == COMPUTE else {"bytes": size, "step": step, "operation": operation}
        yield _slice(names[kind], rank, _TRACKS[kind][0], start_s, end_s, about)
    for number, (send, receive) in enumerate(zip(*messages_of(activities), strict=True)):
        yield _arrow("s", number, activities, int(send), SEND)
        yield _arrow("f", number, activities, int(receive), RECEIVE) | {"bp": "e"}


def _named(name: str, process: int, track: int, value: str) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": process, "tid": track, "args": {"name": value}}


def _slice(
    name: str, process: int, track: int, start_s: float, end_s: float, about: dict[str, int | None]
) -> dict[str, Any]:
    start, length = start_s * _MICROSECONDS, (end_s - start_s) * _MICROSECONDS
    return {"name": name, "ph": "X", "pid": process, "tid": track, "ts": start, "dur": length, "args": about}


def _of_path(one: Stretch, process: int) -> dict[str, Any]:
    name = f"{one.kind}, rank {one.rank}"
    return _slice(name, process, 1, one.start_s, one.end_s, {"peer": one.peer, "step": one.step, "bytes": one.bytes})


def _arrow(phase: str, number: int, activities: Activities, index: int, kind: int) -> dict[str, Any]:
    """An arrow begins and ends at the beginning of its slice, which it needs to find."""
    return {
        "name": "message",
        "cat": "message",
        "ph": phase,
        "id": number,
        "pid": int(activities.rank[index]),
        "tid": _TRACKS[kind][0],
        "ts": float(activities.start_s[index]) * _MICROSECONDS,
    }
