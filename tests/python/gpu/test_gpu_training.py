"""Training on CUDA tensors, on a GPU that two processes share: the torch backend, DDP's hook and the Synchronizer,
whose backward passes must not make the host wait for the device."""

from __future__ import annotations

from pathlib import Path

import gpu_training_program
import pytest
from gpu_jobs import missing, reports

RANKS = 2


SCENARIOS = [scenario.__name__ for scenario in gpu_training_program.SCENARIOS]


def job(folder: Path, device: str) -> list[dict[str, str]]:
    return reports("gpu_training_program:run_all", RANKS, SCENARIOS, [], folder / "store", device, timeout_s=360)


@pytest.fixture(scope="module")
def on_gpu(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """One job runs all scenarios, as long as they pass: importing torch is slow."""
    if (reason := missing("cuda.bindings")) is not None:
        pytest.skip(reason)
    return job(tmp_path_factory.mktemp("job"), "cuda")


@pytest.mark.timeout(400)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_gpu_two_processes(on_gpu: list[dict[str, str]], scenario: str) -> None:
    assert [said.get(scenario, f"was not reached: {said.get('-')}") for said in on_gpu] == ["ok"] * RANKS


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_programs_hold_on_the_host(tmp_path: Path) -> None:
    """So that a GPU that fails them is to blame, or what telegrad does with it."""
    assert job(tmp_path, "cpu") == [dict.fromkeys(SCENARIOS, "ok")] * RANKS
