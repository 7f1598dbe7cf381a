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
    """``options``: arguments of DDPState beside ``density``. ``for_momentum``: only for tasks whose optimiser has
    momentum, which this method takes over: the optimiser runs without.
    """

    name: str
    about: str
    options: Mapping[str, Any] = field(default_factory=dict)
    for_momentum: bool = False

    def fits(self, task: Task) -> bool:
        """Whether ``task`` has the optimiser that it is for."""
        return not self.for_momentum or task.momentum > 0

    @property
    def sparse(self) -> bool:
        """Whether a density means anything to it."""
        return self.options.get("mode") != "dense"


METHODS = {
    method.name: method
    for method in (
        Method(DENSE, "plain averaging", {"mode": "dense"}),
        Method(DEFAULT, "threshold, exact at every 8th call and reused in between", {"selection": "reused"}),
        Method("topk", "exact top-k at every call", {"selection": "topk"}),
    )
}
