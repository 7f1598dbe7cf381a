"""Hang reports in the form of torch's flight recorder, for its analyser (``torchfrtrace``,
``torch.distributed.flight_recorder``).

That form is a pickle, and this is the only place where telegrad writes one: of plain dictionaries, lists, tuples, texts
and numbers. telegrad never reads a pickle.

What it cannot express: an operation's own name for a library (the analyser knows a fixed list, so ours go as ``gloo``),
who waits for whom, errors, heartbeats, and ranks without a report. What a call has besides count and dtype (reduction,
algorithm, root, sparse) is written into the text of the dtype, which the analyser compares: such a mismatch is shown
as one of dtypes. It takes the first rank that it reads for right, so where one differs from many it may name the many;
and it holds a rank for a culprit that has finished a broadcast before the others.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from telegrad.tools.report.hang import HangVerdict
from telegrad.tools.report.hang_files import Operation, Report

VERSION = "2.9"
"""Of torch's form; the analyser tells from it how operations that were merged into one are written (none of ours)."""
PREFIX = "rank_"
_GROUP = "telegrad"
# A fixed list in the analyser.
_NAMES = {
    "barrier": "barrier",
    "broadcast": "broadcast",
    "allgather": "all_gather",
    "allreduce": "all_reduce",
    "sparseallreduce": "all_reduce",
}
_STATES = {"running": "started", "failed": "started", "completed": "completed"}
_PROTOCOL = 4


def write(verdict: HangVerdict, folder: Path) -> tuple[list[Path], list[str]]:
    """Writes ``rank_<R>`` for each rank that left a report; returns the files, and what was left out.

    ``folder`` is made; the analyser reads whatever lies in it. Raises ``FileExistsError`` if it is not empty.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty, and the analyser would read what is there: choose a new folder")
    written: list[Path] = []
    unknown: set[str] = set()
    for lane in verdict.lanes:
        if lane.report is None:
            continue
        path = folder / f"{PREFIX}{lane.rank}"
        with path.open("xb") as file:
            pickle.dump(dump_of(lane.report), file, protocol=_PROTOCOL)
        written.append(path)
        unknown |= {one.operation for one in lane.report.operations if _name(one) not in _NAMES}
    return written, [f"the flight recorder's form has no operation {name!r}: left out" for name in sorted(unknown)]


def dump_of(report: Report) -> dict[str, Any]:
    """One rank's dump, of plain types only."""
    ranks = list(range(report.world_size))
    return {
        "version": VERSION,
        "entries": [_entry(report, one) for one in report.operations if _name(one) in _NAMES],
        "pg_config": {_GROUP: {"name": _GROUP, "desc": report.communicator, "ranks": str(ranks)}},
        "pg_status": {
            _GROUP: {
                "last_enqueued_collective": report.called - 1,
                "last_started_collective": report.called - 1,
                "last_completed_collective": report.completed - 1,
            }
        },
        "rank": report.rank,
    }


def _entry(report: Report, operation: Operation) -> dict[str, Any]:
    name = _name(operation)
    elements = operation.count * (report.world_size if name == "allgather" else 1)
    created_s = report.written_unix_s - operation.called_s_ago
    ended_s = None if operation.took_s is None else created_s + operation.took_s
    kind = [_dtype(operation)]
    return {
        "frames": [],
        "record_id": operation.tag,
        "pg_id": 0,
        "process_group": (_GROUP, report.communicator),
        "collective_seq_id": operation.tag,
        "p2p_seq_id": 0,
        "op_id": operation.tag,
        "profiling_name": f"gloo:{_NAMES[name]}",
        "time_created_ns": int(created_s * 1e9),
        "time_discovered_started_ns": int(created_s * 1e9),
        "time_discovered_completed_ns": None if ended_s is None else int(ended_s * 1e9),
        "duration_ms": None if operation.took_s is None else operation.took_s * 1e3,
        "input_sizes": [[operation.count]],
        "input_dtypes": kind,
        "output_sizes": [[elements]],
        "output_dtypes": kind,
        "state": _STATES[operation.state],
        "is_p2p": False,
        "retired": operation.state != "running",
        "timeout_ms": None if report.timeout_s is None else int(report.timeout_s * 1e3),
    }


def _name(operation: Operation) -> str:
    return operation.operation.replace("_", "").replace(" ", "")


def _dtype(operation: Operation) -> str:
    """Everything that two ranks must agree on besides the operation and its count."""
    parts: Sequence[str | None] = (
        operation.dtype,
        operation.reduction,
        operation.algorithm,
        None if operation.root is None else f"root {operation.root}",
        "sparse" if _name(operation).startswith("sparse") else None,
    )
    return " ".join(part for part in parts if part)
