"""Tunings and exchanges for tests."""

from __future__ import annotations

import threading
from collections.abc import Callable

from telegrad.cost import Costs, DecisionTable, Place, TableEntry, Tuning


def tuning_of(place: Place, crossing: int) -> Tuning:
    """The ring below ``crossing`` bytes and recursive doubling above: no built-in table says so."""
    return Tuning(
        place=place,
        costs=Costs(2e-6, 1e-10, 1.5e-10, 3e-11),
        allreduce=DecisionTable(place.ranks, (TableEntry(0, "ring"), TableEntry(crossing, "recursive_doubling"))),
        measured_at="2026-11-21T12:00:00+00:00",
        telegrad_version="0.1.0",
        residual=0.07,
    )


def exchanges(
    size: int, change: Callable[[int, bytes], bytes] = lambda _rank, blob: blob
) -> list[Callable[[bytes], list[bytes]]]:
    """For ranks in threads; ``change(rank, blob)`` is what all receive of ``rank``'s."""
    barrier, blobs = threading.Barrier(size), [b""] * size

    def exchange_of(rank: int) -> Callable[[bytes], list[bytes]]:
        def exchange(blob: bytes) -> list[bytes]:
            blobs[rank] = change(rank, blob)
            barrier.wait(20)
            return list(blobs)

        return exchange

    return [exchange_of(rank) for rank in range(size)]
