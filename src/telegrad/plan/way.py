"""A way to send a group of gradients: dense or compressed, by which algorithm, in which format."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

GroupCost = Callable[[int], float]
"""Seconds by the bytes of a group's dense gradients."""


def no_delay(size: int) -> float:
    """Of a group that is sent as it is."""
    return 0.0


@dataclass(frozen=True)
class Way:
    """``name``: the field's terms, such as ``"dense"``, ``"sparse"``, ``"qsgd4"``. ``cost``: seconds from when a group
    may leave to when its sum is there, on all ranks. ``delay``: seconds by which it holds the backward pass up before
    it leaves, such as for selection on the same processor."""

    name: str
    cost: GroupCost
    delay: GroupCost = no_delay


def seconds_of(cost: GroupCost, size: int, name: str = "cost") -> float:
    """``cost(size)``. Raises ``ValueError``, with ``name``, for what is no time."""
    seconds = float(cost(size))
    check_amount(f"{name}({size})", seconds)
    return seconds


def check_amount(what: str, value: Any) -> None:
    """Raises ``ValueError`` unless ``value`` is finite and 0 or more."""
    if not 0 <= value < math.inf:
        raise ValueError(f"{what} is {value}: it must be finite and 0 or more")
