"""Sums of entries on a GPU, from selection to dense tensor: the ranks are this process's, each with its own stream."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from gpu_jobs import skip_without
from gpu_ranks import RANKS, laid_aside

from telegrad import Communicator, DeviceEntries

pytestmark = skip_without("cuda.bindings", "triton")


def room_for(k: int, n: int, dtype: torch.dtype = torch.float32) -> DeviceEntries:
    indices = torch.empty(k, dtype=torch.uint32, device="cuda")
    return DeviceEntries(indices, torch.empty(k, dtype=dtype, device="cuda"), torch.zeros(1).long().cuda(), n)


def staged(entries: DeviceEntries) -> tuple[int, int]:
    """Bytes of input and output of a sum."""
    item = entries.values.element_size()
    return 4 * (-(-entries.nnz // 4) * 4) + item * entries.nnz, item * entries.length


def distinct(n: int) -> torch.Tensor:
    """Of magnitudes that all differ: which of two equal ones is chosen, torch's ``topk`` does not say."""
    signs = torch.randint(0, 2, (n,), device="cuda") * 2 - 1
    return signs * (torch.randperm(n, device="cuda") + 1) * 2.0**-20


@pytest.mark.parametrize(("n", "k"), [(1000, 10), (1 << 20, 1 << 10), ((1 << 20) + 5, 1 << 19)])
def test_gpu_from_gradient_to_sum(
    comms: list[Communicator], streams: Sequence[torch.cuda.Stream], n: int, k: int
) -> None:
    from telegrad.kernels.select.triton import queue_topk

    torch.manual_seed(0)
    gradients = [distinct(n) for _ in range(RANKS)]
    residuals = [torch.zeros(n, device="cuda") for _ in range(RANKS)]
    outs = [torch.empty(n, device="cuda") for _ in range(RANKS)]
    entries = [room_for(k, n) for _ in range(RANKS)]
    expected = sum(x - _without_largest(x, k) for x in gradients)
    torch.cuda.synchronize()

    def choose(rank: int) -> None:
        one = entries[rank]
        queue_topk(residuals[rank].zero_(), gradients[rank], k, one.indices, one.values, one.count, 0)

    def run() -> None:
        for rank, comm in enumerate(comms):
            with torch.cuda.stream(streams[rank]):
                choose(rank)
                comm.all_reduce(entries[rank], out=outs[rank])

    for rank, stream in enumerate(streams):  # kernels are compiled, and memory is allocated
        with torch.cuda.stream(stream):
            choose(rank)
    with laid_aside(streams, staged(entries[0])):
        run()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for rank, stream in enumerate(streams):
        stream.synchronize()
        comms[rank].synchronize()
        assert torch.equal(outs[rank], expected)


def _without_largest(x: torch.Tensor, k: int) -> torch.Tensor:
    left = x.clone()
    left[x.abs().topk(k).indices] = 0
    return left


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gpu_non_blocking_and_dense(
    comms: list[Communicator], streams: Sequence[torch.cuda.Stream], dtype: torch.dtype
) -> None:
    n = 10_000
    where = torch.arange(0, n, 3, device="cuda")
    entries = [
        DeviceEntries(
            where + rank, torch.full(where.shape, rank + 1.0, dtype=dtype, device="cuda"), where[:1] + 3000, n
        )
        for rank in range(RANKS)
    ]
    outs = [torch.empty(n, dtype=dtype, device="cuda") for _ in range(RANKS)]
    expected = torch.zeros(n, dtype=dtype, device="cuda")
    expected[where[:3000]], expected[where[:3000] + 1] = 1, 2
    works = []
    with laid_aside(streams, staged(entries[0])):
        for rank, comm in enumerate(comms):
            with torch.cuda.stream(streams[rank]):
                works.append(comm.all_reduce(entries[rank], out=outs[rank], async_op=True))
    torch.cuda.synchronize()
    for rank, work in enumerate(works):
        with torch.cuda.stream(streams[rank]):
            work.wait()
            assert torch.equal(outs[rank], expected)


def test_gpu_bad_entries_make_the_sum_nan(comms: list[Communicator], streams: Sequence[torch.cuda.Stream]) -> None:
    good, bad = room_for(10, 100), room_for(10, 100)
    bad.count.fill_(11)
    outs = [torch.zeros(100, device="cuda") for _ in range(RANKS)]
    with laid_aside(streams, staged(good)):
        for rank, entries in enumerate((good, bad)):
            with torch.cuda.stream(streams[rank]):
                comms[rank].all_reduce(entries, out=outs[rank])
    for rank, stream in enumerate(streams):
        stream.synchronize()
        assert bool(outs[rank].isnan().all())
        with pytest.raises(Exception, match="the device counts 11 entries, but there is room for 0 to 10"):
            comms[rank].synchronize()
