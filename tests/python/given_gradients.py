"""A model whose gradients are given: for tests that must know to the bit what each rank contributes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from varied_options import objects_of

from telegrad import Communicator, Synchronizer

SHAPES = {"embedding": (30, 40), "norm": (16,), "hidden": (20, 50), "bias": (7,)}
LARGE = ("embedding", "hidden")
NAMED = [["hidden", "bias"], ["embedding", "norm"]]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([*parameters], lr=0.5)


class Given(nn.Module):
    """``model(gradients)`` is a loss that has them. A parameter that has none takes no part."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype)))

    def forward(self, gradients: Mapping[str, Tensor]) -> Tensor:
        parts = [(self.get_parameter(name) * one).sum() for name, one in gradients.items()]
        return torch.stack(parts).sum()


def gradients_of(rank: int, step: int, names: tuple[str, ...] = tuple(SHAPES)) -> dict[str, Tensor]:
    """Integers whose sums and quarters are exact."""
    rng = np.random.default_rng([rank, step])
    drawn = {
        name: torch.from_numpy((12 * rng.integers(-60, 60, shape)).astype(np.float32)) for name, shape in SHAPES.items()
    }
    return {name: drawn[name] for name in names}


def given(ranks: int, steps: int) -> dict[str, Tensor]:
    """The sum of all ranks' and steps' gradients, in float64."""
    all_of_them = [gradients_of(rank, step) for rank in range(ranks) for step in range(steps)]
    return {name: torch.stack([one[name].double() for one in all_of_them]).sum(0) for name in SHAPES}


class Rank:
    """One rank's model and Synchronizer; ``waits``: in steps of ``trains``."""

    def __init__(
        self, comm: Communicator, dtype: torch.dtype = torch.float32, *, waits: bool = False, **options: Any
    ) -> None:
        self.comm, self.model = comm, Given(dtype)
        self.trains = sgd(self.model.parameters())
        if callable(make_optimizer := options.get("optimizer")):
            options["optimizer"] = make_optimizer(self.model.parameters())
        if not isinstance(options.get("compress", "topk"), str):
            own: dict[str, Any] = {}
        else:
            own = {"compress": "topk"}
            if "policy" not in options:
                own["small_elements"] = 16
                if options.get("compress") != "quantised":
                    own["density"] = 0.05
        options = {**own, **options}
        self.sync = Synchronizer(
            self.model, comm, **objects_of(**{"compress": None, "wait_in": self.trains if waits else None, **options})
        )

    def step(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The averages, as copies; a step of the optimizer has used them, which gradients do not depend on."""
        averages = self.backward(gradients)
        self.trains.step()
        return averages

    def backward(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The averages, as copies, which no optimizer uses yet."""
        self.model.zero_grad()
        self.model(gradients).backward()
        return self.averages()

    def averages(self) -> dict[str, Tensor]:
        return {name: one.grad.clone() for name, one in self.model.named_parameters() if one.grad is not None}

    def waiting(self) -> dict[str, Tensor]:
        """What this rank has not sent yet, in float64."""
        entries = self.sync.state_dict()["compressor"]["parameters"]
        return {
            name: (entry["residual"].double() * entry["unit"]).view(SHAPES[name]) for name, entry in entries.items()
        }


def total(many: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    names = {name for one in many for name in one}
    return {name: torch.stack([one[name].double() for one in many if name in one]).sum(0) for name in sorted(names)}
