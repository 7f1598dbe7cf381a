"""Random block coordinate descent among ranks that hold rows, for comparisons: SparCML §8.2; Wright 2015 (its [53]).

A step's block has ``coordinates`` features for each rank, drawn alike on all ranks. Each rank moves its own part of
the block, so that the ranks' contributions lie in different slices of the model. An allgather of indices and changes
brings them to all ranks. A coordinate's derivative needs all rows, and ranks hold rows. So each rank sums over its
own rows for the whole block, and a reduce-scatter gives each part's sums to the rank that moves it. Each rank then
adds the block's changes to the scores of its rows, and no score ever travels. (With columns held by ranks derivatives
would be free, but each step would have to send the changed scores of all rows with any feature of the block: with
popular features nearly all.)

The move minimises a bound of the objective that holds for the whole block at once (``core/linear/columns.hpp``). So no
step makes the objective worse, and there is no learning rate. The more entries a row has in a block, the shorter the
bound makes the moves: on dense rows large blocks hardly move at all, and telegrad's Newton steps are better everywhere.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from telegrad import Communicator, SparseVector, _core
from telegrad.linear import LinearModel, Rows, TrainingSettings
from telegrad.linear.losses import CURVATURE_BOUND, F32, F64
from telegrad.linear.model import Pass
from telegrad.linear.problem import Problem

U32 = npt.NDArray[np.uint32]
Slices = list[int]
"""Where each rank's slice of the features begins, and behind them the number of features."""


@runtime_checkable
class Gathering(Protocol):
    """How the changes of coordinates reach all ranks. Rank r's are in its slice of the features, rising."""

    def prepare(self, indices: U32, changes: F32, slices: Slices) -> Any:
        """Counts as computing."""

    def gather(self, prepared: Any) -> tuple[U32, F32]:
        """All ranks' indices and changes, rising; changes of 0 may be left out. Counts as communication."""


class SparseGather:
    """Indices and changes by ``comm.all_gather`` of sparse vectors: which is the default."""

    def __init__(self, comm: Communicator | None) -> None:
        self._comm = comm

    def prepare(self, indices: U32, changes: F32, slices: Slices) -> SparseVector:
        return SparseVector.trusted(indices, changes, slices[-1])

    def gather(self, prepared: SparseVector) -> tuple[U32, F32]:
        every: list[SparseVector] = [prepared] if self._comm is None else self._comm.all_gather(prepared)
        return np.concatenate([one.raw_indices for one in every]), np.concatenate([one.raw_values for one in every])


_MOST = 100  # coordinates of a rank in a step, as in SparCML
_STRETCH = 1.5  # by which a row's entries in a block may raise the bound of a coordinate's curvature, in the mean

_PASS = 2  # of the seed's streams of random numbers, behind those of ``shares``


