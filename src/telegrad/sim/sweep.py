"""Many points, over all cores. Each point is simulated by itself, so how many processes there are changes no result."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import replace

from telegrad.sim.measure import Measurement, Point, measure

# What stays below both takes about a second at most.
_LONG_EVENTS = 2_000_000
_EVENTS_PER_MESSAGE = 3
_LONG_BYTES = 256 << 20  # of all ranks' payloads


def sweep(
    points: Sequence[Point], *, processes: int | None = None, on_measured: Callable[[Measurement], None] | None = None
) -> list[Measurement]:
    """Every point's measurement, in the order of ``points``; points that come to the same are simulated once.

    ``processes``: how many to use (default: one per core, and no more than there are points); with 1, short points are
    simulated in this one. ``on_measured`` is called for each as it comes, in any order. Raises ``ValueError`` for less
    than one process, and what ``measure`` raises; then, and on Ctrl-C, the other processes are ended.
    """
    if processes is not None and processes < 1:
        raise ValueError(f"processes={processes} must be at least 1")
    # auto is the algorithm that it chooses.
    same: dict[Point, list[int]] = {}
    for index, point in enumerate(points):
        same.setdefault(replace(point, algorithm=point.chosen), []).append(index)
    results: dict[int, Measurement] = {}

    def keep(found: Measurement) -> None:
        for index in same[found.point]:
            results[index] = replace(found, point=points[index])
            if on_measured is not None:
                on_measured(results[index])

    longest_first = sorted(same, key=lambda point: -point.messages)
    processes = min(processes or cores(), len(longest_first))
    if processes <= 1 and not any(_is_long(point) for point in longest_first):
        for point in longest_first:
            keep(measure(point))
    else:
        _in_processes(longest_first, processes, keep)
    return [results[index] for index in range(len(points))]


def measure_apart(point: Point, *, links: bool = False, timeline: bool = False) -> Measurement:
    """As ``measure``, but in a process of its own where it may take long, so that Ctrl-C ends it at once."""
    if not _is_long(point):
        return measure(point, links=links, timeline=timeline)
    found: list[Measurement] = []
    _in_processes([point], 1, found.append, links=links, timeline=timeline)
    return found[0]


def _is_long(point: Point) -> bool:
    """The core does not hear Ctrl-C until it has its result."""
    events = point.messages * _EVENTS_PER_MESSAGE
    return events > _LONG_EVENTS or (point.payloads and point.ranks * point.size > _LONG_BYTES)


def _in_processes(points: Sequence[Point], processes: int, keep: Callable[[Measurement], None], **wanted: bool) -> None:
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, mp_context=context, initializer=_leave_ctrl_c_to_the_first)
    try:
        waiting = {pool.submit(measure, point, **wanted) for point in points}
        while waiting:
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                keep(future.result())
    except BaseException:
        # A point may take minutes more, and nobody wants its result.
        workers = list((pool._processes or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.terminate()
        raise
    pool.shutdown()


def _leave_ctrl_c_to_the_first() -> None:
    """A terminal sends Ctrl-C to all processes; the first ends the others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
