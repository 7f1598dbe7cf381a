"""Losses, measures of scores, and how far a model is above the optimum, in numpy. This module must not know of ranks or
training.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from telegrad import Communicator

LOSSES = ("logistic", "hinge", "squared_hinge", "squared_error")
CURVATURE_BOUND = {"logistic": 0.25, "squared_hinge": 2.0, "squared_error": 1.0}
"""The largest second derivative by the score. The hinge has none."""

F64 = npt.NDArray[np.float64]
F32 = npt.NDArray[np.float32]


def is_classification(loss: str) -> bool:
    """Are labels two classes, or numbers? Raises ``ValueError`` for a loss that does not exist."""
    if loss not in LOSSES:
        raise ValueError(f"loss={loss!r} does not exist: use one of {', '.join(LOSSES)}")
    return loss != "squared_error"


def losses_of(loss: str, scores: npt.ArrayLike, targets: npt.ArrayLike) -> F64:
    """Each row's loss. ``targets``: -1 or 1, or any number for ``"squared_error"``, whose loss is half the square."""
    scores, targets = np.asarray(scores, np.float64), np.asarray(targets, np.float64)
    if not is_classification(loss):
        return np.asarray((scores - targets) ** 2 / 2)
    margins = scores * targets
    if loss == "logistic":
        return np.asarray(np.logaddexp(0, -margins))
    short = np.maximum(0, 1 - margins)
    return np.asarray(short if loss == "hinge" else short**2)


def slopes_and_curvatures(loss: str, scores: F64, targets: F64, smoothing: float) -> tuple[F64, F64]:
    """Of each row's loss the first and second derivative by the score. The hinge's kink has no curvature: there a
    parabola joins both lines, over margins of 1 - ``smoothing`` to 1 + ``smoothing``."""
    if not is_classification(loss):
        return scores - targets, np.ones_like(scores)
    margins = scores * targets
    if loss == "logistic":
        small = np.exp(-np.abs(margins))
        return -targets * np.where(margins < 0, 1, small) / (1 + small), small / (1 + small) ** 2
    if loss == "squared_hinge":
        return -2 * targets * np.maximum(0, 1 - margins), np.where(margins < 1, 2.0, 0.0)
    part = (1 + smoothing - margins) / (2 * smoothing)
    inside = (part > 0) & (part < 1)
    return -targets * np.clip(part, 0, 1), np.where(inside, 1 / (2 * smoothing), 0.0)


def least_loss_of_classes(loss: str, positive: float) -> float:
    """The least mean loss of a model without weights, but with a bias, for labels of which the share ``positive`` is 1
    and all others are -1."""
    shares = [share for share in (positive, 1 - positive) if share > 0]
    if loss == "logistic":
        return -sum(share * math.log(share) for share in shares)
    return 2 * min(positive, 1 - positive) if loss == "hinge" else 4 * positive * (1 - positive)


def label_counts(labels: F32) -> tuple[int, int, int]:
    """How many are -1, 0 and 1."""
    minus, zero, plus = (int(np.count_nonzero(labels == one)) for one in (-1, 0, 1))
    return minus, zero, plus


def are_classes(rows: int, minus: int, zero: int, plus: int) -> bool:
    """Are the labels of so many rows, of which ``label_counts`` are these, 0 or -1 and 1?"""
    return minus + zero + plus == rows and not (minus and zero)


def signed(labels: F32) -> F32:
    """Labels of two classes, 0 or -1 and 1, as -1 and 1."""
    return np.where(labels > 0, np.float32(1), np.float32(-1))


def area_under_curve(scores: npt.ArrayLike, targets: npt.ArrayLike) -> float:
    """The share of pairs of a positive and another row that are ordered rightly, ties as half; NaN without pairs."""
    scores, positive = np.asarray(scores), np.asarray(targets) > 0
    found, counts = np.unique(scores, return_inverse=True)[1], np.unique(scores, return_counts=True)[1]
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[found]
    ones, others = int(positive.sum()), int((~positive).sum())
    if not ones or not others:
        return float("nan")
    return float((ranks[positive].sum() - ones * (ones + 1) / 2) / (ones * others))


# How far above the optimum is a trained model?
# A few Newton steps from the model find another one; by as much as that is better, the model is at least above the
# optimum. So no model at the optimum is ever said to be above it. If the loss is smooth, Newton steps also find
# nearly all of a small gap, and much of a large one. The steps for the hinge are those of a smoothed one. Source of
# truncated Newton steps by conjugate gradients: Nocedal and Wright, Numerical Optimization, 7.1.

_STEPS = 10
_PRODUCTS = 50  # with the Hessian in a step
_RESIDUAL = 0.1  # of a step's linear system, against its right side
_HALVINGS = 20
_SMOOTHINGS = {"hinge": (0.1, 0.01, 0.001)}


