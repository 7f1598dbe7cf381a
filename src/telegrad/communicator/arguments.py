"""Single arguments of operations: ranks, tags, numbers and switches, checked before anything is sent."""

from __future__ import annotations

import operator
from numbers import Real
from typing import Any

import numpy as np

SLICES = ("equal", "balanced")
"""How the index range of a sparse sum is divided among the ranks that each sum one part of it."""


def checked_rank(value: Any, argument: str, ranks: int) -> int:
    """``value`` as an int, if it is a rank of ``ranks``, else ``TypeError`` or ``ValueError``."""
    rank = checked_integer(value, argument)
    if not 0 <= rank < ranks:
        raise ValueError(f"{argument}={value!r} is no rank: use an int in [0, {ranks})")
    return rank


def checked_integer(value: Any, argument: str, wanted: str = "an int") -> int:
    """``value`` as an int, numpy's and torch's included; ``TypeError``, which says what is ``wanted``, for others."""
    if not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise TypeError(f"{argument}={value!r} must be {wanted}")


def checked_number(value: Any, argument: str, wanted: str = "a number") -> float:
    """``value`` as a float, numpy's numbers included; ``TypeError``, which says what is ``wanted``, for what is no
    number, as bools and text are, and ``ValueError`` for what no float can hold."""
    if type(value) is float:
        return value
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{argument}={value!r} must be {wanted}")
    try:
        return float(value)
    except OverflowError as error:
        raise ValueError(f"{argument} is more than a float can hold: it must be {wanted}") from error


def checked_flag(value: Any, argument: str, meaning: str = "") -> bool:
    """``value`` as a bool; ``TypeError`` for others: a text such as ``"no"`` would stand for True."""
    if value is True or value is False or isinstance(value, np.bool_):
        return bool(value)
    raise TypeError(f"{argument}={value!r} must be True or False{meaning}")


def check_async(async_op: Any) -> None:
    """Raises ``TypeError`` for what is neither True nor False."""
    checked_flag(async_op, "async_op", ": True returns a Work, False waits")


def checked_factor(value: Any) -> float:
    """A ``switch_factor`` as a float. Raises ``TypeError`` or ``ValueError``."""
    factor = checked_number(value, "switch_factor")
    if not factor >= 0:
        raise ValueError(
            f"switch_factor={value} must be 0 or more: 1.0 switches to dense where both take the same bytes"
        )
    return factor


def checked_slices(slices: Any) -> str:
    """Raises ``ValueError`` with the names that there are."""
    if not isinstance(slices, str) or slices not in SLICES:
        raise ValueError(f"slices={slices!r} does not exist: use one of {', '.join(SLICES)}")
    return slices
