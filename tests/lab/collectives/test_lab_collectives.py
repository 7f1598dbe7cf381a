"""``python -m lab collectives``: any collective in virtual time, why it took so long, and what options refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lab.common.experiments import app
from lab.topk.schemes import most_words


def simulate(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app(["collectives"]), ["collectives", *arguments], env={"COLUMNS": "200", "TERM": "dumb"})
    return done.exit_code, done.output


def rows_of(file: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(file.read_text())["rows"]
    return found


@pytest.mark.parametrize(
    ("operation", "option", "value", "message"),
    [
        ("allreduce-topk", "--density", "0", "0 is no share: use a number above 0 and up to 1"),
        ("allreduce-topk", "--calls", "0", "'--calls'"),
        ("sparse-allgather", "--overlap", "1.5", "1.5 is no share: use a number from 0 to 1"),
        ("sparse-reduce-scatter", "--wire", "zip", "wire='zip' does not exist for sparse vectors"),
        ("magic", "--ranks", "4", "OPERATION: 'magic' does not exist: use allreduce, sparse-allreduce, allgather,"),
        ("allgather", "--bytes", "4..x", "write it like 4, 64KiB or 16MiB"),
        ("barrier", "--jitter", "-1", "jitter=-1.0 must be a finite number, 0 or more"),
        ("allreduce", "--timeline", "trace.json", "these are 3: give one --ranks, one --bytes, one --algorithm"),
        ("broadcast", "--links", "/nowhere/links.json", "the folder /nowhere does not exist"),
        ("sparse-allgather", "--wire", "bf16", "'bf16' rounds values, and results could not be checked"),
    ],
)
def test_bad_options_name_option_value_and_remedy(operation: str, option: str, value: str, message: str) -> None:
    status, output = simulate(operation, option, value)
    said = " ".join(output.replace("│", " ").split())
    assert status == 2
    assert option in said or operation == "magic"
    assert message in said


def test_words_of_a_sum_of_which_a_part_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    common = ("allreduce-topk", "--ranks", "2..8", "--bytes", "64KiB", "--json", str(file))
    status, output = simulate(*common, "--calls", "3")
    assert status == 0, output
    for row in rows_of(file):
        assert row["calls"] == 3
        assert row["payloads"]
        assert abs(row["result_nnz"] - row["keep"]) <= row["keep"] / 4
        assert 0 < row["words"] <= row["words_most"] == most_words(max(row["nnz"], row["result_nnz"]), row["ranks"])
    assert "at most" in output
    assert "virtual time of all 3 calls" in output
    assert "entries of the sum, words: of the last call" in output
    status, output = simulate(*common, "--keep", "20")
    assert status == 0, output
    assert "call" not in output
    assert {row["result_nnz"] for row in rows_of(file)} == {20}


@pytest.mark.parametrize("operation", ["sparse-allgather", "sparse-reduce-scatter"])
def test_streams_as_they_are(tmp_path: Path, operation: str) -> None:
    file = tmp_path / "rows.json"
    status, output = simulate(operation, "--ranks", "4", "--bytes", "64KiB", "--wire", "raw", "--json", str(file))
    assert status == 0, output
    (row,) = rows_of(file)
    gathers = operation == "sparse-allgather"
    assert row["result_nnz"] == 4 * row["nnz"] if gathers else 0.9 < row["result_nnz"] / row["nnz"] < 1.1


def test_timeline_critical_path_and_links_of_a_single_point(tmp_path: Path) -> None:
    trace, links = tmp_path / "trace.json", tmp_path / "links.json"
    arguments = ("allreduce", "--ranks", "4", "--bytes", "64KiB", "--algorithm", "ring", "--critical-path")
    status, output = simulate(*arguments, "--timeline", str(trace), "--links", str(links))
    assert status == 0, output
    assert "ui.perfetto.dev" in output
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["pid"] for event in events if event["ph"] == "X"} == {0, 1, 2, 3, 4}
    counts = json.loads(links.read_text())
    assert [(link["from"], link["to"]) for link in counts["links"]] == [(0, 1), (1, 2), (2, 3), (3, 0)]
    assert {rank["messages_sent"] for rank in counts["ranks"]} == {6}
    assert "critical path" in output
    assert "port in" in output


def test_critical_paths_of_many_points_are_shares() -> None:
    status, output = simulate("broadcast", "--ranks", "2..8", "--bytes", "4", "--critical-path")
    assert status == 0, output
    assert "where the time went" in output
    assert output.count("100%") == 3  # short messages are latency alone


def test_a_timeline_of_too_many_messages_is_refused_at_once() -> None:
    status, output = simulate("allreduce", "--ranks", "2048", "--algorithm", "ring", "--timeline", "trace.json")
    assert status == 2
    assert "8,384,512 messages are too many for it: use fewer ranks" in " ".join(output.replace("│", " ").split())


@pytest.mark.parametrize(
    "operation", ["allgather", "gather", "scatter", "all-to-all", "broadcast", "reduce", "reduce-scatter", "barrier"]
)
def test_every_collective_has_a_closed_form(operation: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    status, output = simulate(operation, "--ranks", "5", "--bytes", "64KiB", "--json", str(file))
    assert status == 0, output
    (row,) = rows_of(file)
    assert (row["operation"], row["ranks"]) == (operation.replace("-", "_"), 5)
    assert row["time_s"] == pytest.approx(row["closed_form_s"], rel=0.01)


@pytest.mark.parametrize("option", ["--links", "--timeline"])
def test_a_file_that_cannot_be_written_after_all_is_said(option: str) -> None:
    status, output = simulate("broadcast", "--ranks", "3", "--bytes", "4", option, "/dev/full")
    assert status == 1
    assert "cannot write /dev/full: No space left on device" in output
    assert "the simulation failed" not in output
