"""Buckets as DDP makes them, and a rank that trains with them; for tests without DDP."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from varied_options import module_of, objects_of

import telegrad
from telegrad import Communicator, DDPState

SHAPES = {"embedding": (30, 40), "norm": (16,), "hidden": (20, 50), "bias": (7,), "scale": (3,)}
LARGE, SMALL = ("embedding", "hidden"), ("norm", "bias", "scale")


class Bucket:
    """Stands for DDP's GradBucket. Like that it shows complex gradients as pairs of floats, and lists them as if each
    were one float."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], buffer: torch.Tensor, index: int, last: bool) -> None:
        self._parameters, self._index, self._last = list(parameters), index, last
        self._buffer = torch.view_as_real(buffer).view(-1) if buffer.is_complex() else buffer

    def parameters(self) -> list[torch.Tensor]:
        return list(self._parameters)

    def gradients(self) -> list[torch.Tensor]:
        sizes = [parameter.numel() for parameter in self._parameters]
        pieces = self._buffer[: sum(sizes)].split(sizes)
        return [piece.view(parameter.shape) for piece, parameter in zip(pieces, self._parameters, strict=True)]

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self._last


class Trainer:
    """One rank: its parameters, its state, and steps over buckets."""

    def __init__(self, comm: Communicator, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        self.comm = comm
        self.parameters = {name: torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for name, shape in SHAPES.items()}
        if callable(make_optimizer := options.get("optimizer")):
            options["optimizer"] = make_optimizer(self.parameters.values())
        usual = (
            {}
            if options.get("compress", "topk") != "topk" or "policy" in options
            else {"density": 0.05, "small_elements": 16}
        )
        self.state = DDPState(comm, module_of(self.parameters), **objects_of(**{**usual, **options}))

    def step(self, gradients: dict[str, np.ndarray], buckets: Sequence[Sequence[str]]) -> dict[str, np.ndarray]:
        """Averages; both are flat arrays by name."""
        futures, result = [], {}
        for index, names in enumerate(buckets):
            futures.append((names, *self.start(gradients, names, index, index == len(buckets) - 1)))
        for names, buffer, future in futures:
            outcome = future.wait()
            assert outcome.data_ptr() == buffer.data_ptr()
            sizes = [gradients[name].size for name in names]
            result.update(zip(names, np.split(outcome.float().numpy(), np.cumsum(sizes)[:-1]), strict=True))
        return result

    def start(
        self, gradients: dict[str, np.ndarray], names: Sequence[str], index: int, last: bool
    ) -> tuple[torch.Tensor, torch.futures.Future[torch.Tensor]]:
        """One bucket: its buffer, and the hook's future."""
        parameters = [self.parameters[name] for name in names]
        buffer = torch.from_numpy(np.concatenate([gradients[name] for name in names])).to(parameters[0].dtype)
        bucket = Bucket(parameters, buffer, index, last)
        return buffer, telegrad.ddp_hook(self.state, bucket)  # type: ignore[arg-type]

    def memory(self) -> dict[str, Any]:
        """All that the compressor remembers, as a copy."""
        return self.state._compressor.state_dict()

    def residual(self, name: str) -> np.ndarray:
        return self.memory()["parameters"][name]["residual"]

    def waiting(self, name: str) -> np.ndarray:
        """What the residual says, in float64; none: zeros."""
        entry = self.memory()["parameters"].get(name)
        return np.zeros(1) if entry is None else entry["residual"].astype(np.float64) * entry["unit"]


ONE = [["embedding", "norm", "hidden", "bias", "scale"]]
REBUILT = [["scale", "bias", "hidden"], ["norm"], ["embedding"]]


def plain_sgd(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """What momentum correction wants: an SGD without momentum."""
    return torch.optim.SGD(list(parameters), lr=0.5)


def gradients_of(rank: int, step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng([rank, step])
    return {
        name: (4 * rng.integers(-60, 60, np.prod(shape))).astype(np.float32)  # sums and quarters of these are exact
        for name, shape in SHAPES.items()
    }


def given(name: str, ranks: int, steps: int, momentum: float = 0.0) -> np.ndarray:
    """What a parameter's gradients of all ranks and steps come to by the end, with what momentum makes of each."""
    weights = (1 - momentum ** np.arange(steps, 0, -1)) / (1 - momentum)
    gradients = (
        weights[step] * gradients_of(rank, step)[name].astype(np.float64)
        for rank in range(ranks)
        for step in range(steps)
    )
    return np.sum(list(gradients), axis=0)


def named(options: Any) -> str:
    """A test's name for the options it is given: no addresses, which differ between processes."""
    if not isinstance(options, dict):
        return str(options)
    return ", ".join(f"{name}={getattr(value, '__name__', value)}" for name, value in options.items())
