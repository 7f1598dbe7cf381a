"""What one training of the study is: its task, its method, and what it is called. Knows neither torch nor the terminal.

Each task has a setting that suits plain averaging, the same for all methods: none is tuned.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

SIZES = ("small", "large")
"""Of the models: for a core, and for a GPU."""

_RAMP = 0.03


@dataclass(frozen=True)
class Task:
    """``data``: ``"fashion"`` (judged by top-1 accuracy in percent) or ``"text"`` (by the mean cross-entropy per byte,
    in nats). ``model``: a name of ``problems``, with the dimensions of each size. ``batch``: samples per step, of all
    ranks. ``context``: bytes in a window of text. ``momentum``: of SGD. ``warmup``: the share of the steps that are
    dense at first with sparse methods too.
    """

    name: str
    about: str
    data: str
    model: str
    dimensions: Mapping[str, Mapping[str, int]]
    batch: int
    optimizer: str
    learning_rate: float
    context: int = 0
    momentum: float = 0.0
    warmup: float = 0.0
    weight_decay: float = 0.0

    @property
    def judged_at(self) -> float:
        """The density at which accuracy is promised."""
        return 0.001 if self.data == "fashion" else 0.01

    @property
    def judged_by(self) -> str:
        return "accuracy" if self.data == "fashion" else "loss"

    def learning_rate_at(self, step: int, steps: int) -> float:
        """A ramp up over the first 3 % of the steps, and half a cosine down to zero over all of them."""
        ramp = max(1, round(_RAMP * steps))
        high = self.learning_rate * min(1.0, (step + 1) / ramp)
        return high * 0.5 * (1 + math.cos(math.pi * step / steps))


_IMAGES = "Fashion-MNIST"
_SOURCES = "bytes of Python sources"
_VGG = {"small": {"width": 16, "hidden": 256}, "large": {"width": 64, "hidden": 2048}}
_RESNET = {"small": {"width": 32, "stages": 2, "blocks": 1}, "large": {"width": 64, "stages": 3, "blocks": 3}}
_LSTM = {"small": {"code": 32, "width": 96}, "large": {"code": 256, "width": 1024}}
_GPT = {
    "small": {"width": 64, "layers": 2, "heads": 2},
    "large": {"width": 512, "layers": 8, "heads": 8},
}

TASKS = {
    task.name: task
    for task in (
        Task("vgg", f"VGG-like CNN on {_IMAGES}, SGD", "fashion", "vgg", _VGG, 64, "sgd", 0.3),
        Task("resnet", f"ResNet-like CNN on {_IMAGES}, SGD", "fashion", "resnet", _RESNET, 64, "sgd", 0.3),
        Task("lstm", f"2-layer LSTM on {_SOURCES}, SGD", "text", "lstm", _LSTM, 16, "sgd", 3.0, context=32),
        Task(
            "gpt",
            f"small GPT on {_SOURCES}, AdamW",
            "text",
            "gpt",
            _GPT,
            16,
            "adamw",
            5e-3,
            context=32,
            warmup=0.1,  # Adam's second moments, taken from rare large entries, hold later steps back
            weight_decay=0.1,
        ),
        Task(
            "vgg-momentum",
            f"VGG-like CNN on {_IMAGES}, SGD with momentum",
            "fashion",
            "vgg",
            _VGG,
            64,
            "sgd",
            0.03,
            momentum=0.9,
            warmup=0.1,  # momentum of early steps that arrives late throws the weights about
        ),
    )
}


DENSE = "dense"
"""What all are compared with."""

_DEFAULT, _DEFAULT_WITH_MOMENTUM = "reused", "momentum"


@dataclass(frozen=True)
class Method:
    """``options``: arguments of TopK; ``sparse``: whether there is one, and a density means anything. ``needs``: what a
    task must have for it: ``"sgd"`` or ``"momentum"`` (the method has it in its residuals, and the optimiser runs
    without), whose optimiser DDPState is given, or ``"warmup"``. ``cold``: without the task's warm-up. ``warmup``: its
    kind. ``masking``: of the momentum. ``rank``: of LowRank, in place of TopK.
    """

    name: str
    about: str
    options: Mapping[str, Any] = field(default_factory=dict)
    needs: str | None = None
    cold: bool = False
    sparse: bool = True
    warmup: str = "dense"
    masking: bool = True
    rank: int | None = None

    def fits(self, task: Task) -> bool:
        """Whether a study of ``task`` has this method; one with momentum has few."""
        if task.momentum:
            return self.name in (DENSE, _DEFAULT) or self.needs == "momentum" or self.rank is not None
        return {None: True, "sgd": task.optimizer == "sgd", "warmup": task.warmup > 0, "momentum": False}[self.needs]

    @property
    def takes_momentum(self) -> bool:
        """Whether the optimiser must run without momentum, because the method has it."""
        return self.needs == "momentum"

    def arguments(self, task: Task, *, density: float, steps: int, optimizer: Any) -> dict[str, Any]:
        """Of DDPState, for a run of so many steps."""
        from telegrad import LowRank, Momentum, TopK, Warmup  # with torch

        found: dict[str, Any] = {"compress": TopK(density=density, **self.options) if self.sparse else None}
        if self.rank is not None:
            found["compress"] = LowRank(self.rank)
        if self.sparse and task.warmup and not self.cold:
            found["warmup"] = Warmup(max(1, round(task.warmup * steps)), self.warmup)
        if self.takes_momentum:
            found["momentum"] = Momentum(task.momentum, masking=self.masking)
        if self.needs in ("sgd", "momentum"):
            found["optimizer"] = optimizer
        return found


def default_of(task: Task) -> str:
    """What docs/how-to recommends for the task's optimiser; it and dense training get all seeds."""
    return _DEFAULT_WITH_MOMENTUM if task.momentum else _DEFAULT


