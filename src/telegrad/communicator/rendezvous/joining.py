"""How the processes of a job find each other: through torch's store, which torchrun or init_process_group provides, or
rank 0 of a Slurm step.

Peers exchange opaque addresses here, once, when a communicator is made. This module must not know what is in them.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from telegrad._interfaces import rdma_ports
from telegrad.communicator.rendezvous.job_store import (
    VARIABLES,
    JobPlace,
    attempt,
    check_not_inherited,
    store_again,
    store_of,
)
from telegrad.communicator.rendezvous.slurm import name_of_step, variables_of_step, why_not_found
from telegrad.communicator.rendezvous.store_exchange import StoreExchange
from telegrad.communicator.torch_terms import address_of
from telegrad.errors import RendezvousError

Exchange = Callable[[bytes], list[bytes]]
"""Gives every rank's bytes, by rank, for one's own."""

_HOW_TO_START = (
    "start the job with `torchrun --nproc-per-node N script.py` or, under Slurm, with srun, or call "
    "torch.distributed.init_process_group() before, or use Communicator.local(n) for ranks inside one process"
)
_made: Counter[str] = Counter()  # communicators per set of ranks: every rank counts alike
_step = ""  # of Slurm's, if its variables say where the job is


@dataclass(frozen=True)
class Peers:
    """This process's place in the job, and the way to swap bytes with the others."""

    rank: int
    size: int
    exchange: Exchange


def find_peers(group: Any = None, *, join_timeout_s: float = 300.0) -> Peers:
    """Peers of ``group`` (a torch process group; ``None`` is the whole job).

    Raises ``RendezvousError`` if there is no job to join or its store cannot be reached, ``ImportError`` without
    torch and ``ValueError`` if this process is not in ``group``.
    """
    try:
        import torch.distributed as dist
    except ImportError as error:
        raise ImportError(
            "Communicator.from_torch() needs torch, which finds the peers: pip install 'telegrad[torch]'"
        ) from error
    place = None
    if dist.is_available() and dist.is_initialized():
        rank = dist.get_rank(group)
        if rank < 0:
            raise ValueError(
                f"group does not hold this process (rank {dist.get_rank()}): call from_torch(group) on its members only"
            )
        size = dist.get_world_size(group)
        # Torch 2.6 has no get_process_group_ranks(None).
        name = "all" if size == dist.get_world_size() else _name_of(dist.get_process_group_ranks(group))
        store: Any = dist.distributed_c10d._get_default_store()  # the only way to the job's store, public or not
        check_not_inherited(store)
    else:
        if group is not None:
            raise ValueError(
                "group was given but torch.distributed is not initialised: call init_process_group() first"
            )
        place = _place_in_environment()
        rank, size, name = place.rank, place.size, "all"
        store = store_of(place, join_timeout_s)
    own, prefix = dist.distributed_c10d.PrefixStore, f"telegrad/{name}/{_made[name]}"
    _made[name] += 1
    exchange = StoreExchange(
        own(prefix, store),
        rank,
        size,
        join_timeout_s,
        job=os.environ.get("TORCHELASTIC_RUN_ID") or _step,
        attempt=attempt(),
        again=None if place is None else lambda left_s: own(prefix, store_again(place, left_s)),
        address=address_of(store) if place is None else place.address,
    )
    return Peers(rank, size, exchange)


def check_interface(interface: str | None) -> None:
    """Raises ``ValueError`` if this machine has no network interface, nor a port of RDMA, of that name, or of one of
    several that are separated by commas."""
    if interface is None:
        return
    present = [*(name for _, name in socket.if_nameindex()), *rdma_ports()]
    for name in interface.split(","):
        if name not in present:
            asked = f"interface={interface!r}" + (f": {name!r}" if name != interface else "")
            raise ValueError(f"{asked} does not exist on this machine: use one of {', '.join(present)}")


def _place_in_environment() -> JobPlace:
    global _step
    step, why = {}, ""
    if not os.environ.get("RANK"):
        step, why = variables_of_step(os.environ), why_not_found(os.environ)
        if step and (size := os.environ.get("WORLD_SIZE", "")) not in ("", step["WORLD_SIZE"]):
            raise RendezvousError(
                f"WORLD_SIZE={size!r}, but this is a step of {step['WORLD_SIZE']} tasks (SLURM_STEP_NUM_TASKS), and "
                "there is no RANK: unset WORLD_SIZE, or set all of " + ", ".join(VARIABLES),
                operation="rendezvous",
            )
    missing = [name for name in VARIABLES if not (os.environ.get(name) or step.get(name))]
    if missing:
        raise RendezvousError(
            "no peers found: torch.distributed is not initialised, and the environment has no "
            f"{', '.join(missing)}: {why or _HOW_TO_START}",
            operation="rendezvous",
        )
    for name, value in step.items():
        if not os.environ.get(name):
            os.environ[name] = value  # here, so that a later init_process_group() finds the same job
    _step = name_of_step(os.environ) if step else _step
    return JobPlace.of(os.environ)


def _name_of(members: Sequence[int]) -> str:
    text = ".".join(map(str, members))
    return text if len(members) <= 64 else hashlib.sha256(text.encode()).hexdigest()[:16]
