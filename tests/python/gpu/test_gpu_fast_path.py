"""Sums that the core puts into CUDA's streams itself, on a GPU: the ranks are this process's."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from gpu_jobs import skip_without
from gpu_ranks import RANKS

from telegrad import Communicator
from telegrad.errors import TransportError

pytestmark = skip_without("cuda.bindings")


def summed(
    comms: list[Communicator],
    streams: Sequence[torch.cuda.Stream],
    x: list[torch.Tensor],
    op: str,
    async_op: bool = False,
) -> None:
    torch.cuda.synchronize()
    for comm, stream, tensor in zip(comms, streams, x, strict=True):
        with torch.cuda.stream(stream):
            work = comm.all_reduce(tensor, op, async_op=async_op)
            if work is not None:
                work.wait()


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("n", [1, 1000, 1 << 19])
def test_gpu_short_sums(
    comms: list[Communicator], streams: Sequence[torch.cuda.Stream], dtype: torch.dtype, n: int, async_op: bool
) -> None:
    for number, op in enumerate(["sum", "sum", "max", "sum"]):
        x = [(torch.arange(n, device="cuda") % 5 + rank + number).to(dtype) for rank in range(RANKS)]
        expected = x[0] + x[1] if op == "sum" else torch.maximum(*x)
        summed(comms, streams, x, op, async_op)
        torch.cuda.synchronize()
        assert all(torch.equal(tensor, expected) for tensor in x)
        ways = [comm._device_fast_path for comm in comms]
        assert [way is not None and way.has_outstanding() for way in ways] == [number > 0] * RANKS
        for comm in comms:
            comm.synchronize()


@pytest.mark.parametrize("async_op", [False, True])
def test_gpu_a_kernel_behind_a_short_sum_has_its_result(
    comms: list[Communicator], streams: Sequence[torch.cuda.Stream], async_op: bool
) -> None:
    x = [torch.ones(1000, device="cuda") for _ in range(RANKS)]
    for _ in range(5):
        summed(comms, streams, x, "avg", async_op)
        for stream, tensor in zip(streams, x, strict=True):
            with torch.cuda.stream(stream):
                tensor.add_(1)
    torch.cuda.synchronize()
    assert all(tensor.eq(6).all() for tensor in x)


def test_gpu_a_short_sum_that_fails_lets_the_stream_go_on(
    comms: list[Communicator], streams: Sequence[torch.cuda.Stream]
) -> None:
    x = [torch.ones(1000, device="cuda") for _ in range(RANKS)]
    summed(comms, streams, x, "sum")
    torch.cuda.synchronize()
    with torch.cuda.stream(streams[0]):
        comms[0].all_reduce(x[0])
    comms[1].abort("enough")
    torch.cuda.synchronize()
    assert x[0].isnan().all()
    with pytest.raises(TransportError, match="enough"):
        comms[0].synchronize()
    with pytest.raises(TransportError, match="enough"), torch.cuda.stream(streams[0]):
        comms[0].all_reduce(x[0])
