"""``python -m lab short-jobs``: the data, the table, and one tiny job of each method."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from lab import short_jobs
from lab.short_jobs import METHODS, TASKS, ShortJob, images, network_of, options_of, table_of

pytestmark = pytest.mark.ranks("torch")

_app = typer.Typer()
_app.command()(short_jobs.command)


def test_ranks_and_passes_have_their_own_images() -> None:
    first = images(0, 0, 0, 0, 4)
    assert all(torch.equal(one, other) for one, other in zip(first, images(0, 0, 0, 0, 4), strict=True))
    for other in ((0, 0, 0, 1), (0, 0, 1, 0), (0, 1, 0, 0), (1, 0, 0, 0)):
        assert not torch.equal(first[0], images(*other, 4)[0])


def test_the_network_has_the_parameters_that_it_says() -> None:
    assert sum(one.numel() for one in network_of(0).parameters()) == pytest.approx(3.3e6, rel=0.02)
    assert sum(one.numel() for one in network_of(0, "noise").parameters()) == pytest.approx(2.7e6, rel=0.02)


@pytest.mark.parametrize("task", TASKS)
def test_a_network_takes_its_images(task: str) -> None:
    x, labels = images(0, 0, 0, 0, 4, task)
    assert network_of(0, task)(x).shape == (4, 10)
    assert labels.max() < 10


def test_options_are_those_of_the_method() -> None:
    assert options_of(ShortJob("dense")) == {"compress": None}
    assert options_of(ShortJob("lowrank-16"))["compress"].rank == 16
    assert options_of(ShortJob("lowrank-8"))["warmup"] is None
    assert options_of(ShortJob("lowrank-8-warm", steps=50))["warmup"].steps == 5
    assert options_of(ShortJob("topk", steps=50))["warmup"].steps == 5
    assert options_of(ShortJob("topk-cold"))["warmup"] is None


def test_the_table_compares_with_dense_training() -> None:
    rows = [
        {"method": method, "seed": seed, "steps": 1, "loss": loss, "held_out": 2 * loss, "sent": 5e6}
        for method, loss in (("dense", 1.0), ("topk", 1.5))
        for seed in range(2)
    ]
    cells = [list(column.cells) for column in table_of(rows).columns]
    assert cells == [["dense", "topk"], ["2", "2"], ["1.000", "1.500 (+50%)"], ["2.000", "3.000 (+50%)"], ["5", "5"]]


def test_a_tiny_job_of_each_method(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    options = ["--methods", "dense,lowrank-8,topk", "--seeds", "1", "--steps", "10", "--json", str(file)]
    done = CliRunner().invoke(_app, options)
    assert done.exit_code == 0, done.output
    sent = {row["method"]: row["sent"] for row in json.loads(file.read_text())["rows"]}
    assert sent["lowrank-8"] < 0.05 * sent["dense"]
    assert 0.1 * sent["dense"] < sent["topk"] < 0.3 * sent["dense"]  # one of its ten steps is dense
    assert {*sent} < {*METHODS}
