"""The fake device's fixtures, and ranks that train on the host beside those on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from device_fixtures import comms, device, short_samples, streams
from device_ranks import RANKS
from device_trainer import make
from handmade_buckets import Trainer

from telegrad import Communicator

__all__ = ["comms", "device", "make", "on_host", "short_samples", "streams"]


@pytest.fixture
def on_host() -> Iterator[Callable[..., list[Trainer]]]:
    made: list[Communicator] = []

    def trainers(ranks: int = RANKS, **options: Any) -> list[Trainer]:
        comms = Communicator.local(ranks, timeout_s=60.0)
        made.extend(comms)
        return [Trainer(comm, **options) for comm in comms]

    yield trainers
    for comm in made:
        comm.close()
