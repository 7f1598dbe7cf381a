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
    """``data``: ``"fashion"`` (judged by top-1 accuracy in percent), ``"text"`` (by the mean cross-entropy per byte, in
    nats), ``"words"`` (the same per token) or ``"masked"`` (per masked token). ``model``: a name of ``problems``, with
    the dimensions of each size. ``batch``: samples per step, of all ranks. ``context``: bytes or tokens in a window of
    text. ``momentum`` and ``nesterov``: of SGD. ``warmup``: the share of the steps that are dense at first with sparse
    methods too. ``clip``: the norm to which gradients are clipped. ``beta1``: of AdamW.
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
    nesterov: bool = False
    clip: float | None = None
    beta1: float = 0.9

    @property
    def judged_at(self) -> float:
        """The density at which accuracy is promised."""
        return 0.001 if self.data == "fashion" else 0.01

    @property
    def judged_by(self) -> str:
        return "accuracy" if self.data == "fashion" else "loss"

    @property
    def unit(self) -> str:
        """That the loss is a mean of, in text."""
        return {"fashion": "image", "text": "byte", "words": "token", "masked": "masked token"}[self.data]

    def learning_rate_at(self, step: int, steps: int) -> float:
        """A ramp up over the first 3 % of the steps, and half a cosine down to zero over all of them."""
        ramp = max(1, round(_RAMP * steps))
        high = self.learning_rate * min(1.0, (step + 1) / ramp)
        return high * 0.5 * (1 + math.cos(math.pi * step / steps))


_IMAGES = "Fashion-MNIST"
_SOURCES, _WORDS = "bytes of Python sources", "words of Python sources"
_VGG = {"small": {"width": 16, "hidden": 256}, "large": {"width": 64, "hidden": 2048}}
_RESNET = {"small": {"width": 32, "stages": 2, "blocks": 1}, "large": {"width": 64, "stages": 3, "blocks": 3}}
_LSTM = {"small": {"code": 32, "width": 96}, "large": {"code": 256, "width": 1024}}
_GPT = {
    "small": {"width": 64, "layers": 2, "heads": 2},
    "large": {"width": 512, "layers": 8, "heads": 8},
}
_RESNET18 = {"small": {"width": 4}, "large": {"width": 64}}
_WORD_LSTM = {"small": {"code": 8, "width": 16}, "large": {"code": 256, "width": 512}}
_CLIPPED_GPT = {"small": _GPT["small"], "large": {"width": 384, "layers": 6, "heads": 6}}
_MASKED = {"small": {"width": 16, "layers": 1, "heads": 2}, "large": {"width": 256, "layers": 6, "heads": 4}}

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
        Task(
            "resnet18",
            f"ResNet-18 with BatchNorm on {_IMAGES}, SGD with Nesterov momentum",
            "fashion",
            "resnet18",
            _RESNET18,
            64,
            "sgd",
            0.03,
            momentum=0.9,
            nesterov=True,
            warmup=0.1,
            weight_decay=5e-4,
        ),
        Task(
            "lstm-words",
            f"2-layer LSTM on {_WORDS}, SGD with clipping",
            "words",
            "lstm",
            _WORD_LSTM,
            16,
            "sgd",
            3.0,
            context=32,
            clip=1.0,
        ),
        Task(
            "gpt-clipped",
            f"GPT on {_SOURCES}, AdamW with clipping",
            "text",
            "gpt",
            _CLIPPED_GPT,
            16,
            "adamw",
            1e-3,
            context=32,
            warmup=0.1,
            weight_decay=0.1,
            clip=1.0,
        ),
        Task(
            "masked",
            f"bidirectional encoder on {_WORDS}, masked tokens, AdamW with clipping",
            "masked",
            "encoder",
            _MASKED,
            16,
            "adamw",
            1e-3,
            context=64,
            warmup=0.1,
            weight_decay=0.1,
            clip=1.0,
        ),
    )
}

TASKS["gpt-beta1-50"] = dataclasses.replace(
    TASKS["gpt"], name="gpt-beta1-50", about=f"small GPT on {_SOURCES}, AdamW with beta1 = 0.5", beta1=0.5
)

SELDOM = ("gpt-beta1-50",)
"""Tasks that are trained only where ``--task`` names them."""
GROWN = ("resnet18", "lstm-words", "gpt-clipped", "masked")
"""The tasks of a study of large models: 7 to 11 million parameters, BatchNorm, Nesterov momentum and clipping."""

DENSE = "dense"
"""What all are compared with."""

_DEFAULT, _DEFAULT_WITH_MOMENTUM = "reused", "momentum"


@dataclass(frozen=True)
class Method:
    """``options``: arguments of TopK; ``sparse``: whether there is one, and a density means anything. ``needs``: what a
    task must have for it: ``"sgd"`` or ``"momentum"`` (the method has it in its residuals, and the optimiser runs
    without), whose optimiser DDPState is given, or ``"warmup"``. ``cold``: without the task's warm-up. ``warmup``: its
    kind. ``masking``: of the momentum. ``rank``: of LowRank, in place of TopK. ``is_torchs``: torch's own hook, with
    that rank PowerSGD, and without one averages in 16 bits.
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
    is_torchs: bool = False

    def fits(self, task: Task) -> bool:
        """Whether a study of ``task`` has this method; one with momentum has few."""
        if task.momentum:
            return self.name in (DENSE, _DEFAULT) or self.is_torchs or self.needs == "momentum" or self.rank is not None
        takes_steps = task.optimizer == "sgd" or task.beta1 < 0.9  # entries that wait are momentum enough
        return {None: True, "sgd": takes_steps, "warmup": task.warmup > 0, "momentum": False}[self.needs]

    @property
    def takes_momentum(self) -> bool:
        """Whether the optimiser must run without momentum, because the method has it."""
        return self.needs == "momentum"

    def clips_locally(self, task: Task) -> bool:
        """Whether each rank clips before it compresses, as docs/how-to/clipping.md says for TopK. Dense averages, and
        those of LowRank, are clipped as a whole."""
        return task.clip is not None and self.sparse

    def arguments(self, task: Task, *, density: float, steps: int, optimizer: Any) -> dict[str, Any]:
        """Of DDPState, for a run of so many steps."""
        from telegrad import LowRank, Momentum, TopK, Warmup  # with torch

        found: dict[str, Any] = {"compress": TopK(density=density, **self.options) if self.sparse else None}
        if self.rank is not None:
            found["compress"] = LowRank(self.rank)
        if self.sparse and task.warmup and not self.cold:
            found["warmup"] = Warmup(max(1, round(task.warmup * steps)), self.warmup)
        if self.takes_momentum:
            found["momentum"] = Momentum(task.momentum, nesterov=task.nesterov, masking=self.masking)
        if self.clips_locally(task):
            found["clip_norm"] = task.clip
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
            for rank in (1, 2, 3, 4, 8, 16)
        ),
        Method("fp16", "torch's hook that averages in 16 bits", sparse=False, is_torchs=True),
        *(
            Method(f"powersgd-{rank}", f"torch's PowerSGD of rank {rank}", sparse=False, rank=rank, is_torchs=True)
            for rank in (4, 8)
        ),
    )
}


