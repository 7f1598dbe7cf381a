"""Optimizers for ranks that hold rows: random block coordinate descent, and mini-batch descent, SGD or AdaGrad.

*Coordinate descent.* Sources: SparCML §8.2; Wright 2015 (its [53]). A step's block has ``coordinates`` features for
each rank, drawn alike on all ranks. Each rank moves its own part of the block, so that the ranks' contributions lie in
different slices of the model. An allgather of indices and changes brings them to all ranks. A coordinate's derivative
needs all rows, and ranks hold rows. So each rank sums over its own rows for the whole block, and a reduce-scatter gives
each part's sums to the rank that moves it. Each rank then adds the block's changes to the scores of its rows, and no
score ever travels. (With columns held by ranks derivatives would be free, but each step would have to send the changed
scores of all rows with any feature of the block: with popular features nearly all.)

The move minimises a bound of the objective that holds for the whole block at once (``core/linear/columns.hpp``). So no
step makes the objective worse, and there is no learning rate. The more entries a row has in a block, the shorter the
bound makes the moves: on dense rows large blocks hardly move at all.

*Mini-batch descent.* Source: SparCML §7 and §8.2 (MPI-OPT); see below.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from telegrad import Communicator, SparseVector, _core
from telegrad.linear.losses import CURVATURE_BOUND, F32, F64
from telegrad.linear.model import LinearModel, Pass, State
from telegrad.linear.problem import EXTRA, Problem

# Sums of gradients, and allgathers of changed coordinates.

U32 = npt.NDArray[np.uint32]
Slices = list[int]
"""Where each rank's slice of the features begins, and behind them the number of features."""


class Aggregation(Protocol):
    """How ranks' gradients meet, where it is not by ``comm.all_reduce`` of sparse vectors: for comparisons."""

    def prepare(self, gradient: SparseVector) -> Any:
        """Counts as computing."""

    def sum(self, prepared: Any) -> SparseVector:
        """Counts as communication."""


class SumInFlight(Protocol):
    def result(self) -> Any:
        """Waits for the sum, a ``SparseVector``."""


@runtime_checkable
class OverlappedAggregation(Aggregation, Protocol):
    """One whose sums can travel while the next gradient is computed."""

    def begin(self, prepared: Any) -> SumInFlight:
        """Returns at once."""


class SparseSum:
    """Sparse gradients, summed without loss. Without ``comm`` there is one rank."""

    def __init__(self, comm: Communicator | None) -> None:
        self._comm = comm

    def prepare(self, gradient: SparseVector) -> SparseVector:
        return gradient

    def sum(self, prepared: SparseVector) -> SparseVector:
        total: SparseVector = prepared if self._comm is None else self._comm.all_reduce(prepared)
        return total

    def begin(self, prepared: SparseVector) -> SumInFlight:
        if self._comm is None:
            return _Arrived(prepared)
        work: SumInFlight = self._comm.all_reduce(prepared, async_op=True)
        return work


class _Arrived:
    def __init__(self, stream: SparseVector) -> None:
        self._stream = stream

    def result(self) -> SparseVector:
        return self._stream


@runtime_checkable
class Gathering(Protocol):
    """How the changes of coordinates reach all ranks. Rank r's are in its slice of the features, rising."""

    def prepare(self, indices: U32, changes: F32, slices: Slices) -> Any:
        """Counts as computing."""

    def gather(self, prepared: Any) -> tuple[U32, F32]:
        """All ranks' indices and changes, rising; changes of 0 may be left out. Counts as communication."""


class SparseGather:
    """Indices and changes by ``comm.all_gather`` of sparse vectors: what ``train`` does unless told otherwise."""

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
        return self._problem.model(self._problem.of_all(self._weights.copy()), self._bias)

    def settle(self, ends: bool = False) -> None:
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
        return problem.union(own), int(entries[0])

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


# Mini-batch descent, SGD or AdaGrad, among ranks that sum their sparse gradients without loss. Source: SparCML §7 and
# §8.2 (MPI-OPT).
# All ranks hold all weights. What a step does to them, and what it leaves for later, is the core's
# (`core/linear/descent.hpp`), and so is a rank's gradient (`core/linear/rank_gradient.hpp`), which has, behind
# the features, the bias's and the loss.


@dataclass
class _Sent:
    """A step whose sum is on its way."""

    sum: SumInFlight
    rows: int
    rate: float


