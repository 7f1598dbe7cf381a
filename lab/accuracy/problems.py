"""A task with its data: batches, loss, held-out figures, model and optimiser. Needs torch.

Which samples a rank sees depends on seed, step and rank only: all methods train on the same data in the same order.

The models, beside the demo's GPT, are small enough for thousands of steps on a core. None has buffers that depend on
the batch (GroupNorm, not BatchNorm): what a rank computes depends on the weights and its own samples only, so that one
process can play all ranks.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.accuracy.fashion import CLASSES, Labelled, read_fashion
from lab.accuracy.runs import TASKS, Run, Task
from telegrad.tools.demo.job import VOCABULARY, Corpus, ModelSize, check_length, training_batch, validation_batches
from telegrad.tools.demo.training import ByteGPT

_GROUPS = 4


def _convolution(into: int, out: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(into, out, 3, stride, padding=1, bias=False), nn.GroupNorm(_GROUPS, out), nn.ReLU())


class VggLike(nn.Module):
    """Pairs of 3 x 3 convolutions between poolings, then two wide layers that hold most of the parameters (Simonyan and
    Zisserman 2015). Takes images of shape (batch, 1, 28, 28); gives logits, (batch, 10). ``width``: channels at first.
    """

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            _convolution(1, width, stride=2),
            _convolution(width, width),
            nn.MaxPool2d(2),
            _convolution(width, 2 * width),
            _convolution(2 * width, 2 * width),
            nn.MaxPool2d(2, ceil_mode=True),
        )
        self.hidden = nn.Linear(2 * width * 4 * 4, hidden)
        self.head = nn.Linear(hidden, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(F.relu(self.hidden(self.features(images).flatten(1))))
        return logits


class ResidualBlock(nn.Module):
    """Two convolutions around which the stream goes (He et al. 2016, with projection where the shape changes)."""

    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        self.first = _convolution(into, out, stride)
        self.second = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(_GROUPS, out)
        self.around = nn.Identity() if into == out else nn.Conv2d(into, out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.second(self.first(x))) + self.around(x))


class ResNetLike(nn.Module):
    """``blocks`` residual blocks at each of ``stages`` widths, each twice the last, and no wide layer. Shapes as for
    ``VggLike``.
    """

    def __init__(self, width: int, stages: int, blocks: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [_convolution(1, width, stride=2), nn.MaxPool2d(2)]
        for stage in range(stages):
            out = width << stage
            for block in range(blocks):
                changes = stage > 0 and block == 0
                layers.append(ResidualBlock(out // 2 if changes else out, out, stride=2 if changes else 1))
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(width << stages - 1, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(images).mean((2, 3)))
        return logits


class LstmLanguageModel(nn.Module):
    """Two LSTM layers over codes of ``vocabulary`` tokens. Takes int64 of shape (batch, length); gives the next token's
    logits, (batch, length, vocabulary).
    """

    def __init__(self, vocabulary: int, code: int, width: int) -> None:
        super().__init__()
        self.codes = nn.Embedding(vocabulary, code)
        self.recurrent = nn.LSTM(code, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.recurrent(self.codes(tokens))
        logits: Tensor = self.head(states)
        return logits


_AT_ONCE = 500
IMAGES_ON_THE_WAY, WINDOWS_ON_THE_WAY, WINDOWS_AT_THE_END = 2000, 256, 2048


class Problem(ABC):
    """One task on this machine."""

    def __init__(self, task: Task) -> None:
        self.task = task

    @abstractmethod
    def batch(self, run: Run, step: int, rank: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of ``rank`` at ``step``, ``run.batch / run.ranks`` samples."""

    @abstractmethod
    def held_out(self, model: nn.Module, *, final: bool) -> dict[str, float]:
        """Figures on samples that no run trains on: ``loss`` (nats per sample or byte), and ``accuracy`` (percent) of a
        classifier. On the way on fewer samples than at the end, but always on the same.
        """

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy, in nats."""
        logits: Tensor = model(inputs)
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten())

    def model(self, size: str, device: str) -> nn.Module:
        """With the weights that torch's seed gives."""
        return _model(self.task, self.task.dimensions[size]).to(device)

    def optimizer(self, model: nn.Module, *, momentum: bool = True) -> torch.optim.Optimizer:
        """``momentum``: False where the residual method has it already."""
        task = self.task
        if task.optimizer == "adamw":
            return torch.optim.AdamW(
                model.parameters(), lr=task.learning_rate, weight_decay=task.weight_decay, fused=True
            )
        return torch.optim.SGD(
            model.parameters(),
            lr=task.learning_rate,
            momentum=task.momentum if momentum else 0.0,
            weight_decay=task.weight_decay,
        )


