"""``python -m lab simulated-faults``: what it prints and writes, and its exit status."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from lab.simulated_faults import Exploration, Failure, Replayed, command, troubles

_app = typer.Typer()
_app.command()(command)


def _faults(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(_app, [*arguments], env={"COLUMNS": "200"})
    return done.exit_code, done.output


def test_seeds_are_played_and_told(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    status, output = _faults("--seeds", "300", "--ranks", "2..6", "--only", "none", "--jobs", "1", "--json", str(file))
    assert status == 0, output
    assert "0 hangs, 0 wrong results, 0 wrong errors" in output
    assert "┏" not in output  # no header: it would be empty
    found = json.loads(file.read_text())
    assert {"seeds", "hangs", "wrong", "errors_named", "failures"} <= found.keys()
    assert found["seeds"] == found["troubles"]["none"] > 0
    assert found["failures"] == []
    assert found["results"] == found["operations"] > 0


def test_a_failing_seed_is_told_with_the_command_that_replays_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = Exploration(seeds=9, hangs=1, failures=[Failure(7, "hang", "rank 1 never ends\nseed 7: 2 ranks, kill")])
    monkeypatch.setattr("lab.simulated_faults.explore", lambda *_, **__: found)
    file = tmp_path / "found.json"
    status, output = _faults("--seeds", "9", "--ranks", "2..5", "--json", str(file))
    assert status == 1
    assert "hang: rank 1 never ends" in output
    assert "python -m lab simulated-faults --replay 7 --ranks 2..5" in output
    assert json.loads(file.read_text())["failures"][0]["seed"] == 7


def test_a_seed_is_replayed_with_its_trace(tmp_path: Path) -> None:
    trace, again, file = tmp_path / "trace", tmp_path / "again", tmp_path / "found.json"
    status, output = _faults("--replay", "3", "--ranks", "4", "--trace", str(trace), "--json", str(file))
    assert status == 0, output
    assert "seed 3: 4 ranks" in output
    assert "nothing wrong" in output
    assert _faults("--replay", "3", "--ranks", "4", "--trace", str(again))[0] == 0
    assert trace.read_bytes() == again.read_bytes()
    told = json.loads(file.read_text())
    assert told["findings"] == []
    assert told["events"] == trace.read_text().count("\n")
    assert told["trace_hash"] in output


def test_what_a_replay_finds_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = Replayed(3, "seed 3: 2 ranks", [("hang", "rank 0 never ends")], ["rank 1: it is gone"], 5, 1, "")
    monkeypatch.setattr("lab.simulated_faults.replay", lambda *_, **__: bad)
    status, output = _faults("--replay", "3")
    assert status == 1
    assert "hang: rank 0 never ends" in output
    assert "rank 1: it is gone" in output


def test_a_seed_that_would_end_this_process_is_not_replayed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = Exploration(seeds=1, crashes=1, failures=[Failure(3, "crash", "the process ended by signal SIGABRT")])
    monkeypatch.setattr("lab.simulated_faults.explore", lambda *_, **__: found)
    monkeypatch.setattr("lab.simulated_faults.replay", lambda *_, **__: pytest.fail("replayed"))
    file = tmp_path / "found.json"
    status, output = _faults("--replay", "3", "--json", str(file))
    assert status == 1
    assert "crash: the process ended by signal SIGABRT" in output
    assert json.loads(file.read_text())["findings"][0]["what"] == "crash"


def test_an_interrupt_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> Exploration:
        raise KeyboardInterrupt

    monkeypatch.setattr("lab.simulated_faults.explore", interrupted)
    status, output = _faults("--seeds", "5")
    assert status == 130
    assert "stopped" in output


@pytest.mark.parametrize(
    "options", [["--seeds", "5", "--json"], ["--replay", "3", "--json"], ["--replay", "3", "--trace"]]
)
def test_a_file_that_cannot_be_written_after_all_is_said(options: list[str]) -> None:
    status, output = _faults("--ranks", "2..4", *options, "/dev/full")
    assert status == 1
    assert "cannot write /dev/full: No space left on device" in output


def test_help_lists_the_troubles() -> None:
    status, output = _faults("--help")
    assert status == 0
    assert set(troubles()) <= set(re.findall(r"\w+", output))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--ranks", "1..4"], "is no range of ranks"),
        (["--ranks", "9..4"], "is no range of ranks"),
        (["--ranks", "many"], "is no range of ranks"),
        (["--only", "sunshine"], "'sunshine' is no trouble: use none, slow_link,"),
        (["--only", "hold"], "none of the seeds 0 to 4 has the trouble 'hold': look at more"),
        (["--first-seed", "18446744073709551616"], "'--first-seed'"),
        (["--first-seed", "18446744073709551612"], "5 seeds from 18446744073709551612 go beyond"),
        (["--replay", "18446744073709551616"], "'--replay'"),
        (["--seeds", "99999999999999999999999"], "'--seeds'"),
        (["--json", "/proc/found"], "--json: cannot write /proc/found: No such file or directory; name another file"),
        (["--replay", "5", "--trace", "/proc/trace"], "--trace: cannot write /proc/trace: No such file"),
        (["--json", "/nowhere/at/all.json"], "does not exist"),
        (["--trace", "trace.txt"], "give --replay"),
        (["--replay", "5", "--seeds", "10000"], "--seeds: --replay plays one seed alone: leave this out"),
        (["--replay", "5", "--first-seed", "2"], "--first-seed: --replay plays one seed alone"),
        (["--replay", "5", "--only", "kill"], "--only: --replay plays one seed alone"),
    ],
)
def test_bad_options_are_refused(options: list[str], said: str) -> None:
    status, output = _faults(*(() if {"--seeds", "--replay"} & {*options} else ("--seeds", "5")), *options)
    assert status == 2
    assert said in " ".join(output.replace("│", " ").split())
