"""Training under a loss scale: torch's GradScaler, and what DDPState makes of its scale and of infinite gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from handmade_buckets import LARGE, REBUILT, SHAPES, Trainer, gradients_of, named, plain_sgd

from telegrad import Communicator

OnRanks = Callable[..., list[Any]]
STEPS = 24


class ScaledTrainer:
    """Trains all parameters with given gradients, as a script with a GradScaler does; or without one."""

    def __init__(self, comm: Communicator, scaled: bool, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        # Every third step without infinities doubles the scale; each infinity halves it.
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6, growth_interval=3, enabled=scaled)
        self.scaler.scale(torch.zeros(()))  # what a training does with its loss: now there is a scale
        if scaled:
            options |= {"scaler": self.scaler, "nonfinite": "skip"}
        self.optimizers: list[torch.optim.Optimizer] = []

        def optimizer(parameters: Iterator[torch.nn.Parameter]) -> torch.optim.Optimizer:
            self.optimizers.append(plain_sgd(parameters))
            return self.optimizers[0]

        self.trainer = Trainer(comm, dtype, optimizer=optimizer, **options)
        self.comm = comm

    def step(self, step: int, infinite_on: int | None = None) -> None:
        scale = np.float32(self.scaler.get_scale())
        gradients = {name: values * scale for name, values in gradients_of(self.comm.rank, step).items()}
        if infinite_on == self.comm.rank:
            gradients["hidden"][17] = np.inf
        for name, average in self.trainer.step(gradients, REBUILT).items():
            parameter = self.trainer.parameters[name]
            parameter.grad = torch.from_numpy(average.copy()).view(parameter.shape).to(parameter.dtype)
        self.scaler.step(self.optimizers[0])
        self.scaler.update()

    def weights(self) -> np.ndarray:
        with torch.no_grad():
            return torch.cat([parameter.flatten() for parameter in self.trainer.parameters.values()]).float().numpy()


OPTIONS: list[dict[str, Any]] = [
    {"select": "topk"},
    {"select": "reused"},
    {"momentum": 0.5},
    {"momentum": 0.5, "nesterov": True, "warmup_steps": 5},
    {"feedback": "steps"},
    {"clip_norm": 600.0},
    {"density": 0.2, "warmup": "falling", "warmup_steps": 10},
    {"compress": None},
    {"combine": "oktopk"},
    {"combine": "bounded", "momentum": 0.5},
]
IN_HALF: list[dict[str, Any]] = [
    {"select": "reused"},
    {"momentum": 0.5, "nesterov": True, "warmup_steps": 5},
    {"clip_norm": 600.0},
    {"compress": None},
]
"""Those with a step of their own that reads or writes parameters in bfloat16."""


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        *(pytest.param(one, torch.float32, id=named(one)) for one in OPTIONS),
        *(pytest.param(one, torch.bfloat16, id=f"{named(one)}, bfloat16") for one in IN_HALF),
    ],
)
def test_a_changing_scale_changes_nothing(on_ranks: OnRanks, options: dict[str, Any], dtype: torch.dtype) -> None:
    """Bitwise what training without a scale gives: scales are powers of two. Infinite steps never were."""

    def run(comm: Communicator) -> np.ndarray:
        plain, scaled = ScaledTrainer(comm, False, dtype, **options), ScaledTrainer(comm, True, dtype, **options)
        scales = set()
        for step in range(STEPS):
            plain.step(step)
            if step in (2, 9, 10):
                before = scaled.weights(), scaled.scaler.get_scale()
                scaled.step(step, infinite_on=step % 2)
                assert scaled.trainer.state.skipped
                np.testing.assert_array_equal(scaled.weights(), before[0])
                assert scaled.scaler.get_scale() == before[1] / 2  # on all ranks
            scaled.step(step)
            scales.add(scaled.scaler.get_scale())
            np.testing.assert_array_equal(scaled.weights(), plain.weights())
        assert len(scales) > 3
        assert scaled.trainer.state.stats.skipped_steps == 3
        for name in LARGE:
            np.testing.assert_array_equal(scaled.trainer.waiting(name), plain.trainer.waiting(name))
        return scaled.weights()

    one, two = on_ranks(2, run)
    np.testing.assert_array_equal(one, two)
    assert one.any()


def test_a_residual_that_overflows_lowers_the_scale(on_ranks: OnRanks) -> None:
    """A scale so high that residual and gradient are finite and their sum is not: the scaler must hear of it."""

    def run(comm: Communicator) -> None:
        trainer = ScaledTrainer(comm, True, select="topk")
        trainer.scaler.update(2.0**110)
        gradients = {name: np.full(int(np.prod(shape)), 200.0, np.float32) for name, shape in SHAPES.items()}
        found = []
        for _ in range(80):
            scale = trainer.scaler.get_scale()
            found.append(scale)
            scaled = {name: values * np.float32(scale) for name, values in gradients.items()}
            for name, average in trainer.trainer.step(scaled, REBUILT).items():
                parameter = trainer.trainer.parameters[name]
                parameter.grad = torch.from_numpy(average.copy()).view(parameter.shape)
            trainer.scaler.step(trainer.optimizers[0])
            trainer.scaler.update()
        assert trainer.trainer.state.stats.skipped_steps > 2
        assert max(found) < 2.0**121
        assert np.isfinite(trainer.weights()).all()

    on_ranks(1, run)  # of more ranks the sum may overflow first


def test_a_scale_that_is_none(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> None:
        trainer = ScaledTrainer(comm, True)
        trainer.scaler.update(float("inf"))
        with pytest.raises(ValueError, match="scaler has the scale inf: it must be above 0"):
            trainer.trainer.step(gradients_of(0, 0), REBUILT)

    on_ranks(1, run)


def test_a_scaler_that_is_not_enabled_is_none(on_ranks: OnRanks) -> None:
    """It steps whatever comes: a dropped step's averages must be zeros."""

    def run(comm: Communicator) -> bool:
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        trainer = Trainer(comm, scaler=scaler, nonfinite="skip")
        gradients = gradients_of(comm.rank, 0)
        if comm.rank == 1:
            gradients["hidden"][17] = np.inf
        averages = trainer.step(gradients, REBUILT)
        return trainer.state.skipped and not any(values.any() for values in averages.values())

    assert on_ranks(2, run) == [True, True]
