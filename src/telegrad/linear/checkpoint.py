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
from telegrad.communicator.texts import all_gather_text, own_error_first
from telegrad.linear.losses import F32
from telegrad.linear.model import MODEL_ARRAYS, EpochReport, LinearModel, Optimizer, State, read_arrays, write_whole
from telegrad.linear.problem import Problem, TrainingSettings

# of each array of its own its dimensions, and numpy's kinds of what it holds
_OWN = {
    "square_indices": (1, "u"),
    "squares": (1, "f"),
    "bias_squares": (0, "f"),
    "duals": (1, "f"),
    "settings": (0, "U"),
    "data": (1, "f"),
    "epochs": (2, "f"),
}
_MAY_CHANGE = ("epochs", "threads", "tol")
_FIELDS = [one.name for one in dataclasses.fields(EpochReport)]
_COUNTS = ("epoch", "steps", "entries")
_SAME = 1e-6  # ranks sum what describes the data in an order of their own
_RAISED = (OSError, ValueError, MemoryError, RuntimeError)  # by all ranks; the last for all else


@dataclass(frozen=True)
class Data:
    """By what other data are told from those of the training: rows of all ranks, features, the objective where all
    weights are 0, the first learning rate, entries, labels above 0, the sum of all values' squares."""

    rows: int
    features: int
    loss_at_zero: float
    first_rate: float
    entries: int
    positive_labels: int
    sum_of_squares: float

    @classmethod
    def of(cls, problem: Problem) -> Data:
        """Called on all ranks."""
        values = problem.rows.values
        squares = np.einsum("i,i->", values, values, dtype=np.float64)
        sums = np.array([values.size, np.count_nonzero(problem.targets > 0), squares], np.float64)
        if problem.comm is not None:
            problem.comm.all_reduce(sums)
        return cls.of_numbers(
            [problem.total, problem.all_features, problem.loss_at_zero, problem.first_rate, *sums.tolist()]
        )

    @classmethod
    def of_numbers(cls, numbers: list[float]) -> Data:
        """In the order of the fields. Raises ``ValueError`` where there are more or fewer."""
        rows, features, loss_at_zero, first_rate, entries, positive, squares = numbers
        return cls(int(rows), int(features), loss_at_zero, first_rate, int(entries), int(positive), squares)


