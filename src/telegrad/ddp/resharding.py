"""What all ranks have not sent yet, for another number of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from telegrad.compress.arguments import checked_count
from telegrad.ddp.options import check_choice

KEEPS = ("sum", "mean")
VERSION = 1
"""Of a rank's state."""

GROUPS = {"parameters": "residual", "velocities": "velocity"}
"""Where a compressor's state has tensors, and what they are called there."""


def reshard(states: Iterable[Mapping[str, Any]], world_size: int, *, keep: str = "sum") -> list[dict[str, Any]]:
    """One state for each of ``world_size`` ranks, from the ``state_dict()`` of all ranks of a job, in any order.

    Every new rank gets an equal share of the sum of all residuals, and of all velocities; the last one also what
    dividing rounds away, so the sum over ranks stays what it was, to the rounding of float32. ``keep="mean"`` keeps
    their mean instead: since the hook averages, what waits then moves the model as far as it would have with the old
    number of ranks. Thresholds are evaluated anew, those of sums too. Raises ``ValueError`` where a rank is missing or
    given twice, and for states of different steps, models or options; ``TypeError`` for what is no state.
    """
    world_size = checked_count(world_size, "world_size")
    if world_size < 1:
        raise ValueError(f"world_size={world_size} must be at least 1")
    check_choice(keep, "keep", KEEPS)
    given = _in_order(states)
    first = given[0]
    factor = 1.0 if keep == "sum" else world_size / len(given)
    made: list[dict[str, Any]] = [
        {**first, "rank": rank, "world_size": world_size, "compressor": dict(first["compressor"]), "sums": ()}
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
        if _shape_of(state) != _shape_of(first):
            raise ValueError(
                f"states of rank 0 and rank {state['rank']} have different parameters, sizes or feedback: give those "
                "of one job"
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
