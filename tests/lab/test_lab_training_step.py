"""``python -m lab training-step``: its options, what it judges, prints, writes and draws; and one small job."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from lab import training_step
from lab.common.models import MODELS
from lab.training_step import WAYS, Row, TrainingStepPlan, Verdict, verdicts_of
from telegrad.launch import LaunchError

pytestmark = pytest.mark.ranks("torch")

_app = typer.Typer()
_app.command()(training_step.command)


def _run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(_app, arguments, env={"COLUMNS": "200"})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, " ".join(done.output.replace("│", " ").split())


def _row(model: str, way: str, median_s: float, predicted_s: float | None = None, apart: float = 0.0) -> Row:
    plans = predicted_s is not None
    return {
        "model": model,
        "way": way,
        "network": "1gbit",
        "ranks": 4,
        "tensors": 3,
        "bytes": 4096,
        "samples": 9,
        "turns_s": [median_s] * 9,
        "median_s": median_s,
        "min_s": median_s,
        "p90_s": median_s * 1.2,
        "apart": apart,
        "predicted_s": predicted_s,
        "groups": 2 if plans else None,
        "exposed_s": 0.01 if plans else None,
        "backward_s": 0.05 if plans else None,
        "network_s": 0.03 if plans else None,
        "predicted_backward_s": predicted_s,
        "predicted_network_s": predicted_s,
    }


def _ideal(apart: float = 0.0, failing: str = "") -> Callable[..., list[Row]]:
    """``auto`` takes 100 ms and predicts 90; the others take 120, and DDP over telegrad 98."""

    def run(plan: TrainingStepPlan, *, timeout_s: float, on_block: Callable[[str], None]) -> list[Row]:
        assert timeout_s > 0
        if plan.model == failing:
            raise LaunchError("rank 1 is gone")
        for _ in range(plan.blocks):
            on_block("auto")
        times = {**dict.fromkeys(plan.ways, 0.12), "ddp-telegrad": 0.098}
        rows = [_row(plan.model, way, times[way], apart=apart) for way in plan.ways if way != "auto"]
        return [*rows, _row(plan.model, "auto", 0.1, 0.09)]

    return run


def test_what_is_judged() -> None:
    rows = [_row("a", "single", 0.2), _row("a", "wfbp", 0.1), _row("a", "auto", 0.105, 0.12), _row("b", "auto", 1.0)]
    (one,) = verdicts_of(rows)
    assert (one.model, one.best) == ("a", "wfbp")
    assert one.ratio == pytest.approx(1.05)
    assert one.off == pytest.approx(0.12 / 0.105 - 1)
    assert one.error == 0
    assert not Verdict("a", "wfbp", 1.06, 0.01, None).is_as_fast
    assert not Verdict("a", "wfbp", 1.06, 0.01, None).is_predicted
    assert Verdict("a", "wfbp", 1.04, 0.01, -0.14).is_as_fast
    assert Verdict("a", "wfbp", 1.04, 0.01, -0.14).is_predicted
    assert not Verdict("a", "wfbp", 1.04, 0.01, -0.16).is_predicted
    assert verdicts_of([_row("a", "single", 0.2)]) == []


def test_turns_of_one_round_are_compared() -> None:
    """A machine that is slow in some rounds, others for each way, has medians that mislead."""
    auto, other = _row("a", "auto", 0.2, 0.2), _row("a", "single", 0.11)
    auto["turns_s"], other["turns_s"] = [0.1, 0.2, 0.2, 0.1, 0.2], [0.11, 0.22, 0.22, 0.11, 0.11]
    (one,) = verdicts_of([auto, other])
    assert one.ratio == pytest.approx(1 / 1.1)
    assert one.error == 0
    auto["turns_s"] = [0.11, 0.22, 0.22 * 1.1, 0.11 * 0.9, 0.11]
    (one,) = verdicts_of([auto, other])
    assert one.ratio == pytest.approx(1.0)
    assert 0 <= one.error < 0.1


def test_a_plan_travels_as_json() -> None:
    plan = TrainingStepPlan("shm", 2, "small", ("single", "auto"), store="/x")
    assert TrainingStepPlan.from_json(plan.to_json()) == plan
    assert plan.blocks == 2 * 9


def test_it_prints_writes_and_draws(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(training_step, "run", _ideal())
    to_json, to_plot = tmp_path / "steps.json", tmp_path / "steps.png"
    status, said = _run("--models", "small,mixed", "--json", str(to_json), "--plot-file", str(to_plot))
    assert status == 0
    assert "small: 3 gradients, 4 KiB; 4 ranks, 1gbit" in said
    assert "small: auto is no slower than ddp-telegrad (1.02 ± 0.00 of it, 1.05 allowed)" in said
    assert "its prediction is off by -10%, within 15%" in said
    found = json.loads(to_json.read_text())
    assert [row["way"] for row in found["rows"]] == [*WAYS] * 2
    assert [one["model"] for one in found["verdicts"]] == ["small", "mixed"]
    assert found["verdicts"][0]["error"] == 0
    assert len(found["rows"][0]["turns_s"]) == 9
    assert found["machine"]["cores"] >= 1
    assert to_plot.read_bytes().startswith(b"\x89PNG")


def test_a_miss_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(plan: TrainingStepPlan, **_: Any) -> list[Row]:
        return [_row(plan.model, "single", 0.05), _row(plan.model, "auto", 0.1, 0.05)]

    monkeypatch.setattr(training_step, "run", run)
    status, said = _run("--models", "large")
    assert status == 0
    assert "large: auto is SLOWER than single (2.00 ± 0.00 of it" in said
    assert "off by -50%, OUTSIDE of 15%" in said
    monkeypatch.setattr(
        training_step, "run", lambda plan, **_: [_row(plan.model, "single", 0.05), _row(plan.model, "auto", 0.1)]
    )
    assert "it made no plan" in _run("--models", "large")[1]


def test_wrong_weights_and_lost_ranks_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_step, "run", _ideal(apart=0.5))
    status, said = _run("--models", "large")
    assert status == 1
    assert "have trained other weights" in said
    monkeypatch.setattr(training_step, "run", _ideal(failing="large"))
    status, said = _run("--models", "small,large")
    assert status == 1
    assert "large: rank 1 is gone" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--models", "huge"], "'huge' does not exist"),
        (["--ways", "horovod"], "'horovod' does not exist"),
        (["--network", "fast"], "network 'fast' is not known"),
        (["--json", "/nowhere/x.json"], "does not exist"),
    ],
    ids=["model", "way", "network", "file"],
)
def test_misuse_is_refused(arguments: list[str], said: str) -> None:
    status, text = _run(*arguments)
    assert status == 2
    assert said in text


@pytest.mark.parametrize(
    ("name", "tensors", "smallest", "largest"),
    [("small", 194, 40, 36 << 10), ("large", 8, 1 << 10, 3 << 20), ("mixed", 42, 40, 2 << 20)],
    ids=lambda value: str(value),
)
def test_the_models_are_what_their_names_say(name: str, tensors: int, smallest: int, largest: int) -> None:
    model, x = MODELS[name]()
    sizes = [4 * one.numel() for one in model.parameters()]
    assert (len(sizes), min(sizes), max(sizes)) == (tensors, smallest, largest)
    model(x).sum().backward()
    assert all(one.grad is not None for one in model.parameters())
    assert torch.isfinite(model(x)).all()


def test_a_small_job() -> None:
    """Ways average alike, and the plan of measured times predicts."""
    ways = ("ddp-gloo", "ddp-telegrad", "wfbp", "auto")
    plan = TrainingStepPlan("shm", 2, "mixed", ways, rounds=1, steps=1, warmup=4, calibrates=False)
    blocks: list[str] = []
    rows = training_step.run(plan, timeout_s=120, on_block=blocks.append)
    assert [row["way"] for row in rows] == [*ways]
    assert sorted(blocks) == sorted([*ways] * 2)
    for row in rows:
        assert row["apart"] < 1e-4
        assert row["samples"] == len(row["turns_s"]) == 1
        assert row["median_s"] > 0
        assert (row["predicted_s"] is not None) == (row["way"] == "auto")
        assert (row["groups"] is None) == row["way"].startswith("ddp")
    assert {row["way"]: row["groups"] for row in rows}["wfbp"] == 42
