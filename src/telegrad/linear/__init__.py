"""Linear models on sparse data: rows from LIBSVM files, training among ranks that sum sparse gradients."""

from typing import TYPE_CHECKING, Any

from telegrad.linear.data import read_libsvm
from telegrad.linear.losses import LOSSES
from telegrad.linear.model import EpochReport, LinearModel
from telegrad.linear.problem import TrainingSettings
from telegrad.linear.rows import Rows
from telegrad.linear.training import Trained, objective, train

__all__ = [
    "LOSSES",
    "EpochReport",
    "LinearModel",
    "Rows",
    "Trained",
    "TrainingSettings",
    "objective",
    "read_libsvm",
    "train",
]

if TYPE_CHECKING:
    from telegrad.linear.estimators import LinearSVC as LinearSVC
    from telegrad.linear.estimators import LogisticRegression as LogisticRegression
    from telegrad.linear.estimators import Ridge as Ridge

_ESTIMATORS = ("LinearSVC", "LogisticRegression", "Ridge")  # not in __all__: they need scikit-learn


def __getattr__(name: str) -> Any:
    if name not in _ESTIMATORS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from telegrad.linear import estimators

    return getattr(estimators, name)
