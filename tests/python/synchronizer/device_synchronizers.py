"""Ranks that train with a Synchronizer on a device whose streams compute: each is a thread with a stream, and what
would make its host wait for the device raises."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from computing_device import ComputingRuntime, computed_on, model_on
from device_ranks import RANKS
from fake_device import FakeStream
from synchronised_net import data, model_of, sgd
from torch import nn
from varied_options import objects_of

from telegrad import Communicator, Synchronizer


class Rank:
    """One rank's model there, and its Synchronizer. ``model_for``: makes the model on the host, for that rank."""

    def __init__(
        self,
        device: ComputingRuntime,
        comm: Communicator,
        stream: FakeStream,
        dtype: torch.dtype = torch.float32,
        spare: bool = False,
        model_for: Callable[[int], nn.Module] | None = None,
        **options: Any,
    ) -> None:
        self.device, self.comm, self.stream, self.dtype = device, comm, stream, dtype
        made = model_of(0 if comm.rank == 0 else 7, spare=spare) if model_for is None else model_for(comm.rank)
        self.model: Any = model_on(device, made.to(dtype))
        self.sync = Synchronizer(self.model, comm, **objects_of(**{"compress": None, **options}))
        self.optimizer = sgd(self.model)

    def backward(self, step: int, **options: Any) -> None:
        x = computed_on(self.device, data(step, self.comm.rank).to(self.dtype))
        self.model(x, **options).square().mean().backward()

    def train(self, steps: int) -> None:
        for step in range(steps):
            self.optimizer.zero_grad()
            self.backward(step)
            self.optimizer.step()

    def gradients(self) -> dict[str, torch.Tensor | None]:
        self.stream.synchronize()
        named = self.model.named_parameters()
        return {name: None if one.grad is None else one.grad.memory.clone() for name, one in named}


Each = Callable[..., list[Any]]


def each_of(device: ComputingRuntime, comms: list[Communicator], streams: list[FakeStream]) -> Each:
    """``on_each(function, **options)`` calls ``function(rank)`` on every Rank, and closes them; returns by rank."""

    def run(function: Callable[[Rank], Any], **options: Any) -> list[Any]:
        def call(number: int) -> Any:
            with device.on(streams[number]):
                try:
                    rank = Rank(device, comms[number], streams[number], **options)
                    made.append(rank)
                    return function(rank)
                except BaseException as error:
                    comms[number].abort(f"the test failed: {error!r}")
                    raise

        made: list[Rank] = []
        with ThreadPoolExecutor(RANKS) as pool:
            futures = [pool.submit(call, number) for number in range(RANKS)]
            found = [future.result(timeout=60) for future in futures]
        for rank in made:
            with device.on(rank.stream):
                rank.sync.close()
        return found

    return run
