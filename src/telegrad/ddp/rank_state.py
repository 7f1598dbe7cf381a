"""What a rank saves: what it has not sent yet, by parameter, and which rank and step that is of; by rows, whatever the
order in which a parameter's elements, and those of its gradient, lie in memory.

What waits for a parameter is a flat vector in the order of its gradient's memory, for which a ``torch.channels_last``
weight has another order than a contiguous one. A state must fit both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from telegrad.communicator import Communicator
from telegrad.compress import Compressor
from telegrad.compress.arguments import checked_count
from telegrad.ddp.bucket import GradBucket
from telegrad.ddp.resharding import GROUPS, VERSION


@dataclass(frozen=True)
class MemoryOrder:
    """Of a dense tensor of ``shape``, without gaps."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of_gradient(cls, parameter: nn.Parameter) -> Self:
        """Fused optimisers walk through a parameter and its gradient side by side, in the order of memory."""
        return cls(tuple(parameter.shape), tuple(torch.empty_like(parameter, device="meta").stride()))

    @classmethod
    def in_bucket(cls, parameter: Tensor) -> Self:
        """DDP's own views (those of ``GradBucket.gradients()`` are by rows, whatever these are)."""
        dense = torch.empty_like(parameter, device="meta").stride() == parameter.stride()  # it has no gaps
        shape = tuple(parameter.shape)
        return cls(shape, parameter.stride() if dense else torch.empty(shape, device="meta").stride())

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


class MemoryOrders:
    """In which order a compressor has what it remembers of each of ``parameters``: that of their gradients."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        found = {name: MemoryOrder.of_gradient(one) for name, one in parameters.items()}
        self._not_by_rows = {name: order for name, order in found.items() if not order.is_by_rows}

    def has(self, name: str, order: MemoryOrder) -> bool:
        """Whether that is this parameter's."""
        own = self._not_by_rows.get(name)
        return order.is_by_rows if own is None else order.steps == own.steps

    def follow(self, bucket: GradBucket, names: Mapping[int, str], compressor: Compressor) -> None:
        """What is remembered is moved into the order that DDP gives the gradients of this bucket, should that be
        another: that of the parameters when it lays buckets out, which it does once more after the first pass."""
        for parameter in bucket.parameters():
            name, order = names[id(parameter)], MemoryOrder.in_bucket(parameter)
            if not self.has(name, order):
                for store in (compressor.residuals, compressor.momentum):
                    if store is not None and name in store:
                        self._move(store[name].values, name, order)
                self._not_by_rows.pop(name, None)
                if not order.is_by_rows:
                    self._not_by_rows[name] = order

    def by_rows(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A compressor's state, whose tensors are in these orders, with all of them by rows."""
        return _converted(state, self._not_by_rows, MemoryOrder.by_rows)

    def from_rows(self, state: Any) -> Any:
        """The opposite of ``by_rows``. What is no such state stays as it is: who loads it says what is wrong."""
        return _converted(state, self._not_by_rows, MemoryOrder.from_rows) if isinstance(state, Mapping) else state

    def _move(self, values: npt.NDArray[np.float32], name: str, order: MemoryOrder) -> None:
        own, held = self._not_by_rows.get(name), torch.from_numpy(values)
        held.copy_(order.from_rows(held if own is None else own.by_rows(held)))


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


def state_of(
    comm: Communicator,
    step: int,
    config: Mapping[str, Any],
    compressor: Compressor,
    orders: MemoryOrders,
) -> dict[str, Any]:
    """A copy: what ``reshard`` reads, by rows. ``config``: the options that it was made with, to be read by people.
    ``orders``: in which the compressor has what waits."""
    return {
        "version": VERSION,
        "rank": comm.rank,
        "world_size": comm.world_size,
        "step": step,
        "config": dict(config),
        "compressor": orders.by_rows(_tensors_of(compressor.state_dict())),
    }


def checked_step(state: Mapping[str, Any], comm: Communicator, owner: str) -> int:
    """The step of a state that ``state_of`` has made for this rank. ``owner``: whose it must be, for the message.

    Raises ``ValueError`` for what is no such state, or another rank's, and ``TypeError`` for a step that is no int.
    """
    if not isinstance(state, Mapping):
        raise ValueError(f"state is a {type(state).__name__}: it must come from {owner}.state_dict()")
    if state.get("version") != VERSION or "compressor" not in state or "step" not in state:
        raise ValueError(
            f"state has version {state.get('version')!r} and keys {sorted(map(str, state))}: it must come from "
            f"{owner}.state_dict() of version {VERSION}"
        )
    here = comm.rank, comm.world_size
    if (state.get("rank", here[0]), state.get("world_size", here[1])) != here:
        raise ValueError(
            f"state is of rank {state['rank']} of {state['world_size']}, but rank {here[0]} of {here[1]} loads it: "
            "load each rank's own; telegrad.ddp.reshard makes those of another number of ranks"
        )
    return checked_count(state["step"], "state['step']")


def _tensors_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """A compressor's state with torch tensors for its arrays, which share their memory."""
    arrays = {"parameters": "residual", "velocities": "velocity"}
    wrapped = dict(state)
    for group, kind in arrays.items():
        if group in state:
            wrapped[group] = {
                name: {**entry, kind: torch.from_numpy(entry[kind])} for name, entry in state[group].items()
            }
    return wrapped
