"""Held-out figures over time: a study's steps, each as long as an iteration of a simulated model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("rich")

from lab.accuracy.time_to_accuracy import plot_over_time, read_iterations, timed, times_table

ITERATIONS = [
    {"model": "VGG-16", "scheme": scheme, "ranks": ranks, "density": 0.02, "iteration_s": seconds * ranks}
    for scheme, seconds in (("dense", 9.0), ("dense-overlapped", 3.0), ("oktopk", 1.0))
    for ranks in (16, 32)
]
ROWS = [
    {"task": "vgg", "method": method, "density": density, "steps": 10, "value": value, "judged_by": "accuracy"}
    for method, density, value in (("dense", 1.0, 90.0), ("oktopk", 0.01, None), ("reused", 0.01, 80.0))
]


def _result(method: str, density: float, figures: tuple[float, ...]) -> dict[str, Any]:
    run = {"task": "vgg", "method": method, "density": density, "seed": 0, "steps": 10, "batch": 64, "ranks": 4}
    points = [{"step": 5 * (place + 1), "accuracy": one} for place, one in enumerate(figures)]
    return {"run": {**run, "size": "small", "device": "cpu"}, "points": points, "diverged": None}


def test_a_run_takes_its_steps_times_an_iteration_of_its_scheme() -> None:
    times = timed(ROWS, ITERATIONS)
    assert [(row["method"], row["scheme"], row["ranks"], row["run_s"]) for row in times] == [
        ("dense", "dense-overlapped", 16, 480.0),
        ("dense", "dense-overlapped", 32, 960.0),
        ("oktopk", "oktopk", 16, 160.0),
        ("oktopk", "oktopk", 32, 320.0),
    ]
    assert {(row["model"], row["model_density"]) for row in times} == {("VGG-16", 0.02)}
    table = times_table(times)
    assert [list(column.cells) for column in table.columns][3] == ["90.00", "diverged"]


def test_curves_are_drawn_over_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: drawn.append(self))
    results = [_result("dense", 1.0, (50.0, 90.0)), _result("oktopk", 0.01, (40.0, 89.0)), _result("x", 0.01, (1.0,))]
    plot_over_time(results, timed(ROWS, ITERATIONS), (16, 32), tmp_path / "times.png")
    (figure,) = drawn
    lines = [{line.get_label(): list(line.get_xdata()) for line in panel.lines} for panel in figure.axes]
    assert lines == [
        {"dense": [240.0, 480.0], "oktopk 1 %": [80.0, 160.0]},
        {"dense": [480.0, 960.0], "oktopk 1 %": [160.0, 320.0]},
    ]


def test_numbers_of_ranks_without_iterations_have_an_empty_panel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: drawn.append(self))
    plot_over_time([_result("dense", 1.0, (50.0, 90.0))], timed(ROWS, ITERATIONS), (16, 64), tmp_path / "times.png")
    assert [(panel.axison, len(panel.lines)) for panel in drawn[0].axes] == [(True, 1), (False, 0)]


@pytest.mark.parametrize("text", ["no json", "{}", '{"weak_scaling": []}', '{"weak_scaling": [{"model": "x"}]}', "[]"])
def test_files_without_iterations_are_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    file.write_text(text)
    with pytest.raises(ValueError, match="has no rows of weak scaling: write one with python -m lab topk"):
        read_iterations(file)
    file.write_text(json.dumps({"weak_scaling": ITERATIONS}))
    assert read_iterations(file) == ITERATIONS
