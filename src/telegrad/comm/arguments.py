"""Single arguments of operations: ranks, tags and colors, checked before anything is sent."""

from __future__ import annotations

import operator
from typing import Any


def checked_root(root: Any, ranks: int) -> int:
    """``root`` if it is a rank, else ``ValueError``."""
    if isinstance(root, bool) or not isinstance(root, int) or not 0 <= root < ranks:
        raise ValueError(f"root={root!r} is no rank: use an int in [0, {ranks})")
    return root


def checked_integer(value: Any, argument: str, wanted: str = "an int") -> int:
    """``value`` as an int, numpy's and torch's included; ``TypeError``, which says what is ``wanted``, for others."""
    if not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise TypeError(f"{argument}={value!r} must be {wanted}")
