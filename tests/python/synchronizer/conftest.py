"""The fake device's fixtures, and ranks that train on it and on the host."""

from __future__ import annotations

import pytest
from computing_device import ComputingRuntime
from device_and_host import on_devices, on_hosts
from device_fixtures import comms, device, short_samples, streams
from device_synchronizers import Each, each_of
from device_trainer import make
from fake_device import FakeStream

from telegrad import Communicator

__all__ = ["comms", "device", "make", "on_devices", "on_each", "on_hosts", "short_samples", "streams"]


@pytest.fixture
def on_each(device: ComputingRuntime, comms: list[Communicator], streams: list[FakeStream]) -> Each:
    return each_of(device, comms, streams)
