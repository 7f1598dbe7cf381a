"""``python -m lab accuracy`` from end to end on data that are made up, how it goes on, and how it ends."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("typer")
pytest.importorskip("matplotlib")

import typer
from typer.testing import CliRunner

from lab.accuracy import command, job
from lab.accuracy.runs import GROWN, Run
from telegrad.launch import RankExit, RankFailed, RanksTimedOut

pytestmark = pytest.mark.ranks("torch")

_app = typer.Typer()
_app.command()(command.command)


@pytest.fixture
def data(places: tuple[Path, Path]) -> Path:
    return places[0]


def _run(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(_app, list(map(str, arguments)), env={"COLUMNS": "400"})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, " ".join(done.output.replace("│", " ").split())


def _as_if_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spares a process, which would import torch."""
    monkeypatch.setattr(command, "time_steps", lambda _, runs, **__: {run.name: 0.01 for run in runs})


def test_a_small_study_and_that_it_goes_on(
    data: Path, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, rows, drawn = tmp_path / "study", tmp_path / "rows.json", tmp_path / "plot.png"
    common = ("--data", data, "--text", library, "--out", out, "--steps", 2, "--density", "0.01")
    common += ("--task", "vgg,lstm", "--methods", "dense,topk", "--seeds", 1, "--batch", 8, "--jobs", 1)
    status, output = _run(*common, "--sweep", "none", "--json", rows, "--plot", drawn)
    assert status == 0, output
    assert "4 runs of 2 tasks, 8 steps vgg: 2 runs" in output
    assert "min with 1 at a time" in output
    _as_if_timed(monkeypatch)
    assert "4 of 4: " in output
    assert "VGG-like CNN on Fashion-MNIST, SGD: 150,362 parameters, 4 ranks, batch 8, 2 steps" in output
    assert drawn.stat().st_size > 10_000
    found = json.loads(rows.read_text())
    assert {"rows", "runs", "machine"} == set(found)
    assert [(row["part"], row["task"], row["method"], row["seeds"]) for row in found["rows"]] == [
        ("methods", task, method, [0]) for task in ("vgg", "lstm") for method in ("dense", "topk")
    ]
    assert all(row["less"] > 10 for row in found["rows"] if row["method"] == "topk")
    files = sorted((out / "runs").glob("*-*"))
    assert [file.suffix for file in files] == [".json"] * 4  # neither checkpoints nor locks are left

    files[0].unlink()
    before = files[1].stat().st_mtime_ns
    status, output = _run(*common, "--sweep", "none", "--json", rows)
    assert status == 0, output
    assert "3 runs are done" in output
    assert "1 of 1: " in output
    assert files[1].stat().st_mtime_ns == before
    again = json.loads(rows.read_text())
    assert [row["values"] for row in again["rows"]] == [row["values"] for row in found["rows"]]

    iterations = tmp_path / "iterations.json"
    one = {"model": "LSTM", "scheme": "topkdsa", "ranks": 16, "density": 0.02, "iteration_s": 0.5}
    iterations.write_text(json.dumps({"weak_scaling": [one]}))
    over_time = ("--sweep", "none", "--iterations", iterations, "--json", rows, "--time-plot", tmp_path / "times.png")
    status, output = _run(*common, *over_time)
    assert status == 0, output
    assert "all steps, each an iteration of the paper's model (virtual time)" in output
    assert [(row["task"], row["run_s"]) for row in json.loads(rows.read_text())["times"]] == [("lstm", 1.0)]
    assert (tmp_path / "times.png").stat().st_size > 5_000
    iterations.write_text(json.dumps({"weak_scaling": [{**one, "scheme": "oktopk"}]}))
    status, output = _run(*common, *over_time)
    assert status == 1
    assert "no method of these runs is a scheme of --iterations" in output

    status, output = _run(*common, "--sweep", "none", "--data", library)
    assert status == 2
    assert "has no train-images-idx3-ubyte" in output
    assert "apt-get install dataset-fashion-mnist" in output
    status, output = _run(*common, "--text", data, "--task", "lstm")
    assert status == 2
    assert f"not with --data {data} --text {data}: give these again, or choose another folder with --out" in output

    files[0].write_text("{}")
    status, output = _run(*common, "--sweep", "none")
    assert status == 2
    assert f"{files[0].name} is damaged" in output


def test_rates_are_swept_and_the_best_one_gets_the_other_seeds(
    data: Path, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _as_if_timed(monkeypatch)
    rows = tmp_path / "rows.json"
    common = ("--data", data, "--text", library, "--out", tmp_path / "study", "--steps", 2, "--batch", 4, "--jobs", 1)
    common += ("--task", "lstm-words", "--methods", "dense", "--rates", "1,1e-6", "--seeds", 2, "--json", rows)
    status, output = _run(*common)
    assert status == 0, output
    assert "3 runs of 1 tasks, 6 steps" in output
    found = json.loads(rows.read_text())
    (row,) = found["rows"]
    assert (row["rate"], row["seeds"], list(row["rates"])) == (1.0, [0, 1], ["1e-06", "1"])
    assert sorted((run["run"]["seed"], run["run"].get("rate", 1.0)) for run in found["runs"]) == [
        (0, 1e-6),
        (0, 1.0),
        (1, 1.0),
    ]
    status, output = _run(*common)
    assert "3 runs are done" in output


def test_the_time_to_a_loss_is_told_and_drawn(
    data: Path, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _as_if_timed(monkeypatch)
    rows, picture = tmp_path / "rows.json", tmp_path / "times.png"
    written: list[int] = []
    text = command._text_of
    monkeypatch.setattr(command, "_text_of", lambda *of: written.append(len(of)) or text(*of))
    common = ("--data", data, "--text", library, "--out", tmp_path / "study", "--steps", 2, "--batch", 4, "--jobs", 1)
    common += ("--task", "lstm", "--methods", "dense,fp16", "--seeds", 1, "--json", rows, "--time-plot", picture)
    status, output = _run(*common, "--networks", "100mbit,10gbit")
    assert status == 0, output
    assert "time to a held-out loss (processor time of one rank; networks by the cost model)" in output
    assert written == [1, 1, 3]  # the rows of each run are there when it ends
    found = json.loads(rows.read_text())
    assert [(row["method"], row["network"]) for row in found["curves"]] == [
        (method, network) for method in ("dense", "fp16") for network in ("100mbit", "10gbit")
    ]
    assert {row["method"] for row in found["times_to_losses"]} == {"dense", "fp16"}
    assert picture.stat().st_size > 5_000


def test_a_large_study_has_its_own_defaults(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "time_steps", lambda _, runs, **__: {run.name: 0.9 for run in runs})
    status, output = _run("--data", data, "--out", tmp_path / "x", "--size", "large", "--device", "cpu", "--plan")
    assert status == 0, output
    # 4 methods of each task; 3 rates of the first seed, and 2 seeds more
    assert "80 runs of 4 tasks, 120,000 steps" in output
    assert "30.0 core-hours together" in output
    assert all(f"{task}: 20 runs" in output for task in GROWN)


def test_a_plan_is_only_told(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "time_steps", lambda _, runs, **__: {run.name: run.batch for run in runs})
    monkeypatch.delattr(command, "train")
    arguments = ("--task", "vgg", "--steps", 60, "--methods", "dense", "--batch", 60, "--sweep", "batch", "--jobs", 2)
    out = tmp_path / "not made"
    status, output = _run("--data", data, "--out", out, *arguments, "--plan")
    assert status == 0, output
    assert not out.exists()
    seconds = 60 * 3 * 60 + 7 * (128 + 256 + 512 + 1024 + 2048)
    assert "8 runs of 1 tasks, 215 steps" in output
    assert f"vgg: 8 runs, {seconds / 60:.1f} min of one core about {seconds / 120:.1f} min with 2 at a time" in output


def test_a_process_that_fails_is_told(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _as_if_timed(monkeypatch)
    run = Run("vgg", "dense", 1.0, 0, 2, 8, 4)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / f"{run.name}.npz").write_bytes(b"damaged")
    status, output = _run(
        *("--data", data, "--out", tmp_path, "--steps", 2, "--task", "vgg", "--methods", "dense", "--seeds", 1),
        *("--batch", 8, "--sweep", "none"),
    )
    assert status == 1
    assert "a training process has failed; its last words:" in output
    assert "damaged" in output


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (RankFailed([RankExit(0, 1, "")]), 1, "(it said nothing)"),
        (RanksTimedOut("not done within timeout_s=1 s"), 1, "not done within timeout_s=1 s"),
        (KeyboardInterrupt(), 130, "the same command goes on from what"),
    ],
)
def test_how_it_ends_early(
    error: BaseException, status: int, said: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(command, "train", fail)
    _as_if_timed(monkeypatch)
    found, output = _run("--data", data, "--out", tmp_path, "--task", "vgg", "--sweep", "none")
    assert found == status, output
    assert said in output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--task", "vgg,what"), "'what' does not exist: use vgg"),
        (("--methods", "none"), "'none' does not exist: use dense"),
        (("--sweep", "steps"), "'steps' does not exist: use batch, ranks"),
        (("--size", "huge"), "'huge' does not exist: use small, large"),
        (("--density", "2"), "'2' is no part of 1"),
        (("--rates", "1,-2"), "'1,-2' must be numbers above 0, separated by commas: 0.5,1,2"),
        (("--rates", "fast"), "'fast' must be numbers above 0"),
        (("--batch", "30"), "Invalid value for --batch: 30 must be a multiple of ranks=4"),
        (("--methods", "momentum", "--task", "gpt"), "momentum fit none of these tasks: gpt has dense, reused"),
        (("--plan", "--json", "rows.json"), "Invalid value for --json: --plan measures nothing to write"),
        (("--out", "/proc/x", "--task", "vgg", "--sweep", "none"), "Invalid value for --out: cannot write /proc/x"),
        (("--json", "/nowhere/rows.json"), "/nowhere does not exist"),
        (("--time-plot", "times.png"), "needs --iterations FILE: how long an iteration takes"),
        (("--networks", "1gbit,fast"), "Invalid value for --networks: network 'fast' is not known"),
        (("--iterations", __file__), "has no rows of weak scaling: write one with python -m lab topk"),
    ],
)
def test_wrong_arguments_are_named(arguments: tuple[str, str], said: str, data: Path, tmp_path: Path) -> None:
    status, output = _run("--data", data, "--out", tmp_path, *arguments)
    assert status == 2
    assert said in output


def test_without_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else sys)
    status, output = _run("--out", tmp_path)
    assert status == 2
    assert "torch is not installed: pip install 'telegrad[demo]'" in output


def test_a_run_that_somebody_has_is_left_to_them(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from lab.accuracy import worker

    place = job.Place(tmp_path, tmp_path, data)
    run = Run("vgg", "dense", 1.0, 0, 2, 8, 4)
    with worker.claimed(place.lock_of(run)) as ours:
        assert ours
        worker.do(run, place)
        assert capsys.readouterr().out == ""
        assert not place.result_of(run).exists()
    worker.do(run, place)
    kinds = [json.loads(line)["kind"] for line in capsys.readouterr().out.splitlines()]
    assert (kinds[0], kinds[-1]) == ("begin", "end")
    assert set(kinds[1:-1]) <= {"step"}  # as often as it takes seconds
    assert json.loads(place.result_of(run).read_text())["run"] == json.loads(run.to_json())
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json"]
