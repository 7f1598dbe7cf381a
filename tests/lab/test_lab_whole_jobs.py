"""``python -m lab whole-jobs``: the prediction, what is judged, printed and written; and one small job."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from lab import whole_jobs
from lab.whole_jobs import JOBS, Row, WholeJob, lines_of, predicted, row_of
from telegrad.cost import Costs, Place, Tuning, allreduce_table
from telegrad.launch import LaunchError
from telegrad.synchronizer.trace import Trace

pytestmark = pytest.mark.ranks("torch")

_app = typer.Typer()
_app.command()(whole_jobs.command)

COSTS = Costs(20e-6, 8.5e-8, gamma_s_per_byte=1e-10)
TUNING = Tuning(Place("ucx", (("one", 2),)), COSTS, allreduce_table(2, COSTS), "2026-11-28T00:00:00Z", "0.1.0", 0.1)
TRACE = Trace(("b", "a"), (1 << 20, 1 << 20), (0.01, 0.02), 0.01, "by hand", accumulate=2, rest_s=0.005)
JOB = WholeJob("by-hand", "large", "100mbit", "adamw", 20, accumulate=2)


def _run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(_app, arguments, env={"COLUMNS": "200"})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, " ".join(done.output.replace("│", " ").split())


def test_recorded_steps_are_scaled_to_their_mean() -> None:
    alone_s = [0.1, 0.24]  # their mean is twice 2 · 40 ms + 5 ms
    found = predicted(JOB, TUNING, TRACE, alone_s).of("ddp")
    assert found.alone_s == pytest.approx(0.08 + 0.01)
    assert found.step.compute_s == pytest.approx(0.08)


def test_a_row_has_the_whole_job_s_speed_up_and_how_far_it_is_off() -> None:
    row = row_of(JOB, TUNING, TRACE, [0.085], [0.5] * 20, [0.5] * 2 + [0.1] * 18)
    assert row["measured_speedup"] == pytest.approx(10 / 2.8)
    assert row["ratio"] == pytest.approx(row["predicted_speedup"] / (10 / 2.8))
    assert row["predicted_speedup"] == pytest.approx(row["predicted_dense_s"] / row["predicted_compressed_s"])
    steps = row["predicted_step_s"]
    assert row["predicted_compressed_s"] == pytest.approx(2 * steps["dense"] + 18 * steps["compressed"])
    assert row["median_step_s"] == {"dense": 0.5, "compressed": 0.1}
    assert "store" not in row


def test_misses_are_told() -> None:
    rows = [{"name": "a", "ratio": 1.1}, {"name": "b", "ratio": 0.8}]
    assert [*lines_of(rows)] == ["1 of 2 speed-ups are within 15%", "not within: b"]
    assert [*lines_of(rows[:1])] == ["1 of 1 speed-ups are within 15%"]


def test_two_models_two_networks_and_accumulation_are_judged() -> None:
    assert len(JOBS) == 5
    assert {one.model for one in JOBS} == {"gpt", "large"}
    assert {one.network for one in JOBS} == {"100mbit", "1gbit"}
    assert {one.accumulate for one in JOBS} == {1, 8}
    assert {one.ranks for one in JOBS} == {2}


def test_rows_are_shown_and_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def ideal(job: WholeJob, **_: Any) -> Row:
        return row_of(job, TUNING, TRACE, [0.085], [0.5] * job.steps, [0.1] * job.steps)

    monkeypatch.setattr(whole_jobs, "run", ideal)
    file = tmp_path / "rows.json"
    status, said = _run("--jobs", "gpt-1gbit,wide-100mbit", "--json", str(file))
    assert status == 0
    assert "5.00x" in said
    written = json.loads(file.read_text())
    assert [row["name"] for row in written["rows"]] == ["gpt-1gbit", "wide-100mbit"]
    assert written["machine"]["date"]


def test_a_job_that_fails_is_told_and_ends_it_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(job: WholeJob, **_: Any) -> Row:
        raise LaunchError("rank 1 is gone")

    monkeypatch.setattr(whole_jobs, "run", failing)
    status, said = _run("--jobs", "gpt-1gbit")
    assert status == 1
    assert "gpt-1gbit: rank 1 is gone" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--jobs", "huge"], "'huge' does not exist: use gpt-100mbit, "),
        (["--json", "/nowhere/x.json"], "does not exist"),
    ],
)
def test_misuse_is_refused(arguments: list[str], said: str) -> None:
    status, text = _run(*arguments)
    assert status == 2
    assert said in text


@pytest.mark.parametrize("name", ["gpt-1gbit", "wide-1gbit-x8"])
def test_a_small_job(name: str) -> None:
    """Over shared memory, so that it needs no root."""
    (job,) = (one for one in JOBS if one.name == name)
    turns: list[None] = []
    passes = min(job.accumulate, 2)
    small = replace(job, network="shm", steps=10, turn=5, recorded=3, alone=1, accumulate=passes, calibration_s=0.3)
    row = whole_jobs.run(small, timeout_s=110, on_turn=lambda: turns.append(None))
    assert len(turns) == 2
    assert row["trace"]["accumulate"] == passes
    assert row["measured_speedup"] > 0
    assert row["predicted_speedup"] > 0
    assert row["later_ratio"] > 0
    assert len(row["steps_s"]["dense"]) == len(row["steps_s"]["compressed"]) == 10
