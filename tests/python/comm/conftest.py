"""Ranks of this process, which the tests of operations share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from local_ranks import SIZE

from telegrad import Communicator


@pytest.fixture
def ranks() -> Iterator[list[Communicator]]:
    """SIZE of them."""
    communicators = Communicator.local(SIZE, timeout_s=30.0)
    yield communicators
    for communicator in communicators:
        communicator.close()
