"""``telegrad bench allreduce`` and ``nonblocking`` with two real ranks, and what it says to bad options."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from telegrad import _core
from telegrad.launch import LaunchError
from telegrad.tools.bench.allreduce import AllreduceOutcome
from telegrad.tools.bench.plan import ALGORITHMS, AllreducePlan, Measured, Timing
from telegrad.tools.cli import bench
from telegrad.tools.cli.bench import app

pytestmark = pytest.mark.ranks("torch")

_needs_ucx = pytest.mark.skipif(not hasattr(_core.Communicator, "ucx"), reason="built without UCX")
_DENSE = tuple(name for name in ALGORITHMS if name != "two_level")  # of nodes only
_SHM = ("--network", "shm")


def _why_without_mpich() -> str | None:
    """mpi4py finds its MPI in the environment of the interpreter; a process of its own asks without starting it."""
    ask = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=False, timeout=60)
    if done.returncode == 0 and done.stdout.startswith("MPICH"):
        return None
    return f"mpi4py finds no MPICH here: {(done.stdout + done.stderr).strip().splitlines()[-1]}"


def _bench(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["allreduce", *arguments], env={"COLUMNS": "160"})
    return done.exit_code, done.output


@_needs_ucx
def test_two_ranks_beside_gloo_write_rows_and_a_plot(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed (pip install 'telegrad[torch]')")
    found, drawn = tmp_path / "rows.json", tmp_path / "plot.png"
    options = ["--ranks", "2", "--sizes", "4,64KiB", "--samples", "3", "--seconds", "0.05", "--timeout", "90"]
    status, output = _bench(*options, *_SHM, "--peers", "gloo", "--json", str(found), "--plot", str(drawn))
    assert status == 0, output
    result = json.loads(found.read_text())
    rows = result["rows"]
    assert [(row["algorithm"], row["bytes"]) for row in rows] == [
        (name, size) for size in (4, 65536) for name in _DENSE
    ]
    for row in rows:
        assert (row["op"], row["driver"], row["network"], row["ranks"], row["wrong"]) == (
            *("allreduce", "ucx", "shm", 2, 0),
        )
        assert 0 < row["min_s"] <= row["median_s"] <= row["p90_s"]
        assert row["wire_bytes"] == row["bound_bytes"] == row["bytes"]  # two ranks: each sends everything once
        assert row["ratio_to_gloo"] == pytest.approx(row["median_s"] / row["gloo_median_s"])
        assert row["bound_s"] is row["mpich_median_s"] is None
        assert row["mpich_missing"] == "not asked for"
    assert result["machine"]["cores"] >= 1
    assert drawn.read_bytes()[:4] == b"\x89PNG"
    assert "64 KiB" in output


@_needs_ucx
def test_mpich_runs_in_the_same_processes_over_shared_memory_and_tcp(tmp_path: Path) -> None:
    if why := _why_without_mpich():
        pytest.skip(why)
    found = tmp_path / "rows.json"
    status, output = _bench(
        *("--ranks", "2", "--network", "shm,tcp", "--peers", "mpich", "--algorithms", "auto", "--sizes", "4,64KiB"),
        *("--samples", "3", "--seconds", "0.05", "--timeout", "90", "--json", str(found)),
    )
    assert status == 0, output
    rows = json.loads(found.read_text())["rows"]
    assert [(row["network"], row["bytes"]) for row in rows] == [(n, s) for n in ("shm", "tcp") for s in (4, 65536)]
    for row in rows:
        assert row["mpich_median_s"] > 0
        assert (row["mpich_wrong"], row["mpich_missing"], row["gloo_missing"]) == (0, None, "not asked for")
    assert "MPICH" in output


@_needs_ucx
def test_a_peer_that_does_not_start_is_left_out_and_told_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = tmp_path / "mpi4py.py"
    stand_in.write_text("raise RuntimeError('cannot load MPI library')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = tmp_path / "rows.json"
    status, output = _bench(
        *("--ranks", "2", *_SHM, "--peers", "mpich", "--algorithms", "auto", "--sizes", "4"),
        *("--samples", "3", "--seconds", "0.05", "--json", str(found)),
    )
    assert status == 0, output
    (row,) = json.loads(found.read_text())["rows"]
    assert row["mpich_median_s"] is None
    assert "RuntimeError: cannot load MPI library" in row["mpich_missing"]
    assert "Without MPICH: rank" in output


@_needs_ucx
def test_without_a_peer_and_over_tcp() -> None:
    status, output = _bench(
        *("--ranks", "2", "--network", "tcp", "--peers", "none", "--sizes", "4", "--samples", "3", "--seconds", "0.05")
    )
    assert status == 0, output
    assert "all_reduce, 2 ranks, tcp" in output


@_needs_ucx
def test_a_run_that_takes_too_long_is_ended_and_told() -> None:
    status, output = _bench("--ranks", "2", *_SHM, "--sizes", "64MiB", "--seconds", "60", "--timeout", "1")
    assert status == 1
    assert "were not done within 1 s: allow more by timeout_s, or by --timeout" in " ".join(output.split())


def test_a_network_that_fails_costs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(plan: AllreducePlan, **_: object) -> AllreduceOutcome:
        if plan.network == "shm":
            raise LaunchError("rank 1 is gone")
        return AllreduceOutcome([Measured("auto", 4, Timing(1e-3, 1e-3, 1e-3), 4.0, 0, "ucx", 3, chosen="ring")])

    monkeypatch.setattr(bench, "run", run)
    found = tmp_path / "rows.json"
    status, output = _bench("--network", "shm,tcp", "--peers", "none", "--sizes", "4", "--json", str(found))
    assert status == 1
    assert "shm: rank 1 is gone" in output
    result = json.loads(found.read_text())
    assert [row["network"] for row in result["rows"]] == ["tcp"]
    assert result["failed"] == [{"network": "shm", "error": "rank 1 is gone"}]


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--network", "wifi", "use shm, tcp, or a rate"),
        ("--sizes", "6", "use a multiple of 4 bytes"),
        ("--sizes", "1000000GiB", "4 ranks with vectors of 1e+06 GiB need 8e+06 GiB of memory, of which"),
        ("--algorithms", "magic", f"use {', '.join(ALGORITHMS)}"),
        ("--peers", "nccl", "use gloo, mpich, openmpi, impi, oneccl or none"),
        ("--json", "/nowhere/rows.json", "the folder /nowhere does not exist"),
        ("--json", "/proc/rows.json", "cannot write /proc/rows.json"),
        ("--plot", "rows.txt", ".txt is no format of pictures"),
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
    for option in ("--ranks", "--network", "--sizes", "--algorithms", "--peers", "--json", "--plot", "--timeout"):
        assert option in output
