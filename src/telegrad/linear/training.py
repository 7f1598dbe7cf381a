"""Training of linear models among ranks. Source: SparCML §7 and §8.2 (MPI-OPT)."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from telegrad import Communicator
from telegrad.communicator.operands import checked_integer
from telegrad.linear.checkpoint import Checkpoints
from telegrad.linear.losses import is_classification, losses_of, signed
from telegrad.linear.model import EpochReport, LinearModel, Optimizer, Pass, State
from telegrad.linear.newton import Newton
from telegrad.linear.optimizers import Aggregation, MiniBatches, SparseSum
from telegrad.linear.problem import SECOND_ORDER, Problem, TrainingSettings
from telegrad.linear.rows import Rows, check_rows

_WINDOW = 10  # epochs whose mean is compared


def last_fall(losses: Sequence[float]) -> float:
    """By what part the loss has fallen in an epoch in the end, where ``losses`` are that at the zero weights and those
    of all epochs, finite: the mean of the last 10 epochs (or of half of all losses) against that of as many before. 0
    unless that is more than three times what by chance it could be, as batches in random order make losses uneven: how
    much is told from their variance, or from second differences, in which a steady fall does not count."""
    window = min(_WINDOW, len(losses) // 2)
    before, after = losses[-2 * window : -window], losses[-window:]
    fall = float(np.mean(before) - np.mean(after))
    if window > 1:
        varied = np.var(before, ddof=1) + np.var(after, ddof=1)
        uneven = np.mean(np.diff(losses[-2 * window :], 2) ** 2) / 3
        fall = fall if fall > 3 * np.sqrt(min(varied, uneven) / window) else 0.0
    return fall / float(np.mean(before)) / window if fall > 0 else 0.0


_FAR = 10  # times the loss of a model that knows nothing
EVEN = 1e-3  # of an objective: no more than what rounding and the last steps make of a model that is as good


def gains_nothing(reached: float, without: float) -> bool:
    """Is an objective not even a thousandth below that of a model without weights?"""
    return reached > (1 - EVEN) * without


@dataclass(frozen=True)
class Trained:
    """The model, the same bits on every rank, and a report of each epoch."""

    model: LinearModel
    epochs: list[EpochReport]
    rows: int
    """Of all ranks, held-out ones included."""

    loss_at_zero: float
    """The objective where all weights are 0: mean loss of all rows."""

    loss_without_weights: float
    """The least objective of a model without weights, which has a bias if ``settings`` do, of the rows trained on."""

    held_out: npt.NDArray[np.uint64]
    """Which of this rank's rows were not trained on, from 0, rising."""

    first_rate: float
    """The learning rate of the first step, the default where settings have none; 0 with optimizers without one."""

    converged: bool = False
    """Whether Newton or the dual method has reached its tolerance."""

    @property
    def loss_to_beat(self) -> float:
        """``loss_without_weights``, or ``loss_at_zero`` if all labels are the same: a bias alone tells these."""
        return self.loss_without_weights or self.loss_at_zero

    @property
    def last_fall(self) -> float:
        """The share by which the loss fell in each of the last epochs; 0 where that may be chance."""
        return last_fall([self.loss_at_zero, *(report.loss for report in self.epochs)])

    @property
    def diverged(self) -> bool:
        """Whether the model or the last epoch's loss has NaN or Inf, or with a learning rate is more than ten times
        ``loss_at_zero``. The same on every rank. Losses are taken before their steps: for the last ones use
        ``diverged_to``."""
        if not (np.isfinite(self.model.bias) and np.isfinite(self.model.weights).all()):
            return True
        return self._is_far(self.epochs[-1].loss)

    def diverged_to(self, reached: float) -> bool:
        """As ``diverged``, also with ``reached``, the ``objective`` of the model of the rows it was trained on."""
        return self.diverged or self._is_far(reached)

    def better_rate(self, reached: float) -> str:
        """The one to try if ``reached``, of all rows, gains nothing: ``"a lower"``, ``"a higher"`` or ``"another"``."""
        if not gains_nothing(reached, self.loss_at_zero):
            return "another"
        return "a lower" if reached > (1 + EVEN) * self.loss_at_zero else "a higher"

    def _is_far(self, loss: float) -> bool:
        return not np.isfinite(loss) or (self.first_rate > 0 and loss > _FAR * self.loss_at_zero)


