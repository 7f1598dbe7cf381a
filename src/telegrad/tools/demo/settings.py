"""What all ranks of one run agree on; it travels from the parent to the ranks as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

RUNS = ("ddp-gloo", "telegrad-dense", "telegrad-sparse")
"""Plain DistributedDataParallel over Gloo; the same with our hook, dense; with our hook, sparse."""

DEVICES = ("cpu", "cuda")

SCHEMES: Mapping[str, Mapping[str, Any]] = {
    **{name: {"combine": name} for name in ("allreduce", "oktopk", "gtopk", "bounded", "allgather")},
    "topka": {"select": "topk", "combine": "allgather"},
    "topkdsa": {"select": "topk", "combine": "allreduce"},
    "gaussiank": {"select": "gaussian", "combine": "allgather"},
}
"""How the sparse run's entries meet, as options of TopK: what it has for ``combine``, and what Ok-Topk is compared
with."""


@dataclass(frozen=True)
class ModelSize:
    """Of the byte-level GPT. The default has 5.3 million parameters: two wide layers learn more in a few minutes than
    many narrow ones. Windows are short because a step's arithmetic grows with them but its traffic does not, and the
    demo is about traffic.
    """

    width: int = 448
    layers: int = 2
    heads: int = 7
    context: int = 64
    history: int = 3


@dataclass(frozen=True)
class Settings:
    """One run.

    ``interface``: whose byte counters are read (``eth0``, or ``lo`` for all ranks together); with ``shared_memory`` a
    communicator's own are, where there is one. ``device``: ``"cpu"``, or ``"cuda"``, one GPU for all ranks. ``corpus``:
    the folder with the text. ``scheme``: see ``SCHEMES``. ``warmup_steps``: dense steps before the first sparse one.
    ``validations``: how often the held-out loss is taken, evenly over the run. ``optimizer``'s figures are those at
    which plain DDP does best in so short a run; beta1 is low because error feedback delivers an entry's gradients in
    one piece, which is momentum enough.
    """

    run: str
    corpus: str
    steps: int
    interface: str
    shared_memory: bool = False
    device: str = "cpu"
    seed: int = 0
    batch: int = 1
    density: float = 0.01
    scheme: str = "allreduce"
    warmup_steps: int = 0
    validations: int = 8
    validation_windows: int = 192
    bucket_mb: float = 4.0
    learning_rate: float = 1e-3
    final_learning_rate: float = 1e-4
    ramp_steps: int = 10
    beta1: float = 0.5
    beta2: float = 0.95
    weight_decay: float = 0.1
    model: ModelSize = ModelSize()

    def __post_init__(self) -> None:
        if self.run not in RUNS:
            raise ValueError(f"run={self.run!r} does not exist: use one of {', '.join(RUNS)}")
        if self.device not in DEVICES:
            raise ValueError(f"device={self.device!r} does not exist: use one of {', '.join(DEVICES)}")
        if self.scheme not in SCHEMES:
            raise ValueError(f"scheme={self.scheme!r} does not exist: use one of {', '.join(SCHEMES)}")
        for name in ("steps", "batch", "validations", "validation_windows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("learning_rate", "bucket_mb"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} must be a finite number above 0")
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps={self.warmup_steps} must not be negative")
        if not 0 < self.density <= 1:
            raise ValueError(f"density={self.density} must be above 0 and at most 1: the share of entries that is sent")

    def validation_steps(self) -> set[int]:
        """After how many steps the held-out loss is taken; the last is among them."""
        return {round(self.steps * (i + 1) / self.validations) for i in range(self.validations)} - {0}

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        fields = json.loads(text)
        return cls(**{**fields, "model": ModelSize(**fields["model"])})
