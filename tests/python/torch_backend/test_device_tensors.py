"""The torch backend with device tensors, over a device without hardware whose streams compute (computing_device.py)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from computing_device import ComputingRuntime, StreamTensor, computed_on, wait_for
from fake_device import FakeStream

from telegrad import Communicator
from telegrad.errors import PeerFailed
from telegrad.torch_backend import ProcessGroup

SUM = SimpleNamespace(reduceOp=dist.ReduceOp.SUM, rootRank=0)

Call = Callable[[ProcessGroup, int], Any]


class Job:
    """Three ranks, each with a stream."""

    def __init__(self, device: ComputingRuntime, comms: list[Communicator], streams: list[FakeStream]) -> None:
        self.device, self.streams = device, streams
        self.groups = [ProcessGroup(comm) for comm in comms]

    def tensor(self, *values: Any, dtype: torch.dtype = torch.float32) -> StreamTensor:
        return computed_on(self.device, torch.tensor(values, dtype=dtype))

    def call(self, begin: Call) -> list[Any]:
        """On each rank's stream; the host goes from one to the next, so nothing may wait for another rank."""
        found = []
        for rank, group in enumerate(self.groups):
            with self.device.on(self.streams[rank]):
                found.append(begin(group, rank))
        return found

    def run(self, begin: Call) -> None:
        """Until streams have the results."""
        works = self.call(begin)
        self.call(lambda _, rank: works[rank].wait())
        wait_for(self.streams)


@pytest.fixture
def job(device: ComputingRuntime, comms: list[Communicator], streams: list[FakeStream]) -> Job:
    return Job(device, comms, streams)


def test_reductions(job: Job) -> None:
    floats = [job.tensor(1.0, rank + 1.0) for rank in range(3)]
    job.run(lambda group, rank: group.allreduce([floats[rank]], SUM))
    assert [x.memory.tolist() for x in floats] == [[3.0, 6.0]] * 3
    bytes_ = [job.tensor(rank, 100, dtype=torch.uint8) for rank in range(3)]
    job.run(lambda group, rank: group.allreduce([bytes_[rank]], SUM))
    assert [x.memory.tolist() for x in bytes_] == [[3, 44]] * 3
    average = SimpleNamespace(reduceOp=dist.ReduceOp.AVG, rootRank=0)
    for dtype in (torch.int8, torch.int64):  # summed, and divided behind it in the stream
        integers = [job.tensor(-rank, 2, -1, dtype=dtype) for rank in range(3)]
        job.run(lambda group, rank, x=integers: group.allreduce([x[rank]], average))
        assert [x.memory.tolist() for x in integers] == [[-1, 2, -1]] * 3
    complex_ = [job.tensor(1 + 2j, dtype=torch.complex64) for _ in range(3)]
    job.run(
        lambda group, rank: group.allreduce(
            [complex_[rank]], SimpleNamespace(reduceOp=dist._make_nccl_premul_sum(2.0), rootRank=0)
        )
    )
    assert [x.memory.tolist() for x in complex_] == [[6 + 12j]] * 3
    bits = [job.tensor(1 << rank, dtype=torch.int32) for rank in range(3)]
    bitwise = SimpleNamespace(reduceOp=dist.ReduceOp.BOR, rootRank=1)
    job.run(lambda group, rank: group.allreduce([bits[rank]], bitwise))
    assert [x.memory.tolist() for x in bits] == [[7]] * 3
    at_root = [job.tensor(1 << rank, dtype=torch.int32) for rank in range(3)]
    job.run(lambda group, rank: group.reduce([at_root[rank]], bitwise))
    assert [x.memory.tolist() for x in at_root] == [[1], [7], [4]]
    summed = [job.tensor(rank + 1.0) for rank in range(3)]
    job.run(lambda group, rank: group.reduce([summed[rank]], SimpleNamespace(reduceOp=dist.ReduceOp.SUM, rootRank=2)))
    assert [x.memory.tolist() for x in summed] == [[1.0], [2.0], [6.0]]


