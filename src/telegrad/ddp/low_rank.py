"""PowerSGD over telegrad's collectives: each gradient matrix travels as the product of two narrow ones.

Source: Vogels, Karimireddy, Jaggi, NeurIPS 2019, Algorithms 1 and 2. What a rank keeps is its own matrix less the part
of it that was sent, P Pᵀ M. The paper keeps M less the average that came back; both have the same mean over ranks, so
the averages are the same, and this residual does not hold how ranks differ.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from telegrad import _core
from telegrad.communicator import Communicator, Work
from telegrad.compress import Compressor, PlacedResidual
from telegrad.compress.compressor import Observation
from telegrad.compress.residual import all_zero, norm
from telegrad.ddp.bucket import COMPRESSIBLE, Bits, BucketLayout, rounded_to_bf16
from telegrad.ddp.exchange import Exchange, Sending
from telegrad.ddp.options import LowRank
from telegrad.kernels.floats import as_float32, count_nonfinite

Floats = npt.NDArray[np.float32]
_DEPENDENT = 1e-6  # of a column's length: what is left of it beside the others is rounding


class MatrixShape(NamedTuple):
    """A parameter's gradient as a matrix, and of what rank it travels."""

    rows: int
    columns: int
    rank: int

    @property
    def words(self) -> int:
        """How many numbers of it each rank sends."""
        return (self.rows + self.columns) * self.rank


