"""What compressed gradients cost with AdamW: selections, feedback and low rank, at equal steps and by bytes.

The demo's GPT (5.3 million parameters) is trained with four ranks played in one process: each takes its own gradients,
and a method exchanges them exactly as it is defined, in NumPy, with its bytes counted. Methods that the library has run
through the library itself. A reference handles one tensor; tensors of up to 2,048 elements are averaged densely.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
import typer
from rich.table import Table
from torch import nn

from lab.accuracy.one_process import OneProcess
from lab.common.commands import TextFolder
from lab.common.growing_result import GrowingResult
from telegrad import LowRank, TopK
from telegrad.tools.bench.machine import describe_machine, machine_text
from telegrad.tools.cli.options import RowsFile, among
from telegrad.tools.cli.outputs import check_all_writable, counting, drawn, table_console
from telegrad.tools.demo.job import Corpus, ModelSize, Settings, training_batch, validation_batches
from telegrad.tools.demo.training import ByteGPT, learning_rate_at, loss_of, optimizer_of
from telegrad.tools.report.figures import COLORS, GREY, dated, picture

Floats = npt.NDArray[np.float32]
Shape = tuple[int, ...]

RANKS = 4
SMALL_ELEMENTS = 2048
_ITEM_BITS = 32

# How values are rounded


@dataclass(frozen=True)
class Rounding:
    """``levels`` on each side of zero, up to the largest magnitude of every ``block`` values; at random so that the
    mean is the value (QSGD), or to the nearest. ``levels=0``: values stay as they are."""

    levels: int = 0
    block: int = 1024
    at_random: bool = False

    @property
    def bits(self) -> float:
        """Of a value, its part of the scale included."""
        return math.ceil(math.log2(2 * self.levels + 1)) + 32 / self.block if self.levels else _ITEM_BITS

    def __call__(self, values: Floats) -> Floats:
        """Of rows of values; what each becomes."""
        rows, count = values.shape
        if not self.levels or not count:
            return values
        blocks = np.pad(values, ((0, 0), (0, -count % self.block))).reshape(-1, self.block)
        scale = np.abs(blocks).max(1, keepdims=True)
        scale[scale == 0] = 1
        levels = blocks * (self.levels / scale)
        whole = np.floor(levels + _random.random(levels.shape, np.float32)) if self.at_random else np.rint(levels)
        rounded = np.clip(whole, -self.levels, self.levels) * (scale / self.levels)
        made: Floats = rounded.reshape(rows, -1)[:, :count].astype(np.float32)
        return made


_random = np.random.default_rng(7)
EXACT, RANDOM_4, NEAREST_4 = Rounding(), Rounding(7, at_random=True), Rounding(7)
NEAREST_4_SHORT, NEAREST_8 = Rounding(7, 64), Rounding(127, 256)


def average(values: Floats, rounding: Rounding) -> tuple[Floats, Floats]:
    """The average over ranks, and what rounding loses of each rank's values. A rank owns a slice, of which its own
    values are not sent, and rounds the sum of it; what that loses is the rank's too."""
    if rounding is EXACT:
        return values.mean(0), np.zeros_like(values)
    slices = np.array_split(np.arange(values.shape[1]), len(values))
    sent = rounding(values)
    for rank, where in enumerate(slices):
        sent[rank, where] = values[rank, where]
    lost = values - sent
    total = sent.sum(0)
    rounded = rounding(total[None])[0]
    for rank, where in enumerate(slices):
        lost[rank, where] += total[where] - rounded[where]
    return rounded / np.float32(len(values)), lost


def allreduce_bytes(count: float, bits: float = _ITEM_BITS) -> float:
    """That a rank sends in a sum of so many values: as scatter and gather."""
    return 2 * (RANKS - 1) / RANKS * count * bits / 8


def largest(magnitudes: Floats, count: int) -> npt.NDArray[np.intp]:
    """The places of the ``count`` largest, ascending."""
    if count >= magnitudes.size:
        return np.arange(magnitudes.size)
    cut = np.partition(magnitudes, magnitudes.size - count)[magnitudes.size - count]
    return np.flatnonzero(magnitudes >= cut)[:count]


# Methods, of one tensor


class Method(Protocol):
    """What it remembers of a tensor, of all ranks."""

    @property
    def sent(self) -> float:
        """Bytes by a rank so far."""

    @property
    def kept(self) -> Floats:
        """By rank, what it has not given yet."""

    def step(self, given: Floats) -> Floats:
        """Of the ranks' gradients, a row each, what the optimizer gets."""


