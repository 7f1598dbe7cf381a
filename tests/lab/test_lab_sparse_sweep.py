"""``python -m lab sparse-sweep``: what it simulates, prints, writes and draws."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lab.common.experiments import app
from lab.sparse_sweep import worst_choice

NAMES = ("split_allgather", "split_dense_allgather", "recursive_doubling", "ring", "auto", "dense")


def sweep(*arguments: str, columns: int = 80) -> tuple[int, str]:
    done = CliRunner().invoke(
        app(["sparse-sweep"]), ["sparse-sweep", *arguments], env={"COLUMNS": str(columns), "TERM": "dumb"}
    )
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


def rows_of(path: Path) -> list[dict[str, Any]]:
    return list(json.loads(path.read_text())["rows"])


def test_ranks_and_densities_in_one_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file, drawn = tmp_path / "rows.json", tmp_path / "drawn.svg"
    status, output = sweep(
        *("--bytes", "4MiB", "--ranks", "2..8", "--density", "0.0001..0.01", "--at-density", "0.002"),
        *("--at-ranks", "4,8", "--json", str(file), "--plot-file", str(drawn)),
    )
    assert status == 0, output
    rows = rows_of(file)
    shares = [0.0001, 0.0004, 0.0016, 0.0064, 0.01]
    assert {(row["ranks"], row["density"], row["name"]) for row in rows} == {
        *((ranks, 0.002, name) for ranks in (2, 4, 8) for name in NAMES),
        *((ranks, share, name) for ranks in (4, 8) for share in shares for name in NAMES),
    }
    assert len(rows) == 3 * 6 + 2 * 5 * 6  # each once
    for row in rows:
        assert row["time_s"] > 0
        if row["name"] == "dense":
            assert row["operation"] == "allreduce"
        else:
            assert (row["wire"], row["nnz"]) == ("packed-f32", round(row["density"] * (1 << 20)))
    sparse, dense = (
        next(row["time_s"] for row in rows if (row["ranks"], row["density"], row["name"]) == (8, 0.0001, name))
        for name in ("recursive_doubling", "dense")
    )
    assert sparse < dense
    assert "4 MiB, packed-f32, density 0.002: virtual time" in output
    assert "4 MiB, packed-f32, 4 ranks: virtual time" in output
    assert "auto takes at most" in output
    assert "…" not in output  # 80 columns are enough
    picture = drawn.read_text()
    for label in ("density 0.002", "4 ranks", "8 ranks"):
        assert f"<!-- {label} -->" in picture
    assert len(re.findall(r"<!-- (?:[\w,\s]*,\s)?recursive_doubling[\w,\s]* -->", picture)) == 3


def test_names_and_formats(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    common = ("--bytes", "64KiB", "--ranks", "4", "--density", "0.1", "--at-ranks", "4", "--json", str(file))
    status, output = sweep(*common, "--algorithm", "all,dense_ring", "--wire", "packed-qsgd4", "--payloads")
    assert status == 0, output
    assert {row["name"] for row in rows_of(file)} == {*NAMES, "dense_ring"} - {"recursive_doubling"}
    assert {row["chosen"] for row in rows_of(file) if row["name"] == "dense_ring"} == {"ring"}
    assert sweep(*common, "--algorithm", "ring", "--overlap", "1")[0] == 0
    assert {(row["name"], row["result_nnz"]) for row in rows_of(file)} == {("ring", 128), ("ring", 1638)}


def test_on_nodes_two_levels_are_among_them(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    common = ("--bytes", "1MiB", "--ranks", "2..64", "--density", "0.01", "--at-ranks", "16", "--json", str(file))
    status, output = sweep(*common, "--ranks-per-node", "4", "--oversubscription", "4", columns=120)
    assert status == 0, output
    time_s = {(row["ranks"], row["density"], row["name"]): row["time_s"] for row in rows_of(file)}
    assert {name for _, _, name in time_s} == {*NAMES, "two_level"}
    for ranks in (2, 4, 8, 16, 32, 64):
        of = {name: time_s[ranks, 0.0078125, name] for name in (*NAMES, "two_level")}
        assert of["auto"] <= 1.05 * min(of.values())
        assert (of["two_level"] == of["auto"]) or ranks > 4  # which are all on one node
    assert of["two_level"] < 0.8 * of["split_allgather"]
    status, output = sweep(*common, "--algorithm", "two_level")
    assert status == 2
    assert "(two_level: with --ranks-per-node)" in " ".join(output.replace("│", " ").split())


def test_where_the_automatic_choice_is_worst() -> None:
    def row(name: str, ranks: int, time_s: float) -> dict[str, Any]:
        return {"name": name, "ranks": ranks, "bytes": 4, "density": 0.5, "time_s": time_s}

    rows = [row("auto", 2, 1.0), row("ring", 2, 1.0), row("auto", 4, 3.0), row("ring", 4, 2.5), row("dense", 4, 2.0)]
    assert worst_choice(rows) == (1.5, rows[2], "dense")
    assert worst_choice([row("auto", 2, 1.0)]) is None
    assert worst_choice([row("ring", 2, 1.0), row("dense", 2, 1.0)]) is None


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--density", "0", "'0' is no part of 1: use a number above 0, up to 1"),
        ("--density", "0.5..0.1", "range '0.5..0.1' ends before it begins"),
        ("--at-density", "x", "'x' is no part of 1"),
        ("--at-ranks", "0", "0 ranks cannot be simulated"),
        ("--bytes", "4,64KiB", "are 2 sizes: give one"),
        ("--algorithm", "magic", "'magic' does not exist: use split_allgather, split_dense_allgather"),
        ("--wire", "zip", "wire='zip' does not exist"),
    ],
)
def test_bad_options_name_option_value_and_remedy(option: str, value: str, message: str) -> None:
    status, output = sweep(option, value)
    said = " ".join(output.replace("│", " ").split())
    assert status == 2
    assert option in said
    assert message in said
