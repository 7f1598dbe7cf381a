"""How gradients are exchanged in a run: the table of methods. A new one is a line. Does not know torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lab.accuracy.tasks import Task

DENSE = "dense"
"""What all are compared with."""

_DEFAULT, _DEFAULT_WITH_MOMENTUM = "reused", "momentum"


@dataclass(frozen=True)
class Method:
    """``options``: arguments of DDPState. ``needs``: what a task must have for it: ``"sgd"`` or ``"momentum"`` (the
    method has it in its residuals, and the optimiser runs without), whose optimiser DDPState is given, or ``"warmup"``.
    ``cold``: without the task's warm-up.
    """

    name: str
    about: str
    options: Mapping[str, Any] = field(default_factory=dict)
    needs: str | None = None
    cold: bool = False

    def fits(self, task: Task) -> bool:
        """Whether a study of ``task`` has this method; one with momentum has few."""
        if task.momentum:
            return self.name in (DENSE, _DEFAULT) or self.needs == "momentum"
        return {None: True, "sgd": task.optimizer == "sgd", "warmup": task.warmup > 0, "momentum": False}[self.needs]

    @property
    def sparse(self) -> bool:
        """Whether a density means anything to it."""
        return self.options.get("mode") != "dense"

    @property
    def takes_momentum(self) -> bool:
        """Whether the optimiser must run without momentum, because the method has it."""
        return self.needs == "momentum"

    def arguments(self, task: Task, *, density: float, steps: int, optimizer: Any) -> dict[str, Any]:
        """Of DDPState, for a run of so many steps."""
        found = dict(self.options)
        if self.sparse:
            found["density"] = density
            if task.warmup and not self.cold:
                found["warmup_steps"] = max(1, round(task.warmup * steps))
        if self.takes_momentum:
            found["momentum"] = task.momentum
        if self.needs in ("sgd", "momentum"):
            found["optimizer"] = optimizer
        return found


def default_of(task: Task) -> str:
    """The method that docs/training.md recommends for the task's optimiser; it and dense training get all seeds."""
    return _DEFAULT_WITH_MOMENTUM if task.momentum else _DEFAULT


METHODS = {
    method.name: method
    for method in (
        Method(DENSE, "plain averaging", {"mode": "dense"}),
        Method("reused", "a threshold, exact at every 8th call and corrected in between", {"selection": "reused"}),
        Method("topk", "exact top-k at every call", {"selection": "topk"}),
        Method("trimmed", "trimmed top-k (RedSync, Algorithm 2, corrected)", {"selection": "trimmed"}),
        Method("search", "threshold binary search, k to 2k entries (RedSync, Algorithm 3)", {"selection": "search"}),
        Method("sampled", "the search at every 5th call, its threshold in between", {"selection": "sampled"}),
        Method("buckets", "top-k of every 512 entries (SparCML)", {"selection": "buckets"}),
        Method("gaussian", "a threshold from the fit of a normal distribution", {"selection": "gaussian"}),
        Method("random", "random entries, a baseline", {"selection": "random"}),
        Method(
            "same-sign", "the search, one sign at a time, sent as its mean", {"selection": "search", "same_sign": True}
        ),
        Method("qsgd4", "as `reused`, values in 4 bits (QSGD)", {"selection": "reused", "wire": "qsgd4"}),
        Method("oktopk", "as `reused`, the sum keeps about k entries (Ok-Topk)", {"collective": "oktopk"}),
        Method("gtopk", "as `reused`, the sum keeps k entries by a tree (gTopk)", {"collective": "gtopk"}),
        Method("bounded", "as `oktopk`, in messages of fixed sizes", {"collective": "bounded"}),
        Method("topka", "as `topk`, entries are gathered (TopkA)", {"selection": "topk", "collective": "allgather"}),
        Method(
            "gaussiank",
            "as `gaussian`, entries are gathered (Gaussiank)",
            {"selection": "gaussian", "collective": "allgather"},
        ),
        Method("steps", "as `reused`, residuals hold steps (SparCML, Algorithm 1)", {"feedback": "steps"}, needs="sgd"),
        Method(
            "falling", "as `reused`, falling density at first instead of dense steps", {"warmup": "falling"}, "warmup"
        ),
        Method("cold", "as `reused`, without dense steps at first", needs="warmup", cold=True),
        Method("momentum", "as `reused`, with momentum correction and factor masking", needs="momentum"),
        Method("unmasked", "as `momentum`, without factor masking", {"masking": False}, needs="momentum"),
        Method("cold-momentum", "as `momentum`, without dense steps at first", needs="momentum", cold=True),
    )
}
