"""Time to a loss: how long a step takes by method and network, and when a curve gets to a loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("rich")

from lab.accuracy.problems import open_problem
from lab.accuracy.runs import METHODS, Run
from lab.accuracy.time_to_loss import (
    clock_of,
    measured_trace,
    plot,
    step_seconds,
    timed_curves,
    times_table,
    times_to,
)
from telegrad.synchronizer.trace import Trace

RANKS = 4
SIZE = 1024 * 1024 * 4
TRACE = Trace(("b", "a"), (SIZE, SIZE), (0.004, 0.004), 0.004, rest_s=0.001, rows=(1024, 1024))


def seconds(method: str, network: str, trace: Trace = TRACE) -> float:
    return step_seconds(trace, network, RANKS, method, 0.01)


def test_a_step_is_computing_and_what_the_network_adds() -> None:
    dense_s = 2 * (RANKS - 1) / RANKS * 2 * SIZE * 8 / 100e6
    slow = {name: seconds(name, "100mbit") for name in METHODS}
    assert slow["dense"] == pytest.approx(0.013 + dense_s, rel=0.1)
    assert slow["fp16"] == pytest.approx(0.013 + dense_s / 2, rel=0.15)
    assert slow["powersgd-8"] == pytest.approx(0.013 + dense_s * 8 / 512, rel=0.5)
    assert slow["lowrank-8"] < slow["powersgd-8"] < slow["reused"] < slow["fp16"]
    assert slow["oktopk"] < slow["reused"]
    assert slow["topka"] > slow["oktopk"]
    fast = {name: seconds(name, "400gbit") for name in METHODS}
    assert all(0.013 <= one < slow[name] for name, one in fast.items())
    assert fast["dense"] < min(fast[name] for name in METHODS if name not in ("dense", "fp16"))  # selecting costs


def test_gradients_that_powersgd_sends_whole_take_longer() -> None:
    vectors = Trace(("b", "a"), (SIZE, SIZE), (0.004, 0.004), 0.004, rows=(1, 1024))
    assert seconds("powersgd-8", "100mbit", vectors) > 10 * seconds("powersgd-8", "100mbit")


def test_dense_first_steps_take_as_long_as_dense_ones() -> None:
    def clock(method: str, task: str = "gpt") -> list[float]:
        return [clock_of({"method": method, "task": task, "steps": 20}, 10.0, 1.0)(step) for step in (1, 2, 3, 20)]

    assert clock("reused") == [10, 20, 21, 38]
    assert clock("reused", "lstm") == clock("cold") == clock("lowrank-4") == [1, 2, 3, 20]
    assert clock("powersgd-4", "lstm") == [10, 20, 21, 38]


def _result(method: str, losses: tuple[float, ...], seed: int = 0, rate: float = 1.0, last: float = 9.0) -> Any:
    run = {"task": "lstm", "method": method, "density": 1.0, "seed": seed, "steps": 20, "batch": 16, "ranks": RANKS}
    points: list[dict[str, float]] = [{"step": 10 * place, "loss": one} for place, one in enumerate(losses, 1)]
    points[-1] |= {"loss": last, "loss_on_the_way": losses[-1]}
    return {"run": {**run, "size": "small", "device": "cpu", "rate": rate}, "points": points, "diverged": None}


RESULTS = [
    _result("dense", (4.0, 2.0), last=2.5),
    _result("dense", (6.0, 2.0), seed=1, last=2.5),
    _result("fp16", (4.0, 2.2), last=2.6),
    _result("fp16", (9.0, 9.0), rate=2.0, last=9.0),
]


def test_a_curve_gets_to_a_loss_between_its_points() -> None:
    rows = timed_curves(RESULTS, {"lstm": TRACE}, ["100mbit", "1gbit"])
    assert [(row["method"], row["network"], row["seeds"], row["rate"]) for row in rows] == [
        ("dense", "100mbit", 2, 1),
        ("dense", "1gbit", 2, 1),
        ("fp16", "100mbit", 1, 1),
        ("fp16", "1gbit", 1, 1),
    ]
    step_s = rows[0]["step_s"]
    assert rows[0]["curve"] == [[10, pytest.approx(10 * step_s), 5], [20, pytest.approx(20 * step_s), 2]]
    times = times_to(rows, (1.0, 1.15, 4.0))
    assert [(row["method"], row["loss"], row["steps_to"]) for row in times if row["network"] == "1gbit"] == [
        ("dense", 2.0, 20),
        ("dense", pytest.approx(2.3), pytest.approx(19)),
        ("dense", 8.0, 10),
        ("fp16", 2.0, None),
        ("fp16", pytest.approx(2.3), pytest.approx(10 + 10 * 1.7 / 1.8)),
        ("fp16", 8.0, 10),
    ]
    for row in times:
        step_s = next(one["step_s"] for one in rows if all(one[name] == row[name] for name in ("method", "network")))
        assert row["seconds"] == (None if row["steps_to"] is None else pytest.approx(row["steps_to"] * step_s))
    table = [list(column.cells) for column in times_table(times).columns]
    assert table[2] == ["dense", "fp16"] * 3
    assert [("–" in cell, "bold" in cell) for cell in table[5]] == [
        *[(False, False), (False, True)] * 2,
        (False, True),
        (True, False),
    ]


def test_without_dense_training_no_loss_is_aimed_at() -> None:
    assert times_to(timed_curves(RESULTS[2:], {"lstm": TRACE}, ["1gbit"])) == []


def test_a_panel_for_each_task_and_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: drawn.append(self))
    rows = timed_curves(RESULTS, {"lstm": TRACE}, ["100mbit", "1gbit"])
    plot(rows, "title", tmp_path / "times.png")
    panels = drawn[0].axes
    assert [panel.get_title(loc="left") for panel in panels] == ["lstm, 100mbit", "lstm, 1gbit"]
    assert [line.get_label() for line in panels[0].lines] == ["dense", "fp16"]
    assert list(panels[0].lines[0].get_xdata()) == [point[1] for point in rows[0]["curve"]]


def test_a_step_is_measured(places: tuple[Path, Path]) -> None:
    run = Run("lstm", "dense", 1.0, 0, 3, 8, RANKS)
    trace = measured_trace(run, open_problem("lstm", *places))
    assert trace.bytes == 4 * 157_440
    assert min(trace.forward_s, trace.backward_s, trace.rest_s) > 0
    assert len(trace.rows) == len(trace.names)
