"""In which order the elements of a parameter, and of its gradient, lie in memory; states have them by rows.

What waits for a parameter is a flat vector in the order of its gradient's memory, for which a ``torch.channels_last``
weight has another order than a contiguous one. A state must fit both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from telegrad.train.resharding import GROUPS


@dataclass(frozen=True)
class MemoryOrder:
    """Of a dense tensor of ``shape``, without gaps."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of_gradient(cls, parameter: nn.Parameter) -> Self:
        """Fused optimisers walk through a parameter and its gradient side by side, in the order of memory."""
        return cls(tuple(parameter.shape), tuple(torch.empty_like(parameter, device="meta").stride()))

    @property
    def steps(self) -> tuple[int, ...]:
        """What tells two orders of one shape apart: the strides of dimensions with more than one element."""
        return tuple(step for step, size in zip(self.strides, self.shape, strict=True) if size > 1)

    @property
    def is_by_rows(self) -> bool:
        """Whether the last dimension's elements are neighbours, and so on, as in a C array."""
        return self.steps == MemoryOrder(self.shape, torch.empty(self.shape, device="meta").stride()).steps

    def by_rows(self, values: Tensor) -> Tensor:
        """Of flat ``values`` in this order those by rows."""
        return values.as_strided(self.shape, self.strides).reshape(-1)

    def from_rows(self, values: Tensor) -> Tensor:
        """The opposite of ``by_rows``."""
        made = torch.empty_like(values)
        made.as_strided(self.shape, self.strides).copy_(values.view(self.shape))
        return made


def orders_of(parameters: Mapping[str, nn.Parameter]) -> dict[str, MemoryOrder]:
    """By name, of those that are not by rows."""
    found = {name: MemoryOrder.of_gradient(one) for name, one in parameters.items()}
    return {name: order for name, order in found.items() if not order.is_by_rows}


def state_by_rows(state: Mapping[str, Any], orders: Mapping[str, MemoryOrder]) -> dict[str, Any]:
    """A compressor's state, whose tensors are in the ``orders``, with all of them by rows."""
    return _converted(state, orders, MemoryOrder.by_rows)


def state_in_memory(state: Any, orders: Mapping[str, MemoryOrder]) -> Any:
    """The opposite of ``state_by_rows``. What is no such state stays as it is: who loads it says what is wrong."""
    return _converted(state, orders, MemoryOrder.from_rows) if orders and isinstance(state, Mapping) else state


def _converted(state: Mapping[str, Any], orders: Mapping[str, MemoryOrder], convert: Any) -> dict[str, Any]:
    made = dict(state)
    for group, kind in GROUPS.items():
        entries = made.get(group)
        if isinstance(entries, Mapping):
            made[group] = {name: _entry(entry, kind, orders.get(name), convert) for name, entry in entries.items()}
    return made


def _entry(entry: Any, kind: str, order: MemoryOrder | None, convert: Any) -> Any:
    if order is None or not isinstance(entry, Mapping) or not isinstance(entry.get(kind), (Tensor, np.ndarray)):
        return entry
    values = torch.as_tensor(entry[kind]).detach()
    if values.dim() != 1 or values.numel() != torch.Size(order.shape).numel():
        return entry
    return {**entry, kind: convert(order, values.contiguous())}
