"""torch's own communication hooks, for the ranks that one process plays: averages in 16 bits, and PowerSGD.

What they do to a gradient is in ``torch/distributed/algorithms/ddp_comm_hooks``. Bytes are those of a ring, by formula.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

_DENSE_STEPS = 2  # the fewest that torch's PowerSGD accepts with error feedback and warm start
_LEAST_RATE = 2  # torch's min_compression_rate


class TorchHook:
    """As ``OneProcess``, for one of torch's hooks. ``rank``: of PowerSGD with error feedback and warm start after two
    dense steps; ``None``: gradients are averaged in float16.

    PowerSGD is linear in the ranks' gradients and residuals, so their means are enough.
    """

    def __init__(self, model: nn.Module, ranks: int, rank: int | None) -> None:
        self._parameters = {name: one for name, one in model.named_parameters() if one.requires_grad}
        self._statistics, self._of_first = list(model.buffers()), list[Tensor]()
        self._ranks, self._rank, self._steps, self._sent = ranks, rank, 0, 0.0
        self._elements = sum(one.numel() for one in self._parameters.values())
        self._given: list[dict[str, Tensor]] = [{} for _ in range(ranks)]
        self._random = torch.Generator().manual_seed(0)
        self.residuals: dict[str, Tensor] = {}
        self._factors: dict[str, Tensor] = {}
        for name, one in self._parameters.items():
            if rank is not None and (columns := self._columns(one)):
                self.residuals[name] = torch.zeros(one.shape[0], columns)
                drawn = torch.randn(columns, self._rank_of(one), generator=self._random)
                self._factors[name] = torch.linalg.qr(drawn)[0]
        self.compressed_elements = sum(one.numel() for one in self.residuals.values())
        self.reduced_density = 1.0

    def close(self) -> None:
        """Nothing is open."""

    def take(self, rank: int) -> None:
        if rank == 0:
            self._of_first = [one.clone() for one in self._statistics]
        for name, one in self._parameters.items():
            self._given[rank][name] = torch.zeros_like(one) if one.grad is None else one.grad.clone()

    def average(self) -> None:
        for name, one in self._parameters.items():
            given = [own[name] for own in self._given]
            dense = self._rank is None or name not in self._factors or self._steps < _DENSE_STEPS
            if self._rank is None:
                one.grad = functools.reduce(torch.add, [(own / self._ranks).half() for own in given]).to(one.dtype)
                self._count(one.numel(), 2)
            elif dense:
                one.grad = torch.stack(given).mean(0)
                self._count(one.numel(), 4)
            else:
                one.grad = self._product(name, torch.stack(given).mean(0)).to(one.device)
        for statistic, first in zip(self._statistics, self._of_first, strict=True):
            statistic.copy_(first)
        self._steps += 1

    def _product(self, name: str, mean: Tensor) -> Tensor:
        """PowerSGD, Algorithm 1."""
        residual, right = self.residuals[name], self._factors[name]
        residual += mean.reshape(residual.shape).cpu()
        left = torch.linalg.qr(residual @ right)[0]
        right = residual.T @ left
        product = left @ right.T
        residual -= product
        self._factors[name] = right
        self._count(left.numel() + right.numel(), 4)
        made: Tensor = product.view(mean.shape)
        return made

    def _columns(self, one: Tensor) -> int:
        """Of its matrix; 0 where torch sends it whole."""
        if one.dim() < 2:
            return 0
        rows, columns = one.shape[0], one.numel() // one.shape[0]
        return columns if (rows + columns) * self._rank_of(one) * _LEAST_RATE < one.numel() else 0

    def _rank_of(self, one: Tensor) -> int:
        assert self._rank is not None
        return min(self._rank, one.shape[0], one.numel() // one.shape[0])

    def _count(self, numbers: int, size: int) -> None:
        self._sent += 2 * (self._ranks - 1) / self._ranks * numbers * size

    def sent_bytes(self) -> list[float]:
        return [self._sent] * self._ranks

    def selected(self) -> float:
        return 1.0

    def travelled(self) -> tuple[float, float]:
        whole = 2 * (self._ranks - 1) / self._ranks * self._elements * 4 * self._steps
        return self._sent, whole or math.inf

    def state_dict(self) -> dict[str, Any]:
        """Of all ranks."""
        return {"steps": self._steps, "sent": self._sent, "residuals": self.residuals, "factors": self._factors}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._steps, self._sent = state["steps"], state["sent"]
        self.residuals, self._factors = dict(state["residuals"]), dict(state["factors"])
