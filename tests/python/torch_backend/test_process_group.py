"""What the torch backend does beyond what Gloo does, what it refuses, and how it fails; on ranks of this process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from inspect import signature
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from telegrad import Communicator, MismatchedCall, PeerFailed, TimeoutExpired
from telegrad.torch_backend import NAME, Options, ProcessGroup
from telegrad.torch_backend.process_group import create

SUM = SimpleNamespace(reduceOp=dist.ReduceOp.SUM, rootRank=0)


def _op(name: str) -> SimpleNamespace:
    return SimpleNamespace(reduceOp=getattr(dist.ReduceOp, name), rootRank=0)


@pytest.fixture
def groups() -> Iterator[list[ProcessGroup]]:
    made = [ProcessGroup(communicator) for communicator in Communicator.local(3, timeout_s=30.0)]
    yield made
    for group in made:
        group.shutdown()


def both(groups: list[ProcessGroup], begin: Any) -> list[Any]:
    works = [begin(rank, group) for rank, group in enumerate(groups)]
    for work in works:
        work.wait()
    return works


def test_it_is_registered_for_tensors_of_the_cpu_and_of_cuda() -> None:
    assert NAME in dist.Backend.backend_list
    assert dist.Backend.backend_capability[NAME] == ["cpu", "cuda"]
    group = ProcessGroup(Communicator.local(1)[0])
    assert (group.rank(), group.size(), group.getBackendName()) == (0, 1, "telegrad")
    group._set_group_name("name")
    group._set_group_desc("description")
    assert (group.group_name, group.group_desc) == ("name", "description")
    group.shutdown()
    with pytest.raises(ValueError, match="closed"):
        group.barrier()


def test_torchs_flight_recorder_leaves_the_groups_alone() -> None:
    """From 2.15 on torch attaches it to groups whose backend this set does not hold, which a group in Python fails."""
    program = """