class OwnTopK:
    """Each rank sends its own largest entries of residual + gradient; all are added.

    ``decay``: of the residual in each step. ``chunk``: the largest are taken of every so many entries. ``power``:
    entries are compared after a division by this power of a running mean of the rank's squared gradients, which decays
    by ``squares_decay``."""

    def __init__(
        self,
        shape: Shape,
        density: float,
        rounding: Rounding = EXACT,
        *,
        decay: float = 1.0,
        chunk: int = 0,
        power: float = 0.0,
        squares_decay: float = 0.95,
    ) -> None:
        self.kept = np.zeros((RANKS, math.prod(shape)), np.float32)
        self.sent, self._density, self._rounding = 0.0, density, rounding
        self._decay, self._chunk, self._power, self._squares_decay = decay, chunk, power, squares_decay
        self._squares = np.zeros_like(self.kept) if power else None

    def step(self, given: Floats) -> Floats:
        self.kept *= np.float32(self._decay)
        self.kept += given
        if self._squares is not None:
            self._squares += (1 - self._squares_decay) * (given * given - self._squares)
        total, ranks = np.zeros(given.shape[1], np.float32), len(given)
        count = 0
        for rank, own in enumerate(self.kept):
            where = self._chosen(np.abs(own), rank)
            values = self._rounding(own[None, where])[0]
            total[where] += values
            own[where] -= values
            count += where.size
        union = np.flatnonzero(total)
        rounded = self._rounding(total[None, union])[0]
        self.kept[union * ranks // total.size, union] += total[union] - rounded
        total[union] = rounded
        bits = self._rounding.bits + math.log2(1 / self._density) + 1.5  # an index costs about its entropy
        self.sent += (RANKS - 1) / RANKS * (count / ranks + union.size) * bits / 8
        return total / np.float32(ranks)

    def _chosen(self, magnitudes: Floats, rank: int) -> npt.NDArray[np.intp]:
        if self._squares is not None:
            magnitudes = magnitudes / (self._squares[rank] + np.float32(1e-16)) ** np.float32(self._power)
        chunk = min(self._chunk, magnitudes.size) or magnitudes.size
        firsts = range(0, magnitudes.size, chunk)
        parts = [(first, magnitudes[first : first + chunk]) for first in firsts]
        return np.concatenate([first + largest(one, max(1, round(self._density * one.size))) for first, one in parts])


class SharedMask:
    """All ranks send the same entries of residual + gradient, so no index travels and none is sent by one rank alone.

    ``choose``: ``"ideal"``: the largest of the mean over ranks, which no rank knows: a bound of all others.
    ``"moment"`` (SCAPE): half of them the largest first moments of the averages so far, one step old, and half in turn.
    ``"cyclic"``: blocks of 64 in turn. ``"sketch"`` (ARC-Top-K): the rows of the matrix whose mean products with
    ``_SKETCH`` random columns are the largest, which ranks sum first.
    """

    _SKETCH, _BLOCK, _MEMORY = 4, 64, 0.9

    def __init__(self, shape: Shape, density: float, rounding: Rounding, *, choose: str) -> None:
        self.kept = np.zeros((1 if rounding is EXACT else RANKS, math.prod(shape)), np.float32)
        self.sent, self._rounding, self._choose, self._shape = 0.0, rounding, choose, shape
        self._random = np.random.default_rng(math.prod(shape))
        self._count = max(1, round(density * self.kept.shape[1]))
        self._order = self._random.permutation(-(-self.kept.shape[1] // self._BLOCK))
        self._moment, self._place = np.zeros(self.kept.shape[1], np.float32), 0

    def step(self, given: Floats) -> Floats:
        self.kept += given
        where = self._chosen()
        values, self.kept[:, where] = average(self.kept[:, where], self._rounding)
        total = np.zeros(given.shape[1], np.float32)
        total[where] = values
        self._moment *= np.float32(self._MEMORY)
        self._moment[where] += np.float32(1 - self._MEMORY) * values
        self.sent += allreduce_bytes(where.size, self._rounding.bits)
        return total

    def _chosen(self) -> npt.NDArray[np.intp]:
        if self._choose == "ideal":
            return largest(np.abs(self.kept.mean(0)), self._count)
        if self._choose == "sketch":
            matrix = self.kept.mean(0).reshape(self._shape[0], -1)
            sketch = matrix @ self._random.standard_normal((matrix.shape[1], self._SKETCH), np.float32)
            self.sent += allreduce_bytes(sketch.size, 16)
            rows = largest((sketch * sketch).sum(1), max(1, self._count // matrix.shape[1]))
            places: npt.NDArray[np.intp] = np.arange(matrix.size).reshape(matrix.shape)[rows].ravel()
            return places
        known = largest(np.abs(self._moment), self._count // 2) if self._choose == "moment" else np.zeros(0, np.intp)
        blocks = max(1, (self._count - known.size) // self._BLOCK)
        turn = self._order[(self._place + np.arange(blocks)) % self._order.size]
        self._place += blocks
        entries = (turn[:, None] * self._BLOCK + np.arange(self._BLOCK)).ravel()
        return np.union1d(known, entries[entries < self._moment.size])


class LocalAdam:
    """Each rank sends entries of the update of its own Adam (as DeMo does of its momentum), of which a part decays."""

    def __init__(self, shape: Shape, density: float, *, decay: float, betas: tuple[float, float]) -> None:
        self._inner, self._betas = OwnTopK(shape, density, decay=decay), betas
        self._first, self._second = np.zeros((2, *self._inner.kept.shape), np.float32)
        self._steps = 0

    @property
    def sent(self) -> float:
        return self._inner.sent

    @property
    def kept(self) -> Floats:
        return self._inner.kept

    def step(self, given: Floats) -> Floats:
        """The average update, of which the learning rate is not a part."""
        first, second = self._betas
        self._steps += 1
        self._first += np.float32(1 - first) * (given - self._first)
        self._second += np.float32(1 - second) * (given * given - self._second)
        scale = np.sqrt(self._second / (1 - second**self._steps)) + np.float32(1e-8)
        return self._inner.step((self._first / np.float32(1 - first**self._steps)) / scale)


class EF21Momentum:
    """Each rank sends entries of its momentum less what all know of it; the optimizer gets the average of these
    estimates (EF21 with momentum: Fatkhullin et al. 2023). ``kept``: what is not known yet."""

    def __init__(self, shape: Shape, density: float, *, momentum: float) -> None:
        self._momentum, self._known, self.kept = np.zeros((3, RANKS, math.prod(shape)), np.float32)
        self._rate, self._density, self.sent = np.float32(1 - momentum), density, 0.0

    def step(self, given: Floats) -> Floats:
        self._momentum += self._rate * (given - self._momentum)
        sent = np.zeros(given.shape[1], bool)
        for momentum, known in zip(self._momentum, self._known, strict=True):
            where = largest(np.abs(momentum - known), max(1, round(self._density * known.size)))
            known[where] = momentum[where]
            sent[where] = True
        self.kept = self._momentum - self._known
        bits = _ITEM_BITS + math.log2(1 / self._density) + 1.5
        self.sent += (RANKS - 1) / RANKS * (self._density * sent.size + np.count_nonzero(sent)) * bits / 8
        estimate: Floats = self._known.mean(0)
        return estimate


class LowRankFactors:
    """PowerSGD with both factors rounded by column. The error of P changes the basis alone, which all ranks have alike;
    that of Q stays in the residual.

    ``alternates``: one factor a step, by turns, on the basis that the other one gave (ACP-SGD). ``power``: rows and
    columns are divided by running means of the averages' squares there, to this power, before the product is taken, and
    multiplied afterwards. All ranks know these averages, so nothing travels for it, and the residual stays in units of
    the gradient. With 1/2 it is Adafactor's estimate of the units in which Adam moves.
    """

    _MEMORY, _LEAST = 0.95, 1e-3

    def __init__(
        self, shape: Shape, rank: int, rounding: Rounding, *, alternates: bool = False, power: float = 0.0
    ) -> None:
        self._shape, self._power = (shape[0], math.prod(shape[1:])), power
        self._rank, self._rounding, self._alternates, self.sent = min(rank, *self._shape), rounding, alternates, 0.0
        self.kept = np.zeros((1 if rounding is EXACT else RANKS, math.prod(shape)), np.float32)
        self._factor = np.random.default_rng(math.prod(shape)).standard_normal((self._shape[1], self._rank), np.float32)
        self._of_rows, self._of_columns = (
            np.zeros((self._shape[0], 1), np.float32),
            np.zeros(self._shape[1], np.float32),
        )
        self._is_left = True

    def step(self, given: Floats) -> Floats:
        self.kept += given
        scales = self._scale(self._of_rows) * self._scale(self._of_columns)
        residuals = self.kept.reshape(-1, *self._shape)
        matrices = list(residuals * scales)
        if self._alternates:
            self._is_left = not self._is_left
        else:
            left, _ = self._averaged([one @ self._factor for one in matrices])
        basis = _orthonormal(self._factor if self._alternates else left)
        sides = [one.T for one in matrices] if self._is_left else matrices
        self._factor, parts = self._averaged([side @ basis for side in sides])
        for residual, part in zip(residuals, parts, strict=True):
            product = basis @ part.T
            residual -= (product if self._is_left else product.T) / scales
        product = basis @ self._factor.T
        product = (product if self._is_left else product.T) / scales
        squares = product * product
        self._of_rows += np.float32(1 - self._MEMORY) * (squares.mean(1, keepdims=True) - self._of_rows)
        self._of_columns += np.float32(1 - self._MEMORY) * (squares.mean(0) - self._of_columns)
        return product.reshape(-1)

    def _scale(self, squares: Floats) -> Floats:
        mean = squares.mean()
        if not self._power or mean == 0:
            return np.ones_like(squares)
        scale: Floats = (squares / mean + np.float32(self._LEAST)) ** np.float32(-self._power)
        return scale

    def _averaged(self, factors: list[Floats]) -> tuple[Floats, list[Floats]]:
        """The average, and what of each rank's was sent."""
        rows = np.stack([one.T.reshape(-1) for one in factors])
        mean, lost = average(rows, self._rounding)
        self.sent += allreduce_bytes(mean.size, self._rounding.bits)
        shape = factors[0].T.shape
        return mean.reshape(shape).T, [one.reshape(shape).T for one in rows - lost]


def _orthonormal(columns: Floats) -> Floats:
    return np.linalg.qr(columns.astype(np.float64))[0].astype(np.float32)


# What is compared


@dataclass(frozen=True)
class Plan:
    """One method. ``make``: its state for a tensor of a shape (``None``: everything is averaged); or ``library``: what
    the library compresses with. ``linear``: it does the same to the mean of the ranks' gradients as to each.
    ``is_update``: what it gives is an update, not a gradient. ``beta2``: of AdamW, where it is another."""

    about: str
    make: Callable[[Shape], Method] | None = None
    library: TopK | LowRank | None = None
    linear: bool = False
    is_update: bool = False
    beta2: float = Settings.beta2


def _own(density: float, rounding: Rounding = EXACT, **options: Any) -> Callable[[Shape], Method]:
    return functools.partial(OwnTopK, density=density, rounding=rounding, **options)


def _mask(density: float, rounding: Rounding, choose: str) -> Callable[[Shape], Method]:
    return functools.partial(SharedMask, density=density, rounding=rounding, choose=choose)


def _low(rank: int, rounding: Rounding = EXACT, **options: Any) -> Callable[[Shape], Method]:
    return functools.partial(LowRankFactors, rank=rank, rounding=rounding, **options)


_EIGHTH, _BETAS = 0.125, (Settings.beta1, Settings.beta2)

PLANS: Mapping[str, Plan] = {
    "dense": Plan("plain averages"),
    **{
        f"library-lowrank-{rank}": Plan(f"LowRank({rank})", library=LowRank(rank))
        for rank in (1, 2, 4, 8, 16, 24, 30, 32)
    },
    "library-topk-1": Plan("TopK(0.01)", library=TopK(0.01)),
    "library-topk-2": Plan("TopK(0.02)", library=TopK(0.02)),
    "library-topk-4": Plan("TopK(0.04)", library=TopK(0.04)),
    "library-topk-2-qsgd4": Plan('TopK(0.02, values="qsgd4")', library=TopK(0.02, values="qsgd4")),
    "library-topk-4-qsgd4": Plan('TopK(0.04, values="qsgd4")', library=TopK(0.04, values="qsgd4")),
    "topk-1": Plan("own top 1 %", _own(0.01)),
    "topk-1-decay": Plan("own top 1 %, residuals times 0.9 a step", _own(0.01, decay=0.9)),
    "topk-1-chunks": Plan("own top 41 of every 4,096", _own(0.01, chunk=4096)),
    "topk-1-scaled": Plan("own top 1 % by residual / sqrt(v)", _own(0.01, power=0.5)),
    "topk-1-half-scaled": Plan("own top 1 % by residual / v^(1/4)", _own(0.01, power=0.25)),
    "topk-1-beta2-99": Plan("own top 1 %, AdamW with beta2 = 0.99", _own(0.01), beta2=0.99),
    "topk-2-random4": Plan("own top 2 %, 4 bits at random", _own(0.02, RANDOM_4)),
    "topk-2-nearest4": Plan("own top 2 %, 4 bits to the nearest", _own(0.02, NEAREST_4)),
    "topk-2-random2": Plan("own top 2 %, 2 bits at random", _own(0.02, Rounding(1, at_random=True))),
    "topk-2-nearest2": Plan("own top 2 %, 2 bits to the nearest", _own(0.02, Rounding(1))),
    "topk-4": Plan("own top 4 %", _own(0.04)),
    "topk-4-random4": Plan("own top 4 %, 4 bits at random", _own(0.04, RANDOM_4)),
    "topk-4-nearest4": Plan("own top 4 %, 4 bits to the nearest", _own(0.04, NEAREST_4)),
    "ideal-3": Plan("the mean's top 3 %, indices for nothing", _mask(0.03, EXACT, "ideal"), linear=True),
    "ideal-12-nearest4": Plan("the mean's top 12.5 %, indices for nothing, 4 bits", _mask(_EIGHTH, NEAREST_4, "ideal")),
    "moment-12-nearest4": Plan("12.5 % by first moments and in turn, 4 bits", _mask(_EIGHTH, NEAREST_4, "moment")),
    "cyclic-12-nearest4": Plan("12.5 % in turn, 4 bits", _mask(_EIGHTH, NEAREST_4, "cyclic")),
    "sketch-12-nearest4": Plan("12.5 % of rows by a sketch, 4 bits", _mask(_EIGHTH, NEAREST_4, "sketch")),
    "local-adam-1": Plan(
        "top 1 % of local Adams' updates, residuals times 0.95",
        functools.partial(LocalAdam, density=0.01, decay=0.95, betas=_BETAS),
        is_update=True,
    ),
    "ef21-momentum-1": Plan("EF21 with momentum 0.9, 1 %", functools.partial(EF21Momentum, density=0.01, momentum=0.9)),
    "lowrank-1": Plan("rank 1", _low(1), linear=True),
    "lowrank-2": Plan("rank 2", _low(2), linear=True),
    "lowrank-16": Plan("rank 16", _low(16), linear=True),
    "lowrank-4": Plan("rank 4", _low(4), linear=True),
    "lowrank-8": Plan("rank 8", _low(8), linear=True),
    "lowrank-8-nearest4": Plan("rank 8, 4 bits", _low(8, NEAREST_4_SHORT)),
    "lowrank-16-nearest8": Plan("rank 16, 8 bits", _low(16, NEAREST_8)),
    "lowrank-16-nearest4": Plan("rank 16, 4 bits", _low(16, NEAREST_4_SHORT)),
    "lowrank-16-random4": Plan("rank 16, 4 bits at random", _low(16, Rounding(7, 64, at_random=True))),
    "lowrank-32-nearest4": Plan("rank 32, 4 bits", _low(32, NEAREST_4_SHORT)),
    "lowrank-64-nearest4": Plan("rank 64, 4 bits", _low(64, NEAREST_4_SHORT)),
    "lowrank-4-scaled": Plan("rank 4, scaled", _low(4, power=0.5), linear=True),
    "lowrank-8-scaled": Plan("rank 8, scaled", _low(8, power=0.5), linear=True),
    "lowrank-8-half-scaled": Plan("rank 8, scaled by v^(1/4)", _low(8, power=0.25), linear=True),
    "lowrank-8-scaled-nearest4": Plan("rank 8, scaled, 4 bits", _low(8, NEAREST_4_SHORT, power=0.5)),
    "lowrank-16-scaled-nearest4": Plan("rank 16, scaled, 4 bits", _low(16, NEAREST_4_SHORT, power=0.5)),
    "lowrank-16-scaled-nearest8": Plan("rank 16, scaled, 8 bits", _low(16, NEAREST_8, power=0.5)),
    "lowrank-32-scaled-nearest4": Plan("rank 32, scaled, 4 bits", _low(32, NEAREST_4_SHORT, power=0.5)),
    "lowrank-64-scaled-nearest4": Plan("rank 64, scaled, 4 bits", _low(64, NEAREST_4_SHORT, power=0.5)),
    "alternating-32-nearest4": Plan("rank 32, 4 bits, one factor a step", _low(32, NEAREST_4_SHORT, alternates=True)),
}


# A run


@dataclass(frozen=True)
class Run:
    """``dense_steps``: the first ones, in which everything is averaged. ``rate``: the learning rate, as a multiple of
    that which suits dense training."""

    method: str
    steps: int
    seed: int
    dense_steps: int = 0
    optimizer: str = "adamw"
    rate: float = 1.0


def optimizers_of(model: nn.Module, settings: Settings, name: str) -> list[torch.optim.Optimizer]:
    """``name``: ``"adamw"``, or ``"muon"`` for the matrices within the blocks, and AdamW for the others."""
    if name == "adamw":
        return [optimizer_of(model, settings)]
    inner: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for key, one in model.named_parameters():
        (inner if one.dim() == 2 and key.startswith("blocks.") else others).append(one)
    muon = torch.optim.Muon(
        inner, lr=settings.learning_rate, weight_decay=settings.weight_decay, adjust_lr_fn="match_rms_adamw"
    )
    return [muon, optimizer_of(nn.ParameterList(others), settings)]


def trained(run: Run, corpus: Corpus, size: ModelSize, on_step: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """A row of ``run``."""
    plan = PLANS[run.method]
    settings = Settings("ddp-gloo", "", run.steps, "lo", seed=run.seed, beta2=plan.beta2, model=size)
    torch.manual_seed(run.seed)
    model = ByteGPT(size)
    optimizers = optimizers_of(model, settings, run.optimizer)
    exchange = _LibraryExchange(model, plan.library) if plan.library else _ReferenceExchange(model, plan)
    sent = 0.0
    begin = time.process_time()
    for step in range(run.steps):
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = run.rate * learning_rate_at(step, settings)
        batches = [
            training_batch(corpus.training, seed=run.seed, step=step, rank=rank, batch=1, context=size.context)
            for rank in range(RANKS)
        ]
        if (plan.make is None and plan.library is None) or step < run.dense_steps:
            _take_gradients(model, [np.concatenate(part) for part in zip(*batches, strict=True)])
            sent += allreduce_bytes(sum(one.numel() for one in model.parameters()))
            step_all(optimizers)
        else:
            exchange.step(batches, optimizers)
        on_step()
    sent += exchange.sent
    exchange.close()
    whole = allreduce_bytes(sum(one.numel() for one in model.parameters()))
    return vars(run) | {
        "about": plan.about,
        "loss": held_out(model, corpus, settings),
        "mb_per_step": sent / run.steps / 1e6,
        "less": whole * run.steps / sent,
        "cpu_s": time.process_time() - begin,
    }


def step_all(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    for one in optimizers:
        one.step()


def held_out(model: nn.Module, corpus: Corpus, settings: Settings) -> float:
    """Nats per byte, on the windows that the demo takes."""
    total, windows = 0.0, settings.validation_windows
    with torch.no_grad():
        for inputs, targets in validation_batches(
            corpus.held_out, windows=windows, batch=8, context=settings.model.context
        ):
            total += loss_of(model(torch.from_numpy(inputs)), torch.from_numpy(targets)).item() * len(inputs)
    return total / windows


def _take_gradients(model: nn.Module, batch: Sequence[npt.NDArray[np.int64]]) -> None:
    model.zero_grad()
    inputs, targets = map(torch.from_numpy, batch)
    loss_of(model(inputs), targets).backward()  # type: ignore[no-untyped-call]


class _LibraryExchange:
    def __init__(self, model: nn.Module, compress: TopK | LowRank) -> None:
        self._model, self._ranks = model, OneProcess(model, RANKS, {"compress": compress})

    @property
    def sent(self) -> float:
        return sum(self._ranks.sent_bytes()) / RANKS

    def step(self, batches: Sequence[Any], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        for rank, batch in enumerate(batches):
            _take_gradients(self._model, batch)
            self._ranks.take(rank)
        self._ranks.average()
        step_all(optimizers)

    def close(self) -> None:
        self._ranks.close()


class _ReferenceExchange:
    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self._model, self._plan, self._sent = model, plan, 0.0
        self._parameters = dict(model.named_parameters())
        self._methods = {
            name: plan.make(tuple(one.shape))
            for name, one in self._parameters.items()
            if plan.make is not None and one.numel() > SMALL_ELEMENTS
        }

    @property
    def sent(self) -> float:
        return self._sent + sum(one.sent for one in self._methods.values())

    def step(self, batches: Sequence[Any], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        if self._plan.linear:
            batches = [[np.concatenate(part) for part in zip(*batches, strict=True)]]
        given = {name: np.empty((len(batches), one.numel()), np.float32) for name, one in self._parameters.items()}
        for rank, batch in enumerate(batches):
            _take_gradients(self._model, batch)
            for name, one in self._parameters.items():
                assert one.grad is not None
                given[name][rank] = one.grad.numpy().reshape(-1)
        updates = {}
        for name, one in self._parameters.items():
            if name in self._methods:
                made = torch.from_numpy(np.ascontiguousarray(self._methods[name].step(given[name])))
            else:
                made = torch.from_numpy(given[name].mean(0))
                self._sent += allreduce_bytes(one.numel())
            one.grad = made.view(one.shape)
            if self._plan.is_update and name in self._methods:
                updates[name], one.grad = one.grad, None
        step_all(optimizers)
        rate, decay = (optimizers[-1].param_groups[0][name] for name in ("lr", "weight_decay"))
        with torch.no_grad():
            for name, update in updates.items():
                self._parameters[name].mul_(1 - rate * decay).add_(update, alpha=-rate)

    def close(self) -> None:
        """Nothing is open."""


ROUNDINGS: Mapping[str, Rounding] = {
    "4 bits at random": RANDOM_4,
    "4 bits to the nearest": NEAREST_4,
    "4 bits to the nearest, a scale for 64": NEAREST_4_SHORT,
    "2 bits at random": Rounding(1, at_random=True),
    "2 bits to the nearest": Rounding(1),
}
DENSITIES = (0.01, 0.02, 0.04, 0.08)


def rounding_losses(corpus: Corpus, size: ModelSize, *, before: int = 20, summed: int = 10) -> list[dict[str, Any]]:
    """What rounding loses of the largest entries of a sum of ``summed`` gradients, after ``before`` dense steps: as a
    share of their energy, and the share of entries whose error is large enough to be sent again."""
    settings = Settings("ddp-gloo", "", 220, "lo", model=size)
    torch.manual_seed(0)
    model = ByteGPT(size)
    optimizer = optimizer_of(model, settings)
    sums = {name: np.zeros(one.numel(), np.float32) for name, one in model.named_parameters()}
    for step in range(before + summed):
        optimizer.param_groups[0]["lr"] = learning_rate_at(step, settings)
        _take_gradients(
            model, training_batch(corpus.training, seed=0, step=step, rank=0, batch=RANKS, context=size.context)
        )
        for name, one in model.named_parameters():
            if step >= before and one.grad is not None:
                sums[name] += one.grad.numpy().reshape(-1)
        optimizer.step()
    rows = []
    for density in DENSITIES:
        for about, rounding in ROUNDINGS.items():
            energy = lost = reach = count = 0.0
            for total in sums.values():
                if total.size > SMALL_ELEMENTS:
                    values = total[largest(np.abs(total), max(1, round(density * total.size)))]
                    error = values - rounding(values[None])[0]
                    energy, lost = energy + float(np.dot(values, values)), lost + float(np.dot(error, error))
                    reach += np.count_nonzero(np.abs(error) >= np.abs(values).min())
                    count += values.size
            rows.append({"density": density, "rounding": about, "lost": lost / energy, "again": reach / count})
    return rows


# Rows, their table and their plot


def done(rows: Sequence[Mapping[str, Any]], run: Run) -> bool:
    """Whether there is a row of this run."""
    return any(run == _run_of(row) for row in rows)


def _run_of(row: Mapping[str, Any]) -> Run:
    return Run(**{name: row[name] for name in Run.__dataclass_fields__ if name in row})


def means(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One for all seeds of a method, in order of loss: ``loss`` is the mean at the method's best learning rate,
    ``spread`` half of the range, and ``behind`` percent above the dense runs of as many steps, at their best rate, on
    the seeds that both have (``None``: none)."""
    groups: dict[tuple[Any, ...], dict[float, dict[int, Mapping[str, Any]]]] = {}
    for row in rows:
        run = _run_of(row)
        kind = (run.optimizer, run.steps, run.method, run.dense_steps)
        groups.setdefault(kind, {}).setdefault(run.rate, {})[run.seed] = row
    best = {kind: _best_rate(by_rate) for kind, by_rate in groups.items()}
    found = []
    for (optimizer, steps, method, dense_steps), rate in best.items():
        own = groups[optimizer, steps, method, dense_steps][rate]
        dense = best.get((optimizer, steps, "dense", 0))
        dense_runs = {} if dense is None else groups[optimizer, steps, "dense", 0][dense]
        losses = [row["loss"] for row in own.values()]
        both = [(row["loss"], dense_runs[seed]["loss"]) for seed, row in own.items() if seed in dense_runs]
        behind = 100 * (sum(one for one, _ in both) / sum(other for _, other in both) - 1) if both else None
        found.append(
            {"optimizer": optimizer, "method": method, "about": next(iter(own.values()))["about"], "rate": rate}
            | {"steps": steps, "dense_steps": dense_steps, "seeds": len(own)}
            | {"loss": sum(losses) / len(own), "spread": (max(losses) - min(losses)) / 2, "behind": behind}
            | {name: sum(row[name] for row in own.values()) / len(own) for name in ("mb_per_step", "less")}
        )
    return sorted(found, key=lambda row: (row["optimizer"], row["steps"], row["loss"]))


def _best_rate(by_rate: Mapping[float, Mapping[int, Mapping[str, Any]]]) -> float:
    """Of those with the most seeds, that of the lowest mean loss."""
    most = max(map(len, by_rate.values()))
    losses = {rate: sum(row["loss"] for row in own.values()) for rate, own in by_rate.items() if len(own) == most}
    return min(losses, key=losses.__getitem__)


def table_of(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Rows of all seeds, as ``means``."""
    table = Table(box=None, pad_edge=False)
    columns = "optimizer", "steps", "method", "", "rate", "dense steps", "seeds", "held-out loss", "above dense"
    for name in (*columns, "MB a step", "less"):
        table.add_column(name, justify="left" if name in ("optimizer", "method", "") else "right")
    for row in means(rows):
        loss = f"{row['loss']:.4f}" + (f" ± {row['spread']:.4f}" if row["seeds"] > 1 else "")
        behind = "" if row["behind"] is None else f"{row['behind']:+.2f} %"
        counts = f"{row['rate']:g}", str(row["dense_steps"]), str(row["seeds"])
        table.add_row(
            *(row["optimizer"], str(row["steps"]), row["method"], row["about"], *counts, loss, behind),
            *(f"{row['mb_per_step']:.3f}", f"1/{row['less']:.0f}"),
        )
    return table


def rounding_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Of ``rounding_losses``."""
    table = Table(box=None, pad_edge=False)
    for name in ("density", "rounding", "lost energy", "errors as large as entries that are sent"):
        table.add_column(name, justify="left" if name == "rounding" else "right")
    for row in rows:
        shares = f"{100 * row['lost']:.1f} %", f"{100 * row['again']:.1f} %"
        table.add_row(f"{100 * row['density']:g} %", row["rounding"], *shares)
    return table


FAMILIES: dict[str, tuple[str, ...]] = {
    "top-k": ("topk", "library-topk"),
    "low rank": ("lowrank", "library-lowrank", "alternating"),
}
FAMILIES |= {"one mask for all ranks": ("ideal", "moment", "cyclic", "sketch")}
FAMILIES |= {"others": ("local-adam", "ef21")}


def plot(rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """How far methods are above dense runs of the same seeds, over bytes: a panel for each number of steps. PNG unless
    the suffix says otherwise. Raises ``ValueError`` where nothing can be compared with a dense run."""
    found = [row for row in means(rows) if row["behind"] is not None and row["method"] != "dense"]
    if not found:
        raise ValueError("no method has a dense run of its seeds and steps beside it: train dense too")
    counts = sorted({row["steps"] for row in found})
    with picture(path, title, height=3.6 * len(counts)) as figure:
        for axes, steps in zip(figure.subplots(len(counts), 1, squeeze=False).flat, counts, strict=True):
            own = [row for row in found if row["steps"] == steps]
            for color, (family, names) in zip(COLORS, FAMILIES.items(), strict=False):
                points = [(row["mb_per_step"], row["behind"]) for row in own if row["method"].startswith(names)]
                if points:
                    axes.plot(*zip(*points, strict=True), "o", color=color, label=family, linestyle="none")
            axes.set(xlabel="sent by a rank in a step (MB)", ylabel="loss above dense, same seeds (%)")
            axes.axhline(0, color=GREY, linewidth=0.8)
            axes.set_title(f"{steps} steps")
            axes.legend(frameon=False)


def picture_title() -> str:
    """Without the day."""
    return f"held-out loss by bytes, GPT with AdamW, {RANKS} ranks"


# The command


def command(
    methods: Annotated[str, typer.Option(help="Names, separated by commas; all without.", show_default=False)] = "",
    steps: Annotated[int, typer.Option(min=1, help="Training steps of a run.")] = 220,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each method.")] = 1,
    dense_steps: Annotated[int, typer.Option(min=0, help="First steps in which everything is averaged.")] = 0,
    optimizer: Annotated[Literal["adamw", "muon"], typer.Option(help="Muon is for matrices within blocks.")] = "adamw",
    rates: Annotated[
        str, typer.Option(help="Learning rates, as multiples of what suits dense training; the table has the best.")
    ] = "1",
    width: Annotated[int, typer.Option(min=7, help="Of the model: 448 has 5.3 million parameters.")] = ModelSize.width,
    rounding: Annotated[
        bool, typer.Option("--rounding", help="Train nothing: say what rounding loses of the largest entries.")
    ] = False,
    text: TextFolder = None,
    json_file: RowsFile = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", dir_okay=False, help="Draw loss over bytes (PNG, SVG, PDF).")
    ] = None,
) -> None:
    """Train a GPT with AdamW or Muon, compressing gradients in many ways, on one thread.

    Runs of which the file of [bold]--json[/] has a row already are not made again: the same command goes on.

    [bold]Example:[/] python -m lab adamw --methods dense,topk-1,lowrank-16-nearest4 --json rows.json
    """
    console = table_console()
    names = among(methods, tuple(PLANS), "--methods") if methods else tuple(PLANS)
    check_all_writable({"--json": json_file, "--plot": plot_file})
    if plot_file is not None and importlib.util.find_spec("matplotlib") is None:
        raise typer.BadParameter("matplotlib is not installed: pip install 'telegrad[cli]'", param_hint="--plot")
    if plot_file is not None and ("dense" not in names or len(names) < 2):
        raise typer.BadParameter("--plot compares with dense: name it in --methods, with others", param_hint="--plot")
    size = ModelSize(width=width)
    if width % size.heads:
        raise typer.BadParameter(f"{width} is no multiple of {size.heads}, the heads: use 56", param_hint="--width")
    multiples = positive_numbers(rates, "--rates", "0.7,1,1.4")
    machine = describe_machine()
    result = GrowingResult(json_file, {"machine": machine, "width": width})
    if json_file is not None and json_file.is_file() and json_file.stat().st_size:
        result.rows += json.loads(json_file.read_text())["rows"]
    wanted = [
        Run(name, steps, seed, 0 if name == "dense" else dense_steps, optimizer, rate)
        for seed in range(seeds)
        for name in names
        for rate in multiples
    ]
    missing = [run for run in wanted if not done(result.rows, run)]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, counting(console) as progress:
        corpus = Corpus.prepare(Path(folder), text)
        if rounding:
            console.print(rounding_table(rounding_losses(corpus, size)))
            return
        for run in missing:
            bar = progress.add_task(f"{run.method}, seed {run.seed}", total=run.steps)
            result.add(trained(run, corpus, size, lambda bar=bar: progress.advance(bar)))  # type: ignore[misc]
            progress.remove_task(bar)
    rows = [row for row in result.rows if _run_of(row) in wanted]
    console.print(table_of(rows))
    console.print(machine_text(machine), style="dim")
    if plot_file is not None:
        with drawn(console, plot_file):
            plot(result.rows, dated(picture_title()), plot_file)
    result.end(console)


def positive_numbers(text: str, option: str, example: str) -> list[float]:
    """Of a list with commas. Raises ``BadParameter``."""
    try:
        found = [float(one) for one in text.split(",")]
    except ValueError:
        found = [0.0]
    if not all(0 < one < math.inf for one in found):
        raise typer.BadParameter(f"{text!r} is no list of positive numbers: use {example}", param_hint=option)
    return found
