"""What a rank saves: what it has not sent yet, by parameter, and which rank and step that is of; by rows, whatever the
order in which a parameter's elements, and those of its gradient, lie in memory. And what ``reshard`` makes of the
states of all ranks for another number of ranks.

What waits for a parameter is a flat vector in the order of its gradient's memory, for which a ``torch.channels_last``
weight has another order than a contiguous one. A state must fit both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from telegrad.communicator import Communicator
from telegrad.compress import Compressor
from telegrad.compress.arguments import checked_count
from telegrad.ddp.bucket import GradBucket
from telegrad.ddp.options import check_choice

KEEPS = ("sum", "mean")
VERSION = 1
"""Of a rank's state."""

GROUPS = {"parameters": "residual", "velocities": "velocity"}
"""Where a compressor's state has tensors, and what they are called there."""


class Piece(NamedTuple):
    """Elements ``start`` to ``stop`` of a parameter of so many ``elements``, in the order of memory."""

    start: int
    stop: int
    elements: int


SavedNode = list[Any]
"""Of a rank of a node of several: how many they are, its position, and its pieces by parameter."""


@dataclass(frozen=True)
class MemoryOrder:
    """Of a dense tensor of ``shape``, without gaps."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of_gradient(cls, parameter: nn.Parameter) -> Self:
        """Fused optimizers walk through a parameter and its gradient side by side, in the order of memory."""
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

    Raises ``ValueError`` for what is no such state, or another rank's, and ``TypeError`` for a step that is no int."""
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
    wrapped = dict(state)
    for group, kind in GROUPS.items():
        if group in state:
            wrapped[group] = {
                name: {**entry, kind: torch.from_numpy(entry[kind])} for name, entry in state[group].items()
            }
    return wrapped


def reshard(states: Iterable[Mapping[str, Any]], world_size: int, *, keep: str = "sum") -> list[dict[str, Any]]:
    """One state for each of ``world_size`` ranks, from the ``state_dict()`` of all ranks of a job, in any order.

    Every new rank gets an equal share of the sum of all residuals, and of all velocities. The last one also gets the
    remainder of the division, so the sum over ranks stays what it was, to the rounding of float32. ``keep="mean"``
    keeps their mean instead. Since the hook averages, the residuals then move the model as far as they would have with
    the old number of ranks. Thresholds are evaluated anew, those of sums too. Raises ``ValueError`` where a rank is
    missing or given twice, and for states of different steps, models or options; ``TypeError`` for what is no state."""
    world_size = checked_count(world_size, "world_size")
    if world_size < 1:
        raise ValueError(f"world_size={world_size} must be at least 1")
    check_choice(keep, "keep", KEEPS)
    given = _of_whole_parameters(_in_order(states))
    first = given[0]
    for state in given[1:]:
        if _shape_of(state) != _shape_of(first):
            raise ValueError(
                f"states of rank 0 and rank {state['rank']} have different parameters, sizes or feedback: give those "
                "of one job"
            )
    factor = 1.0 if keep == "sum" else world_size / len(given)
    made: list[dict[str, Any]] = [
        {
            **first,
            "rank": rank,
            "world_size": world_size,
            "compressor": dict(first["compressor"]),
            "sums": (),
            "is_share": True,
        }
        for rank in range(world_size)
    ]
    for group, kind in GROUPS.items():
        if group not in first["compressor"]:
            continue
        for one in made:
            one["compressor"][group] = {}
        for name, entry in first["compressor"][group].items():
            with np.errstate(over="ignore"):
                share, last = _shares(
                    [state["compressor"][group][name] for state in given], name, kind, world_size, factor
                )
            if not (np.isfinite(share).all() and np.isfinite(last).all()):
                raise ValueError(
                    f"the {kind} of {name!r} of all ranks is too large for float32 on {world_size} ranks: give more "
                    "ranks, or keep='mean'"
                )
            for one in made:
                values = last if one["rank"] == world_size - 1 else share.copy()
                anew = {"threshold": None, "calls": 0} if group == "parameters" else {}
                one["compressor"][group][name] = {**entry, **anew, kind: torch.from_numpy(values)}
    return made


