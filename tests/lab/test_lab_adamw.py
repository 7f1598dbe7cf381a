"""``python -m lab adamw``: its methods keep what they do not send, the library does the same, rows and resuming."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

from lab import adamw
from lab.accuracy.one_process import OneProcess
from lab.adamw import (
    EXACT,
    NEAREST_4,
    PLANS,
    RANKS,
    EF21Momentum,
    Floats,
    LocalAdam,
    LowRankFactors,
    OwnTopK,
    Rounding,
    SharedMask,
    average,
    largest,
    means,
    plot,
)
from telegrad import Communicator, TopK

_app = typer.Typer()
_app.command()(adamw.command)

SHAPE = (48, 96)
STEPS = 6


def _run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(_app, arguments, env={"COLUMNS": "200"})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


def _gradients(rows: int, step: int) -> Floats:
    return np.random.default_rng(step).standard_normal((rows, SHAPE[0] * SHAPE[1]), np.float32)


WITH_RESIDUAL = [
    name
    for name, plan in PLANS.items()
    if plan.make is not None and not plan.is_update and name not in ("topk-1-decay", "ef21-momentum-1")
]


@pytest.mark.parametrize("name", WITH_RESIDUAL)
def test_what_was_given_is_what_was_sent_and_what_is_kept(name: str) -> None:
    make = PLANS[name].make
    assert make is not None
    method = make(SHAPE)
    rows = 1 if PLANS[name].linear else RANKS
    given, sent = np.zeros(SHAPE[0] * SHAPE[1]), np.zeros(SHAPE[0] * SHAPE[1])
    for step in range(STEPS):
        gradients = _gradients(rows, step)
        given += gradients.mean(0, dtype=np.float64)
        sent += method.step(gradients)
    kept = method.kept.mean(0, dtype=np.float64)
    assert np.abs(kept).max() > 0
    np.testing.assert_allclose(sent + kept, given, atol=2e-4)
    assert method.sent > 0


def test_a_decaying_residual_loses_its_share_and_no_more() -> None:
    method = OwnTopK(SHAPE, 0.01, decay=0.9)
    for step in range(STEPS):
        gradients = _gradients(RANKS, step)
        before = method.kept.copy()
        average_of_ranks = method.step(gradients)
        np.testing.assert_allclose(
            average_of_ranks + method.kept.mean(0), (0.9 * before + gradients).mean(0), atol=1e-5
        )


def test_local_adam_keeps_what_it_does_not_send_of_the_updates() -> None:
    method = LocalAdam(SHAPE, 0.01, decay=1.0, betas=(0.5, 0.95))
    first, second, given = np.zeros((3, RANKS, SHAPE[0] * SHAPE[1]))
    sent = np.zeros(SHAPE[0] * SHAPE[1])
    for step in range(STEPS):
        gradients = _gradients(RANKS, step)
        first = 0.5 * first + 0.5 * gradients
        second = 0.95 * second + 0.05 * gradients.astype(np.float64) ** 2
        given += first / (1 - 0.5 ** (step + 1)) / (np.sqrt(second / (1 - 0.95 ** (step + 1))) + 1e-8)
        sent += method.step(gradients)
    np.testing.assert_allclose(sent + method.kept.mean(0), given.mean(0), atol=1e-3)


def test_ef21_estimates_are_the_momentum_less_what_is_not_known_yet() -> None:
    method = EF21Momentum(SHAPE, 0.05, momentum=0.9)
    momentum = np.zeros((RANKS, SHAPE[0] * SHAPE[1]))
    for step in range(STEPS):
        gradients = _gradients(RANKS, step)
        momentum += 0.1 * (gradients - momentum)
        estimate = method.step(gradients)
        np.testing.assert_allclose(estimate + method.kept.mean(0), momentum.mean(0), atol=1e-5)
    assert 0 < np.abs(method.kept).max() < np.abs(momentum).max()


@pytest.mark.parametrize("choose", ["ideal", "moment", "cyclic", "sketch"])
def test_one_mask_sends_about_as_many_entries_as_asked_for(choose: str) -> None:
    method = SharedMask(SHAPE, 0.125, EXACT, choose=choose)
    for step in range(STEPS):
        sent = np.count_nonzero(method.step(_gradients(1, step)))
        assert 0.8 * 0.125 <= sent / (SHAPE[0] * SHAPE[1]) <= 1.1 * 0.125  # moments and turns can meet


def test_blocks_in_turn_send_everything_once_in_a_round() -> None:
    method = SharedMask(SHAPE, 0.125, EXACT, choose="cyclic")
    sent = sum(method.step(np.ones((1, SHAPE[0] * SHAPE[1]), np.float32)) != 0 for _ in range(8))
    assert np.all(np.asarray(sent) == 1)


def test_low_rank_sends_a_matrix_of_that_rank_whole() -> None:
    random = np.random.default_rng(3)
    matrix = (random.standard_normal((SHAPE[0], 2)) @ random.standard_normal((2, SHAPE[1]))).astype(np.float32)
    for power in (0.0, 0.5):
        method = LowRankFactors(SHAPE, 2, EXACT, power=power)
        np.testing.assert_allclose(method.step(matrix.reshape(1, -1)), matrix.reshape(-1), atol=1e-4)
        assert np.abs(method.kept).max() < 1e-4


def test_scaling_keeps_errors_of_large_rows_out_of_small_ones() -> None:
    """What a product of low rank gets wrong lands in all rows. In those of small gradients it is many times these."""
    sizes = np.where(np.arange(SHAPE[0]) % 2, 1, 0.01)[:, None].astype(np.float32)
    share = {}
    for power in (0.0, 0.5):
        method = LowRankFactors(SHAPE, 4, EXACT, power=power)
        for step in range(30):
            method.step((_gradients(1, step).reshape(SHAPE) * sizes).reshape(1, -1))
        kept = np.abs(method.kept.reshape(SHAPE))
        share[power] = kept[::2].mean() / kept[1::2].mean()
    assert share[0.0] > 0.1
    assert share[0.5] < 0.03


def test_the_largest_are_as_many_as_asked_for_where_many_are_alike() -> None:
    assert largest(np.ones(10, np.float32), 3).tolist() == [0, 1, 2]
    assert largest(np.array([1, 5, 2, 5, 0], np.float32), 2).tolist() == [1, 3]
    assert largest(np.array([1, 5], np.float32), 3).tolist() == [0, 1]


def test_rounding_gives_neighbouring_levels() -> None:
    values = np.random.default_rng(0).standard_normal((2, 3000)).astype(np.float32)
    for at_random in (False, True):
        rounding = Rounding(7, 1024, at_random)
        level = np.abs(values[:, :1024]).max(1, keepdims=True) / 7
        off = np.abs(rounding(values) - values)[:, :1024] / level
        assert off.max() <= (1.0001 if at_random else 0.5001)
    assert Rounding(7, 1024).bits == 4 + 1 / 32
    assert EXACT.bits == 32
    np.testing.assert_array_equal(EXACT(values), values)


# The library does what the references say.


def test_sums_in_four_bits_are_those_of_the_library() -> None:
    comms = Communicator.local(RANKS)
    values = np.random.default_rng(1).standard_normal((RANKS, RANKS * 2048)).astype(np.float32)
    outs, errors = np.empty_like(values), np.empty_like(values)
    works = [
        comm.all_reduce(own, "avg", out=out, wire="qsgd4", error=error, async_op=True)
        for comm, own, out, error in zip(comms, values, outs, errors, strict=True)
    ]
    for work in works:
        work.wait()
    expected, lost = average(values, NEAREST_4)
    np.testing.assert_allclose(outs[0], expected, atol=1e-5)
    np.testing.assert_allclose(errors, lost, atol=1e-5)
    for comm in comms:
        comm.close()


def test_top_k_is_that_of_the_library() -> None:
    model = torch.nn.Linear(96, 48, bias=False)
    reference = OwnTopK(SHAPE, 0.01)
    with OneProcess(model, RANKS, {"compress": TopK(0.01, "topk")}) as ranks:
        for step in range(STEPS):
            gradients = _gradients(RANKS, step)
            for rank, own in enumerate(gradients):
                model.weight.grad = torch.from_numpy(own.reshape(SHAPE).copy())
                ranks.take(rank)
            ranks.average()
            assert model.weight.grad is not None
            np.testing.assert_allclose(model.weight.grad.numpy().reshape(-1), reference.step(gradients), atol=1e-5)


# The command


def _row(method: str, seed: int, loss: float, **more: Any) -> dict[str, Any]:
    return {
        "method": method,
        "about": "",
        "steps": 10,
        "seed": seed,
        "dense_steps": 0,
        "loss": loss,
        "mb_per_step": 1.0,
        "less": 30.0,
        **more,
    }


def test_means_compare_the_seeds_that_both_have() -> None:
    rows = [_row("dense", 0, 2.0), _row("dense", 1, 3.0), _row("topk-1", 0, 2.2), _row("lowrank-4", 2, 9.0)]
    found = {row["method"]: row for row in means(rows)}
    assert found["dense"]["loss"] == 2.5
    assert found["dense"]["spread"] == 0.5
    assert found["topk-1"]["behind"] == pytest.approx(10)
    assert found["lowrank-4"]["behind"] is None


def test_a_plot_needs_dense_runs(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no method has a dense run of its seeds and steps beside it: train dense"):
        plot([_row("topk-1", 0, 2.0)], "", tmp_path / "plot.png")


def test_a_killed_study_goes_on_and_every_row_has_its_bytes(tmp_path: Path) -> None:
    rows = tmp_path / "rows.json"
    text = tmp_path / "text"
    text.mkdir()
    for number in range(30):
        (text / f"{number}.py").write_text(f"# file {number}\n" + "def f(x):\n    return x + 1\n" * 40)
    same = ("--width", "56", "--steps", "2", "--text", str(text), "--json", str(rows))
    status, output = _run("--methods", "dense,topk-1", *same)
    assert status == 0
    before = json.loads(rows.read_text())["rows"]
    assert [row["method"] for row in before] == ["dense", "topk-1"]
    assert before[0]["less"] == 1
    some = (
        "dense",
        "topk-1",
        "library-topk-2-qsgd4",
        "local-adam-1",
        "sketch-12-nearest4",
        "lowrank-16-scaled-nearest8",
    )
    status, output = _run("--methods", ",".join(some), "--plot", str(tmp_path / "plot.png"), *same)
    assert status == 0
    after = json.loads(rows.read_text())["rows"]
    assert after[:2] == before
    assert {row["method"] for row in after} == set(some)
    assert all(row["less"] > 1 and np.isfinite(row["loss"]) for row in after if row["method"] != "dense")
    assert "lowrank-16-scaled-nearest8" in output
    assert (tmp_path / "plot.png").stat().st_size > 0
    status, _ = _run("--methods", "topk-1", "--dense-steps", "1", *same)
    last = json.loads(rows.read_text())["rows"][-1]
    assert last["dense_steps"] == 1
    assert last["less"] < next(row["less"] for row in after if row["method"] == "topk-1")


def test_rounding_to_the_nearest_loses_less_than_at_random(tmp_path: Path) -> None:
    for number in range(30):
        (tmp_path / f"{number}.py").write_text(f"# file {number}\n" + "def f(x):\n    return x + 1\n" * 40)
    status, output = _run("--rounding", "--width", "56", "--text", str(tmp_path))
    assert status == 0
    lost = {}
    for line in output.splitlines():
        if line.strip().startswith("4 %"):
            about = line.strip().removeprefix("4 %").strip()
            name, shares = about.split("   ")[0], about.split("%")
            lost[name.strip()] = float(shares[0].split()[-1])
    assert 0 < lost["4 bits to the nearest"] < lost["4 bits at random"]
    assert lost["2 bits to the nearest"] <= 100 < lost["2 bits at random"]


def test_refused() -> None:
    status, output = _run("--methods", "best")
    assert status == 2
    assert "best" in output
    status, output = _run("--methods", "topk-1", "--plot", "plot.png")
    assert status == 2
    assert "--plot compares with dense" in " ".join(output.replace("│", " ").split())
    status, output = _run("--width", "50")
    assert status == 2
    assert "no multiple of 7" in output
