"""A rank that trains with handmade buckets on a device whose streams compute; beside handmade_buckets.Trainer, which
does it on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from computing_device import ComputingRuntime, computed_on, wait_for
from fake_device import FakeStream
from handmade_buckets import SHAPES, Bucket, Trainer
from varied_options import module_of, objects_of

import telegrad
from telegrad import Communicator, DDPState

Gradients = dict[str, np.ndarray]


class DeviceTrainer:
    """One rank: its parameters there, its state and its stream."""

    def __init__(
        self,
        device: ComputingRuntime,
        comm: Communicator,
        stream: FakeStream,
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> None:
        self.device, self.comm, self.stream, self.dtype = device, comm, stream, dtype
        self._buffers: dict[tuple[Any, ...], Any] = {}
        self.parameters = {
            name: torch.nn.Parameter(computed_on(device, torch.zeros(shape, dtype=dtype)))
            for name, shape in SHAPES.items()
        }
        if callable(make_optimizer := options.get("optimizer")):
            options["optimizer"] = make_optimizer(self.parameters.values())
        usual = (
            {}
            if not isinstance(options.get("compress", "topk"), str) or "policy" in options
            else {"density": 0.05, "small_elements": 16}
        )
        with device.on(stream):
            self.state = DDPState(comm, module_of(self.parameters), **objects_of(**{**usual, **options}))

    def start(
        self, gradients: Gradients, buckets: Sequence[Sequence[str]], *, anew: bool = False
    ) -> list[tuple[Sequence[str], Any, Any]]:
        """A backward pass, whose futures nobody has waited for. ``anew``: in memory of its own, as nobody has waited
        for the one before either."""
        found = []
        with self.device.on(self.stream):
            for index, names in enumerate(buckets):
                own = torch.from_numpy(np.concatenate([gradients[name] for name in names])).to(self.dtype)
                buffer = computed_on(self.device, own) if anew else self._filled(own, (index, *names))
                parameters = [self.parameters[name] for name in names]
                bucket = Bucket(parameters, buffer, index, index == len(buckets) - 1)
                future = telegrad.ddp_hook(self.state, bucket)  # type: ignore[arg-type]
                found.append((names, buffer, future))
        return found

    def _filled(self, gradient: torch.Tensor, bucket: tuple[Any, ...]) -> Any:
        """The memory of one bucket, which is the same in each pass, as DDP's, with this in it."""
        memory = self._buffers.get(bucket)
        if memory is None:
            memory = self._buffers[bucket] = computed_on(self.device, gradient)
        else:
            memory.copy_(computed_on(self.device, gradient))
        return memory

    def wait(self, started: list[tuple[Sequence[str], Any, Any]]) -> list[tuple[Sequence[str], Any]]:
        """What the stream finds behind the futures, once it has come there."""
        with self.device.on(self.stream):
            return [(names, future.wait() * 1.0) for names, _, future in started]

    def memory(self) -> dict[str, Any]:
        """What the state holds, for comparisons."""
        with self.device.on(self.stream):
            return self.state.state_dict()["compressor"]  # type: ignore[no-any-return]


def step_on_device(
    trainers: Sequence[DeviceTrainer], gradients: Sequence[Gradients], buckets: Sequence[Sequence[str]]
) -> list[Gradients]:
    """One step of all ranks: averages by rank and name."""
    started = [trainer.start(own, buckets) for trainer, own in zip(trainers, gradients, strict=True)]
    found = [trainer.wait(one) for trainer, one in zip(trainers, started, strict=True)]
    wait_for([trainer.stream for trainer in trainers])
    return [_by_name((names, buffer.memory) for names, buffer in of_rank) for of_rank in found]


def step_on_host(
    trainers: Sequence[Trainer], gradients: Sequence[Gradients], buckets: Sequence[Sequence[str]]
) -> list[Gradients]:
    """The same of ranks on the host."""
    last = len(buckets) - 1
    started = [
        [(names, *trainer.start(own, names, index, index == last)) for index, names in enumerate(buckets)]
        for trainer, own in zip(trainers, gradients, strict=True)
    ]
    return [_by_name((names, future.wait()) for names, _, future in of_rank) for of_rank in started]


def _by_name(pairs: Any) -> Gradients:
    result: Gradients = {}
    for names, buffer in pairs:
        sizes = [int(np.prod(SHAPES[name])) for name in names]
        result.update(zip(names, np.split(buffer.float().numpy(), np.cumsum(sizes)[:-1]), strict=True))
    return result


@pytest.fixture
def make(
    device: ComputingRuntime, comms: list[Communicator], streams: list[FakeStream]
) -> Callable[..., list[DeviceTrainer]]:
    return lambda **options: [
        DeviceTrainer(device, comm, stream, **options) for comm, stream in zip(comms, streams, strict=True)
    ]
