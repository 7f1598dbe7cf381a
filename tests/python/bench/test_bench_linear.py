"""``telegrad bench linear``: its plan, dense sums in the place of sparse ones, and a small job."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from telegrad import SparseStream
from telegrad.bench.linear import DenseSum, LinearPlan
from telegrad.cli import make_app


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(make_app(), ["bench", "linear", *arguments], env={"COLUMNS": "200"})
    return done.exit_code, " ".join(done.output.split())


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"data": "mnist"}, "data='mnist' does not exist: use url, webspam"),
        ({"schemes": ("nccl-dense",)}, "scheme 'nccl-dense' does not exist: use gloo-dense"),
    ],
    ids=["data", "scheme"],
)
def test_plans_that_cannot_be(fields: dict[str, Any], said: str) -> None:
    good: dict[str, Any] = {"data": "url", "network": "shm", "ranks": 2, "schemes": ("telegrad-sparse",)}
    with pytest.raises(ValueError, match=re.escape(said)):
        LinearPlan(**{**good, **fields})
    plan = LinearPlan(**{**good, "schemes": ("mpich-dense", "gloo-dense", "telegrad-dense", "telegrad-sparse")})
    assert LinearPlan.from_json(plan.to_json()) == plan
    assert plan.peers == ("mpich", "gloo")


def test_a_dense_sum_forgets_the_gradient_before() -> None:
    def doubled(x: np.ndarray[Any, np.dtype[np.float32]]) -> None:
        x *= 2

    dense = DenseSum(5, doubled)
    for indices in ([0, 3], [1, 4]):
        gradient = SparseStream(np.array(indices, np.uint32), np.array([1, 2], np.float32), 5)
        total = dense.sum(dense.prepare(gradient))
        assert np.array_equal(total.to_dense(), 2 * gradient.to_dense())


def test_every_scheme_takes_the_same_steps(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    status, said = run(
        *("--ranks", "2", "--data", "url", "--rows", "8", "--steps", "2", "--json", str(file)),
        *("--schemes", "gloo-dense,telegrad-dense,telegrad-sparse", "--no-calibrate"),
    )
    assert status == 0, said
    rows = json.loads(file.read_text())["rows"]
    assert [row["scheme"] for row in rows] == ["gloo-dense", "telegrad-dense", "telegrad-sparse"]
    assert [row["objective"] for row in rows] == pytest.approx([rows[0]["objective"]] * 3, rel=1e-6)
    for row in rows:
        assert row["epoch_s"] == pytest.approx(row["step_s"] * 2_396_130 / 16)
        assert 0 < row["comm_s"] < row["epoch_s"]
        assert row["steps"] == 2
        assert 8 * 40 < row["entries_a_rank"] < 8 * 116 * 1.2
        assert row["entries_a_rank"] < row["non_empty_columns"] < 2 * 2 * 8 * 116 * 1.2


def test_a_scheme_that_does_not_exist() -> None:
    status, said = run("--schemes", "nccl-dense")
    assert status == 2
    assert "'nccl-dense' does not exist" in said
