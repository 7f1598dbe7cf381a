"""Who telegrad is compared with, behind one small interface. A peer runs in the same processes, on the same memory."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from telegrad.bench.plan import Plan


class Peer(Protocol):
    """Another library's sum over all ranks, in place."""

    name: str

    def all_reduce(self, x: npt.NDArray[np.float32]) -> None: ...

    def close(self) -> None: ...


class Gloo:
    """torch.distributed over Gloo: what a CPU job uses without telegrad."""

    name = "gloo"

    def __init__(self, plan: Plan, rank: int) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        # A file serves in network namespaces too, where the processes share no port.
        dist.init_process_group("gloo", init_method=f"file://{plan.store}", rank=rank, world_size=plan.ranks)
        self._dist = dist
        self._torch = torch
        self._tensors: dict[int, Any] = {}

    def all_reduce(self, x: npt.NDArray[np.float32]) -> None:
        tensor = self._tensors.get(id(x))
        if tensor is None:
            tensor = self._tensors[id(x)] = self._torch.from_numpy(x)
        self._dist.all_reduce(tensor)

    def close(self) -> None:
        self._dist.destroy_process_group()


def make_peer(plan: Plan, rank: int) -> Peer | None:
    """The peer that ``plan`` names, or None. Raises ``ImportError`` if it is not installed."""
    if plan.peer is None:
        return None
    if plan.peer == "gloo":
        return Gloo(plan, rank)
    raise ValueError(f"peer {plan.peer!r} is not known: use gloo or none")
