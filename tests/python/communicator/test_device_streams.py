"""Streams of closed communicators are used again."""

from __future__ import annotations

import threading

import pytest
import torch
from device_ranks import RANKS, on_all, values
from fake_device import DEVICE_TYPE, FakeRuntime, FakeStream, on_fake_device

from telegrad import Communicator
from telegrad.communicator.cuda import transfers
from telegrad.communicator.cuda.runtime import pool_of

DEVICE = torch.device(DEVICE_TYPE, 0)


def used_once(device: FakeRuntime, streams: list[FakeStream]) -> None:
    """Communicators that have operations of all kinds, and are closed."""
    comms = Communicator.local(RANKS, timeout_s=60.0)
    tensors = [on_fake_device(values(rank, 100)) for rank in range(RANKS)]
    works = on_all(device, comms, streams, lambda comm, rank: comm.all_reduce(tensors[rank], async_op=True))
    on_all(device, comms, streams, lambda _, rank: works[rank].wait())
    on_all(device, comms, streams, lambda comm, rank: comm.all_reduce(tensors[rank]))
    for rank, peer in ((0, 1), (1, 0)):
        with device.on(streams[rank]):
            comms[rank].sendrecv(tensors[rank], peer, on_fake_device(values(0, 100)), peer, async_op=True)
    for comm, stream in zip(comms, streams, strict=True):
        comm.synchronize()
        stream.synchronize()
    for comm in comms:
        comm.close()
    for stream in device.streams:  # what close() has put there
        stream.synchronize()


def test_communicators_that_come_and_go_make_no_more_streams(
    device: FakeRuntime, streams: list[FakeStream], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "CHUNK_BYTES", 128)
    used_once(device, streams)
    made = len(device.streams)
    assert made == RANKS + RANKS * 3 + 2 * 2  # the callers', inputs, results, copies beside results, and messages
    for _ in range(3):
        used_once(device, streams)
    assert len(device.streams) == made


def test_a_stream_that_something_is_still_in_is_not_given_to_another(
    device: FakeRuntime, streams: list[FakeStream]
) -> None:
    held = threading.Event()
    streams[0].put(held.wait)
    (alone,) = Communicator.local(1)
    with device.on(streams[0]), alone:
        alone.all_reduce(on_fake_device(values(0, 10)), async_op=True)
        alone.abort("its stream never comes to it")
    pool, before = pool_of(device), set(device.streams)
    others = [pool.take(DEVICE) for _ in range(2)]
    assert not before & set(others)
    held.set()
    for stream in before:
        stream.synchronize()
    assert {pool.take(DEVICE), pool.take(DEVICE)} == before - set(streams)


def test_close_raises_nothing_where_a_device_is_lost(device: FakeRuntime, streams: list[FakeStream]) -> None:
    def record(_: FakeStream) -> None:
        raise RuntimeError("the device is lost")

    (alone,) = Communicator.local(1)
    with device.on(streams[0]):
        alone.all_reduce(on_fake_device(values(0, 10)), async_op=True)
    alone.synchronize()
    before = set(device.streams)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(device, "record", record)
        alone.close()
    assert pool_of(device).take(DEVICE) not in before


@pytest.mark.parametrize("async_op", [True, False])
def test_an_operation_that_meets_close_takes_no_stream(
    device: FakeRuntime, streams: list[FakeStream], monkeypatch: pytest.MonkeyPatch, async_op: bool
) -> None:
    """Another thread closes the communicator when the operation is on its way already."""
    monkeypatch.setattr(transfers, "CHUNK_BYTES", 128)
    (alone,) = Communicator.local(1)
    enter = device.enter

    def closed_meanwhile(of: torch.device) -> None:
        alone.close()
        enter(of)

    x = on_fake_device(values(0, 100))
    with device.on(streams[0]):
        alone.all_reduce(x)
        alone.synchronize()
        streams[0].synchronize()
        monkeypatch.setattr(device, "enter", closed_meanwhile)
        with pytest.raises(ValueError, match=r"this Communicator \(rank 0\) is closed: make a new one"):
            alone.all_reduce(x, async_op=async_op)
    made = set(device.streams) - set(streams)
    for stream in made:
        stream.synchronize()
    assert {pool_of(device).take(DEVICE) for _ in made} == made
    assert x.tolist() == values(0, 100).tolist()