@dataclass(frozen=True)
class _Problem:
    """Mean loss of all ranks' rows + l2/2·|w|², of z = (w, bias)."""

    matrix: Any
    targets: F64
    loss: str
    l2: float
    bias: bool
    rows: int
    comm: Communicator | None
    smoothing: float = 1.0

    def summed(self, own: F64) -> F64:
        if self.comm is not None:
            self.comm.all_reduce(own)
        return own

    def scores(self, z: F64) -> F64:
        return np.asarray(self.matrix @ z[:-1] + z[-1])

    def transposed(self, by_row: F64) -> F64:
        """Of all ranks' rows Σ by_row·(x, 1) / rows."""
        own: F64 = np.append(self.matrix.T @ by_row, by_row.sum() if self.bias else 0.0)
        return np.asarray(self.summed(own) / self.rows)

    def objective(self, scores: F64, z: F64) -> float:
        own = np.array([losses_of(self.loss, scores, self.targets).sum()])
        return float(self.summed(own)[0]) / self.rows + self.l2 / 2 * float(z[:-1] @ z[:-1])

    def penalised(self, z: F64) -> F64:
        return np.append(self.l2 * z[:-1], 0.0)


def gap_above_optimum(
    matrix: Any,
    targets: F64,
    weights: F32,
    bias: float | None,
    *,
    loss: str,
    l2: float,
    rows: int,
    negligible: float,
    enough: float,
    comm: Communicator | None = None,
) -> float:
    """By what part of the optimum, at least, the model's objective is above it; ends as soon as ``enough`` is reached.

    ``matrix``: this rank's rows, a scipy array of float64; ``targets``: -1 and 1, or numbers. ``bias``: ``None`` for a
    model without one. ``rows``: of all ranks. ``negligible``: a difference of objectives, above 0, that counts as none.
    Called on all ranks of ``comm`` alike, which all get the same number. Each step takes some passes over the rows, and
    as many sums of a number a feature.
    """
    problem = _Problem(matrix, targets, loss, l2, bias is not None, rows, comm)
    z = np.append(np.asarray(weights, np.float64), bias or 0.0)
    scores = problem.scores(z)
    before = reached = problem.objective(scores, z)

    def gap() -> float:
        return 0.0 if before - reached <= negligible else (before - reached) / max(reached, negligible)

    for smoothing in _SMOOTHINGS.get(loss, (1.0,)):
        smoothed = replace(problem, smoothing=smoothing)
        for _ in range(_STEPS):
            step = _newton_step(smoothed, scores, z)
            part, lower = _shortened(problem, scores, z, step, reached)
            z, scores, fall, reached = z + part * step, scores + part * problem.scores(step), reached - lower, lower
            if gap() >= enough:
                return gap()
            if fall <= enough / 100 * max(reached, negligible):
                break
    return gap()


def _newton_step(problem: _Problem, scores: F64, z: F64) -> F64:
    """By conjugate gradients, whose first steps already fall; scaled by the Hessian's diagonal, as features may be of
    any scale."""
    slopes, curvatures = slopes_and_curvatures(problem.loss, scores, problem.targets, problem.smoothing)
    gradient = problem.transposed(slopes) + problem.penalised(z)
    own = np.append(problem.matrix.multiply(problem.matrix).T @ curvatures, curvatures.sum() if problem.bias else 0.0)
    diagonal = problem.summed(own) / problem.rows + np.append(np.full(z.size - 1, problem.l2), 0.0)
    inverse = np.divide(1.0, diagonal, out=np.zeros_like(diagonal), where=diagonal > 0)
    step, residual = np.zeros_like(z), -gradient
    scaled = inverse * residual
    direction, product = scaled, float(residual @ scaled)
    wanted = _RESIDUAL**2 * product
    for _ in range(_PRODUCTS):
        if not product > wanted:
            break
        curved = problem.transposed(curvatures * problem.scores(direction)) + problem.penalised(direction)
        along = float(direction @ curved)
        if not along > 0:
            break
        step = step + product / along * direction
        residual = residual - product / along * curved
        scaled = inverse * residual
        product, last = float(residual @ scaled), product
        direction = scaled + product / last * direction
    return step


def _shortened(problem: _Problem, scores: F64, z: F64, step: F64, reached: float) -> tuple[float, float]:
    """The part of a step that makes the objective lower, 1 or halved often enough, and that objective. 0 and
    ``reached`` if no part does."""
    moved, best = problem.scores(step), (0.0, reached)
    for halving in range(_HALVINGS):
        part = 0.5**halving
        value = problem.objective(scores + part * moved, z + part * step)
        if value < best[1]:
            best = (part, value)
        elif best[0]:
            break
    return best
