"""The figures of the page of algorithms: they hold what the pages say of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lab import algorithms
from lab.common.experiments import app


def test_balanced_slices_help_where_entries_crowd_and_cost_little_elsewhere() -> None:
    crowded, clustered, uniform = algorithms.slices(dimension=1 << 18, entries=4096)
    assert crowded["balanced_ms"] < 0.5 * crowded["equal_ms"]
    assert clustered["balanced_ms"] < clustered["equal_ms"]
    assert uniform["equal_ms"] < uniform["balanced_ms"] < 2 * uniform["equal_ms"]


def test_a_top_k_sum_moves_what_its_algorithm_says() -> None:
    rows = {(row["sum"], row["ranks"]): row for row in algorithms.topk([4, 8], dimension=1 << 17)}
    k = round(0.01 * (1 << 17))
    # gTopk: k indices and values in each of its log2 P rounds, and a header a message.
    for ranks, rounds in ((4, 2), (8, 3)):
        assert 2 * rounds <= rows["gTopk", ranks]["bytes_over_4k"] <= 2 * rounds + rounds * 64 / (4 * k)
        assert rows["gTopk", ranks]["kept_over_k"] == 1
    assert rows["Ok-Topk", 8]["bytes_over_4k"] < 6 < rows["split_allgather", 8]["bytes_over_4k"]


def test_exponents_have_their_entropy() -> None:
    rows = {row["values"]: row for row in algorithms.values(1 << 16)}
    assert all(row["f32_bits"] - row["bf16_bits"] == pytest.approx(16) for row in rows.values())
    assert rows["its largest 1.5 %"]["f32_bits"] < rows["Student's t"]["f32_bits"] < 32


def test_averages_by_doubling_are_nearer_than_round_a_ring() -> None:
    rows = list(algorithms.averages(count=512))
    for ring, doubling in zip(rows[::2], rows[1::2], strict=True):
        assert doubling["root_mean_square"] < ring["root_mean_square"] < 2


def test_the_command_prints_and_writes_all_sections(tmp_path: Path) -> None:
    done = CliRunner().invoke(
        app(["algorithms"]), ["algorithms", "--ranks", "4", "--json", str(tmp_path / "rows.json")]
    )
    assert done.exit_code == 0, done.output
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert {row["section"] for row in rows} == {"slices", "topk", "values", "averages"}
    assert "balanced ms" in done.output
