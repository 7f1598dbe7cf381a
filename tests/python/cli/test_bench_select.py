"""``telegrad bench select``: its rows, options, what it prints, writes and draws; and a small run of everything."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from telegrad.bench.device import gpu_name
from telegrad.bench.select import run
from telegrad.bench.select_gpu import Tensors
from telegrad.bench.select_plan import GRADIENTS, METHODS, PEER, Outcome, SelectPlan, rows_of
from telegrad.cli import bench_select
from telegrad.compress import SELECTIONS
from telegrad.report.select import panels_of

_app = typer.Typer()
_app.command()(bench_select.select)

KEYS = {"method", "name", "elements", "density", "median_s", "torch_topk_median_s", "copy_s", "bound_s"}


def _run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(_app, arguments, env={"COLUMNS": "200"})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, " ".join(done.output.replace("│", " ").split())


def _ideal(plan: SelectPlan, on_sample: Callable[[str], None]) -> Outcome:
    """A copy takes 8 ns an element, a method 24, torch.topk 240."""
    cost_s = {name: 8e-9 if name.startswith("copy") else 24e-9 for name in plan.contenders} | {PEER: 240e-9}
    for name in plan.contenders:
        on_sample(name)
    times = {name: [plan.elements * cost_s[name]] * plan.samples for name in plan.contenders}
    return Outcome(times, {name: [plan.k] * plan.samples for name in plan.methods})


def test_every_selection_is_measured() -> None:
    assert set(METHODS.values()) == set(SELECTIONS)
    assert {"reused-threshold", "exact", "trimmed"} <= set(METHODS)


def test_the_bound_is_what_must_move_at_the_bandwidth_of_a_copy() -> None:
    plan = SelectPlan(1000, 0.01)
    outcome = _ideal(plan, lambda _: None)
    outcome.times["copy, numpy"] = [1.0] * 3  # the faster one counts
    row = rows_of(plan, outcome)[0]
    assert row["copy_s"] == pytest.approx(8e-6)
    assert row["bound_s"] == pytest.approx((12 * 1000 + 8 * 10) / (8 * 1000) * 8e-6)
    assert row["of_bound"] == pytest.approx(0.503, abs=0.001)
    assert row["times_faster_than_torch_topk"] == pytest.approx(10)


def test_rows_table_and_plot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("telegrad.bench.select.run", _ideal)
    found, drawn = tmp_path / "rows.json", tmp_path / "plot.png"
    status, output = _run(
        *("--elements", "16Ki..100Ki", "--density", "0.001,0.01", "--methods", "exact,reused-threshold"),
        *("--json", str(found), "--plot", str(drawn)),
    )
    assert status == 0, output
    rows = json.loads(found.read_text())["rows"]
    assert [(row["elements"], row["density"]) for row in rows[::2]] == [
        (elements, density) for elements in (1 << 14, 1 << 16, 100 << 10) for density in (0.001, 0.01)
    ]
    assert all(set(row) >= KEYS for row in rows)
    assert "65,536 elements, 1 %: k = 655" in output
    assert "10.0x" in output
    assert drawn.read_bytes()[:4] == b"\x89PNG"
    assert [panel.about for panel in panels_of(rows)] == ["0.001 of the elements", "0.01 of the elements"]
    (only,) = panels_of([row for row in rows if row["elements"] == 1 << 14])
    assert (only.about, set(only.curves)) == (
        "16,384 elements",
        {"torch.topk", "bound", "exact", "reused-threshold"},
    )
    assert [density for density, _ in only.curves["exact"]] == [0.001, 0.01]


def test_a_small_run_of_everything(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    found = tmp_path / "rows.json"
    status, output = _run("--elements", "4Ki", "--density", "0.05", "--samples", "4", "--json", str(found))
    assert status == 0, output
    result = json.loads(found.read_text())
    assert [row["method"] for row in result["rows"]] == list(METHODS)
    for row in result["rows"]:
        assert row["median_s"] > 0
        assert row["torch_topk_median_s"] > 0
        assert row["bound_s"] > 0
        assert row["k"] == 205
    selected = {row["method"]: row["selected"] for row in result["rows"]}
    assert selected["exact"] == selected["trimmed"] == selected["random"] == 205
    assert 205 <= selected["threshold-search"] <= 410
    assert "machine" in result
    assert torch.get_num_threads() == threads


def test_all_contenders_begin_with_the_same_sums() -> None:
    outcome = run(SelectPlan(2000, 0.01, ("exact", "trimmed", "threshold-search"), samples=3))
    assert outcome.counts["exact"] == outcome.counts["trimmed"] == [20] * 3


def test_all_contenders_on_tensors_select_what_they_promise() -> None:
    """On a GPU where there is one; else in Triton's interpreter, with a clock that stands for the device's."""
    kernels = pytest.importorskip("triton_arrays")
    plan = SelectPlan(3000, 0.01, device="cuda")
    timed: list[object] = []

    def counted(work: Callable[[], object]) -> float:
        timed.append(work())
        return 0.5

    bench = Tensors(plan, kernels.DEVICE, counted)
    outcomes = {name: bench.sample(name, 0) for name in plan.contenders}
    assert len(timed) == len(plan.contenders)
    assert {seconds for seconds, _ in outcomes.values()} == {0.5}
    assert {name for name, (_, count) in outcomes.items() if count is None} == {PEER, "copy, torch"}
    counts = {name: count for name, (_, count) in outcomes.items()}
    assert counts["exact"] == counts["trimmed"] == counts["random"] == counts["reused-threshold"] == 30
    assert 30 <= counts["threshold-search"] <= 60
    left = []
    for name in ("exact", PEER):
        bench.sample(name, 0)
        left.append(bench._residual.cpu().clone())
    assert torch.equal(*left)
    bench.sample("exact", 1)
    assert not torch.equal(left[0], bench._residual.cpu())


def test_gradients_take_turns() -> None:
    """A threshold that is reused meets entries that it was not found from."""
    counts = run(SelectPlan(20_000, 0.01, ("reused-threshold",), samples=2 * GRADIENTS)).counts["reused-threshold"]
    assert len(set(counts)) > 1
    assert all(100 <= count <= 400 for count in counts)


def test_rows_of_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("telegrad.bench.select.run", _ideal)
    monkeypatch.setattr("telegrad.bench.device.gpu_name", lambda: "A Fast GPU")
    found = tmp_path / "rows.json"
    status, output = _run("--device", "cuda", "--elements", "16Ki", "--methods", "exact", "--json", str(found))
    assert status == 0, output
    assert "A Fast GPU" in output
    result = json.loads(found.read_text())
    assert result["machine"]["gpu"] == "A Fast GPU"
    assert [(row["device"], row["threads"]) for row in result["rows"]] == [("cuda", None)] * 3


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_name() is None
    assert _run("--device", "cuda") == (1, "no GPU: torch sees none here, and nothing was measured")


def test_without_triton_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("telegrad.bench.device.gpu_name", lambda: "A Fast GPU")
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "triton" else found(name))
    status, output = _run("--device", "cuda")
    assert status == 2
    assert "pip install 'telegrad[gpu]'" in output


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_small_run_on_a_gpu() -> None:
    outcome = run(SelectPlan(1 << 16, 0.01, samples=3, device="cuda"))
    assert all(0 < seconds for times in outcome.times.values() for seconds in times)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--device", "tpu", "'tpu' does not exist: use cpu or cuda"),
        ("--elements", "0", "'0' is no number from 1 to"),
        ("--elements", "64Mi..1Ki", "'1Ki' is no number from 67108864 to"),
        ("--density", "2", "'2' is no part of 1"),
        ("--methods", "best", "'best' does not exist: use reused-threshold, exact, trimmed"),
        ("--json", "/nowhere/rows.json", "the folder /nowhere does not exist"),
        ("--plot", "/nowhere/plot.png", "the folder /nowhere does not exist"),
    ],
)
def test_bad_options_name_the_remedy(option: str, value: str, message: str) -> None:
    status, output = _run(option, value)
    assert status == 2
    assert message in output
