"""Messages between device tensors that are not answered yet hold up nothing but what waits for them."""

from __future__ import annotations

import torch
from fake_device import FakeRuntime, FakeStream, on_fake_device

from telegrad import Communicator


def _filled(value: float) -> torch.Tensor:
    return on_fake_device(torch.full((8,), value))


def test_a_sum_does_not_wait_for_a_message_that_is_to_come(
    device: FakeRuntime, comms: list[Communicator], streams: list[FakeStream]
) -> None:
    tensors, late = [_filled(1.0) for _ in comms], _filled(0.0)
    with device.on(streams[0]):
        message = comms[0].recv(late, 1, async_op=True)
    for rank, comm in enumerate(comms):
        with device.on(streams[rank]):
            work = comm.all_reduce(tensors[rank], async_op=True)
            assert work is not None
            work.wait()
    for stream, tensor in zip(streams, tensors, strict=True):
        stream.synchronize(20.0)
        assert tensor.tolist() == [3.0] * 8
    with device.on(streams[1]):
        comms[1].send(tensors[1], 0)  # what the sum has given
    with device.on(streams[0]):
        assert message is not None
        message.wait()
    streams[0].synchronize(20.0)
    assert late.tolist() == [3.0] * 8


def test_a_message_does_not_wait_for_another_peers(
    device: FakeRuntime, comms: list[Communicator], streams: list[FakeStream]
) -> None:
    """Rank 1 sends once it has an answer, which rank 0 gives once rank 2's message is there."""
    from_1, from_2 = _filled(0.0), _filled(0.0)
    with device.on(streams[0]):
        first = comms[0].recv(from_1, 1, async_op=True)
        second = comms[0].recv(from_2, 2, async_op=True)
        assert first is not None
        assert second is not None
        second.wait()
        answer = comms[0].send(from_2, 1, async_op=True)
        assert answer is not None
        first.wait()
    with device.on(streams[2]):
        comms[2].send(_filled(2.0), 0)
    echo = _filled(0.0)
    with device.on(streams[1]):
        comms[1].recv(echo, 0)
        comms[1].send(echo, 0)
    for stream in streams:
        stream.synchronize(20.0)
    assert from_1.tolist() == [2.0] * 8