def test_tensors_that_are_joined_or_not_contiguous(job: Job) -> None:
    alike = [[job.tensor(1.0), job.tensor(2.0, 3.0), job.tensor(4, dtype=torch.int64)] for _ in range(3)]
    job.run(lambda group, rank: group.allreduce_coalesced(alike[rank], SUM))
    assert [[x.memory.tolist() for x in tensors] for tensors in alike] == [[[3.0], [6.0, 9.0], [12]]] * 3
    columns = [computed_on(job.device, torch.full((4, 5), float(rank))) for rank in range(3)]
    job.run(lambda group, rank: group.allreduce([columns[rank][:, 2]], SUM))
    for rank, x in enumerate(columns):
        assert x.memory[:, 2].tolist() == [3.0] * 4
        assert x.memory.sum() == 12.0 + 16.0 * rank
    job.run(lambda group, rank: group.broadcast([columns[rank].t()[0]], SimpleNamespace(rootRank=1)))
    assert all(x.memory[:, 0].tolist() == [1.0] * 4 for x in columns)


def test_moves(job: Job) -> None:
    gathered = [job.tensor(0.0, 0.0, 0.0) for _ in range(3)]
    job.run(lambda group, rank: group.all_gather_single(gathered[rank], job.tensor(rank + 1.0)))
    assert [x.memory.tolist() for x in gathered] == [[1.0, 2.0, 3.0]] * 3
    blocks = [[job.tensor(*[0.0] * (other + 1)) for other in range(3)] for _ in range(3)]
    job.run(lambda group, rank: group.allgather([blocks[rank]], [job.tensor(*[float(rank)] * (rank + 1))]))
    assert [[x.memory.tolist() for x in listed] for listed in blocks] == [[[0.0], [1.0] * 2, [2.0] * 3]] * 3
    parts = [job.tensor(0.0) for _ in range(3)]
    job.run(lambda group, rank: group.reduce_scatter_single(parts[rank], job.tensor(1.0, 2.0, 3.0), SUM))
    assert [x.memory.tolist() for x in parts] == [[3.0], [6.0], [9.0]]
    job.run(lambda group, rank: group.reduce_scatter([parts[rank]], [[job.tensor(float(i)) for i in range(3)]], SUM))
    assert [x.memory.tolist() for x in parts] == [[0.0], [3.0], [6.0]]
    pairs = [[job.tensor(0.0), job.tensor(0.0, 0.0)] for _ in range(3)]
    job.run(
        lambda group, rank: group.reduce_scatter_single_coalesced(
            pairs[rank], [job.tensor(1.0, 2.0, 3.0), job.tensor(*[1.0] * 6)], SUM
        )
    )
    assert [[x.memory.tolist() for x in pair] for pair in pairs] == [[[3.0 * (r + 1)], [3.0] * 2] for r in range(3)]


def test_messages(job: Job) -> None:
    got = [job.tensor(0.0), computed_on(job.device, torch.zeros(2, 2))]

    def call(group: ProcessGroup, rank: int) -> list[Any]:
        if rank == 0:
            return [group.recv([got[0]], 1, 5), group.recv_anysource([got[1].t()], 6)]
        if rank == 1:
            return [group.send([job.tensor(7.0)], 0, 5)]
        return [group.send([computed_on(job.device, torch.arange(4.0).view(2, 2))], 0, 6)]

    works = job.call(call)
    assert works[0][1]._source_rank() == 2
    assert works[0][0].source_rank() == 1
    job.call(lambda _, rank: [work.wait() for work in works[rank]])
    wait_for(job.streams)
    assert got[0].memory.tolist() == [7.0]
    assert got[1].memory.t().tolist() == [[0.0, 1.0], [2.0, 3.0]]


def test_the_host_does_not_wait(job: Job) -> None:
    """Futures are complete before any rank's stream has come to the operation; kernels behind wait() see the sum."""
    held = threading.Event()
    tensors = [computed_on(job.device, torch.zeros(4, 2)) for _ in range(3)]

    def call(group: ProcessGroup, rank: int) -> Any:
        job.streams[rank].put(held.wait)
        tensors[rank].fill_(rank + 1.0)
        work = group.allreduce([tensors[rank][:, 1]], SUM)
        future = work.get_future()
        assert future.done()
        assert not work.is_completed()
        assert work.exception() is None
        future.wait()
        doubled = tensors[rank][:, 1] * 2
        return work, future, doubled

    found = job.call(call)
    barriers = [group.barrier() for group in job.groups]
    for barrier in barriers:
        barrier.wait()  # of hosts
    held.set()
    wait_for(job.streams)
    for rank, (work, future, doubled) in enumerate(found):
        assert doubled.memory.tolist() == [12.0] * 4
        assert future.value()[0].memory.tolist() == [6.0] * 4
        assert tensors[rank].memory[:, 0].tolist() == [rank + 1.0] * 4
        assert work.is_success()
        assert not any(work.operations[0]._stream is stream for stream in job.streams)


