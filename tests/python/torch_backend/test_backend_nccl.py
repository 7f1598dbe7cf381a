"""A group of the backend whose CUDA tensors go by NCCL: what torch is asked for, and sums by what stands for it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from computing_device import ComputingRuntime, computed_on, wait_for
from fake_device import FakeStream
from nccl_stand_in import give_group

from telegrad import Communicator
from telegrad.torch_backend import Options, ProcessGroup, process_group
from telegrad.torch_backend.process_group import OwnNccl, own_nccl

TIMEOUT = timedelta(seconds=20)


class Backend:
    """Stands for torch's ProcessGroupNCCL."""

    Options = SimpleNamespace
    made: list[Backend]

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        self.store, self.rank, self.size, self.options = store, rank, size, options
        self.called: list[Any] = []
        self.shutdowns = 0
        self.made.append(self)

    def allreduce(self, tensors: list[Any], options: Any) -> str:
        self.called.append((tensors, options))
        return "work"

    def shutdown(self) -> None:
        self.shutdowns += 1


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> list[Backend]:
    Backend.made = []
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Backend, raising=False)
    return Backend.made


def test_torch_is_asked_for_nccl_in_the_first_sum(backends: list[Backend]) -> None:
    store = dist.HashStore()
    made = own_nccl("auto", store, 1, 3, TIMEOUT, lambda: "one")
    assert isinstance(made, OwnNccl)
    assert not backends
    x = torch.ones(3)
    assert [made.begin_sum(x) for _ in range(2)] == ["work"] * 2
    (backend,) = backends
    assert (backend.rank, backend.size, backend.options._timeout) == (1, 3, TIMEOUT)
    backend.store.set("a", "b")
    assert store.get("nccl/one/a") == b"b"
    for tensors, options in backend.called:
        assert tensors == [x]
        assert options.reduceOp == dist.ReduceOp.SUM
        assert getattr(options, "asyncOp", True)  # torch 2.6 has no such option
    made.close()
    made.close()
    assert backend.shutdowns == 1


@pytest.mark.skipif(
    not dist.is_nccl_available() or torch.cuda.is_available(), reason="needs a torch built with NCCL, and no GPU"
)
def test_torchs_own_class_takes_what_it_is_given() -> None:
    made = own_nccl("auto", dist.HashStore(), 0, 1, TIMEOUT, lambda: "one")
    assert made is not None
    with pytest.raises(ValueError, match="only supported with GPUs"):  # and not a TypeError
        made.begin_sum(torch.ones(3))


def test_a_torch_whose_sums_have_no_such_option(backends: list[Backend], monkeypatch: pytest.MonkeyPatch) -> None:
    """As 2.6, the oldest one that telegrad takes."""

    class Options:
        __slots__ = ("reduceOp",)

    monkeypatch.setattr(dist, "AllreduceOptions", Options)
    made = own_nccl("auto", dist.HashStore(), 0, 1, TIMEOUT, lambda: "one")
    assert made is not None
    assert made.begin_sum(torch.ones(3)) == "work"
    assert backends[0].called[0][1].reduceOp == dist.ReduceOp.SUM


def test_a_torch_that_shuts_down_by_its_older_name(monkeypatch: pytest.MonkeyPatch) -> None:
    shutdowns: list[str] = []

    class Older:
        Options = SimpleNamespace

        def __init__(self, *_: Any) -> None:
            pass

        def allreduce(self, *_: Any) -> str:
            return "work"

        def _shutdown(self) -> None:
            shutdowns.append("_shutdown")

    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Older, raising=False)
    made = own_nccl("auto", dist.HashStore(), 0, 1, TIMEOUT, lambda: "one")
    assert made is not None
    made.begin_sum(torch.ones(3))
    made.close()
    assert shutdowns == ["_shutdown"]


def test_a_group_that_is_destroyed_lets_go_of_it(backends: list[Backend]) -> None:
    group = ProcessGroup.join(dist.HashStore(), 0, 1, TIMEOUT, Options(tuning=None, device_algorithm="nccl"))
    assert group.communicator._nccl is not None
    group.communicator._nccl.group.begin_sum(torch.ones(1))
    assert backends[0].shutdowns == 0
    group.shutdown()
    assert backends[0].shutdowns == 1


def test_settings() -> None:
    """This torch may or may not have NCCL."""
    store = dist.HashStore()
    assert own_nccl("host_transfer", store, 0, 1, TIMEOUT, lambda: "one") is None
    with pytest.raises(ValueError, match="device_algorithm='ring' does not exist: use one of auto, nccl, host_tr"):
        own_nccl("ring", store, 0, 1, TIMEOUT, lambda: "one")


def test_a_torch_without_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group.dist, "is_nccl_available", lambda: False)
    store = dist.HashStore()
    assert own_nccl("auto", store, 0, 1, TIMEOUT, lambda: "one") is None
    with pytest.raises(ValueError, match="device_algorithm='nccl' needs a torch that was built with NCCL"):
        own_nccl("nccl", store, 0, 1, TIMEOUT, lambda: "one")


def test_torchs_sums_go_by_it(device: ComputingRuntime, comms: list[Communicator], streams: list[FakeStream]) -> None:
    shared = give_group(device, comms, streams, met=True)
    groups = [ProcessGroup(comm) for comm in comms]

    def run(begin: Callable[[ProcessGroup, int], Any]) -> None:
        works = []
        for rank, group in enumerate(groups):
            with device.on(streams[rank]):
                works.append(begin(group, rank))
        for rank, work in enumerate(works):
            with device.on(streams[rank]):
                work.wait()
        wait_for(streams)

    def options(op: Any) -> Any:
        return SimpleNamespace(reduceOp=op, rootRank=0)

    floats = [computed_on(device, torch.tensor([1.0, rank + 1.0])) for rank in range(3)]
    run(lambda group, rank: group.allreduce([floats[rank]], options(dist.ReduceOp.SUM)))
    assert [x.memory.tolist() for x in floats] == [[3.0, 6.0]] * 3
    bytes_ = [computed_on(device, torch.tensor([rank, 100], dtype=torch.uint8)) for rank in range(3)]
    run(lambda group, rank: group.allreduce([bytes_[rank]], options(dist.ReduceOp.SUM)))
    assert [x.memory.tolist() for x in bytes_] == [[3, 44]] * 3
    columns = [computed_on(device, torch.full((4, 5), float(rank))) for rank in range(3)]
    run(lambda group, rank: group.allreduce([columns[rank][:, 2]], options(dist.ReduceOp.AVG)))
    assert [x.memory[:, 2].tolist() for x in columns] == [[1.0] * 4] * 3
    assert [x.memory.sum().item() for x in columns] == [4.0 + 16.0 * rank for rank in range(3)]
    largest = [computed_on(device, torch.tensor([float(rank)])) for rank in range(3)]
    run(lambda group, rank: group.allreduce([largest[rank]], options(dist.ReduceOp.MAX)))
    assert [x.memory.tolist() for x in largest] == [[2.0]] * 3
    assert shared.sums == [[8, 16]] * 3  # bytes go by the host
