"""Mini-batch descent, SGD or AdaGrad, among ranks that sum their sparse gradients without loss.

Source: SparCML §7 and §8.2 (MPI-OPT). All ranks hold all weights. What a step does to them, and what it leaves for
later, is the core's (``core/linear/descent.hpp``), and so is a rank's gradient (``core/linear/rank_gradient.hpp``),
which has, behind the features, the bias's and the loss.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from telegrad import Communicator, SparseVector, _core
from telegrad.linear.model import LinearModel, Pass, State
from telegrad.linear.problem import EXTRA, Problem


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

    def epoch(self, number: int, on_step: Callable[[int, int], None], *, moves: bool = True) -> Pass:
        """One pass over the rows, in the order of epoch ``number``, from 0. Without ``moves`` the model stays where it
        is, and only AdaGrad's sums grow."""
        settings, found, sent = self._problem.settings, Pass(self.steps), None
        for step, (chosen, rows) in enumerate(self._problem.share.batches(number, settings.rows_a_step)):
            rate = self._problem.rate_at(number * self.steps + step, rows) if moves else 0.0
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
