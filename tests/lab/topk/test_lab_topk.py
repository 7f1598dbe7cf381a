"""``python -m lab topk``: its options, what it prints, writes and draws, and how it ends; one small job."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from lab.topk import command, measured, simulated
from lab.topk.measured import MeasuredPlan, Outcome, rows_of
from lab.topk.plots import grids_of
from lab.topk.recording import Recorder
from lab.topk.schemes import SCHEMES
from telegrad.launch import LaunchError

_app = typer.Typer()
_app.command()(command.command)

SIZES = {"a": 3000, "b": 500}


def _run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(_app, arguments, env={"COLUMNS": "220"})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, " ".join(done.output.replace("│", " ").split())


@pytest.fixture
def gradients(tmp_path: Path) -> Path:
    recorder = Recorder("lstm", 5, SIZES, 64)
    for row in range(64):
        recorder.take(row, np.random.default_rng(row).standard_t(3, 3500).astype(np.float32))
    file = tmp_path / "gradients.npz"
    recorder.recording().save(file)
    return file


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "sources"
    folder.mkdir()
    for i in range(60):
        (folder / f"module{i}.py").write_text(f"def function{i}(argument):\n    return argument + {i}\n" * 20)
    return folder


@pytest.fixture(autouse=True)
def _small_patterns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated, "_PATTERN_N", 20_000)
    monkeypatch.setattr(simulated, "_PATTERN_K", 60)


def test_a_simulation_from_training_to_the_picture(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_FEWEST_GRADIENTS", 8)
    monkeypatch.setattr(command, "_TRAINING_RANKS", 2)
    kept, rows_file, picture = tmp_path / "kept.npz", tmp_path / "rows.json", tmp_path / "rows.png"
    options = ["--simulate", "--ranks", "2,8", "--calls", "2", "--steps", "2", "--training", "3", "--xi"]
    options += ["--no-weak-scaling", "--jobs", "1", "--text", str(sources), "--gradients", str(kept)]
    status, said = _run(*options, "--json", str(rows_file), "--plot", str(picture))
    assert status == 0
    assert "of 6k'+2E" in said
    assert "bytes with headers and counts" in said
    assert "gone-stale" in said
    assert "3 steps of lstm with Ok-Topk, 2 ranks" in said
    result = json.loads(rows_file.read_text())
    wanted = {"scheme", "ranks", "k", "selected", "words_max", "time_s"}
    assert all(wanted <= row.keys() for row in result["rows"])
    assert {row["scheme"] for row in result["rows"]} == set(SCHEMES)
    assert {row["factor"] for row in result["rows"] if row["gradients"] == "recorded"} == {27_569_568 / 157_440}
    assert len(result["training"]) == result["training_averages"]["steps"] == 3
    assert picture.read_bytes().startswith(b"\x89PNG")
    status, said = _run(*options, "--patterns", "none", "--parameters", "0", "--training", "0", "--schemes", "oktopk")
    assert status == 0  # from the gradients that were kept
    assert "a byte costs 1.0 times as much" in said
    assert "gone-stale" not in said


def test_weak_scaling_is_shown_for_each_model(gradients: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_WEAK_RANKS", (2, 4))
    monkeypatch.setattr("lab.topk.weak_scaling._FACTOR", 1e5)
    options = ["--simulate", "--ranks", "2", "--training", "0", "--jobs", "1", "--patterns", "none"]
    options += ["--gradients", str(gradients), "--schemes", "dense,oktopk", "--plot", str(tmp_path / "drawn")]
    status, said = _run(*options)
    assert status == 0
    for model in ("VGG-16, 14,728,266", "LSTM, 27,569,568", "BERT, 133,547,324"):
        assert model in said
    assert "overlapped" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--schemes", "best"], "'best' does not exist: use dense"),
        (["--task", "bert"], "'bert' does not exist"),
        (["--ranks", "1"], "'1' is not within what can be compared here: use 2 to 256 ranks"),
        (["--simulate", "--ranks", "2048"], "'2048' is not within what can be compared here: use 2 to 1024 ranks"),
        (["--simulate", "--density", "0.1,0.2"], "0.1,0.2 are several, and --simulate takes one"),
        (["--simulate", "--network", "fast"], "or aries"),
        (["--simulate", "--blocks", "3"], "it is for what is measured: leave this out"),
        (["--no-weak-scaling"], "--weak-scaling: it is for --simulate: leave this out"),
        (["--task", "lstm,vgg"], "lstm,vgg are several, and gradients are of one: give one"),
        (["--task", "vgg", "--ranks", "2"], "vgg, but"),
        (["--simulate", "--patterns", "worst"], "'worst' does not exist"),
        (["--network", "fast"], "network 'fast' is not known"),
        (["--json", "/nowhere/at/all"], "does not exist"),
    ],
    ids=lambda value: "_".join(value).strip("-") if isinstance(value, list) else "",
)
def test_bad_options_are_named(arguments: list[str], said: str, gradients: Path) -> None:
    status, output = _run(*arguments, "--gradients", str(gradients))
    assert status == 2
    assert said in output.replace("│", "")


def test_ranks_may_be_a_range(gradients: Path) -> None:
    status, output = _run("--ranks", "2..16", "--network", "fast", "--gradients", str(gradients))
    assert status == 2
    assert "network 'fast' is not known" in output  # what is looked at after the ranks


def test_gradients_that_do_not_fit_are_refused(gradients: Path, tmp_path: Path) -> None:
    status, said = _run("--simulate", "--ranks", "128", "--no-weak-scaling", "--gradients", str(gradients))
    assert status == 2
    assert "has 64 gradients, and 128 are needed" in said
    other = tmp_path / "other.npz"
    other.write_text("no")
    status, said = _run("--simulate", "--gradients", str(other))
    assert status == 2
    assert "holds no recorded gradients" in said


def test_data_that_are_missing_are_named(tmp_path: Path) -> None:
    status, said = _run("--simulate", "--ranks", "2", "--text", str(tmp_path))
    assert status == 2
    assert "has no *.py file" in said


def test_torch_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    assert "torch is not installed" in _run("--simulate")[1]


def _outcome(wrong: int = 0, failing: int = 0) -> Callable[..., Outcome]:
    def run(plan: MeasuredPlan, *, timeout_s: float, on_sample: Callable[[str], None]) -> Outcome:
        if plan.ranks == failing:
            raise LaunchError("rank 1 is gone")
        outcome = Outcome()
        for place, name in enumerate(plan.schemes):
            outcome.times[name] = [1e-3 * (place + 1)] * plan.samples
            on_sample(name)
            outcome.wrong[name], outcome.words_max[name], outcome.wire_bytes[name] = wrong, None, 1000
            outcome.apart[name] = 2e-3, 4e-3
        return outcome

    return run


def test_what_is_measured_is_split_and_compared(
    gradients: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measured, "run", _outcome())
    file = tmp_path / "rows.json"
    options = ["--ranks", "2,4", "--network", "tcp", "--density", "0.01,0.1", "--gradients", str(gradients)]
    status, said = _run(*options, "--schemes", "topka,oktopk", "--json", str(file), "--plot", str(tmp_path / "m.png"))
    assert status == 0
    assert "4 ranks, tcp, 0.1 of 56,000 elements" in said
    rows = json.loads(file.read_text())["measured"]
    assert len(rows) == 2 * 2 * 2
    first, second = rows[:2]
    assert (first["times_of_best"], second["times_of_best"]) == (1.0, 2.0)
    assert (first["total_s"], first["communication_s"]) == (pytest.approx(3e-3), 0.0)
    grids = grids_of({"measured": rows})
    assert {name: list(grid.panels) for name, grid in grids.items()} == {
        f"tcp, {ranks} ranks": ["density 1 %", "density 10 %"] for ranks in (2, 4)
    }
    assert grids["tcp, 2 ranks"].names == ["topka", "oktopk"]


def test_failed_jobs_and_wrong_sums_end_with_status_1(gradients: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--ranks", "2,4", "--network", "tcp", "--gradients", str(gradients)]
    monkeypatch.setattr(measured, "run", _outcome(failing=4))
    status, said = _run(*options)
    assert status == 1
    assert "rank 1 is gone" in said
    monkeypatch.setattr(measured, "run", _outcome(wrong=1))
    assert _run(*options)[0] == 1


def test_all_schemes_run_over_a_network(gradients: Path) -> None:
    plan = MeasuredPlan(
        "tcp", 3, 0.02, tuple(SCHEMES), str(gradients), blocks=2, calls=2, samples=3, seconds=1, calibrates=False
    )
    outcome = measured.run(plan, timeout_s=120)
    rows: list[dict[str, Any]] = rows_of(plan, outcome, 3500)
    assert [row["scheme"] for row in rows] == list(SCHEMES)
    assert all(row["wrong"] == 0 for row in rows)
    assert all(row["samples"] == 3 for row in rows)
    by = {row["scheme"]: row for row in rows}
    assert by["oktopk"]["words_max"] <= 6 * 140 + 2 * 3
    assert by["dense"]["selection_s"] == 0 < by["oktopk"]["selection_s"]
    assert by["dense"]["wire_bytes"] > by["topka"]["wire_bytes"]
