"""``python -m lab select``: its rows, options, what it prints, writes and draws; and a small run of everything."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from lab import select
from lab.select import (
    GPU_COPY,
    GRADIENTS,
    METHODS,
    PEER,
    QUEUED,
    QUEUED_COPY,
    QUEUED_PEER,
    Outcome,
    Sample,
    SelectPlan,
    Tensors,
    methods_on,
    panels_of,
    rows_of,
    run,
    seconds_behind_others,
    table_of,
)
from telegrad.compress import SELECTIONS
from telegrad.tools.bench.device import gpu_name

_app = typer.Typer()
_app.command()(select.command)

KEYS = {"method", "name", "elements", "density", "median_s", "torch_topk_median_s", "copy_s", "bound_s"}


def _run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(_app, arguments, env={"COLUMNS": "200"})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, " ".join(done.output.replace("│", " ").split())


def _ideal(plan: SelectPlan, on_sample: Callable[[str], None]) -> Outcome:
    """A copy takes 8 ns an element, a method 24, torch.topk 240; what is queued half of these, and its host 5 us."""
    cost_s = {name: 8e-9 if name.startswith("copy") else 24e-9 for name in plan.contenders}
    cost_s |= {PEER: 240e-9, QUEUED_PEER: 240e-9}
    queued = (QUEUED_COPY, QUEUED_PEER, *QUEUED)
    cost_s |= {name: cost_s[name] / 2 for name in queued if name in cost_s}
    for name in plan.contenders:
        on_sample(name)
    times = {name: [plan.elements * cost_s[name]] * plan.samples for name in plan.contenders}
    enqueued = {name: [5e-6] * plan.samples for name in queued if name in plan.contenders}
    return Outcome(times, {name: [plan.k] * plan.samples for name in plan.methods}, enqueued)


def test_every_selection_is_measured() -> None:
    assert set(METHODS.values()) == set(SELECTIONS)
    assert {"reused-threshold", "exact", "trimmed"} <= set(METHODS)
    assert QUEUED == {"exact-queued": "topk", "reused-threshold-queued": "reused"}
    assert (methods_on("cpu"), methods_on("cuda")) == (tuple(METHODS), (*METHODS, *QUEUED))


@pytest.mark.parametrize(
    ("methods", "peers"),
    [
        (("exact",), {GPU_COPY, PEER}),
        (("exact-queued",), {QUEUED_COPY, QUEUED_PEER}),
        (("exact-queued", "random"), {GPU_COPY, PEER, QUEUED_COPY, QUEUED_PEER}),
    ],
)
def test_only_peers_that_something_is_compared_with_are_measured(methods: tuple[str, ...], peers: set[str]) -> None:
    assert set(SelectPlan(1000, 0.01, methods, device="cuda").contenders) == peers | set(methods)


def test_what_is_queued_is_compared_with_peers_that_are() -> None:
    plan = SelectPlan(1000, 0.01, ("exact", "exact-queued"), device="cuda")
    outcome = _ideal(plan, lambda _: None)
    outcome.enqueued[QUEUED_PEER] = [7e-6, 9e-6, 8e-6]
    waited, queued = rows_of(plan, outcome)
    assert (waited["name"], queued["name"]) == ("topk", "topk")
    assert waited["copy_s"] == pytest.approx(8e-6)
    assert waited["torch_topk_median_s"] == pytest.approx(240e-6)
    assert (waited["enqueue_median_s"], waited["torch_topk_enqueue_median_s"]) == (None, None)
    assert queued["copy_s"] == pytest.approx(4e-6)
    assert queued["torch_topk_median_s"] == pytest.approx(120e-6)
    assert queued["median_s"] == pytest.approx(12e-6)
    assert queued["times_faster_than_torch_topk"] == pytest.approx(10)
    assert queued["bound_s"] == pytest.approx((12 * 1000 + 8 * 10) / (8 * 1000) * 4e-6)
    assert queued["of_bound"] == pytest.approx(0.503, abs=0.001)
    assert (queued["enqueue_median_s"], queued["torch_topk_enqueue_median_s"]) == (5e-6, 8e-6)


def test_curves_of_peers_are_of_those_that_are_waited_for_unless_nothing_is() -> None:
    plan = SelectPlan(1000, 0.01, ("exact-queued", "exact"), device="cuda")
    rows = rows_of(plan, _ideal(plan, lambda _: None))
    (both,) = panels_of(rows)
    assert set(both.curves) == {"torch.topk", "bound", "exact", "exact-queued"}
    assert both.curves["torch.topk"] == [(0.01, pytest.approx(240e-6))]
    assert both.curves["bound"] == [(0.01, rows[1]["bound_s"])]
    assert both.curves["exact-queued"] == [(0.01, pytest.approx(12e-6))]
    (queued,) = panels_of(rows[:1])
    assert queued.curves["torch.topk"] == [(0.01, pytest.approx(120e-6))]
    assert queued.curves["bound"] == [(0.01, rows[0]["bound_s"])]


def test_the_table_has_peers_and_enqueueing_of_what_is_queued() -> None:
    assert _table(("exact", "exact-queued")) == {
        "": ["selected/k", "median", "mean", "bound", "of bound", "to torch.topk", "enqueue"],
        "torch.topk and residual": ["1.00", "240.0 µs", "", "", "", "", ""],
        "torch.topk, queued": ["1.00", "120.0 µs", "", "", "", "", "5.0 µs"],
        "exact": ["1.00", "24.0 µs", "24.0 µs", "12.1 µs", "50%", "10.0x", ""],
        "exact-queued": ["1.00", "12.0 µs", "12.0 µs", "6.0 µs", "50%", "10.0x", "5.0 µs"],
        "one copy": ["", "8.0 µs", "", "", "", "", ""],
        "one copy, queued": ["", "4.0 µs", "", "", "", "", ""],
    }
    assert [*_table(("exact",))] == ["", "torch.topk and residual", "exact", "one copy"]
    assert "enqueue" not in _table(("exact",))[""]
    assert [*_table(("exact-queued",))] == ["", "torch.topk, queued", "exact-queued", "one copy, queued"]


def _table(methods: tuple[str, ...]) -> dict[str, list[str]]:
    """Its cells, line by line, by what the line is called."""
    plan = SelectPlan(1000, 0.01, methods, device="cuda")
    table = table_of(rows_of(plan, _ideal(plan, lambda _: None)), "")
    names, *columns = [[str(column.header), *map(str, column.cells)] for column in table.columns]
    return dict(zip(names, map(list, zip(*columns, strict=True)), strict=True))


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
    monkeypatch.setattr("lab.select.run", _ideal)
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
    plan = SelectPlan(3000, 0.01, methods_on("cuda"), device="cuda")
    bench = Tensors(plan, kernels.DEVICE, _clock(0.5), _clock(0.25))
    outcomes = {name: bench.sample(name, 0) for name in plan.contenders}
    queued = {QUEUED_COPY, QUEUED_PEER, *QUEUED}
    assert {name for name, sample in outcomes.items() if sample.seconds == 0.25} == queued
    assert {sample.seconds for name, sample in outcomes.items() if name not in queued} == {0.5}
    assert {name for name, sample in outcomes.items() if sample.enqueue_s is not None} == queued
    assert all(outcomes[name].enqueue_s > 0 for name in queued)
    counts = {name: sample.count for name, sample in outcomes.items() if sample.count is not None}
    assert set(counts) == set(plan.methods)
    ranked = ("exact", "trimmed", "random", "reused-threshold", *QUEUED)
    assert {counts[name] for name in ranked} == {30}
    assert 30 <= counts["threshold-search"] <= 60
    left = []
    for name in ("exact", "exact-queued", QUEUED_PEER, PEER):
        bench.sample(name, 0)
        left.append(bench._residual.cpu().clone())
    assert all(torch.equal(left[0], other) for other in left[1:])
    bench.sample("exact", 1)
    assert not torch.equal(left[0], bench._residual.cpu())


@pytest.mark.parametrize("elements", [3000, 20_000])
def test_what_is_queued_reuses_its_threshold(elements: int) -> None:
    """As the method that is waited for; the longer one is ranked by a table."""
    kernels = pytest.importorskip("triton_arrays")
    plan = SelectPlan(elements, 0.01, ("reused-threshold", "reused-threshold-queued"), device="cuda")
    bench = Tensors(plan, kernels.DEVICE, _clock(0.5), _clock(0.25))
    waited, queued = ([bench.sample(name, number).count for number in range(10)] for name in plan.methods)
    assert queued == waited
    assert (queued[0], queued[8]) == (plan.k, plan.k)
    assert any(count != plan.k for count in queued)
    assert all(plan.k / 2 <= count <= 2 * plan.k for count in queued if count is not None)


def test_what_is_queued_sends_all_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """As training does, which ranks nothing then."""
    kernels = pytest.importorskip("triton_arrays")
    for ranking in ("queue_topk", "queue_reused"):
        monkeypatch.setattr(f"telegrad.kernels.select.triton.{ranking}", None)
    bench = Tensors(SelectPlan(500, 1.0, tuple(QUEUED), device="cuda"), kernels.DEVICE, _clock(0.5), _clock(0.25))
    for name in QUEUED:
        assert bench.sample(name, 0).count == 500
        assert not bench._residual.any()


def _clock(seconds: float) -> Callable[[Callable[[], object]], float]:
    def timed(work: Callable[[], object]) -> float:
        work()
        return seconds

    return timed


def test_the_device_is_busy_before_what_is_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            done.append("event")

        def synchronize(self) -> None:
            done.append("wait")

        def elapsed_time(self, other: Event) -> float:
            return 2.0 if other is not self else 0.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: done.append("busy" if cycles > 1_000_000 else "idle"))
    assert seconds_behind_others(lambda: done.append("work")) == 2e-3
    assert done == ["busy", "event", "work", "event", "wait"]


def test_a_run_keeps_what_enqueueing_took(monkeypatch: pytest.MonkeyPatch) -> None:
    class Queue:
        def sample(self, name: str, number: int) -> Sample:
            return Sample(0.5, 10 if name in QUEUED else None, 0.25 * number)

    monkeypatch.setattr("lab.select._contenders", lambda _: Queue())
    plan = SelectPlan(1000, 0.01, ("exact-queued",), samples=3, device="cuda")
    outcome = run(plan)
    assert outcome.enqueued == {name: [0.25, 0.5, 0.75] for name in (QUEUED_COPY, QUEUED_PEER, "exact-queued")}
    assert rows_of(plan, outcome)[0]["enqueue_median_s"] == 0.5


def test_gradients_take_turns() -> None:
    """A threshold that is reused meets entries that it was not found from."""
    counts = run(SelectPlan(20_000, 0.01, ("reused-threshold",), samples=2 * GRADIENTS)).counts["reused-threshold"]
    assert len(set(counts)) > 1
    assert all(100 <= count <= 400 for count in counts)


def test_rows_of_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("lab.select.run", _ideal)
    monkeypatch.setattr("telegrad.tools.bench.device.gpu_name", lambda: "A Fast GPU")
    found = tmp_path / "rows.json"
    status, output = _run("--device", "cuda", "--elements", "16Ki", "--density", "0.01", "--json", str(found))
    assert status == 0, output
    assert "A Fast GPU" in output
    assert "5.0 µs" in output
    result = json.loads(found.read_text())
    assert result["machine"]["gpu"] == "A Fast GPU"
    assert [row["method"] for row in result["rows"]] == [*METHODS, *QUEUED]
    assert {(row["device"], row["threads"]) for row in result["rows"]} == {("cuda", None)}
    status, output = _run("--device", "cuda", "--elements", "16Ki", "--methods", "exact-queued", "--json", str(found))
    assert status == 0, output
    assert [row["method"] for row in json.loads(found.read_text())["rows"]] == ["exact-queued"] * 3
    assert _run("--device", "cuda", "--methods", "best")[1].count("reused-threshold-queued") == 1


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_name() is None
    assert _run("--device", "cuda") == (1, "no GPU: torch sees none here, and nothing was measured")


def test_without_triton_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("telegrad.tools.bench.device.gpu_name", lambda: "A Fast GPU")
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "triton" else found(name))
    status, output = _run("--device", "cuda")
    assert status == 2
    assert "pip install 'telegrad[gpu]'" in output


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_small_run_on_a_gpu() -> None:
    outcome = run(SelectPlan(1 << 16, 0.01, methods_on("cuda"), samples=3, device="cuda"))
    assert all(0 < seconds for times in outcome.times.values() for seconds in times)
    assert set(outcome.enqueued) == {QUEUED_COPY, QUEUED_PEER, *QUEUED}


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--device", "tpu", "'tpu' does not exist: use cpu or cuda"),
        ("--elements", "0", "'0' is no number from 1 to"),
        ("--elements", "64Mi..1Ki", "range '64Mi..1Ki' ends before it begins"),
        ("--density", "2", "'2' is no part of 1"),
        ("--methods", "best", "'best' does not exist: use reused-threshold, exact, trimmed"),
        ("--methods", "exact,exact-queued", "'exact-queued' is measured on a GPU only: give --device cuda, or use"),
        ("--json", "/nowhere/rows.json", "the folder /nowhere does not exist"),
        ("--plot", "/nowhere/plot.png", "the folder /nowhere does not exist"),
    ],
)
def test_bad_options_name_the_remedy(option: str, value: str, message: str) -> None:
    status, output = _run(option, value)
    assert status == 2
    assert message in output
