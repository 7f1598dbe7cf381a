"""What a run of the demo tells, and what is concluded from it. Knows no process and no terminal."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from telegrad.tools.demo.text import VOCABULARY

FIRST_LOSS = math.log(VOCABULARY)
"""Nats per byte before the first step: the model calls all bytes equally likely."""


@dataclass(frozen=True)
class TrainingStep:
    """A training step on rank 0. ``sent``: bytes by one rank since the training began."""

    step: int
    loss: float
    step_s: float
    exposed_s: float
    sent: float


@dataclass(frozen=True)
class Validation:
    """The held-out loss (nats per byte) after ``step`` steps, ``training_s`` seconds, ``sent`` bytes by one rank."""

    step: int
    loss: float
    training_s: float
    sent: float


@dataclass
class RunResult:
    """One run, as far as it has got; ``take`` feeds it with what rank 0 says."""

    name: str
    parameters: int = 0
    tokens_per_step: int = 0
    steps: list[TrainingStep] = field(default_factory=list)
    validations: list[Validation] = field(default_factory=list)
    training_s: float = 0.0
    total_s: float = 0.0
    sent_by_rank: list[float] = field(default_factory=list)
    ranks_agree: bool | None = None
    refused: str | None = None
    """Why it cannot be done on the device it was asked for."""

    def take(self, line: str) -> str | None:
        """Reads one line of rank 0's output; returns which kind of message it was, None for other output."""
        if not line.startswith('{"kind"'):
            return None
        message: dict[str, Any] = json.loads(line)
        kind = str(message.pop("kind"))
        if kind == "start":
            self.parameters, self.tokens_per_step = message["parameters"], message["tokens"]
        elif kind == "step":
            self.steps.append(TrainingStep(**message))
            self.training_s += self.steps[-1].step_s
        elif kind == "validation":
            self.validations.append(Validation(**message))
        elif kind == "refused":
            self.refused = message["reason"]
        elif kind == "end":
            self.training_s = message["training_s"]
            self.sent_by_rank = message["sent_by_rank"]
            weights = message["weights_by_rank"]
            self.ranks_agree = all(one == weights[0] for one in weights)
        return kind

    @property
    def validation_loss(self) -> float:
        """The last held-out loss, in nats per byte; NaN before the first."""
        return self.validations[-1].loss if self.validations else math.nan

    @property
    def bits_per_byte(self) -> float:
        return self.validation_loss / math.log(2)

    @property
    def step_s_median(self) -> float:
        return statistics.median(step.step_s for step in self.steps)

    @property
    def exposed_s_median(self) -> float:
        return statistics.median(step.exposed_s for step in self.steps)

    @property
    def bytes_per_rank_step(self) -> float:
        """Bytes sent, averaged over ranks and steps."""
        return statistics.fmean(self.sent_by_rank) / len(self.steps)

    def loss_at(self, training_s: float) -> float:
        """The held-out loss after so many seconds of training, interpolated between validations; the last one after
        the end.
        """
        before = Validation(0, FIRST_LOSS, 0.0, 0.0)
        for after in self.validations:
            if training_s < after.training_s:
                share = (training_s - before.training_s) / (after.training_s - before.training_s)
                return before.loss + share * (after.loss - before.loss)
            before = after
        return before.loss

    def smoothed_loss(self, over: int = 20) -> float:
        """The mean training loss of the last ``over`` steps; a single step's is noise. NaN before the first."""
        return statistics.fmean(step.loss for step in self.steps[-over:]) if self.steps else math.nan


def equal_wall_s(results: Sequence[RunResult]) -> float:
    """The training time at which runs are compared: when the fastest of them was done."""
    return min(result.training_s for result in results)


def as_json(
    results: Sequence[RunResult], *, network: str, ranks: int, steps: int, missing: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """What ``--json`` writes of the runs that were done; ``missing``: why others were not, by name. ``wall_s`` is
    training time, ``total_s`` includes start-up and validation; losses are in nats per byte, and None where training
    diverged; ``curve`` holds every validation.
    """
    at_s = equal_wall_s(results) if results else math.nan
    runs = [
        {
            "name": result.name,
            "validation_loss": _finite(result.validation_loss),
            "bits_per_byte": _finite(result.bits_per_byte),
            "wall_s": result.training_s,
            "total_s": result.total_s,
            "bytes_per_rank_step": result.bytes_per_rank_step,
            "step_s_median": result.step_s_median,
            "exposed_comm_s_median": result.exposed_s_median,
            "equal_wall_s": at_s,
            "validation_loss_at_equal_wall": _finite(result.loss_at(at_s)),
            "training_loss": _finite(result.smoothed_loss()),
            "parameters": result.parameters,
            "tokens_per_step": result.tokens_per_step,
            "ranks_agree": result.ranks_agree,
            "curve": [
                {
                    "step": one.step,
                    "validation_loss": _finite(one.loss),
                    "wall_s": one.training_s,
                    "bytes_per_rank": one.sent,
                }
                for one in result.validations
            ],
        }
        for result in results
    ]
    return {"runs": runs, "missing": dict(missing or {}), "network": network, "ranks": ranks, "steps": steps}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
