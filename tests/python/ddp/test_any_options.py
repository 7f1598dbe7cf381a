"""Options drawn at random: three ranks agree bit for bit, and what is applied and what waits is what was given."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from handmade_buckets import LARGE, ONE, REBUILT, SHAPES, Trainer, gradients_of

from telegrad import Communicator
from telegrad.compress import SELECTIONS
from telegrad.ddp.options import COMBINE

OnRanks = Callable[..., list[Any]]
RANKS, STEPS = 3, 25


def _sgd(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [parameter]} for parameter in parameters], lr=0.5)


class Plan:
    """One training, from a seed: the options, and what happens in each step."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        same_sign = draw.random() < 0.3
        able = [name for name, kind in SELECTIONS.items() if "same_sign" in kind.__dataclass_fields__]  # type: ignore[attr-defined]
        self.momentum = draw.choice([0.0, 0.0, 0.7])
        self.nesterov = draw.random() < 0.5
        self.options: dict[str, Any] = {
            "select": draw.choice(able if same_sign else list(SELECTIONS)),
            "same_sign": same_sign,
            "density": draw.choice([0.01, 0.05, 0.3, 1.0]),
            "combine": draw.choice(COMBINE),
            "feedback": draw.choice(["gradients", "steps"]),
            "warmup_steps": draw.choice([0, 0, 4]),
            "warmup": draw.choice(["dense", "falling"]),
            "small_elements": draw.choice([0, 16, 1000]),
            "optimizer": _sgd,
        }
        if not self.options["warmup_steps"]:
            self.options["warmup"] = "dense"
        if same_sign and self.options["small_elements"] == 1000:  # the others go as means, by neither of them
            self.options["combine"] = "allreduce"
        wires = {"gtopk": ["raw", "packed"], "bounded": ["auto", "raw"]}
        others = ["raw", "raw-bf16", "int8", "qsgd8"]
        self.options["values"] = draw.choice(wires.get(self.options["combine"], others))
        if same_sign and self.options["small_elements"] == 1000:
            self.options["values"] = "auto"
        if self.momentum:
            self.options |= {"momentum": self.momentum, "nesterov": self.nesterov, "masking": False}
        self.scaled = draw.random() < 0.4
        self.skips = self.scaled or draw.random() < 0.3
        if self.skips:
            self.options["nonfinite"] = "skip"
        self.rates = [draw.choice([0.5, 0.4, 0.1, 0.05, 0.0]) for _ in range(STEPS)]
        self.scales = [2.0 ** draw.randrange(14) if self.scaled else 1.0 for _ in range(STEPS)]
        self.bad = [draw.randrange(RANKS) if self.skips and draw.random() < 0.2 else None for _ in range(STEPS)]
        self.reloads = {draw.randrange(STEPS)}
        self.buckets = [draw.choice([ONE, REBUILT]) for _ in range(STEPS)]

    def __repr__(self) -> str:
        shown = {name: value for name, value in self.options.items() if name != "optimizer"}
        return f"{shown}, scaled={self.scaled}"

    def rate(self, name: str, step: int) -> float:
        """Parameter groups have rates of their own."""
        return self.rates[step] * (0.5 if name == "hidden" else 1.0)

    def trainer(self, comm: Communicator) -> tuple[Trainer, torch.amp.GradScaler]:
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.zeros(()))
        return Trainer(comm, **self.options, **({"scaler": scaler} if self.scaled else {})), scaler

    def run(self, comm: Communicator) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """What was applied, times the ranks and (for steps) the rate; and what waits."""
        trainer, scaler = self.trainer(comm)
        applied = {name: np.zeros(int(np.prod(shape))) for name, shape in SHAPES.items()}
        for step in range(STEPS):
            if step in self.reloads:
                saved = trainer.state.state_dict()
                trainer, scaler = self.trainer(comm)
                trainer.state.load_state_dict(saved)
            optimizer = trainer.state._scales._optimizer
            assert optimizer is not None
            for name, group in zip(SHAPES, optimizer.param_groups, strict=True):
                group["lr"] = self.rate(name, step)
            scale = np.float32(self.scales[step])
            scaler.update(float(scale))
            for bad in ([True] if self.bad[step] is not None else []) + [False]:
                gradients = {name: values * scale for name, values in gradients_of(comm.rank, step).items()}
                if bad and self.bad[step] == comm.rank:
                    gradients["scale"][1] = np.inf
                result = trainer.step(gradients, self.buckets[step])
                assert trainer.state.skipped == bad
                for name, values in result.items() if not bad else ():
                    worth = self.rate(name, step) if self.options["feedback"] == "steps" else 1.0
                    applied[name] += RANKS * worth * values.astype(np.float64) / scale
        return applied, {name: trainer.waiting(name) for name in SHAPES}

    def given(self, name: str) -> np.ndarray:
        """What momentum makes of all gradients."""
        velocity = total = np.zeros(int(np.prod(SHAPES[name])))
        for step in range(STEPS):
            gradient = sum(gradients_of(rank, step)[name].astype(np.float64) for rank in range(RANKS))
            velocity = self.momentum * velocity + gradient
            step_taken = gradient + self.momentum * velocity if self.nesterov and self.momentum else velocity
            rate = self.rate(name, step) if self.options["feedback"] == "steps" else 1.0
            total = total + rate * step_taken
        return total


@pytest.mark.parametrize("seed", range(40))
def test_nothing_is_lost(on_ranks: OnRanks, seed: int) -> None:
    plan = Plan(seed)
    outcomes = on_ranks(RANKS, plan.run)
    for name in SHAPES:
        waiting = sum(residuals[name] for _, residuals in outcomes)
        np.testing.assert_allclose(outcomes[0][0][name] + waiting, plan.given(name), atol=0.2, err_msg=repr(plan))
        for applied, _ in outcomes:
            np.testing.assert_array_equal(applied[name], outcomes[0][0][name])
    assert any(outcomes[0][0][name].any() for name in LARGE)
