"""What one training of the study is, and what it is called. Knows neither torch nor the terminal."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import Any, Self

from lab.accuracy.methods import METHODS
from lab.accuracy.tasks import SIZES, TASKS


@dataclass(frozen=True)
class Run:
    """One training. ``batch``: samples (images or windows of text) per step, of all ``ranks`` together. ``density``: 1
    for dense methods. ``evaluations``: how often the held-out figures are taken, evenly. ``device``: where the model
    is, as torch names it. Raises ``ValueError`` for what cannot be.
    """

    task: str
    method: str
    density: float
    seed: int
    steps: int
    batch: int
    ranks: int
    evaluations: int = 12
    size: str = "small"
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "ranks", "evaluations"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.batch % self.ranks:
            raise ValueError(f"batch={self.batch} must be a multiple of ranks={self.ranks}: each rank gets its share")
        for name, known in (("task", TASKS), ("method", METHODS), ("size", SIZES)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} does not exist: use one of {', '.join(known)}")
        if not 0 < self.density <= 1:
            raise ValueError(f"density={self.density} must be above 0 and at most 1: the share of entries that is sent")
        if self.seed < 0:
            raise ValueError(f"seed={self.seed} must not be negative")

    @property
    def name(self) -> str:
        """Unique among all runs, and the name of its files: what differs most, and a digest of everything."""
        digest = hashlib.sha256(self.to_json().encode()).hexdigest()[:8]
        share = f"-{self.density * 100:g}%" if METHODS[self.method].sparse else ""
        return f"{self.task}-{self.method}{share}-b{self.batch}-p{self.ranks}-seed{self.seed}-{digest}"

    def evaluation_steps(self) -> set[int]:
        """After how many steps the held-out figures are taken; the last is among them."""
        return {max(1, round(self.steps * (i + 1) / self.evaluations)) for i in range(self.evaluations)}

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        return cls(**fields)
