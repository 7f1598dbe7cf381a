"""A trained linear model: what it says of rows, and its file, which is written as a whole or not at all."""

from __future__ import annotations

import math
import os
import secrets
import shutil
import zipfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from telegrad import _core
from telegrad.linear.losses import F32, F64, is_classification
from telegrad.linear.rows import MOST_FEATURES, Rows, check_rows

_AT_ONCE = 1 << 22  # entries, whose products are held


def read_arrays(path: str | os.PathLike[str], names: Collection[str]) -> dict[str, Any]:
    """Those of ``names`` that the file has. Raises ``ValueError`` with what else it is, ``OSError`` without one."""
    with open(path, "rb") as file:
        # asked first, as numpy would take such a file for a pickle, and tell how to load that
        if not zipfile.is_zipfile(file):
            raise ValueError("no npz file")
        file.seek(0)
        try:
            with np.load(file) as arrays:
                return {name: arrays[name] for name in arrays.files if name in names}
        except Exception as error:  # damaged bytes lead the readers of numpy and of zipfile to errors of many kinds
            raise ValueError("an npz file whose arrays are damaged or not a model's") from error


def write_whole(path: str | os.PathLike[str], write: Callable[[IO[Any]], None]) -> None:
    """``write`` writes a file beside ``path``, which then takes its place: whoever reads meanwhile, or after this was
    broken off, finds the old one. What is no regular file, and one whose folder lets none be made beside it, is written
    in place. Raises ``OSError`` where that cannot be."""
    given = Path(path)
    target = given.resolve()  # of a link, which stays; that of a descriptor may lead nowhere, or to another file
    if (target.is_file() and target.samefile(given)) or not given.exists():
        try:
            _replace(target, write)
            return
        except PermissionError:
            pass
        except FileNotFoundError as error:  # names the file beside it
            raise FileNotFoundError(error.errno, error.strerror, str(path)) from error
    with given.open("wb") as file:
        write(file)


