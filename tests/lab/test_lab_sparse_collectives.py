"""``python -m lab sparse-collectives``: sparse collectives in virtual time, and what their options refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lab.common.experiments import app
from lab.topk.schemes import most_words


def simulate(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(
        app(["sparse-collectives"]), ["sparse-collectives", *arguments], env={"COLUMNS": "200", "TERM": "dumb"}
    )
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
        ("sparse-allgather", "--wire", "bf16", "'bf16' rounds values, and results could not be checked"),
    ],
)
def test_bad_options_name_option_value_and_remedy(operation: str, option: str, value: str, message: str) -> None:
    status, output = simulate(operation, option, value)
    said = " ".join(output.replace("│", " ").split())
    assert status == 2
    assert option in said
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
