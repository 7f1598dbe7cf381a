"""The fake device's fixtures, and ranks that train on it and on the host."""

from __future__ import annotations

import pytest
from computing_device import ComputingRuntime
from device_and_host import on_devices, on_hosts
from device_fixtures import comms, device, streams
from device_synchronizers import Each, each_of
from device_trainer import make
from fake_device import FakeStream

from rank_server import SAMPLE_S
from telegrad import Communicator
from telegrad.tuning import group_cost

__all__ = ["comms", "device", "make", "on_devices", "on_each", "on_hosts", "streams"]


@pytest.fixture
def on_each(device: ComputingRuntime, comms: list[Communicator], streams: list[FakeStream]) -> Each:
    return each_of(device, comms, streams)


@pytest.fixture(autouse=True)
def _short_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_cost, "_SAMPLE_S", SAMPLE_S)
