"""``python -m lab linear-solution``: all schemes take the same steps, and dense sums send what sparse ones do not."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from scipy.sparse import random as random_matrix
from typer.testing import CliRunner

from lab.common.experiments import app
from lab.linear_solution import SCHEMES, solved
from telegrad import Communicator
from telegrad.linear import Rows


def run(*arguments: str) -> tuple[int, str]:
    command = ["linear-solution", "--network", "shm", "--ranks", "2", "--rows", "30", *arguments]
    done = CliRunner().invoke(app(["linear-solution"]), command, env={"COLUMNS": "200"})
    return done.exit_code, " ".join(done.output.split())


def test_schemes_find_the_same_bits(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    status, said = run("--data", "url", "--losses", "hinge", "--schemes", "sparse,dense-occurring", "--json", str(out))
    assert status == 0, said
    sparse, dense = json.loads(out.read_text())["rows"]
    for name in ("loss", "steps", "sums", "objective", "columns"):
        assert sparse[name] == dense[name]
    assert 0 < sparse["to_0.01_s"] <= sparse["to_0.001_s"]
    assert sparse["columns"] < sparse["features"] / 10
    assert 0 < sparse["received_mb"] <= dense["received_mb"]
    assert "dense-occurring" in said


def test_dense_sums_of_all_features_send_more() -> None:
    matrix = random_matrix(80, 3000, 0.002, format="csr", random_state=4, dtype=np.float32)
    rows = Rows.from_csr(matrix, np.where(np.arange(80) % 3, 1, -1))
    comms = Communicator.local(2, timeout_s=60)

    def one(rank: int) -> list[Any]:
        with comms[rank] as comm:
            own = rows.part(40 * rank, 40 * rank + 40)
            best = solved(own, "logistic", comm, "sparse", None)[1]
            return [solved(own, "logistic", comm, scheme, best)[0] for scheme in SCHEMES]

    with ThreadPoolExecutor(2) as pool:
        for sparse, dense, occurring in pool.map(one, range(2)):
            assert sparse["objective"] == dense["objective"] == occurring["objective"]
            assert sparse["received_mb"] < dense["received_mb"] > occurring["received_mb"]


def test_schemes_and_losses_that_do_not_exist() -> None:
    assert "'middle' does not exist: use sparse, dense, dense-occurring" in run("--schemes", "middle")[1]
    assert "'absolute' does not exist: use logistic" in run("--losses", "absolute")[1]
