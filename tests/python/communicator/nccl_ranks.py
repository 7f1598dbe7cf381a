"""Ranks of this process on a device whose streams compute, each with a stream, and what stands for NCCL there."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from computing_device import ComputingRuntime, StreamTensor, computed_on, wait_for
from device_ranks import RANKS, on_all, values
from fake_device import FakeStream
from nccl_stand_in import StandIn, give_group

from telegrad import Communicator


class Ranks:
    """All ranks, each with a stream, and what stands for NCCL."""

    def __init__(
        self, device: ComputingRuntime, comms: list[Communicator], streams: list[FakeStream], **options: Any
    ) -> None:
        self.device, self.comms, self.streams = device, comms, streams
        self.nccl: StandIn = give_group(device, comms, streams, **options)

    def on_each(self, call: Callable[[Communicator, int], Any]) -> list[Any]:
        """Each in a thread: the first sum waits for all ranks."""

        def run(rank: int) -> Any:
            with self.device.on(self.streams[rank]):
                return call(self.comms[rank], rank)

        with ThreadPoolExecutor(RANKS) as pool:
            futures = [pool.submit(run, rank) for rank in range(RANKS)]
            return [future.result(timeout=60) for future in futures]

    def on_all(self, call: Callable[[Communicator, int], Any]) -> list[Any]:
        """One after the other, by one thread, which must never wait."""
        return on_all(self.device, self.comms, self.streams, call)

    def tensors(self, n: int, dtype: torch.dtype = torch.float32) -> list[StreamTensor]:
        return [computed_on(self.device, values(rank, n, dtype)) for rank in range(RANKS)]

    def meet(self) -> None:
        """The first sum, which finds out what devices there are."""
        tensors = self.tensors(1)
        self.on_each(lambda comm, rank: comm.all_reduce(tensors[rank]))
        wait_for(self.streams)
        assert [x.memory.tolist() for x in tensors] == [[6.0]] * RANKS
        for sums in self.nccl.sums:
            sums.clear()
        self.nccl._rounds.clear()


def total(n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return values(0, n, dtype) + values(1, n, dtype) + values(2, n, dtype)
