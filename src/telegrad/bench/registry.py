"""What can be measured. An entry names the program that its ranks run, its peer and its bound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Benchmark:
    """``target`` runs on every rank (``module:function``, with a Plan as JSON); ``bound_bytes(ranks, bytes)`` is the
    least that a rank must send, whatever the algorithm; ``bus_factor(ranks)`` turns bytes per second of the vector into
    those of a link, as nccl-tests do."""

    name: str
    target: str
    algorithms: tuple[str, ...]
    peer: str
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
            algorithms=("ring", "recursive_doubling", "rabenseifner", "auto"),
            peer="gloo",
            bound_bytes=_allreduce_bound_bytes,
            bus_factor=lambda ranks: 2 * (ranks - 1) / ranks,
        ),
        Benchmark(
            name="checks",
            target="telegrad.bench.allreduce:main",
            algorithms=("auto",),
            peer="unwatched",
            bound_bytes=_allreduce_bound_bytes,
            bus_factor=lambda ranks: 2 * (ranks - 1) / ranks,
        ),
    )
}
