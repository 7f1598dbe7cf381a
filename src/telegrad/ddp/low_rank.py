"""PowerSGD over telegrad's collectives: each gradient matrix travels as the product of two narrow ones.

Source: Vogels, Karimireddy, Jaggi, NeurIPS 2019, Algorithms 1 and 2. What a rank keeps is its own matrix less the part
of it that was sent, P Pᵀ M. The paper keeps M less the average that came back; both have the same mean over ranks, so
the averages are the same, and this residual does not hold how ranks differ. P and Q may travel in fewer bits. The error
of P changes nothing, as all ranks make the same basis of its average; that of Q, times P, goes back to the residual.

The first basis of a matrix is not the paper's: it is some rows of the matrix, which go as they are. Models of our study
then end nearer to dense training (docs/results/adamw.md).
"""

from __future__ import annotations

import math
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
from telegrad.ddp.exchange import Exchange, Sending, TopkStates
from telegrad.ddp.options import LowRank, compressions_by
from telegrad.kernels.floats import as_float32, count_nonfinite

Floats = npt.NDArray[np.float32]


class MatrixShape(NamedTuple):
    """A parameter's gradient as a matrix, and of what rank it travels."""

    rows: int
    columns: int
    rank: int

    @property
    def words(self) -> int:
        """How many numbers of it each rank sends."""
        return (self.rows + self.columns) * self.rank


def shape_of(parameter: torch.Tensor, rank: int) -> MatrixShape:
    """The first dimension's elements are the rows."""
    rows = parameter.shape[0]
    columns = parameter.numel() // rows
    return MatrixShape(rows, columns, min(rank, rows, columns))


def orthonormal(columns: Floats) -> Floats:
    """The columns one after another made orthogonal to those before and of length 1. One that depends on those before
    becomes zero. The same bits on every CPU. They lie one after another in memory, as the transpose of an array."""
    lines = np.ascontiguousarray(columns.T)
    made = np.empty(columns.shape, np.float32)
    _core.orthonormal_basis(lines.ctypes.data, len(lines), len(columns), made.ctypes.data)
    return made


