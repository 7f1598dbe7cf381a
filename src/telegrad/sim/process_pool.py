"""Calls that take long, over all cores: Ctrl-C, an error or the end of this process ends the others at once."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from typing import TypeVar

from telegrad.launch.parent import die_with

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