def train(
    rows: Rows,
    settings: TrainingSettings | None = None,
    comm: Communicator | None = None,
    *,
    aggregation: Aggregation | None = None,
    on_epoch: Callable[[EpochReport], None] = lambda report: None,
    on_step: Callable[[int, int], None] = lambda step, steps: None,
    on_break_off: Callable[[LinearModel], None] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: int = 1,
    on_resume: Callable[[list[EpochReport]], None] = lambda reports: None,
) -> Trained:
    """Trains on the rows of all ranks of ``comm`` (``None``: one rank); each calls this with its own, in the order of
    the data. Newton and the dual method end at the tolerance of ``settings``, all others after their epochs.

    Labels are -1 and 1 or 0 and 1, or numbers for the squared error. The number of features is the largest of all
    ranks. Newton and the dual method find the same bits on any number of ranks, all others but for rounding.

    - ``on_epoch`` and ``on_step(steps of the epoch so far, of all)`` are called after each.
    - ``on_break_off`` gets the model of that moment if anything, such as Ctrl-C, ends the training early.
    - ``checkpoint``: a file that rank 0 writes after every ``checkpoint_every`` epochs and the last one. If it exists,
      training resumes from it, to the same bits as without a break; with other ranks as far as the result does not
      depend on them. ``on_resume`` first gets rank 0's reports of its epochs. The file is a model's too
      (``LinearModel.load``). Writing rounds outstanding penalties, so other checkpoints may change last bits. Give more
      ``epochs`` to train on, unless the last step has proved to be within ``tol``.

    Raises ``ValueError`` on every rank for settings that differ (except ``threads``), labels that are not two classes,
    or a checkpoint of another training. Also for no rows, too many features or threads, or too little memory. Raises
    ``OSError`` or ``MemoryError`` on every rank for a checkpoint that rank 0 cannot read or write. Raises ``TypeError``
    for arguments of another type, and for an ``aggregation`` that does not fit these settings."""
    check_rows(rows)
    settings = TrainingSettings() if settings is None else settings
    if not isinstance(settings, TrainingSettings):
        raise TypeError(f"settings is {type(settings).__name__}: it must be TrainingSettings, or None")
    if comm is not None and not isinstance(comm, Communicator):
        raise TypeError(f"comm is {type(comm).__name__}: it must be a telegrad Communicator, or None")
    checkpoint_every = checked_integer(checkpoint_every, "checkpoint_every", "an int of at least 1")
    if checkpoint_every < 1:
        raise ValueError(f"checkpoint_every={checkpoint_every} must be at least 1: so many epochs lie between two")
    if checkpoint is not None and not isinstance(checkpoint, (str, os.PathLike)):
        raise TypeError(f"checkpoint={checkpoint!r} must be a path, or None")
    second_order = settings.method in SECOND_ORDER
    if second_order and aggregation is not None:
        raise TypeError(f"aggregation is not for optimizer={settings.method!r}: leave it out")
    alone = aggregation is None and (comm is None or comm.world_size == 1)
    every = None if checkpoint is None else checkpoint_every
    problem = Problem(rows, settings, comm, alone=alone, checkpoint_every=every, keeps_models=on_break_off is not None)
    optimizer: Optimizer = Newton(problem) if second_order else MiniBatches(problem, aggregation)
    judges = problem.share.trained_total < problem.total
    checkpoints = None if checkpoint is None else Checkpoints(checkpoint, problem)
    reports = [] if checkpoints is None else checkpoints.restore(optimizer)
    if reports:
        on_resume([*reports])
    converged = bool(reports) and second_order and reports[-1].gap <= settings.tol
    try:
        for epoch in range(len(reports), len(reports) if converged else settings.most_epochs):
            found = optimizer.epoch(epoch, on_step)
            judged = problem.on_held_out(optimizer.model()) if judges else (float("nan"),) * 3
            took = (found.steps, found.loss, found.compute_s, found.comm_s, found.entries)
            report = EpochReport(epoch + 1, *took, *judged, found.objective, found.gap)
            reports.append(report)
            converged = second_order and found.gap <= settings.tol and math.isfinite(found.objective)
            is_best = found.has_ended or converged
            is_last = is_best or report.epoch == settings.most_epochs
            if checkpoints is not None and (report.epoch % checkpoint_every == 0 or is_last):
                checkpoints.write(optimizer, reports, ends=is_best)  # at the limit of epochs, one with more goes on
            on_epoch(report)
            if is_last:
                break
    except BaseException:
        if on_break_off is not None:
            try:
                on_break_off(optimizer.model())
            except KeyboardInterrupt:  # a lost rank's job is told to end just as this one hears of the loss
                on_break_off(optimizer.model())
        raise
    about = (problem.loss_at_zero, problem.loss_without_weights, problem.share.held_out, problem.first_rate)
    return Trained(optimizer.model(), reports, problem.total, *about, converged)


