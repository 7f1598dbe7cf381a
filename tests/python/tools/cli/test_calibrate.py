"""``telegrad calibrate``: one small job on shared memory, and what it shows of a job that is made up."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from telegrad.cost import ALLREDUCE_ALGORITHMS, Costs, DecisionTable, DeviceTuning, Place, TableEntry, Tuning
from telegrad.cost.send_method import LinearCost
from telegrad.tools.bench.netlab import NetlabError
from telegrad.tools.bench.plan import text_of
from telegrad.tools.cli import calibrate as command
from telegrad.tools.cli import make_app
from telegrad.tools.report.figures import duration

_TUNING = Tuning(
    Place("ucx", (("here", 4),)),
    Costs(20e-6, 8e-9, 9e-9, 1e-10),
    DecisionTable(4, (TableEntry(0, "recursive_doubling"), TableEntry(60_000, "ring"))),
    "2026-11-21T12:00:00+00:00",
    "0.1.0",
    0.05,
)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TELEGRAD_CACHE", str(tmp_path / "cache"))


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
        "device_rows": [],
    }


def _with_devices() -> dict[str, Any]:
    measured = DeviceTuning("H200", LinearCost(2.0**-14, 2.0**-33), LinearCost(2.0**-15, 2.0**-31), 0.03)
    costs = {"nccl": measured.nccl, "host_transfer": measured.host_transfer}
    rows = [
        {
            "bytes": size,
            "algorithm": name,
            "median_s": 1.5e-4,
            "samples": 5,
            "fitted_s": cost(size),
            "chosen": measured.algorithm(size) == name,
        }
        for size in (1024, 1 << 20)
        for name, cost in costs.items()
        if cost is not None
    ]
    tuning = json.loads(replace(_TUNING, on_device=measured).to_json())
    return {**_found(), "tuning": tuning, "device_rows": rows}


def test_a_small_job_on_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_what_is_shown_of_devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []

    def run(*arguments: Any) -> dict[str, Any]:
        asked.append(arguments[4])
        return {"found": _with_devices(), "kept": "/cache/file.json"}

    monkeypatch.setattr(command, "_run_with_progress", run)
    monkeypatch.setattr(command, "described_gpu", lambda _: {})
    written, drawn = tmp_path / "found.json", tmp_path / "plot.png"
    status, output = _run("--device", "cuda", "--plot", str(drawn), "--json", str(written))
    assert status == 0, output
    assert asked == ["cuda"]
    assert "│ 1 KiB │ 150.0 µs │ 61.2 µs │ 150.0 µs │ 31.0 µs │" in output
    assert "nccl 61.0 µs + 0.116 ns/B, host_transfer 30.5 µs + 0.466 ns/B; sums are 3 % off these" in output
    assert "allreduce on H200 from 0 bytes host_transfer from 87,382 bytes nccl" in output
    assert len(json.loads(written.read_text())["device_rows"]) == 4
    assert drawn.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_measured() -> None:
    status, output = _run("--device", "cuda")
    assert status == 1
    assert "no GPU: torch sees none here" in output


def test_what_is_not_kept_is_an_error_but_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_run_with_progress", lambda *_: {"found": _found(), "not_kept": "disk full"})
    status, output = _run()
    assert status == 1
    assert "not kept for later jobs: disk full" in output
    assert "from 60,000 bytes ring" in output


def test_in_a_job_what_is_not_kept_is_no_failure_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    gloo = replace(_TUNING, gloo=LinearCost(1e-3, 2e-8))
    found = {**_found(), "tuning": json.loads(gloo.to_json())}
    monkeypatch.setattr(command, "_measure_in_job", lambda *_: {"found": found, "not_kept": "busy"})
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    status, output = _run()
    assert status == 0
    assert "not kept for later jobs: busy" in output
    longest = max(row["bytes"] for row in found["rows"] if row["chosen"])
    line, takes = "torch's Gloo: 1.00 ms + 20 ns/B", duration(1e-3 + longest * 2e-8)
    assert f"{line}, so {takes} for {text_of(longest)}; telegrad" in output
    assert gloo.gloo is not None
    assert command.gloo_text(gloo.gloo, [{"bytes": 256, "median_s": 1.0, "chosen": True}]) == line


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
        ("--device", "tpu", "Invalid value for --device: 'tpu' is not known: use cuda, or leave it out"),
        ("--ranks", "1", "'--ranks'"),
        ("--seconds", "0", "'--seconds'"),
        (
            "--seconds",
            "120",
            "--seconds: 120 s of measuring are not over before --timeout 120: give a longer --timeout",
        ),
        (
            "--seconds",
            "inf",
            "--seconds: inf s of measuring are not over before --timeout 120: give a longer --timeout",
        ),
        ("--timeout", "5", "--seconds: 7 s of measuring are not over before --timeout 5: give a longer --timeout"),
        ("--json", "/nowhere/found.json", "the folder /nowhere does not exist"),
        ("--plot", "/nowhere/plot.png", "the folder /nowhere does not exist"),
    ],
)
def test_bad_options_name_the_remedy(option: str, value: str, message: str) -> None:
    status, output = _run(option, value)
    assert status == 2
    assert message in output


def test_a_cache_that_cannot_be_written_is_found_before_the_measurement(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(command, "_run_with_progress", lambda *_: pytest.fail("it was measured"))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TELEGRAD_CACHE", str(tmp_path / "file"))
    status, output = _run()
    assert status == 2
    assert f"TELEGRAD_CACHE: tunings cannot be kept in {tmp_path / 'file'} (it is no folder): let" in output.replace(
        "│ ", ""
    )


def test_brackets_in_names_are_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    place = replace(_TUNING.place, interface="[red]eth0")
    found = {**_found(), "tuning": json.loads(replace(_TUNING, place=place).to_json())}
    monkeypatch.setattr(command, "_run_with_progress", lambda *_: {"found": found, "kept": "/[b]/file.json"})
    (tmp_path / "[b]").mkdir()
    monkeypatch.chdir(tmp_path)
    status, output = _run("--json", "[b]/found.json", "--plot", "[b]/plot.png")
    assert status == 0, output
    assert "times: [b]/found.json" in output
    assert "plot: [b]/plot.png" in output
    assert "kept for later jobs: /[b]/file.json" in output
    assert "interface [red]eth0" in output


def test_help_explains_every_option() -> None:
    status, output = _run("--help")
    assert status == 0
    for option in ("--ranks", "--network", "--seconds", "--device", "--json", "--plot", "--timeout"):
        assert option in output


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--ranks", "2"], "the launcher has started the ranks"),
        (["--network", "tcp"], "the launcher has started the ranks"),
        (["--device", "cuda"], "call telegrad.calibrate(comm, device=…)"),
    ],
)
def test_what_a_launcher_decides_is_refused_in_its_job(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], why: str
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    status, said = _run(*arguments)
    assert status == 2
    assert why in said.replace("│ ", "").replace(" │", "")


def test_who_is_in_a_job() -> None:
    step = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_JOB_ID": "7"}
    assert command.started_in_job({"RANK": "1", "WORLD_SIZE": "2"})
    assert command.started_in_job({**step, "SLURM_NTASKS": "2"})
    assert not command.started_in_job({})
    assert not command.started_in_job({"WORLD_SIZE": "2"})  # of a shell, not of a rank
    assert not command.started_in_job({"RANK": "0", "WORLD_SIZE": "1"})
