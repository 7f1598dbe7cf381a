"""A job that goes on with another number of ranks: what waited is kept, and it learns as if nothing had
been."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ports import free_port
from torchrun_client import ask

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[2] / "examples"
EVERY = 40  # steps, with each number of ranks
BATCH = 60


def _run(server: str, ranks: int, steps: int, folder: Path) -> dict[str, Any]:
    report = folder / f"{ranks}.json"
    script = [str(HERE / "elastic_program.py"), str(folder / "run"), str(steps), str(report)]
    environment = {"PYTHONPATH": str(EXAMPLES)}
    request = {"script": script, "ranks": ranks, "folder": str(folder), "environment": environment, "port": free_port()}
    statuses, said = ask(server, request)
    assert statuses == [0] * ranks, said
    return json.loads(report.read_text())


def _losses_of_dense_sums(steps: int) -> list[float]:
    """What the example's network and batches give one process, without compression."""
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        inputs = torch.randn(BATCH, 64, generator=torch.Generator().manual_seed(step))
        loss = torch.nn.functional.cross_entropy(network(inputs), inputs[:, :10].argmax(dim=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param([2, 1], id="2-1"),
        pytest.param([4, 3, 5], id="4-3-5", marks=pytest.mark.slow),
    ],
)
def test_jobs_of_other_sizes(torchrun_server: str, tmp_path: Path, sizes: list[int]) -> None:
    runs = [_run(torchrun_server, ranks, EVERY * (number + 1), tmp_path) for number, ranks in enumerate(sizes)]
    assert "step" not in runs[0]
    for number, resumed in enumerate(runs[1:], 1):
        found = resumed["ranks_before"], resumed["step"], resumed["compressed"]
        assert found == (sizes[number - 1], EVERY * number, 2)
        assert resumed["residual_error"] < 1e-6
    losses = torch.tensor([loss for run in runs for loss in run["losses"]])
    dense = torch.tensor(_losses_of_dense_sums(EVERY * len(sizes)))
    assert len(losses) == len(dense)
    assert dense[:10].mean() - dense[-10:].mean() > 0.3, "there must be a curve"
    # Step by step beside the dense curve: batches are the same, so noise is, and a break would show.
    apart = (losses - dense).abs()
    assert apart.max() < 0.15, apart
    for end in range(EVERY, EVERY * len(sizes), EVERY):
        assert abs(apart[end : end + 5].mean() - apart[end - 5 : end].mean()) < 0.05, apart[end - 5 : end + 5]
