"""``python -m lab outer``: what each method is, a tiny run of each, the table, and resuming."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from lab import outer
from lab.outer import METHODS, MOMENTUM, OUTER_RATES, Run, outer_of, plot, table_of, trained
from telegrad.tools.demo.job import Corpus, ModelSize

_app = typer.Typer()
_app.command()(outer.command)
SIZE = ModelSize(width=28)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    texts = tmp_path_factory.mktemp("texts")
    write_texts(texts)
    return Corpus.prepare(tmp_path_factory.mktemp("corpus"), texts)


def write_texts(folder: Path) -> None:
    for number in range(40):
        (folder / f"{number}.py").write_text(f"# file {number}\n" + "def f(x):\n    return x + 1\n" * 40)


def run(method: str, every: int = 2, *, steps: int = 4, **options: Any) -> Run:
    rates = OUTER_RATES.get(method, 0.0), MOMENTUM.get(method, 0.0)
    return Run(method, 2, steps, 0, 1 if method == "ddp" else every, *rates, **options)


def test_outer_optimizers_are_the_authors() -> None:
    parameter = [torch.nn.Parameter(torch.zeros(1))]
    for method, momentum in (("local-sgd", 0.0), ("diloco", 0.9), ("streaming", 0.9), ("sparseloco", 0.0)):
        options = outer_of(run(method))(parameter).param_groups[0]
        assert (options["lr"], options["momentum"]) == (OUTER_RATES[method], momentum)
        assert options["nesterov"] == (momentum > 0)


def test_local_sgd_with_a_round_in_each_step_is_near_ddp(corpus: Corpus) -> None:
    """Means of AdamW's steps are not AdamW of the mean, but first steps are alike; replicas that are never averaged
    would be as far as seeds are."""
    ddp = trained(run("ddp"), corpus, SIZE)
    assert trained(run("local-sgd", 1), corpus, SIZE)["loss"] == pytest.approx(ddp["loss"], rel=0.02)
    assert ddp["less"] == 1


@pytest.mark.parametrize("method", METHODS[1:])
def test_each_method_sends_less_and_repeats(method: str, corpus: Corpus) -> None:
    first, second = (trained(run(method, 4, steps=12), corpus, SIZE) for _ in range(2))
    assert first["loss"] == second["loss"]
    assert first["less"] > (8 if method == "sparseloco" else 1.5)
    assert first["wire_s_at_100mbit"] == pytest.approx(first["mb_per_step"] * 12 * 8 / 100)


def test_replicas_go_on_from_steps_of_ddp(corpus: Corpus) -> None:
    """With the optimizer's state: after one local step with a round, as after the first of two of DDP."""
    ddp = trained(run("ddp", steps=6), corpus, SIZE)
    started = trained(run("local-sgd", 1, steps=6, start=5), corpus, SIZE)
    assert started["loss"] == pytest.approx(ddp["loss"], rel=2e-3)
    assert ddp["mb_per_step"] * 5 / 6 < started["mb_per_step"] < 1.1 * ddp["mb_per_step"]


def test_windows_are_of_each_replica(corpus: Corpus) -> None:
    """Four windows on one rank are not those of four ranks, and their loss is another than that of one."""
    assert trained(run("ddp", windows=4), corpus, SIZE)["loss"] != trained(run("ddp"), corpus, SIZE)["loss"]


@pytest.mark.parametrize(
    ("method", "options"),
    [("diloco", {"values": "qsgd4"}), ("sparseloco", {"combine": "oktopk"}), ("sparseloco", {"decay": 0.5})],
)
def test_formats_and_sums_are_of_the_rounds(method: str, options: dict[str, Any], corpus: Corpus) -> None:
    plain, other = (trained(run(method, 4, steps=12, **one), corpus, SIZE) for one in ({}, options))
    assert (other["values"], other["combine"]) == (options.get("values", ""), options.get("combine", "allgather"))
    assert other["loss"] != plain["loss"]
    assert other["loss"] == pytest.approx(plain["loss"], rel=0.1)
    assert method == "sparseloco" or other["mb_per_step"] < 0.6 * plain["mb_per_step"]  # beside the first copy


def test_rounds_grow_with_the_steps_before_them(corpus: Corpus) -> None:
    growing = run("diloco", 4, steps=14, grow=2)
    assert sorted(outer.rounds_of(growing)) == [1, 2, 3, 4, 6, 9, 13, 14]
    assert sorted(outer.rounds_of(replace(growing, start=9))) == [13, 14]
    fixed, grown = (trained(one, corpus, SIZE) for one in (replace(growing, grow=0), growing))
    assert grown["mb_per_step"] == pytest.approx(fixed["mb_per_step"] * 8.5 / 4.5, rel=0.02)  # 0.5: the first copy


@pytest.mark.parametrize("options", [{"inner_rate": 3.0}, {"optimizer": "muon"}])
def test_inner_optimizers_are_of_all_methods(options: dict[str, Any], corpus: Corpus) -> None:
    """Local SGD with a round in each step is as near to DDP as with AdamW of the demo's rate."""
    ddp, other, local = (
        trained(one, corpus, SIZE) for one in (run("ddp", **options), run("ddp"), run("local-sgd", 1, **options))
    )
    assert ddp["loss"] != other["loss"]
    assert local["loss"] == pytest.approx(ddp["loss"], rel=0.02)


def test_rows_of_before_are_of_the_authors_momentum() -> None:
    new = "momentum", "start", "windows", "inner_rate", "grow", "optimizer"
    old = {name: one for name, one in vars(run("diloco")).items() if name not in new}
    assert outer.run_of(old) == run("diloco")


def test_the_table_and_the_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = [
        vars(run(method, 30, steps=100))
        | {"seed": seed, "loss": loss, "mb_per_step": 2.0, "less": 8.0}
        | {"wire_s_at_100mbit": 16.0}
        for method, loss in (("ddp", 2.0), ("diloco", 2.1))
        for seed in range(2)
    ]
    cells = [list(column.cells) for column in table_of(found).columns]
    assert cells[0] == ["ddp", "diloco"]
    assert (cells[1], cells[12], cells[14]) == (["1", "30"], ["2", "2"], ["", "+5.0%"])
    assert cells[-3:] == [["166 s", "166 s"], ["22 s", "22 s"], ["10 s", "10 s"]]
    plot(found, "losses", tmp_path / "losses.svg")
    assert "every 30" in (tmp_path / "losses.svg").read_text()


def test_a_command_goes_on_where_it_was(tmp_path: Path) -> None:
    write_texts(tmp_path)
    file = tmp_path / "rows.json"
    options = ["--width", "28", "--steps", "2", "--replicas", "2", "--text", str(tmp_path), "--json", str(file)]
    assert CliRunner().invoke(_app, ["--methods", "ddp", *options]).exit_code == 0
    before = json.loads(file.read_text())["rows"]
    result = CliRunner().invoke(_app, ["--methods", "ddp,diloco", "--every", "1,2", *options])
    assert result.exit_code == 0
    rows = json.loads(file.read_text())["rows"]
    assert rows[0] == before[0]
    assert [(row["method"], row["every"]) for row in rows] == [("ddp", 1), ("diloco", 1), ("diloco", 2)]


@pytest.mark.parametrize(
    "options",
    [
        ("--every", "0"),
        ("--every", "1.5"),
        ("--outer-rates", "x"),
        ("--width", "29"),
        ("--start", "1000"),
        ("--grow", "5"),
    ],
)
def test_bad_options_name_the_remedy(options: tuple[str, str]) -> None:
    result = CliRunner().invoke(_app, [*options])
    assert result.exit_code == 2
    assert options[0] in result.output
