"""``telegrad bench sparse``: its options, what it prints, writes and draws, and how it ends; and one small job."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from telegrad import _core
from telegrad.launch import LaunchError
from telegrad.tools.bench.sparse import DENSE, NAMES, SparseOutcome, SparsePlan, swept
from telegrad.tools.cli import bench_sparse
from telegrad.tools.cli.bench_sparse import panels_of

_app = typer.Typer()
_app.command()(bench_sparse.sparse)

PLAN = SparsePlan("1gbit", 4, 1 << 20, 0.01, "uniform", ("gloo-dense", "telegrad-packed-f32"))


def _run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(_app, arguments, env={"COLUMNS": "200"})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, " ".join(done.output.replace("│", " ").split())


def _ideal(wrong: int = 0, failing: int = 0) -> Callable[..., SparseOutcome]:
    """A network on which everything takes 8 ns a byte of entries; jobs among ``failing`` ranks fail."""

    def run(plan: SparsePlan, *, timeout_s: float, on_sample: Callable[[str], None]) -> SparseOutcome:
        assert timeout_s > 0
        if plan.ranks == failing:
            raise LaunchError("rank 1 is gone")
        times = {}
        for name in plan.names:
            times[name] = [plan.nnz * plan.ranks * 64e-9 * (10 if "dense" in name else 1)] * plan.samples
            for _ in range(plan.samples):
                on_sample(name)
        none = dict.fromkeys(plan.names, wrong)
        return SparseOutcome(times, dict(none), dict.fromkeys(plan.names, plan.nnz * 8), {}, plan.nnz * plan.ranks)

    return run


def test_a_sweep_varies_one_thing_at_a_time() -> None:
    plans = swept([PLAN], ["density", "ranks"])
    shares = [plan.density for plan in plans if plan.ranks == 4]
    assert shares == [1e-5, 1e-4, 1e-3, 0.0078125, 0.01, 0.03125, 0.125, 0.5]
    assert [plan.ranks for plan in plans if plan.density == 0.01] == [4, 2, 8]  # its own is there already
    assert len(plans) == len(set(plans)) == len(shares) + 2
    assert {plan.n for plan in swept([PLAN], ["length"])} == {1 << 16, 1 << 20, 1 << 24, 1 << 26}
    assert swept([PLAN], []) == [PLAN]


def test_rows_table_and_plot_of_a_sweep(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(bench_sparse, "run", _ideal())
    found, drawn = tmp_path / "rows.json", tmp_path / "plot.svg"
    status, output = _run(
        *("--ranks", "8", "--network", "1gbit", "--n", "1Mi", "--sweep", "density,ranks", "--samples", "3"),
        *("--names", "telegrad-dense,telegrad-packed-f32", "--json", str(found), "--plot", str(drawn)),
    )
    assert status == 0, output
    result = json.loads(found.read_text())
    assert result["failed"] == []
    rows = result["rows"]
    assert len(rows) == 2 * (7 + 2)
    for row in rows:
        assert {"name", "median_s", "wire_bytes", "bound_s"} <= set(row)
        assert row["median_s"] > 0
    sparse = next(row for row in rows if row["name"] == "telegrad-packed-f32")
    assert sparse["times_faster_than_best_dense"] == pytest.approx(10)
    assert "2 ranks, 1gbit: 8,192 of 1,048,576 elements each (0.7812 %, uniform)" in output
    picture = drawn.read_text()
    assert "<!-- 1gbit, 8 ranks, 4 MiB densely, uniform -->" in picture
    assert "<!-- 1gbit, 4 MiB densely, density 0.007812, uniform -->" in picture


def test_a_panel_is_of_rows_that_differ_in_one_thing() -> None:
    def row(density: float, ranks: int, pattern: str = "uniform") -> dict[str, Any]:
        common = {"name": "telegrad-dense", "network": "shm", "n": 1024, "median_s": density * ranks}
        return {**common, "density": density, "ranks": ranks, "pattern": pattern}

    assert panels_of([row(0.1, 2)]) == []
    assert panels_of([row(0.1, 2), row(0.1, 2, "clustered")]) == []  # nothing that has an axis
    density, ranks = panels_of([row(0.1, 2), row(0.2, 2), row(0.2, 4), row(0.3, 8)])
    assert density.curves == {"telegrad-dense": [(0.1, 0.2), (0.2, 0.4)]}
    assert ranks.curves == {"telegrad-dense": [(2, 0.4), (4, 0.8)]}
    assert (density.about, ranks.about) == (
        "shm, 2 ranks, 4 KiB densely, uniform",
        "shm, 4 KiB densely, density 0.2, uniform",
    )


def test_a_job_that_fails_costs_no_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench_sparse, "run", _ideal(failing=4))
    found, drawn = tmp_path / "rows.json", tmp_path / "plot.png"
    status, output = _run(
        *("--ranks", "2,4", "--network", "tcp", "--names", "telegrad-ring", "--n", "64Ki"),
        *("--json", str(found), "--plot", str(drawn)),
    )
    assert status == 1
    assert "4 ranks, tcp: rank 1" in output
    result = json.loads(found.read_text())
    assert [row["ranks"] for row in result["rows"]] == [2]
    assert result["failed"][0].startswith("4 ranks, tcp, n=65536, density 0.0078125: rank 1")
    assert drawn.read_bytes()[:4] == b"\x89PNG"


def test_wrong_values_end_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_sparse, "run", _ideal(wrong=3))
    status, output = _run("--ranks", "2", "--network", "tcp", "--names", "telegrad-ring")
    assert status == 1
    assert "3 values are wrong" in output


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--sweep", "speed", "'speed' does not exist: use density, length, ranks"),
        ("--density", "0", "'0' is no part of 1"),
        ("--density", "2..1", "'2' is no part of 1"),
        ("--ranks", "1", "'1' is no number from 2 to 256"),
        ("--n", "5Gi", "is no number from 1 to 4294967295"),
        ("--pattern", "zipf", "use uniform, clustered, identical"),
        ("--names", "nccl", f"use {NAMES[0]}"),
        ("--network", "wifi", "use shm, tcp, or a rate"),
        ("--json", "/nowhere/rows.json", "the folder /nowhere does not exist"),
    ],
)
def test_bad_options_name_the_remedy(option: str, value: str, message: str) -> None:
    status, output = _run(option, value)
    assert status == 2
    assert message in output


@pytest.mark.skipif(not hasattr(_core.Communicator, "ucx"), reason="built without UCX")
def test_a_small_job_over_shared_memory(tmp_path: Path) -> None:
    found = tmp_path / "rows.json"
    ours = [name for name in NAMES if name.startswith("telegrad-")]
    status, output = _run(
        *("--ranks", "2", "--network", "shm", "--n", "4Ki", "--names", ",".join(ours), "--samples", "3"),
        *("--seconds", "0.1", "--density", "0.05", "--json", str(found)),
    )
    assert status == 0, output
    rows = json.loads(found.read_text())["rows"]
    assert [row["name"] for row in rows] == ours
    for row in rows:
        assert row["samples"] >= 1
        assert row["median_s"] >= row["min_s"] > 0
        assert row["wire_bytes"] > 0
        assert row["wrong"] == (None if row["name"] in DENSE else 0)