def test_what_is_used_on_the_operations_stream_is_kept_for_it(job: Job) -> None:
    column = computed_on(job.device, torch.ones(4, 3))[:, 1]
    with job.device.on(job.streams[0]):
        work = job.groups[0].allreduce([column], SUM)
    kept = {tensor.data_ptr() for tensor, stream in job.device.kept if stream is work.operations[0]._stream}
    assert column.data_ptr() in kept
    assert len(kept) == 2  # and the contiguous copy of it


def test_a_failure_gives_nan_and_is_told_by_the_next_call(job: Job) -> None:
    tensors = [job.tensor(1.0, 2.0) for _ in range(3)]
    with job.device.on(job.streams[0]):
        work = job.groups[0].allreduce([tensors[0]], SUM)
        future = work.get_future()
    job.groups[2].shutdown()
    with pytest.raises(PeerFailed, match="rank 2 closed"):
        job.groups[0].communicator.synchronize()
    with job.device.on(job.streams[0]):
        assert future.wait()[0] is tensors[0]
        job.streams[0].synchronize()
        assert torch.isnan(tensors[0].memory).all()
        assert isinstance(work.exception(), PeerFailed)
        assert not work.is_success()
        for call in (work.wait, work.get_future, lambda: job.groups[0].allreduce([tensors[0]], SUM)):
            with pytest.raises(PeerFailed, match="rank 2 closed"):
                call()


def test_moves_between_some_ranks_and_all(job: Job) -> None:
    root = SimpleNamespace(rootRank=1)
    given = [job.tensor(rank, rank + 0.5) for rank in range(3)]
    listed = [job.tensor(0.0, 0.0) for _ in range(3)]
    job.run(lambda group, rank: group.gather([listed] if rank == 1 else [], [given[rank]], root))
    assert [x.memory.tolist() for x in listed] == [[0.0, 0.5], [1.0, 1.5], [2.0, 2.5]]
    taken = [job.tensor(0.0, 0.0) for _ in range(3)]
    job.run(lambda group, rank: group.scatter([taken[rank]], [given] if rank == 1 else [], root))
    assert [x.memory.tolist() for x in taken] == [x.memory.tolist() for x in given]
    blocks = [[job.tensor(10 * rank + to) for to in range(3)] for rank in range(3)]
    got = [[job.tensor(0.0) for _ in range(3)] for _ in range(3)]
    job.run(lambda group, rank: group.alltoall(got[rank], blocks[rank]))
    assert [[x.memory.item() for x in of_rank] for of_rank in got] == [[r, 10 + r, 20 + r] for r in range(3)]
    whole = [job.tensor(*(10 * rank + to for to in range(3))) for rank in range(3)]
    out = [job.tensor(0.0, 0.0, 0.0) for _ in range(3)]
    job.run(lambda group, rank: group.all_to_all_single(out[rank], whole[rank], [], []))
    assert [x.memory.tolist() for x in out] == [[r, 10 + r, 20 + r] for r in range(3)]
    columns = [computed_on(job.device, torch.zeros(2, 3)) for _ in range(3)]
    job.run(lambda group, rank: group.scatter([columns[rank][:, 1]], [given] if rank == 1 else [], root))
    assert [x.memory[:, 1].tolist() for x in columns] == [x.memory.tolist() for x in given]


def test_the_group_stands_for_both_devices(job: Job) -> None:
    group = job.groups[0]
    assert group._device_types == [torch.device("cpu"), torch.device("cuda")]
    assert group._get_backend(torch.device("cuda", 0)) is group
    assert dist.Backend.backend_capability["telegrad"] == ["cpu", "cuda"]
