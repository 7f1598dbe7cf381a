"""A job of torchrun that goes on with 3 and then 5 ranks where 4 have ended: what waited is kept, and it learns as if
nothing had been."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[2] / "examples"
STEPS = {4: 40, 3: 80, 5: 120}  # by ranks, in this order: how many are done at the end


def _run(ranks: int, folder: Path) -> dict[str, Any]:
    report = folder / f"{ranks}.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*command, str(HERE / "elastic_program.py"), str(folder / "run"), str(STEPS[ranks]), str(report)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(HERE), str(EXAMPLES), *sys.path]),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(report.read_text())


def _losses_of_dense_sums() -> list[float]:
    """What the example's network and batches give one process, without compression."""
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    losses = []
    for step in range(max(STEPS.values())):
        inputs = torch.randn(60, 64, generator=torch.Generator().manual_seed(step))
        loss = torch.nn.functional.cross_entropy(network(inputs), inputs[:, :10].argmax(dim=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.timeout(400)
def test_from_4_to_3_to_5_ranks(tmp_path: Path) -> None:
    first, second, third = (_run(ranks, tmp_path) for ranks in STEPS)
    assert "step" not in first
    for resumed, before, step in ((second, 4, 40), (third, 3, 80)):
        assert (resumed["ranks_before"], resumed["step"], resumed["compressed"]) == (before, step, 2)
        assert resumed["residual_error"] < 1e-6
    losses = torch.tensor([*first["losses"], *second["losses"], *third["losses"]])
    dense = torch.tensor(_losses_of_dense_sums())
    assert len(losses) == len(dense) == 120
    assert dense[:10].mean() - dense[-10:].mean() > 0.5, "there must be a curve"
    # Step by step beside the dense curve: batches are the same, so noise is, and a break would show.
    apart = (losses - dense).abs()
    assert apart.max() < 0.15, apart
    for end in (40, 80):
        assert abs(apart[end : end + 5].mean() - apart[end - 5 : end].mean()) < 0.05, apart[end - 5 : end + 5]
