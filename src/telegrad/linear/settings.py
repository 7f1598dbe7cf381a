"""How a linear model is trained. Which rows a step sees depends on these alone, not on the number of ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from telegrad.communicator.operands import checked_flag, checked_integer, checked_number
from telegrad.linear.losses import CURVATURE_BOUND, is_classification

OPTIMIZERS = ("sgd", "adagrad", "coordinate_descent")

_INTEGERS = {
    **dict.fromkeys(("epochs", "batch", "threads"), "an int of at least 1"),
    "coordinates": "an int of at least 1, or None",
    "seed": "an int, 0 or more",
}
_NUMBERS = {
    **dict.fromkeys(("l2", "l1", "decay"), "a finite number, 0 or more"),
    "learning_rate": "a finite number above 0, or None",
    "held_out": "a number from 0 to below 1",
}
_MOST_COUNT = 1 << 40  # beyond any data's; places of rows and coordinates are 64-bit integers
_MOST_THREADS = 1024  # so that a slip takes none from the machine's other processes


@dataclass(frozen=True)
class TrainingSettings:
    """``loss``: see ``LOSSES``. ``l2``, ``l1``: of mean loss + l2/2·|w|² + l1·Σ|w_i|; the bias is not regularised.

    ``optimizer``: see ``OPTIMIZERS``; coordinate descent is for smooth losses.

    ``batch``: rows of all ranks together in a step. ``learning_rate``: of the first step; step t has ``learning_rate /
    (1 + decay·t)``, from t = 0. ``None`` is 0.1 with AdaGrad, and with SGD 1 / (the loss's largest curvature · (mean
    squared length of the ``batch`` longest rows + 1)), which no batch makes diverge, half of that with ``overlap``; a
    shorter last batch then has as much less as it has fewer rows. ``held_out``: the share of rows that are not trained
    on. ``overlap``: a step's sum travels while the next gradient is computed, by weights that lack it.
    ``coordinates``: that each rank moves in a step of coordinate descent. ``None`` takes up to 100, but fewer if rows
    have many features in common: then all that are moved at once can move little. For coordinate descent
    ``batch`` means nothing and ``learning_rate``, ``decay`` and ``overlap`` are refused. ``threads``: of each rank, at
    most 1024; no result depends on them. numpy's numbers become Python's. Raises ``TypeError`` for what is no number or
    flag where one belongs, ``ValueError`` for what cannot be.
    """

    loss: str = "logistic"
    l2: float = 1e-6
    epochs: int = 10
    batch: int = 1000
    learning_rate: float | None = None
    decay: float = 0.0
    bias: bool = True
    held_out: float = 0.0
    seed: int = 0
    optimizer: str = "sgd"
    l1: float = 0.0
    overlap: bool = False
    coordinates: int | None = None
    threads: int = 1

    def __post_init__(self) -> None:
        is_classification(self.loss)
        self._take_python_s()
        for name in ("epochs", "batch", "coordinates", "threads"):
            if getattr(self, name) is None:
                continue
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
            if name != "threads" and getattr(self, name) > _MOST_COUNT:
                raise ValueError(f"{name}={getattr(self, name)} must be at most {_MOST_COUNT}")
        if self.threads > _MOST_THREADS:
            raise ValueError(f"threads={self.threads} must be at most {_MOST_THREADS}: more than cores are of no use")
        for name in ("l2", "l1", "decay", "seed"):
            if not 0 <= getattr(self, name) < math.inf:
                wanted = _INTEGERS.get(name) or _NUMBERS[name]
                raise ValueError(f"{name}={getattr(self, name)} must be {wanted}")
        if self.learning_rate is not None and not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate={self.learning_rate} must be a finite number above 0, or None")
        if not 0 <= self.held_out < 1:
            raise ValueError(f"held_out={self.held_out} must be from 0 to below 1: a share of the rows")
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer={self.optimizer!r} does not exist: use one of {', '.join(OPTIMIZERS)}")
        if self.optimizer == "coordinate_descent":
            if self.loss not in CURVATURE_BOUND:
                raise ValueError(
                    f"loss={self.loss!r} has a kink, where coordinate descent gets stuck: use 'squared_hinge', or "
                    "optimizer='sgd'"
                )
            if self.learning_rate is not None:
                raise ValueError(
                    f"learning_rate={self.learning_rate} is not for optimizer='coordinate_descent', whose steps follow "
                    "from the data: leave it out"
                )
            if self.decay:
                raise ValueError(
                    f"decay={self.decay} is not for optimizer='coordinate_descent', which has no learning rate: "
                    "leave it out"
                )
            if self.overlap:
                raise ValueError("overlap=True is not for optimizer='coordinate_descent': use 'sgd' or 'adagrad'")

    def _take_python_s(self) -> None:
        """Python's int, float or bool in each field, so that ranks which mean the same compare alike."""
        taken: dict[str, int | float] = {}
        for name, wanted in _INTEGERS.items():
            if name == "coordinates" and self.coordinates is None:
                continue
            taken[name] = checked_integer(getattr(self, name), name, wanted)
        for name, wanted in _NUMBERS.items():
            if name != "learning_rate" or self.learning_rate is not None:
                taken[name] = checked_number(getattr(self, name), name, wanted)
        for name in ("bias", "overlap"):
            taken[name] = checked_flag(getattr(self, name), name)
        for name, value in taken.items():
            object.__setattr__(self, name, value)  # as only this is left where the dataclass is frozen

    def rate_at(self, step: int, first: float) -> float:
        """Step's learning rate where the first is ``first``."""
        return first / (1 + self.decay * step)
