"""What operations on CUDA tensors take of a GPU's process: streams and pinned memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from gpu_jobs import skip_without

from telegrad import Communicator
from telegrad.communicator.cuda import staging, transfers
from telegrad.communicator.cuda.runtime import runtime_of
from telegrad.communicator.cuda.staging import staging_of

pytestmark = skip_without("cuda.bindings")


@pytest.fixture
def alone() -> Iterator[Communicator]:
    with Communicator.local(1, timeout_s=60.0)[0] as comm:
        yield comm


def test_gpu_communicators_that_come_and_go_make_no_more_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime: Any = runtime_of("cuda")
    made: list[Any] = []
    new_stream = runtime.new_stream
    monkeypatch.setattr(runtime, "new_stream", lambda device: [made.append(new_stream(device)), made[-1]][1])
    tensor = torch.ones(2 * transfers.CHUNK_BYTES // 4, device="cuda")
    counted = []
    for _ in range(4):
        with Communicator.local(1)[0] as comm:
            work = comm.all_reduce(tensor, async_op=True)
            assert work is not None
            work.wait()
            comm.all_reduce(tensor)
            torch.cuda.synchronize()
            comm.synchronize()
        torch.cuda.synchronize()
        counted.append(len(made))
    assert counted[-1] == counted[0] <= 3
    assert bool((tensor == 1.0).all())


@pytest.mark.parametrize("async_op", [False, True])
def test_gpu_sums_longer_than_the_bound(alone: Communicator, monkeypatch: pytest.MonkeyPatch, async_op: bool) -> None:
    staging = staging_of(runtime_of("cuda"))
    monkeypatch.setattr(staging, "most_bytes", 4 * 2 * transfers.CHUNK_BYTES)
    tensor = torch.arange(9 * transfers.CHUNK_BYTES // 4, device="cuda", dtype=torch.int32)
    expected = tensor.clone()
    for _ in range(3):
        work = alone.all_reduce(tensor, async_op=async_op)
        assert staging.counts.lent_bytes <= staging.most_bytes
        if work is not None:
            work.wait()
        tensor.add_(1)
    torch.cuda.synchronize()
    assert torch.equal(tensor, expected + 3)


def test_gpu_memory_is_used_again_once_the_stream_has_passed(alone: Communicator) -> None:
    counts = staging_of(runtime_of("cuda")).counts
    tensor = torch.ones(5000, device="cuda")
    for _ in range(3):
        alone.all_reduce(tensor)
        torch.cuda.synchronize()
    allocated = counts.allocated
    for _ in range(20):
        alone.all_reduce(tensor)
        torch.cuda.synchronize()
    assert counts.allocated == allocated


def test_gpu_events_are_used_again(alone: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime: Any = runtime_of("cuda")
    monkeypatch.setattr(staging, "MOST_BYTES", 0)  # which records events itself
    tensor = torch.ones(5000, device="cuda")
    for _ in range(3):
        alone.all_reduce(tensor)
        torch.cuda.synchronize()
    called: list[str] = []
    answer = runtime._answer
    monkeypatch.setattr(runtime, "_answer", lambda *given: [called.append(given[1]), answer(*given)][1])
    for _ in range(5):
        alone.all_reduce(tensor)
        torch.cuda.synchronize()
    assert "cuEventCreate" not in called
    assert called.count("cuMemcpyDtoHAsync") == called.count("cuMemcpyHtoDAsync") == 5
