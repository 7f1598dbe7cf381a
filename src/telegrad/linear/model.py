"""A trained linear model: what it says of rows, and its file."""

from __future__ import annotations

import os
import zipfile
from dataclasses import dataclass
from typing import Any

import numpy as np

from telegrad import _core
from telegrad.linear.losses import F32, is_classification
from telegrad.linear.rows import Rows

_FIELDS = ("indices", "values", "n_features", "bias", "loss")
_BASE = "index_base"  # not in every file


@dataclass(frozen=True, eq=False)
class LinearModel:
    """``weights``: float32, one for each feature. ``loss``: what it was trained for. ``index_base``: what the text that
    it was trained on calls its first feature, 0 or 1, so that others can be read alike; ``None`` if rows were not read
    from a text, or with different ones, or the model is from a file that does not say. ``weights`` begin with the first
    feature in any case."""

    weights: F32
    bias: float
    loss: str
    index_base: int | None = None

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
        """Writes an ``npz`` file with the weights that are not 0. Raises ``OSError`` where that cannot be."""
        base: dict[str, Any] = {} if self.index_base is None else {_BASE: np.uint8(self.index_base)}
        indices = np.flatnonzero(self.weights).astype(np.uint32)
        with open(path, "wb") as file:
            np.savez(
                file,
                indices=indices,
                values=self.weights[indices],
                n_features=np.uint64(self.weights.size),
                bias=np.float64(self.bias),
                loss=np.str_(self.loss),
                **base,
            )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> LinearModel:
        """What ``save()`` has written. Raises ``ValueError`` for any other file, ``OSError`` without one."""
        with open(path, "rb") as file:
            # asked first, as numpy would take such a file for a pickle, and tell how to load that
            if not zipfile.is_zipfile(file):
                raise _no_model(path, "no npz file")
            file.seek(0)
            try:
                with np.load(file) as arrays:
                    indices, values, size, bias, loss = (arrays[name] for name in _FIELDS)
                    base = int(arrays[_BASE]) if _BASE in arrays else None
                weights = np.zeros(int(size), np.float32)
                weights[indices] = values
                is_classification(str(loss))
                if base not in (None, 0, 1):
                    raise ValueError(f"{_BASE}={base}")
            except KeyError as error:
                raise _no_model(path, "an npz file without some of a model's arrays") from error
            except (IndexError, TypeError, ValueError, AttributeError, EOFError, zipfile.BadZipFile) as error:
                raise _no_model(path, "an npz file whose arrays are damaged or not a model's") from error
        return cls(weights, float(bias), str(loss), base)


def _no_model(path: str | os.PathLike[str], found: str) -> ValueError:
    return ValueError(
        f"{path} is no model of telegrad linear train, but {found}: name a file that its --model, or "
        "LinearModel.save(), has written"
    )
