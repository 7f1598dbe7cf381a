"""Replicas that DiLoCo trains, with data of their own, and the same without communication, for references in numpy."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
Net = torch.nn.Module

_seeding = threading.Lock()


def network(seed: int = 0) -> Net:
    with _seeding:  # ranks are threads
        torch.manual_seed(seed)
        first, last = torch.nn.Linear(6, 16, bias=False), torch.nn.Linear(16, 3)  # its gradient would be noise
    return torch.nn.Sequential(first, torch.nn.BatchNorm1d(16), torch.nn.ReLU(), last)


def batch(rank: int, step: int) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(8, 6, generator=generator)
    return x, x[:, :3].abs()


def train(model: Net, optimizer: Any, rank: int, steps: range) -> None:
    for step in steps:
        x, y = batch(rank, step)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()


def flat(model: Net) -> np.ndarray:
    return torch.cat([one.detach().reshape(-1) for one in model.parameters()]).numpy().copy()


def local_models(ranks: int) -> list[tuple[Net, Any]]:
    """The replicas without communication, for references."""
    models = [network() for _ in range(ranks)]
    return [(model, torch.optim.AdamW(model.parameters(), 0.01)) for model in models]


def write(model: Net, values: np.ndarray) -> None:
    with torch.no_grad():
        for one, part in zip(
            model.parameters(), np.split(values, np.cumsum([p.numel() for p in model.parameters()])[:-1]), strict=True
        ):
            one.copy_(torch.from_numpy(part.astype(np.float32)).view_as(one))


def average_statistics(models: list[Net]) -> None:
    for buffers in zip(*(model.buffers() for model in models), strict=True):
        if buffers[0].is_floating_point():
            mean = torch.stack(buffers).mean(0)
            for one in buffers:
                one.copy_(mean)
