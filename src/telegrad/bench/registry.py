"""What can be measured. An entry names the program that its ranks run, its contenders and its bound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from telegrad.comm.reduction import DENSE_ALGORITHMS


@dataclass(frozen=True)
class Benchmark:
    """``target`` runs on every rank (``module:function``, with a Plan as JSON); ``bound_bytes(ranks, bytes)`` is the
    least that a rank (or, of so many nodes, a node) must send, whatever the algorithm; ``bus_factor(ranks)`` turns
    bytes per second of the vector into those of a link, as nccl-tests do."""

    name: str
    target: str
    algorithms: tuple[str, ...]
    bound_bytes: Callable[[int, int], float]
    bus_factor: Callable[[int], float]


def _allreduce_bound_bytes(ranks: int, size: int) -> float:
    return 2 * (ranks - 1) / ranks * size


BENCHMARKS = {
    entry.name: entry
    for entry in (
        Benchmark(
            name="allreduce",
            target="telegrad.bench.allreduce:main",
            algorithms=(*(name for name in DENSE_ALGORITHMS if name != "auto"), "auto"),
            bound_bytes=_allreduce_bound_bytes,
            bus_factor=lambda ranks: 2 * (ranks - 1) / ranks,
        ),
        Benchmark(
            name="nonblocking",
            target="telegrad.bench.nonblocking:main",
            algorithms=("auto",),
            bound_bytes=_allreduce_bound_bytes,
            bus_factor=lambda ranks: 2 * (ranks - 1) / ranks,
        ),
        Benchmark(
            name="checks",
            target="telegrad.bench.allreduce:main",
            algorithms=("auto",),
            bound_bytes=_allreduce_bound_bytes,
            bus_factor=lambda ranks: 2 * (ranks - 1) / ranks,
        ),
    )
}
