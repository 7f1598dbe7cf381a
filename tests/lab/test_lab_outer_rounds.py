"""``python -m lab outer-rounds``: bytes of each kind of round, by the counters of interfaces."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from lab import outer_rounds
from telegrad.tools.bench.netlab import why_unavailable

_app = typer.Typer()
_app.command()(outer_rounds.command)


@pytest.mark.skipif(why_unavailable() is not None, reason="needs root, ip and tc")
def test_rounds_of_each_kind_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    options = ["--replicas", "2", "--rounds", "2", "--width", "112", "--network", "1gbit", "--json", str(file)]
    assert CliRunner().invoke(_app, options).exit_code == 0
    dense, sparse, oktopk = json.loads(file.read_text())["rows"]
    assert [one["kind"] for one in (dense, sparse, oktopk)] == ["dense", "sparse", "oktopk"]
    assert 1.6e6 < dense["bytes"] < 1.9e6  # 4 bytes of each of 0.42 million parameters
    assert all(100 < dense["bytes"] / one["bytes"] < 220 for one in (sparse, oktopk))
    assert all(0 < one["least_s"] <= one["s"] for one in (dense, sparse, oktopk))


@pytest.mark.skipif(why_unavailable() is not None, reason="needs root, ip and tc")
@pytest.mark.skipif(importlib.util.find_spec("torchft") is not None, reason="torchft is installed")
def test_torchft_is_named_where_it_is_missing() -> None:
    done = CliRunner().invoke(_app, ["--kinds", "dense,torchft"], env={"COLUMNS": "300"})
    assert done.exit_code == 2
    assert "torchft is not installed: pip install torchft" in done.output


def test_kinds_are_checked() -> None:
    done = CliRunner().invoke(_app, ["--kinds", "ring"], env={"COLUMNS": "300"})
    assert done.exit_code == 2
    assert "--kinds" in done.output