import torch.distributed as dist
names = dist.distributed_c10d._FR_SELF_RECORDING_BACKENDS = {"gloo"}
import telegrad.torch_backend
assert names == {"gloo", "telegrad"}, names
"""
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}  # else it is registered before the set is there
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    assert done.returncode == 0, done.stderr


def test_tensors_that_are_not_contiguous_are_written_where_they_are(groups: list[ProcessGroup]) -> None:
    whole = [torch.zeros(4, 5) for _ in groups]
    for rank, x in enumerate(whole):
        x[:, 2] = float(rank)
    both(groups, lambda rank, group: group.allreduce([whole[rank][:, 2]], SUM))
    assert all(x[:, 2].tolist() == [3.0] * 4 and x.sum() == 12.0 for x in whole)
    both(groups, lambda rank, group: group.broadcast([whole[rank].t()[0]], SimpleNamespace(rootRank=1)))
    out = [torch.zeros(3, 4) for _ in groups]
    both(groups, lambda rank, group: group.all_gather_single(out[rank], whole[rank][:, 2].clone()))
    assert all((x == 3.0).all() for x in out)


def test_a_tensor_of_each_rank_is_gathered_into_one(groups: list[ProcessGroup]) -> None:
    """torch 2.15 calls it as ``gather_single``; ranks but the root give it an empty output."""
    out = [torch.zeros(3, 4)[:, :2] if rank == 1 else torch.empty(0) for rank in range(3)]
    options = SimpleNamespace(rootRank=1)
    both(groups, lambda rank, group: group.gather_single(out[rank], torch.full((2,), float(rank)), options))
    assert out[1].tolist() == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]
    with pytest.raises(ValueError, match="output has 5 elements of torch.float32, but input has 2 of .* must have 6"):
        groups[1].gather_single(torch.empty(5), torch.empty(2), options)


def test_parameters_are_reduced_in_place_though_they_require_gradients(groups: list[ProcessGroup]) -> None:
    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in groups]
    both(groups, lambda rank, group: group.allreduce([parameters[rank]], SUM))
    assert all(x.tolist() == [3.0] * 3 for x in parameters)


def test_unequal_blocks_are_gathered_by_their_shapes(groups: list[ProcessGroup]) -> None:
    blocks = [[torch.empty(rank + 1) for rank in range(3)] for _ in groups]
    both(groups, lambda rank, group: group.allgather([blocks[rank]], [torch.full((rank + 1,), float(rank))]))
    for listed in blocks:
        assert [x.tolist() for x in listed] == [[0.0], [1.0, 1.0], [2.0, 2.0, 2.0]]


def test_a_tensor_is_exchanged_in_place(groups: list[ProcessGroup]) -> None:
    tensors = [torch.arange(6.0) + 10 * rank for rank in range(3)]
    both(groups, lambda rank, group: group.all_to_all_single(tensors[rank], tensors[rank], [], []))
    assert [x.tolist() for x in tensors] == [
        [2 * r, 2 * r + 1, 2 * r + 10, 2 * r + 11, 2 * r + 20, 2 * r + 21] for r in range(3)
    ]


def test_a_future_holds_the_tensors(groups: list[ProcessGroup]) -> None:
    tensors = [torch.ones(2) for _ in groups]
    works = [group.allreduce([tensors[rank]], SUM) for rank, group in enumerate(groups)]
    futures = [work.get_future() for work in works]
    for future, tensor in zip(futures, tensors, strict=True):
        assert future.wait()[0] is tensor
        assert tensor.tolist() == [3.0, 3.0]
    assert all(work.is_completed() and work.is_success() and work.exception() is None for work in works)
    assert works[0].result()[0] is tensors[0]
    works[0].synchronize()
    nothing = [group.allreduce_coalesced([], SUM) for group in groups]
    assert [work.get_future().wait() for work in nothing] == [[], [], []]


def test_what_cannot_be_is_refused_before_anything_is_sent(groups: list[ProcessGroup]) -> None:
    group, x = groups[0], torch.ones(3)
    meta = torch.ones(3, device="meta")
    with pytest.raises(
        TypeError, match="a tensor on meta: the backend 'telegrad' is for tensors of the CPU and of CUDA"
    ):
        group.allreduce([meta], SUM)
    with pytest.raises(TypeError, match="a tensor of layout torch.sparse_coo: give a dense one"):
        group.broadcast([x.to_sparse()], SUM)
    for op, name in ((dist.ReduceOp.MAX, "MAX"), (dist.ReduceOp(dist.ReduceOp.PRODUCT), "PRODUCT")):
        with pytest.raises(TypeError, match=f"op={name} of torch.complex64: complex numbers have sums and averages"):
            group.allreduce([x + 1j], SimpleNamespace(reduceOp=op))
    with pytest.raises(TypeError, match="op=AVG of torch.bool: booleans have no averages; use tensor.float"):
        group.allreduce([x.bool()], _op("AVG"))
    with pytest.raises(ValueError, match="op=PREMUL_SUM has no factor: make one with"):
        group.allreduce([x], SimpleNamespace(reduceOp=dist.ReduceOp.PREMUL_SUM))
    twice = SimpleNamespace(reduceOp=dist._make_nccl_premul_sum(2.0))
    with pytest.raises(TypeError, match=r"op=PREMUL_SUM of torch.int32: its factor is for floats"):
        group.allreduce([x.int()], twice)
    with pytest.raises(TypeError, match="op=PREMUL_SUM of a sparse tensor is not supported"):
        group.allreduce([x.to_sparse()], twice)
    with pytest.raises(ValueError, match="device=meta: the backend 'telegrad' is for tensors of the CPU and of CUDA"):
        group._get_backend(torch.device("meta"))
    with pytest.raises(ValueError, match="tensor_list has 1 tensors, but the group 3 ranks"):
        group.allgather([[x]], [x])
    with pytest.raises(ValueError, match=r"tensor_list\[0\] has .*float32 of shape \(2, 2\), .* tensor has .*\(6,\)"):
        group.allgather([[torch.ones(2, 2)] * 3], [torch.ones(6)])
    with pytest.raises(ValueError, match=r"tensor_list\[0\] has torch.int64 of shape \(3,\), .* has torch.float32"):
        group.allgather([[x.long()] * 3], [x])
    with pytest.raises(ValueError, match=r"input_tensor_list\[0\] has .*\(3,\), but output_tensor_list\[0\] .*\(2,\)"):
        group.alltoall([x[:2], x, x], [x, x, x])
    with pytest.raises(ValueError, match=r"gather_list\[1\] has torch.float32 of shape \(2,\), but the tensor has"):
        group.gather([[x, x[:2], x]], [x], SUM)
    with pytest.raises(ValueError, match="output has 3 elements of torch.float32, but input has 3 .* must have 9"):
        group.all_gather_single(torch.empty(3), x)
    with pytest.raises(ValueError, match="input has 3 elements of .*, but output has 3 of .* on each of 3 ranks"):
        group.reduce_scatter_single(torch.empty(3), x, SUM)
    with pytest.raises(ValueError, match=r"output has 2 elements of .*, but input_list\[0\] has 3"):
        group.reduce_scatter([torch.empty(2)], [[x, x, x]], SUM)
    with pytest.raises(ValueError, match="input has 9 elements of torch.int32, but output has 3 of torch.int8"):
        group.reduce_scatter_single(torch.empty(3, dtype=torch.int8), torch.ones(9, dtype=torch.int32), SUM)
    with pytest.raises(ValueError, match=r"output has 3 elements of .*int64, but input_list\[0\] has 3 of .*32"):
        group.reduce_scatter([x.long()], [[x, x, x]], SUM)
    with pytest.raises(TypeError, match=r"timeout=5 must be a datetime.timedelta, as timedelta\(seconds=5\)"):
        group.recv([x], 1, 7).wait(5)
    with pytest.raises(ValueError, match="input has 4 rows, which 3 ranks cannot share evenly: give input_split_sizes"):
        group.all_to_all_single(torch.empty(3), torch.empty(4), [], [])
    with pytest.raises(ValueError, match=r"input_split_sizes=\[1, 1, 3\] must be 3 numbers of rows whose sum is"):
        group.all_to_all_single(torch.empty(3), torch.empty(4), [], [1, 1, 3])
    with pytest.raises(TypeError, match="op=BAND of torch.float32: bitwise reductions are of integers and booleans"):
        group.allreduce([x], _op("BAND"))
    with pytest.raises(TypeError, match="op=BAND of a sparse tensor is not supported"):
        group.allreduce([x.to_sparse()], _op("BAND"))
    with pytest.raises(ValueError, match="tensor_list has tensors of torch.float32, torch.int64: give one dtype"):
        group.allgather([[x, x, x.long()]], [x])
    with pytest.raises(TypeError, match=r"pg_options=1: give telegrad.torch_backend.Options\(...\)"):
        create(None, 1)
    both(groups, lambda rank, group: group.barrier())  # nothing of it has gone


@pytest.mark.parametrize(
    "call",
    [
        lambda group, x: group.allreduce([x], SUM),
        lambda group, x: group.allreduce([x.int()[:1].expand(4)], _op("BAND")),
        lambda group, x: group.allreduce_coalesced([torch.ones(3), x], SUM),
        lambda group, x: group.reduce([x], SUM),
        lambda group, x: group.reduce([x.int()[:1].expand(4)], _op("BAND")),
        lambda group, x: group.broadcast([x], SimpleNamespace(rootRank=1)),
        lambda group, x: group.allgather([[torch.empty(4), x, torch.empty(4)]], [torch.ones(4)]),
        lambda group, x: group.all_gather_single(x[:1].expand(12), torch.ones(4)),
        lambda group, x: group.gather([[torch.empty(4), x, torch.empty(4)]], [torch.ones(4)], SUM),
        lambda group, x: group.scatter([x], [[torch.ones(4)] * 3], SUM),
        lambda group, x: group.reduce_scatter_single(x, torch.ones(12), SUM),
        lambda group, x: group.alltoall([torch.empty(4), x, torch.empty(4)], [torch.ones(4)] * 3),
        lambda group, x: group.all_to_all_single(x[:1].expand(6), torch.ones(6), [], []),
        lambda group, x: group.recv([x], 1, 0),
        lambda group, x: group.recv_anysource([x], 0),
    ],
)
def test_what_cannot_be_filled_is_refused_before_anything_is_sent(groups: list[ProcessGroup], call: Any) -> None:
    with pytest.raises(ValueError, match=r"and strides \(0,\) has one place for several elements, .* use tensor.clone"):
        call(groups[0], torch.zeros(1).expand(4))
    both(groups, lambda rank, group: group.barrier())
    root = SimpleNamespace(rootRank=0)
    both(groups, lambda rank, group: group.broadcast([torch.ones(1).expand(4) if rank == 0 else torch.empty(4)], root))


def _ones(dtype: torch.dtype, *sizes: int) -> list[torch.Tensor]:
    return [torch.ones(size, dtype=dtype) for size in sizes]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda g: g.allreduce(_ones(torch.int8, 3), SUM), lambda g: g.allreduce(_ones(torch.int32, 3), SUM)),
        (lambda g: g.allreduce(_ones(torch.bool, 3), SUM), lambda g: g.allreduce(_ones(torch.uint8, 3), SUM)),
        (lambda g: g.allreduce(_ones(torch.complex64, 3), SUM), lambda g: g.allreduce(_ones(torch.float32, 6), SUM)),
        (
            lambda g: g.allreduce(_ones(torch.int32, 3), _op("BOR")),
            lambda g: g.allreduce(_ones(torch.int32, 3), _op("BAND")),
        ),
        (
            lambda g: g.allreduce(_ones(torch.int32, 3), _op("BAND")),
            lambda g: g.all_gather_single(torch.empty(9, dtype=torch.int32), torch.ones(3, dtype=torch.int32)),
        ),
        (
            lambda g: g.allreduce_coalesced(_ones(torch.float32, 2, 3), SUM),
            lambda g: g.allreduce_coalesced(_ones(torch.float32, 3, 2), SUM),
        ),
        (
            lambda g: g.allreduce_coalesced(_ones(torch.float32, 5), SUM),
            lambda g: g.allreduce_coalesced(_ones(torch.float32, 3, 2), SUM),
        ),
        (
            lambda g: g.reduce_scatter_single(*_ones(torch.int8, 1, 3), SUM),
            lambda g: g.reduce_scatter_single(*_ones(torch.int32, 1, 3), SUM),
        ),
        (lambda g: g.reduce(_ones(torch.int8, 3), SUM), lambda g: g.reduce(_ones(torch.int32, 3), SUM)),
        (
            lambda g: g.reduce(_ones(torch.int32, 3), _op("BAND")),
            lambda g: g.allreduce(_ones(torch.int32, 3), _op("BAND")),
        ),
        (
            lambda g: g.reduce_scatter_single(*_ones(torch.int32, 1, 3), _op("BAND")),
            lambda g: g.allreduce(_ones(torch.int32, 3), _op("BAND")),
        ),
        (lambda g: g.allreduce(_ones(torch.int64, 3), _op("AVG")), lambda g: g.allreduce(_ones(torch.int64, 3), SUM)),
        (lambda g: g.reduce(_ones(torch.int8, 3), _op("AVG")), lambda g: g.reduce(_ones(torch.int8, 3), SUM)),
        (
            lambda g: g.allreduce(_ones(torch.float32, 3), SUM),
            lambda g: g.allreduce(_ones(torch.float32, 3), SimpleNamespace(reduceOp=dist._make_nccl_premul_sum(2.0))),
        ),
    ],
)
def test_calls_that_torch_tells_apart_do_not_match(groups: list[ProcessGroup], one: Any, other: Any) -> None:
    def run(rank: int) -> str:
        with pytest.raises(MismatchedCall) as caught:
            (other if rank == 1 else one)(groups[rank]).wait()
        assert caught.value.peer == 1
        return str(caught.value)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(run, range(3)))


def test_sums_with_a_factor_of_each_rank(groups: list[ProcessGroup]) -> None:
    def of(rank: int) -> SimpleNamespace:
        factor = torch.tensor([2.0]) if rank == 0 else float(rank)
        return SimpleNamespace(reduceOp=dist._make_nccl_premul_sum(factor), rootRank=1)

    tensors = [torch.ones(3, dtype=torch.float64) for _ in groups]
    both(groups, lambda rank, group: group.allreduce([tensors[rank]], of(rank)))
    assert [x.tolist() for x in tensors] == [[5.0] * 3] * 3
    both(groups, lambda rank, group: group.reduce([tensors[rank]], of(rank)))
    assert [x.tolist() for x in tensors] == [[5.0] * 3, [25.0] * 3, [5.0] * 3]
    complex_ones = [torch.ones(3, dtype=torch.complex64) for _ in groups]
    parts = [torch.zeros(1, dtype=torch.complex64) for _ in groups]
    both(groups, lambda rank, group: group.reduce_scatter_single(parts[rank], complex_ones[rank], of(rank)))
    assert [x.tolist() for x in parts] == [[5 + 0j]] * 3
    narrow = [torch.ones(2, dtype=torch.bfloat16) for _ in groups]
    both(groups, lambda rank, group: group.allreduce([narrow[rank]], of(rank)))
    assert all(x.tolist() == [5.0, 5.0] for x in narrow)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64])
def test_averages_of_integers_are_cut_towards_zero(groups: list[ProcessGroup], dtype: torch.dtype) -> None:
    """As NCCL's; of each element the sums are -7, 7, -2, 2, -300 and 0, some of which eight bits would not hold."""
    of_ranks = torch.tensor([[-4, 5, -1, 1, -100, 3], [-4, 1, 0, 0, -100, -5], [1, 1, -1, 1, -100, 2]])
    averages = [-2, 2, 0, 0, -100, 0]

    def given() -> list[torch.Tensor]:
        return [row.clone() for row in of_ranks.to(dtype)]

    tensors = given()
    both(groups, lambda rank, group: group.allreduce([tensors[rank]], _op("AVG")))
    assert [x.tolist() for x in tensors] == [averages] * 3
    assert tensors[0].dtype == dtype
    parts = [[x[:4].clone(), x[4:].clone(), torch.ones(1)] for x in given()]
    both(groups, lambda rank, group: group.allreduce_coalesced(parts[rank], _op("AVG")))
    assert [[x.tolist() for x in listed] for listed in parts] == [[averages[:4], averages[4:], [1.0]]] * 3
    at_root = given()
    both(groups, lambda rank, group: group.reduce([at_root[rank]], _op("AVG")))
    assert [x.tolist() for x in at_root] == [averages, *of_ranks.tolist()[1:]]
    slices, apart = [torch.zeros(2, dtype=dtype) for _ in groups], [torch.zeros(2, dtype=dtype) for _ in groups]
    both(groups, lambda rank, group: group.reduce_scatter_single(slices[rank], given()[rank], _op("AVG")))
    both(
        groups,
        lambda rank, group: group.reduce_scatter([apart[rank]], [list(given()[rank].split(2))], _op("AVG")),
    )
    for found in (slices, apart):
        assert [x.tolist() for x in found] == [averages[:2], averages[2:4], averages[4:]]
    last = given()
    futures = [group.allreduce([last[rank]], _op("AVG")).get_future() for rank, group in enumerate(groups)]
    assert [future.wait()[0].tolist() for future in futures] == [averages] * 3


