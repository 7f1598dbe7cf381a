"""What the ranks of ``telegrad bench errors`` do: the same mistake with telegrad and with torch.distributed over Gloo.

Rank 1 is the one to whom it happens, or who calls something else. Rank r contributes r + 1 everywhere, so that a sum, a
maximum and a mean can be told apart. Each rank says in a line of JSON what it got: an error, or a result.
"""

from __future__ import annotations

import math
import os
import re
import signal
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from telegrad.bench.faults import say
from telegrad.errors import TransportError
from telegrad.launch import join, rank_and_size

RANKS, CULPRIT = 3, 1
SCENES = {
    "kill": "`kill -9`",
    "freeze": "SIGSTOP: it freezes",
    "size": "another size (1,001 values, not 1,000)",
    "dtype": "equal bytes of another dtype (2,000 bf16, not 1,000 f32)",
    "reduction": "another reduction",
    "nan": "NaN in a gradient, under DDP",
}
"""What happens to rank 1, in words."""
NEED_TORCH = ("dtype", "nan")

_COUNT = 1000
_SETTLE_S = 0.5  # a slow rank would hear of the mistake in the sum before
_JOIN_TIMEOUT_S = 60.0


class _Library(Protocol):
    other_reduction: str

    def all_reduce(self, x: Any, reduction: str) -> None: ...

    def hook(self, ddp: Any) -> Any:
        """Registers what the library has for DDP; returns its state."""

    def close(self) -> None: ...


class _Telegrad:
    other_reduction = "avg"

    def __init__(self, store: str) -> None:
        self._communicator = join(join_timeout_s=_JOIN_TIMEOUT_S)

    def all_reduce(self, x: Any, reduction: str) -> None:
        self._communicator.all_reduce(x, reduction)

    def hook(self, ddp: Any) -> Any:
        from telegrad import DDPState, ddp_hook

        state = DDPState(self._communicator, ddp.named_parameters(), nonfinite="raise")
        ddp.register_comm_hook(state, ddp_hook)
        return state

    def close(self) -> None:
        self._communicator.close()


class _Gloo:
    other_reduction = "max"  # it has no mean

    def __init__(self, store: str) -> None:
        _join_gloo(store)

    def all_reduce(self, x: Any, reduction: str) -> None:
        import torch
        import torch.distributed as dist

        tensor = torch.from_numpy(x) if isinstance(x, np.ndarray) else x
        dist.all_reduce(tensor, {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[reduction])

    def hook(self, ddp: Any) -> None:
        """DDP averages over Gloo by itself."""

    def close(self) -> None:
        """After an error it may not return."""


def _join_gloo(store: str) -> None:
    import torch.distributed as dist

    rank, size = rank_and_size()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)


def main(library_name: str, scene: str, store: str) -> None:
    """One rank of one scene."""
    libraries: dict[str, Callable[[str], _Library]] = {"telegrad": _Telegrad, "gloo": _Gloo}
    library = libraries[library_name](store)
    rank, _ = rank_and_size()
    warm_up = np.full(_COUNT, rank + 1, np.float32)
    library.all_reduce(warm_up, "sum")
    time.sleep(_SETTLE_S)
    if scene == "nan":
        if library_name == "telegrad":
            _join_gloo(store)  # DDP itself needs it, to send the parameters round
        _say_outcome(lambda: _train(library, rank))
    else:
        _say_outcome(lambda: _reduce(library, scene, rank))
    library.close()
    os._exit(0)  # as after an error that nobody catches, but without a second one on the way out


def _say_outcome(act: Callable[[], dict[str, Any]]) -> None:
    try:
        outcome = act()
    except Exception as error:
        outcome = _described(error)
    say(end={"at_s": time.monotonic(), **outcome})


def _described(error: Exception) -> dict[str, Any]:
    """Whom it names: by attributes where it has them, otherwise by its words."""
    text = str(error)
    if isinstance(error, TransportError):
        named = error.peer
    else:
        found = re.search(r"\brank[ =](\d+)", text)
        named = getattr(error, "rank", int(found[1]) if found else None)
    return {
        "error": type(error).__name__,
        "text": text,
        "named": named,
        "host": bool(getattr(error, "host", None)),
        "parameter": getattr(error, "parameter", None),
    }


def _reduce(library: _Library, scene: str, rank: int) -> dict[str, Any]:
    odd = rank == CULPRIT
    x: Any = np.full(_COUNT + (odd and scene == "size"), rank + 1, np.float32)
    if odd and scene == "dtype":
        import torch

        x = torch.full((2 * _COUNT,), rank + 1, dtype=torch.bfloat16)
    if odd and scene in ("kill", "freeze"):
        say(fault=time.monotonic())
        os.kill(os.getpid(), signal.SIGKILL if scene == "kill" else signal.SIGSTOP)
    reduction = library.other_reduction if odd and scene == "reduction" else "sum"
    say(called=time.monotonic())
    library.all_reduce(x, reduction)
    first = float(x[0])
    return {"error": None, "result": first if math.isfinite(first) else None, "reduction": reduction}


def _train(library: _Library, rank: int) -> dict[str, Any]:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    ddp = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)))
    state = library.hook(ddp)
    x = torch.ones(4, 64)
    ddp(x).sum().backward()  # a sound step first
    if rank == CULPRIT:
        x[0, 0] = float("nan")
    say(called=time.monotonic())
    try:
        ddp(x).sum().backward()
    except Exception as error:
        failure = getattr(state, "failure", None)  # DDP makes a RuntimeError of everything
        return _described(failure if isinstance(failure, Exception) else error)
    gradients = [parameter.grad for parameter in ddp.parameters() if parameter.grad is not None]
    spoilt = sum(not bool(torch.isfinite(gradient).all()) for gradient in gradients)
    return {"error": None, "spoilt": spoilt, "gradients": len(gradients)}
