"""Residuals in checkpoints: of torch.distributed.checkpoint (DCP), and of trainers whose rank 0 writes all.

DCP takes tensors of the same name on several ranks for copies and writes one of them. Residuals are no copies, so each
rank's go under its own name.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Iterator, Mapping
from inspect import signature
from typing import Any, Protocol

import torch

from telegrad.communicator import Communicator
from telegrad.communicator.texts import all_gather_text
from telegrad.ddp.rank_state import GROUPS, reshard

_ALIKE = ("common", "outer")
"""Of a DiLoCo's state: what all replicas have alike, so that one copy is written."""


class Resumable(Protocol):
    """A DDPState, a Synchronizer or a DiLoCo."""

    @property
    def comm(self) -> Communicator:
        """Of the ranks that the state is of."""

    def state_dict(self) -> dict[str, Any]:
        """What this rank has not sent yet."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes it over."""


def _resumable(state: Resumable) -> Resumable:
    if not isinstance(getattr(state, "comm", None), Communicator):
        raise TypeError(
            f"state is a {type(state).__name__}: give the DDPState, Synchronizer, ReplicaSynchronizer or DiLoCo"
        )
    return state


class RankState:
    """A DDPState, a Synchronizer that compresses, a ReplicaSynchronizer or a DiLoCo, as DCP's ``Stateful``:
    ``dcp.save({"model": …, "telegrad": RankState(state)})`` on all ranks.

    ``dcp.load`` of the same dictionary restores it on as many ranks; for another number see ``load_resharded``."""

    def __init__(self, state: Resumable) -> None:
        self._state = _resumable(state)

    def state_dict(self) -> dict[str, Any]:
        """Its state, under this rank's name."""
        own = self._state.state_dict()
        # DCP fills what the state has when it loads. A tuple stays in one piece, whatever it holds by then.
        alike = {name: own.pop(name) if name == "common" else (own.pop(name),) for name in _ALIKE if name in own}
        return {_name_of(self._state): own} | ({_alike_name_of(self._state): alike} if alike else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Hands this rank's part on. Raises ``ValueError`` for what does not fit it."""
        name = _name_of(self._state)
        if name not in state:
            raise ValueError(
                f"the checkpoint has no {name!r}: it is of other ranks than these {self._state.comm.world_size}; "
                "telegrad.ddp.load_resharded restores it on any number of them"
            )
        self._state.load_state_dict({**state[name], **_unwrapped(state.get(_alike_name_of(self._state), {}))})


class GatheredState:
    """A DDPState, or a Synchronizer that compresses, for checkpoints that rank 0 alone writes and all ranks read, as
    those of Accelerate and Lightning: ``accelerator.register_for_checkpointing(GatheredState(state))``.

    Rank 0 needs memory for the residuals of all ranks while it saves, every rank while it loads: with many ranks and
    large models use ``RankState``."""

    def __init__(self, state: Resumable) -> None:
        if hasattr(state, "shard"):
            raise TypeError(f"state is a {type(state).__name__}, which rank 0 cannot gather: save a RankState")
        self._state = _resumable(state)

    def state_dict(self) -> dict[str, Any]:
        """What all ranks have not sent yet, on rank 0; nothing on the others. Called on all ranks."""
        comm = self._state.comm
        text, flat = packed(self._state.state_dict())
        texts = all_gather_text(comm, text)
        rows = comm.gather(flat, 0)
        if comm.rank != 0:
            return {}
        return {"ranks": [unpacked(text, row) for text, row in zip(texts, rows, strict=True)]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over this rank's part of what rank 0 has saved, or its share (``reshard``) if there were more ranks or
        fewer. Raises ``ValueError`` for what is no such state, or does not fit."""
        ranks = state.get("ranks") if isinstance(state, Mapping) else None
        if not isinstance(ranks, list) or not ranks:
            raise ValueError("state has no 'ranks': it must be what GatheredState.state_dict() gave on rank 0")
        comm = self._state.comm
        nodes = getattr(self._state, "ranks_of_node", 1)
        as_many = len(ranks) == comm.world_size and ranks[0].get("node", [1])[0] == nodes
        self._state.load_state_dict((ranks if as_many else reshard(ranks, comm.world_size))[comm.rank])


def packed(state: dict[str, Any]) -> tuple[str, torch.Tensor]:
    """A state as JSON, and its tensors one behind the other. It has their shapes from now on."""
    tensors = [torch.zeros(0)]
    for entry, kind in _entries_of(state):
        tensors.append(entry[kind].reshape(-1))
        entry[kind] = [*entry[kind].shape]
    return json.dumps(state), torch.cat(tensors)


def unpacked(text: str, flat: torch.Tensor) -> dict[str, Any]:
    """What ``packed`` was given. Raises ``ValueError``, ``LookupError``, ``TypeError`` or ``RuntimeError`` for what it
    has not returned."""
    state: dict[str, Any] = json.loads(text)
    entries = list(_entries_of(state))
    pieces = torch.split(flat, [math.prod(entry[kind]) for entry, kind in entries])
    for (entry, kind), piece in zip(entries, pieces, strict=True):
        entry[kind] = piece.view(entry[kind])
    return state


def _entries_of(state: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Where a state holds tensors of parameters, and by which name."""
    for group, kind in GROUPS.items():
        for entry in state["compressor"].get(group, {}).values():
            yield entry, kind
    factors = state.get("factors", {})  # of a LowRank
    for name in factors:
        yield factors, name


def load_resharded(
    state: Resumable, checkpoint_id: str | os.PathLike[str], *, key: str = "telegrad", keep: str = "sum"
) -> None:
    """Restores ``state`` from a checkpoint of any number of ranks, as ``reshard`` divides it; on all ranks.

    ``checkpoint_id``: the folder that ``dcp.save`` was given. ``key``: what the RankState was called there. Reads every
    rank's residuals. Raises ``ValueError`` where it holds no RankState of that name, and as ``reshard`` and
    ``load_state_dict`` do."""
    # It takes seconds to import, and who trains without it need not wait.
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = FileSystemReader(checkpoint_id)
    metadata = reader.read_metadata()
    shard = _shard_of(state)
    alike = _alike_name_of(state)
    paths = {
        name: path
        for name, path in (metadata.planner_data or {}).items()
        if path and path[0] == key and (path[1] == alike or str(path[1]).startswith(f"{shard}rank"))
    }
    if not paths:
        raise ValueError(
            f"{checkpoint_id} holds nothing{shard and ' of '}{shard.removesuffix(', ')} under {key!r}: name what "
            "dcp.save was given as RankState"
        )
    flat: dict[str, Any] = {}
    for name in paths:
        kept = metadata.state_dict_metadata[name]
        if isinstance(kept, TensorStorageMetadata):
            flat[name] = torch.empty(kept.size, dtype=kept.properties.dtype)
        else:
            flat[name] = None
    _load_alone(flat, reader)
    ranks: dict[str, Any] = {}
    for name, path in paths.items():
        place = ranks
        for step in path[1:-1]:
            place = place.setdefault(step, {})
        place[path[-1]] = flat[name]
    common = _unwrapped(ranks.pop(alike, {}))
    for one in ranks.values():  # DCP keeps no empty dictionaries: where nothing is compressed there are no residuals
        one.setdefault("compressor", {}).setdefault("parameters", {})
        one.update(common)
    made = reshard(ranks.values(), state.comm.world_size, keep=keep)
    state.load_state_dict(made[state.comm.rank])


def _load_alone(flat: dict[str, Any], reader: Any) -> None:
    """Fills ``flat`` without a process group, of which each rank may read other names."""
    from torch.distributed.checkpoint import state_dict_loader

    with warnings.catch_warnings():  # torch says that no process group is used; that is what is meant
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        if "no_dist" in signature(state_dict_loader.load).parameters:
            state_dict_loader.load(flat, storage_reader=reader, no_dist=True)
        else:  # torch 2.6 has it in the deprecated function only
            warnings.filterwarnings("ignore", message=".*load_state_dict.*deprecated", category=FutureWarning)
            state_dict_loader.load_state_dict(flat, reader, no_dist=True)


def _name_of(state: Resumable) -> str:
    return f"{_shard_of(state)}rank" + ("" if getattr(state, "is_for_any_rank", False) else f" {state.comm.rank}")


def _alike_name_of(state: Resumable) -> str:
    return f"{_shard_of(state)}all ranks"


def _unwrapped(alike: Mapping[str, Any]) -> dict[str, Any]:
    return {name: one[0] if isinstance(one, tuple) else one for name, one in alike.items()}


def _shard_of(state: Resumable) -> str:
    """Replicas of different shards have the same ranks."""
    shard = getattr(state, "shard", None)  # a ReplicaSynchronizer has one, and a DiLoCo of replicas of several ranks
    return "" if shard is None else f"shard {shard[0]} of {shard[1]}, "
