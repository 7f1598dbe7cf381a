"""What the ranks of test_gpu_nccl.py do. ``TELEGRAD_TEST_DEVICE`` names the device; on the CPU, where all goes by the
engine, the scenarios hold as well, but for what is said of NCCL."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpu_jobs import run_scenarios
from gpu_training_program import DEVICE, ON_GPU, assert_same, check_report, expected, model, not_waiting, train
from torch.nn.parallel import DistributedDataParallel

import telegrad
import telegrad.torch_backend
from telegrad import Communicator, DDPState, Synchronizer, Warmup
from telegrad.communicator.cuda import nccl

TIMEOUT = timedelta(seconds=60)

begun: list[int] = []
"""Bytes of the sums that torch's group was asked for."""


class CountedGroup(nccl.TorchGroup):
    def begin_sum(self, x: Any) -> nccl.SumWork:
        begun.append(x.nbytes)
        return super().begin_sum(x)


def assert_begun(number: int) -> None:
    assert len(begun) == (number if ON_GPU else 0)
    begun.clear()


def sums() -> None:
    with Communicator.from_torch(timeout_s=60) as comm:
        for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.int32, torch.int64):
            own = (torch.arange(100_003, device=DEVICE) % 7 + comm.rank).to(dtype)
            total = own * comm.world_size + comm.world_size * (comm.world_size - 1) // 2 - comm.rank * comm.world_size
            x = own.clone()
            comm.all_reduce(x)
            assert torch.equal(x, total)
            out = torch.empty_like(own)
            work = comm.all_reduce(own, out=out, async_op=True)
            work.wait()
            assert torch.equal(out, total)
            if ON_GPU:
                assert work.communicated()
            assert work.is_completed()
        largest = torch.full((5,), float(comm.rank), device=DEVICE)
        comm.all_reduce(largest, "max")
        assert largest.tolist() == [float(comm.world_size - 1)] * 5
        with not_waiting():
            mean = torch.full((1 << 20,), 3.0, device=DEVICE)
            comm.all_reduce(mean, "avg")
            work = comm.all_reduce(mean, "avg", async_op=True)
            doubled = work.get_future().wait() * 2.0
        comm.synchronize()
        assert bool((doubled == 6.0).all())


def sums_by_nccl() -> None:
    sums()
    assert_begun(14)


def training_by_nccl() -> None:
    net = model()
    ddp = DistributedDataParallel(net, bucket_cap_mb=1)
    with Communicator.from_torch(timeout_s=60) as comm:
        state = DDPState(comm, ddp, compress=None)
        ddp.register_comm_hook(state, telegrad.ddp_hook)
        train(ddp, net)
        state.synchronize()
        assert_same(net, expected())
    assert bool(begun) == ON_GPU
    begun.clear()
    net = model()
    with Communicator.from_torch(timeout_s=60) as comm:
        sync = Synchronizer(net, comm, plan="single")
        train(net, net)
        sync.close()
    assert_same(net, expected())
    assert_begun(6)  # one group, six steps


def plan_by_nccl() -> None:
    """Some sums are timed before the first pass, as nothing is calibrated."""
    net = model()
    with Communicator.from_torch(timeout_s=60) as comm:
        sync = Synchronizer(net, comm, warmup=Warmup(3), plan="optimal")
        assert bool(begun) == ON_GPU
        train(net, net, steps=12, looks=True)
        check_report(sync)
        sync.close()
    assert_same(net, expected(steps=12))
    begun.clear()


def calibration() -> None:
    """As far as one rank can be measured: two lines, and a choice."""
    if ON_GPU:
        with Communicator.from_torch(timeout_s=60) as comm:
            like = torch.empty(0, device=DEVICE)
            found = telegrad.tuning.sweep.measure_device_sums(comm, like, 3.0, lambda *_: None)
            assert found.tuning.nccl is not None
            assert found.tuning.device == torch.cuda.get_device_name(DEVICE)
            assert {row["algorithm"] for row in found.rows()} == {"nccl", "host_transfer"}
            print(f"- {found.tuning} {[found.tuning.nccl, found.tuning.host_transfer]}", flush=True)
    begun.clear()


def sums_of_ranks_that_share_a_gpu() -> None:
    """NCCL would refuse them; it is never asked."""
    sums()
    if ON_GPU:
        with Communicator.from_torch(timeout_s=60, device_algorithm="nccl") as comm:
            x = torch.ones(3, device=DEVICE)
            with pytest.raises(ValueError, match="share a device"):
                comm.all_reduce(x)
            comm.barrier()
    assert_begun(0)


ALONE: tuple[Callable[[], None], ...] = (sums_by_nccl, training_by_nccl, plan_by_nccl, calibration)
TOGETHER: tuple[Callable[[], None], ...] = (sums_of_ranks_that_share_a_gpu,)
SCENARIOS = {"alone": ALONE, "together": TOGETHER}


def run_all(which: str, store: str) -> None:
    """Prints ``name ok``, or what went wrong, for each scenario; stops at the first that fails."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if ON_GPU:
        torch.cuda.set_device(torch.device("cuda", 0))  # of all ranks
    torch.set_num_threads(1)
    nccl.TorchGroup = CountedGroup  # type: ignore[misc]
    backend = "cpu:gloo,cuda:nccl" if ON_GPU else "gloo"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=size, timeout=TIMEOUT)
    run_scenarios(SCENARIOS[which])
    dist.destroy_process_group()


def run_backend(store: str) -> None:
    """A group of the backend "telegrad" with NCCL of its own, of one rank."""
    torch.set_num_threads(1)
    options = telegrad.torch_backend.Options(device_algorithm="nccl" if ON_GPU else "auto")
    dist.init_process_group("telegrad", init_method=store, rank=0, world_size=1, timeout=TIMEOUT, pg_options=options)
    x = torch.arange(1000.0, device=DEVICE)
    for _ in range(3):
        work = dist.all_reduce(x, async_op=True)
        assert work is not None
        work.wait()
    assert torch.equal(x.cpu(), torch.arange(1000.0))
    net = model()
    train(DistributedDataParallel(net, bucket_cap_mb=1), net)
    assert_same(net, expected())
    dist.destroy_process_group()
    print("backend ok", flush=True)