@dataclass(frozen=True)
class Softmax:
    """A model of several classes, the same bits on every rank and for any number of ranks: ``weights``, float32,
    (classes, features), and ``biases``. ``objective`` and ``gap``: see ``EpochReport``. ``converged``: ``gap`` is
    within ``tol``."""

    weights: npt.NDArray[np.float32]
    biases: npt.NDArray[np.float64]
    steps: int
    objective: float
    gap: float
    loss_without_weights: float
    converged: bool


def train_softmax(rows: Rows, classes: int, settings: TrainingSettings, comm: Communicator | None = None) -> Softmax:
    """Trains by Newton's method on labels from 0 to ``classes - 1``, as ``train`` does on two classes. Minimised is
    mean log Σ exp(score) - score of the own class, + ``l2``/2·|w|². Raises as ``train``."""
    alone = comm is None or comm.world_size == 1
    problem = Problem(rows, settings, comm, alone=alone, classes=classes)
    newton, steps, last = Newton(problem), 0, Pass(0)
    while steps < settings.most_epochs and not last.has_ended:
        last = newton.epoch(steps, lambda step, all_steps: None)
        steps += 1
    return Softmax(*newton.softmax(), steps, last.objective, last.gap, problem.loss_without_weights, last.has_converged)


def train_further(
    rows: Rows,
    settings: TrainingSettings,
    comm: Communicator | None,
    state: State | None,
    number: int,
    *,
    moves: bool = True,
) -> tuple[State, float]:
    """One pass of SGD or AdaGrad from ``state``, which has all features of ``rows``, or from zeros; ``number`` passes
    were before. Without ``moves`` the model stays, and only AdaGrad's sums grow. Also returns the mean loss of rows
    before their own step. Raises as ``train``."""
    optimizer = MiniBatches(Problem(rows, settings, comm, alone=False), SparseSum(comm))
    if state is not None:
        # the optimizer may be another than before
        squares = np.zeros(state.model.weights.size, np.float32) if state.squares is None else state.squares
        optimizer.restore(replace(state, squares=squares if settings.method == "adagrad" else None))
    found = optimizer.epoch(number, lambda step, steps: None, moves=moves)
    optimizer.settle()
    return optimizer.state(), found.loss


def objective(
    model: LinearModel,
    rows: Rows,
    l2: float,
    comm: Communicator | None = None,
    l1: float = 0.0,
    *,
    without: npt.NDArray[np.uint64] | None = None,
) -> float:
    """Weighted mean loss of all ranks' rows + l2/2·|w|² + l1·Σ|w_i|. Labels as for ``train``. ``without``: this rank's
    rows that do not count, as ``Trained.held_out`` has them."""
    targets = signed(rows.labels) if is_classification(model.loss) else rows.labels
    losses = np.stack(
        [rows.weighted(losses_of(model.loss, model.exact_scores(rows), targets)), rows.weighted(np.ones(len(rows)))]
    )
    if without is not None:
        losses = np.delete(losses, without.astype(np.int64), axis=1)
    sums = losses.sum(axis=1)
    if comm is not None:
        comm.all_reduce(sums)
    weights = model.weights
    squares = float(np.einsum("i,i->", weights, weights, dtype=np.float64))
    return float(sums[0] / sums[1]) + l2 / 2 * squares + l1 * float(np.abs(weights).sum(dtype=np.float64))