METHODS = {
    method.name: method
    for method in (
        Method(DENSE, "plain averaging", sparse=False),
        Method("reused", "a threshold, exact at every 8th call and corrected in between", {"select": "reused"}),
        Method("topk", "exact top-k at every call", {"select": "topk"}),
        Method("trimmed", "trimmed top-k (RedSync, Algorithm 2, corrected)", {"select": "trimmed"}),
        Method("search", "threshold binary search, k to 2k entries (RedSync, Algorithm 3)", {"select": "search"}),
        Method("sampled", "the search at every 5th call, its threshold in between", {"select": "sampled"}),
        Method("buckets", "top-k of every 512 entries (SparCML)", {"select": "buckets"}),
        Method("gaussian", "a threshold from the fit of a normal distribution", {"select": "gaussian"}),
        Method("random", "random entries, a baseline", {"select": "random"}),
        Method(
            "same-sign", "the search, one sign at a time, sent as its mean", {"select": "search", "same_sign": True}
        ),
        Method("qsgd4", "as `reused`, values in 4 bits (QSGD)", {"select": "reused", "values": "qsgd4"}),
        Method("oktopk", "as `reused`, the sum keeps about k entries (Ok-Topk)", {"combine": "oktopk"}),
        Method(
            "oktopk-steps",
            "as `oktopk`, residuals hold steps (Ok-Topk, Algorithm 2), as in `TopK.oktopk()`",
            {"combine": "oktopk", "feedback": "steps", "interval": 32},
            needs="sgd",
        ),
        Method("gtopk", "as `reused`, the sum keeps k entries by a tree (gTopk)", {"combine": "gtopk"}),
        Method("bounded", "as `oktopk`, in messages of fixed sizes", {"combine": "bounded"}),
        Method("topka", "as `topk`, entries are gathered (TopkA)", {"select": "topk", "combine": "allgather"}),
        Method(
            "gaussiank",
            "as `gaussian`, entries are gathered (Gaussiank)",
            {"select": "gaussian", "combine": "allgather"},
        ),
        Method("steps", "as `reused`, residuals hold steps (SparCML, Algorithm 1)", {"feedback": "steps"}, needs="sgd"),
        Method(
            "falling", "as `reused`, falling density at first instead of dense steps", needs="warmup", warmup="falling"
        ),
        Method("cold", "as `reused`, without dense steps at first", needs="warmup", cold=True),
        Method("momentum", "as `reused`, with momentum correction and factor masking", needs="momentum"),
        Method("unmasked", "as `momentum`, without factor masking", needs="momentum", masking=False),
        Method("cold-momentum", "as `momentum`, without dense steps at first", needs="momentum", cold=True),
        *(
            Method(f"lowrank-{rank}", f"LowRank of rank {rank}, without dense steps", sparse=False, rank=rank)
            for rank in (1, 2, 3, 4, 8)
        ),
    )
}


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
