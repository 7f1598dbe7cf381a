"""Rows, tables and curves of made-up runs."""

from __future__ import annotations

import dataclasses
import io
import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rich")

from rich.console import Console

from lab.accuracy.plots import curve_of, plot
from lab.accuracy.results import best_rates, mean_over, rows_of
from lab.accuracy.runs import Run
from lab.accuracy.tables import sweep_table, tables_of


def result(task: str, method: str, values: tuple[float, ...], seed: int = 0, **changes: Any) -> dict[str, Any]:
    """A run of four steps and two points; the last values are given."""
    sparse = method != "dense"
    run = Run(task, method, changes.pop("density", 0.01) if sparse else 1.0, seed, 4, 8, 4, 2)
    run = dataclasses.replace(run, **changes)
    names = ("loss", "accuracy")[: len(values)]
    sent = 100 if sparse else 8000
    points = [
        {
            "step": step,
            **dict(zip(names, values, strict=True)),
            "training_loss": 1.0,
            "sent_bytes": sent * step,
            "reduced_density": (0.02 if step == 1 else 0.04) if sparse else 1.0,
            "selected": 1.25 if sparse else 1.0,
            "travelled": 0.015 if sparse else 1.0,
        }
        for step in (1, 4)
    ]
    return {
        "run": dataclasses.asdict(run),
        "parameters": 1000,
        "compressed_parameters": 990 if sparse else 0,
        "points": points,
        "diverged": None,
        "seconds": 2.0,
        "weights_crc32": 1,
    }


def diverged(task: str, method: str, seed: int = 0) -> dict[str, Any]:
    found = result(task, method, (1.0, 10.0), seed)
    return {**found, "points": [], "diverged": 3}


def text_of(*tables: Any) -> str:
    said = io.StringIO()
    console = Console(width=130, file=said)
    for table in tables:
        console.print(table)
    return said.getvalue()


def test_a_row_compares_the_means_of_the_same_seeds() -> None:
    rows = rows_of(
        [
            result("vgg", "reused", (0.4, 88.0), 1),
            result("vgg", "dense", (0.3, 90.0), 1),
            result("vgg", "dense", (0.3, 91.0), 0),
            result("vgg", "dense", (0.3, 95.0), 2),
            result("vgg", "reused", (0.4, 89.0), 0),
        ]
    )
    dense, reused = rows
    assert (dense["method"], dense["value"], dense["behind_dense"], dense["less"]) == ("dense", 92.0, 0.0, 1.0)
    assert (reused["value"], reused["lowest"], reused["highest"]) == (88.5, 88.0, 89.0)
    assert (reused["seeds"], reused["values"]) == ([0, 1], [89.0, 88.0])
    assert reused["behind_dense"] == 2.0  # without the third seed, which only dense training has
    assert (reused["sent_bytes_per_step"], reused["less"]) == (100, 80)
    assert reused["reduced_density"] == pytest.approx((0.02 + 3 * 0.04) / 4)
    assert (reused["selected"], reused["seconds"]) == (1.25, 4.0)
    text = text_of(*tables_of(rows))
    assert "1,000 parameters, 4 ranks, batch 8, 4 steps" in text
    assert " ".join(text.splitlines()[-2].split()) == "reused 1 % 2 88.50 ± 0.50 +2.00 0.1 kB 80.0x 1.5 % 3.5 % 1.25"


def test_every_method_is_compared_at_its_best_rate_of_the_first_seed() -> None:
    runs = [
        result("lstm-words", "dense", (5.0,), rate=0.5),
        result("lstm-words", "dense", (4.0,)),
        result("lstm-words", "dense", (4.5,), rate=2.0),
        result("lstm-words", "dense", (4.2,), 1),
        result("lstm-words", "topk", (4.3,)),
        result("lstm-words", "topk", (4.1,), rate=2.0),
        result("lstm-words", "topk", (9.0,), 1, rate=2.0),  # no judge of the rate
        {**diverged("lstm-words", "topk"), "run": result("lstm-words", "topk", (1.0,), rate=4.0)["run"]},
    ]
    assert {key[:3]: rate for key, rate in best_rates(runs).items()} == {
        ("lstm-words", "dense", 1.0): 1.0,
        ("lstm-words", "topk", 0.01): 2.0,
    }
    dense, topk = rows_of(runs)
    assert (dense["rate"], dense["values"], dense["rates"]) == (1.0, [4.0, 4.2], {"0.5": 5.0, "1": 4.0, "2": 4.5})
    assert (topk["rate"], topk["values"], topk["rates"]) == (2.0, [4.1, 9.0], {"1": 4.3, "2": 4.1, "4": None})
    assert topk["behind_dense"] == pytest.approx(100 * (6.55 / 4.1 - 1))
    lines = [" ".join(line.split()) for line in text_of(*tables_of(rows_of(runs[:-1]))).splitlines()]
    assert "method density rate seeds loss (nats/token)" in " ".join(lines)
    assert any(line.startswith("dense 3 2 4.1000") for line in lines)
    assert any(line.startswith("topk 1 % 6 (end) 2 6.5500") for line in lines)


