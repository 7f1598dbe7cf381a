"""``python -m lab faults`` with a few real trials, and what it says to bad options."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lab.common.experiments import app
from lab.faults import runs as fault_runs
from lab.faults.judge import Seen, Verdict, judge
from lab.faults.runs import _processes_with, _unused
from lab.faults.trials import Options, Trial, draw
from telegrad import _core

pytestmark = pytest.mark.ranks("exec")

_needs_ucx = pytest.mark.skipif(not hasattr(_core.Communicator, "ucx"), reason="built without UCX")


def _bench(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app(["faults"]), ["faults", *arguments], env={"COLUMNS": "200"})
    return done.exit_code, done.output


@_needs_ucx
def test_trials_write_verdicts_and_a_plot(tmp_path: Path) -> None:
    found, drawn = tmp_path / "verdicts.json", tmp_path / "plot.png"
    options = ["--trials", "3", "--ranks", "2..3", "--kinds", "kill,none", "--network", "tcp"]
    status, output = _bench(*options, "--json", str(found), "--plot", str(drawn))
    assert status == 0, output
    trials = json.loads(found.read_text())["trials"]
    assert [trial["seed"] for trial in trials] == [1_000_000, 1_000_001, 1_000_002]
    for trial in trials:
        assert trial["network"] == "tcp"
        assert trial["violations"] == []
        assert len(trial["detected_s"]) == (0 if trial["kind"] == "none" else trial["ranks"] - 1)
        assert trial["checked"] > 0 or trial["kind"] != "none"
    assert drawn.read_bytes()[:4] == b"\x89PNG"
    assert "3 trials" in output
    assert "0 hangs" in output


def test_the_table_is_whole_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_trials(seeds: list[int], options: Options, **kwargs: object) -> list[Verdict]:
        verdict = judge(draw(seeds[0], options), Seen({}, [None] * 9, hung=(0,)))
        return [replace(verdict, detected_s={1: 0.12345}, closed_s=0.32691)]

    monkeypatch.setattr("lab.faults.command.run_trials", run_trials)
    done = CliRunner().invoke(app(["faults"]), ["faults"], env={"COLUMNS": "80"})
    assert "123.45 ms" in done.output
    assert "…" not in done.output


@_needs_ucx
def test_a_trial_is_repeated() -> None:
    status, output = _bench("--only", "3", "--kinds", "abort", "--ranks", "2", "--repeat", "3")
    assert status == 0, output
    assert "3 trials" in output


def test_a_violation_is_told_with_the_command_to_repeat_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_trials(seeds: list[int], options: Options, **kwargs: object) -> list[object]:
        seen = Seen({}, [None] * 9, hung=(0,), where="rank 0 was here")
        verdict = judge(draw(seeds[0], options), seen)
        kwargs["on_verdict"](verdict, seen)  # type: ignore[operator]
        return [verdict]

    monkeypatch.setattr("lab.faults.command.run_trials", run_trials)
    status, output = _bench("--only", "77", "--kinds", "none")
    assert status == 1
    assert "hang: rank 0" in output
    assert "python -m lab faults --only 77 --ranks 2..8 --network shm,tcp --kinds none" in output


@pytest.mark.parametrize(("strict", "status"), [([], 0), (["--strict-times"], 1)])
def test_times_count_when_asked_for(monkeypatch: pytest.MonkeyPatch, strict: list[str], status: int) -> None:
    def run_trials(seeds: list[int], options: Options, **_: object) -> list[object]:
        trial = draw(seeds[0], options)
        base = {"closed_s": 0.0, "called_s": [], "checked": 0, "wrong": [], "passed_mismatch": False}
        base |= {"touched": None, "descriptors": 0}
        said = {
            rank: [
                {**base, "ended": {"error": "PeerFailed", "peer": trial.culprit, "rank": rank, "text": "", "at_s": 9.0}}
            ]
            for rank in range(trial.size)
            if rank != trial.culprit
        }
        codes = [-9 if rank == trial.culprit else 0 for rank in range(trial.size)]
        return [judge(trial, Seen({**said, trial.culprit: [{"fault": 1.0}]}, codes))]

    monkeypatch.setattr("lab.faults.command.run_trials", run_trials)
    ended, output = _bench("--trials", "1", "--kinds", "kill", *strict)
    assert ended == status, output
    assert "late: trial 1000000, 8.000 s (limit 1 s)" in output


def test_what_a_trial_leaves_is_seen(tmp_path: Path) -> None:
    mark = f"{os.getpid()}-left-behind"
    environment = {**os.environ, "TELEGRAD_FAULT_TRIAL": mark}
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=environment) as left:
        assert any(f"process {left.pid}:" in text for text in _processes_with(mark))
        left.kill()
    assert _processes_with(mark) == []
    (tmp_path / "segment").touch()
    assert _unused({tmp_path / "segment", tmp_path / "gone"}) == {tmp_path / "segment"}


def test_files_that_go_a_little_later_are_not_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of another program's killed ranks, and the file that it is about to map."""
    stays, goes = tmp_path / "stays", tmp_path / "goes"
    looks: list[set[Path]] = []

    def look(paths: set[Path]) -> set[Path]:
        looks.append(paths)
        if len(looks) == 3:
            goes.unlink()
        return _unused(paths)

    monkeypatch.setattr(fault_runs, "_unused", look)
    monkeypatch.setattr(fault_runs, "_LOOK_S", 0.01)
    goes.touch()
    assert fault_runs._left_for_good({goes}) == set()
    monkeypatch.setattr(fault_runs, "_LEFT_S", 0.1)
    stays.touch()
    assert fault_runs._left_for_good({stays}) == {stays}


def test_what_nobody_can_be_told_for_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of one trial of several that run at a time."""
    monkeypatch.setattr(fault_runs, "_SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(fault_runs, "_LEFT_S", 0.1)

    def run_trial(trial: Trial, *_: object) -> Seen:
        (tmp_path / "segment").touch()
        (tmp_path / "mpich_shm_1_0").touch()  # of a killed rank of MPICH in another program
        return Seen({}, [None] * trial.size)

    monkeypatch.setattr(fault_runs, "run_trial", run_trial)
    status, output = _bench("--trials", "1", "--kinds", "none")
    assert status == 1
    assert f"left behind: {tmp_path}/segment, of one of the trials" in output
    assert "mpich" not in output


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--network", "1gbit", "use shm, tcp"),
        ("--ranks", "1", "use two numbers from 2 to 64, as in 2..8"),
        ("--ranks", "4..3", "use two numbers from 2 to 64"),
        ("--kinds", "flood", "use none, kill, freeze"),
        ("--json", "/nowhere/verdicts.json", "the folder /nowhere does not exist"),
        ("--trials", "0", "'--trials'"),
    ],
)
def test_bad_options_name_the_remedy(option: str, value: str, message: str) -> None:
    status, output = _bench(option, value)
    assert status == 2
    assert message in " ".join(output.split())
