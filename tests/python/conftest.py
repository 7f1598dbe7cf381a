"""Ranks in threads, for tests that need collectives but no processes; and what stands for torchrun."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torchrun_stand_ins import torchrun_server

from telegrad import Communicator

__all__ = ["torchrun_server"]


@pytest.fixture
def local() -> Iterator[Callable[..., list[Communicator]]]:
    """``local(n)`` makes n ranks of this process, closed at the end of the test."""
    made: list[list[Communicator]] = []

    def make(n: int, **options: Any) -> list[Communicator]:
        made.append(Communicator.local(n, **options))
        return made[-1]

    yield make
    for communicators in made:
        communicators[0].abort("the test is over")  # so that nobody waits for a polite farewell
        for communicator in communicators:
            communicator.close()


@pytest.fixture
def on_ranks(local: Callable[..., list[Communicator]]) -> Callable[..., list[Any]]:
    """``on_ranks(n, function)`` calls ``function(communicator)`` on n ranks, each in its thread; returns by rank.

    A rank whose function raises aborts, so that a failed test ends at once.
    """

    def run(n: int, function: Callable[[Communicator], Any], **options: Any) -> list[Any]:
        def aborting(communicator: Communicator) -> Any:
            try:
                return function(communicator)
            except BaseException as error:
                communicator.abort(f"the test failed: {error!r}")
                raise

        communicators = local(n, **options)
        with ThreadPoolExecutor(n) as pool:
            futures = [pool.submit(aborting, communicator) for communicator in communicators]
            return [future.result(timeout=60) for future in futures]

    return run
