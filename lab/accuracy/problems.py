"""A task with its data: batches, loss, held-out figures, model and optimiser. Needs torch.

Which samples a rank sees depends on seed, step and rank only: all methods train on the same data in the same order.

The models of the size ``"small"``, beside the demo's GPT, are small enough for thousands of steps on a core. What a
rank computes in training depends on the weights and its own samples only, so that one process can play all ranks. That
holds with BatchNorm too: its running statistics serve evaluation only (``one_process``).
"""

from __future__ import annotations

import functools
import re
from abc import ABC, abstractmethod
from array import array
from collections import Counter
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


def _norm(channels: int, *, batched: bool = False) -> nn.Module:
    return nn.BatchNorm2d(channels) if batched else nn.GroupNorm(_GROUPS, channels)


def _convolution(into: int, out: int, stride: int = 1, *, batched: bool = False) -> nn.Sequential:
    convolution = nn.Conv2d(into, out, 3, stride, padding=1, bias=False)
    return nn.Sequential(convolution, _norm(out, batched=batched), nn.ReLU())


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

    def __init__(self, into: int, out: int, stride: int, *, batched: bool = False) -> None:
        super().__init__()
        self.first = _convolution(into, out, stride, batched=batched)
        self.second = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.norm = _norm(out, batched=batched)
        self.around: nn.Module = nn.Identity() if into == out else nn.Conv2d(into, out, 1, stride, bias=False)
        if batched and into != out:
            self.around = nn.Sequential(self.around, _norm(out, batched=True))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.second(self.first(x))) + self.around(x))


