"""Residuals in checkpoints of torch.distributed.checkpoint (DCP).

DCP takes tensors of the same name on several ranks for copies and writes one of them. Residuals are no copies, so each
rank's go under its own name.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from telegrad.comm import Communicator
from telegrad.train.resharding import reshard


class Resumable(Protocol):
    """A DDPState or a Synchronizer."""

    @property
    def comm(self) -> Communicator:
        """Of the ranks that the state is of."""

    def state_dict(self) -> dict[str, Any]:
        """What this rank has not sent yet."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes it over."""


class RankState:
    """A DDPState, or a Synchronizer that compresses, as DCP's ``Stateful``: ``dcp.save({"model": …, "telegrad":
    RankState(state)})`` on all ranks.

    ``dcp.load`` of the same dictionary restores it on as many ranks; for another number see ``load_resharded``.
    """

    def __init__(self, state: Resumable) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        """Its state, under this rank's name."""
        return {_name_of(self._state.comm.rank): self._state.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Hands this rank's part on. Raises ``ValueError`` for what does not fit it."""
        name = _name_of(self._state.comm.rank)
        if name not in state:
            raise ValueError(
                f"the checkpoint has no {name!r}: it is of other ranks than these {self._state.comm.world_size}; "
                "telegrad.train.load_resharded restores it on any number of them"
            )
        self._state.load_state_dict(state[name])


def load_resharded(
    state: Resumable, checkpoint_id: str | os.PathLike[str], *, key: str = "telegrad", keep: str = "sum"
) -> None:
    """Restores ``state`` from a checkpoint of any number of ranks, as ``reshard`` divides it; on all ranks.

    ``checkpoint_id``: the folder that ``dcp.save`` was given. ``key``: what the RankState was called there. Reads every
    rank's residuals. Raises ``ValueError`` where it holds no RankState of that name, and as ``reshard`` and
    ``load_state_dict`` do.
    """
    # It takes seconds to import, and who trains without it need not wait.
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = FileSystemReader(checkpoint_id)
    metadata = reader.read_metadata()
    paths = {name: path for name, path in (metadata.planner_data or {}).items() if path and path[0] == key}
    if not paths:
        raise ValueError(f"{checkpoint_id} holds nothing under {key!r}: name what dcp.save was given as RankState")
    flat: dict[str, Any] = {}
    for name in paths:
        kept = metadata.state_dict_metadata[name]
        if isinstance(kept, TensorStorageMetadata):
            flat[name] = torch.empty(kept.size, dtype=kept.properties.dtype)
        else:
            flat[name] = None
    with warnings.catch_warnings():  # torch says that no process group is used; that is what is meant
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        load(flat, storage_reader=reader, no_dist=True)
    ranks: dict[str, Any] = {}
    for name, path in paths.items():
        place = ranks
        for step in path[1:-1]:
            place = place.setdefault(step, {})
        place[path[-1]] = flat[name]
    for one in ranks.values():  # DCP keeps no empty dictionaries: where nothing is compressed there are no residuals
        one.setdefault("compressor", {}).setdefault("parameters", {})
    made = reshard(ranks.values(), state.comm.world_size, keep=keep)
    state.load_state_dict(made[state.comm.rank])


def _name_of(rank: int) -> str:
    return f"rank {rank}"
