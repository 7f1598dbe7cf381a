"""Recipes of whole jobs: dense first steps, their line of code, and the accuracy that the study found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from telegrad.tools.advise.advice import (
    ACCURACY,
    ACCURACY_SOURCE,
    FAMILIES,
    LONG_LOW_RANK_SOURCE,
    LOW_RANK_ACCURACY,
    LOW_RANK_SOURCE,
    RECIPES,
    SLOW_SOURCE,
    expected_loss,
    recipe_of,
)

ROOT = Path(__file__).resolve().parents[4]


def test_every_row_is_the_study_s() -> None:
    rows = json.loads((ROOT / ACCURACY_SOURCE).read_text())["rows"]
    measured = {(row["task"], row["method"], row["density"]): row for row in rows if row["part"] == "methods"}
    for one in ACCURACY:
        row = measured[one.task, one.method, one.density]
        places = 1 if one.family == "language" else 2
        assert one.loss == pytest.approx(round(row["behind_dense"], places)), one
        assert one.seeds == len(row["seeds"])
        assert one.family in FAMILIES
        assert row["judged_by"] == ("loss" if one.family == "language" else "accuracy")


def test_every_row_of_low_rank_is_measured() -> None:
    long = {row["task"]: row for row in _rows(LONG_LOW_RANK_SOURCE) if row["method"] == "lowrank-4"}
    held_out = {row["method"]: row["held_out"] for row in _rows(SLOW_SOURCE)}
    short = {
        name: [row["loss"] for row in _rows(LOW_RANK_SOURCE) if row["method"] == name]
        for name in ("dense", "library-lowrank-16")
    }
    for one in LOW_RANK_ACCURACY:
        if one.source == LOW_RANK_SOURCE:
            above = 100 * (sum(short["library-lowrank-16"]) / sum(short["dense"]) - 1)
            assert (one.loss, one.seeds) == (pytest.approx(round(above, 1)), 3)
        elif one.source == LONG_LOW_RANK_SOURCE:
            assert one.loss == pytest.approx(round(long[one.task]["behind_dense"], 2 if one.points else 1)), one
        elif one.source == SLOW_SOURCE:
            above = 100 * (held_out["lowrank-16-warm"] / held_out["dense"] - 1)
            assert one.loss == pytest.approx(round(above, 1))


def _rows(source: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((ROOT / source).read_text())["rows"]
    return found


@pytest.mark.parametrize(
    ("optimizer", "steps", "dense"),
    [("adamw", 1000, 100), ("adam", 30, 3), ("adamw", 9, 0), ("sgd", 1000, 0), ("sgd-momentum", 19, 1)],
)
def test_a_tenth_of_the_steps_is_dense_where_the_optimizer_needs_it(optimizer: str, steps: int, dense: int) -> None:
    recipe = recipe_of(optimizer)
    assert recipe.dense_steps(steps) == dense
    assert recipe.share_of(steps) == dense / steps
    assert recipe.share_of(None) == recipe.dense_share


def test_options_are_those_of_the_optimizer() -> None:
    assert recipe_of("adamw").options(None) == "warmup=telegrad.Warmup(steps=total_steps // 10)"
    assert recipe_of("adamw").options(2000) == "warmup=telegrad.Warmup(steps=200)"
    assert recipe_of("sgd").options(2000) == ""
    assert recipe_of("sgd-momentum").options(2000) == (
        "warmup=telegrad.Warmup(steps=200), momentum=telegrad.Momentum(0.9), optimizer=optimizer"
    )


def test_the_nearest_row_of_the_study_is_found() -> None:
    def found(*arguments: object) -> tuple[str, float | None, float]:
        row = expected_loss(*arguments)  # type: ignore[arg-type]
        assert row is not None
        return row.task, row.density, row.loss

    assert found("topk", "adamw", "language", 0.01) == ("gpt", 0.01, 1.4)
    assert found("topk", "adam", "language", 0.001) == ("gpt", 0.001, 4.5)
    assert found("topk", "adamw", "vision", 0.02) == ("gpt", 0.01, 1.4)  # no vision model was trained with AdamW
    assert found("topk", "sgd", "vision", 0.001) == ("vgg", 0.001, 0.06)  # the worse of two
    assert found("oktopk", "sgd", "vision", 0.01) == ("resnet", 0.001, 1.47)
    assert found("topk", "sgd-momentum", "vision", 0.001) == ("vgg-momentum", 0.001, 0.15)
    assert found("allgather", "adamw", "language", 0.001) == ("gpt", 0.001, 4.5)  # a sum of the same entries
    assert found("lowrank", "adam", "vision", 0.01) == ("cnn", None, 10.3)
    assert found("lowrank", "adamw", "language", 0.01) == ("demo", None, 0.6)
    assert found("lowrank", "adamw", None, 0.01) == ("cnn", None, 10.3)  # the worst, where nobody says what is trained
    assert found("lowrank", "sgd", "vision", 0.01) == ("resnet", None, -0.14)
    assert found("lowrank", "sgd-momentum", "language", 0.01) == ("vgg-momentum", None, 0.35)
    assert expected_loss("qsgd8", "adamw", "language", 0.01) is None
    assert expected_loss("oktopk", "sgd-momentum", "vision", 0.001) is None


def test_rows_are_told_with_what_they_are_of() -> None:
    gpt, vgg = (expected_loss("topk", *rest) for rest in (("adamw", "language", 0.01), ("sgd", "vision", 0.001)))
    assert gpt is not None
    assert (gpt.text, gpt.about) == ("loss +1.4 %", "gpt, AdamW, density 0.01, 3 seeds, 3,000 steps")
    assert vgg is not None
    assert vgg.text == "top-1 -0.06 points"
    assert (gpt.text_at(0.01), gpt.text_at(0.1)) == ("loss +1.4 %", "loss +1.4 % at 0.01")


def test_what_is_no_recipe_is_refused() -> None:
    with pytest.raises(ValueError, match="optimizer='lion' is not known: use one of adamw, adam, sgd, sgd-momentum"):
        recipe_of("lion")
    with pytest.raises(ValueError, match="steps=0 must be at least 1"):
        RECIPES["adamw"].dense_steps(0)
