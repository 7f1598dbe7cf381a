"""Losses and measures of scores, in numpy. This module must not know of ranks or training."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

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
