"""``python -m lab oktopk-adamw``: its variants keep what they do not send, Ok-Topk's sum, rows and resuming."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
import typer
from torch import Tensor
from typer.testing import CliRunner

from lab import oktopk_adamw
from lab.oktopk_adamw import RANKS, VARIANTS, Exchange, Run, Variant, best_of, trained
from telegrad.tools.demo.job import Corpus

SIZES = (300, 200)
RATES = (1.0, 0.5, 0.25, 0.125)

_app = typer.Typer()
_app.command()(oktopk_adamw.command)


def _gradients(step: int) -> Tensor:
    return torch.randn(RANKS, sum(SIZES), generator=torch.Generator().manual_seed(step))


NOTHING_LOST = [name for name, one in VARIANTS.items() if one.decay == 1 and not one.momentum and not one.smooth]


@pytest.mark.parametrize("name", NOTHING_LOST)
def test_what_is_given_is_sent_or_kept(name: str) -> None:
    variant = VARIANTS[name]
    exchange = Exchange(SIZES, variant)
    given, got = torch.zeros(2, sum(SIZES))
    for step, rate in enumerate(RATES):
        unit = rate if variant.in_steps else 1.0
        gradients = _gradients(step)
        given += gradients.sum(0) * unit
        got += exchange.average(gradients, rate) * RANKS * unit
    torch.testing.assert_close(got + exchange.residuals.sum(0), given)
    wanted = round(variant.density * SIZES[0]) + round(variant.density * SIZES[1])
    assert exchange.kept == wanted * len(RATES) or variant.keeps == "all"
    assert exchange.kept >= wanted * len(RATES)


@pytest.mark.parametrize("name", ["oktopk", "spread-steps"])
def test_a_dense_step_sends_what_waits(name: str) -> None:
    exchange = Exchange(SIZES, VARIANTS[name])
    unit = 0.5 if VARIANTS[name].in_steps else 1.0
    exchange.average(_gradients(0), 0.5)
    waits, mean = exchange.residuals.mean(0), _gradients(1).mean(0)
    assert torch.count_nonzero(waits) > 0
    torch.testing.assert_close(exchange.average_densely(mean, 0.5), mean + waits / unit)
    assert torch.count_nonzero(exchange.residuals) == 0


def test_which_steps_are_dense() -> None:
    one = Variant("", first=0.1, every=7)
    assert [step for step in range(20) if one.is_dense(step, 20)] == [0, 1, 7, 14]


def test_a_rank_may_select_from_all_tensors_together() -> None:
    exchange = Exchange(SIZES, Variant("", density=0.01, at_once=True))
    gradients = _gradients(0)
    gradients[:, SIZES[0] :] *= 100
    assert exchange.average(gradients, 1.0)[: SIZES[0]].count_nonzero() == 0


def test_the_optimizer_may_get_sums_late() -> None:
    late = Exchange(SIZES, Variant("", density=1.0, keeps="all", smooth=0.75))
    ones = torch.ones(RANKS, sum(SIZES))
    found = [late.average(ones * (step == 0), 1.0)[0].item() for step in range(3)]
    assert found == [0.25, 0.75 * 0.25, 0.75 * 0.75 * 0.25]


def test_residuals_decay_before_they_are_added_to() -> None:
    exchange = Exchange(SIZES, Variant("", decay=0.5))
    exchange.average(_gradients(0), 1.0)
    before = exchange.residuals.sum(0)
    found = exchange.average(_gradients(1), 1.0)
    torch.testing.assert_close(found * RANKS + exchange.residuals.sum(0), before / 2 + _gradients(1).sum(0))


def test_own_momentum_forgets_what_was_sent() -> None:
    exchange = Exchange(SIZES, Variant("", density=1.0, momentum=0.5))
    ones = torch.ones(RANKS, sum(SIZES))
    assert [exchange.average(ones * (step == 0), 1.0)[0].item() for step in range(2)] == [0.5, 0.0]


def test_ok_topk_keeps_the_largest_of_the_sum_of_the_largest() -> None:
    exchange, gradients = Exchange((500,), Variant("", density=0.02)), _gradients(3)
    found = exchange.average(gradients, 1.0)
    total = torch.zeros(500)
    for own in gradients:
        where = own.abs().topk(10).indices
        total[where] += own[where]
    expected = torch.where(total.abs() >= total.abs().topk(10).values[-1], total, 0) / RANKS
    torch.testing.assert_close(found, expected)
    for own, given in zip(exchange.residuals, gradients, strict=True):
        sent = (own == 0) & (given != 0)
        assert set(sent.nonzero().flatten().tolist()) <= set(given.abs().topk(10).indices.tolist())
        assert bool((found[sent] != 0).all())


def test_all_ranks_values_at_the_places_that_are_kept() -> None:
    exchange, gradients = Exchange(SIZES, VARIANTS["whole"]), _gradients(4)
    found = exchange.average(gradients, 1.0)
    places = found != 0
    torch.testing.assert_close(found[places], gradients.mean(0)[places])
    assert bool((exchange.residuals[:, places] == 0).all())


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    (folder / "library").mkdir()
    for number in range(12):
        (folder / "library" / f"module_{number}.py").write_text("def f(x):\n    return x + 1\n" * 200)
    Corpus.prepare(folder, folder / "library")
    return folder


@pytest.mark.parametrize("name", ["dense", "oktopk", "local-steps", "momentum"])
def test_a_run_gives_a_row(name: str, texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lab.accuracy.problems.WINDOWS_AT_THE_END", 8)
    counted: list[None] = []
    row = trained(Run(name, 0, 10), texts, lambda: counted.append(None))
    assert len(counted) == 10
    assert 0 < row["loss"] < 10
    assert row["kept"] == 1.0 if name == "dense" else 0 < row["kept"] <= 0.0101  # entries that are zero are not kept


def test_a_variant_is_told_at_its_best_rate() -> None:
    rows = [
        {"variant": variant, "steps": 9, "seed": seed, "rate": rate, "loss": loss}
        for variant, seed, rate, loss in (
            ("dense", 0, 1.0, 2.0),
            ("dense", 0, 0.5, 2.5),
            ("oktopk", 0, 1.0, 3.0),
            ("oktopk", 0, 0.5, 2.1),
        )
    ]
    found = best_of(rows)
    assert [(row["variant"], row["rate"], row["rates"]) for row in found] == [
        ("dense", 1.0, [0.5, 1.0]),
        ("oktopk", 0.5, [0.5, 1.0]),
    ]
    assert [row["behind"] for row in found] == [0, pytest.approx(5)]
    assert best_of(rows[2:])[0]["behind"] is None


def test_the_command_goes_on(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lab.accuracy.problems.WINDOWS_AT_THE_END", 8)
    file = tmp_path / "rows.json"

    def run(*arguments: str) -> tuple[int, str]:
        given = ("--text", str(texts / "library"), "--steps", "2", "--json", str(file), *arguments)
        done = CliRunner().invoke(_app, given, env={"COLUMNS": "200"})
        return done.exit_code, done.output

    status, output = run("--variants", "dense", "--rates", "1,0.5")
    assert status == 0, output
    first = json.loads(file.read_text())["rows"]
    assert [(row["variant"], row["rate"]) for row in first] == [("dense", 1.0), ("dense", 0.5)]
    status, output = run("--variants", "dense,oktopk")
    assert status == 0, output
    assert json.loads(file.read_text())["rows"][:2] == first
    assert "oktopk" in output
    status, output = run("--variants", "none")
    assert status == 2
