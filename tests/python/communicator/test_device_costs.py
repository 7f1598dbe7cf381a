"""What dense sums of device tensors cost, as calibration has found: the way that they go, and what planners hear."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from computing_device import ComputingRuntime, wait_for
from device_ranks import RANKS
from fake_device import FakeStream
from nccl_ranks import Ranks, total
from nccl_stand_in import DEVICE
from tunings import tuning_of

from telegrad import Communicator, calibrate
from telegrad.cost import DeviceTuning, Place, Tuning
from telegrad.cost.send_method import LinearCost

Job = Callable[..., Ranks]


@pytest.fixture
def make(device: ComputingRuntime, comms: list[Communicator], streams: list[FakeStream]) -> Job:
    return lambda **options: Ranks(device, comms, streams, **options)


TINY, HUGE = 400, 4_000_000
BY_NCCL, BY_HOST = LinearCost(50e-6, 1e-10), LinearCost(20e-6, 7e-10)


def measured(device: str) -> Tuning:
    """NCCL is slow to begin with, and host transfer slow from 50,000 bytes."""
    on_device = DeviceTuning(device, BY_NCCL, BY_HOST, 0.0)
    return replace(tuning_of(Place("local", (("here", RANKS),)), 1000), on_device=on_device)


@pytest.mark.parametrize(
    ("options", "kind", "by_nccl"),
    [
        ({}, "fake", [HUGE]),
        ({}, "another", [TINY, HUGE]),
        ({"kinds": ["fake", "fake", "older"]}, "fake", [TINY, HUGE]),
        ({"setting": "nccl"}, "fake", [TINY, HUGE]),
    ],
)
def test_measured_costs_choose_by_bytes(make: Job, options: dict[str, Any], kind: str, by_nccl: list[int]) -> None:
    ranks = make(**options)
    for comm in ranks.comms:
        comm.use(measured(kind))
    for size in (TINY, HUGE):
        tensors = ranks.tensors(size // 4)
        ranks.on_each(lambda comm, rank, x=tensors: comm.all_reduce(x[rank]))
        wait_for(ranks.streams)
        assert all(torch.equal(x.memory, total(size // 4)) for x in tensors)
    assert ranks.nccl.sums == [by_nccl] * RANKS
    small, large = ranks.tensors(TINY // 4), ranks.tensors(HUGE // 4)
    ranks.on_all(lambda comm, rank: comm.all_reduce(small[rank], algorithm="nccl"))
    ranks.on_all(lambda comm, rank: comm.all_reduce(large[rank], algorithm="host_transfer"))
    wait_for(ranks.streams)
    assert ranks.nccl.sums == [[*by_nccl, TINY]] * RANKS


@pytest.mark.parametrize(
    ("options", "kind", "expected"),
    [
        ({}, "fake", min),
        ({}, "another", None),
        ({"kinds": ["fake", "fake", "older"]}, "fake", None),
        ({"setting": "nccl"}, "fake", BY_NCCL),
        ({"places": ["one", "other", "one"]}, "fake", BY_HOST),
    ],
    ids=["the faster one", "another device", "several devices", "always NCCL", "a shared device"],
)
def test_what_sums_cost_the_way_that_they_go(make: Job, options: dict[str, Any], kind: str, expected: Any) -> None:
    ranks = make(**options)
    assert ranks.on_each(lambda comm, _: comm.sum_cost(DEVICE)) == [None] * RANKS
    for comm in ranks.comms:
        comm.use(measured(kind))
    for cost in ranks.on_each(lambda comm, _: comm.sum_cost(DEVICE)):
        if expected is None:
            assert cost is None
            continue
        assert cost is not None
        for size in (TINY, HUGE):
            ways = BY_NCCL(size), BY_HOST(size)
            assert cost(size) == (min(ways) if expected is min else expected(size))


def test_what_sums_cost_without_nccl(
    device: ComputingRuntime, comms: list[Communicator], streams: list[FakeStream]
) -> None:
    ranks = Ranks(device, comms, streams)
    for comm in comms:
        comm._nccl = None  # of a group that has none
        comm.use(measured("fake"))
    assert ranks.on_each(lambda comm, _: comm.sum_cost(DEVICE)) == [BY_HOST] * RANKS


def test_what_sums_cost_where_only_host_transfer_was_measured(make: Job) -> None:
    ranks = make()
    for comm in ranks.comms:
        without = replace(measured("fake").on_device, nccl=None)
        comm.use(replace(measured("fake"), on_device=without))
    assert ranks.on_each(lambda comm, _: comm.sum_cost(DEVICE)) == [None] * RANKS  # they go by NCCL


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_devices_that_are_none() -> None:
    (alone,) = Communicator.local(1)
    asks = (alone.device_algorithms, alone.sum_cost, lambda device: calibrate(alone, device=device))
    for ask in asks:
        for device in ("nonsense", 5):
            with pytest.raises(TypeError, match=f"device={device!r} must be a torch.device, or the name of one"):
                ask(device)
        for device in ("cpu", torch.device("meta")):
            with pytest.raises(ValueError, match="has no streams that communicate: give a CUDA device"):
                ask(device)
        with pytest.raises(ValueError, match="device='cuda' cannot be used here: torch says '"):
            ask("cuda")