class CoordinateDescent:
    """``coordinates``: that each rank moves in a step; ``None``: up to 100, fewer if rows have many features in common.
    Of ``settings`` the loss, penalties, bias and seed count. Raises ``ValueError`` for the hinge, which has a kink."""

    def __init__(
        self,
        rows: Rows,
        settings: TrainingSettings,
        comm: Communicator | None,
        gathering: Gathering | None = None,
        coordinates: int | None = None,
    ) -> None:
        if settings.loss not in CURVATURE_BOUND:
            raise ValueError(f"loss={settings.loss!r} has a kink, where coordinate descent gets stuck")
        problem = self._problem = Problem(rows, settings, comm, alone=comm is None, may_split=False)
        self._view, self._all = rows.view(), problem.all_features
        self._given = coordinates
        self._gathering = gathering or SparseGather(comm)
        trained = problem.share.trained
        self._columns = _core.Columns(self._view, trained.ctypes.data, trained.size, self._all, problem.team)
        self._weights = np.zeros(self._all, np.float32)
        self._bias = 0.0
        self._scores: F64 = np.zeros(trained.size)  # of this rank's rows, without the bias
        self._targets = problem.targets[trained.astype(np.int64)]
        self._moved, entries = self._coordinates()
        self._block = self._block_size()
        self.steps = max(-(-self._moved.size // self._block), 1)
        # The bias's derivative takes all rows: so it is moved as often as costs about as much as all else together.
        self._bias_steps = max(min(problem.share.trained_total * self.steps // max(entries, 1), self.steps), 1)

    def epoch(self, number: int, on_step: Callable[[int, int], None] = lambda step, steps: None) -> Pass:
        """One pass over all coordinates, in blocks of the order of pass ``number``, from 0."""
        problem, found = self._problem, Pass(self.steps)
        order = np.random.default_rng([problem.settings.seed, _PASS, number]).permutation(self._moved.size)
        size = self._block
        for step in range(self.steps):
            if problem.settings.bias and step % self._bias_steps == 0:
                self._move_bias(found)
            self._move(found, np.sort(self._moved[order[step * size : (step + 1) * size]]))
            on_step(step + 1, self.steps)
        began_s = time.perf_counter()
        found.loss = float(self._summed(self._own_sums())[0]) / problem.share.trained_total
        found.compute_s += time.perf_counter() - began_s
        return found

    def model(self) -> LinearModel:
        return self._problem.model(self._weights.copy(), self._bias)

    def _block_size(self) -> int:
        """Coordinates of all ranks in a step. A coordinate's bound is raised by the other entries that its rows have in
        a block of B of d features, in the mean by (B - 1)·(m - 1)/(d - 1), m the entries of an entry's row."""
        problem, ranks = self._problem, self._problem.world_size
        if self._given is not None:
            return self._given * ranks
        offsets, trained = problem.rows.offsets.astype(np.int64), problem.share.trained.astype(np.int64)
        entries = (offsets[trained + 1] - offsets[trained]).astype(np.float64)
        own = np.array([entries.sum(), (entries**2).sum()])
        if problem.comm is not None:
            problem.comm.all_reduce(own)
        shared = float(own[1] / own[0]) - 1 if own[0] else 0.0
        most = _MOST * ranks
        if shared <= 0:
            return most
        block = 1 + (_STRETCH - 1) * (self._moved.size - 1) / shared
        return int(min(max(block, ranks), most))

    def _coordinates(self) -> tuple[U32, int]:
        """The features that some row has, and how many entries all rows have."""
        problem = self._problem
        offsets = np.empty(self._all + 1, np.uint64)
        self._columns.write_offsets(offsets.ctypes.data)
        own = np.flatnonzero(offsets[1:] > offsets[:-1]).astype(np.uint32)
        if problem.comm is None:
            return own, int(offsets[-1])
        entries = np.array([offsets[-1]], np.int64)
        problem.comm.all_reduce(entries)
        total = problem.comm.all_reduce(SparseVector.trusted(own, np.ones(own.size, np.float32), self._all), "max")
        indices, values = total.memory(0.0)
        every = np.flatnonzero(values > 0).astype(np.uint32) if indices is None else indices
        return every, int(entries[0])

    def _move(self, found: Pass, block: U32) -> None:
        problem = self._problem
        began_s = time.perf_counter()
        ranks = problem.world_size
        borders = [block.size * rank // ranks for rank in range(ranks + 1)]
        slices = [0, *(int(block[b]) if b < block.size else self._all for b in borders[1:-1]), self._all]
        sums = self._derivatives(block)
        summing_s = time.perf_counter()
        if problem.comm is not None:
            # both sums of a coordinate go to the rank that moves it
            counts = [2 * (b - a) for a, b in itertools.pairwise(borders)]
            sums = problem.comm.reduce_scatter(sums.reshape(-1), counts=counts).reshape(-1, 2)
        summed_s = time.perf_counter()
        own = block[borders[problem.rank] : borders[problem.rank + 1]]
        changes = self._changes(own, sums)
        moved = changes != 0
        prepared = self._gathering.prepare(own[moved], changes[moved], slices)
        gathering_s = time.perf_counter()
        indices, changes = self._gathering.gather(prepared)
        gathered_s = time.perf_counter()
        self._apply(indices, changes)
        found.entries += int(moved.sum())
        found.comm_s += summed_s - summing_s + gathered_s - gathering_s
        found.compute_s += summing_s - began_s + gathering_s - summed_s + time.perf_counter() - gathered_s

    def _derivatives(self, block: U32) -> F64:
        """Shape ``(block, 2)``: over this rank's rows, of each coordinate the loss's slope, and what times the loss's
        largest curvature bounds its curvature."""
        sums = np.empty((2, block.size))
        self._columns.derivatives(
            block.ctypes.data,
            block.size,
            self._scores.ctypes.data,
            self._targets.ctypes.data,
            self._scores.size,
            self._bias,
            self._problem.loss,
            sums[0].ctypes.data,
            sums[1].ctypes.data,
        )
        return np.ascontiguousarray(sums.T)

    def _changes(self, own: U32, sums: F64) -> F32:
        """Of each of this rank's coordinates the change that minimises the bound of mean loss + penalty."""
        settings, rows = self._problem.settings, self._problem.share.trained_total
        before = self._weights[own].astype(np.float64)
        curvatures = CURVATURE_BOUND[settings.loss] * sums[:, 1] / rows
        wanted = curvatures * before - sums[:, 0] / rows
        shrunk = np.sign(wanted) * np.maximum(np.abs(wanted) - settings.l1, 0)
        with np.errstate(invalid="ignore", divide="ignore"):
            after = np.where(curvatures > 0, shrunk / (curvatures + settings.l2), before)
        return (after - before).astype(np.float32)

    def _apply(self, indices: U32, changes: F32) -> None:
        before = self._weights[indices]
        self._weights[indices] = before + changes
        # what rounding has left of the changes, so that scores stay those of the weights
        changes = self._weights[indices] - before
        self._columns.move(
            indices.ctypes.data, changes.ctypes.data, indices.size, self._scores.ctypes.data, self._scores.size
        )

    def _move_bias(self, found: Pass) -> None:
        began_s = time.perf_counter()
        own = self._own_sums()
        summing_s = time.perf_counter()
        slope = self._summed(own)[1]
        found.compute_s += summing_s - began_s
        found.comm_s += time.perf_counter() - summing_s
        self._bias -= slope / (CURVATURE_BOUND[self._problem.settings.loss] * self._problem.share.trained_total)

    def _own_sums(self) -> F64:
        scores, targets = self._scores.ctypes.data, self._targets.ctypes.data
        return np.array(_core.sum_losses(scores, targets, self._scores.size, self._bias, self._problem.loss))

    def _summed(self, own: F64) -> F64:
        if self._problem.comm is not None:
            self._problem.comm.all_reduce(own)
        return own
