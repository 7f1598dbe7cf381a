"""What a rank saves: what it has not sent yet, by parameter, and which rank and step that is of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from telegrad.communicator import Communicator
from telegrad.compress import Compressor
from telegrad.compress.arguments import checked_count
from telegrad.ddp.memory_order import MemoryOrders
from telegrad.ddp.resharding import VERSION


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
            f"state is of rank {state['rank']} of {state['world_size']}, but this is rank {here[0]} of {here[1]}: "
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
