"""Ranks that are threads of the test's process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from telegrad import Communicator


def outcomes(ranks: int, run: Callable[[Communicator], Any]) -> list[Any]:
    """What ``run`` returns on each rank, or the error that it raises, which ends the others' operations."""
    results: list[Any] = [None] * ranks

    def one(comm: Communicator) -> None:
        try:
            results[comm.rank] = run(comm)
        except BaseException as error:
            results[comm.rank] = error
            comm.abort(str(error))

    comms = Communicator.local(ranks, timeout_s=60.0)
    threads = [threading.Thread(target=one, args=(comm,)) for comm in comms]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for comm in comms:
        comm.close()
    return results


def on_ranks(ranks: int, run: Callable[[Communicator], Any]) -> list[Any]:
    """As ``outcomes``; raises the first error."""
    results = outcomes(ranks, run)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
