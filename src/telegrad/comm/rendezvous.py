"""How the processes of a job find each other: through torch's store, which torchrun or init_process_group provides, or
rank 0 of a Slurm step.

Peers exchange opaque addresses here, once, when a communicator is made. This module must not know what is in them.
"""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from telegrad.comm.slurm import variables_of_step
from telegrad.errors import RendezvousError

Exchange = Callable[[bytes], list[bytes]]
"""Gives every rank's bytes, by rank, for one's own."""

_ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_HOW_TO_START = (
    "start the job with `torchrun --nproc-per-node N script.py` or, under Slurm, with srun, or call "
    "torch.distributed.init_process_group() before, or use Communicator.local(n) for ranks inside one process"
)
# Kept while the process lives: rank 0 serves it on MASTER_PORT, and a later init_process_group() joins the same server.
# Were it dropped, that call could reach the old server on its way out, and wait for ever.
_job_store: list[tuple[Any, int, int]] = []
RANK_0_GIVES_UP_FIRST_S = 5.0
"""So that the others hear from it who is missing."""
_made: Counter[tuple[int, ...]] = Counter()  # communicators per set of ranks: every rank counts alike


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
    if dist.is_available() and dist.is_initialized():
        rank = dist.get_rank(group)
        if rank < 0:
            raise ValueError(
                f"group does not hold this process (rank {dist.get_rank()}): call from_torch(group) on its members only"
            )
        members = tuple(dist.get_process_group_ranks(group))
        store: Any = dist.distributed_c10d._get_default_store()  # the only way to the job's store, public or not
    else:
        if group is not None:
            raise ValueError(
                "group was given but torch.distributed is not initialised: call init_process_group() first"
            )
        store, rank, size = _store_from_environment(join_timeout_s)
        members = tuple(range(size))
    name = f"telegrad/{'.'.join(map(str, members)) if len(members) <= 64 else _short(members)}/{_made[members]}"
    _made[members] += 1
    own_store = dist.distributed_c10d.PrefixStore(name, store)
    return Peers(rank, len(members), StoreExchange(own_store, rank, len(members), join_timeout_s))


def check_interface(interface: str | None) -> None:
    """Raises ``ValueError`` if this machine has no network interface of that name."""
    if interface is None:
        return
    present = [name for _, name in socket.if_nameindex()]
    if interface not in present:
        raise ValueError(f"interface={interface!r} does not exist on this machine: use one of {', '.join(present)}")


class StoreExchange:
    """Allgather of bytes over a torch store: rank 0 collects and publishes, so P ranks make O(P) requests."""

    def __init__(self, store: Any, rank: int, size: int, timeout_s: float) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._timeout_s = timeout_s
        self._round = 0

    def __call__(self, blob: bytes) -> list[bytes]:
        """Every rank's ``blob``, by rank. Raises ``RendezvousError`` naming the ranks that did not come in time."""
        name, self._round = f"{self._round}", self._round + 1
        self._store.set(f"{name}/{self._rank}", blob)
        if self._rank == 0:
            self._collect(name)
        try:
            self._wait(f"{name}/all", time.monotonic() + self._timeout_s + RANK_0_GIVES_UP_FIRST_S)
        except Exception as error:
            raise RendezvousError(
                f"rank {self._rank} of {self._size} heard nothing from rank 0 within {self._timeout_s:g} s: "
                f"is rank 0 running, and has it called from_torch() too? ({_first_line(error)})",
                rank=self._rank,
                peer=0,
                operation="rendezvous",
            ) from error
        verdict = bytes(self._store.get(f"{name}/all"))
        if verdict[:1] == b"!":
            raise RendezvousError(verdict[1:].decode(), rank=self._rank, operation="rendezvous")
        return _split(verdict[1:])

    def _collect(self, name: str) -> None:
        deadline = time.monotonic() + self._timeout_s
        blobs: list[bytes] = []
        try:
            for peer in range(self._size):
                self._wait(f"{name}/{peer}", deadline)
                blobs.append(bytes(self._store.get(f"{name}/{peer}")))
        except Exception:
            missing = [peer for peer in range(self._size) if not self._store.check([f"{name}/{peer}"])]
            self._store.set(
                f"{name}/all",
                f"!no peers found: of {self._size} ranks, rank {', '.join(map(str, missing))} did not join within "
                f"{self._timeout_s:g} s: look at the logs of those ranks; every rank must call from_torch()",
            )
            return
        self._store.set(f"{name}/all", b"=" + b"".join(len(blob).to_bytes(8, "little") + blob for blob in blobs))

    def _wait(self, key: str, deadline: float) -> None:
        remaining = max(deadline - time.monotonic(), 0.001)
        self._store.wait([key], timedelta(seconds=remaining))


def _store_from_environment(join_timeout_s: float) -> tuple[Any, int, int]:
    from torch.distributed.rendezvous import rendezvous

    if not os.environ.get("RANK"):
        for name, value in variables_of_step(os.environ).items():
            os.environ.setdefault(name, value)  # here, so that a later init_process_group() finds the same job
    missing = [name for name in _ENVIRONMENT if not os.environ.get(name)]
    if missing:
        raise RendezvousError(
            "no peers found: torch.distributed is not initialised, and the environment has no "
            f"{', '.join(missing)}: {_HOW_TO_START}",
            operation="rendezvous",
        )
    if _job_store:
        return _job_store[0]
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=join_timeout_s)))
    except Exception as error:
        if "EADDRINUSE" in str(error) or "already in use" in str(error):
            text = (
                f"port {os.environ['MASTER_PORT']} (MASTER_PORT) is taken: choose a free one, or let torchrun choose "
                "with --standalone"
            )
        else:
            text = (
                f"no peers found at {where} within {join_timeout_s:g} s: is rank 0 running there, and is the port open?"
            )
        raise RendezvousError(f"{text} ({_first_line(error)})", operation="rendezvous") from error
    _job_store.append((store, rank, size))
    return store, rank, size


def _split(packed: bytes) -> list[bytes]:
    blobs, at = [], 0
    while at < len(packed):
        length = int.from_bytes(packed[at : at + 8], "little")
        blobs.append(packed[at + 8 : at + 8 + length])
        at += 8 + length
    return blobs


def _short(members: tuple[int, ...]) -> str:
    import hashlib

    return hashlib.sha256(repr(members).encode()).hexdigest()[:16]


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
