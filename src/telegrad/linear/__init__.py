"""Linear models on sparse data: rows from LIBSVM files, training among ranks that sum sparse gradients."""

from telegrad.linear.data import read_libsvm
from telegrad.linear.losses import LOSSES
from telegrad.linear.model import LinearModel
from telegrad.linear.ngrams import hashed_ngrams
from telegrad.linear.rows import Rows
from telegrad.linear.settings import TrainingSettings
from telegrad.linear.training import EpochReport, Trained, objective, train

__all__ = [
    "LOSSES",
    "EpochReport",
    "LinearModel",
    "Rows",
    "Trained",
    "TrainingSettings",
    "hashed_ngrams",
    "objective",
    "read_libsvm",
    "train",
]
