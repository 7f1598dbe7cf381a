"""Random block coordinate descent among ranks that hold rows. Sources: SparCML §8.2; Wright 2015 (its [53]).

A step's block has ``coordinates`` features for each rank, drawn alike on all; each rank moves its own part of it, so
that what ranks contribute lies in different slices of the model; an allgather of indices and changes brings it to all.
A coordinate's derivative needs all rows, and ranks hold rows: so each rank sums over its own ones for the whole block,
and a reduce-scatter gives each part's sums to the rank that moves it. Each rank then adds the block's changes to the
scores of its rows, and no score ever travels. (With columns held by ranks derivatives would be free, but each step
would have to send the changed scores of all rows with any feature of the block: with popular features nearly all.)

The move minimises a bound of the objective that holds for the whole block at once (``core/linear/columns.hpp``): so no
step makes it worse, and there is no learning rate. The more entries a row has in a block, the shorter the bound makes
the moves: on dense rows large blocks hardly move at all.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import numpy as np

from telegrad import SparseVector, _core
from telegrad.linear.aggregation import U32, Gathering, SparseGather
from telegrad.linear.losses import CURVATURE_BOUND, F32, F64
from telegrad.linear.model import LinearModel
from telegrad.linear.passes import Pass, State
from telegrad.linear.problem import Problem

_MOST = 100  # coordinates of a rank in a step, as in SparCML
_STRETCH = 1.5  # by which a row's entries in a block may raise the bound of a coordinate's curvature, in the mean

_PASS = 2  # of the seed's streams of random numbers, behind those of ``shares``


class CoordinateDescent:
    """Raises ``TypeError`` for an ``aggregation`` that gathers no coordinates."""

    def __init__(self, problem: Problem, aggregation: Gathering | None) -> None:
        if aggregation is not None and not isinstance(aggregation, Gathering):
            raise TypeError(f"aggregation is a {type(aggregation).__name__}, which gathers nothing: see Gathering")
        self._problem = problem
        self._gathering = aggregation or SparseGather(problem.comm)
        trained = problem.share.trained
        self._columns = _core.Columns(problem.view, trained.ctypes.data, trained.size, problem.features, problem.team)
        self._weights = np.zeros(problem.features, np.float32)
        self._bias = 0.0
        self._scores: F64 = np.zeros(trained.size)  # of this rank's rows, without the bias
        self._targets = problem.targets[trained.astype(np.int64)]
        self._moved, entries = self._coordinates()
        self._block = self._block_size()
        self.steps = max(-(-self._moved.size // self._block), 1)
        # The bias's derivative takes all rows: so it is moved as often as costs about as much as all else together.
        self._bias_steps = max(min(problem.share.trained_total * self.steps // max(entries, 1), self.steps), 1)

    def epoch(self, number: int, on_step: Callable[[int, int], None]) -> Pass:
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

    def settle(self) -> None:
        """Scores then are those of the weights, without what changes have rounded."""
        self._scores[:] = 0
        indices = np.flatnonzero(self._weights).astype(np.uint32)
        weights = np.ascontiguousarray(self._weights[indices])
        self._columns.move(
            indices.ctypes.data, weights.ctypes.data, indices.size, self._scores.ctypes.data, self._scores.size
        )

    def state(self) -> State:
        return State(self.model())

    def restore(self, state: State) -> None:
        self._weights[:] = self._problem.of_own(state.model.weights)
        self._bias = state.model.bias
        self.settle()

    def _block_size(self) -> int:
        """Coordinates of all ranks in a step. A coordinate's bound is raised by the other entries that its rows have in
        a block of B of d features, in the mean by (B - 1)·(m - 1)/(d - 1), m the entries of an entry's row."""
        problem, ranks = self._problem, self._problem.world_size
        if problem.settings.coordinates is not None:
            return problem.settings.coordinates * ranks
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
        offsets = np.empty(problem.features + 1, np.uint64)
        self._columns.write_offsets(offsets.ctypes.data)
        own = np.flatnonzero(offsets[1:] > offsets[:-1]).astype(np.uint32)
        if problem.comm is None:
            return own, int(offsets[-1])
        entries = np.array([offsets[-1]], np.int64)
        problem.comm.all_reduce(entries)
        stream = SparseVector.trusted(own, np.ones(own.size, np.float32), problem.features)
        total: SparseVector = problem.comm.all_reduce(stream, "max")
        indices, values = total.memory(0.0)
        return np.flatnonzero(values > 0).astype(np.uint32) if indices is None else indices, int(entries[0])

    def _move(self, found: Pass, block: U32) -> None:
        problem = self._problem
        began_s = time.perf_counter()
        ranks = problem.world_size
        borders = [block.size * rank // ranks for rank in range(ranks + 1)]
        slices = [0, *(int(block[b]) if b < block.size else problem.features for b in borders[1:-1]), problem.features]
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
