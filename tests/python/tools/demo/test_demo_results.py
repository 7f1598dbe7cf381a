"""What is concluded from what the ranks say."""

from __future__ import annotations

import json
import math

import pytest

from telegrad.tools.demo.job import FIRST_LOSS, RunResult, as_json, equal_wall_s


def _result(name: str, step_s: float, losses: list[float], sent: float) -> RunResult:
    """A run of two ranks with a validation after each step; rank 1 sends three times as much as rank 0."""
    made = RunResult(name)

    def say(kind: str, **fields: object) -> None:
        assert made.take(json.dumps({"kind": kind, **fields})) == kind

    say("start", parameters=1000, tokens=256)
    for step, loss in enumerate(losses, start=1):
        say("step", step=step, loss=loss, step_s=step_s, exposed_s=step_s / 2, sent=sent * step)
        say("validation", step=step, loss=loss, training_s=step_s * step, sent=sent * step)
    total = sent * len(losses)
    by_rank = {"sent_by_rank": [total, 3 * total], "weights_by_rank": [0.5, 0.5]}
    say("end", training_s=step_s * len(losses), sent=total, **by_rank)
    return made


@pytest.fixture
def runs() -> list[RunResult]:
    return [
        _result("ddp-gloo", 0.4, [4.0, 3.0, 2.0, 1.0], 3e7),
        _result("telegrad-dense", 0.3, [4.0, 3.0, 2.0, 1.0], 3e7),
        _result("telegrad-sparse", 0.2, [4.2, 3.2, 2.2, 1.1], 1e6),
    ]


def test_figures(runs: list[RunResult]) -> None:
    ddp = runs[0]
    assert ddp.validation_loss == 1.0
    assert ddp.bits_per_byte == pytest.approx(1 / math.log(2))
    assert ddp.step_s_median == 0.4
    assert ddp.exposed_s_median == 0.2
    assert ddp.bytes_per_rank_step == 6e7
    assert ddp.smoothed_loss(over=2) == 1.5
    assert ddp.ranks_agree is True


def test_json_of_runs_that_were_not_done() -> None:
    figures = as_json([], network="shm", ranks=4, steps=4, missing={"telegrad-sparse": "not on a device"})
    assert figures["runs"] == []
    assert figures["missing"] == {"telegrad-sparse": "not on a device"}


def test_loss_at_equal_wall_time(runs: list[RunResult]) -> None:
    assert equal_wall_s(runs) == pytest.approx(0.8)
    ddp, _, sparse = runs
    assert ddp.loss_at(0) == FIRST_LOSS
    assert ddp.loss_at(0.2) == pytest.approx((FIRST_LOSS + 4) / 2)
    assert ddp.loss_at(0.8) == pytest.approx(3.0)
    assert ddp.loss_at(1.0) == pytest.approx(2.5)
    assert sparse.loss_at(0.8) == 1.1
    assert sparse.loss_at(99) == 1.1


def test_json(runs: list[RunResult]) -> None:
    figures = json.loads(json.dumps(as_json(runs, network="1gbit", ranks=2, steps=4), allow_nan=False))
    assert set(figures) == {"runs", "missing", "network", "ranks", "steps"}
    assert (figures["network"], figures["ranks"], figures["steps"]) == ("1gbit", 2, 4)
    assert [run["name"] for run in figures["runs"]] == ["ddp-gloo", "telegrad-dense", "telegrad-sparse"]
    sparse = figures["runs"][2]
    assert sparse["validation_loss"] == sparse["validation_loss_at_equal_wall"] == 1.1
    assert sparse["wall_s"] == sparse["equal_wall_s"] == pytest.approx(0.8)
    assert sparse["bytes_per_rank_step"] == 2e6
    assert sparse["step_s_median"] == 0.2
    assert sparse["exposed_comm_s_median"] == 0.1
    assert len(sparse["curve"]) == 4


def test_a_diverged_run_is_still_json(runs: list[RunResult]) -> None:
    diverged = _result("telegrad-dense", 0.3, [4.0, math.nan], 3e7)
    figures = as_json([runs[0], diverged], network="1gbit", ranks=2, steps=4)
    json.dumps(figures, allow_nan=False)
    assert figures["runs"][1]["validation_loss"] is None
    assert figures["runs"][0]["validation_loss"] == 1.0


def test_ranks_that_differ() -> None:
    result = RunResult("ddp-gloo")
    end = {"kind": "end", "training_s": 1, "sent": 1, "sent_by_rank": [1, 1], "weights_by_rank": [0.5, 0.6]}
    result.take(json.dumps(end))
    assert result.ranks_agree is False


def test_other_output_is_left_alone() -> None:
    result = RunResult("ddp-gloo")
    assert result.take("Warning: something") is None
    assert result.take('{"other": 1}') is None
    assert math.isnan(result.validation_loss)