class Images(Problem):
    """Fashion-MNIST, whole epochs in an order of their own."""

    def __init__(self, task: Task, training: Labelled, held_out: Labelled) -> None:
        super().__init__(task)
        self._training, self._held_out = training, held_out
        self._mean, self._deviation = float(training.images.mean()), float(training.images.std())

    def batch(self, run: Run, step: int, rank: int) -> tuple[Tensor, Tensor]:
        images = len(self._training.labels)
        if run.batch > images:
            raise ValueError(f"batch={run.batch} is more than the {images} images of an epoch: choose a smaller one")
        epoch, place = divmod(step, images // run.batch)
        share = run.batch // run.ranks
        first = place * run.batch + rank * share
        chosen = _shuffled(images, run.seed, epoch)[first : first + share]
        return self._tensors(self._training, chosen)

    def held_out(self, model: nn.Module, *, final: bool) -> dict[str, float]:
        most = len(self._held_out.labels) if final else min(IMAGES_ON_THE_WAY, len(self._held_out.labels))
        loss = right = 0.0
        device = next(model.parameters()).device
        with torch.no_grad():
            for first in range(0, most, _AT_ONCE):
                inputs, targets = self._tensors(self._held_out, np.arange(first, min(first + _AT_ONCE, most)))
                logits, targets = model(inputs.to(device)), targets.to(device)
                loss += float(F.cross_entropy(logits, targets, reduction="sum"))
                right += float((logits.argmax(1) == targets).sum())
        return {"loss": loss / most, "accuracy": 100 * right / most}

    def _tensors(self, of: Labelled, chosen: np.ndarray) -> tuple[Tensor, Tensor]:
        images = (of.images[chosen].astype(np.float32) - self._mean) / self._deviation
        return torch.from_numpy(images[:, None]), torch.from_numpy(of.labels[chosen].astype(np.int64))


class Text(Problem):
    """The standard library's sources, byte by byte, windows drawn at random."""

    def __init__(self, task: Task, corpus: Corpus) -> None:
        super().__init__(task)
        check_length(corpus.training, task.context)
        check_length(corpus.held_out, task.context)
        self._corpus = corpus

    def batch(self, run: Run, step: int, rank: int) -> tuple[Tensor, Tensor]:
        inputs, targets = training_batch(
            self._corpus.training,
            seed=run.seed,
            step=step,
            rank=rank,
            batch=run.batch // run.ranks,
            context=self.task.context,
        )
        return torch.from_numpy(inputs), torch.from_numpy(targets)

    def held_out(self, model: nn.Module, *, final: bool) -> dict[str, float]:
        device = next(model.parameters()).device
        windows = WINDOWS_AT_THE_END if final else WINDOWS_ON_THE_WAY
        loss = 0.0
        with torch.no_grad():
            for inputs, targets in validation_batches(
                self._corpus.held_out, windows=windows, batch=64, context=self.task.context
            ):
                mean = self.loss(model, torch.from_numpy(inputs).to(device), torch.from_numpy(targets).to(device))
                loss += float(mean) * len(inputs)
        return {"loss": loss / windows}


def open_problem(name: str, data: Path | None, texts: Path) -> Problem:
    """The task ``name``. ``data``: the folder of Fashion-MNIST (None: where Debian has it); ``texts``: the folder that
    ``Corpus.prepare`` has filled. Raises ``DataMissing`` or ``ValueError`` for data that are not there or no good.
    """
    task = TASKS[name]
    return Images(task, *_fashion(data)) if task.data == "fashion" else Text(task, Corpus.open(texts))


@functools.lru_cache(maxsize=1)
def _fashion(data: Path | None) -> tuple[Labelled, Labelled]:
    return read_fashion(data)


@functools.lru_cache(maxsize=4)
def _shuffled(images: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(images)


def _model(task: Task, size: Mapping[str, int]) -> nn.Module:
    match task.model:
        case "vgg":
            return VggLike(size["width"], size["hidden"])
        case "resnet":
            return ResNetLike(size["width"], size["stages"], size["blocks"])
        case "lstm":
            return LstmLanguageModel(VOCABULARY, size["code"], size["width"])
    assert task.model == "gpt", task.model
    return ByteGPT(ModelSize(size["width"], size["layers"], size["heads"], task.context))
