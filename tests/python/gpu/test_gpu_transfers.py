"""Operations on CUDA tensors, on a GPU: the ranks are this process's, each with a stream of its own."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from gpu_jobs import skip_without
from gpu_ranks import RANKS, chunks, laid_aside

from telegrad import Communicator, _core
from telegrad.communicator.cuda import transfers
from telegrad.communicator.cuda.runtime import runtime_of
from telegrad.communicator.operands import WIRES

pytestmark = skip_without("cuda.bindings")


def addends(n: int, dtype: torch.dtype) -> list[torch.Tensor]:
    made = [(torch.arange(n, device="cuda") % 5 + rank).to(dtype) for rank in range(RANKS)]
    torch.cuda.synchronize()
    return made


@pytest.mark.parametrize("n", [0, 1, 1000, 3 * transfers.CHUNK_BYTES // 4 + 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_gpu_all_reduce(
    comms: list[Communicator], streams: Sequence[torch.cuda.Stream], n: int, dtype: torch.dtype
) -> None:
    tensors = addends(n, dtype)
    expected = (tensors[0] + tensors[1]).cpu()
    for _ in range(3):
        given = [x.clone() for x in tensors]
        with laid_aside(streams, *chunks(given[0].nbytes)):
            for rank, comm in enumerate(comms):
                with torch.cuda.stream(streams[rank]):
                    comm.all_reduce(given[rank])
        for rank, stream in enumerate(streams):
            stream.synchronize()
            assert torch.equal(given[rank].cpu(), expected)


def encoded_chunks(comm: Communicator, n: int, wire: str) -> list[tuple[int, int]]:
    """As ``chunks``, of a sum of ``n`` elements between two ranks in messages of that ``wire``."""
    encoding, step = getattr(_core.ValueEncoding, wire), transfers.CHUNK_BYTES // 4
    lengths = [min(step, n - first) for first in range(0, n, step)]
    return [(nbytes, nbytes) for nbytes in (comm._usable().encoded_layout(one, encoding)[0] for one in lengths)]


@pytest.mark.parametrize("wire", WIRES)
def test_gpu_sums_that_round(comms: list[Communicator], streams: Sequence[torch.cuda.Stream], wire: str) -> None:
    """The host's bits, also of the errors."""
    step = transfers.CHUNK_BYTES // 4
    n = step + 7
    given = [torch.randn(n, generator=torch.Generator().manual_seed(rank)) for rank in range(RANKS)]
    sums, errors = [x.clone() for x in given], [torch.empty(n) for _ in range(RANKS)]
    hosts = Communicator.local(RANKS, timeout_s=60.0)
    for part in (slice(0, step), slice(step, n)):
        options = [(sums[rank][part], errors[rank][part]) for rank in range(RANKS)]
        for work in [
            comm.all_reduce(x, wire=wire, error=error, async_op=True)
            for comm, (x, error) in zip(hosts, options, strict=True)
        ]:
            work.wait()
    for comm in hosts:
        comm.close()
    tensors, lost = [x.cuda() for x in given], [torch.empty(n, device="cuda") for _ in range(RANKS)]
    sizes = encoded_chunks(comms[0], n, wire)
    for stream in streams:
        with torch.cuda.stream(stream):  # torch keeps as much for its next tensor
            torch.empty(2 * sum(nbytes + 16 for nbytes, _ in sizes), dtype=torch.uint8, device="cuda")
    with laid_aside(streams, *sizes):
        for rank, comm in enumerate(comms):
            with torch.cuda.stream(streams[rank]):
                comm.all_reduce(tensors[rank], wire=wire, error=lost[rank])
    for rank, stream in enumerate(streams):
        stream.synchronize()
        assert torch.equal(tensors[rank].cpu(), sums[rank])
        assert torch.equal(lost[rank].cpu(), errors[rank])


def test_gpu_compute_and_non_blocking_operations_are_ordered(
    comms: list[Communicator], streams: Sequence[torch.cuda.Stream]
) -> None:
    tensors = [torch.zeros(1 << 20, device="cuda").add_(0.0).mul_(1.0) for _ in range(RANKS)]  # loads their kernels
    with laid_aside(streams, *chunks(tensors[0].nbytes)):
        torch.cuda.set_sync_debug_mode("error")
        try:
            works = []
            for rank, comm in enumerate(comms):
                with torch.cuda.stream(streams[rank]):
                    tensors[rank].add_(rank + 1.0)
                    works.append(comm.all_reduce(tensors[rank], async_op=True))
            for rank, work in enumerate(works):
                with torch.cuda.stream(streams[rank]):
                    work.wait()
                    tensors[rank].mul_(2.0)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for rank, stream in enumerate(streams):
        stream.synchronize()
        assert bool((tensors[rank] == 6.0).all())


def test_gpu_times_of_events(streams: Sequence[torch.cuda.Stream]) -> None:
    """As torch's own; events of two streams, of which the host asks when they are over, without waiting."""
    runtime = runtime_of("cuda")
    device = torch.device("cuda", torch.cuda.current_device())
    marks, of_torch = [], [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(streams[0]):
            of_torch[0].record()
            marks.append(runtime.record_timed(runtime.current_stream(device)))
            torch.cuda._sleep(200_000_000)
        streams[1].wait_stream(streams[0])
        with torch.cuda.stream(streams[1]):
            marks.append(runtime.record_timed(runtime.current_stream(device)))
            of_torch[1].record()
        assert not runtime.passed(marks[1])
        while not (runtime.passed(marks[1]) and of_torch[1].query()):
            time.sleep(1e-3)
        seconds = runtime.seconds_between(*marks)
        assert seconds == pytest.approx(1e-3 * of_torch[0].elapsed_time(of_torch[1]), rel=0.05)
        assert seconds > 0.01
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_gpu_moves(comms: list[Communicator], streams: Sequence[torch.cuda.Stream]) -> None:
    tensors = [torch.full((4, 6), float(rank), device="cuda") for rank in range(RANKS)]
    shapes = (RANKS, 4, 6), (4 // RANKS, 6), (4, 6)
    results = [[torch.empty(shape, device="cuda") for shape in shapes] for _ in range(RANKS)]
    nbytes = tensors[0].nbytes
    staged = [(nbytes, RANKS * nbytes), (nbytes, nbytes // RANKS), *[(nbytes, 0), (0, nbytes)] * 2]
    with laid_aside(streams, *staged):
        for rank, comm in enumerate(comms):
            gathered, block, shifted = results[rank]
            with torch.cuda.stream(streams[rank]):
                comm.all_gather(tensors[rank], out=gathered)
                comm.reduce_scatter(tensors[rank], out=block)
                comm.sendrecv(tensors[rank], 1 - rank, shifted, 1 - rank)
                comm.broadcast(tensors[rank], 1)
    for rank, stream in enumerate(streams):
        stream.synchronize()
        gathered, block, shifted = results[rank]
        np.testing.assert_array_equal(gathered.cpu(), np.stack([np.full((4, 6), float(r)) for r in range(RANKS)]))
        assert bool((block == 1.0).all())
        assert bool((shifted == 1.0 - rank).all())
        assert bool((tensors[rank] == 1.0).all())


def test_gpu_failure_lets_the_stream_go_on(comms: list[Communicator], streams: Sequence[torch.cuda.Stream]) -> None:
    tensor = torch.ones(1000, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(streams[0]):
        comms[0].all_reduce(tensor)
    comms[1].close()
    streams[0].synchronize()
    assert bool(torch.isnan(tensor).all())
    with pytest.raises(Exception, match="rank 1 closed"):
        comms[0].synchronize()
