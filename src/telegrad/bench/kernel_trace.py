"""What a device did and when, read from a trace of torch's profiler (the format of Chrome's tracing)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
