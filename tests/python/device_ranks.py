"""Ranks of this process with a stream of the fake device each, and what they call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from fake_device import FakeRuntime, FakeStream

from telegrad import Communicator

RANKS = 3

Call = Callable[[Communicator, int], Any]


def on_all(device: FakeRuntime, comms: list[Communicator], streams: list[FakeStream], call: Call) -> list[Any]:
    """What ``call`` returns by rank, each on its own stream; the host calls one after the other and never waits."""
    results = []
    for rank, comm in enumerate(comms):
        with device.on(streams[rank]):
            results.append(call(comm, rank))
    return results


def values(rank: int, n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(n, dtype=torch.float64) % 7 + rank + 1).to(dtype)
