"""Mini-batch descent, SGD or AdaGrad, among ranks that sum their sparse gradients without loss. Source: SparCML §7 and
§8.2 (MPI-OPT).

A rank's gradient has, behind the features, the bias's and the loss, so that one sum serves all. What a step does to
weights, and what it leaves for later, is the core's (``core/linear/descent.hpp``).

All ranks hold all weights. What a rank looks up at random are copies of those that its own rows have, and sums of
these: see ``core/linear/own_weights.hpp``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from telegrad import SparseStream, _core
from telegrad.linear.aggregation import Aggregation, OverlappedAggregation, SparseSum, SumInFlight
from telegrad.linear.model import LinearModel
from telegrad.linear.passes import Pass
from telegrad.linear.problem import EXTRA, Problem


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
        self._gradient = _core.BatchGradient(problem.places, problem.team)
        rule = _core.Rule.adagrad if settings.optimizer == "adagrad" else _core.Rule.sgd
        self._descent = _core.Descent(problem.features, rule, settings.l1, settings.l2, settings.bias, problem.team)
        self._own: _core.OwnWeights | None = None
        if problem.numbering is not None:
            self._own = _core.OwnWeights(self._descent, problem.numbering, problem.team)
        self.steps = -(-problem.share.trained_total // settings.batch)

    def epoch(self, number: int, on_step: Callable[[int, int], None]) -> Pass:
        """One pass over the rows, in the order of epoch ``number``, from 0."""
        settings, found, sent = self._problem.settings, Pass(self.steps), None
        for step, (chosen, rows) in enumerate(self._problem.share.batches(number, settings.batch)):
            rate = settings.rate_at(number * self.steps + step, self._problem.first_rate)
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
        return self._problem.model(weights, self._descent.bias)

    def _step_alone(self, found: Pass, chosen: npt.NDArray[np.uint64], rate: float) -> None:
        """``_step`` to rounding, without the sorting that others need."""
        began_s = time.perf_counter()
        problem = self._problem
        targets, rows = problem.targets.ctypes.data, chosen.ctypes.data
        loss, entries = self._descent.step_alone(
            self._gradient, problem.view, targets, rows, chosen.size, problem.loss, rate
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
        total: SparseStream = sent.sum.result()
        waited_s = time.perf_counter()
        self._update(found, total, sent.rows, sent.rate)
        found.comm_s += waited_s - began_s
        found.compute_s += time.perf_counter() - waited_s

    def _add(self, chosen: npt.NDArray[np.uint64]) -> tuple[float, float]:
        problem = self._problem
        targets, rows = problem.targets.ctypes.data, chosen.ctypes.data
        weights = self._own.view(problem.view, rows, chosen.size) if self._own else self._descent.view()
        return self._gradient.add(problem.view, targets, rows, chosen.size, weights, problem.loss)

    def _prepared(self, found: Pass, chosen: npt.NDArray[np.uint64]) -> Any:
        """The sum over this rank's rows of the batch."""
        loss, slope = self._add(chosen)
        features, count = self._problem.features, self._gradient.collect()
        indices, values = np.empty(count + EXTRA, np.uint32), np.empty(count + EXTRA, np.float32)
        self._gradient.take(indices.ctypes.data, values.ctypes.data, count)
        if self._own is not None:
            self._own.to_features(indices.ctypes.data, count)
        indices[count:] = features, features + 1
        values[count:] = slope, loss
        found.entries += count + EXTRA
        return self._aggregation.prepare(SparseStream.trusted(indices, values, features + EXTRA))

    def _update(self, found: Pass, total: SparseStream, rows: int, rate: float) -> None:
        """One step by the sum of ``rows`` rows' gradients."""
        indices, values = total.memory(0.0)
        slope, loss = values[-2:]  # behind all features, also where the sum is held densely
        at = 0 if indices is None else indices.ctypes.data
        count = values.size - EXTRA
        self._descent.step(at, values.ctypes.data, count, float(slope), rate, rows)
        if self._own is not None:
            self._own.follow(at, count)
        found.loss += float(loss)
