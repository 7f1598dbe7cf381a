"""A way to send a group of gradients, and group costs of the form a + b·bytes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

GroupCost = Callable[[int], float]
"""Seconds by the bytes of a group's dense gradients."""


def no_delay(size: int) -> float:
    """Of a group that is sent as it is."""
    return 0.0


@dataclass(frozen=True)
class SendMethod:
    """``name``: the field's terms, such as ``"dense"``, ``"sparse"``, ``"qsgd4"``. ``cost``: seconds from when a group
    may leave to when its sum is there, on all ranks. ``delay``: seconds by which it holds the backward pass up before
    it leaves, such as for selection on the same processor. ``beside``: seconds of those bytes of a group that go
    densely beside what this way takes, none of them too; ``None``: it takes all. ``busy``, ``busy_beside``: the same
    while the backward pass goes on, where that shares processors with the network; ``None``: no longer than else. All
    seconds are finite and 0 or more, of every group of a model: a way that cannot send some has a large cost there."""

    name: str
    cost: GroupCost
    delay: GroupCost = no_delay
    beside: GroupCost | None = field(default=None, kw_only=True)
    busy: GroupCost | None = field(default=None, kw_only=True)
    busy_beside: GroupCost | None = field(default=None, kw_only=True)

    def cost_of(self, size: int, dense: int = 0) -> float:
        """Seconds of a group of ``size`` bytes, ``dense`` of which are of gradients that no way compresses. Raises
        ``ValueError`` for what is no time."""
        return self._of(self.cost, self.beside, size, dense, "")

    def busy_of(self, size: int, dense: int = 0) -> float:
        """As ``cost_of``, while the backward pass goes on."""
        return self._of(self.busy or self.cost, self.busy_beside or self.beside, size, dense, "busy ")

    def _of(self, cost: GroupCost, beside: GroupCost | None, size: int, dense: int, when: str) -> float:
        if beside is None:
            return seconds_of(cost, size, f"{self.name} {when}cost".strip())
        beside_s = seconds_of(beside, dense, f"{self.name} {when}beside".strip())
        return beside_s + (seconds_of(cost, size - dense, f"{self.name} {when}cost".strip()) if size > dense else 0.0)

    def delay_of(self, size: int, dense: int = 0) -> float:
        """As ``cost_of``, of the delay."""
        taken = size if self.beside is None else size - dense
        if self.delay is no_delay or not taken:
            return 0.0
        return seconds_of(self.delay, taken, f"{self.name} delay".strip())


def seconds_of(cost: GroupCost, size: int, name: str = "cost") -> float:
    """``cost(size)``. Raises ``ValueError``, with ``name``, for what is no time."""
    seconds = float(cost(size))
    check_amount(f"{name}({size})", seconds)
    return seconds


def check_amount(what: str, value: Any) -> None:
    """Raises ``ValueError`` unless ``value`` is finite and 0 or more."""
    if not 0 <= value < math.inf:
        raise ValueError(f"{what} is {value}: it must be finite and 0 or more")


# Fits of measurements. Closed forms of this library's own collectives, which are not linear, are in closed_forms.py.


@dataclass(frozen=True)
class LinearCost:
    """``startup_s`` + ``s_per_byte`` · bytes."""

    startup_s: float
    s_per_byte: float

    def __call__(self, size: int) -> float:
        return self.startup_s + self.s_per_byte * size