def test_the_time_out_of_a_short_form_bounds_wait(groups: list[ProcessGroup]) -> None:
    work = groups[0].barrier(timeout=timedelta(milliseconds=20))
    with pytest.raises(TimeoutExpired, match="still running after timeout_s=0.02"):
        work.wait()
    for group in groups[1:]:
        group.barrier(None)
    assert work.wait(timedelta(seconds=20))


def test_options_reach_the_communicator() -> None:
    options = Options(liveness_timeout_s=3.0, interface="lo", tuning=None)
    dist.init_process_group("telegrad", store=dist.HashStore(), rank=0, world_size=1, pg_options=options)
    try:
        group = dist.group.WORLD
        assert isinstance(group, ProcessGroup)
        assert group.communicator._options.liveness_timeout_s == 3.0
        assert group.communicator._options.interface == "lo"
        assert group.communicator._options.tuning is None
        again = dist.new_group([0], pg_options=Options(liveness_timeout_s=None))
        assert again.communicator._options.liveness_timeout_s is None
        assert dist.new_group([0]).communicator._options.liveness_timeout_s == 8.0
        with pytest.raises(ValueError, match="liveness_timeout_s"):
            dist.new_group([0], pg_options=Options(liveness_timeout_s=-1.0))
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(
    "backend_override" not in signature(dist.init_device_mesh).parameters, reason="torch 2.6 has no backend_override"
)
def test_options_reach_the_groups_of_a_mesh() -> None:
    dist.init_process_group("telegrad", store=dist.HashStore(), rank=0, world_size=1)
    try:
        named = {"a": ("telegrad", Options(liveness_timeout_s=4.0))}
        mesh = dist.init_device_mesh("cpu", (1,), mesh_dim_names=("a",), backend_override=named)
        found = mesh.get_group("a").communicator._options.liveness_timeout_s
        assert found in (8.0, 4.0)  # of one dimension: the world's, in some releases
    finally:
        dist.destroy_process_group()


