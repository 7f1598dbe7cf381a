"""Many points, over all cores. Each point is simulated by itself, so how many processes there are changes no result.

Ctrl-C, an error or the end of this process ends the other processes at once.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import replace
from typing import TypeVar

from telegrad.launch.parent import die_with
from telegrad.tools.sim.measure import Measurement, Point, measure

Item = TypeVar("Item")
Result = TypeVar("Result")


def call_in_processes(
    work: Callable[[Item], Result],
    items: Sequence[Item],
    processes: int,
    keep: Callable[[Item, Result], None],
    *,
    prepare: Callable[[], None] | None = None,
) -> None:
    """``keep(item, work(item))`` for each item as it comes, in any order. ``work``, ``prepare``, which each process
    calls at first, items and results are pickled. Raises what ``work`` and ``keep`` raise."""
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, context, _begin, (os.getpid(), prepare))
    try:
        waiting: dict[Future[Result], Item] = {pool.submit(work, item): item for item in items}
        while waiting:
            done, _ = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                keep(waiting.pop(future), future.result())
    except BaseException:
        # A call may take minutes more, and nobody wants its result.
        workers = list((pool._processes or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.terminate()
        raise
    pool.shutdown()


def _begin(parent: int, prepare: Callable[[], None] | None) -> None:
    """A terminal sends Ctrl-C to all processes; the first ends the others. Where it is killed, nobody does: they wait
    for work under a lock that one of them holds."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with(parent)
    if prepare is not None:
        prepare()


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
        call_in_processes(measure, longest_first, processes, lambda _, found: keep(found))
    return [results[index] for index in range(len(points))]


def measure_apart(point: Point, *, links: bool = False, timeline: bool = False) -> Measurement:
    """As ``measure``, but in a process of its own where it may take long, so that Ctrl-C ends it at once."""
    if not _is_long(point):
        return measure(point, links=links, timeline=timeline)
    found: list[Measurement] = []
    work = functools.partial(measure, links=links, timeline=timeline)
    call_in_processes(work, [point], 1, lambda _, measured: found.append(measured))
    return found[0]


def _is_long(point: Point) -> bool:
    """The core does not hear Ctrl-C until it has its result."""
    events = point.messages * _EVENTS_PER_MESSAGE
    return events > _LONG_EVENTS or (point.payloads and point.ranks * point.size > _LONG_BYTES)


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
