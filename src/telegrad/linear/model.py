"""A trained linear model: what it says of rows, and its file."""

from __future__ import annotations

import os
import zipfile
from dataclasses import dataclass

import numpy as np

from telegrad import _core
from telegrad.linear.losses import F32, is_classification
from telegrad.linear.rows import Rows

_FIELDS = ("indices", "values", "n_features", "bias", "loss")


@dataclass(frozen=True, eq=False)
class LinearModel:
    """``weights``: float32, one for each feature. ``loss``: what it was trained for."""

    weights: F32
    bias: float
    loss: str

    def scores(self, rows: Rows) -> F32:
        """``weights · row + bias`` of each row, float32. Features that the model does not know have no weight."""
        weights = np.ascontiguousarray(self.weights, np.float32)
        if rows.n_features > weights.size:
            rows = rows.first_features(weights.size)
        scores = np.empty(len(rows), np.float32)
        model = _core.ModelView(weights.ctypes.data, weights.size, 1.0, self.bias)
        _core.score_rows(rows.view(), 0, model, scores.ctypes.data, scores.size)
        return scores

    def predict(self, rows: Rows) -> F32:
        """Of each row the class, -1 or 1, or the number if the loss is the squared error."""
        scores = self.scores(rows)
        return np.where(scores > 0, np.float32(1), np.float32(-1)) if is_classification(self.loss) else scores

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes an ``npz`` file with the weights that are not 0."""
        indices = np.flatnonzero(self.weights).astype(np.uint32)
        with open(path, "wb") as file:
            np.savez(
                file,
                indices=indices,
                values=self.weights[indices],
                n_features=np.uint64(self.weights.size),
                bias=np.float64(self.bias),
                loss=np.str_(self.loss),
            )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> LinearModel:
        """What ``save()`` has written. Raises ``ValueError`` for any other file, ``OSError`` without one."""
        try:
            with np.load(path) as file:
                indices, values, size, bias, loss = (file[name] for name in _FIELDS)
            weights = np.zeros(int(size), np.float32)
            weights[indices] = values
            is_classification(str(loss))
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, EOFError, zipfile.BadZipFile) as error:
            raise ValueError(f"{path} is no model of telegrad linear train: {error}") from error
        return cls(weights, float(bias), str(loss))
