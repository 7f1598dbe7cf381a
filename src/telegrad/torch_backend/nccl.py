"""NCCL for the ranks of a group of this backend: it sums CUDA tensors there, as in torch's own groups."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from telegrad.communicator.cuda.nccl import GroupWork, check_setting
from telegrad.cost.device_tuning import HOST_TRANSFER, NCCL


class OwnNccl:
    """See telegrad.communicator.cuda.nccl.SumGroup. Its ranks connect in the first sum, which all begin. ``session``:
    gives then a name that no group before this one had in ``store``."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, session: Callable[[], str]) -> None:
        self._store, self._rank, self._size, self._timeout = store, rank, size, timeout
        self._session = session
        self._lock = threading.Lock()
        self._backend: Any = None

    def begin_sum(self, x: torch.Tensor) -> GroupWork:
        """As a SumGroup's."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)
        if hasattr(options, "asyncOp"):
            options.asyncOp = True  # on a stream of NCCL's own; torch that has no such option does that in any case
        work: GroupWork = self._opened().allreduce([x], options)
        return work

    def close(self) -> None:
        """Ends what is under way; called twice it does nothing."""
        with self._lock:
            backend, self._backend = self._backend, None
        if backend is not None:
            # Older ones of torch, 2.6 among them, have it by the other name.
            (backend.shutdown if hasattr(backend, "shutdown") else backend._shutdown)()

    def _opened(self) -> Any:
        with self._lock:
            if self._backend is None:
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = self._timeout
                store = PrefixStore(f"nccl/{self._session()}", self._store)
                self._backend = dist.ProcessGroupNCCL(store, self._rank, self._size, options)
            return self._backend


def own_nccl(
    setting: str, store: Any, rank: int, size: int, timeout: timedelta, session: Callable[[], str]
) -> OwnNccl | None:
    """``None`` where ``setting`` (``device_algorithm``) forbids it, or torch has no NCCL. Raises ``ValueError`` where
    it demands NCCL and torch has none, and for what is no setting."""
    if check_setting(setting) == HOST_TRANSFER:
        return None
    if dist.is_nccl_available():
        return OwnNccl(store, rank, size, timeout, session)
    if setting == NCCL:
        raise ValueError(
            f"device_algorithm={setting!r} needs a torch that was built with NCCL, and this one was not: install "
            "torch for CUDA, or give device_algorithm='auto'"
        )
    return None