def test_runs_of_before_there_were_rates_have_the_rate_1() -> None:
    old = result("vgg", "dense", (0.3, 90.0))
    del old["run"]["rate"]
    for point in old["points"]:
        del point["travelled"]
    (row,) = rows_of([old])
    assert (row["rate"], row["travelled"]) == (1.0, None)


def test_a_loss_is_compared_in_percent_and_has_a_perplexity() -> None:
    rows = rows_of([result("gpt", "dense", (1.5,)), result("gpt", "topk", (1.53,))])
    assert rows[1]["behind_dense"] == pytest.approx(2.0)
    assert rows[1]["perplexity"] == pytest.approx(math.exp(1.53))
    assert "+2.00 %" in text_of(*tables_of(rows))


def test_runs_that_diverged_are_not_hidden() -> None:
    rows = rows_of(
        [
            *(result("vgg", "dense", (0.3, 90.0), seed) for seed in (0, 1)),
            result("vgg", "reused", (0.4, 88.0), 0),
            diverged("vgg", "reused", 1),
            diverged("vgg", "topk"),
        ]
    )
    _, reused, topk = rows
    assert reused["values"] == [88.0, None]
    assert (reused["value"], reused["behind_dense"]) == (88.0, None)
    assert (topk["value"], topk["sent_bytes_per_step"], topk["reduced_density"]) == (None, None, None)
    text = text_of(*tables_of(rows))
    assert "88.00 (1 diverged)" in text
    assert "diverged" in text.splitlines()[-2]


def test_rows_of_other_trainings_are_not_mixed() -> None:
    rows = rows_of(
        [
            result("vgg", "dense", (0.3, 90.0), batch=16),
            result("vgg", "reused", (0.3, 80.0), batch=8),
            result("vgg", "reused", (0.3, 85.0), batch=16, density=0.1),
            result("vgg", "reused", (0.3, 85.0), batch=16),
            result("resnet", "dense", (0.3, 70.0), batch=16),
        ]
    )
    assert [(row["task"], row["batch"], row["density"], row["behind_dense"]) for row in rows] == [
        ("vgg", 8, 0.01, None),
        ("vgg", 16, 1.0, 0.0),
        ("vgg", 16, 0.1, 5.0),
        ("vgg", 16, 0.01, 5.0),
        ("resnet", 16, 1.0, 0.0),
    ]
    text = text_of(sweep_table(rows[:4], "batch"))
    assert [line.split()[0] for line in text.splitlines()[4:8]] == ["8", "16", "16", "16"]
    assert rows_of([]) == []


def test_a_mean_over_steps_weighs_points_by_their_steps() -> None:
    assert mean_over(result("gpt", "topk", (1.0,)), "reduced_density") == pytest.approx(0.035)
    assert math.isnan(mean_over(diverged("gpt", "topk"), "reduced_density"))


def test_a_curve_is_the_mean_with_its_range() -> None:
    pair = [result("gpt", "topk", (1.0,)), result("gpt", "topk", (3.0,), 1)]
    assert curve_of(pair, "step", "loss") == [(1, 2.0, 1.0, 3.0), (4, 2.0, 1.0, 3.0)]
    assert curve_of([pair[0], diverged("gpt", "topk", 1)], "step", "loss") == []


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runs = [result("vgg", "dense", (0.3, 90.0)), result("vgg", "reused", (0.3, 89.0)), diverged("gpt", "reused")]
    swept = [result("vgg", "reused", (0.3, 80.0 + ranks), ranks=ranks) for ranks in (2, 4)]
    for name, parts in {
        "all.png": {"methods": runs, "batch": runs[:2], "ranks": swept},
        "one.svg": {"methods": runs},
        "sweep": {"methods": [], "ranks": swept},
        "none.png": {"methods": [], "batch": []},
    }.items():
        plot(parts, "a title", tmp_path / name)
        assert (tmp_path / name).stat().st_size > 5000, name
    assert (tmp_path / "sweep").read_bytes()[1:4] == b"PNG"


def test_the_sweep_of_ranks_is_drawn_over_ranks_and_over_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure_module = pytest.importorskip("matplotlib.figure")
    drawn: list[Any] = []
    monkeypatch.setattr(figure_module.Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    swept = [result("vgg", "reused", (0.3, 80.0 + ranks), ranks=ranks) for ranks in (2, 4)]
    plot({"methods": [], "ranks": swept}, "a title", tmp_path / "sweep.png")
    seen = [[line.get_label() for line in panel.lines] for panel in drawn[0].axes if panel.get_visible()]
    assert seen == [["1 %,\nfirst steps", "1 %,\nlast steps", "1 %,\nat random"], ["2 ranks", "4 ranks"]]
    batch, step = swept[0]["run"]["batch"], swept[0]["points"][0]["step"]
    assert drawn[0].axes[2].lines[0].get_xdata()[0] == batch * step
