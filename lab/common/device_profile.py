"""What a device did for a piece of work, by torch's profiler."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from telegrad.tools.bench.device import BenchmarkDevice, Cuda

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


class ProfiledDevice(BenchmarkDevice, Protocol):
    """One that tells what it did."""

    def profiled(self, work: Callable[[], object]) -> list[Interval]:
        """Runs ``work`` and returns what the device did for it, as far as it tells."""


class ProfiledCuda(Cuda):
    """See ``ProfiledDevice``."""

    def profiled(self, work: Callable[[], object]) -> list[Interval]:
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with tempfile.TemporaryDirectory(prefix="telegrad-trace-") as folder:
            path = Path(folder) / "trace.json"
            with torch.profiler.profile(activities=activities) as profiler:
                work()
                torch.cuda.synchronize()
            profiler.export_chrome_trace(str(path))
            return intervals_of(json.loads(path.read_text()))
