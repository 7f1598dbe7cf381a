"""The tables, bars and plots of training runs show the figures that they were given."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest

pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from rich.console import Console

from telegrad.tools.cli.demo import TrainingProgress, figures_of, plot, reference_of, table_of
from telegrad.tools.demo.job import RunResult, TrainingStep, Validation, as_json


def _run(name: str, step_s: float, loss: float, sent: float) -> RunResult:
    made = RunResult(name, steps=[TrainingStep(i, 3.0, step_s, step_s / 2, i * sent) for i in (1, 2)])
    made.validations = [Validation(i, 2 * loss / i, i * step_s, i * sent) for i in (1, 2)]
    made.training_s = 2 * step_s
    made.sent_by_rank = [2 * sent, 2 * sent]
    return made


@pytest.fixture
def runs() -> list[RunResult]:
    return [
        _run("ddp-gloo", 0.4, 2.0, 32e6),
        _run("telegrad-dense", 0.38, 2.0, 32e6),
        _run("telegrad-sparse", 0.2, 2.2, 1.6e6),
    ]


def _printed(table: object, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_table_fits_a_terminal_and_compares_with_ddp(runs: list[RunResult]) -> None:
    shown = _printed(table_of(runs, "the title"))
    assert "…" not in shown
    lines = {
        line.split("│")[1].strip(): [cell.strip() for cell in line.split("│")[2:5]] for line in shown.splitlines()[4:-1]
    }
    cells = next(cells for name, cells in lines.items() if name.startswith("held-out loss (nats"))
    assert cells == ["2.000", "2.000 (1.00x)", "2.200 (1.10x)"]
    assert lines["median step"] == ["400 ms", "380 ms (0.95x)", "200 ms (0.50x)"]
    assert lines["sent per rank and step"] == ["32.00 MB", "32.00 MB (1/1.0)", "1.60 MB (1/20.0)"]


def test_without_ddp_the_first_run_is_the_reference(runs: list[RunResult]) -> None:
    assert reference_of(runs[1:]).name == "telegrad-dense"
    assert reference_of(runs[::-1]).name == "ddp-gloo"
    assert "(1/20.0)" in _printed(table_of(runs[1:], ""))


def test_one_run(runs: list[RunResult]) -> None:
    assert "x)" not in _printed(table_of(runs[:1], ""))


def test_many_runs_have_a_line_each_in_eighty_columns() -> None:
    names = ("ddp-gloo", "ddp-fp16", "ddp-powersgd-4", "telegrad-lowrank-4", "telegrad-sparse")
    runs = [_run(name, 0.4 / (1 + number), 2.0, 32e6 / (1 + number)) for number, name in enumerate(names)]
    shown = _printed(table_of(runs, "")).splitlines()
    for name in names:
        assert sum(name in line for line in shown) == 1
    assert not any("…" in line for line in shown)


def test_live_figures(runs: list[RunResult]) -> None:
    assert figures_of(RunResult("ddp-gloo")) == "starting training"
    assert figures_of(runs[0]) == "loss 3.000 (held out 2.000) · step 400 ms · exposed 200 ms · 64.0 MB sent"


@pytest.mark.parametrize("terminal", [True, False])
def test_progress(runs: list[RunResult], terminal: bool) -> None:
    console = Console(file=io.StringIO(), width=100, force_terminal=terminal)
    with TrainingProgress(console, ["ddp-gloo", "telegrad-sparse"], 2) as progress:
        progress.begin("ddp-gloo")
        progress.update(runs[0], "step")
        progress.update(runs[0], "validation")
        progress.finish("ddp-gloo")
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    if terminal:
        assert "2/2" in shown
        assert "telegrad-sparse" in shown
    else:
        assert shown == f"ddp-gloo, step 2: {figures_of(runs[0])}\n"


def test_plot(runs: list[RunResult], tmp_path: Path) -> None:
    picture = tmp_path / "new" / "demo.png"
    plot(as_json(runs, network="shm", ranks=2, steps=2), "the title", picture)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("loss", "sent"), [(math.nan, 32e6), (2.0, 0.0), (math.inf, 0.0)])
def test_a_plot_of_what_diverged_or_was_never_sent(loss: float, sent: float, tmp_path: Path) -> None:
    picture = tmp_path / "demo.png"
    found = as_json([_run("ddp-gloo", 0.4, loss, sent)], network="shm", ranks=2, steps=2)
    plot(found, "the title", picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
