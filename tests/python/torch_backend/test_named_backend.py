"""Trainers that are given ``"telegrad"`` as the name of a backend train over it, in ranks that import nothing of
telegrad."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("named_backend_program.py")
PACKAGES = {
    "accelerate": "accelerate",
    "accelerate_on_cpu": "accelerate",
    "lightning": "pytorch_lightning",
    "transformers": "transformers",
    "transformers_on_cpu": "transformers",
}


def ended(command: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """Trains with each trainer that is installed."""
    installed = [trainer for trainer, package in PACKAGES.items() if find_spec(package)]
    return ended([str(PROGRAM), "each", *installed], tmp_path_factory.mktemp("job"))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("trainer", PACKAGES)
def test_a_trainer_is_given_the_name_only(trainer: str, request: pytest.FixtureRequest) -> None:
    if not find_spec(PACKAGES[trainer]):
        pytest.skip(f"{PACKAGES[trainer]} is not installed: pip install 'telegrad[lightning,transformers]'")
    job: subprocess.CompletedProcess[str] = request.getfixturevalue("job")
    assert job.stdout.count(f"{trainer}: trained over telegrad") == 2, job.stderr


@pytest.mark.timeout(300)
def test_under_torchrun(tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = ended([*torchrun, str(PROGRAM), "plain"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("plain: trained over telegrad") == 2