class MiniBatches:
    """Raises ``TypeError`` for an ``aggregation`` that cannot do what settings ask."""

    def __init__(self, problem: Problem, aggregation: Aggregation | None) -> None:
        settings = problem.settings
        if aggregation is not None and not hasattr(aggregation, "sum"):
            raise TypeError(f"aggregation is a {type(aggregation).__name__}, which sums no gradients: see Aggregation")
        if settings.overlap and aggregation is not None and not isinstance(aggregation, OverlappedAggregation):
            raise TypeError(f"aggregation is a {type(aggregation).__name__} without begin(), which overlap=True needs")
        self._problem = problem
        self._direct = aggregation is None and problem.world_size == 1 and not settings.overlap
        self._aggregation = aggregation or SparseSum(problem.comm)
        rule = _core.Rule.adagrad if settings.method == "adagrad" else _core.Rule.sgd
        penalty, team, numbering = (settings.l1, settings.l2), problem.team, problem.numbering
        self._descent = _core.Descent(problem.features, rule, *penalty, settings.bias, team, numbering)
        if self._direct:
            self._sums = _core.BatchGradient(problem.features, team)
        else:
            self._gradient = _core.RankGradient(self._descent, numbering, team)
        self.steps = -(-problem.share.trained_total // settings.rows_a_step)

    def epoch(self, number: int, on_step: Callable[[int, int], None]) -> Pass:
        """One pass over the rows, in the order of epoch ``number``, from 0."""
        settings, found, sent = self._problem.settings, Pass(self.steps), None
        for step, (chosen, rows) in enumerate(self._problem.share.batches(number, settings.rows_a_step)):
            rate = self._problem.rate_at(number * self.steps + step, rows)
            if self._direct:
                self._step_alone(found, chosen, rate)
            elif settings.overlap:
                sent = self._step_overlapped(found, chosen, rows, rate, sent)
            else:
                self._step(found, chosen, rows, rate)
            on_step(step + 1, self.steps)
        if sent is not None:
            self._arrive(found, sent)
        found.loss /= self._problem.share.trained_total
        return found

    def model(self) -> LinearModel:
        weights = np.empty(self._problem.features, np.float32)
        self._descent.write_weights(weights.ctypes.data, weights.size)
        return self._problem.model(self._problem.of_all(weights), self._descent.bias)

    def settle(self, ends: bool = False) -> None:
        self._descent.settle()

    def state(self) -> State:
        squares: npt.NDArray[np.float32] | None = None
        if self._problem.settings.method == "adagrad":
            squares = np.empty(self._problem.features, np.float32)
            self._descent.write_squares(squares.ctypes.data, squares.size)
            squares = self._problem.of_all(squares)
        return State(self.model(), squares, self._descent.bias_squares)

    def restore(self, state: State) -> None:
        weights = self._problem.of_own(state.model.weights)
        squares = None if state.squares is None else self._problem.of_own(state.squares)
        self._descent.restore(
            weights.ctypes.data,
            0 if squares is None else squares.ctypes.data,
            weights.size,
            state.model.bias,
            state.bias_squares,
        )

    def _step_alone(self, found: Pass, chosen: npt.NDArray[np.uint64], rate: float) -> None:
        """``_step`` to rounding, without the sorting that others need."""
        began_s = time.perf_counter()
        problem = self._problem
        targets, rows = problem.targets.ctypes.data, chosen.ctypes.data
        loss, entries = self._descent.step_alone(
            self._sums, problem.view, targets, rows, chosen.size, problem.loss, rate
        )
        found.loss += loss
        found.entries += entries
        found.compute_s += time.perf_counter() - began_s

    def _step(self, found: Pass, chosen: npt.NDArray[np.uint64], rows: int, rate: float) -> None:
        began_s = time.perf_counter()
        prepared = self._prepared(found, chosen)
        summing_s = time.perf_counter()
        total = self._aggregation.sum(prepared)
        summed_s = time.perf_counter()
        self._update(found, total, rows, rate)
        found.compute_s += summing_s - began_s + time.perf_counter() - summed_s
        found.comm_s += summed_s - summing_s

    def _step_overlapped(
        self, found: Pass, chosen: npt.NDArray[np.uint64], rows: int, rate: float, before: _Sent | None
    ) -> _Sent:
        began_s = time.perf_counter()
        prepared = self._prepared(found, chosen)
        assert isinstance(self._aggregation, OverlappedAggregation)
        sending_s = time.perf_counter()
        sent = _Sent(self._aggregation.begin(prepared), rows, rate)
        found.comm_s += time.perf_counter() - sending_s
        found.compute_s += sending_s - began_s
        if before is not None:
            self._arrive(found, before)
        return sent

    def _arrive(self, found: Pass, sent: _Sent) -> None:
        began_s = time.perf_counter()
        total: SparseVector = sent.sum.result()
        waited_s = time.perf_counter()
        self._update(found, total, sent.rows, sent.rate)
        found.comm_s += waited_s - began_s
        found.compute_s += time.perf_counter() - waited_s

    def _prepared(self, found: Pass, chosen: npt.NDArray[np.uint64]) -> Any:
        """The sum over this rank's rows of the batch."""
        problem = self._problem
        targets, rows = problem.targets.ctypes.data, chosen.ctypes.data
        count = self._gradient.find(problem.view, targets, rows, chosen.size, problem.loss)
        indices, values = np.empty(count, np.uint32), np.empty(count, np.float32)
        self._gradient.take(indices.ctypes.data, values.ctypes.data, count)
        found.entries += count
        return self._aggregation.prepare(SparseVector.trusted(indices, values, problem.features + EXTRA))

    def _update(self, found: Pass, total: SparseVector, rows: int, rate: float) -> None:
        """One step by the sum of ``rows`` rows' gradients."""
        indices, values = total.memory(0.0)
        features, extra = self._problem.features, np.zeros(EXTRA)
        if indices is None:
            at, count = 0, features
            extra[:] = values[features:]
        else:
            # behind all features, but sums of others' making may leave out what is 0
            behind = np.flatnonzero(indices[-EXTRA:] >= features) + max(indices.size - EXTRA, 0)
            at, count = indices.ctypes.data, indices.size - behind.size
            extra[indices[behind].astype(np.int64) - features] = values[behind]
        slope, loss = extra.tolist()
        self._descent.step(at, values.ctypes.data, count, slope, rate, rows)
        found.loss += loss
