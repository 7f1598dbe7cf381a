"""Dense sums of device tensors by NCCL, for which nccl_stand_in.py stands, on a device whose streams compute: ranks are
this process's, each with a stream."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from computing_device import ComputingRuntime, computed_on, wait_for
from device_ranks import RANKS, values
from fake_device import DEVICE_TYPE, FakeStream
from nccl_ranks import Ranks, total
from nccl_stand_in import DEVICE, DuplicateDeviceError

from telegrad import Communicator
from telegrad.communicator.cuda import nccl
from telegrad.communicator.cuda.nccl import TorchGroup, agreed, nccl_group
from telegrad.cost.tuning import DEVICE_ALGORITHMS
from telegrad.errors import MismatchedCall, TransportError

Job = Callable[..., Any]


@pytest.fixture
def make(device: ComputingRuntime, comms: list[Communicator], streams: list[FakeStream]) -> Callable[..., Ranks]:
    return lambda **options: Ranks(device, comms, streams, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("n", [1, 1000, 3_000_001])
def test_sums_go_by_nccl_and_not_through_the_host(make: Job, dtype: torch.dtype, n: int) -> None:
    ranks = make()
    ranks.meet()
    sent = [comm.stats()["bytes_sent"] for comm in ranks.comms]
    tensors = ranks.tensors(n, dtype)
    assert ranks.on_all(lambda comm, rank: comm.all_reduce(tensors[rank])) == [None] * RANKS
    wait_for(ranks.streams)
    for x in tensors:
        assert torch.equal(x.memory, total(n, dtype))
    assert ranks.nccl.sums == [[tensors[0].nbytes]] * RANKS
    for comm, before in zip(ranks.comms, sent, strict=True):
        comm.synchronize()
        assert comm.stats()["bytes_sent"] - before < 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_averages_of_equal_sums_have_the_hosts_bits(make: Job, dtype: torch.dtype) -> None:
    ranks = make()
    ranks.meet()
    by_nccl, by_host = (
        [computed_on(ranks.device, torch.arange(rank, 1001 + rank).remainder(19).to(dtype)) for rank in range(RANKS)]
        for _ in range(2)
    )
    ranks.on_all(lambda comm, rank: comm.all_reduce(by_nccl[rank], "avg"))
    ranks.on_all(lambda comm, rank: comm.all_reduce(by_host[rank], "avg", algorithm="host_transfer"))
    wait_for(ranks.streams)
    assert ranks.nccl.sums == [[by_nccl[0].nbytes]] * RANKS
    for one, other in zip(by_nccl, by_host, strict=True):
        assert torch.equal(one.memory, other.memory)


def test_what_an_operation_gives(make: Job) -> None:
    ranks = make()
    ranks.meet()
    given, out = ranks.tensors(12), [computed_on(ranks.device, torch.zeros(3, 4)) for _ in range(RANKS)]
    works = ranks.on_all(
        lambda comm, rank: comm.all_reduce(given[rank].view(3, 4), "avg", out=out[rank], async_op=True)
    )
    ranks.on_all(lambda comm, rank: works[rank].wait())
    wait_for(ranks.streams)
    for rank, work in enumerate(works):
        assert torch.equal(given[rank].memory, values(rank, 12))
        assert torch.equal(out[rank].memory, (total(12) / 3).view(3, 4))
        assert work.is_completed()
        assert ranks.on_all(lambda comm, rank: works[rank].result())[rank] is out[rank]
        assert work.span_s() is None
        assert work.source() is None
        assert work.communicated()
    futures = ranks.on_all(lambda comm, rank: comm.all_reduce(given[rank], async_op=True).get_future())
    assert all(future.done() for future in futures)
    seen = ranks.on_all(lambda comm, rank: futures[rank].wait() * 1.0)
    wait_for(ranks.streams)
    assert all(torch.equal(x.memory, total(12)) for x in seen)


@pytest.mark.parametrize("async_op", [False, True])
def test_streams_wait_and_the_host_does_not(make: Job, async_op: bool) -> None:
    ranks = make()
    ranks.meet()
    held = threading.Event()
    for stream in ranks.streams:
        stream.put(held.wait)
    tensors = ranks.tensors(8)

    def add(comm: Communicator, rank: int) -> Any:
        tensors[rank].add_(1.0)  # behind what is held
        work = comm.all_reduce(tensors[rank], async_op=async_op)
        if work is not None:
            work.wait()
        return tensors[rank] * 2.0

    seen = ranks.on_all(add)  # would hang if a host waited
    assert all(torch.equal(x.memory, values(rank, 8)) for rank, x in enumerate(tensors))
    held.set()
    wait_for(ranks.streams)
    assert all(torch.equal(x.memory, 2.0 * (total(8) + 3.0)) for x in seen)


def test_results_come_in_the_order_of_the_calls_however_they_go(make: Job) -> None:
    """What uses several results may wait for the last alone."""
    ranks = make()
    ranks.meet()
    first, second, third = (ranks.tensors(n) for n in (5, 100_000, 7))

    def run(comm: Communicator, rank: int) -> Any:
        comm.all_reduce(first[rank], async_op=True)
        comm.all_reduce(second[rank], async_op=True, algorithm="host_transfer")
        work = comm.all_reduce(third[rank], "avg", async_op=True)
        put = computed_on(ranks.device, torch.zeros(3))
        work.then(
            lambda: put.copy_(torch.stack([first[rank][0], second[rank][0], third[rank][0]])),
            [put, first[rank], second[rank], third[rank]],
        )
        work.wait()
        return put

    seen = ranks.on_all(run)
    wait_for(ranks.streams)
    assert [x.memory.tolist() for x in seen] == [[6.0, 6.0, 2.0]] * RANKS


def test_what_nccl_does_not_do_goes_through_the_host(make: Job) -> None:
    ranks = make()
    ranks.meet()
    for op in ("max", "min", "prod", "max_abs"):
        tensors = ranks.tensors(4)
        ranks.on_all(lambda comm, rank, op=op, tensors=tensors: comm.all_reduce(tensors[rank], op))
        wait_for(ranks.streams)
        assert tensors[0].memory[0].item() == {"min": 1.0, "prod": 6.0}.get(op, 3.0)
        with pytest.raises(ValueError, match="algorithm='nccl' sums and averages"):
            ranks.on_all(lambda comm, rank, op=op, x=tensors: comm.all_reduce(x[rank], op, algorithm="nccl"))
    for algorithm in ("ring", "recursive_doubling", "host_transfer"):
        tensors = ranks.tensors(4)
        ranks.on_all(lambda comm, rank, how=algorithm, x=tensors: comm.all_reduce(x[rank], algorithm=how))
        wait_for(ranks.streams)
        assert torch.equal(tensors[2].memory, total(4))
    empty = ranks.tensors(0)
    ranks.on_all(lambda comm, rank: comm.all_reduce(empty[rank], algorithm="nccl"))
    wait_for(ranks.streams)
    assert ranks.nccl.sums == [[]] * RANKS


def test_ranks_that_share_a_device_are_told_before_nccl_refuses_them(
    make: Job, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "_said", set())
    ranks = make(places=["one", "other", "one"])
    with caplog.at_level(logging.WARNING, "telegrad"):
        for _ in range(2):
            tensors = ranks.tensors(5)
            ranks.on_each(lambda comm, rank, x=tensors: comm.all_reduce(x[rank], "avg"))
            wait_for(ranks.streams)
            assert all(torch.equal(x.memory, total(5) / 3) for x in tensors)
    assert ranks.nccl.sums == [[]] * RANKS
    (said,) = [record.getMessage() for record in caplog.records]
    assert "go through host memory: rank 0 and rank 2 share a device (fake at one)" in said
    assert "torch.cuda.set_device" in said
    with pytest.raises(ValueError, match="algorithm='nccl' cannot be: rank 0 and rank 2 share a device"):
        ranks.on_all(lambda comm, rank: comm.all_reduce(tensors[rank], algorithm="nccl"))


def test_a_device_with_and_without_its_number_is_one(make: Job) -> None:
    """Ranks are asked about it once."""
    ranks = make()
    for device in (torch.device(DEVICE_TYPE), DEVICE):
        assert ranks.on_each(lambda comm, _, at=device: comm.device_algorithms(at)) == [DEVICE_ALGORITHMS] * RANKS
    tensors = ranks.tensors(5)
    ranks.on_all(lambda comm, rank: comm.all_reduce(tensors[rank]))
    wait_for(ranks.streams)
    assert [list(comm._nccl._verdicts) for comm in ranks.comms] == [[DEVICE]] * RANKS
    assert ranks.on_each(lambda comm, _: comm.sum_cost(torch.device(DEVICE_TYPE))) == [None] * RANKS


def test_a_device_that_is_not_there_is_found_before_anything_is_sent(
    make: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is no call that others wait for: this rank may ask about another one."""
    ranks = make()

    def unknown(device: torch.device) -> torch.device:
        raise RuntimeError(f"there is no {device}")

    with monkeypatch.context() as patched:
        patched.setattr(ranks.device, "resolved", unknown)
        for ask in (Communicator.device_algorithms, Communicator.sum_cost):
            with pytest.raises(ValueError, match=f"cannot be used here: torch says 'there is no {DEVICE_TYPE}:7'"):
                ask(ranks.comms[0], torch.device(DEVICE_TYPE, 7))
    assert ranks.on_each(lambda comm, _: comm.device_algorithms(DEVICE)) == [DEVICE_ALGORITHMS] * RANKS


