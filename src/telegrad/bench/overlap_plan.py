"""What ``telegrad bench overlap`` measures, and the rows that it makes of the times: without torch, which measuring
needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from telegrad.bench.json_fields import JsonFields
from telegrad.bench.plan import Timing

Row = dict[str, Any]

COMMUNICATION, COMPUTATION = "all_reduce", "kernels"
"""Lanes of a timeline."""

HIDDEN = (
    "(communication alone + kernels alone - both at once) / communication alone, of medians of the slowest rank: 1 "
    "where the communication costs nothing, 0 where it takes as long as if it came before the kernels"
)
"""What ``hidden`` means in result files."""


@dataclass(frozen=True)
class OverlapPlan(JsonFields):
    """One number of ranks, which share the device, and all lengths (``sizes``, in bytes) of the vector that is summed
    while kernels multiply matrices of ``matrix`` rows. So many kernels follow a call that they take about ``load``
    times as long as the communication."""

    ranks: int
    sizes: tuple[int, ...]
    matrix: int = 2048
    load: float = 1.3
    samples: int = 11
    network: str = "shm"


@dataclass(frozen=True)
class Sample:
    """One call with kernels behind it, on one rank, in seconds of the device's clock from the call: when the sum was
    there, when each kernel ended, and when the stream had come to what waits for both. ``enqueued_s``: how long the
    host took to put all of it into its streams."""

    communicated_s: float
    kernels_s: list[float]
    both_s: float
    enqueued_s: float

    @property
    def kernels_meanwhile(self) -> int:
        """How many kernels were over before the sum was there."""
        return sum(1 for end_s in self.kernels_s if end_s < self.communicated_s)

    def timeline(self) -> list[tuple[str, float, float]]:
        """Lane, begin and end. A kernel begins when the one before it has ended."""
        begins = [0.0, *self.kernels_s[:-1]]
        kernels = [(COMPUTATION, begin, end) for begin, end in zip(begins, self.kernels_s, strict=True)]
        return [(COMMUNICATION, 0.0, self.communicated_s), *kernels]


def row_of(
    plan: OverlapPlan,
    size: int,
    *,
    communication_s: Sequence[float],
    computation_s: Sequence[float],
    both_s: Sequence[float],
    own: Sequence[Sample],
    wrong: int,
) -> Row:
    """``communication_s``, ``computation_s``, ``both_s``: of the slowest rank, by sample. ``own``: of rank 0."""
    communication, computation, both = (
        Timing.of(list(times)).median_s for times in (communication_s, computation_s, both_s)
    )
    shown = sorted(own, key=lambda one: one.both_s)[len(own) // 2]
    return {
        "op": "overlap",
        "ranks": plan.ranks,
        "network": plan.network,
        "bytes": size,
        "matrix": plan.matrix,
        "kernels": len(shown.kernels_s),
        "communication_median_s": communication,
        "computation_median_s": computation,
        "both_median_s": both,
        "samples": len(both_s),
        "hidden": (communication + computation - both) / communication,
        "kernels_meanwhile": Timing.of([float(one.kernels_meanwhile) for one in own]).median_s,
        "enqueue_median_s": Timing.of([one.enqueued_s for one in own]).median_s,
        "timeline": shown.timeline(),
        "wrong": wrong,
    }
