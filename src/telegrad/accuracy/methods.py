"""How gradients are exchanged in a run: the table of methods. A new one is a line. Does not know torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from telegrad.accuracy.tasks import Task

DENSE, DEFAULT = "dense", "reused"
"""What all are compared with, and what DDPState does without further arguments: these two get all seeds."""


@dataclass(frozen=True)
class Method:
    """``options``: arguments of DDPState. ``cold``: without the task's warm-up; only for tasks that have one.
    ``for_momentum``: it has the momentum in its residuals, so that the optimiser runs without; only for tasks with
    momentum, which have no other methods but dense training and the default. ``with_optimizer``: DDPState is given the
    optimiser.
    """

    name: str
    about: str
    options: Mapping[str, Any] = field(default_factory=dict)
    cold: bool = False
    for_momentum: bool = False
    with_optimizer: bool = False

    def fits(self, task: Task) -> bool:
        """Whether it is for the optimiser that ``task`` has."""
        if self.cold and not task.warmup:
            return False
        return self.name in (DENSE, DEFAULT) or self.for_momentum == (task.momentum > 0)

    @property
    def sparse(self) -> bool:
        """Whether a density means anything to it."""
        return self.options.get("mode") != "dense"

    def arguments(self, task: Task, *, density: float, steps: int, optimizer: Any) -> dict[str, Any]:
        """Of DDPState, for a run of so many steps."""
        found = dict(self.options)
        if self.sparse:
            found["density"] = density
            if task.warmup and not self.cold:
                found["warmup_steps"] = max(1, round(task.warmup * steps))
        if self.for_momentum:
            found["momentum"] = task.momentum
        if self.with_optimizer or self.for_momentum:
            found["optimizer"] = optimizer
        return found


METHODS = {
    method.name: method
    for method in (
        Method(DENSE, "plain averaging", {"mode": "dense"}),
        Method(DEFAULT, "a threshold, exact at every 8th call and corrected in between", {"selection": "reused"}),
        Method("topk", "exact top-k at every call", {"selection": "topk"}),
        Method("cold", "as `reused`, without the dense steps at first", {"selection": "reused"}, cold=True),
    )
}