def test_nccl_would_have_refused_them(make: Job) -> None:
    """So the test above can fail."""
    ranks = make(places=["one", "other", "one"])
    tensors = ranks.tensors(5)
    for rank in (0, 2):
        with ranks.device.on(ranks.streams[rank]), pytest.raises(DuplicateDeviceError, match="Duplicate GPU detected"):
            ranks.nccl.begin(rank, tensors[rank])


def test_a_demand_that_cannot_be_met_is_an_error_on_all_ranks(make: Job) -> None:
    ranks = make(setting="nccl", places=["one", "one", "other"])
    tensors = ranks.tensors(5)

    def refused(comm: Communicator, rank: int) -> str:
        with pytest.raises(ValueError, match="device_algorithm='nccl' cannot be: rank 0 and rank 1") as caught:
            comm.all_reduce(tensors[rank])
        return str(caught.value)

    assert len(set(ranks.on_each(refused))) == 1
    assert [comm.stats()["in_flight"] for comm in ranks.comms] == [0] * RANKS


def test_settings_are_the_same_on_all_ranks(make: Job) -> None:
    ranks = make()
    ranks.comms[1]._nccl._setting = "nccl"
    tensors = ranks.tensors(5)

    def refused(comm: Communicator, rank: int) -> None:
        with pytest.raises(ValueError, match=r"differs between ranks \(rank 0: 'auto', rank 1: 'nccl'\): give all"):
            comm.all_reduce(tensors[rank])

    ranks.on_each(refused)


