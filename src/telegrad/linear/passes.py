"""What an optimiser tells of one pass over the data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from telegrad.linear.model import LinearModel


@dataclass
class Pass:
    """``loss``: mean over rows; ``entries``: that this rank has sent, over all steps."""

    steps: int
    loss: float = 0.0
    compute_s: float = 0.0
    comm_s: float = 0.0
    entries: int = 0


class Optimizer(Protocol):
    """How a model is improved, pass by pass. It is called alike on every rank."""

    def epoch(self, number: int, on_step: Callable[[int, int], None]) -> Pass:
        """Pass ``number``, from 0; ``on_step(steps so far, of all)`` is called after each."""

    def model(self) -> LinearModel:
        """As it is now, the same bits on every rank."""
