"""What ranks must have alike: parameters and options, and for a DDPState the ranks of DDP. A watch also tells of waits
in DDP's own broadcasts, of which torch says nothing.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from telegrad.communicator import Communicator
from telegrad.communicator.groups import stall_s
from telegrad.communicator.texts import all_gather_text, own_error_first
from telegrad.compress import Compressor
from telegrad.ddp.options import compressed_by
from telegrad.ddp.rank_state import MemoryOrder

STATE_IS_MISSING = "does {} make a DDPState here too?"
HOOK_IS_MISSING = "does {} call ddp.register_comm_hook(state, telegrad.ddp_hook)?"
HAS_FEWER_BATCHES = "if {} has fewer batches, train inside `with ddp.join():` on all ranks"
"""What a rank that waits says of those that do not come: as it makes its state, or in a pass, of ranks that have not
begun their first one, and of others."""
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


def alike_options(options: Mapping[str, Any], compressor: Compressor) -> dict[str, str]:
    """Of ``options`` as they are saved, and of what they choose, what all ranks must have alike."""
    alike = {name: str(value) for name, value in options.items() if name != "policy"}  # repr() has addresses
    if "select" in alike:
        alike["select"] = alike["select"].partition("(")[0]  # RandomK has the rank in it
    return {**alike, "what is compressed": str(compressed_by(compressor))}


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
    rank, size = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    if (rank, size) != (comm.rank, comm.world_size):
        raise ValueError(
            f"comm is rank {comm.rank} of {comm.world_size}, but this process is rank {rank} of {size} in DDP's "
            "process group: make comm with Communicator.from_torch(group) and give DDPState the same group"
        )
    if not asked and can_ask(comm):  # the state was made before the process group
        check_alike(comm, alike, None)
        return True
    return asked


def described(
    parameters: Mapping[str, torch.nn.Parameter], compression: Mapping[str, str] | None, **arguments: object
) -> dict[str, str]:
    """What all ranks must have alike, by the name that ``check_alike`` gives it. ``compression``: its options."""
    shapes = {
        name: (str(one.dtype), tuple(one.shape), MemoryOrder.of_gradient(one).steps) for name, one in parameters.items()
    }
    return {
        "parameters that require a gradient": json.dumps(shapes),
        **{name: str(value) for name, value in arguments.items()},
        "compress": str(None),
        **(compression or {}),
    }


def check_alike(comm: Communicator, own: dict[str, str], error: ValueError | TypeError | None) -> None:
    """``error``: what is wrong with this rank's arguments, which is raised; where that is another rank's, and where
    ranks' ``own`` differ, ``ValueError`` on all of them, naming what."""
    said = None if error is None else str(error)
    with own_error_first(error):
        told = [json.loads(text) for text in all_gather_text(comm, json.dumps([said, own]))]
    if error is not None:
        raise error
    for rank, (wrong, _) in enumerate(told):
        if wrong is not None:
            raise ValueError(f"on rank {rank}: {wrong}")
    for rank, (_, theirs) in enumerate(told):
        for name, value in told[0][1].items():
            if theirs[name] != value:
                raise ValueError(
                    f"{name} of rank {rank} and rank 0 differ: give all ranks the same ("
                    f"rank {rank}: {_shown(theirs[name], value)}, rank 0: {_shown(value, theirs[name])})"
                )


def _shown(value: str, other: str) -> str:
    """It, or of a long one a part, from a little before the place where the ``other`` differs."""
    alike = next((place for place, (a, b) in enumerate(zip(value, other, strict=False)) if a != b), len(value))
    start = 0 if len(value) <= _MOST_SHOWN else max(0, alike - _MOST_SHOWN // 2)
    cut = value[start : start + _MOST_SHOWN]
    return "…" * (start > 0) + cut + "…" * (start + len(cut) < len(value))


_MOST_SHOWN = 60  # characters of a value in a message


_LOOKS = 4  # at all threads, in the time after which a wait is told
_watched: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
_PRE_FORWARD = "_pre_forward"
"""Of DistributedDataParallel: the method in which it broadcasts, in torch 2.6 to 2.15."""


def tell_of_broadcasts(model: torch.nn.Module, comm: Communicator) -> None:
    """Once for a model: this rank says on stderr when it waits ``TELEGRAD_STALL_S`` for DDP's broadcast before a
    forward pass, of buffers such as BatchNorm's: a rank with fewer batches takes no part, and Gloo says nothing for
    half an hour. A thread looks at the stacks of the others every few seconds, until the model is gone: passes take no
    longer."""
    after_s = stall_s()
    is_watched = model in _watched or comm.world_size == 1 or math.isinf(after_s)
    if isinstance(model, DistributedDataParallel) and not is_watched:
        _watched.add(model)
        told = (weakref.ref(model), comm.rank, after_s)
        threading.Thread(target=_look_at_broadcasts, args=told, name="telegrad-broadcasts", daemon=True).start()


def _look_at_broadcasts(model: weakref.ref[torch.nn.Module], rank: int, after_s: float) -> None:
    seen: FrameType | None = None  # kept, so that no later call has a frame of the same address
    since, is_told = 0.0, False
    while model() is not None:
        time.sleep(after_s / _LOOKS)
        found = _broadcast_of(model)
        if found is not seen:
            seen, since, is_told = found, time.monotonic(), False
        elif found is not None and not is_told and time.monotonic() - since >= after_s:
            is_told = True
            print(
                f"telegrad: rank {rank}: has waited {after_s:g} s for DistributedDataParallel's broadcast before a "
                "forward pass, which sends buffers such as BatchNorm's; "
                f"{HAS_FEWER_BATCHES.format('another rank')}; for more: docs/how-to/hangs.md",
                file=sys.stderr,
                flush=True,
            )


def _broadcast_of(model: weakref.ref[torch.nn.Module]) -> FrameType | None:
    """The frame in which a thread of ``model`` broadcasts."""
    for frame in sys._current_frames().values():
        at: FrameType | None = frame
        while at is not None:
            if at.f_code.co_name == _PRE_FORWARD and at.f_locals.get("self") is model():
                return at
            at = at.f_back
    return None