@dataclass(frozen=True)
class Run:
    """One training. ``batch``: samples (images or windows of text) per step, of all ``ranks`` together. ``density``: 1
    for dense methods. ``evaluations``: how often the held-out figures are taken, evenly. ``device``: where the model
    is, as torch names it. ``rate``: the learning rate, as a multiple of the task's. Raises ``ValueError`` for what
    cannot be.
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
    rate: float = 1.0

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
        if not 0 < self.rate < math.inf:
            raise ValueError(
                f"rate={self.rate} must be a finite number above 0: a multiple of the task's learning rate"
            )
        if self.seed < 0:
            raise ValueError(f"seed={self.seed} must not be negative")

    @property
    def name(self) -> str:
        """Unique among all runs, and the name of its files: what differs most, and a digest of everything."""
        digest = hashlib.sha256(self.to_json().encode()).hexdigest()[:8]
        share = f"-{self.density * 100:g}%" if METHODS[self.method].sparse else ""
        rate = f"-{self.rate:g}x" if self.rate != 1 else ""
        return f"{self.task}-{self.method}{share}{rate}-b{self.batch}-p{self.ranks}-seed{self.seed}-{digest}"

    def evaluation_steps(self) -> set[int]:
        """After how many steps the held-out figures are taken; the last is among them."""
        return {max(1, round(self.steps * (i + 1) / self.evaluations)) for i in range(self.evaluations)}

    def learning_rate_at(self, step: int) -> float:
        return self.rate * TASKS[self.task].learning_rate_at(step, self.steps)

    def to_dict(self) -> dict[str, Any]:
        """Without a rate of 1, so that runs of folders from before there were rates keep their names."""
        fields = dataclasses.asdict(self)
        return fields if self.rate != 1 else {name: one for name, one in fields.items() if name != "rate"}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), sort_keys=True)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        return cls(**fields)
