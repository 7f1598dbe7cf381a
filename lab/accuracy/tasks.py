"""What is trained: the table of tasks, with all that a run of one needs to know. Knows neither torch nor data.

Each has a setting that suits plain averaging, the same for all methods: none is tuned.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

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
