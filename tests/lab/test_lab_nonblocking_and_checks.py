"""``python -m lab nonblocking`` and ``checks``: short runs with real ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lab.common.experiments import app
from telegrad import _core

_needs_ucx = pytest.mark.skipif(not hasattr(_core.Communicator, "ucx"), reason="built without UCX")


@_needs_ucx
def test_non_blocking_sums_beside_blocking_ones(tmp_path: Path) -> None:
    found = tmp_path / "rows.json"
    options = ["--ranks", "2", "--sizes", "4,1KiB", "--samples", "3", "--timeout", "90", "--json", str(found)]
    done = CliRunner().invoke(app(["nonblocking"]), ["nonblocking", *options], env={"COLUMNS": "80"})
    assert done.exit_code == 0, done.output
    assert "…" not in done.output, "in a file every cell is whole"
    rows = json.loads(found.read_text())["rows"]
    assert [(row["op"], row["network"], row["ranks"], row["bytes"], row["wrong"]) for row in rows] == [
        ("nonblocking", "shm", 2, size, 0) for size in (4, 1024)
    ]
    for row in rows:
        for way in ("nonblocking", "computing"):
            assert row[f"{way}_ratio"] == pytest.approx(row[f"{way}_median_s"] / row["blocking_median_s"])


@_needs_ucx
def test_sums_with_the_watch_over_peers_and_without(tmp_path: Path) -> None:
    found = tmp_path / "rows.json"
    options = ["--ranks", "2", "--network", "shm", "--sizes", "1KiB", "--pairs", "2", "--seconds", "0.05"]
    done = CliRunner().invoke(app(["checks"]), ["checks", *options, "--json", str(found)], env={"COLUMNS": "120"})
    assert done.exit_code == 0, done.output
    (row,) = json.loads(found.read_text())["rows"]
    assert (row["op"], row["network"], row["ranks"], row["bytes"], row["pairs"]) == ("checks", "shm", 2, 1024, 2)
    assert row["wrong"] == 0
    assert 0 < row["least_ratio"] <= row["ratio"] <= row["most_ratio"]