def first_basis(columns: Floats) -> Floats:
    """Made of the first P that is not zero. Each column is the unit vector of a row of the matrix. These rows lie at
    equal distances among those with a gradient. A column for which there is no row is zero."""
    rows = np.flatnonzero(columns.any(axis=1))
    chosen = np.arange(min(len(rows), columns.shape[1]))
    made = np.zeros(columns.shape, np.float32)
    if chosen.size:
        made[rows[chosen * len(rows) // chosen.size], chosen] = 1
    return made


def squared_lengths(matrix: Floats) -> npt.NDArray[np.float64]:
    """Of its columns. The same bits on every CPU."""
    found = np.empty(matrix.shape[1])
    rows = np.ascontiguousarray(matrix)
    _core.squared_lengths(rows.ctypes.data, len(matrix), len(found), found.ctypes.data)
    return found


def product(basis: Floats, lines: Floats, out: Floats) -> None:
    """Writes ``basis @ lines`` by rows into ``out``, a flat array: the same bits on every CPU."""
    left, right = np.ascontiguousarray(basis), np.ascontiguousarray(lines)
    _core.low_rank_product(
        *(left.ctypes.data, len(basis), right.ctypes.data, lines.shape[1], len(lines), out.ctypes.data)
    )


class Scales(NamedTuple):
    """Powers of two by column, by which P and Q are divided before they are averaged, so that all their numbers are
    near 1: a format of few bits has one scale for neighbours, which may be of other columns and other matrices."""

    of_p: Floats
    of_q: Floats


def scales_of(factor: Floats, shape: MatrixShape) -> Scales:
    """What the previous Q says of the lengths of the next P and Q. The same bits on every CPU.

    Column k of Q has the length s, a singular value, so that of M Q has s² and that of the next Q s again."""
    _, squares = np.frexp(squared_lengths(factor))
    most = np.int32(60)
    of_p = np.clip(squares - shape.rows.bit_length() // 2, -most, most)
    of_q = np.clip(squares // 2 - shape.columns.bit_length() // 2, -most, most)
    return Scales(np.ldexp(np.float32(1), of_p), np.ldexp(np.float32(1), of_q))


def first_factor(name: str, shape: MatrixShape) -> Floats:
    """Q before the first step: random, the same on all ranks. Its P says which rows have a gradient."""
    random = np.random.default_rng(zlib.crc32(name.encode()))
    return random.standard_normal((shape.columns, shape.rank), np.float32)


def order_of(names: Sequence[str], fresh: Sequence[bool]) -> list[int]:
    """In which matrices lie in a message."""
    return sorted(range(len(names)), key=lambda number: (fresh[number], names[number]))


class PackedMatrices:
    """Matrices of these ``shapes``, one after another in ``values``, that are averaged together in messages of that
    ``wire``; those that are ``fresh`` lie behind the others, and go as they are. They lie in the order of ``names``,
    not of the bucket, as rounding depends on the neighbours with which a number shares a scale."""

    def __init__(
        self, names: Sequence[str], shapes: Sequence[tuple[int, int]], fresh: Sequence[bool], wire: str | None
    ) -> None:
        self._shapes, self._wire = shapes, wire
        self._places, place = [0] * len(shapes), 0
        for number in order_of(names, fresh):
            self._places[number] = place
            place += math.prod(shapes[number])
        self._known = sum(math.prod(shape) for shape, is_fresh in zip(shapes, fresh, strict=True) if not is_fresh)
        self.values = np.zeros(place, np.float32)

    def matrices(self, values: Floats | None = None) -> list[Floats]:
        """Views of ``values``, or of an array like them."""
        held = self.values if values is None else values
        places = zip(self._shapes, self._places, strict=True)
        return [held[place : place + math.prod(shape)].reshape(shape) for shape, place in places]

    def average(self, comm: Communicator, lost: Floats | None = None) -> list[Work]:
        """Starts it. ``lost``: zeros, which become what rounding loses."""
        works = []
        if self._known and self._wire is not None:
            known, error = self.values[: self._known], None if lost is None else lost[: self._known]
            works.append(comm.all_reduce(known, "avg", wire=self._wire, error=error, async_op=True))
        exact = self.values if self._wire is None else self.values[self._known :]
        if exact.size:
            works.append(comm.all_reduce(exact, "avg", async_op=True))
        return works


@dataclass(slots=True)
class FirstRound:
    """A bucket whose P are being averaged. ``gives``: which of its matrices have a gradient of this rank in them.
    ``begun``: its other members."""

    layout: BucketLayout
    bits: Bits
    averages: list[Floats]  # P by columns
    scales: list[Scales]
    gives: list[bool]
    norms: list[float]
    begun: Sending
    works: list[Work]

    def wait(self) -> None:
        """Until the network is done with its memory."""
        for one in (*self.works, *self.begun.works):
            one.wait()


class LowRankRounds:
    """Sends buckets in two rounds, P and Q. ``compressor`` has the residuals of those ``parameters`` that do not go as
    they are; ``factors`` the Q of those that are matrices of these ``shapes``; ``wire``: how P and Q travel, and
    parameters that are sent whole. ``held``: what this rank has of the parameters, if not all of them. Raises
    ``TypeError`` and ``ValueError`` for what a policy says."""

    def __init__(
        self,
        comm: Communicator,
        parameters: Mapping[str, torch.nn.Parameter],
        options: LowRank,
        held: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        own = parameters if held is None else held
        chosen = {name: one for name, one in compressions_by(options.per_parameter, parameters).items() if name in own}
        self._comm = comm
        self.wire = None if options.values == "f32" else options.values
        fitting = {name for name, one in own.items() if one.dtype in COMPRESSIBLE and one.numel()}
        whole = sorted(fitting - chosen.keys()) if chosen and self.wire is not None else []
        self.shapes = {name: shape_of(own[name], one.rank) for name, one in chosen.items() if one.rank is not None}
        densities = {name: one.density for name, one in chosen.items()}
        densities |= {name: min(1.0, one.words / (one.rows * one.columns)) for name, one in self.shapes.items()}
        self.compressor = Compressor(
            {name: own[name].numel() for name in (*chosen, *whole)},
            densities=densities,
            selections={name: one.selection for name, one in chosen.items() if one.selection is not None},
            matrices=self.shapes,
            whole=whole,
        )
        self.begin_anew()

    def begin_anew(self) -> None:
        """With the factors of the first step. Residuals stay."""
        self.factors = {name: first_factor(name, shape) for name, shape in self.shapes.items()}
        self.fresh = {*self.factors}  # those whose Q says nothing yet of how large P is

    @property
    def keeps_all(self) -> bool:
        """Whether an average is zero only where all gradients are: in 8 bits a P that is much smaller than others of
        its scale becomes zero, and waits until the residual is large enough."""
        return self.wire is None

    def move_to(self, comm: Communicator) -> None:
        """Averages are made there from now on."""
        self._comm = comm

    def begin(self, exchange: Exchange, layout: BucketLayout, bits: Bits, *, sound: bool) -> FirstRound:
        """Adds the gradients to the residuals, and starts the averages of P = M Q, and of all members that are no
        matrices. ``sound``: as for ``Exchange.send``.

        A matrix with NaN or infinity, or with which the residual would overflow, makes its average NaN on all ranks,
        and leaves the residual alone."""
        flat = as_float32(bits)
        shapes = [self.shapes[part.entry.name] for part in layout.matrices]
        packed = self._packed(layout, [(one.rank, one.rows) for one in shapes])
        averages = packed.matrices()
        scales, gives, norms = [], [], []
        for part, shape, p in zip(layout.matrices, shapes, averages, strict=True):
            gradient = flat[part.offset : part.offset + part.entry.size]
            factor = self.factors[part.entry.name]
            scales.append(scales_of(factor, shape))
            given = None
            if sound or self._is_sound(part, gradient, flat):
                given = self._given(part, gradient, np.ascontiguousarray((factor / scales[-1].of_p).T), p)
            gives.append(given is True)
            norms.append(norm(gradient) if self.compressor.observer is not None else 0.0)
            if not given:
                p.fill(0 if given is False else np.nan)
        works = packed.average(self._comm)
        begun = exchange.send(layout, bits, sound=sound)
        return FirstRound(layout, bits, averages, scales, gives, norms, begun, works)

    def _packed(self, layout: BucketLayout, shapes: Sequence[tuple[int, int]]) -> PackedMatrices:
        names = [part.entry.name for part in layout.matrices]
        return PackedMatrices(names, shapes, [name in self.fresh for name in names], self.wire)

    def _given(self, part: PlacedResidual, gradient: Floats, lines: Floats, p: Floats) -> bool:
        """Whether there is anything in the gradient, which then is in the residual, whose product is in ``p``."""
        return not all_zero(gradient) and self.compressor.add_matrix(part, gradient, lines, p)

    def _is_sound(self, part: PlacedResidual, gradient: Floats, flat: Floats) -> bool:
        return not count_nonfinite(gradient) and not self.compressor.overflowing((part,), flat).size

    def finish(self, first: FirstRound) -> Sending:
        """Waits for P, and starts the averages of Q. If the step is kept, residuals lose what is sent."""
        for work in first.works:
            work.wait()
        matrices, bits = first.layout.matrices, first.bits
        shapes = [self.shapes[part.entry.name] for part in matrices]
        packed = self._packed(first.layout, [(one.rank, one.columns) for one in shapes])
        averages = packed.matrices()
        sound = [bool(np.isfinite(p).all()) for p in first.averages]
        bases = [
            self._basis(part.entry.name, p.T) if is_sound else p.T
            for part, p, is_sound in zip(matrices, first.averages, sound, strict=True)
        ]
        gives = [gives and is_sound for gives, is_sound in zip(first.gives, sound, strict=True)]
        for number, (part, shape, q) in enumerate(zip(matrices, shapes, averages, strict=True)):
            q.fill(0)  # where P is NaN all ranks know
            if gives[number]:
                basis, matrix = bases[number], part.entry.values
                _core.multiply_transposed(basis.ctypes.data, matrix.ctypes.data, *shape, q.ctypes.data)
                q /= first.scales[number].of_q[:, None]
                if not np.isfinite(q).all():
                    gives[number] = False
                    q.fill(np.nan)
        own = packed.values.copy()
        for number, q in enumerate(packed.matrices(own)):
            if not gives[number]:
                q.fill(0)
        self._observe(first, shapes, packed.matrices(own))
        lost = None if self.wire is None else np.zeros_like(packed.values)
        works = packed.average(self._comm, lost)

        def write() -> None:
            for part, basis, q, is_sound, scales in zip(matrices, bases, averages, sound, first.scales, strict=True):
                into = bits[part.offset : part.offset + part.entry.size]
                average = into if into.dtype == np.float32 else np.empty(into.size, np.float32)
                if is_sound:
                    product(basis, q * scales.of_q[:, None], average)
                else:
                    average.fill(np.nan)
                if average is not into:
                    into[:] = rounded_to_bf16(average)

        def keep() -> None:
            sent = own if lost is None else own - np.nan_to_num(lost, copy=False, posinf=0, neginf=0)
            both = zip(averages, packed.matrices(sent), strict=True)
            for part, basis, (q, taken), is_sound, scales in zip(
                matrices, bases, both, sound, first.scales, strict=True
            ):
                if is_sound:
                    self._start_next_from(part.entry.name, (q * scales.of_q[:, None]).T)
                if is_sound and taken.any():
                    self.compressor.subtract_product(part, basis, taken * scales.of_q[:, None])

        words, begun = sum(one.words for one in shapes), first.begun
        return Sending([*begun.works, *works], words + begun.nnz, [*begun.writes, write], [*begun.keeps, keep])

    def _basis(self, name: str, average: Floats) -> Floats:
        return first_basis(average) if name in self.fresh else orthonormal(average)

    def _observe(self, first: FirstRound, shapes: Sequence[MatrixShape], sent: Sequence[Floats]) -> None:
        """``sent``: Q of each, whose length is that of the product, since P is orthonormal."""
        if (observer := self.compressor.observer) is None:
            return
        unit = self.compressor.gradient_unit
        for part, shape, given, q, scales in zip(
            first.layout.matrices, shapes, first.norms, sent, first.scales, strict=True
        ):
            entry, words = part.entry, shape.words
            left = math.sqrt(max(0.0, norm(entry.values) ** 2 - norm((q * scales.of_q[:, None]).reshape(-1)) ** 2))
            observer(Observation(entry.name, entry.size, words, words, given * unit, left * unit, None))

    def _start_next_from(self, name: str, average: Floats) -> None:
        """A column that has nothing in it would give nothing for ever: the one before stays, made about as long as the
        shortest of the others, with which it shares a scale."""
        usable = np.isfinite(average).all(axis=0) & (average != 0).any(axis=0)
        if usable.any():
            factor = self.factors[name]
            factor[:, usable] = average[:, usable]
            if not usable.all():
                exponents = np.frexp(squared_lengths(factor))[1] // 2
                factor[:, ~usable] = np.ldexp(factor, exponents[usable].min() - exponents)[:, ~usable]
            self.fresh.discard(name)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """A copy of Q by parameter, of shape (columns, rank)."""
        return {name: torch.from_numpy(factor.copy()) for name, factor in self.factors.items()}

    def fitting(self, saved: Any) -> dict[str, Floats]:
        """What ``state_dict()`` gave of the same model and rank, for ``load``. Raises ``ValueError`` for anything
        else."""
        found = {name: np.asarray(one) for name, one in saved.items()} if isinstance(saved, Mapping) else {}
        rank = max((one.shape[-1] for one in found.values() if one.ndim == 2), default=0)
        own = max((one.rank for one in self.shapes.values()), default=0)
        if found and own and rank != own:
            raise ValueError(
                f"state['factors'] is of rank {rank}, but compress= here of rank {own}: load it with "
                f"compress=telegrad.LowRank(rank={rank})"
            )
        if not isinstance(saved, Mapping) or saved.keys() != self.factors.keys():
            raise ValueError(
                "state['factors'] is not of these parameters: load what state_dict() gave with the same model and "
                "compress=telegrad.LowRank(…)"
            )
        for name, one in found.items():
            expected = self.factors[name].shape
            if one.shape != expected or one.dtype != np.float32 or not np.isfinite(one).all():
                raise ValueError(
                    f"state['factors'][{name!r}] is {one.dtype} of shape {one.shape}: it must be finite float32 of "
                    f"shape {expected}, so load it with the same rank="
                )
        return found

    def load(self, fitting: Mapping[str, Floats]) -> None:
        """Takes over what ``fitting`` has found."""
        self.factors = {name: one.copy() for name, one in fitting.items()}
        self.fresh = {
            name for name, one in fitting.items() if np.array_equal(one, first_factor(name, self.shapes[name]))
        }


def load_remembered(
    state: Mapping[str, Any],
    entries: Any,
    compressor: Compressor,
    sums: TopkStates | None,
    low_rank: LowRankRounds | None,
    *,
    least_density: float,
) -> None:
    """Takes a rank's ``state`` over, with the compressor's ``entries`` in the order of memory. Raises ``ValueError``
    where it does not fit, or is of other options; then nothing is changed."""
    fitting = {} if sums is None else sums.fitting(state.get("sums", ()))
    factors = {} if low_rank is None else low_rank.fitting(state.get("factors"))
    if low_rank is None and "factors" in state:
        raise ValueError("state has factors of compress=LowRank(…): load it with the same compress=")
    compressor.load_state_dict(entries, least_density=least_density)
    if sums is not None:
        sums.load(fitting)
    if low_rank is not None:
        low_rank.load(factors)
