"""Dense sums by NCCL, on a GPU: one rank alone, which NCCL takes, and two that share it, which it would refuse."""

from __future__ import annotations

import json
from pathlib import Path

import gpu_nccl_program
import pytest
import torch
from gpu_jobs import missing, reports
from typer.testing import CliRunner

from telegrad.tools.cli import make_app

PROGRAM = "gpu_nccl_program"
RANKS = {"alone": 1, "together": 2}
JOB_S = 180.0
SCENARIOS = {which: [one.__name__ for one in ones] for which, ones in gpu_nccl_program.SCENARIOS.items()}
CASES = [(which, name) for which, names in SCENARIOS.items() for name in names]


def jobs(folder: Path, device: str) -> dict[str, list[dict[str, str]]]:
    found = {
        which: reports(f"{PROGRAM}:run_all", ranks, SCENARIOS[which], [which], folder / which, device, timeout_s=JOB_S)
        for which, ranks in RANKS.items()
    }
    backend = reports(f"{PROGRAM}:run_backend", 1, ["backend"], [], folder / "backend", device, timeout_s=JOB_S)
    return {**found, "backend": backend}


@pytest.fixture(scope="module")
def on_gpu(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, str]]]:
    if (reason := missing("cuda.bindings")) is not None:
        pytest.skip(reason)
    if not torch.distributed.is_nccl_available():
        pytest.skip("this torch has no NCCL")
    return jobs(tmp_path_factory.mktemp("jobs"), "cuda")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("which", "scenario"), [*CASES, ("backend", "backend")])
def test_gpu_sums_by_nccl(on_gpu: dict[str, list[dict[str, str]]], which: str, scenario: str) -> None:
    said = on_gpu[which]
    assert [one.get(scenario, f"was not reached: {one.get('-')}") for one in said] == ["ok"] * len(said)


@pytest.mark.timeout(200)
def test_gpu_calibration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By two processes on one GPU: there is no NCCL to choose."""
    if (reason := missing("cuda.bindings")) is not None:
        pytest.skip(reason)
    monkeypatch.setenv("TELEGRAD_CACHE", str(tmp_path / "cache"))
    written = tmp_path / "found.json"
    arguments = ["calibrate", "--ranks", "2", "--seconds", "4", "--device", "cuda", "--json", str(written)]
    done = CliRunner().invoke(make_app(), arguments, env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    found = json.loads(written.read_text())
    assert found["tuning"]["on_device"]["device"] == torch.cuda.get_device_name(0)
    assert (found["tuning"]["on_device"]["nccl"] is None) == (torch.cuda.device_count() < 2)
    assert {row["algorithm"] for row in found["device_rows"]} >= {"host_transfer"}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_programs_of_nccl_hold_on_the_host(tmp_path: Path) -> None:
    """So that a GPU that fails them is to blame, or what telegrad does with it."""
    wanted = {which: [{name: "ok" for w, name in CASES if w == which}] * ranks for which, ranks in RANKS.items()}
    assert jobs(tmp_path, "cpu") == {**wanted, "backend": [{"backend": "ok"}]}
