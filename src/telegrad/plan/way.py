"""A way to send a group of gradients: dense or compressed, by which algorithm, in which format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

GroupCost = Callable[[int], float]
"""Seconds by the bytes of a group's dense gradients."""


def _nothing(size: int) -> float:
    return 0.0


@dataclass(frozen=True)
class Way:
    """``name``: the field's terms, such as ``"dense"``, ``"sparse"``, ``"qsgd4"``. ``cost``: seconds from when a group
    may leave to when its sum is there, on all ranks. ``delay``: seconds by which it holds the backward pass up before
    it leaves, such as for selection on the same processor."""

    name: str
    cost: GroupCost
    delay: GroupCost = _nothing
