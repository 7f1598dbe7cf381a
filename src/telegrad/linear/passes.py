"""What an optimiser tells of one pass over the data, and what it goes on from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from telegrad.linear.losses import F32
from telegrad.linear.model import LinearModel


@dataclass
class Pass:
    """``loss``: mean over rows; ``entries``: that this rank has sent, over all steps."""

    steps: int
    loss: float = 0.0
    compute_s: float = 0.0
    comm_s: float = 0.0
    entries: int = 0


@dataclass(frozen=True)
class EpochReport:
    """One pass over the data.

    ``loss``: mean over the epoch's rows, each at its own step; with coordinate descent at its end. ``compute_s`` and
    ``comm_s``: this rank's seconds in gradients and updates, and in sums, waiting for slower ranks included; where
    these overlap, only what was waited for. ``entries``: that this rank has sent, over all steps; without others, that
    it has added up. The rest is of held-out rows of all ranks, NaN where there are none: mean loss, share of right
    classes, area under the ROC curve; of the squared error ``accuracy`` and ``auc`` are NaN.
    """

    epoch: int
    steps: int
    loss: float
    compute_s: float
    comm_s: float
    entries: int
    held_out_loss: float
    accuracy: float
    auc: float


@dataclass(frozen=True)
class State:
    """Between two passes, the same bits on every rank. ``squares`` and ``bias_squares``: AdaGrad's sums of squared
    gradients, of each feature and of the bias."""

    model: LinearModel
    squares: F32 | None = None
    bias_squares: float = 0.0

    @property
    def is_finite(self) -> bool:
        arrays = [self.model.weights] if self.squares is None else [self.model.weights, self.squares]
        numbers = np.array([self.model.bias, self.bias_squares])
        return all(bool(np.isfinite(one).all()) for one in (*arrays, numbers))


class Optimizer(Protocol):
    """How a model is improved, pass by pass. It is called alike on every rank."""

    def epoch(self, number: int, on_step: Callable[[int, int], None]) -> Pass:
        """Pass ``number``, from 0; ``on_step(steps so far, of all)`` is called after each."""

    def model(self) -> LinearModel:
        """As it is now, the same bits on every rank."""

    def settle(self) -> None:
        """Rounds what else passes would keep beside ``state()``, so that they go on from here as after ``restore``."""

    def state(self) -> State:
        """Behind ``settle``. A rank that does not need it need not ask."""

    def restore(self, state: State) -> None:
        """Before any pass."""
