"""The file that several processes append events to: whose it is, and what is left after an accident."""

from __future__ import annotations

import errno
import json
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from telegrad.communicator import trace as trace_file
from telegrad.communicator.trace import append_events


def _numbers(path: Path) -> list[int]:
    return [event["n"] for event in json.loads(path.read_text())["traceEvents"]]


def _event(number: int) -> dict[str, Any]:
    return {"n": number, "text": "x" * 100}


def test_many_writers_at_once(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: append_events(path, "job", [_event(n), _event(n + 100)]), range(40)))
    numbers = _numbers(path)
    assert sorted(numbers) == sorted([*range(40), *range(100, 140)])
    assert all(numbers[i] + 100 == numbers[i + 1] for i in range(0, 80, 2))


_LINE_BYTES = len(json.dumps(_event(0), separators=(",", ":")))
_END_BYTES = 4


@pytest.mark.parametrize(
    ("lost_bytes", "whole"),
    [
        *((1, 3), (_END_BYTES - 1, 3)),
        *((_END_BYTES, 2), (50, 2), (_END_BYTES + _LINE_BYTES, 2)),
        *((_END_BYTES + _LINE_BYTES + 1, 1), (200, 1)),
    ],
)
def test_a_writer_that_was_killed_costs_only_what_it_had_not_finished(
    tmp_path: Path, lost_bytes: int, whole: int
) -> None:
    path = tmp_path / "trace.json"
    append_events(path, "job", [_event(0)])
    append_events(path, "job", [_event(1), _event(2)])
    os.truncate(path, path.stat().st_size - lost_bytes)
    append_events(path, "job", [_event(3)])
    assert _numbers(path) == [*range(whole), 3]


def test_a_writer_that_was_killed_before_its_first_event(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    append_events(path, "job", [_event(0)])
    head = path.read_bytes().partition(b"\n")[0]
    path.write_bytes(head + b'\n{"n"')
    append_events(path, "job", [_event(1), _event(2)])
    assert _numbers(path) == [1, 2]


def test_a_file_of_an_earlier_job_or_boot_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.json"
    append_events(path, "earlier", [_event(0)])
    began_s = trace_file._process_start_s()
    monkeypatch.setattr(trace_file, "_process_start_s", lambda: began_s + 1e6)  # as if we were started later
    append_events(path, "later", [_event(1)])
    assert _numbers(path) == [1]
    monkeypatch.setattr(trace_file, "_process_start_s", lambda: began_s)
    append_events(path, "later", [_event(2)])
    assert _numbers(path) == [1, 2]
    monkeypatch.setattr(trace_file, "machine_id", lambda: "another")
    append_events(path, "after a boot", [_event(3)])
    assert _numbers(path) == [3]


def test_a_process_knows_when_it_began() -> None:
    assert 0 < trace_file._process_start_s() <= trace_file.time.clock_gettime(trace_file.time.CLOCK_BOOTTIME)


def test_another_host_of_the_same_job_writes_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.json"
    append_events(path, "job", [_event(0)])
    monkeypatch.setattr(trace_file, "machine_id", lambda: "of another host")
    for number in (1, 2):
        append_events(path, "job", [_event(number)])
    assert _numbers(path) == [0]
    assert _numbers(tmp_path / f"trace-{socket.gethostname()}.json") == [1, 2]


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.json"
    append_events(path, "job", [_event(0)])
    write, calls = os.pwrite, []

    def full(descriptor: int, text: Any, at: int) -> int:
        calls.append(at)
        if len(calls) == 1:
            return write(descriptor, bytes(text[:20]), at)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, text, at)

    monkeypatch.setattr(trace_file.os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        append_events(path, "job", [_event(1)])
    assert _numbers(path) == [0]


@pytest.mark.parametrize("text", ["something else\n", "{}\n", '{"otherData":{},"traceEvents":[\n]}\n', "[1, 2]"])
def test_a_file_of_another_kind_is_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "notes.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="is no trace of telegrad: remove it, or name another file"):
        append_events(path, "job", [_event(0)])
    assert path.read_text() == text