class ResNetLike(nn.Module):
    """``blocks`` residual blocks at each of ``stages`` widths, each twice the last, and no wide layer. Shapes as for
    ``VggLike``. ``batched``: with BatchNorm, and without pooling after the first convolution, so that the fourth stage
    still sees 2 x 2 places. With 64, 4 and 2 that is ResNet-18.
    """

    def __init__(self, width: int, stages: int, blocks: int, *, batched: bool = False) -> None:
        super().__init__()
        layers: list[nn.Module] = [_convolution(1, width, stride=2, batched=batched)]
        if not batched:
            layers.append(nn.MaxPool2d(2))
        for stage in range(stages):
            out = width << stage
            for block in range(blocks):
                changes = stage > 0 and block == 0
                layers.append(ResidualBlock(out // 2 if changes else out, out, 2 if changes else 1, batched=batched))
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


class Encoder(nn.Module):
    """Transformer blocks in which each place sees all others (Devlin et al. 2019, with norms first). Takes int64 tokens
    below ``vocabulary`` + 1, of shape (batch, length ≤ context), the last of which masks; gives each place's logits,
    (batch, length, vocabulary).
    """

    def __init__(self, vocabulary: int, context: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.codes = nn.Embedding(vocabulary + 1, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.codes(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


WORDS = 4096
"""Tokens of a vocabulary of words, of which the first 256 are the bytes."""
_PIECES = re.compile(rb"[A-Za-z_]+|[0-9]+| +|\n|[^A-Za-z_0-9 \n]")


class Words:
    """A vocabulary of the most frequent names, numbers and indents of ``training``. A piece of text that is not among
    them is spelt byte by byte, so that nothing is lost."""

    def __init__(self, training: np.ndarray) -> None:
        counts = Counter(found[0] for found in _PIECES.finditer(training.tobytes()))
        longer = sorted((piece for piece in counts if len(piece) > 1), key=lambda piece: (-counts[piece], piece))
        self._pieces = [bytes([one]) for one in range(VOCABULARY)] + longer[: WORDS - VOCABULARY]
        self._tokens = {piece: token for token, piece in enumerate(self._pieces)}

    def __len__(self) -> int:
        return len(self._pieces)

    def tokens(self, text: np.ndarray) -> np.ndarray:
        """uint16, of uint8."""
        made = array("H")
        for found in _PIECES.finditer(text.tobytes()):
            token = self._tokens.get(found[0])
            if token is None:
                made.extend(found[0])
            else:
                made.append(token)
        return np.frombuffer(made, np.uint16)

    def text(self, tokens: np.ndarray) -> bytes:
        return b"".join(self._pieces[token] for token in tokens)


_MASKED_SHARE, _UNJUDGED = 0.15, -100


def masked(tokens: np.ndarray, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Of windows of tokens: the same with 15 % of each replaced by the mask, and what stood there; -100 elsewhere. Each
    window has as many, so that means over windows and ranks are means over masked tokens."""
    count = max(1, round(_MASKED_SHARE * tokens.shape[1]))
    places = random.random(tokens.shape).argsort(1)[:, :count]
    inputs, targets = tokens.copy(), np.full_like(tokens, _UNJUDGED)
    np.put_along_axis(inputs, places, WORDS, 1)
    np.put_along_axis(targets, places, np.take_along_axis(tokens, places, 1), 1)
    return inputs, targets


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

    @abstractmethod
    def judged(self, *, final: bool) -> int:
        """How many samples ``held_out`` takes."""

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy, in nats, of targets that are not -100."""
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
                model.parameters(),
                lr=task.learning_rate,
                betas=(task.beta1, 0.999),
                weight_decay=task.weight_decay,
                fused=True,
            )
        return torch.optim.SGD(
            model.parameters(),
            lr=task.learning_rate,
            momentum=task.momentum if momentum else 0.0,
            nesterov=task.nesterov and momentum,
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
        most = self.judged(final=final)
        loss = right = 0.0
        device = next(model.parameters()).device
        with torch.no_grad():
            for first in range(0, most, _AT_ONCE):
                inputs, targets = self._tensors(self._held_out, np.arange(first, min(first + _AT_ONCE, most)))
                logits, targets = model(inputs.to(device)), targets.to(device)
                loss += float(F.cross_entropy(logits, targets, reduction="sum"))
                right += float((logits.argmax(1) == targets).sum())
        return {"loss": loss / most, "accuracy": 100 * right / most}

    def judged(self, *, final: bool) -> int:
        images = len(self._held_out.labels)
        return images if final else min(IMAGES_ON_THE_WAY, images)

    def _tensors(self, of: Labelled, chosen: np.ndarray) -> tuple[Tensor, Tensor]:
        images = (of.images[chosen].astype(np.float32) - self._mean) / self._deviation
        return torch.from_numpy(images[:, None]), torch.from_numpy(of.labels[chosen].astype(np.int64))


class Text(Problem):
    """The standard library's sources, by bytes or by words, windows drawn at random. The model gives the next token, or
    that behind a mask."""

    def __init__(self, task: Task, training: np.ndarray, held_out: np.ndarray) -> None:
        super().__init__(task)
        check_length(training, task.context)
        check_length(held_out, task.context)
        self._training, self._held_out = training, held_out

    def batch(self, run: Run, step: int, rank: int) -> tuple[Tensor, Tensor]:
        inputs, targets = training_batch(
            self._training,
            seed=run.seed,
            step=step,
            rank=rank,
            batch=run.batch // run.ranks,
            context=self.task.context,
        )
        return self._given(inputs, targets, run.seed, step, rank)

    def judged(self, *, final: bool) -> int:
        return WINDOWS_AT_THE_END if final else WINDOWS_ON_THE_WAY

    def _given(self, inputs: np.ndarray, targets: np.ndarray, *seed: int) -> tuple[Tensor, Tensor]:
        if self.task.data == "masked":
            inputs, targets = masked(inputs, np.random.default_rng([*seed, 1]))
        return torch.from_numpy(inputs), torch.from_numpy(targets)

    def held_out(self, model: nn.Module, *, final: bool) -> dict[str, float]:
        device = next(model.parameters()).device
        windows, context = self.judged(final=final), self.task.context
        loss = 0.0
        with torch.no_grad():
            batches = validation_batches(self._held_out, windows=windows, batch=64, context=context)
            for place, (inputs, targets) in enumerate(batches):
                given, wanted = self._given(inputs, targets, place)
                loss += float(self.loss(model, given.to(device), wanted.to(device))) * len(inputs)
        return {"loss": loss / windows}


def open_problem(name: str, data: Path | None, texts: Path) -> Problem:
    """The task ``name``. ``data``: the folder of Fashion-MNIST (None: where Debian has it); ``texts``: the folder that
    ``Corpus.prepare`` has filled. Raises ``DataMissing`` or ``ValueError`` for data that are not there or no good.
    """
    task = TASKS[name]
    match task.data:
        case "fashion":
            return Images(task, *_fashion(data))
        case "text":
            corpus = Corpus.open(texts)
            return Text(task, corpus.training, corpus.held_out)
    return Text(task, *_words(texts))


@functools.lru_cache(maxsize=1)
def _fashion(data: Path | None) -> tuple[Labelled, Labelled]:
    return read_fashion(data)


@functools.lru_cache(maxsize=1)
def _words(texts: Path) -> tuple[np.ndarray, np.ndarray]:
    corpus = Corpus.open(texts)
    words = Words(corpus.training)
    return words.tokens(corpus.training), words.tokens(corpus.held_out)


@functools.lru_cache(maxsize=4)
def _shuffled(images: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(images)


def _model(task: Task, size: Mapping[str, int]) -> nn.Module:
    match task.model:
        case "vgg":
            return VggLike(size["width"], size["hidden"])
        case "resnet":
            return ResNetLike(size["width"], size["stages"], size["blocks"])
        case "resnet18":
            return ResNetLike(size["width"], 4, 2, batched=True)
        case "lstm":
            return LstmLanguageModel(VOCABULARY if task.data == "text" else WORDS, size["code"], size["width"])
        case "encoder":
            return Encoder(WORDS, task.context, size["width"], size["layers"], size["heads"])
    assert task.model == "gpt", task.model
    return ByteGPT(ModelSize(size["width"], size["layers"], size["heads"], task.context))
