"""The fake device's fixtures, and ranks that train on it and on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from computing_device import ComputingRuntime
from device_and_host import on_devices, on_hosts
from device_fixtures import comms, device, streams
from device_ranks import RANKS
from device_synchronizers import Each, each_of
from device_trainer import DeviceTrainer
from fake_device import FakeStream
from handmade_buckets import Trainer

from telegrad import Communicator

__all__ = ["comms", "device", "make", "on_devices", "on_each", "on_host", "on_hosts", "streams"]


@pytest.fixture
def on_each(device: ComputingRuntime, comms: list[Communicator], streams: list[FakeStream]) -> Each:
    return each_of(device, comms, streams)


@pytest.fixture
def make(
    device: ComputingRuntime, comms: list[Communicator], streams: list[FakeStream]
) -> Callable[..., list[DeviceTrainer]]:
    return lambda **options: [
        DeviceTrainer(device, comm, stream, **options) for comm, stream in zip(comms, streams, strict=True)
    ]


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
