"""Fixtures for tests of device tensors; a conftest.py that imports them gives them to its folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from computing_device import ComputingRuntime
from device_ranks import RANKS
from fake_device import DEVICE_TYPE, FakeRuntime, FakeStream
from new_tensors import garbage_in_new_tensors

from rank_server import SAMPLE_S
from telegrad import Communicator
from telegrad.communicator.cuda import runtime as runtimes
from telegrad.tuning import group_cost


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[ComputingRuntime]:
    runtime = ComputingRuntime()
    monkeypatch.setitem(runtimes._makers, DEVICE_TYPE, lambda: runtime)
    monkeypatch.setitem(runtimes._runtimes, DEVICE_TYPE, runtime)
    with garbage_in_new_tensors():
        yield runtime
        runtime.stop()


@pytest.fixture
def comms(device: FakeRuntime) -> Iterator[list[Communicator]]:
    """Closed before streams are stopped: that lets those go on which hang."""
    communicators = Communicator.local(RANKS, timeout_s=60.0)
    yield communicators
    for communicator in communicators:
        communicator.close()


@pytest.fixture
def streams(device: FakeRuntime, comms: list[Communicator]) -> list[FakeStream]:
    return [device.new_stream() for _ in comms]


@pytest.fixture(autouse=True)
def short_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """For folders whose tests make synchronizers, which time sums for a plan."""
    monkeypatch.setattr(group_cost, "_SAMPLE_S", SAMPLE_S)
