"""Nodes of several ranks under a Synchronizer on a device whose streams compute, with Gloo inside of a node in the
place of NCCL: the host's bits, checkpoints for other nodes, and a host that waits for nothing."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from computing_device import ComputingRuntime, computed_on
from device_and_host import DeviceRank, assert_alike, train
from given_gradients import NAMED, given, gradients_of, sgd
from given_gradients import Rank as HostRank
from handmade_buckets import named
from nccl_stand_in import StreamGroup, node_groups, numbers_of
from torch import Tensor
from triton_arrays import DEVICE

from telegrad import Communicator, LowRank
from telegrad.ddp import node_ranks, reshard
from telegrad.errors import NonFiniteGradient, TransportError

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),  # of numpy, in the interpreter
    pytest.mark.skipif(DEVICE != "cpu", reason="the fake device's memory is the host's: set TRITON_INTERPRET=1"),
]

OnNodes = Callable[..., list[Any]]


@pytest.fixture
def on_nodes(device: ComputingRuntime) -> Iterator[OnNodes]:
    """``on_nodes(function, sizes=(2, 2), **options)`` calls ``function(rank)`` on a DeviceRank of each rank of nodes of
    these sizes; returns by rank. ``flat``: without ``node=``."""
    made: list[Communicator] = []
    groups: list[Any] = []  # kept: a rank that is over would end what its node's others still exchange

    def run(
        function: Callable[[DeviceRank], Any], sizes: tuple[int, ...] = (2, 2), *, flat: bool = False, **options: Any
    ) -> list[Any]:
        comms = Communicator.local(sum(sizes), nodes=numbers_of(sizes), timeout_s=60.0)
        made.extend(comms)
        group_of, streams = node_groups(device, sizes), [device.new_stream() for _ in comms]

        def call(number: int) -> Any:
            comm, own = comms[number], dict(options)
            with device.on(streams[number]):
                try:
                    if not flat and "node" not in own:
                        groups.append(group_of(number))
                        own["node"] = groups[-1]
                    rank = DeviceRank(device, comm, streams[number], **own)
                    rank.group = own.get("node")  # type: ignore[attr-defined]
                    try:
                        return function(rank)
                    finally:
                        rank.sync.close()
                except BaseException as error:
                    comm.abort(f"the test failed: {error!r}")
                    raise

        with ThreadPoolExecutor(len(comms)) as pool:
            return [one.result(120) for one in [pool.submit(call, number) for number in range(len(comms))]]

    yield run
    for comm in made:
        comm.close()
    for stream in device.streams:
        stream.synchronize()
    groups.clear()


def on_host(function: Callable[[Any], Any], sizes: tuple[int, ...] = (2, 2), **options: Any) -> list[Any]:
    """The same of ranks on the host, whose node's sums are telegrad's."""
    comms = Communicator.local(sum(sizes), nodes=numbers_of(sizes), timeout_s=60.0)

    def call(comm: Communicator) -> Any:
        rank = HostRank(comm, **{"node": "auto", **options})
        try:
            return function(rank)
        finally:
            rank.sync.close()

    with ThreadPoolExecutor(len(comms)) as pool:
        try:
            return [one.result(120) for one in [pool.submit(call, comm) for comm in comms]]
        finally:
            for comm in comms:
                comm.close()


def left_of(states: list[Any]) -> dict[str, Tensor]:
    """What all residuals of each parameter are worth, as a sum over ranks."""
    [state] = reshard(states, 1)
    return {name: one["residual"].double() * one["unit"] for name, one in state["compressor"]["parameters"].items()}


def averages_of(steps: range) -> Callable[[Any], list[dict[str, Tensor]]]:
    return lambda rank: [rank.step(gradients_of(rank.comm.rank, step)) for step in steps]


@pytest.mark.parametrize(
    "options",
    [
        {"plan": "single", "select": "topk", "momentum": 0.9, "optimizer": sgd},
        {"plan": "wfbp", "select": "reused", "interval": 2, "combine": "oktopk"},
        {"plan": NAMED, "select": "topk", "values": "packed-int8", "warmup_steps": 2},
        {"plan": NAMED, "select": "topk", "dtype": torch.bfloat16, "nonfinite": "send"},
        {"plan": "single", "compress": "quantised", "formats": "int8"},
    ],
    ids=named,
)
def test_the_hosts_bits(on_nodes: OnNodes, options: dict[str, Any]) -> None:
    steps = range(4 if {"interval", "warmup_steps"} & {*options} else 3)
    found, expected = on_nodes(train(steps), **options), on_host(train(steps), **options)
    for (averages, kept, saved), (wanted, waits, state) in zip(found, expected, strict=True):
        for one, other in zip(averages, wanted, strict=True):
            assert_alike(one, other)
        assert_alike(kept, waits)
        assert saved["node"] == state["node"]


@pytest.mark.parametrize(
    ("plan", "dtype"),
    [
        *((NAMED, dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)),
        *(("auto", torch.bfloat16), ("wfbp", torch.float32)),
    ],
    ids=named,
)
def test_dense_averages_are_exact(on_nodes: OnNodes, plan: Any, dtype: torch.dtype) -> None:
    def small(rank: int, step: int) -> dict[str, Tensor]:
        return {name: one.div(12).sign() * 4 for name, one in gradients_of(rank, step).items()}

    def run(rank: DeviceRank) -> list[dict[str, Tensor]]:
        given_in = [{name: one.to(dtype) for name, one in small(rank.comm.rank, step).items()} for step in range(2)]
        return [rank.step(one) for one in given_in]

    for averages in on_nodes(run, compress=None, plan=plan, dtype=dtype):
        for step, found in enumerate(averages):
            for name, one in found.items():
                expected = sum(small(rank, step)[name] for rank in range(4)) / 4
                assert one.dtype == dtype
                assert torch.equal(one.double(), expected.double()), name


@pytest.mark.parametrize("sizes", [(3, 3), (1, 1), (2,), (2, 2, 2)], ids=str)
def test_nodes_of_other_sizes_lose_nothing(on_nodes: OnNodes, sizes: tuple[int, ...]) -> None:
    ranks, steps = sum(sizes), 3

    def run(rank: DeviceRank) -> tuple[dict[str, Tensor], Any]:
        assert rank.sync.ranks_of_node == sizes[0]
        averages = averages_of(range(steps))(rank)
        return {name: sum(one[name].double() for one in averages) for name in averages[0]}, rank.sync.state_dict()

    found = on_nodes(run, sizes, plan=NAMED, select="topk")
    left = left_of([state for _, state in found])
    for name, total in given(ranks, steps).items():
        waits = left[name].view(total.shape) if name in left else 0.0
        torch.testing.assert_close(found[0][0][name] * ranks + waits, total, rtol=1e-5, atol=1e-1)
        assert all(torch.equal(applied[name], found[0][0][name]) for applied, _ in found[1:])


def test_low_rank_loses_nothing(on_nodes: OnNodes) -> None:
    def run(rank: DeviceRank) -> tuple[dict[str, Tensor], Any]:
        averages = averages_of(range(3))(rank)
        return {name: sum(one[name].double() for one in averages) for name in averages[0]}, rank.sync.state_dict()

    found = on_nodes(run, plan=NAMED, compress=LowRank(rank=2, small_elements=16))
    left = left_of([state for _, state in found])
    for name, total in given(4, 3).items():
        waits = left[name].view(total.shape) if name in left else 0.0
        torch.testing.assert_close(found[0][0][name] * 4 + waits, total, rtol=1e-4, atol=1.0)
        assert all(torch.equal(applied[name], found[0][0][name]) for applied, _ in found[1:])


def test_a_state_moves_between_the_host_the_device_and_other_nodes(on_nodes: OnNodes) -> None:
    options = {"plan": NAMED, "select": "topk"}
    first = [state for _, _, state in on_nodes(train(range(3)), **options)]
    there, here = on_nodes(train(range(3, 5), first), **options), on_host(train(range(3, 5), first), **options)
    for (averages, kept, _), (wanted, waits, _) in zip(there, here, strict=True):
        for one, other in zip(averages, wanted, strict=True):
            assert_alike(one, other)
        assert_alike(kept, waits)
    before = left_of(first)
    saved: list[Any] = first
    for sizes, flat in (((4,), False), ((1,) * 4, True), ((2, 2), False)):
        shares = reshard(saved, 4)

        def resume(rank: DeviceRank, shares: Any = shares) -> Any:
            rank.sync.load_state_dict(shares[rank.comm.rank])
            return rank.sync.state_dict()

        saved = on_nodes(resume, sizes, flat=flat, **options)
        for name, one in left_of(saved).items():
            torch.testing.assert_close(one, before[name], rtol=1e-5, atol=1e-4)


def test_the_host_waits_for_no_stream(on_nodes: OnNodes, device: ComputingRuntime) -> None:
    """Of a pass whose gradients all come. Each stream is held back until its host has ended the pass."""
    goes = threading.Barrier(4)

    def run(rank: DeviceRank) -> int:
        rank.step(gradients_of(rank.comm.rank, 0))
        goes.wait(60)
        before, held = device.host_waits, threading.Event()
        rank.model.zero_grad()
        rank.stream.put(lambda: held.wait(60))
        given_here = {name: computed_on(device, one) for name, one in gradients_of(rank.comm.rank, 1).items()}
        rank.model(given_here).backward()
        goes.wait(60)
        waits = device.host_waits - before
        held.set()
        rank.stream.synchronize()
        assert rank.group.calls[-4:] == ["alltoall_base"] * 2 + ["allgather"] * 2  # type: ignore[attr-defined]
        return waits

    assert on_nodes(run, plan=NAMED, select="topk") == [0] * 4


def test_a_parameter_that_only_some_ranks_use(on_nodes: OnNodes) -> None:
    def run(rank: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        names = ("norm", "hidden") if rank.comm.rank == 1 else ("norm", "bias")
        some = rank.step(gradients_of(rank.comm.rank, 0, names))
        return some, rank.step(gradients_of(rank.comm.rank, 1, ("norm",)), keeps=True)

    (some, kept), *others = on_nodes(run, plan=NAMED, density=1.0, select="topk")
    assert {*some} == {"norm", "hidden", "bias"}
    assert torch.equal(some["hidden"] * 4, gradients_of(1, 0)["hidden"])
    assert torch.equal(kept["hidden"], some["hidden"])
    assert all(torch.equal(kept[name], one[1][name]) for one in others for name in kept)


def test_an_earlier_average_that_meets_gradients_of_others_is_an_error(on_nodes: OnNodes) -> None:
    all_stepped, has_aborted = threading.Barrier(4), threading.Event()

    def run(rank: DeviceRank) -> None:
        rank.step(gradients_of(rank.comm.rank, 0))
        names = ("norm",) if rank.comm.rank == 1 else ("norm", "hidden")
        comm, said = rank.sync.comm, "'hidden' has an average of an earlier pass here, and a gradient on another rank"
        if rank.comm.rank == 1:
            ends = comm.abort

            def abort(reason: str) -> None:
                all_stepped.wait(60)  # it ends also what another rank has not finished
                ends(reason)
                has_aborted.set()

            comm.abort = abort  # type: ignore[method-assign]
            with pytest.raises(RuntimeError, match=f"{said}.* call zero_grad\\(\\) before each backward pass"):
                rank.step(gradients_of(rank.comm.rank, 1, names), keeps=True)
            return
        rank.step(gradients_of(rank.comm.rank, 1, names), keeps=True)
        all_stepped.wait(60)
        has_aborted.wait(60)
        with pytest.raises(TransportError, match=said):
            comm.barrier()

    on_nodes(run, plan=NAMED, select="topk")


def test_a_nan_is_raised_late_by_the_rank_that_has_the_piece(on_nodes: OnNodes) -> None:
    all_trained, has_raised = threading.Barrier(4), threading.Event()

    def run(rank: DeviceRank) -> Any:
        rank.step(gradients_of(rank.comm.rank, 0))
        gradients = gradients_of(rank.comm.rank, 1)
        if rank.comm.rank == 3:
            gradients["embedding"][0, 5] = math.nan
        assert rank.step(gradients)["embedding"].isnan().sum() == 1
        all_trained.wait(60)  # an abort ends also what another rank has not finished
        if rank.comm.rank != 2:
            has_raised.wait(60)
        wanted = NonFiniteGradient if rank.comm.rank == 2 else TransportError
        with pytest.raises(wanted, match="rank 2, for its node, step 1: the gradient of 'embedding' has entries"):
            rank.sync.state_dict() if rank.comm.rank == 2 else rank.sync.comm.barrier()
        has_raised.set()
        return rank.comm.rank

    assert on_nodes(run, plan=NAMED, select="topk") == [0, 1, 2, 3], "rank 2 has the piece, of the sum of 2 and 3"


def test_auto_makes_a_group_of_the_nodes_ranks(on_nodes: OnNodes, device: ComputingRuntime) -> None:
    """Where comm's ranks are others than those of the job."""
    store, local = dist.HashStore(), threading.local()

    def new_group(members: list[int], use_local_synchronization: bool) -> StreamGroup:
        assert use_local_synchronization
        return StreamGroup(device, dist.PrefixStore(str(members), store), members.index(local.rank), len(members))

    def run(rank: DeviceRank) -> Any:
        return averages_of(range(2))(rank)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node_ranks.dist, "is_initialized", lambda: True)
        patch.setattr(node_ranks.dist, "get_rank", lambda: local.rank)
        patch.setattr(node_ranks.dist, "new_group", new_group)
        made = DeviceRank.__init__

        def init(self: DeviceRank, runtime: Any, comm: Communicator, *args: Any, **options: Any) -> None:
            local.rank = 10 + 7 * comm.rank
            made(self, runtime, comm, *args, **options)

        patch.setattr(DeviceRank, "__init__", init)
        found = on_nodes(run, node="auto", plan=NAMED, select="topk")
    for own, wanted in zip(found, on_host(averages_of(range(2)), plan=NAMED, select="topk"), strict=True):
        for one, other in zip(own, wanted, strict=True):
            assert_alike(one, other)


def test_auto_without_torch_distributed_is_an_error_on_all_ranks(on_nodes: OnNodes) -> None:
    def call(rank: DeviceRank) -> None:
        raise AssertionError("it is made")

    with pytest.raises(ValueError, match="node='auto' on a GPU makes process groups, and torch.distributed is not"):
        on_nodes(call, node="auto", plan=NAMED)
