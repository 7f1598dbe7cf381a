"""Ranks of this process, which the tests of operations share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from device_fixtures import comms, device, streams
from local_ranks import SIZE

from telegrad import Communicator

__all__ = ["comms", "device", "streams"]


@pytest.fixture
def ranks() -> Iterator[list[Communicator]]:
    """SIZE of them."""
    communicators = Communicator.local(SIZE, timeout_s=30.0)
    yield communicators
    for communicator in communicators:
        communicator.close()
