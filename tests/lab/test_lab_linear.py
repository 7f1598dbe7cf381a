"""``python -m lab linear``: its plan, the sums that it compares, small jobs, and how they look."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from lab.common.experiments import app
from lab.linear import (
    SCHEMES,
    SGD_SCHEMES,
    AlgorithmSum,
    DenseSum,
    LinearPlan,
    about_data,
    algorithm_of,
    bound_by,
    by_data,
    default_schemes,
    reference_of,
    schemes_table,
)
from telegrad import SparseVector


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app(["linear"]), ["linear", *arguments], env={"COLUMNS": "200"})
    return done.exit_code, " ".join(done.output.split())


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"data": "mnist"}, "data='mnist' does not exist: use url, webspam, stdlib or a LIBSVM file"),
        ({"schemes": ("nccl-dense",)}, "scheme 'nccl-dense' does not exist: use gloo-dense"),
        ({"data": "stdlib", "columns": 3}, "columns=3 is for made-up rows, but data='stdlib' is real"),
        ({"columns": 50}, "gives 50 columns in 2,396,130 rows"),
    ],
    ids=["data", "scheme", "real columns", "few columns"],
)
def test_plans_that_cannot_be(fields: dict[str, Any], said: str) -> None:
    good: dict[str, Any] = {"data": "url", "network": "shm", "ranks": 2, "schemes": ("telegrad-sparse",)}
    with pytest.raises(ValueError, match=re.escape(said)):
        LinearPlan(**{**good, **fields})
    plan = LinearPlan(**{**good, "schemes": ("mpich-dense", "gloo-dense", "telegrad-dense", "cd-dense")})
    assert LinearPlan.from_json(plan.to_json()) == plan
    assert plan.peers == ("mpich", "gloo")


def test_schemes_and_their_algorithms() -> None:
    schemes = ("gloo-dense", "telegrad-dense", "telegrad-sparse", "telegrad-split_allgather")
    assert [algorithm_of(scheme) for scheme in schemes] == [None, None, "auto", "split_allgather"]
    assert default_schemes("url") == SCHEMES
    assert default_schemes("webspam") == SGD_SCHEMES


def test_a_dense_sum_forgets_the_gradient_before() -> None:
    def doubled(x: np.ndarray[Any, np.dtype[np.float32]]) -> None:
        x *= 2

    dense = DenseSum(5, doubled)
    for indices in ([0, 3], [1, 4]):
        gradient = SparseVector(np.array(indices, np.uint32), np.array([1, 2], np.float32), 5)
        total = dense.sum(dense.prepare(gradient))
        assert np.array_equal(total.to_dense(), 2 * gradient.to_dense())


def test_a_sparse_sum_counts_the_entries_of_its_sums() -> None:
    class Comm:
        asked: str = ""

        def all_reduce(self, x: SparseVector, *, algorithm: str) -> SparseVector:
            self.asked = algorithm
            return x

    sums = AlgorithmSum(comm := Comm(), "ring")  # type: ignore[arg-type]
    gradient = SparseVector(np.array([1, 4], np.uint32), np.array([1, 2], np.float32), 5)
    assert sums.sum(sums.prepare(gradient)) is gradient
    assert comm.asked == "ring"
    sums.sum(gradient)
    assert sums.entries == [2, 2]
    assert len(sums.seconds) == 2


@pytest.mark.ranks("torch")
def test_every_scheme_takes_the_same_steps(tmp_path: Path) -> None:
    file, picture = tmp_path / "rows.json", tmp_path / "steps.png"
    schemes = ["gloo-dense", "telegrad-dense", "telegrad-sparse", "telegrad-split_allgather"]
    status, said = run(
        *("--ranks", "2", "--data", "url", "--rows", "8", "--steps", "2", "--json", str(file), "--plot", str(picture)),
        *("--schemes", ",".join(schemes), "--no-calibrate"),
    )
    assert status == 0, said
    assert "made-up rows, exponent 1.421; 3,231,961 non-empty columns expected in 2,396,130 rows" in said
    assert picture.read_bytes().startswith(b"\x89PNG")
    rows = json.loads(file.read_text())["rows"]
    assert [row["scheme"] for row in rows] == schemes
    assert [row["objective"] for row in rows] == pytest.approx([rows[0]["objective"]] * 4, rel=1e-6)
    for row in rows:
        assert row["epoch_s"] == pytest.approx(row["step_s"] * 2_396_130 / 16)
        assert 0 < row["comm_s"] < row["epoch_s"]
        assert row["steps"] == 2
        assert row["exponent"] == pytest.approx(1.4209, abs=1e-4)
        assert row["non_empty_columns"] == row["features"] == 3_231_961
        assert row["columns_met"] == pytest.approx(row["columns_expected"], rel=0.1)
        assert 8 * 40 < row["entries_a_rank"] < row["columns_met"]
    gloo, dense, sparse, _ = rows
    assert gloo["received_bytes"] is None
    assert gloo["bound_bytes"] == dense["bound_bytes"] == dense["received_bytes"] == 4 * (3_231_961 + 2)
    assert sparse["bound_bytes"] < sparse["received_bytes"] < dense["received_bytes"] / 100
    assert sparse["entries_a_rank"] < sparse["entries_of_sum"] < 2 * sparse["entries_a_rank"]


def test_coordinate_descent_moves_the_same_coordinates(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    status, said = run(
        *("--ranks", "2", "--data", "url", "--rows", "8", "--steps", "2", "--json", str(file)),
        *("--schemes", "cd-dense,cd-sparse", "--no-calibrate"),
    )
    assert status == 0, said
    assert "url, coordinate descent" in said
    dense, sparse = json.loads(file.read_text())["rows"]
    assert dense["objective"] == pytest.approx(sparse["objective"], rel=1e-6)
    assert dense["rows_a_step"] == 16
    assert dense["steps"] == sparse["steps"] < dense["columns_met"] / 200
    assert 4 * 3_231_961 / 2 == dense["bound_bytes"] <= dense["received_bytes"]
    assert sparse["bound_bytes"] < sparse["received_bytes"] < dense["received_bytes"] / 100
    assert 0 < dense["comm_s"] < dense["epoch_s"]


def test_more_columns_make_a_flatter_law(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    status, said = run(
        *("--ranks", "2", "--data", "url", "--rows", "8", "--steps", "1", "--json", str(file)),
        *("--schemes", "telegrad-sparse", "--no-calibrate", "--columns", "12000000"),
    )
    assert status == 0, said
    (row,) = json.loads(file.read_text())["rows"]
    assert row["non_empty_columns"] == 12_000_000
    assert 1.1 < row["exponent"] < 1.4


def test_files_are_used_when_they_are_given(tmp_path: Path) -> None:
    data, file = tmp_path / "data.svm", tmp_path / "rows.json"
    data.write_text("".join(f"{i % 2} {1 + i % 5}:1 {7 + i % 3}:2 {20 + i}:1\n" for i in range(50)))
    status, said = run(
        *("--ranks", "2", "--data", str(data), "--rows", "10", "--steps", "9", "--json", str(file)),
        *("--schemes", "telegrad-dense,telegrad-sparse", "--no-calibrate"),
    )
    assert status == 0, said
    assert "50 rows with 58 non-empty columns; 48 of 69 met; 2 steps" in said
    for row in json.loads(file.read_text())["rows"]:
        assert row["data"] == "data.svm"
        assert row["scaled_to_rows"] == 50
        assert row["steps"] == 2  # as many as there are rows for
        assert row["rows_a_step"] == 20
        assert row["features"] == 69
        assert row["epoch_s"] == pytest.approx(row["step_s"] * 50 / 20)


def test_a_file_with_too_few_rows(tmp_path: Path) -> None:
    data = tmp_path / "data.svm"
    data.write_text("1 1:1\n")
    status, said = run("--ranks", "2", "--data", str(data), "--schemes", "telegrad-sparse", "--no-calibrate")
    assert status == 1
    assert "has too few rows for 2 ranks: 1" in said


def row(**fields: Any) -> dict[str, Any]:
    times = {"step_s": 1.0, "step_comm_s": 0.8, "epoch_s": 10.0, "comm_s": 8.0}
    about = {"data": "url", "objective": 0.5, "received_bytes": None, "bound_bytes": 2e6, "optimizer": "sgd"}
    return {"scheme": "mpich-dense", **times, **about, **fields}


def test_ratios_are_to_gloo_where_it_ran() -> None:
    gloo, sparse = row(scheme="gloo-dense"), row(scheme="telegrad-sparse", step_comm_s=0.1, epoch_s=5.0, comm_s=1.0)
    assert reference_of([row(), gloo]) is gloo
    assert reference_of([row(), sparse])["scheme"] == "mpich-dense"
    assert [bound_by(one) for one in (gloo, sparse)] == ["comm.", "compute"]
    descent = row(scheme="cd-sparse", optimizer="coordinate_descent")
    assert by_data([gloo, sparse, descent]) == [[gloo, sparse], [descent]]
    table = schemes_table([row(), gloo, sparse], "title")
    cells = {str(column.header): list(column.cells) for column in table.columns}
    assert cells["epoch to\ngloo-dense"] == ["1.0x", "1.0x", "2.0x"]
    assert cells["comm. to\ngloo-dense"] == ["1.0x", "1.0x", "8.0x"]
    assert cells["MB\nbound"] == ["2.00"] * 3


def test_what_is_said_of_real_data() -> None:
    counts = {"scaled_to_rows": 900, "non_empty_columns": 70, "steps": 2, "columns_met": 60, "features": 80}
    rows = [row(synthetic=False, entries_a_rank=12.4, **counts), row(objective=0.50001)]
    known = "900 rows with 70 non-empty columns; 60 of 80 met; 2 steps, 12 entries of a rank in each; objective "
    assert about_data(rows[:1]) == known + "0.500000"
    assert about_data(rows) == known + "0.500000 to 0.500010"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--schemes", "nccl-dense"), "'nccl-dense' does not exist"),
        (("--data", "mnist"), "data='mnist' does not exist"),
        (("--data", "url", "--columns", "50"), "gives 50 columns"),
        (("--plot", "/no/folder/x.png"), "the folder /no/folder does not exist"),
    ],
    ids=["scheme", "data", "columns", "plot"],
)
def test_wrong_options(arguments: tuple[str, ...], said: str) -> None:
    status, output = run(*arguments)
    assert status == 2
    assert said in output
