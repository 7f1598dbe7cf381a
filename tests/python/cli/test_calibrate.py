"""``telegrad calibrate``: one small job on shared memory, and what it shows of a job that is made up."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from telegrad.bench.netlab import NetlabError
from telegrad.cli import calibrate as command
from telegrad.cli import make_app
from telegrad.plan import ALLREDUCE_ALGORITHMS, Choice, Costs, DecisionTable, Place, Tuning

_TUNING = Tuning(
    Place("ucx", (("here", 4),)),
    Costs(20e-6, 8e-9, 9e-9, 1e-10),
    DecisionTable(4, (Choice(0, "recursive_doubling"), Choice(60_000, "ring"))),
    "2026-11-21T12:00:00+00:00",
    "0.1.0",
    0.05,
)


def _run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(make_app(), ["calibrate", *arguments], env={"COLUMNS": "200"})
    return done.exit_code, " ".join(done.output.split())


def _found() -> dict[str, Any]:
    def row(size: int, algorithm: str, median_s: float, ratio: float) -> dict[str, Any]:
        chosen = _TUNING.allreduce.algorithm(size) == algorithm
        return {
            "bytes": size,
            "algorithm": algorithm,
            "median_s": median_s,
            "samples": 9,
            "chosen": chosen,
            "ratio_to_best": ratio,
        }

    return {
        "tuning": json.loads(_TUNING.to_json()),
        "probes": [
            {"kind": kind, "bytes": size, "median_s": 1e-5 + size * 8e-9}
            for kind in ("one_way", "exchange")
            for size in (1 << 15, 1 << 20)
        ],
        "message_s": 1e-5,
        "round_s": 2e-5,
        "rows": [
            row(1024, "recursive_doubling", 4e-5, 1.0),
            row(1024, "ring", 1.2e-4, 3.0),
            row(1 << 20, "ring", 1.3e-2, 1.0),
        ],
        "doubts": [],
    }


def test_a_small_job_on_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TELEGRAD_CACHE", str(tmp_path / "cache"))
    for name in ("UCX_TLS", "UCX_NET_DEVICES", "TELEGRAD_NETWORK"):
        monkeypatch.delenv(name, raising=False)
    written, drawn = tmp_path / "found.json", tmp_path / "plot.png"
    status, output = _run("--ranks", "2", "--seconds", "0.1", "--json", str(written), "--plot", str(drawn))
    assert status == 0, output
    found = json.loads(written.read_text())
    tuning = Tuning.from_data(found["tuning"])
    assert tuning.ranks == 2
    assert {row["algorithm"] for row in found["rows"]} <= set(ALLREDUCE_ALGORITHMS)
    assert found["machine"]["cores"] >= 1
    assert drawn.read_bytes()[:4] == b"\x89PNG"
    kept = list((tmp_path / "cache").iterdir())
    assert [Tuning.from_json(path.read_text()) for path in kept] == [tuning]
    assert f"kept for later jobs: {kept[0]}" in output


def test_what_is_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(command, "_run_with_progress", lambda *_: {"found": _found(), "kept": "/cache/file.json"})
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    status, output = _run("--network", "1gbit", "--plot", str(tmp_path / "plot.png"))
    assert status == 0, output
    assert "│ 1 KiB │ 40.0 µs │ 120.0 µs │ 1.00 │" in output
    assert "│ 1 MiB │ – │ 13.00 ms │ 1.00 │" in output
    assert "α 20.0 µs (an empty round: 20.0 µs), β 8 ns/B (1 Gbit/s), β in exchange 9 ns/B, γ 0.1 ns/B" in output
    assert "messages are 5 % off these (median)" in output
    assert "from 60,000 bytes ring" in output
    assert "kept for later jobs: /cache/file.json" in output
    assert "busy" not in output


def test_what_is_not_kept_is_an_error_but_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_run_with_progress", lambda *_: {"found": _found(), "not_kept": "disk full"})
    status, output = _run()
    assert status == 1
    assert "not kept for later jobs: disk full" in output
    assert "from 60,000 bytes ring" in output


def test_a_busy_machine_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_run_with_progress", lambda *_: {"found": _found(), "kept": "/cache/file.json"})
    monkeypatch.setattr(os, "getloadavg", lambda: (1e6, 0.0, 0.0))
    status, output = _run()
    assert status == 0
    assert "This machine is busy (load 1000000.0 on" in output
    assert "calibrate again when it is quiet" in output


def test_a_table_that_may_be_noise_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {**_found(), "doubts": ["the table has 11 steps"]}
    monkeypatch.setattr(command, "_run_with_progress", lambda *_: {"found": found, "kept": "/cache/file.json"})
    status, output = _run()
    assert status == 0
    assert "This may be noise: the table has 11 steps. Calibrate again" in output


def test_a_network_that_cannot_be_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object) -> None:
        raise NetlabError("network namespaces need root: run the command as root (sudo)")

    monkeypatch.setattr(command, "_run_with_progress", run)
    status, output = _run("--network", "1gbit")
    assert status == 1
    assert "1gbit: network namespaces need root" in output


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--network", "wifi", "use shm, tcp, or a rate"),
        ("--ranks", "1", "'--ranks'"),
        ("--seconds", "0", "'--seconds'"),
        ("--json", "/nowhere/found.json", "the folder /nowhere does not exist"),
        ("--plot", "/nowhere/plot.png", "the folder /nowhere does not exist"),
    ],
)
def test_bad_options_name_the_remedy(option: str, value: str, message: str) -> None:
    status, output = _run(option, value)
    assert status == 2
    assert message in output


def test_help_explains_every_option() -> None:
    status, output = _run("--help")
    assert status == 0
    for option in ("--ranks", "--network", "--seconds", "--json", "--plot", "--timeout"):
        assert option in output