def test_a_rank_that_leaves_is_named_by_the_next_call(make: Job) -> None:
    ranks = make()
    ranks.meet()
    tensors = ranks.tensors(5)
    for rank in (0, 1):
        with ranks.device.on(ranks.streams[rank]):
            ranks.comms[rank].all_reduce(tensors[rank])
    ranks.comms[2].close()
    for rank in (0, 1):
        with pytest.raises(TransportError, match="rank 2 closed"):
            ranks.comms[rank].synchronize()
        with ranks.device.on(ranks.streams[rank]), pytest.raises(TransportError, match="rank 2 closed"):
            ranks.comms[rank].all_reduce(tensors[rank])


def test_ranks_that_call_something_else_are_told(make: Job) -> None:
    ranks = make()
    ranks.meet()
    tensors = ranks.tensors(5)
    for rank, comm in enumerate(ranks.comms):
        with ranks.device.on(ranks.streams[rank]):
            comm.all_reduce(tensors[rank], algorithm="host_transfer" if rank == 1 else "auto")
    with pytest.raises(
        MismatchedCall, match=r"ranks 0, 2 called allreduce\(.*=nccl\), rank 1 called allreduce\(count=5"
    ):
        ranks.comms[0].synchronize()


def test_ranks_whose_tensors_differ_are_told(make: Job) -> None:
    ranks = make()
    ranks.meet()
    ranks.nccl.sums = [[] for _ in range(RANKS)]
    ranks.nccl.begin = lambda rank, x: SimpleNamespace(wait=bool)  # type: ignore[method-assign, assignment]
    ranks.on_all(lambda comm, rank: comm.all_reduce(ranks.tensors(5 + (rank == 2))[rank]))
    with pytest.raises(MismatchedCall, match=r"ranks 0, 1 called .*count=5.*=nccl\), rank 2 called .*count=6.*=nccl"):
        ranks.comms[0].synchronize()