def _of_whole_parameters(states: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Of ranks of nodes, which have pieces: each rank's piece as that of its own gradients, and zeros around it. A node
    averages the gradients of its ranks, so a piece is worth as many times as much."""
    if not any("node" in state for state in states):
        return states
    if len({state.get("node", [1])[0] for state in states}) > 1:
        raise ValueError("states are of nodes of different numbers of ranks: give those of one job")
    factors = {name: one for state in reversed(states) for name, one in state.get("factors", {}).items()}
    groups: dict[str, dict[str, Any]] = {}
    sizes = {name: Piece(*piece).elements for state in states for name, piece in state["node"][2].items()}
    for group, kind in GROUPS.items():
        held = {name: one for state in reversed(states) for name, one in state["compressor"].get(group, {}).items()}
        made = {name: {**one, kind: torch.zeros(sizes[name])} for name, one in held.items()}
        groups |= {group: made} if any(group in state["compressor"] for state in states) else {}
    for one in groups.get("parameters", {}).values():
        one.pop("k", None)  # of a piece
    whole: list[Mapping[str, Any]] = []
    for state in states:
        ranks, _, pieces = state["node"]
        compressor = {**state["compressor"], **{group: dict(entries) for group, entries in groups.items()}}
        for group, kind in GROUPS.items():
            for name, entry in state["compressor"].get(group, {}).items():
                values = torch.zeros(sizes[name])
                start, stop, _ = pieces[name]
                values[start:stop] = torch.as_tensor(entry[kind])
                unit = {"unit": entry.get("unit", 1.0) * ranks}
                compressor[group][name] = {**groups[group][name], **unit, kind: values}
        own = {name: value for name, value in state.items() if name != "node"}
        whole.append({**own, "compressor": compressor, **({"factors": factors} if factors else {})})
    return whole


def own_part(state: Mapping[str, Any], node: SavedNode | None, factors: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a state that a rank takes over. Of a share that ``reshard`` made that is the part of a rank of a
    ``node``: all ranks of a node have the same share, so what they average is that share. ``factors``: those of this
    rank's matrices before the first step, for which the state has none that fit. Raises ``ValueError`` for a state of
    another node."""
    if state.get("node") == node:
        return state
    if node is None or not state.get("is_share"):
        raise ValueError(
            f"state has {_pieces_named(state.get('node'))}, but this rank {_pieces_named(node)}: "
            "telegrad.ddp.reshard makes states for other nodes from those of all ranks, load_resharded from a "
            "checkpoint of them"
        )
    compressor, pieces = dict(state["compressor"]), node[2]
    for group, kind in GROUPS.items():
        if group in compressor:
            held = {name: one for name, one in compressor[group].items() if name in pieces}
            compressor[group] = {}
            for name, one in held.items():
                start, stop, _ = pieces[name]
                values = torch.as_tensor(one[kind])[start:stop].clone()
                compressor[group][name] = {**one, kind: values}
                compressor[group][name].pop("k", None)  # of the whole parameter
    saved = state.get("factors", {})
    fitting = {
        name: saved[name] if name in saved and saved[name].shape == one.shape else one for name, one in factors.items()
    }
    return {**state, "compressor": compressor, **({"factors": fitting} if factors or saved else {})}


def _pieces_named(node: SavedNode | None) -> str:
    return "whole parameters" if node is None else f"the pieces of rank {node[1]} of a node of {node[0]}"


def _shares(
    entries: list[Mapping[str, Any]], name: str, kind: str, world_size: int, factor: float
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """What each rank gets but the last, and what that gets; in the unit of the first entry."""
    unit = entries[0].get("unit", 1.0)
    total = np.zeros(np.asarray(entries[0][kind]).shape)
    for rank, entry in enumerate(entries):
        if not np.isfinite(np.asarray(entry[kind])).all():
            raise ValueError(
                f"the {kind} of {name!r} of rank {rank} holds NaN or infinity, which none does: the state is damaged, "
                "take an earlier one"
            )
        total += np.asarray(entry[kind]).astype(np.float64) * (entry.get("unit", 1.0) / unit)
    total *= factor
    share = (total / world_size).astype(np.float32)
    return share, (total - (world_size - 1) * share.astype(np.float64)).astype(np.float32)


def _in_order(states: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    if isinstance(states, Mapping) or not isinstance(states, Iterable):
        raise TypeError(f"states is a {type(states).__name__}: give a list of what state_dict() gave on each rank")
    given = list(states)
    for state in given:
        if not isinstance(state, Mapping) or not {"rank", "world_size", "step", "compressor"} <= state.keys():
            raise TypeError("states must be what DDPState.state_dict() or Synchronizer.state_dict() gave on each rank")
    if not given:
        raise ValueError("states is empty: give those of all ranks")
    given.sort(key=lambda state: int(state["rank"]))
    world_size, ranks = given[0]["world_size"], [state["rank"] for state in given]
    if ranks != list(range(world_size)) or any(state["world_size"] != world_size for state in given):
        raise ValueError(
            f"states are of ranks {ranks} of {world_size}: give each rank's of one job once, else a part would be lost"
        )
    first = given[0]
    for state in given:
        if state.get("version") != VERSION:
            raise ValueError(f"the state of rank {state['rank']} has version {state.get('version')!r}, not {VERSION}")
    for state in given[1:]:
        if state["step"] != first["step"]:
            raise ValueError(
                f"states are of steps {first['step']} (rank 0) and {state['step']} (rank {state['rank']}): give those "
                "of one moment"
            )
    return given


def _shape_of(state: Mapping[str, Any]) -> Any:
    compressor = state["compressor"]
    sizes = {
        group: {name: len(entry[kind]) for name, entry in compressor[group].items()}
        for group, kind in GROUPS.items()
        if group in compressor
    }
    return compressor.get("feedback", "gradients"), sizes
