"""examples/ray_train.py on Ray: over the hook alone, over the backend too, and after a worker was killed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("ray.train", reason="Ray is not installed: pip install 'ray[train]'")

pytestmark = pytest.mark.timeout(900)

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[2] / "examples"
_PATIENCE = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300",
    "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": "600",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all runs; ``last`` in each leads to its last checkpoint."""
    folder = tmp_path_factory.mktemp("runs")
    path = os.pathsep.join([str(EXAMPLES), str(HERE), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, str(HERE / "ray_program.py"), str(folder)],
        env={**os.environ, **_PATIENCE, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def last(runs: Path, name: str) -> dict[str, Any]:
    """By file and key, what the last checkpoint of a run holds."""
    files = ("model.pt", "telegrad-0.pt", "telegrad-1.pt")
    held = {file: torch.load(runs / name / "last" / file, weights_only=True) for file in files}
    return dict(entries("", held))


def entries(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict | list):
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            yield from entries(f"{prefix}/{key}", one)
    else:
        yield prefix, value


def different(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    assert one.keys() == other.keys()
    equal = {
        key: torch.equal(value, other[key]) if isinstance(value, torch.Tensor) else value == other[key]
        for key, value in one.items()
    }
    return [key for key, is_equal in equal.items() if not is_equal]


def test_checkpoints_hold_what_each_worker_has_not_sent(runs: Path) -> None:
    held = last(runs, "hook")
    residuals = [held[f"/telegrad-{rank}.pt/compressor/parameters/module.0.weight/residual"] for rank in range(2)]
    assert all(residual.any() for residual in residuals)
    assert not torch.equal(*residuals)


def test_the_backend_trains_as_the_hook_alone(runs: Path) -> None:
    assert different(last(runs, "hook"), last(runs, "backend")) == []


def test_a_killed_worker_resumes_from_its_checkpoint(runs: Path) -> None:
    assert (runs / "resumed").read_text() == "40"
    assert different(last(runs, "backend"), last(runs, "killed")) == []
