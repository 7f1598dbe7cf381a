"""Who telegrad is compared with, behind one small interface. A peer runs in the same processes, on the same memory."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from telegrad import Communicator


class PeersPlan(Protocol):
    """What peers need of a benchmark's plan. ``store``: a path at which Gloo's processes meet."""

    @property
    def ranks(self) -> int: ...

    @property
    def peers(self) -> tuple[str, ...]: ...

    @property
    def store(self) -> str: ...


class Peer(Protocol):
    """Another library's sum over all ranks, in place."""

    name: str

    def all_reduce(self, x: npt.NDArray[np.float32]) -> None: ...

    def close(self) -> None:
        """All ranks call this; it may need them all."""


class Gloo:
    """torch.distributed over Gloo: what a CPU job uses without telegrad."""

    name = "gloo"

    def __init__(self, plan: PeersPlan, rank: int) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        # A file serves in network namespaces too, where the processes share no port.
        dist.init_process_group("gloo", init_method=f"file://{plan.store}", rank=rank, world_size=plan.ranks)
        self._dist = dist
        self._torch = torch
        self._x: Any = None
        self._tensor: Any = None

    def all_reduce(self, x: npt.NDArray[np.float32]) -> None:
        if x is not self._x:
            self._x, self._tensor = x, self._torch.from_numpy(x)
        self._dist.all_reduce(self._tensor)

    def close(self) -> None:
        self._dist.destroy_process_group()


class Mpich:
    """MPI_Allreduce of MPICH, through mpi4py. It moves nothing, and takes no time, but inside its own calls."""

    name = "mpich"

    def __init__(self, plan: PeersPlan, rank: int) -> None:
        import mpi4py

        mpi4py.rc.initialize = mpi4py.rc.finalize = False
        from mpi4py import MPI

        library = MPI.Get_library_version().rstrip("\0").splitlines()[0]
        if not library.startswith("MPICH"):
            raise RuntimeError(f"mpi4py found {library}: only MPICH can be started here")
        MPI.Init_thread(MPI.THREAD_FUNNELED)  # only this thread calls it, but it is not the process's only one
        self._mpi, self._world = MPI, MPI.COMM_WORLD
        if self._world.size != plan.ranks or self._world.rank != rank:
            found = f"rank {self._world.rank} of {self._world.size}"
            MPI.Finalize()
            raise RuntimeError(f"MPI says rank {rank} of {plan.ranks} is {found}")

    def all_reduce(self, x: npt.NDArray[np.float32]) -> None:
        self._world.Allreduce(self._mpi.IN_PLACE, x)

    def close(self) -> None:
        self._mpi.Finalize()


@dataclass(frozen=True)
class _Kind:
    title: str
    package: str  # without which it cannot run …
    extra: str  # … and what brings it
    start: Callable[[PeersPlan, int], Peer]


_KINDS = {
    "gloo": _Kind("Gloo", "torch", "torch", Gloo),
    "mpich": _Kind("MPICH", "mpi4py", "bench", Mpich),
}
PEERS = tuple(_KINDS)


def title_of(peer: str) -> str:
    """How a peer is called in tables."""
    return _KINDS[peer].title


def why_missing(peer: str) -> str | None:
    """Why ``peer`` cannot run here, as far as one can tell without trying; None if nothing speaks against it. Raises
    ``ValueError`` for an unknown name."""
    kind = _KINDS.get(peer)
    if kind is None:
        raise ValueError(f"peer {peer!r} is not known: use {', '.join(PEERS)} or none")
    if importlib.util.find_spec(kind.package) is None:
        return f"{kind.package} is not installed: pip install 'telegrad[{kind.extra}]'"
    return None


def say_missing(peer: str, why: str) -> None:
    """Prints ``{"missing", "why"}``, for whoever started the ranks."""
    print(json.dumps({"missing": peer, "why": why}), flush=True)


def start_peers(plan: PeersPlan, communicator: Communicator) -> list[Peer]:
    """The peers of ``plan`` that start on all ranks. Ranks where one does not ``say_missing``: the others then leave it
    out too."""
    started = []
    for name in plan.peers:
        peer: Peer | None = None
        try:
            peer = _KINDS[name].start(plan, communicator.rank)
        except Exception as error:  # whatever a foreign library does must not end our own measurement
            say_missing(name, f"{type(error).__name__}: {error}")
        if communicator.all_gather(np.array([peer is not None])).all() and peer is not None:
            started.append(peer)
        elif peer is not None:
            peer.close()
    return started
