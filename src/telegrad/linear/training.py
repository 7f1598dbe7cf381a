"""Mini-batch SGD of linear models among ranks that sum their sparse gradients without loss. Source: SparCML §7 and §8.2
(MPI-OPT).

All weights shrink in each step (L2), but a shared scale does that: a step touches the entries of its batch alone. A
rank's gradient has, behind the features, the bias's and the loss, so that one sum serves all.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from telegrad import Communicator, SparseStream, _core
from telegrad.linear.losses import (
    CURVATURE,
    F32,
    are_classes,
    area_under_curve,
    is_classification,
    label_counts,
    losses_of,
    signed,
)
from telegrad.linear.model import LinearModel
from telegrad.linear.rows import MOST_FEATURES, Rows
from telegrad.linear.settings import TrainingSettings
from telegrad.linear.shares import Share

_EXTRA = 2  # behind the features: the bias and the loss
_SMALLEST_SCALE = 1e-4  # below it the weights themselves are shrunk, before float32 loses what they are divided by


@dataclass(frozen=True)
class EpochReport:
    """One pass over the data. ``loss``: mean over the epoch's rows, each at its own step. ``compute_s`` and ``comm_s``:
    this rank's seconds in gradients and updates, and in sums, waiting for slower ranks included. ``entries``: of this
    rank's gradients, over all steps. The rest is of held-out rows of all ranks, NaN where there are none: mean loss,
    share of right classes, area under the ROC curve; of the squared error ``accuracy`` and ``auc`` are NaN.
    """

    epoch: int
    steps: int
    loss: float
    compute_s: float
    comm_s: float
    entries: int
    held_out_loss: float
    accuracy: float
    auc: float


@dataclass(frozen=True)
class Trained:
    """The model, the same bits on every rank, and a report of each epoch."""

    model: LinearModel
    epochs: list[EpochReport]
    rows: int
    """Of all ranks, held-out ones included."""


class Aggregation(Protocol):
    """How ranks' gradients meet, where it is not by ``comm.all_reduce`` of sparse streams: for comparisons."""

    def prepare(self, gradient: SparseStream) -> Any:
        """Counts as computing."""

    def sum(self, prepared: Any) -> SparseStream:
        """Counts as communication."""


def train(
    rows: Rows,
    settings: TrainingSettings | None = None,
    comm: Communicator | None = None,
    *,
    aggregation: Aggregation | None = None,
    on_epoch: Callable[[EpochReport], None] = lambda report: None,
    on_step: Callable[[int, int], None] = lambda step, steps: None,
) -> Trained:
    """Trains on the rows of all ranks of ``comm``; each calls this with its own, in the order of the data.

    Without ``comm`` there is one rank. Labels are -1 and 1 or 0 and 1, or numbers for the squared error. The number of
    features is the largest of all ranks. ``on_epoch`` and ``on_step(steps of the epoch so far, of all)`` are called
    after each. The result depends on the number of ranks by rounding only. Raises ``ValueError`` on every rank for
    labels that are not two classes, and where there is no row to train on or too many features.
    """
    return _Trainer(rows, settings or TrainingSettings(), comm, aggregation).run(on_epoch, on_step)


def objective(model: LinearModel, rows: Rows, l2: float, comm: Communicator | None = None) -> float:
    """Mean loss of all ranks' rows + l2/2·|w|². Labels as for ``train``."""
    targets = signed(rows.labels) if is_classification(model.loss) else rows.labels
    sums = np.array([losses_of(model.loss, model.scores(rows), targets).sum(), len(rows)], np.float64)
    if comm is not None:
        comm.all_reduce(sums)
    weights = model.weights.astype(np.float64)
    return float(sums[0] / sums[1] + l2 / 2 * (weights @ weights))


class _SparseSum:
    def __init__(self, comm: Communicator | None) -> None:
        self._comm = comm

    def prepare(self, gradient: SparseStream) -> SparseStream:
        return gradient

    def sum(self, prepared: SparseStream) -> SparseStream:
        total: SparseStream = prepared if self._comm is None else self._comm.all_reduce(prepared)
        return total


