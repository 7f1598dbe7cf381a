"""Calls of Ok-Topk in virtual time on made-up entries: a row for each.

``python -m lab topk --bytes`` imports this module, and with ``--beside`` also runs it as a program of another Python,
whose telegrad may be an older one. So it imports nothing of the lab, and knows the names of November 2026's versions.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

import telegrad

try:
    World: Any = importlib.import_module("telegrad.tools.sim").World
except ImportError:  # before 28 November 2026
    World = importlib.import_module("telegrad.sim").World

ALPHA_S, BETA_S_PER_BYTE = 25e-6, 8e-9
"""About those of 1 Gbit/s between machines."""

Made = tuple[npt.NDArray[np.uint32], npt.NDArray[np.float32]]
ENTRIES = {
    "uniform": "k random indices of 100 k, normal values",
    "ties": "k random indices of 100 k, all values 1",
    "ties-one-full": "the same, but the first rank has all indices",
}
"""By name: what each rank gives in a call."""


def made(entries: str, rank: int, call: int, n: int, k: int) -> Made:
    """Indices and values of one rank."""
    random = np.random.default_rng([rank, call, k])
    full = entries == "ties-one-full" and rank == 0
    indices = np.arange(n) if full else np.sort(random.choice(n, k, replace=False))
    values = random.standard_normal(k) if entries == "uniform" else np.ones(indices.size)
    return indices.astype(np.uint32), values.astype(np.float32)


def called(vectors: list[Any], states: list[Any]) -> tuple[list[Any], dict[str, Any]]:
    """One call of all ranks: their results, and what a row says of traffic and time. Bytes are all that the ranks'
    communicators have moved."""
    world = World(len(vectors), alpha_s=ALPHA_S, beta_s_per_byte=BETA_S_PER_BYTE)
    try:
        works = [
            comm.all_reduce_topk(one, state, wire="raw", async_op=True)
            for comm, one, state in zip(world.communicators, vectors, states, strict=True)
        ]
        for work in works:
            work.wait()
        done = [work.result() for work in works]
        moved = [comm.stats() for comm in world.communicators]
        report = done[0].report
        return done, {
            "bytes_max": max(max(one["bytes_sent"], one["bytes_received"]) for one in moved),
            "time_s": world.now_s,
            "given": report.local_most,
            "kept": report.selected,
            "cut": report.cut,
            "exact": report.exact,
            "balanced": report.balanced,
        }
    finally:
        world.close()


def rows_of(entries: str, ranks: int, k: int, calls: int) -> Iterator[dict[str, Any]]:
    """A row for each of ``calls`` calls that follow one another, with new entries, from a new state on."""
    vector = telegrad.SparseVector if hasattr(telegrad, "SparseVector") else telegrad.SparseStream  # as above
    n = 100 * k
    states = [telegrad.OkTopkState(k) for _ in range(ranks)]
    for call in range(calls):
        given = [vector(*made(entries, rank, call, n, k), n) for rank in range(ranks)]
        row = called(given, states)[1]
        yield {"entries": entries, "ranks": ranks, "n": n, "k": k, "call": call, **row}


def main() -> None:
    """Reads the arguments of ``rows_of`` as a JSON list, a line each, and writes rows as such lines."""
    for line in sys.stdin:
        for row in rows_of(*json.loads(line)):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
