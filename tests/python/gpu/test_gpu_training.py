"""Training on CUDA tensors, on a GPU that two processes share: the torch backend, DDP's hook and the Synchronizer,
whose backward passes must not make the host wait for the device."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import gpu_training_program
import pytest
import torch

from telegrad.launch import Ranks

RANKS = 2
HERE = Path(__file__).parent


def missing() -> str | None:
    if not torch.cuda.is_available():
        return "torch sees no CUDA GPU"
    try:
        found = importlib.util.find_spec("cuda.bindings") is not None
    except ModuleNotFoundError:
        found = False
    return None if found else "cuda-bindings is not installed"


def reports(folder: Path, device: str) -> list[dict[str, str]]:
    """What each rank said of each scenario."""
    lines: list[list[str]] = [[] for _ in range(RANKS)]
    with Ranks(
        "gpu_training_program:run_all",
        RANKS,
        arguments=[f"file://{folder / 'store'}"],
        environment={
            "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent / "train"), *sys.path]),
            "OMP_NUM_THREADS": "1",
            "TELEGRAD_TEST_DEVICE": device,
        },
        environment_of=lambda rank: {"RANK": str(rank), "WORLD_SIZE": str(RANKS)},
        on_line=lambda rank, line: lines[rank].append(line.rstrip()),
        timeout_s=360,
    ) as ranks:
        try:
            ranks.wait()
        except Exception as error:
            for said in lines:
                said.append(f"- {error}")
    return [dict(line.split(" ", 1) for line in said if " " in line) for said in lines]


@pytest.fixture(scope="module")
def on_gpu(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """One job runs all scenarios: importing torch is slow."""
    if (reason := missing()) is not None:
        pytest.skip(reason)
    return reports(tmp_path_factory.mktemp("job"), "cuda")


@pytest.mark.timeout(400)
@pytest.mark.parametrize("scenario", [scenario.__name__ for scenario in gpu_training_program.SCENARIOS])
def test_gpu_two_processes(on_gpu: list[dict[str, str]], scenario: str) -> None:
    assert [said.get(scenario, f"was not reached: {said.get('-')}") for said in on_gpu] == ["ok"] * RANKS


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_programs_hold_on_the_host(tmp_path: Path) -> None:
    """So that a GPU that fails them is to blame, or what telegrad does with it."""
    wanted = {scenario.__name__: "ok" for scenario in gpu_training_program.SCENARIOS}
    assert reports(tmp_path, "cpu") == [wanted] * RANKS
