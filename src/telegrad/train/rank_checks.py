"""What a DDPState asks of its ranks: that they are DDP's, and that all of them were given the same."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from telegrad.comm import Communicator
from telegrad.compress import Compressor
from telegrad.train.settings import compressed_by
from telegrad.train.synchronised_model import check_alike, described

_IN_THREADS = ("local", "sim")
"""Drivers whose ranks are of one process, which may make their states one after another."""


def can_ask(comm: Communicator) -> bool:
    """Whether the other ranks make their states now too: ranks of DDP are processes, and have a process group."""
    return torch.distributed.is_initialized() and comm.driver not in _IN_THREADS


@contextlib.contextmanager
def told_to_all(comm: Communicator, *, asks: bool) -> Iterator[dict[str, str]]:
    """In it a rank looks at its arguments, and fills the dictionary with what all ranks must have alike. Then all hear
    what is wrong with those of one: ``ValueError`` on all of them, as ``check_alike`` says. ``asks``: else this rank
    looks for itself alone."""
    own: dict[str, str] = {}
    error: ValueError | TypeError | None = None
    try:
        yield own
    except (ValueError, TypeError) as found:
        if not asks:
            raise
        error = found
    if asks:
        check_alike(comm, own, error)


def alike_of(
    parameters: Mapping[str, torch.nn.Parameter], options: Mapping[str, Any], compressor: Compressor, *, scaled: bool
) -> dict[str, str]:
    """What all ranks must have alike. ``options``: of DDPState, as it saves them."""
    arguments = {name: str(value) for name, value in options.items() if name != "policy"}  # repr() has addresses
    for name in ("selection", "large_selection"):
        arguments[name] = arguments[name].partition("(")[0]  # RandomK has the rank in it
    arguments |= {"whether a scaler": str(scaled), "what is compressed": str(compressed_by(compressor))}
    return described(parameters, None, **arguments)


def check_group(group: Any) -> None:
    """Raises ``TypeError`` for what is no process group."""
    if group is not None and not isinstance(group, torch.distributed.ProcessGroup):
        raise TypeError(
            f"group={group!r} must be the torch.distributed.ProcessGroup that DDP was given, or None for the whole job"
        )


def check_ranks(comm: Communicator, group: Any, alike: dict[str, str], *, asked: bool) -> bool:
    """At the first bucket. ``asked``: whether ranks have compared what they must have ``alike``; returns whether they
    have now. Raises ``ValueError`` where ``comm`` does not fit DDP's process group, or ranks differ."""
    if not torch.distributed.is_initialized():
        return asked  # no DDP without it: somebody calls the hook by hand
    check_ranks_of_ddp(comm, group)
    if not asked and can_ask(comm):  # the state was made before the process group
        check_alike(comm, alike, None)
        return True
    return asked


def check_ranks_of_ddp(comm: Communicator, group: Any) -> None:
    """Raises ``ValueError`` unless this process has the same rank in ``comm`` as in the process group."""
    rank, size = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    if (rank, size) != (comm.rank, comm.world_size):
        raise ValueError(
            f"comm is rank {comm.rank} of {comm.world_size}, but this process is rank {rank} of {size} in DDP's "
            "process group: make comm with Communicator.from_torch(group) and give DDPState the same group"
        )