def test_what_torch_refuses_ends_the_operation_on_all_ranks(make: Job) -> None:
    ranks = make()
    ranks.meet()
    ranks.nccl.fails = RuntimeError("NCCL error: unhandled system error")
    tensors = ranks.tensors(5)
    with ranks.device.on(ranks.streams[0]), pytest.raises(RuntimeError, match="unhandled system error"):
        ranks.comms[0].all_reduce(tensors[0])
    ranks.nccl.fails = None

    def next_call() -> None:
        ranks.comms[1].all_reduce(tensors[1])
        ranks.comms[1].synchronize()

    with ranks.device.on(ranks.streams[1]), pytest.raises(TransportError, match="broke off: RuntimeError: NCCL error"):
        next_call()


def test_close_after_the_stream_tells_of_no_failure(make: Job, recwarn: pytest.WarningsRecorder) -> None:
    """The engine may still be told of the last call when the device is through with it."""
    ranks = make()
    ranks.meet()
    for _ in range(20):
        tensors = ranks.tensors(5)
        ranks.on_all(lambda comm, rank, x=tensors: comm.all_reduce(x[rank]))
    wait_for(ranks.streams)
    ranks.on_each(lambda comm, rank: comm.close())
    assert not [one for one in recwarn if "device tensors has failed" in str(one.message)]


def test_parts_of_a_communicator(make: Job) -> None:
    """One of all ranks in their order has the group, others have not."""
    ranks = make()

    def split(comm: Communicator, rank: int) -> list[bool]:
        found = []
        for color, key in ((0, rank), (0, -rank), (rank == 2, 0)):
            child = comm.split(int(color), key)
            assert child is not None
            x = computed_on(ranks.device, torch.ones(3))
            child.all_reduce(x)
            child.synchronize()
            ranks.streams[rank].synchronize()
            assert x.memory.tolist() == [float(child.world_size)] * 3
            found.append(child._nccl is not None)
            child.close()
        return found

    assert ranks.on_each(split) == [[True, False, False]] * RANKS
    assert ranks.nccl.sums == [[12]] * RANKS