def shape_of(parameter: torch.nn.Parameter, options: LowRank) -> MatrixShape | None:
    """The first dimension's elements are the rows. ``None``: it is sent whole, as more than half of it would travel."""
    size = parameter.numel()
    if parameter.dim() < 2 or size <= options.small_elements or parameter.dtype not in COMPRESSIBLE:
        return None
    rows = parameter.shape[0]
    shape = MatrixShape(rows, size // rows, min(options.rank, rows, size // rows))
    return shape if 2 * shape.words <= size else None


def orthonormal(columns: Floats) -> Floats:
    """The columns one after another made orthogonal to those before and of length 1. One that depends on those before
    becomes zero. The same bits on every CPU: numbers are added in pairs, in an order of our own."""
    made = columns.astype(np.float64)
    lengths = np.sqrt(_total(made * made))
    for number in range(made.shape[1]):
        own = made[:, number]
        length = np.sqrt(_total(own * own))
        if not length > _DEPENDENT * lengths[number]:
            own[:] = 0
            continue
        own /= length
        others = made[:, number + 1 :]
        if others.size:
            others -= own[:, None] * _total(own[:, None] * others)
    return made.astype(np.float32)


def _total(x: npt.NDArray[np.float64]) -> Any:
    """The sum over the first dimension, whose halves are added again and again."""
    while len(x) > 1:
        half = (len(x) + 1) // 2
        sums = x[:half].copy()
        sums[: len(x) - half] += x[half:]
        x = sums
    return x[0]


def product(basis: Floats, factor: Floats, out: Floats) -> None:
    """Writes ``basis @ factor.T`` by rows into ``out``, a flat array: the same bits on every CPU."""
    left, right = np.ascontiguousarray(basis), np.ascontiguousarray(factor.T)
    _core.low_rank_product(
        *(left.ctypes.data, len(basis), right.ctypes.data, len(factor), basis.shape[1], out.ctypes.data)
    )


def first_factor(name: str, shape: MatrixShape) -> Floats:
    """Q before the first step: random, the same on all ranks."""
    random = np.random.default_rng(zlib.crc32(name.encode()))
    return random.standard_normal((shape.columns, shape.rank), np.float32)


@dataclass(slots=True)
class FirstRound:
    """A bucket whose P are being averaged. ``gives``: which of its parts have a gradient of this rank in them.
    ``begun``: what else travels with it."""

    layout: BucketLayout
    bits: Bits
    averages: list[Floats]
    gives: list[bool]
    norms: list[float]
    begun: Sending
    work: Work

    def wait(self) -> None:
        """Until the network is done with its memory."""
        for one in (self.work, *self.begun.works):
            one.wait()


class LowRankRounds:
    """Sends buckets in two rounds, P and Q. ``compressor`` has the residuals of those ``parameters`` that are not sent
    whole."""

    def __init__(self, comm: Communicator, parameters: Mapping[str, torch.nn.Parameter], options: LowRank) -> None:
        shapes = {name: shape_of(parameter, options) for name, parameter in parameters.items()}
        self._comm = comm
        self._shapes = {name: shape for name, shape in shapes.items() if shape is not None}
        sizes = {name: one.rows * one.columns for name, one in self._shapes.items()}
        densities = {name: one.words / sizes[name] for name, one in self._shapes.items()}
        self.compressor = Compressor(sizes, densities=densities)
        self._factors = {name: first_factor(name, shape) for name, shape in self._shapes.items()}

    def begin(self, exchange: Exchange, layout: BucketLayout, bits: Bits, *, sound: bool) -> FirstRound:
        """Adds the gradients to the residuals, and starts the averages of P = M Q. ``sound``: as for
        ``Exchange.send``.

        A gradient with NaN or infinity, or with which the residual would overflow, makes its average NaN on all ranks,
        and leaves the residual alone.
        """
        begun = Sending([])
        if layout.dense_runs:
            exchange.send_dense_members(layout, bits, begun)
        flat = as_float32(bits)
        shapes = [self._shapes[part.entry.name] for part in layout.parts]
        both = np.empty(sum(one.rows * one.rank for one in shapes), np.float32)
        averages = _matrices(both, [(one.rows, one.rank) for one in shapes])
        gives, norms = [], []
        for part, shape, p in zip(layout.parts, shapes, averages, strict=True):
            gradient = flat[part.offset : part.offset + part.entry.size]
            given = self._given(part, gradient) if sound or self._is_sound(part, gradient, flat) else None
            gives.append(given is True)
            norms.append(norm(gradient) if self.compressor.observer is not None else 0.0)
            if given:
                np.matmul(_matrix(part, shape), self._factors[part.entry.name], out=p)
            else:
                p.fill(0 if given is False else np.nan)
        work = self._comm.all_reduce(both, "avg", async_op=True)
        assert work is not None
        return FirstRound(layout, bits, averages, gives, norms, begun, work)

    def _given(self, part: PlacedResidual, gradient: Floats) -> bool:
        """Whether there is anything in the gradient, which then is in the residual."""
        return not all_zero(gradient) and self.compressor.add(part, gradient)

    def _is_sound(self, part: PlacedResidual, gradient: Floats, flat: Floats) -> bool:
        return not count_nonfinite(gradient) and not self.compressor.overflowing((part,), flat).size

    def finish(self, first: FirstRound) -> Sending:
        """Waits for P, takes what is sent out of the residuals, and starts the averages of Q."""
        first.wait()
        layout, bits = first.layout, first.bits
        shapes = [self._shapes[part.entry.name] for part in layout.parts]
        both = np.empty(sum(one.columns * one.rank for one in shapes), np.float32)
        averages = _matrices(both, [(one.columns, one.rank) for one in shapes])
        bases = []
        for part, shape, p, q, gives in zip(layout.parts, shapes, first.averages, averages, first.gives, strict=True):
            sound = bool(np.isfinite(p).all())
            bases.append(orthonormal(p) if sound else p)
            if not sound or not gives:
                q.fill(0 if sound else np.nan)
                continue
            matrix = _matrix(part, shape)
            np.matmul(matrix.T, bases[-1], out=q)
            torch.from_numpy(matrix).addmm_(torch.from_numpy(bases[-1]), torch.from_numpy(q).T, alpha=-1)
            part.entry.peak = norm(part.entry.values)
        self._observe(first, shapes)
        work = self._comm.all_reduce(both, "avg", async_op=True)
        assert work is not None

        def write() -> None:
            for part, basis, q in zip(layout.parts, bases, averages, strict=True):
                own = bits[part.offset : part.offset + part.entry.size]
                if own.dtype == np.float32:
                    product(basis, q, own)
                else:
                    average = np.empty(own.size, np.float32)
                    product(basis, q, average)
                    own[:] = rounded_to_bf16(average)

        def keep() -> None:
            for part, q in zip(layout.parts, averages, strict=True):
                self._start_next_from(part.entry.name, q)

        words = sum(one.words for one in shapes)
        return Sending([work], words, [*first.begun.writes, write], [*first.begun.keeps, keep])

    def _observe(self, first: FirstRound, shapes: Sequence[MatrixShape]) -> None:
        if (observer := self.compressor.observer) is None:
            return
        unit = self.compressor.gradient_unit
        for part, shape, given in zip(first.layout.parts, shapes, first.norms, strict=True):
            entry, words = part.entry, shape.words
            observer(Observation(entry.name, entry.size, words, words, given * unit, norm(entry.values) * unit, None))

    def _start_next_from(self, name: str, average: Floats) -> None:
        """A column that has nothing in it would give nothing for ever: the one before stays."""
        usable = np.isfinite(average).all(axis=0) & (average != 0).any(axis=0)
        self._factors[name][:, usable] = average[:, usable]

    def state_dict(self) -> dict[str, torch.Tensor]:
        """A copy of Q by parameter, of shape (columns, rank)."""
        return {name: torch.from_numpy(factor.copy()) for name, factor in self._factors.items()}

    def fitting(self, saved: Any) -> dict[str, Floats]:
        """What ``state_dict()`` gave of the same model and rank, for ``load``. Raises ``ValueError`` for anything
        else."""
        if not isinstance(saved, Mapping) or saved.keys() != self._factors.keys():
            raise ValueError(
                "state['factors'] is not of these parameters: load what state_dict() gave with the same model and "
                "compress=telegrad.LowRank(…)"
            )
        found = {name: np.asarray(one) for name, one in saved.items()}
        for name, one in found.items():
            expected = self._factors[name].shape
            if one.shape != expected or one.dtype != np.float32 or not np.isfinite(one).all():
                raise ValueError(
                    f"state['factors'][{name!r}] is {one.dtype} of shape {one.shape}: it must be finite float32 of "
                    f"shape {expected}, so load it with the same rank="
                )
        return found

    def load(self, fitting: Mapping[str, Floats]) -> None:
        """Takes over what ``fitting`` has found."""
        self._factors = {name: one.copy() for name, one in fitting.items()}


def _matrix(part: PlacedResidual, shape: MatrixShape) -> Floats:
    return part.entry.values.reshape(shape.rows, shape.columns)


def _matrices(both: Floats, shapes: Sequence[tuple[int, int]]) -> list[Floats]:
    """Views of one array, one after another."""
    ends = np.cumsum([rows * columns for rows, columns in shapes])
    pieces = np.split(both, ends[:-1]) if shapes else []
    return [piece.reshape(shape) for piece, shape in zip(pieces, shapes, strict=True)]
