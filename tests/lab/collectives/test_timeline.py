"""The trace that Perfetto opens: valid, complete, and with arrows that begin and end in slices."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lab.collectives.critical_path import Recording, critical_path, record, write_trace
from telegrad.cost import Costs
from telegrad.tools.sim.measure import Network, Point


@pytest.fixture
def found() -> Recording:
    costs = Costs(alpha_s=1e-6, beta_s_per_byte=1e-9, gamma_s_per_byte=1e-10)
    return record(Point("allreduce", "ring", 4, 40_000, Network(costs)))


def events_of(found: Recording, path: Path) -> list[dict[str, Any]]:
    count = write_trace(path, found.activities, critical_path(found.activities, found.finish_by_rank_s))
    trace = json.loads(path.read_text())
    assert set(trace) == {"displayTimeUnit", "traceEvents"}
    assert len(trace["traceEvents"]) == count
    return list(trace["traceEvents"])


def test_every_message_and_every_piece_of_work_is_there(found: Recording, tmp_path: Path) -> None:
    events = events_of(found, tmp_path / "trace.json")
    slices = Counter((event["pid"], event["tid"]) for event in events if event["ph"] == "X")
    for rank in range(4):
        assert slices[rank, 1] == slices[rank, 2] == 6
        assert slices[rank, 3] == 3  # additions
    names = {
        (event["pid"], event["tid"], event["name"]): event["args"]["name"]
        for event in events
        if "name" in event.get("args", {})
    }
    assert names[2, 0, "process_name"] == "rank 2"
    assert [names[0, track, "thread_name"] for track in (1, 2, 3)] == ["port out", "port in", "processor"]
    assert names[4, 0, "process_name"] == "critical path"
    ends = [event["ts"] + event["dur"] for event in events if event["ph"] == "X"]
    assert max(ends) == pytest.approx(found.finish_by_rank_s.max() * 1e6)


def test_arrows_lead_from_a_send_to_its_receive(found: Recording, tmp_path: Path) -> None:
    events = events_of(found, tmp_path / "trace.json")
    at = {(event["pid"], event["tid"], event["ts"]): event for event in events if event["ph"] == "X"}
    begins = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert len(begins) == len(ends) == 4 * 6
    for number, begin in begins.items():
        end = ends[number]
        assert end["bp"] == "e"
        send, receive = (at[one["pid"], one["tid"], one["ts"]] for one in (begin, end))
        assert send["name"] == f"to {end['pid']}"
        assert receive["name"] == f"from {begin['pid']}"
        assert send["args"] == receive["args"]
        assert end["ts"] > begin["ts"] + 0.999  # α is 1 µs


def test_a_trace_without_a_path_has_only_ranks(found: Recording, tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.json", found.activities)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1, 2, 3}
