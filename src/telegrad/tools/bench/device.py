"""What benchmarks ask of a device: tensors, streams, points in them and the time between these, and what it did by
torch's profiler. Needs torch."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from telegrad.tools.bench.machine import describe_machine, version_of

KERNELS, TO_HOST, TO_DEVICE, OTHER_COPIES = "kernels", "copies to the host", "copies to the device", "other copies"

_COPIES = {"gpu_memcpy", "gpu_memset"}


@dataclass(frozen=True)
class Interval:
    """``lane``: of what kind it is. Seconds, from the first interval of its trace."""

    lane: str
    begin_s: float
    end_s: float


def intervals_of(trace: Mapping[str, Any]) -> list[Interval]:
    """The device's kernels and copies in a trace, in the order in which they began."""
    found = []
    for event in trace.get("traceEvents", ()):
        lane = _lane_of(event)
        if lane is not None and event.get("ph") == "X":
            begin_us = float(event["ts"])
            found.append((lane, begin_us, begin_us + float(event["dur"])))
    first_us = min((begin for _, begin, _ in found), default=0.0)
    ordered = sorted(found, key=lambda one: one[1])
    return [Interval(lane, (begin - first_us) * 1e-6, (end - first_us) * 1e-6) for lane, begin, end in ordered]


def _lane_of(event: Mapping[str, Any]) -> str | None:
    kind = event.get("cat")
    if kind == "kernel":
        return KERNELS
    if kind not in _COPIES:
        return None
    name = str(event.get("name", ""))
    if "DtoH" in name:
        return TO_HOST
    return TO_DEVICE if "HtoD" in name else OTHER_COPIES


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

    def profiled(self, work: Callable[[], object]) -> list[Interval]:
        """Runs ``work`` and returns what the device did for it, as far as it tells."""


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

    def profiled(self, work: Callable[[], object]) -> list[Interval]:
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with tempfile.TemporaryDirectory(prefix="telegrad-trace-") as folder:
            path = Path(folder) / "trace.json"
            with torch.profiler.profile(activities=activities) as profiler:
                work()
                torch.cuda.synchronize()
            profiler.export_chrome_trace(str(path))
            return intervals_of(json.loads(path.read_text()))
