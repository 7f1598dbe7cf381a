"""The fake device's own promises: what makes a host wait is told, and memory that nobody holds is overwritten."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from computing_device import ComputingRuntime, HostWaitError, StreamTensor, computed_on
from fake_device import FakeStream


@pytest.fixture
def runtime() -> Iterator[ComputingRuntime]:
    made = ComputingRuntime()
    yield made
    made.stop()


@pytest.fixture
def stream(runtime: ComputingRuntime) -> Iterator[FakeStream]:
    """The current one."""
    with runtime.on(runtime.new_stream()) as made:
        yield made


@pytest.fixture
def x(runtime: ComputingRuntime, stream: FakeStream) -> StreamTensor:
    return computed_on(runtime, torch.arange(4.0))


def set_where(x: Any, value: Any) -> None:
    x[x > 0] = value


WAITING: dict[str, Callable[[Any], object]] = {
    "item": lambda x: x[0].item(),
    "float": lambda x: float(x[0]),
    "bool": lambda x: 1 if x.isfinite().all() else 0,
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "to cpu": lambda x: x.to("cpu"),
    "to the device cpu": lambda x: x.to(device=torch.device("cpu"), dtype=torch.float64),
    "where of a number": lambda x: torch.where(x > 0, x, 0.0),
    "where of a number first": lambda x: torch.where(x > 0, 0.0, x),
    "a mask": lambda x: x[x > 0],
    "a number for a mask": lambda x: set_where(x, 1.0),
    "a tensor for a mask": lambda x: set_where(x, x[:1]),
    "nonzero": lambda x: torch.nonzero(x),
    "copy_ from the host": lambda x: x.copy_(torch.zeros(4)),
    "copy_ to the host": lambda x: torch.zeros(4).copy_(x),
    "new_tensor": lambda x: x.new_tensor([1.0]),
}


@pytest.mark.parametrize("what", WAITING)
def test_what_makes_the_host_wait_is_told(x: StreamTensor, what: str) -> None:
    with pytest.raises(HostWaitError):
        WAITING[what](x)


def test_what_waits_for_nothing_is_done(x: StreamTensor, stream: FakeStream) -> None:
    found = torch.where(x > 1, x, torch.zeros_like(x)).masked_fill(x == 3, 7.0)[torch.arange(1, 4)].to(torch.float64)
    stream.synchronize()
    assert found.memory.tolist() == [0.0, 2.0, 7.0]
    assert found.memory.dtype == torch.float64


@pytest.mark.parametrize("kept", [True, False])
def test_memory_that_nobody_holds_is_there_only_for_streams_that_it_is_kept_for(
    runtime: ComputingRuntime, stream: FakeStream, kept: bool
) -> None:
    held, other = threading.Event(), runtime.new_stream()
    given, target = computed_on(runtime, torch.arange(4.0)), computed_on(runtime, torch.zeros(4))
    view = given[1:]
    other.put(held.wait)
    if kept:
        runtime.keep(view, other)
    with runtime.on(other):
        target[1:].copy_(view)
    del given
    stream.synchronize()
    assert view.plain.tolist() == [1.0, 2.0, 3.0]  # the view has the memory still
    del view
    stream.synchronize()
    held.set()
    other.synchronize()
    assert target.memory[1:].isfinite().all() == kept


def test_memory_that_its_own_stream_used_last_is_whole(
    runtime: ComputingRuntime, stream: FakeStream, x: StreamTensor
) -> None:
    held = threading.Event()
    stream.put(held.wait)
    total = ((x + 1) * 2).sum()  # what is in between dies before the stream has come to it
    held.set()
    stream.synchronize()
    assert total.memory.tolist() == 20.0
