"""What ``telegrad bench transfers`` measures, and the rows that it makes of the times: without torch, which measuring
needs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from telegrad.bench.json_fields import JsonFields
from telegrad.bench.plan import Timing

Row = dict[str, Any]

OPERATIONS = ("all_reduce", "all_reduce_async", "broadcast", "send")
"""``all_reduce_async`` is called with ``async_op=True``, and the stream waits for it at once. ``send``: each even rank
to the next one."""

ENQUEUED_WITHIN_S = 50e-6
"""So long the host may take to put an operation into its stream."""

BOUND = (
    "the slower of a copy of as many bytes to pinned memory and back (copies_median_s) and of the same operation on "
    "host tensors (host_median_s), both in the same run: what an operation takes whose copies and communication "
    "overlap wholly"
)
"""What ``bound_s`` means in result files."""


@dataclass(frozen=True)
class TransfersPlan(JsonFields):
    """One number of ranks, which share the device. ``sizes`` in bytes. Each way is measured in ``samples`` samples,
    fewer (but three, and above 256 MiB one) where all of it together would take longer than about ``seconds``."""

    ranks: int
    sizes: tuple[int, ...]
    operations: tuple[str, ...] = OPERATIONS
    samples: int = 101
    seconds: float = 60.0
    network: str = "shm"

    def cases(self) -> list[tuple[int, str]]:
        """Sizes ascending, and what is done at each: one rank has nobody to send to."""
        done = [name for name in self.operations if self.ranks > 1 or name != "send"]
        return [(size, name) for size in sorted(self.sizes) for name in done]


@dataclass(frozen=True)
class Times:
    """Seconds of each sample, of the slowest rank: ``device`` from the call until the stream is through with it,
    ``copies`` and ``host`` as in ``BOUND``. ``enqueued``: of the call alone, of every rank."""

    device: list[float]
    copies: list[float]
    host: list[float]
    enqueued: list[float]


def row_of(plan: TransfersPlan, operation: str, size: int, times: Times, wrong: int) -> Row:
    """``wrong``: values that differ from the right ones, over all ranks."""
    device, copies, host = (Timing.of(one) for one in (times.device, times.copies, times.host))
    enqueued = Timing.of(times.enqueued)
    bound_s = max(copies.median_s, host.median_s)
    return {
        "op": operation,
        "ranks": plan.ranks,
        "network": plan.network,
        "bytes": size,
        "median_s": device.median_s,
        "min_s": device.min_s,
        "p90_s": device.p90_s,
        "samples": len(times.device),
        "bytes_per_s": size / device.median_s,
        "enqueue_median_s": enqueued.median_s,
        "enqueue_p99_s": quantile(times.enqueued, 0.99),
        "enqueue_calls": len(times.enqueued),
        "enqueued_within_50_us": enqueued.median_s <= ENQUEUED_WITHIN_S,
        "copies_median_s": copies.median_s,
        "copies_bytes_per_s": 2 * size / copies.median_s,
        "host_median_s": host.median_s,
        "bound_s": bound_s,
        "of_bound": bound_s / device.median_s,
        "ratio_to_copies": device.median_s / copies.median_s,
        "ratio_to_host": device.median_s / host.median_s,
        "ratio_to_one_after_the_other": device.median_s / (copies.median_s + host.median_s),
        "wrong": wrong,
    }


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
