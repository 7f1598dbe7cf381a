"""TELEGRAD_TRACE: what Perfetto gets to see of a job."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from telegrad import Communicator
from telegrad.communicator.trace import MOST_OPERATIONS, TRACE, events
from telegrad.launch import Ranks
from telegrad.tools.sim import World

_ENVIRONMENT = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
Event = dict[str, Any]


def _events(path: Path) -> list[Event]:
    loaded: list[Event] = json.loads(path.read_text())["traceEvents"]
    return loaded


def _slices(found: list[Event]) -> dict[tuple[int, str], list[tuple[str, float, float, dict[str, Any]]]]:
    """(name, begin, end, arguments) of asynchronous slices, by row and identity, the outer first; they must nest."""
    slices: dict[tuple[int, str], list[tuple[str, float, float, dict[str, Any]]]] = defaultdict(list)
    stacks: dict[tuple[int, str], list[Event]] = defaultdict(list)
    for event in found:
        key = (event["pid"], event.get("id", ""))
        if event["ph"] == "b":
            assert not stacks[key] or stacks[key][-1]["ts"] <= event["ts"]
            stacks[key].append(event)
        elif event["ph"] == "e":
            begin = stacks[key].pop()
            assert begin["name"] == event["name"]
            assert begin["ts"] <= event["ts"]
            slices[key].insert(0, (begin["name"], begin["ts"], event["ts"], begin.get("args", {})))
    assert not any(stacks.values())
    for outer, *inner in slices.values():
        assert all(outer[1] <= one[1] and one[2] <= outer[2] for one in inner)
    return slices


def _row_names(found: list[Event]) -> dict[int, str]:
    return {event["pid"]: event["args"]["name"] for event in found if event["name"] == "process_name"}


def test_two_processes_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    environment = {**_ENVIRONMENT, TRACE: str(path)}
    processes = set()
    for _ in range(2):  # the second job replaces what the first has left
        with Ranks("trace_program:work", 2, environment=environment, timeout_s=60) as ranks:
            ranks.wait()
        found = _events(path)
        names = _row_names(found)
        assert sorted(names) == [0, 1]
        assert names[0].startswith("rank 0 (")
        processes |= set(names.values())
        assert len([event for event in found if event["name"] == "process_name"]) == 2
        slices = _slices(found)
        for rank in range(2):
            mine = [one for (row, _), one in slices.items() if row == rank]
            assert [outer[0] for outer, *_ in mine] == ["allreduce"] * 4
            assert sorted(outer[3]["sequence"] for outer, *_ in mine) == [0, 1, 2, 3]
            ring = next(outer[3] for outer, *_ in mine if outer[3]["sequence"] == 3)
            del ring["communicator"]
            facts = {"algorithm": "ring", "dtype": "f32", "reduction": "sum", "count": 1000, "bytes": 4000}
            assert ring == {"sequence": 3, **facts}
            assert all([one[0] for one in inner] == ["queued"] for _, *inner in mine)
            waits = [event for event in found if event["ph"] == "X" and event["pid"] == rank]
            assert waits
            assert all(event["name"] == "wait for allreduce" and event["dur"] >= 0 for event in waits)
    assert len(processes) == 4


def test_a_rank_that_dies_leaves_the_others_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    environment = {**_ENVIRONMENT, TRACE: str(path)}
    with Ranks("trace_program:one_dies", 3, environment=environment, timeout_s=60) as ranks:
        exits = ranks.wait(until_all=True)
    assert [end.returncode for end in exits] == [0, -signal.SIGKILL, 0]
    found = _events(path)
    assert sorted(_row_names(found)) == [0, 2]
    slices = _slices(found)
    for rank in (0, 2):
        mine = [outer[3] for (row, _), (outer, *_) in slices.items() if row == rank]
        failed = {arguments["sequence"]: arguments.get("failed", False) for arguments in mine}
        assert not failed[0]
        assert failed[max(failed)]  # the second barrier or the all_reduce, as the messages went


def test_ranks_of_one_process_are_rows_and_several_in_flight_overlap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace.json"
    monkeypatch.setenv(TRACE, str(path))
    comms = Communicator.local(3)
    works = [comm.all_reduce(np.ones(10, np.float32), async_op=True) for comm in comms for _ in range(4)]
    for work in works:
        work.wait()
    for number, comm in enumerate(comms):
        comm.close()
        found = _events(path)  # valid after each
        assert sorted(_row_names(found)) == list(range(number + 1))
    slices = _slices(found)
    assert len(slices) == 12
    for rank in range(3):
        mine = [one[0] for (row, _), one in slices.items() if row == rank]
        assert max(begin for _, begin, _, _ in mine) < min(end for _, _, end, _ in mine) or rank == 2
    assert len({key for _, key in slices}) == 12  # each has a track of its own


def test_waits_add_up_to_the_time_that_callers_have_waited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.json"
    monkeypatch.setenv(TRACE, str(path))
    comms = Communicator.local(2)

    def work(comm: Communicator, computes_s: float) -> float:
        for _ in range(20):
            time.sleep(computes_s)  # shorter than what parts two goes of one wait
            comm.all_reduce(np.ones(10, np.float32))
        return float(comm.stats()["waiting_s"])

    with ThreadPoolExecutor(2) as pool:
        waited_s = list(pool.map(work, comms, (0.0, 0.008)))
    for comm in comms:
        comm.close()
    for rank in range(2):
        durations = [event["dur"] for event in _events(path) if event["ph"] == "X" and event["pid"] == rank]
        # In microseconds. Between the goes of one wait a little time passes; rank 1 computes for 160 ms.
        assert waited_s[rank] * 1e6 - 1 <= sum(durations) <= waited_s[rank] * 1.1e6 + 8e4


def test_operations_under_way_at_the_end_are_traced_as_failed(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    program = """
        import numpy as np, telegrad
        one, two = telegrad.Communicator.local(2)
        one.all_reduce(np.ones(4, np.float32), async_op=True)
    """
    environment = {**os.environ, TRACE: str(path)}
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], env=environment, check=True, timeout=60)
    (outer, *_), *others = _slices(_events(path)).values()
    assert not others
    assert outer[3]["failed"]


def test_what_was_dropped_is_said() -> None:
    operation = ("barrier", "u8", "none", "auto", None, 0, 0, 5, 1.0, 1.5, 2.0, False)
    traced = {
        "operations": [operation],
        "waits": [("barrier", 42, 1.0, 2.0)],
        "operations_dropped": 5,
        "waits_dropped": 0,
    }
    found = list(events(traced, 3, 3, "00c0ffee"))
    texts = [event["name"] for event in found if event["ph"] == "i"]
    assert texts == ["5 earlier operations of communicator 00c0ffee are not shown"]
    (slices,) = _slices(found).values()
    assert [one[:3] for one in slices] == [("barrier", 1e6, 2e6), ("queued", 1e6, 1.5e6)]


def test_the_core_keeps_the_last_operations(local: Callable[..., list[Communicator]]) -> None:
    (comm,) = local(1)
    comm._core.start_trace(5)
    for _ in range(8):
        comm.barrier()
    traced = comm._core.traced()
    assert [operation[7] for operation in traced["operations"]] == [3, 4, 5, 6, 7]
    assert traced["operations_dropped"] == 3
    assert MOST_OPERATIONS > 1000


def test_nothing_is_recorded_unless_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local: Callable[..., list[Communicator]]
) -> None:
    monkeypatch.delenv(TRACE, raising=False)
    (comm,) = local(1)
    comm.barrier()
    assert comm._core.traced()["operations"] == []
    monkeypatch.setenv(TRACE, str(tmp_path / "virtual.json"))
    world = World(2)  # another clock
    for work in [one.barrier(async_op=True) for one in world.communicators]:
        work.wait()
    world.close()
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_written_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = tmp_path / "closed"
    closed.mkdir()
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) != closed)  # root may write everywhere
    for path, reason in (
        (tmp_path / "no" / "trace.json", rf"there is no folder {tmp_path}/no\), so nothing is traced"),
        (tmp_path, "it is a folder: name a file in it"),
        (closed / "trace.json", f"no permission to write into {closed}"),
    ):
        monkeypatch.setenv(TRACE, str(path))
        with pytest.warns(UserWarning, match=f"cannot be written .{reason}"):
            (comm,) = Communicator.local(1)
        comm.close()
    other = tmp_path / "train.py"
    other.write_text("print('precious')\n")
    monkeypatch.setenv(TRACE, str(other))
    (comm,) = Communicator.local(1)
    with pytest.warns(UserWarning, match="rank 0 leaves no trace in .*train.py is there and is no trace of telegrad"):
        comm.close()
    assert other.read_text() == "print('precious')\n"
