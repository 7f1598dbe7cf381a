"""``python -m lab linear-scaling``: ranks in virtual time find what one rank does, and errors of a rank end all."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from lab.common.experiments import app
from lab.linear_scaling import Ranks, VirtualRank
from telegrad.tools.sim.measure import network_of


def test_all_numbers_of_ranks_find_the_same_objective(tmp_path: Path) -> None:
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    command = ["linear-scaling", "--ranks", "1,4", "--rows", "256", "--losses", "logistic", "--tol", "1e-3"]
    command += ["--schemes", "sparse,dense-occurring", "--json", str(out), "--plot", str(picture), "--data", "url"]
    done = CliRunner().invoke(app(["linear-scaling"]), command, env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    alone, *others = json.loads(out.read_text())["rows"]
    assert {(one["ranks"], one["scheme"]) for one in others} == {(4, "sparse"), (4, "dense-occurring")}
    for row in others:
        assert [step["objective"] for step in row["trace"]] == [step["objective"] for step in alone["trace"]]
        assert 0 < row["to_0.01_s"] <= row["to_0.001_s"] <= row["model_s"]
        spent = row["compute_s"] + row["network_s"] + row["wait_s"] + row["in_collectives_s"]
        assert spent == pytest.approx(row["model_s"])
    sparse, dense = sorted(others, key=lambda row: str(row["scheme"]), reverse=True)
    assert 0 < sparse["mb"] < dense["mb"]
    assert picture.stat().st_size > 0


def test_time_is_of_the_network_and_of_the_slowest_rank() -> None:
    ranks = Ranks(4, network_of("1gbit"))

    def act(comm: VirtualRank) -> float:
        ranks.clocks[comm.rank] += comm.rank
        numbers = np.full(1_000_000, float(comm.rank))
        comm.all_reduce(numbers)
        return float(numbers[-1])

    assert ranks.run(act) == [6.0] * 4
    assert ranks.network_s == pytest.approx(2 * 3 / 4 * 8e6 / (1e9 / 8 * 1448 / 1538), rel=0.1)
    assert ranks.waited_s == pytest.approx(1.5, rel=0.1)
    assert ranks.clocks.min() >= 3 + ranks.network_s


def test_an_error_of_one_rank_ends_all() -> None:
    def act(comm: VirtualRank) -> None:
        if comm.rank == 1:
            raise ValueError("no rows")
        comm.barrier()

    with pytest.raises(ValueError, match="no rows"):
        Ranks(3, network_of("1gbit")).run(act)
    with pytest.raises(RuntimeError, match="ranks call all_gather, barrier at once"):
        Ranks(2, network_of("1gbit")).run(lambda comm: comm.all_gather(np.zeros(1)) if comm.rank else comm.barrier())
