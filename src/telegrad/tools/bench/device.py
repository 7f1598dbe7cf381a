"""What benchmarks ask of a device: tensors, streams, points in them and the time between these. Needs torch."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from telegrad.tools.bench.machine import describe_machine, version_of

ENVIRONMENT = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
"""Of processes that communicate device tensors: streams share as few of the hardware's queues as can be."""


def gpu_name() -> str | None:
    """The GPU that torch would use; ``None``: it sees none."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def describe_gpu(gpu: str) -> dict[str, object]:
    """The machine, as ``describe_machine()``, that GPU, and what its programs are of."""
    versions = {"triton": version_of("triton"), "cuda_bindings": version_of("cuda-bindings")}
    return {**describe_machine(), "gpu": gpu, "cuda": torch.version.cuda, **versions}


class BenchmarkDevice(Protocol):
    """One device, as one thread uses it. What is computed goes into the thread's current stream."""

    def empty(self, elements: int) -> torch.Tensor:
        """A float32 vector on the device."""

    def pinned(self, elements: int) -> torch.Tensor:
        """A float32 vector in host memory that copies reach without the host's help."""

    def mark(self) -> Any:
        """The point that the current stream reaches once all that is in it by now is over."""

    def seconds(self, begin: Any, end: Any) -> float:
        """From one mark to another, both of which have been passed."""

    def synchronize(self) -> None:
        """The host waits for the current stream."""

    def new_stream(self) -> Any: ...

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """It is the current one."""


class Cuda:
    """The first GPU, which all ranks of a job on this machine share. Made before the process meets CUDA."""

    def __init__(self) -> None:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        torch.cuda.set_device(0)

    def empty(self, elements: int) -> torch.Tensor:
        return torch.empty(elements, device="cuda")

    def pinned(self, elements: int) -> torch.Tensor:
        return torch.empty(elements, device="cpu", pin_memory=True)

    def mark(self) -> torch.cuda.Event:
        made = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        made.record()
        return made

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(begin.elapsed_time(end)) * 1e-3

    def synchronize(self) -> None:
        torch.cuda.current_stream().synchronize()

    def new_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def on(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)
