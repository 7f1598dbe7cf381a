"""Operations on device tensors that cannot begin, break off, or fail unheard."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from device_ranks import RANKS, on_all, values
from fake_device import FakeRuntime, FakeStream, on_fake_device

from telegrad import Communicator
from telegrad.communicator.cuda import transfers
from telegrad.errors import TransportError


def test_memory_that_is_not_to_be_had_is_known_before_anything_begins(
    device: FakeRuntime, comms: list[Communicator], streams: list[FakeStream], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "CHUNK_BYTES", 64)
    tensors = [on_fake_device(values(rank, 100)) for rank in range(RANKS)]
    real = device.pinned
    asked: list[int] = []

    def pinned(nbytes: int) -> torch.Tensor:
        asked.append(nbytes)
        if len(asked) == 6:
            raise MemoryError("no more")
        return real(nbytes)

    with monkeypatch.context() as patched, device.on(streams[0]):
        patched.setattr(device, "pinned", pinned)
        with pytest.raises(MemoryError):
            comms[0].all_reduce(tensors[0])
    on_all(device, comms, streams, lambda comm, rank: comm.all_reduce(tensors[rank]))
    for rank, stream in enumerate(streams):
        stream.synchronize()
        assert tensors[rank].tolist() == sum(values(other, 100) for other in range(RANKS)).tolist()


def test_what_breaks_off_ends_on_all_ranks(
    device: FakeRuntime, comms: list[Communicator], streams: list[FakeStream], monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = [on_fake_device(values(rank, 100)) for rank in range(RANKS)]

    def wait_value(*_: Any) -> None:
        raise RuntimeError("no such operation")

    with monkeypatch.context() as patched, device.on(streams[0]):
        patched.setattr(device, "wait_value", wait_value)
        with pytest.raises(RuntimeError, match="no such operation"):
            comms[0].all_reduce(tensors[0])

    def hear(rank: int) -> None:
        comms[rank].all_reduce(tensors[rank])
        comms[rank].synchronize()

    for rank in (1, 2):
        with device.on(streams[rank]), pytest.raises(TransportError, match="all_reduce of device tensors broke off"):
            hear(rank)


def test_a_failure_that_nobody_heard_of_is_told_at_close(
    device: FakeRuntime, comms: list[Communicator], streams: list[FakeStream]
) -> None:
    x = on_fake_device(torch.ones(3, dtype=torch.int32))
    with device.on(streams[0]):
        comms[0].all_reduce(x)
    with pytest.warns(RuntimeWarning, match=r"no result: .*; call synchronize\(\) before close\(\)"):
        comms[0].close()
    streams[0].synchronize()
    assert x.tolist() == [-1] * 3


def test_tensors_of_inference_mode_stay_there(
    device: FakeRuntime, comms: list[Communicator], streams: list[FakeStream]
) -> None:
    with torch.inference_mode():
        x = on_fake_device(torch.ones(3))
    with device.on(streams[0]), pytest.raises(ValueError, match="made in inference mode"):
        comms[0].all_reduce(x)
