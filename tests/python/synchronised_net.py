"""What ranks in threads train with a Synchronizer, and what one process makes of all their data."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

OnRanks = Callable[..., list[Any]]
NAMED = [["tail.weight", "tail.bias"], ["scale"], ["body.weight"]]
_SEEDING = threading.Lock()  # torch has one generator, and ranks are threads


class Net(nn.Module):
    """``scale`` is used by some passes only; ``spare`` by none; one layer is used twice; one parameter is frozen."""

    def __init__(self, *, spare: bool = False) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4, bias=False)
        self.tail = nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.ones(4))
        self.frozen = nn.Parameter(torch.full((4,), 0.5), requires_grad=False)
        if spare:
            self.spare = nn.Parameter(torch.ones(7))

    def forward(self, x: Tensor, *, scaled: bool = True) -> Tensor:
        x = self.body(torch.tanh(self.body(x))) * self.frozen
        return self.tail(x * self.scale if scaled else x)  # type: ignore[no-any-return]


def data(step: int, rank: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(1000 * rank + step))


def model_of(seed: int, **options: Any) -> Net:
    with _SEEDING:
        torch.manual_seed(seed)
        return Net(**options)


def loss_of(model: Net, step: int, rank: int, **options: Any) -> Tensor:
    return model(data(step, rank), **options).square().mean()  # type: ignore[no-any-return]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1, momentum=0.9)


def reference(
    ranks: int, steps: int, loss: Callable[[Net, int, int], Tensor] = loss_of, clip: float | None = None
) -> Net:
    """One process that has the gradients of all ranks, one after another."""
    model = model_of(0)
    optimizer = sgd(model)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(ranks):
            (loss(model, step, rank) / ranks).backward()  # type: ignore[no-untyped-call]
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model


def assert_same(model: nn.Module, expected: nn.Module) -> None:
    for (name, one), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


class Broken(torch.autograd.Function):
    """The identity, whose backward pass fails."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        raise ArithmeticError("half way")