def test_a_device_may_be_bound_to_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    dist.init_process_group("telegrad", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    try:
        group = dist.group.WORLD
        assert isinstance(group, ProcessGroup)
        assert group._get_backend(device) is group
        x = torch.ones(3)
        dist.all_reduce(x)
        assert dist.new_group([0]).size() == 1
    finally:
        dist.destroy_process_group()


def test_who_does_not_come_to_a_monitored_barrier_is_named(groups: list[ProcessGroup]) -> None:
    both(groups, lambda rank, group: group.barrier())
    works = [threading.Thread(target=_ignoring, args=(groups[1].monitored_barrier,))]
    works[0].start()
    with pytest.raises(TimeoutExpired, match="monitored_barrier on rank 0 timed out after 0:00:02.*: rank 2 has not"):
        groups[0].monitored_barrier(timedelta(seconds=2))
    works[0].join()


def test_a_monitored_barrier_that_all_reach(groups: list[ProcessGroup]) -> None:
    threads = [threading.Thread(target=group.monitored_barrier) for group in groups[1:]]
    for thread in threads:
        thread.start()
    groups[0].monitored_barrier(timedelta(seconds=20))
    for thread in threads:
        thread.join()


def _ignoring(call: Any) -> None:
    try:
        call()
    except Exception as error:
        del error


def test_a_future_may_be_waited_for_in_a_callback_of_another(groups: list[ProcessGroup]) -> None:
    tensors = [torch.ones(2) for _ in groups]

    def again(rank: int, group: ProcessGroup) -> Any:
        def sum_once_more(first: Any) -> float:
            found = group.allreduce([first.value()[0]], SUM).get_future().wait()
            return float(found[0][0])

        return sum_once_more

    chained = groups[0].allreduce([tensors[0]], SUM).get_future().then(again(0, groups[0]))
    both(groups[1:], lambda rank, group: group.allreduce([tensors[1 + rank]], SUM))
    both(groups[1:], lambda rank, group: group.allreduce([tensors[1 + rank]], SUM))
    assert chained.wait() == 9.0


def test_an_error_while_tensors_are_filled_stays(groups: list[ProcessGroup]) -> None:
    works = [group.all_gather_single(torch.empty(3), torch.ones(1)) for group in groups]
    works[0]._finish = lambda: 1 / 0  # type: ignore[assignment]
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            works[0].wait()
    assert isinstance(works[0].exception(), ZeroDivisionError)
    assert not works[0].is_success()
    for work in works[1:]:
        work.wait()


def test_a_groups_timeout_stays(groups: list[ProcessGroup]) -> None:
    with pytest.raises(NotImplementedError, match="keeps the timeout that it was made with; make another group"):
        groups[0].set_timeout(timedelta(seconds=5))


@pytest.mark.parametrize("when", ["pre", "post"])
def test_hooks_that_would_never_run_are_refused(groups: list[ProcessGroup], when: str) -> None:
    with pytest.raises(NotImplementedError, match="hook_id=1: a group of the backend 'telegrad' runs no hooks"):
        getattr(groups[0], f"register_{when}_hook")(1, print)


def test_a_timeout_of_wait_does_not_stick(groups: list[ProcessGroup]) -> None:
    work = groups[0].barrier()
    with pytest.raises(TimeoutExpired):
        work.wait(timedelta(milliseconds=20))
    for group in groups[1:]:
        group.barrier()
    assert work.wait()
    assert work.is_success()
    assert work._source_rank() == -1
    assert groups[0].allreduce_coalesced([], SUM)._source_rank() == -1


def test_output_may_be_a_part_of_what_is_scattered(groups: list[ProcessGroup]) -> None:
    given = [torch.arange(6.0) for _ in groups]
    both(
        groups, lambda rank, group: group.reduce_scatter_single(given[rank][2 * rank : 2 * rank + 2], given[rank], SUM)
    )
    assert torch.cat([x[2 * rank : 2 * rank + 2] for rank, x in enumerate(given)]).tolist() == [0, 3, 6, 9, 12, 15]


def test_a_group_may_be_destroyed_and_made_again_with_the_same_store() -> None:
    store = dist.HashStore()
    for number in (1.0, 2.0):

        def join_and_add(rank: int, number: float = number) -> list[float]:
            group = ProcessGroup.join(store, rank, 2, timedelta(seconds=20))
            x = torch.full((2,), number)
            group.allreduce([x], SUM).wait()
            group.shutdown()  # waits for the other rank's
            return list(x.tolist())

        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(join_and_add, range(2))) == [[2 * number] * 2] * 2


def test_an_error_reaches_wait_the_future_and_exception(groups: list[ProcessGroup]) -> None:
    x = torch.ones(3)
    work = groups[0].allreduce([x], SUM)
    with pytest.raises(TimeoutExpired):
        work.wait(timedelta(milliseconds=50))
    groups[2].shutdown()  # closes without having called it
    with pytest.raises(PeerFailed) as caught:
        work.wait()
    assert caught.value.peer == 2
    assert x.tolist() == [1.0, 1.0, 1.0]
    assert isinstance(work.exception(), PeerFailed)
    assert not work.is_success()
    with pytest.raises(Exception, match="PeerFailed"):
        groups[1].allreduce([x], SUM).get_future().wait()


def test_abort_ends_the_others_operations(groups: list[ProcessGroup]) -> None:
    work = groups[0].barrier()
    groups[1].abort()
    with pytest.raises(Exception, match="the process group was aborted"):
        work.wait()