def _replace(target: Path, write: Callable[[IO[Any]], None]) -> None:
    if target.exists():
        target.open("ab").close()  # raises where it is write-protected, which its folder's owner could pass over
    beside = target.with_name(f"telegrad-{secrets.token_hex(8)}.new")  # fits, however long the other is
    try:
        with beside.open("xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())  # before its name: or a machine that fails may keep the name alone
        if target.exists():
            shutil.copymode(target, beside)
        beside.replace(target)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


# of each array its dimensions, and numpy's kinds of what it holds
_FIELDS = {"indices": (1, "iu"), "values": (1, "f"), "n_features": (0, "iu"), "bias": (0, "f"), "loss": (0, "U")}
# not in every file
_BASE, _GUESSED = "index_base", "base_is_guessed"
_OF_BASE = {_BASE: (0, "iu"), _GUESSED: (0, "b")}
MODEL_ARRAYS = (*_FIELDS, *_OF_BASE)
"""What ``from_arrays()`` looks at."""


@dataclass(frozen=True, eq=False)
class LinearModel:
    """A trained linear model. ``weights``: float32, one for each feature, from the first. ``loss``: the loss it was
    trained for.

    ``index_base``: the number of the first feature in the training text, 0 or 1, so that others can be read alike. It
    is ``None`` without a text, with several bases, or in a file that does not say. ``base_is_guessed``: neither an
    argument nor a comment in the text said so."""

    weights: F32
    bias: float
    loss: str
    index_base: int | None = None
    base_is_guessed: bool = False

    def scores(self, rows: Rows) -> F32:
        """``weights · row + bias`` of each row, float32. Features that the model does not know have no weight. Raises
        ``TypeError`` for another type than ``Rows``. Raises ``ValueError`` for rows of another ``index_base`` than the
        model's, if one of both was guessed: probably wrongly, and weights would meet their neighbours' features."""
        rows = self._known(rows)
        weights = np.ascontiguousarray(self.weights, np.float32)
        scores = np.empty(len(rows), np.float32)
        model = _core.ModelView(weights.ctypes.data, weights.size, 1.0, self.bias)
        _core.score_rows(rows.view(), 0, model, scores.ctypes.data, scores.size)
        return scores

    def exact_scores(self, rows: Rows) -> F64:
        """``scores()`` in float64, more slowly: with a tiny penalty the last digits of a margin are a loss."""
        rows = self._known(rows)
        scores: F64 = np.full(len(rows), self.bias, np.float64)
        offsets, numbers = rows.offsets.astype(np.int64), np.arange(len(rows))
        for first in range(0, rows.nnz, _AT_ONCE):
            part = slice(first, first + _AT_ONCE)
            terms = self.weights[rows.indices[part]].astype(np.float64) * rows.values[part]
            borders = np.clip(offsets, first, first + terms.size)
            scores += np.bincount(np.repeat(numbers, borders[1:] - borders[:-1]), terms, len(rows))
        return scores

    def _known(self, rows: Rows) -> Rows:
        """Without the features that the model does not know. Raises as ``scores``."""
        check_rows(rows)
        self._check_base(rows)
        return rows.first_features(self.weights.size) if rows.n_features > self.weights.size else rows

    def _check_base(self, rows: Rows) -> None:
        is_same = rows.index_base == self.index_base or None in (rows.index_base, self.index_base)
        if is_same or not (rows.base_is_guessed or self.base_is_guessed):
            return
        guessed = "index_base of rows" if rows.base_is_guessed else "index_base of the model's training data"
        zero_based = (self.index_base if rows.base_is_guessed else rows.index_base) == 0
        what = "these rows" if rows.base_is_guessed else "the training data"
        raise ValueError(
            f"the model has index_base={self.index_base} and rows index_base={rows.index_base}, but the {guessed} is "
            f"guessed: read {what} with zero_based={zero_based} if both texts number features alike, else with "
            f"zero_based={not zero_based}"
        )

    def predict(self, rows: Rows) -> F32:
        """The class of each row, -1 or 1, or the number if the loss is the squared error."""
        scores = self.scores(rows)
        return np.where(scores > 0, np.float32(1), np.float32(-1)) if is_classification(self.loss) else scores

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes an ``npz`` file with the weights that are not 0; an older file stays until that is done. Raises
        ``OSError`` if that fails, and ``ValueError`` for a model that ``load()`` would refuse: of another loss, or with
        NaN or Inf."""
        arrays = self.to_arrays()
        write_whole(path, lambda file: np.savez(file, **arrays))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> LinearModel:
        """Reads a file of ``save()``, or a training's checkpoint. Raises ``ValueError`` for any other file and for a
        model with NaN or Inf, ``OSError`` without one."""
        try:
            return cls.from_arrays(read_arrays(path, MODEL_ARRAYS))
        except ValueError as error:
            raise ValueError(
                f"{path} is no model of telegrad linear train, but {error}: name a file that its --model, or "
                "LinearModel.save(), has written"
            ) from error

    def to_arrays(self) -> dict[str, Any]:
        """The arrays of a file, by name. Raises ``ValueError`` for a model that ``from_arrays()`` would refuse."""
        base: dict[str, Any] = {}
        if self.index_base is not None:
            base = {_BASE: np.uint8(self.index_base), _GUESSED: np.bool_(self.base_is_guessed)}
        indices = np.flatnonzero(self.weights).astype(np.uint32)
        arrays: dict[str, Any] = {
            "indices": indices,
            "values": self.weights[indices],
            "n_features": np.uint64(self.weights.size),
            "bias": np.float64(self.bias),
            "loss": np.str_(self.loss),
            **base,
        }
        try:
            _check(arrays)
        except ValueError as error:
            raise ValueError(f"the model cannot be saved: {error}") from error
        return arrays

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Any]) -> LinearModel:
        """The model of a file's arrays, which may have others. Raises ``ValueError``, with the kind of file, if they
        are no model's."""
        if not {*_FIELDS} <= arrays.keys():
            raise ValueError("an npz file without some of a model's arrays")
        found = {name: arrays[name] for name in (*_FIELDS, *(_OF_BASE.keys() & arrays.keys()))}
        try:
            _check(found)
        except Exception as error:  # arrays of any kind lead numpy to errors of many kinds
            raise ValueError("an npz file whose arrays are damaged or not a model's") from error
        weights = np.zeros(int(found["n_features"]), np.float32)
        weights[found["indices"]] = found["values"]
        base = int(found[_BASE]) if _BASE in found else None
        return cls(weights, float(found["bias"]), str(found["loss"]), base, bool(found.get(_GUESSED, False)))


def _check(arrays: Mapping[str, Any]) -> None:
    """Raises ``ValueError`` for arrays that are not a model's."""
    for name, array in arrays.items():
        dimensions, kinds = (_FIELDS | _OF_BASE)[name]
        if array.ndim != dimensions or array.dtype.kind not in kinds:
            raise ValueError(f"{name} is {array.ndim}-D {array.dtype}")
    indices, values, size, bias, loss = (arrays[name] for name in _FIELDS)
    if not 0 <= size <= MOST_FEATURES:
        raise ValueError(f"n_features={size}")
    if indices.size != values.size or (indices[1:] <= indices[:-1]).any():
        raise ValueError("indices do not rise, or are not as many as values")
    if indices.size and not (0 <= indices[0] and indices[-1] < size):
        raise ValueError(f"indices are not below n_features={size}")
    with np.errstate(over="ignore"):
        is_finite = np.isfinite(values.astype(np.float32)).all() and np.isfinite(bias)
    if not is_finite:
        raise ValueError("values or bias have NaN or Inf")
    is_classification(str(loss))
    if arrays.get(_BASE, 0) not in (0, 1):
        raise ValueError(f"{_BASE}={arrays[_BASE]}")


# One pass over the data: its results, and the state that the next one starts from.


@dataclass
class Pass:
    """``loss``: mean over rows; ``entries``: that this rank has sent, over all steps. ``has_ended``: another pass would
    not make the model better; ``has_converged``: because it is within the tolerance."""

    steps: int
    loss: float = 0.0
    compute_s: float = 0.0
    comm_s: float = 0.0
    entries: int = 0
    objective: float = math.nan
    gap: float = math.nan
    has_ended: bool = False
    has_converged: bool = False


@dataclass(frozen=True)
class EpochReport:
    """One pass over the data.

    ``loss``: mean over the epoch's rows, each at its own step. ``compute_s`` and
    ``comm_s``: this rank's seconds in gradients and updates, and in sums with the wait for slower ranks. With overlap
    ``comm_s`` is only the wait. ``entries``: the number that this rank has sent, over all steps; one rank alone: has
    added. ``held_out_loss``, ``accuracy`` and ``auc`` (area under the ROC curve) are of held-out rows of all ranks, NaN
    without any. With the squared error ``accuracy`` and ``auc`` are NaN. ``objective``: at the end, and
    ``gap``: by about what part of it that is above the optimum, at most; NaN but with Newton and the dual method.
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
    objective: float = math.nan
    gap: float = math.nan


@dataclass(frozen=True)
class State:
    """Between two passes, the same bits on every rank. ``squares`` and ``bias_squares``: AdaGrad's sums of squared
    gradients, of each feature and of the bias. ``duals``: the dual method's variables, of all ranks' rows that are
    trained on, and its smoothing behind them."""

    model: LinearModel
    squares: F32 | None = None
    bias_squares: float = 0.0
    duals: F64 | None = None

    @property
    def is_finite(self) -> bool:
        arrays = [one for one in (self.model.weights, self.squares, self.duals) if one is not None]
        numbers = np.array([self.model.bias, self.bias_squares])
        return all(bool(np.isfinite(one).all()) for one in (*arrays, numbers))


class Optimizer(Protocol):
    """How a model is improved, pass by pass. It is called alike on every rank."""

    def epoch(self, number: int, on_step: Callable[[int, int], None]) -> Pass:
        """Pass ``number``, from 0; ``on_step(steps so far, of all)`` is called after each."""

    def model(self) -> LinearModel:
        """As it is now, the same bits on every rank."""

    def settle(self, ends: bool = False) -> None:
        """Rounds what else passes would keep beside ``state()``, so that they go on from here as after ``restore``.
        Where training ``ends``, the state is that of the best model."""

    def state(self) -> State:
        """Behind ``settle``. A rank that does not need it need not ask."""

    def restore(self, state: State) -> None:
        """Before any pass."""