def test_the_kernel_that_averages_is_loaded_before_the_first_wait(make: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = make()
    ranks.meet()
    order: list[str] = []
    monkeypatch.setattr(
        ranks.device, "launch", lambda stream, kernels, *tensors: order.append(f"launch {tensors[0].numel()}")
    )
    monkeypatch.setattr(ranks.nccl, "begin", lambda rank, x: order.append("begin") or SimpleNamespace(wait=bool))
    x = computed_on(ranks.device, torch.ones(7))
    with ranks.device.on(ranks.streams[0]):
        for _ in range(2):
            ranks.comms[0].all_reduce(x, "avg")
    assert order == ["launch 1", "begin", "launch 7", "begin", "launch 7"]


def test_settings_that_do_not_exist() -> None:
    with pytest.raises(ValueError, match="device_algorithm='gloo' does not exist: use one of auto, nccl, host_tr"):
        Communicator.from_torch(device_algorithm="gloo")
    with pytest.raises(ValueError, match=r"device_algorithm='nccl' needs a group .* \(torch.distributed is not init"):
        Communicator.from_torch(device_algorithm="nccl")
    with pytest.raises(ValueError, match="device_algorithm='nccl' needs a device_group"):
        Communicator.from_exchange(0, 1, lambda blob: [blob], device_algorithm="nccl")


def test_without_a_group_there_is_no_nccl(
    device: ComputingRuntime, comms: list[Communicator], streams: list[FakeStream]
) -> None:
    x = computed_on(device, torch.ones(3))
    with device.on(streams[0]), pytest.raises(ValueError, match="algorithm='nccl' is not there: make the commun"):
        comms[0].all_reduce(x, algorithm="nccl")
    with pytest.raises(ValueError, match="algorithm='nccl' does not exist for this operation"):
        comms[0].all_reduce(torch.ones(3), algorithm="nccl")
    with pytest.raises(ValueError, match="algorithm='nccl' does not exist for this operation"):
        comms[0].all_reduce(torch.ones(3), algorithm="nccl", async_op=True)


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ("cuda:nccl", True),
        ("cpu:gloo,cuda:nccl", True),
        ("cuda:nccl2", True),  # these three are names of torch 2.15
        ("cpu:gloo,cuda:nccl-lazy", True),
        ("cuda:nccl-legacy", True),
        ("cpu:gloo,cuda:gloo", False),
        ("cpu:gloo", False),
    ],
)
def test_the_groups_backend_for_cuda_is_asked(monkeypatch: pytest.MonkeyPatch, config: str, found: bool) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: asked.append(group) or config)
    assert isinstance(nccl_group("of mine", "auto"), TorchGroup) == found
    assert asked == ["of mine"]
    assert nccl_group("of mine", "host_transfer") is None
    if not found:
        with pytest.raises(ValueError, match=r"needs a group .* but they go by .*init_process_group"):
            nccl_group("of mine", "nccl")


def test_torchs_sum_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []
    monkeypatch.setattr(dist, "all_reduce", lambda x, **options: called.append((x, options)))
    TorchGroup("of mine").begin_sum("x")
    assert called == [("x", {"group": "of mine", "async_op": True})]


def test_a_group_of_torchs_sums(tmp_path: Path) -> None:
    """Gloo's, of one rank: its Work is waited for as NCCL's is."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        x = torch.arange(5.0)
        TorchGroup().begin_sum(x).wait()
        assert x.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
        assert nccl_group(None, "auto") is None
        with pytest.raises(ValueError, match="but they go by gloo: call init_process_group"):
            nccl_group(None, "nccl")
        with pytest.raises(ValueError, match="this process is not in the group"):
            nccl_group(dist.GroupMember.NON_GROUP_MEMBER, "nccl")
    finally:
        dist.destroy_process_group()


def test_devices_of_one_kind_in_several_places() -> None:
    told = [{"setting": "auto", "kind": "H200", "place": str(rank)} for rank in range(3)]
    assert (agreed(told).refusal, agreed(told).kind) == ("", "H200")
    assert agreed([*told, {"setting": "auto", "kind": "A100", "place": "3"}]).kind is None
    assert "rank 1 and rank 3 share a device (H200 at 1)" in agreed([*told, told[1]]).refusal
