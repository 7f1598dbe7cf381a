"""``telegrad report``: what people and machines get to see."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from hang_jobs import NOW_S, Call, Job
from typer.testing import Result

Run = Callable[..., Result]


@pytest.fixture
def job() -> Job:
    job = Job(4, 16)
    job.wait_round_the_ring(Call(count=4096), {2})
    return job


def test_the_sentence_comes_first_and_then_a_line_per_rank(run: Run, job: Job, tmp_path: Path) -> None:
    job.write(tmp_path)
    result = run(tmp_path)
    assert result.exit_code == 1
    lines = result.output.splitlines()
    assert lines[0].startswith("rank 2 (host node0, pid 1002) has not called operation 16, allreduce(count=4096")
    assert lines[0].endswith("ranks 0, 1, 3 have waited for it since 31 s.")
    assert "communicator 3fa9c2d1, 4 ranks" in result.output
    for rank in range(4):
        assert f"node0:100{rank}" in result.output


def test_old_reports_are_said_to_be_old(run: Run, job: Job, tmp_path: Path) -> None:
    job.write(tmp_path)
    assert "note: the latest report was written" in run(tmp_path).output
    for file in job.files:
        file["written_unix_s"] = time.time()
    job.write(tmp_path)
    assert "note: the latest" not in run(tmp_path).output


def test_json(run: Run, job: Job, tmp_path: Path) -> None:
    job.write(tmp_path, missing={1})
    (tmp_path / "x.json").write_text("no")
    result = run(tmp_path, "--json")
    found = json.loads(result.stdout)
    assert (found["kind"], found["version"], len(found["notes"])) == ("telegrad hang verdict", 1, 1)
    (one,) = found["verdicts"]
    assert (one["verdict"], one["culprits"], one["tag"], one["waiting"]) == ("not_called", [2], 16, [0, 3])
    assert [rank["report"] for rank in one["ranks"]] == ["timeout", None, "timeout", "timeout"]
    assert one["ranks"][3]["operation"]["waits_for"] == [2]


def test_reports_of_several_hosts(run: Run, job: Job, tmp_path: Path) -> None:
    job.write(tmp_path / "a", missing={0, 1})
    job.write(tmp_path / "b", missing={2, 3})
    assert json.loads(run(tmp_path / "a", tmp_path / "b", "--json").stdout)["verdicts"][0]["culprits"] == [2]


def test_nothing_is_wrong(run: Run, tmp_path: Path) -> None:
    Job(2, 3).write(tmp_path)
    result = run(tmp_path)
    assert result.exit_code == 0
    assert "no operation is stuck" in result.output


def test_a_job_that_was_running_is_no_error(run: Run, tmp_path: Path) -> None:
    job = Job(2, 3, began_s=9.4)
    job.wait_round_the_ring(Call(), {1})
    for file in job.files:
        file["why"] = "signal"
    job.write(tmp_path)
    result = run(tmp_path)
    assert result.exit_code == 0
    assert result.output.startswith("the job was running when it was asked: nobody had waited longer than 0.4 s")


def test_many_ranks_are_cut_to_those_that_matter(run: Run, tmp_path: Path) -> None:
    job = Job(100, 2)
    job.wait_round_the_ring(Call(), {77})
    job.write(tmp_path)
    output = run(tmp_path).output
    assert "more ranks are as the others" in output
    assert "node19:1077" in output


def test_an_earlier_job_is_a_note_and_can_be_chosen(run: Run, job: Job, tmp_path: Path) -> None:
    job.write(tmp_path)
    old = Job(2, 3, communicator="0000aaaa")
    for file in old.files:
        file.update(written_unix_s=NOW_S - 9999, pid=1)
    old.write(tmp_path)
    assert (
        "note: communicator 0000aaaa of an earlier job is left out: --communicator 0000aaaa shows it"
        in run(tmp_path).output
    )
    chosen = run(tmp_path, "--communicator", "0000aaaa")
    assert chosen.exit_code == 0
    assert chosen.output.startswith("no operation is stuck")
    assert run(tmp_path, "--communicator", "ffff").exit_code == 2


def test_many_earlier_jobs_are_one_line(run: Run, job: Job, tmp_path: Path) -> None:
    job.write(tmp_path)
    for number in range(1, 6):
        old = Job(2, 3, communicator=f"0000aaa{number}")
        for file in old.files:
            file.update(written_unix_s=NOW_S - 9999 * (1 + (number - 3) % 5), pid=number)
        old.write(tmp_path)
    output = run(tmp_path).output
    assert (
        "note: 5 communicators of earlier jobs are left out: --communicator ID shows one (the latest of them is "
        in output
    )
    assert "is 0000aaa3), --json names all" in output
    assert output.count("0000aaa") == 1


def test_communicators_of_which_was_written_at_one_moment(run: Run, tmp_path: Path) -> None:
    for name in ("0000aaaa", "0000bbbb"):
        Job(2, 3, communicator=name).write(tmp_path)
    output = run(tmp_path).output
    assert output.index("communicator 0000aaaa") < output.index("communicator 0000bbbb")


def test_markup_in_reports_is_text(run: Run, job: Job, tmp_path: Path) -> None:
    for file in job.files:
        file["host"] = "[red]x[/]"
    job.write(tmp_path)
    result = run(tmp_path)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert "[red]x[/]" in result.output


def test_nothing_to_read(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(tmp_path)
    assert result.exit_code == 2
    assert "no report in" in result.output
    assert "of a rank that crashed, read its log" in result.output
    monkeypatch.setenv("TELEGRAD_REPORT_DIR", str(tmp_path / "nowhere"))
    result = run()
    assert result.exit_code == 2
    assert "no rank has written a report here" in result.output
    (tmp_path / "x.json").write_text("{}")
    assert "x.json left out: foreign" in run(tmp_path).output


def test_bad_arguments(run: Run, job: Job, tmp_path: Path) -> None:
    job.write(tmp_path)
    refused = run(tmp_path, "--plot", tmp_path / "x.png")
    assert refused.exit_code == 2
    assert "hang reports have no plot" in refused.output