class _Trainer:
    def __init__(
        self, rows: Rows, settings: TrainingSettings, comm: Communicator | None, aggregation: Aggregation | None
    ) -> None:
        self.aggregation = aggregation or _SparseSum(comm)
        self.rows, self.settings, self.comm = rows, settings, comm
        self.rank, self.world_size = (comm.rank, comm.world_size) if comm else (0, 1)
        self.is_classification = is_classification(settings.loss)
        self.features, self.counts, squares = self._agree()
        self.total = int(self.counts.sum())
        first = int(self.counts[: self.rank].sum())
        self.share = Share(first, len(rows), self.total, held_out=settings.held_out, seed=settings.seed)
        if self.share.trained_total == 0:
            raise ValueError(f"of {self.total} rows none is left to train on: give more, or a smaller held_out")
        self.targets: F32 = signed(rows.labels) if self.is_classification else np.ascontiguousarray(rows.labels)
        curvature = CURVATURE[settings.loss] * (squares / max(self.total, 1) + 1)
        self.first_rate = settings.learning_rate or 1 / curvature
        self.weights = np.zeros(self.features, np.float32)
        self.scale, self.bias = 1.0, 0.0
        self.gradient = _core.BatchGradient(self.features)
        self.view = rows.view()
        self.loss = getattr(_core.Loss, settings.loss)

    def _agree(self) -> tuple[int, np.ndarray[tuple[int], np.dtype[np.int64]], float]:
        """The number of features, every rank's rows, and the sum of the squares of all values."""
        labels = self.rows.labels
        kinds = label_counts(labels)
        own = np.array([self.rows.n_features, len(labels), *kinds], np.int64)
        every = own[None] if self.comm is None else self.comm.all_gather(own)
        squares = np.array([np.einsum("i,i->", self.rows.values, self.rows.values, dtype=np.float64)])
        if self.comm is not None:
            self.comm.all_reduce(squares)
        features, counts = int(every[:, 0].max()), every[:, 1]
        minus, zero, plus = every[:, 2:].sum(0)
        if self.is_classification and not are_classes(counts.sum(), minus, zero, plus):
            raise ValueError(
                f"labels are not two classes for loss={self.settings.loss!r}: they must be -1 and 1 or 0 and 1; of "
                f"{counts.sum()} rows {minus} have -1, {zero} have 0, {plus} have 1; or use 'squared_error'"
            )
        if features + _EXTRA > MOST_FEATURES:
            raise ValueError(f"n_features={features} is more than {MOST_FEATURES - _EXTRA}: hash them")
        return features, counts, float(squares[0])

    def run(self, on_epoch: Callable[[EpochReport], None], on_step: Callable[[int, int], None]) -> Trained:
        reports = []
        steps = -(-self.share.trained_total // self.settings.batch)
        for epoch in range(self.settings.epochs):
            loss = compute_s = comm_s = 0.0
            entries = 0
            for step, (chosen, size) in enumerate(self.share.batches(epoch, self.settings.batch)):
                began_s = time.perf_counter()
                stream = self._gradient_of(chosen)
                prepared = self.aggregation.prepare(stream)
                summing_s = time.perf_counter()
                total = self.aggregation.sum(prepared)
                summed_s = time.perf_counter()
                loss += self._update(total, size, self.settings.rate_at(epoch * steps + step, self.first_rate))
                compute_s += summing_s - began_s + time.perf_counter() - summed_s
                comm_s += summed_s - summing_s
                entries += stream.nnz
                on_step(step + 1, steps)
            mean = loss / self.share.trained_total
            report = EpochReport(epoch + 1, steps, mean, compute_s, comm_s, entries, *self._on_held_out())
            reports.append(report)
            on_epoch(report)
        return Trained(self.model(), reports, self.total)

    def model(self) -> LinearModel:
        return LinearModel(self.weights * np.float32(self.scale), self.bias, self.settings.loss)

    def _gradient_of(self, chosen: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> SparseStream:
        """The sum over this rank's rows of the batch."""
        model = _core.ModelView(self.weights.ctypes.data, self.features, self.scale, self.bias)
        targets, rows = self.targets.ctypes.data, chosen.ctypes.data
        loss, slope = self.gradient.add(self.view, targets, rows, chosen.size, model, self.loss)
        count = self.gradient.entries
        indices, values = np.empty(count + _EXTRA, np.uint32), np.empty(count + _EXTRA, np.float32)
        self.gradient.take(indices.ctypes.data, values.ctypes.data, count)
        indices[count:] = self.features, self.features + 1
        values[count:] = slope, loss
        return SparseStream.trusted(indices, values, self.features + _EXTRA)

    def _update(self, total: SparseStream, size: int, rate: float) -> float:
        """One step by the sum of ``size`` rows' gradients; the sum of their losses."""
        indices, values = total.memory(0.0)
        slope, loss = values[-2:]  # behind all features, also where the sum is held densely
        entries = values.size - _EXTRA
        at = 0 if indices is None else indices.ctypes.data
        factor = rate / (size * self.scale)
        _core.subtract(self.weights.ctypes.data, self.features, at, entries, values.ctypes.data, factor)
        if self.settings.bias:
            self.bias -= rate * float(slope) / size
        self.scale /= 1 + rate * self.settings.l2
        if self.scale < _SMALLEST_SCALE:
            self.weights *= np.float32(self.scale)
            self.scale = 1.0
        return float(loss)

    def _on_held_out(self) -> tuple[float, float, float]:
        """Mean loss, accuracy and area under the curve."""
        nan = float("nan")
        if self.share.trained_total == self.total:
            return nan, nan, nan
        model = self.model()
        rows = self.share.held_out.astype(np.int64)
        scores, targets = model.scores(self.rows)[rows], self.targets[rows]
        if self.comm is not None:
            lengths = self.comm.all_gather(np.array([rows.size], np.int64))[:, 0].tolist()
            scores, targets = (self.comm.all_gather(one, counts=lengths) for one in (scores, targets))
        loss = float(losses_of(self.settings.loss, scores, targets).mean())
        if not self.is_classification:
            return loss, nan, nan
        return loss, float(((scores > 0) == (targets > 0)).mean()), area_under_curve(scores, targets)
