"""Trainers that are given ``"telegrad"`` as the name of a backend train over it, in jobs of torchrun that import
nothing of telegrad."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("named_backend_program.py")
TRAINERS = {
    "plain": "torch",
    "accelerate": "accelerate",
    "accelerate_on_cpu": "accelerate",
    "lightning": "pytorch_lightning",
    "transformers": "transformers",
    "transformers_on_cpu": "transformers",
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("trainer", "package"), TRAINERS.items(), ids=list(TRAINERS))
def test_a_trainer_is_given_the_name_only(trainer: str, package: str, tmp_path: Path) -> None:
    if not find_spec(package):
        pytest.skip(f"{package} is not installed: pip install 'telegrad[lightning,transformers]'")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, str(PROGRAM), trainer],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trained over telegrad") == 2
