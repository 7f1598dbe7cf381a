"""What a training goes on from after it was broken off: its file, and how all ranks take it back.

A checkpoint is a model's file with more in it: the model so far can be used as any other.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from telegrad import Communicator
from telegrad.comm.agreed_errors import own_error_first
from telegrad.comm.texts import all_gather_text
from telegrad.linear.array_files import read_arrays
from telegrad.linear.losses import F32
from telegrad.linear.model import LinearModel
from telegrad.linear.passes import EpochReport, Optimizer, State
from telegrad.linear.problem import Problem
from telegrad.linear.settings import TrainingSettings
from telegrad.linear.whole_files import write_whole

_MODEL = ("indices", "values", "n_features", "bias", "loss", "index_base")
_OWN = ("square_indices", "squares", "bias_squares", "settings", "data", "epochs")
_MAY_CHANGE = ("epochs", "threads")
_FIELDS = [one.name for one in dataclasses.fields(EpochReport)]
_COUNTS = ("epoch", "steps", "entries")
_SAME = 1e-6  # ranks sum what describes the data in an order of their own


@dataclass(frozen=True)
class Data:
    """By what other data are told from those of the training: rows of all ranks, features, the objective where all
    weights are 0, the first learning rate."""

    rows: int
    features: int
    loss_at_zero: float
    first_rate: float

    @classmethod
    def of(cls, problem: Problem) -> Data:
        return cls(problem.total, problem.all_features, problem.loss_at_zero, problem.first_rate)


@dataclass(frozen=True)
class Checkpoint:
    """After ``reports``' epochs. ``settings``: by name, as the training had them."""

    state: State
    reports: list[EpochReport]
    settings: Mapping[str, Any]
    data: Data

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the file, an older one stays until that is done. Raises ``OSError`` where that cannot be, and
        ``ValueError`` for numbers that are not finite."""
        state = self.state
        if not state.is_finite:
            raise ValueError("the checkpoint cannot be saved: its numbers are not finite")
        squares = np.zeros(0, np.float32) if state.squares is None else state.squares
        indices = np.flatnonzero(squares).astype(np.uint32)
        arrays = state.model.to_arrays() | {
            "square_indices": indices,
            "squares": squares[indices],
            "bias_squares": np.float64(state.bias_squares),
            "settings": np.str_(json.dumps(dict(self.settings))),
            "data": np.array(dataclasses.astuple(self.data), np.float64),
            "epochs": np.array([dataclasses.astuple(one) for one in self.reports], np.float64),
        }
        write_whole(path, lambda file: np.savez(file, **arrays))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """What ``save()`` has written. Raises ``ValueError`` for any other file, ``OSError`` without one."""
        try:
            arrays = read_arrays(path, {*_MODEL, *_OWN})
            model = LinearModel.from_arrays(arrays)
            if not {*_OWN} <= arrays.keys():
                raise ValueError("a model without what a training goes on from")
            return cls._of_arrays(model, arrays)
        except ValueError as error:
            raise ValueError(
                f"{path} is no checkpoint of a linear model's training, but {error}: name a file that a training with "
                "this option has written, or one that does not exist yet"
            ) from error

    @classmethod
    def _of_arrays(cls, model: LinearModel, arrays: Mapping[str, Any]) -> Checkpoint:
        try:
            settings = json.loads(str(arrays["settings"]))
            rows, features, *numbers = arrays["data"].tolist()
            reports = [
                EpochReport(**{name: int(x) if name in _COUNTS else x for name, x in zip(_FIELDS, row, strict=True)})
                for row in arrays["epochs"].tolist()
            ]
            squares: F32 | None = None
            if settings["optimizer"] == "adagrad":
                squares = np.zeros(model.weights.size, np.float32)
                squares[arrays["square_indices"]] = arrays["squares"]
            state = State(model, squares, float(arrays["bias_squares"]))
            if not (reports and state.is_finite and features == model.weights.size):
                raise ValueError
            return cls(state, reports, settings, Data(int(rows), int(features), *numbers))
        except Exception as error:  # arrays of any kind lead numpy to errors of many kinds
            raise ValueError("an npz file whose arrays are damaged or not a checkpoint's") from error


class Checkpoints:
    """Of one training in ``path``, which only rank 0 reads and writes. All ranks call all of this alike."""

    def __init__(self, path: str | os.PathLike[str], problem: Problem) -> None:
        self._path, self._problem, self._comm = Path(path), problem, problem.comm

    def restored(self) -> Checkpoint | None:
        """What the file has, if there is one. Raises on all ranks ``ValueError`` for what is not of this training or no
        checkpoint, ``OSError`` for a file that cannot be read."""
        found: Checkpoint | None = None
        error: Exception | None = None
        if self._problem.rank == 0:
            try:
                if self._path.exists():
                    found = Checkpoint.load(self._path)
                    self._check(found)
            except ValueError as raised:
                error = raised
            except OSError as raised:
                error = OSError(f"cannot read the checkpoint {self._path}: {raised.strerror or raised}")
        self._agree(error)
        if self._comm is None or self._comm.world_size == 1:
            return found
        return _from_rank_0(found, self._problem, self._comm)

    def write(self, optimizer: Optimizer, reports: list[EpochReport]) -> None:
        """Raises ``OSError`` on all ranks where rank 0 cannot. What is not finite leaves the file as it is."""
        optimizer.settle()
        error: Exception | None = None
        if self._problem.rank == 0:
            settings, data = _settings_of(self._problem.settings), Data.of(self._problem)
            try:
                found = Checkpoint(optimizer.state(), reports, settings, data)
                if found.state.is_finite:
                    found.save(self._path)
            except OSError as raised:
                error = OSError(f"cannot write the checkpoint {self._path}: {raised.strerror or raised}")
        self._agree(error)

    def _agree(self, error: Exception | None) -> None:
        said = "" if error is None else f"{'S' if isinstance(error, OSError) else 'V'}{error}"
        with own_error_first(error):
            every = [said] if self._comm is None else all_gather_text(self._comm, said)
        for text in filter(None, every):
            raise (OSError if text[0] == "S" else ValueError)(text[1:]) from error

    def _check(self, found: Checkpoint) -> None:
        """Raises ``ValueError`` where it is of another training."""
        settings = self._problem.settings
        for name, value in _settings_of(settings).items():
            if name not in _MAY_CHANGE and found.settings.get(name) != value:
                self._refuse(f"{name}={found.settings.get(name)!r}, and here it is {value!r}")
        before, now = (dataclasses.asdict(data) for data in (found.data, Data.of(self._problem)))
        for name, value in now.items():
            if not math.isclose(before[name], value, rel_tol=_SAME):
                what = name.replace("_", " ")
                self._refuse(f"data whose {what} is {before[name]:g}, and here it is {value:g}")
        if len(found.reports) > settings.epochs:
            self._refuse(f"{len(found.reports)} epochs, and here are epochs={settings.epochs}")

    def _refuse(self, what: str) -> NoReturn:
        raise ValueError(
            f"the checkpoint {self._path} is of a training with {what}: give the same, or another file, or remove "
            "this one"
        )


def _settings_of(settings: TrainingSettings) -> dict[str, Any]:
    return {name: value for name, value in dataclasses.asdict(settings).items() if name not in _MAY_CHANGE}


def _from_rank_0(found: Checkpoint | None, problem: Problem, comm: Communicator) -> Checkpoint | None:
    """On all ranks what rank 0 has found."""
    about = "" if found is None else json.dumps([[*map(dataclasses.astuple, found.reports)], dict(found.settings)])
    about = all_gather_text(comm, about)[0]
    if not about:
        return None
    reports, settings = json.loads(about)
    arrays = [np.zeros(problem.features, np.float32)]
    if problem.settings.optimizer == "adagrad":
        arrays.append(np.zeros(problem.features, np.float32))
    numbers = np.zeros(6)
    if found is not None:
        state = found.state
        arrays = [one for one in (state.model.weights, state.squares) if one is not None]
        numbers = np.array([state.model.bias, state.bias_squares, *dataclasses.astuple(found.data)])
    for array in (*arrays, numbers):
        comm.broadcast(array, 0)
    bias, bias_squares, rows, features, *rest = numbers.tolist()
    return Checkpoint(
        State(problem.model(arrays[0], bias), arrays[1] if len(arrays) > 1 else None, bias_squares),
        [EpochReport(*report) for report in reports],
        settings,
        Data(int(rows), int(features), *rest),
    )
