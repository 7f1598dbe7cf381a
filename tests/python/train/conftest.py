"""Ranks in threads that do not wait for one that has failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from telegrad import Communicator


@pytest.fixture
def on_ranks(on_ranks: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """As the one of all tests; a rank whose function raises aborts, so that a failed test ends at once."""

    def run(n: int, function: Callable[[Communicator], Any], **options: Any) -> list[Any]:
        def aborting(comm: Communicator) -> Any:
            try:
                return function(comm)
            except BaseException as error:
                comm.abort(f"the test failed: {error!r}")
                raise

        return on_ranks(n, aborting, **options)

    return run
