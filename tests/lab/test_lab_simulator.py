"""The benchmark of the simulator: small cases, whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner

from lab import simulator
from lab.common.experiments import app
from lab.simulator import CASES, Case, run_cases


def test_a_case_says_what_it_took() -> None:
    seen: list[object] = []
    (row,) = run_cases([Case("allreduce", "ring", 8, 800, payloads=True)], on_row=lambda row: seen.append(row["ranks"]))
    assert seen == [8]
    assert row["messages"] == 8 * 14
    assert int(str(row["events"])) >= 8 * 14
    assert float(str(row["time_s"])) > 0
    assert float(str(row["events_per_s"])) > 0
    assert int(str(row["peak_bytes"])) > 1 << 20


def test_every_collective_is_among_the_cases_at_4096_ranks() -> None:
    largest = {(case.operation, case.algorithm, case.payloads) for case in CASES if case.ranks == 4096}
    for operation, algorithm in (
        ("allreduce", "ring"),
        ("allreduce", "recursive_doubling"),
        ("sparse_allreduce", "split_allgather"),
        ("allgather", ""),
        ("broadcast", ""),
    ):
        assert {(operation, algorithm, True), (operation, algorithm, False)} <= largest


def test_the_command_prints_and_writes_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lab.simulator.CASES", (Case("barrier", "", 4, 0), CASES[0]))
    done = CliRunner().invoke(
        app(["simulator"]), ["simulator", "--most-ranks", "4", "--json", str(tmp_path / "rows.json")]
    )
    assert done.exit_code == 0, done.output
    (row,) = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert (row["operation"], row["ranks"]) == ("barrier", 4)


def test_too_few_ranks_are_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lab.simulator.CASES", simulator.CASES[:1])
    done = CliRunner().invoke(app(["simulator"]), ["simulator", "--most-ranks", "2"])
    assert done.exit_code == 2
    assert "give at least 1024" in " ".join(done.output.split())