@dataclass(frozen=True)
class Checkpoint:
    """After ``reports``' epochs. ``settings``: by name, as the training had them."""

    state: State
    reports: list[EpochReport]
    settings: Mapping[str, Any]
    data: Data

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the file, an older one stays until that is done. Raises ``OSError`` where that cannot be, and
        ``ValueError`` for NaN or Inf."""
        state = self.state
        if not state.is_finite:
            raise ValueError("the checkpoint cannot be saved: it has NaN or Inf")
        squares = np.zeros(0, np.float32) if state.squares is None else state.squares
        indices = np.flatnonzero(squares).astype(np.uint32)
        arrays = state.model.to_arrays() | {
            "square_indices": indices,
            "squares": squares[indices],
            "bias_squares": np.float64(state.bias_squares),
            "duals": np.zeros(0) if state.duals is None else state.duals,
            "settings": np.str_(json.dumps(dict(self.settings))),
            "data": np.array(dataclasses.astuple(self.data), np.float64),
            "epochs": np.array([dataclasses.astuple(one) for one in self.reports], np.float64),
        }
        write_whole(path, lambda file: np.savez(file, **arrays))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """What ``save()`` has written. Raises ``ValueError`` for any other file, ``OSError`` without one."""
        try:
            arrays = read_arrays(path, {*MODEL_ARRAYS, *_OWN})
            model = LinearModel.from_arrays(arrays)
            if not _OWN.keys() <= arrays.keys():
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
            for name, (dimensions, kinds) in _OWN.items():
                if arrays[name].ndim != dimensions or arrays[name].dtype.kind not in kinds:
                    raise ValueError(f"{name} is {arrays[name].ndim}-D {arrays[name].dtype}")
            settings, data = json.loads(str(arrays["settings"])), Data.of_numbers(arrays["data"].tolist())
            reports = [
                EpochReport(**{name: int(x) if name in _COUNTS else x for name, x in zip(_FIELDS, row, strict=True)})
                for row in arrays["epochs"].tolist()
            ]
            bias_squares = float(arrays["bias_squares"])
            if not (
                isinstance(settings, dict)
                and data.features == model.weights.size
                and reports
                and [report.epoch for report in reports] == [*range(1, len(reports) + 1)]
                and 0 <= bias_squares < math.inf
            ):
                raise ValueError("numbers that no training has")
            squares = _squares_of(arrays, data.features) if settings["optimizer"] == "adagrad" else None
            duals = arrays["duals"].astype(np.float64) if arrays["duals"].size else None
            highest = 1 if settings["loss"] == "hinge" else np.finfo(np.float64).max
            if duals is not None and not (((duals[:-1] >= 0) & (duals[:-1] <= highest)).all() and duals[-1] > 0):
                raise ValueError("dual variables that no training has")
            return cls(State(model, squares, bias_squares, duals), reports, settings, data)
        except MemoryError:
            raise
        except Exception as error:  # arrays of any kind lead numpy to errors of many kinds
            raise ValueError("an npz file whose arrays are damaged or not a checkpoint's") from error


class Checkpoints:
    """Of one training in ``path``, which only rank 0 reads and writes. All ranks call all of this alike."""

    def __init__(self, path: str | os.PathLike[str], problem: Problem) -> None:
        self._path, self._problem, self._comm = Path(path), problem, problem.comm
        self._data = Data.of(problem)

    def restore(self, optimizer: Optimizer) -> list[EpochReport]:
        """Gives ``optimizer`` what the file has, if there is one: rank 0's reports until then. Raises on all ranks
        ``ValueError`` for what is not of this training or no checkpoint, ``OSError`` for a file that cannot be read,
        ``MemoryError``."""
        found: Checkpoint | None = None
        error: Exception | None = None
        if self._problem.rank == 0:
            try:
                if self._path.exists():
                    if not (self._path.is_file() or self._path.is_dir()):  # opening a pipe would wait for its writer
                        raise ValueError(f"the checkpoint {self._path} is no regular file: name another")
                    found = Checkpoint.load(self._path)
                    self._check(found)
            except Exception as raised:  # none may leave the others waiting
                error = self._told("read", raised)
        self._agree(error)
        state, reports = (None, []) if found is None else (found.state, found.reports)
        if self._comm is not None and self._comm.world_size > 1:
            state, reports = _from_rank_0(state, reports, self._problem, self._comm)
        if state is not None:
            optimizer.restore(state)
        return reports

    def write(self, optimizer: Optimizer, reports: list[EpochReport], *, ends: bool) -> None:
        """``ends``: the training does. Raises on all ranks what rank 0 does, ``OSError`` for a file that cannot be
        written. What is not finite leaves the file as it is."""
        optimizer.settle(ends)
        error: Exception | None = None
        if self._problem.rank == 0:
            try:
                found = Checkpoint(optimizer.state(), reports, _settings_of(self._problem.settings), self._data)
                if found.state.is_finite:
                    found.save(self._path)
            except Exception as raised:  # none may leave the others waiting
                error = self._told("write", raised)
        self._agree(error)

    def _told(self, what: str, raised: Exception) -> Exception:
        """What all ranks raise, as ``raised`` came where rank 0 was to ``what`` the file."""
        if isinstance(raised, ValueError):
            return raised
        kind = next((one for one in _RAISED if isinstance(raised, one)), _RAISED[-1])
        why = (isinstance(raised, OSError) and raised.strerror) or str(raised) or type(raised).__name__
        return kind(f"cannot {what} the checkpoint {self._path}: {why}")

    def _agree(self, error: Exception | None) -> None:
        said = ""
        if error is not None:
            said = f"{next(at for at, kind in enumerate(_RAISED) if isinstance(error, kind))}{error}"
        with own_error_first(error):
            every = [said] if self._comm is None else all_gather_text(self._comm, said)
        for text in filter(None, every):
            raise _RAISED[int(text[0])](text[1:]) from error

    def _check(self, found: Checkpoint) -> None:
        """Raises ``ValueError`` where it is of another training."""
        settings = self._problem.settings
        for name, value in _settings_of(settings).items():
            if name not in _MAY_CHANGE and found.settings.get(name) != value:
                self._refuse(f"{name}={found.settings.get(name)!r}, and here it is {value!r}")
        base, own = found.state.model.index_base, self._problem.index_base
        if None not in (base, own) and base != own:
            self._refuse(f"index_base={base}, and here it is {own}")
        before, now = (dataclasses.asdict(data) for data in (found.data, self._data))
        for name, value in now.items():
            if isinstance(value, int):
                is_same, form = before[name] == value, "d"
            else:
                is_same, form = math.isclose(before[name], value, rel_tol=_SAME), ".9g"
            if not is_same:
                what = name.replace("_", " ")
                self._refuse(f"data whose {what} is {before[name]:{form}}, and here it is {value:{form}}")
        if len(found.reports) > settings.most_epochs:
            self._refuse(f"{len(found.reports)} epochs, and here are epochs={settings.most_epochs}")
        duals = found.state.duals
        if (0 if duals is None else duals.size) != self._problem.dual_count:
            self._refuse("dual variables of other rows")

    def _refuse(self, what: str) -> NoReturn:
        raise ValueError(
            f"the checkpoint {self._path} is of a training with {what}: give the same, or another file, or remove "
            "this one"
        )


def _settings_of(settings: TrainingSettings) -> dict[str, Any]:
    chosen = dataclasses.asdict(settings) | {"optimizer": settings.method, "batch": settings.rows_a_step}
    return {name: value for name, value in chosen.items() if name not in _MAY_CHANGE}


def _squares_of(arrays: Mapping[str, Any], features: int) -> F32:
    """Raises ``ValueError`` or ``IndexError`` for what are none."""
    indices, values = arrays["square_indices"], arrays["squares"]
    if indices.size != values.size or (indices[1:] <= indices[:-1]).any():
        raise ValueError("square_indices do not rise, or are not as many as squares")
    squares = np.zeros(features, np.float32)
    with np.errstate(over="ignore"):
        squares[indices] = values
    if not ((values >= 0).all() and np.isfinite(squares[indices]).all()):
        raise ValueError("squares are no squares")
    return squares


def _from_rank_0(
    state: State | None, reports: list[EpochReport], problem: Problem, comm: Communicator
) -> tuple[State | None, list[EpochReport]]:
    """On all ranks what rank 0 has."""
    about = all_gather_text(comm, json.dumps([dataclasses.astuple(report) for report in reports]))[0]
    reports = [EpochReport(*report) for report in json.loads(about)]
    if not reports:
        return None, []
    if state is None:
        squares = np.zeros(problem.all_features, np.float32) if problem.settings.method == "adagrad" else None
        duals = np.zeros(problem.dual_count) if problem.dual_count else None
        state = State(problem.model(np.zeros(problem.all_features, np.float32), 0.0), squares, duals=duals)
    numbers = np.array([state.model.bias, state.bias_squares])
    for array in (state.model.weights, state.squares, state.duals, numbers):
        if array is not None:
            comm.broadcast(array, 0)
    bias, bias_squares = numbers.tolist()
    return State(dataclasses.replace(state.model, bias=bias), state.squares, bias_squares, state.duals), reports
