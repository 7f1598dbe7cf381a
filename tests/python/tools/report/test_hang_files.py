"""Reports from disk: what is damaged, foreign or strange is said, and never a traceback."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hang_jobs import NOW_S, Call, Job
from hypothesis import given, settings
from hypothesis import strategies as st

from telegrad.tools.report import hang_files
from telegrad.tools.report.hang_files import BadReport, default_folder, find, parse


def _good() -> dict[str, Any]:
    job = Job(3, 2)
    job.call(1, Call("broadcast", 10, root=2), waits_for=[2], sends_to=[0])
    job.files[1]["failure"] = {"error": "TimeoutExpired", "peer": 2, "message": "timed out"}
    return job.files[1]


def _bytes(found: object) -> bytes:
    return json.dumps(found).encode()


def test_a_good_report() -> None:
    report = parse(_bytes(_good()))
    assert (report.rank, report.world_size, report.called, report.completed) == (1, 3, 3, 2)
    assert report.operations[2].root == 2
    assert report.operations[2].waits_for == (2,)
    assert report.at(1) is report.operations[1]
    assert report.at(7) is None
    assert report.failure is not None
    assert report.failure.peer == 2
    assert [peer.rank for peer in report.peers] == [0, 2]


def test_nulls_and_unknown_fields_are_allowed() -> None:
    good = _good()
    good.update(new="field", liveness_timeout_s=None, failure=None, host=None, pid=None)
    good["peers"][0].update(host=None, pid=None, called=None, heard_s_ago=None)
    assert parse(_bytes(good)).peers[0].called is None


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda r: r.update(kind="x"), "foreign"),
        (lambda r: r.update(version=2), "version 2 of the report; this telegrad reads version 1"),
        (lambda r: r.pop("rank"), '"rank" is missing'),
        (lambda r: r.update(rank=3), '"rank" is 3: it must be an integer from 0 to 2'),
        (lambda r: r.update(rank=True), '"rank" is true'),
        (lambda r: r.update(rank="0"), '"rank" is "0"'),
        (lambda r: r.update(world_size=1 << 40), '"world_size"'),
        (lambda r: r.update(called=-1), '"called" is -1'),
        (lambda r: r.update(completed=4), '"completed" is 4: it must be an integer from 0 to 3'),
        (lambda r: r.update(written_unix_s="now"), '"written_unix_s" is "now"'),
        (lambda r: r.update(written_unix_s=-1), "not negative"),
        (lambda r: r.update(why="because"), "one of timeout, stall, signal, asked"),
        (lambda r: r.update(host=5), '"host" is 5'),
        (lambda r: r.update(communicator="x" * (1 << 17)), "a text of at most"),
        (lambda r: r.update(failure=[]), '"failure" is []: it must be an object'),
        (lambda r: r["failure"].update(peer=9), '"failure.peer" is 9'),
        (lambda r: r.update(peers={}), '"peers" is {}'),
        (lambda r: r.update(peers=[1]), '"peers[0]" is 1: it must be an object'),
        (lambda r: r["peers"][1].update(state="?"), '"peers[1].state" is "?": it must be one of alive, failed, closed'),
        (lambda r: r["operations"][1].update(tag=0), '"operations[1].tag" is 0: it must be an integer from 1 to 2'),
        (lambda r: r["operations"][2].update(tag=3), '"operations[2].tag" is 3'),
        (lambda r: r["operations"][0].pop("state"), '"operations[0].state" is missing'),
        (
            lambda r: r["operations"][0].update(waits_for=[3]),
            '"operations[0].waits_for[0]" is 3: it must be an integer from 0',
        ),
        (lambda r: r["operations"][0].update(sends_to=0), '"operations[0].sends_to" is 0'),
        (lambda r: r["operations"][0].update(took_s=1e300), '"operations[0].took_s"'),
        (lambda r: r.update(group={"name": "split(color=1)", "parent_ranks": [0, 1]}), "a list of 3 integers"),
        (
            lambda r: r.update(group={"name": "split(color=1)", "parent_ranks": [0, 1, -1]}),
            '"group.parent_ranks[2]" is',
        ),
        (lambda r: r.update(called=0, completed=0), 'lists a call, but "called" is 0'),
    ],
)
def test_what_is_wrong_is_said(change: Callable[[dict[str, Any]], object], text: str) -> None:
    report = _good()
    change(report)
    with pytest.raises(BadReport) as caught:
        parse(_bytes(report))
    assert text in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "data",
    [b"", b"\xff\xfe", b"[", b"[" * 100_000, b"1" * 10_000, b"NaN", b'{"kind": Infinity}', b"[]", b"null", b'"text"'],
    ids=lambda data: repr(data[:12]),
)
def test_bytes_that_are_no_report(data: bytes) -> None:
    with pytest.raises(BadReport, match="damaged|foreign"):
        parse(data)


def test_not_a_number_is_no_number_of_seconds() -> None:
    report = _good()
    report["written_unix_s"] = float("nan")
    with pytest.raises(BadReport, match="NaN"):
        parse(_bytes(report))


@settings(max_examples=150)
@given(st.data())
def test_any_damage_is_one_error(data: st.DataObject) -> None:
    """Cut, overwritten, or with a field of any type: either still a report, or a BadReport."""
    report = _good()
    anything = st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.lists(st.integers(), max_size=2)
    )
    for place in (report, report["peers"][0], report["operations"][1], report["failure"]):
        if data.draw(st.booleans()):
            place[data.draw(st.sampled_from(sorted(place)))] = data.draw(anything)
    raw = bytearray(_bytes(report))
    for _ in range(data.draw(st.integers(0, 2))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(BadReport):
        parse(bytes(raw[: data.draw(st.integers(0, 2 * len(raw)))]))


def test_texts_cannot_command_a_terminal() -> None:
    report = _good()
    report["host"] = "a\x1b[2Jb\x07\nc\ud800\u202e"
    host = parse(_bytes(report)).host
    assert host == "a�[2Jb� c��"


def test_files_of_a_folder(tmp_path: Path) -> None:
    job = Job(3, 2)
    job.write(tmp_path)
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "foreign.json").write_text('{"name": "package"}')
    (tmp_path / "notes.txt").write_text("not ours")
    (tmp_path / ".3fa9c2d1-rank0.json.tmp").write_text("{")
    (tmp_path / "folder.json").mkdir()
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "dangling.json").symlink_to(tmp_path / "nowhere")
    found = find([tmp_path])
    assert [report.rank for report in found.reports] == [0, 1, 2]
    names = [note.split(" left out: ")[0].rsplit("/", 1)[1] for note in found.notes]
    assert names == ["broken.json", "dangling.json", "folder.json", "foreign.json", "pipe.json"]
    assert "not a plain file" in found.notes[-1]


def test_of_two_reports_of_a_rank_the_later_counts(tmp_path: Path) -> None:
    old, new = Job(2, 2), Job(2, 5)
    for file in old.files:
        file["written_unix_s"] = NOW_S - 100
    new.write(tmp_path / "a")
    old.write(tmp_path / "b")
    for folders in (["a", "b"], ["b", "a"]):
        found = find([tmp_path / name for name in folders])
        assert [report.called for report in found.reports] == [5, 5]
        assert sum("a later report of rank 0" in note for note in found.notes) == 1


def test_the_same_folder_twice_is_no_news(tmp_path: Path) -> None:
    Job(2, 2).write(tmp_path)
    assert find([tmp_path, tmp_path]).notes == []


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        find([tmp_path / "nowhere"])


def test_a_file_too_long_to_be_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang_files, "MOST_BYTES", 1 << 20)
    (tmp_path / "long.json").write_bytes(b" " * (1 << 20) + b"1")
    assert "more than 1 MiB" in find([tmp_path]).notes[0]


def test_default_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TELEGRAD_REPORT_DIR", str(tmp_path))
    assert default_folder() == tmp_path
    monkeypatch.delenv("TELEGRAD_REPORT_DIR")
    assert default_folder().name == f"telegrad-reports-{os.getuid()}"
