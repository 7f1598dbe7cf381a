"""``telegrad bench allreduce`` with two real ranks, and what it says to bad options."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from telegrad import _core
from telegrad.cli.bench import app

_needs_ucx = pytest.mark.skipif(not hasattr(_core.Communicator, "ucx"), reason="built without UCX")


def _bench(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["allreduce", *arguments], env={"COLUMNS": "160"})
    return done.exit_code, done.output


@_needs_ucx
def test_two_ranks_beside_gloo_write_rows_and_a_plot(tmp_path: Path) -> None:
    found, drawn = tmp_path / "rows.json", tmp_path / "plot.png"
    options = ["--ranks", "2", "--sizes", "4,64KiB", "--samples", "3", "--seconds", "0.05", "--timeout", "90"]
    status, output = _bench(*options, "--json", str(found), "--plot", str(drawn))
    assert status == 0, output
    result = json.loads(found.read_text())
    rows = result["rows"]
    assert [(row["algorithm"], row["bytes"]) for row in rows] == [
        (name, size) for size in (4, 65536) for name in ("ring", "recursive_doubling", "rabenseifner", "auto")
    ]
    for row in rows:
        assert (row["op"], row["driver"], row["network"], row["ranks"], row["wrong"]) == (
            *("allreduce", "ucx", "shm", 2, 0),
        )
        assert 0 < row["min_s"] <= row["median_s"] <= row["p90_s"]
        assert row["wire_bytes"] == row["bound_bytes"] == row["bytes"]  # two ranks: each sends everything once
        assert row["ratio_to_gloo"] == pytest.approx(row["median_s"] / row["gloo_median_s"])
    assert result["machine"]["cores"] >= 1
    assert drawn.read_bytes()[:4] == b"\x89PNG"
    assert "64 KiB" in output


@_needs_ucx
def test_without_a_peer_and_over_tcp() -> None:
    status, output = _bench(
        *("--ranks", "2", "--network", "tcp", "--peer", "none", "--sizes", "4", "--samples", "3", "--seconds", "0.05")
    )
    assert status == 0, output
    assert "all_reduce, 2 ranks, tcp" in output


@_needs_ucx
def test_a_run_that_takes_too_long_is_ended_and_told() -> None:
    status, output = _bench("--ranks", "2", "--sizes", "64MiB", "--seconds", "60", "--timeout", "1")
    assert status == 1
    assert "were not done within timeout_s=1 s" in output


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--network", "wifi", "use shm, tcp, or a rate"),
        ("--sizes", "6", "use a multiple of 4 bytes"),
        ("--algorithms", "magic", "use ring, recursive_doubling, rabenseifner, auto"),
        ("--peer", "nccl", "use gloo or none"),
        ("--json", "/nowhere/rows.json", "the folder /nowhere does not exist"),
        ("--ranks", "0", "'--ranks'"),
    ],
)
def test_bad_options_name_the_remedy(option: str, value: str, message: str) -> None:
    status, output = _bench(option, value)
    assert status == 2
    assert message in " ".join(output.split())


def test_help_explains_every_option() -> None:
    status, output = _bench("--help")
    assert status == 0
    for option in ("--ranks", "--network", "--sizes", "--algorithms", "--peer", "--json", "--plot", "--timeout"):
        assert option in output
