"""Schemes in virtual time: rows, bounds, and that processes change nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from topk_recordings import recording

from lab.topk import simulated
from lab.topk.processes import simulate_all, tasks_of
from lab.topk.schemes import SCHEMES, most_words
from lab.topk.simulated import ARIES, RECORDED, Part, SimulatedPlan, scaled, selection_seconds, simulate
from lab.topk.weak_scaling import Model, weak_scaling

PLAN = SimulatedPlan((2, 8), 0.02, 3, tuple(SCHEMES), ("gone-stale", "disjoint"))


@pytest.fixture(autouse=True)
def _small_patterns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated, "_PATTERN_N", 20_000)
    monkeypatch.setattr(simulated, "_PATTERN_K", 60)


def test_every_scheme_has_a_row_for_each_number_of_ranks_and_call() -> None:
    found = simulate_all(PLAN, (), recording(), Path("none"), processes=1)
    recorded = [row for row in found.rows if row["gradients"] == RECORDED]
    assert [(row["ranks"], row["scheme"], row["call"]) for row in recorded] == [
        (ranks, name, call) for ranks in (2, 8) for name in SCHEMES for call in range(3)
    ]
    for row in found.rows:
        assert row["words_max"] == max(row["words_sent_max"], row["words_received_max"])
        assert row["least_words"] < row["paper_words"]
        if row["scheme"] == "oktopk":
            assert row["words_max"] <= row["bound_words"] == most_words(max(row["selected"], row["kept"]), row["ranks"])
            assert 0 < row["bytes_max"] <= row["bound_bytes"]
        if row["reduction_s"] is not None:
            parts = row["selection_s"] + row["communication_s"] + row["reduction_s"]
            assert parts == pytest.approx(row["time_s"])
    assert all(row["reduction_s"] is not None for row in recorded if row["call"] == 2)
    fill_in = {row["scheme"]: row["fill_in"] for row in recorded if row["ranks"] == 8 and row["call"] == 0}
    assert fill_in["topka"] == fill_in["topkdsa"] > 1.5
    assert fill_in["oktopk"] == 1.0
    patterns = [row for row in found.rows if row["gradients"] != RECORDED]
    assert {row["scheme"] for row in patterns} == {"oktopk", "oktopk-published"}
    broken = {row["gradients"] for row in patterns if row["scheme"] == "oktopk-published" and row["of_bound"] > 1}
    assert broken == {"gone-stale", "disjoint"}


def test_many_ranks_have_fewer_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated, "_FEW_RANKS", 4)
    monkeypatch.setattr(simulated, "_MOST_RANKS", {"oktopk-published": 4})
    found = simulate_all(PLAN, (), recording(), Path("none"), processes=1)
    calls: dict[tuple[object, object], list[object]] = {}
    for row in found.rows:
        if row["gradients"] == RECORDED:
            calls.setdefault((row["scheme"], row["ranks"]), []).append(row["call"])
    assert calls["oktopk", 2] == calls["topka", 2] == [0, 1, 2]
    assert calls["oktopk", 8] == [0, 1]
    assert calls["topka", 8] == [1]
    assert ("oktopk-published", 8) not in calls


def test_processes_change_no_result(tmp_path: Path) -> None:
    file = tmp_path / "gradients.npz"
    recorded = recording()
    recorded.save(file)
    plan = SimulatedPlan((2, 4), 0.02, 2, ("topka", "oktopk"), ())
    said: list[str] = []
    apart = simulate_all(plan, (), recorded, file, processes=2, on_done=said.append)
    assert apart == simulate_all(plan, (), recorded, file, processes=1)
    assert sorted(said) == sorted(task.about for task in plan.parts())


def test_less_than_one_process_is_refused() -> None:
    with pytest.raises(ValueError, match="processes=0 must be at least 1"):
        simulate_all(PLAN, (), recording(), Path("none"), processes=0)


def test_a_process_that_fails_ends_the_simulation(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="process"):
        simulate_all(PLAN, (), recording(), tmp_path / "missing.npz", processes=2)


def test_a_larger_model_takes_as_many_times_longer() -> None:
    part = Part(RECORDED, ("topka",), (4,))
    rows = [
        simulate(SimulatedPlan((4,), 0.02, 1, ("topka",), (), scaled(ARIES, 0), factor), part, recording())[0]
        for factor in (1.0, 100.0)
    ]
    assert rows[0]["words_max"] == rows[1]["words_max"]
    assert rows[1]["selection_s"] == pytest.approx(100 * rows[0]["selection_s"])
    costs = scaled(ARIES, 100).costs
    assert (costs.alpha_s, costs.beta_s_per_byte, costs.gamma_s_per_byte) == pytest.approx((1.5e-6, 1e-8, 1e-8))
    assert selection_seconds(1000, None) == 0
    assert selection_seconds(1000, "gaussian") == 2 * selection_seconds(1000, "reused") > 0


def test_weak_scaling() -> None:
    model = Model("small", 500_000, 0.02, 4, 4.65e9)
    rows = weak_scaling(model, (4, 8), ("dense", "topka", "oktopk", "oktopk-published"), recording())
    assert [(row["ranks"], row["scheme"]) for row in rows] == [
        (ranks, name) for ranks in (4, 8) for name in ("dense", "dense-overlapped", "topka", "oktopk")
    ]
    by = {(row["ranks"], row["scheme"]): row for row in rows}
    for row in rows:
        assert row["compute_s"] == pytest.approx(1e-3)
        if row["scheme"] != "dense-overlapped":
            parts = row["compute_s"] + row["selection_s"] + row["time_s"]
            assert row["iteration_s"] == pytest.approx(parts)
        assert row["n"] == 500_000
    assert by[8, "topka"]["factor"] == pytest.approx(500_000 / 3520 / 2)  # two of them side by side
    assert by[8, "topka"]["time_s"] > 1.5 * by[4, "topka"]["time_s"]


def test_buckets_hide_behind_the_backward_pass() -> None:
    long = Model("long", 25_000_000, 0.01, 1, 4.65e12)  # four buckets, a second of computation
    dense, overlapped = weak_scaling(long, (4,), ("dense",), recording())
    assert dense["iteration_s"] == pytest.approx(1 + dense["time_s"])
    assert 1 < overlapped["iteration_s"] < 1 + 0.3 * dense["time_s"]


def test_tasks_begin_with_the_longest() -> None:
    tasks = tasks_of(PLAN, (16,))
    assert [getattr(task, "name", None) for task in tasks[:3]] == ["BERT", "LSTM", "VGG-16"]
    ranks = [max(task.ranks) for task in tasks[3:] if isinstance(task, Part)]
    assert ranks == sorted(ranks, reverse=True)
