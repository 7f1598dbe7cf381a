"""Single arguments of operations: ranks, tags and colors, checked before anything is sent."""

from __future__ import annotations

import operator
from typing import Any


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
