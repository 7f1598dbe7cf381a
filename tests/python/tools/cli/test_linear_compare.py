"""``telegrad linear compare``: which programs it runs, on what, and what it refuses."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import sparse
from sklearn.datasets import dump_svmlight_file, load_breast_cancer
from typer.testing import CliRunner

from telegrad.linear.peers import PEERS, NotConverged, Task, liblinear, scikit_learn
from telegrad.tools.cli import make_app


@pytest.mark.parametrize("loss", ["logistic", "hinge", "squared_hinge"])
def test_comparing_shows_what_is_installed(tmp_path: Path, loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(200, 6))
    lines = [
        f"{1 if row[0] + row[1] > 0.2 else -1} " + " ".join(f"{i + 2}:{v:.5f}" for i, v in enumerate(row)) for row in x
    ]
    (tmp_path / "data.svm").write_text("\n".join(lines))
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "liblinear" else found(name))
    monkeypatch.chdir(tmp_path)
    command = [
        "linear",
        "compare",
        "data.svm",
        "--loss",
        loss,
        "--l2",
        "0.01",
        "--json",
        "out.json",
        "--plot",
        "out.png",
    ]
    done = CliRunner().invoke(make_app(), command)
    assert done.exit_code == 0, done.output
    assert "liblinear is not installed: pip install liblinear-official" in done.output
    rows = {one["program"]: one for one in json.loads((tmp_path / "out.json").read_text())["rows"]}
    assert {"telegrad", "scikit-learn"} <= rows.keys()
    for one in rows.values():
        assert (one["rows"], one["held_out"]) == (180, 20)
        assert one["accuracy"] > 0.8
        assert one["program"] in done.output
    assert rows["telegrad"]["above"] < 1e-4
    assert rows["scikit-learn"]["above"] < 0.01
    assert (tmp_path / "out.png").stat().st_size > 1000


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.module)
def test_peers_that_are_installed_find_the_optimum(peer: Any) -> None:
    if not peer.is_installed:
        pytest.skip(f"pip install {peer.package}")
    random = np.random.default_rng(0)
    matrix = sparse.csr_matrix(np.hstack([random.normal(size=(200, 6)), np.ones((200, 1))]))
    labels = np.where(matrix[:, [0]].toarray()[:, 0] + 0.5 * random.normal(size=200) > 0.3, 1.0, -1.0)
    for loss in peer.losses:
        task = Task(loss, 0.02, matrix, labels)
        best = task.objective(scikit_learn(task)(1e-8))
        assert task.objective(peer.prepare(task)(None)) == pytest.approx(best, rel=0.05)


@pytest.mark.parametrize(
    ("options", "text", "said"),
    [
        (["--loss", "squared_error"], "1 1:1\n-1 2:1\n", "squared_error is none of logistic"),
        (["--l2", "0"], "1 1:1\n-1 2:1\n", "must be above 0: peers have no objective without a penalty"),
        (["--tol", "0"], "1 1:1\n-1 2:1\n", "0.0 must be a finite number above 0"),
        ([], "1:2 1:1\n-1:1 2:1\n", "rows have weights, which some of the programs do not know"),
        ([], "1 1:1\n5 2:1\n", "labels are not two classes"),
        ([], "1 1:x\n", "line 1"),
    ],
)
def test_what_cannot_be_compared(tmp_path: Path, options: list[str], text: str, said: str) -> None:
    (tmp_path / "data.svm").write_text(text)
    command = ["linear", "compare", str(tmp_path / "data.svm"), "--held-out", "0", "--no-cache", *options]
    done = CliRunner().invoke(make_app(), command)
    assert done.exit_code != 0
    assert said in " ".join(done.output.replace("│", " ").split())


def test_comparing_with_l1_tells_who_has_not_converged(tmp_path: Path) -> None:
    found = load_breast_cancer()
    dump_svmlight_file(found.data, np.where(found.target, 1, -1), str(tmp_path / "data.svm"), zero_based=False)
    command = ["linear", "compare", str(tmp_path / "data.svm"), "--l1", "0.00176", "--json", str(tmp_path / "out.json")]
    done = CliRunner().invoke(make_app(), command, env={"COLUMNS": "80", "FORCE_COLOR": "1"})  # as on a terminal
    assert done.exit_code == 0, done.output
    rows = {one["program"]: one for one in json.loads((tmp_path / "out.json").read_text())["rows"]}
    table = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", done.output).partition("one thread each")[2].splitlines()
    for one in rows.values():
        (line,) = (line.rstrip() for line in table if line.startswith(f"{one['program']} "))
        assert len(line) <= 80
        assert f"{one['objective']:.6g}" in line
        assert line.endswith(f"{100 * one['accuracy']:.2f} % {one['seconds']:>7.3g}")
    assert {"telegrad", "scikit-learn, liblinear", "scikit-learn, saga"} <= rows.keys()
    assert "Vowpal Wabbit" not in done.output
    assert rows["telegrad"]["above"] < 1e-4
    assert rows["telegrad"]["converged"]
    assert not rows["scikit-learn, saga"]["converged"]
    assert rows["scikit-learn, saga"]["above"] > 0.1


@pytest.mark.parametrize("options", [("--l2", "1"), ("--loss", "hinge")], ids=["both", "hinge"])
def test_penalties_that_peers_lack_are_refused(tmp_path: Path, options: tuple[str, ...]) -> None:
    (tmp_path / "data.svm").write_text("1 1:1\n-1 2:1\n")
    done = CliRunner().invoke(make_app(), ["linear", "compare", str(tmp_path / "data.svm"), "--l1", "0.1", *options])
    assert done.exit_code == 2
    assert options[0] in done.output


def test_a_limit_of_iterations_is_told_by_liblinear() -> None:
    pytest.importorskip("liblinear", reason="pip install liblinear-official")
    found = load_breast_cancer()
    matrix = sparse.csr_matrix(found.data)
    task = Task("hinge", 1 / 569, matrix, np.where(found.target, 1.0, -1.0))
    with pytest.warns(NotConverged, match="liblinear reached its limit"):
        liblinear(task)(1e-8)
