"""What the ranks of test_gpu_training.py do: processes that share one device. Each function is one scenario; all ranks
run the same ones in the same order. ``TELEGRAD_TEST_DEVICE`` names the device; on the CPU the scenarios hold as well,
but for what is said of waiting.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpu_compression_scenarios import combined_bits, compressed_bits, low_rank_sums
from gpu_jobs import run_scenarios
from gpu_scenario_device import DEVICE, ON_GPU
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from varied_options import objects_of

import telegrad
import telegrad.ddp
import telegrad.torch_backend
from telegrad import Communicator, DDPState, NonFiniteGradient, Synchronizer, Warmup
from telegrad.errors import TransportError

STEPS = 6
WARM_UP = 3  # DDP plans its buckets after the first pass, for which it waits
CLIP = 0.05


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(16, 600), nn.Tanh(), nn.Linear(600, 600), nn.Tanh(), nn.Linear(600, 3)).to(DEVICE)


def data(step: int, rank: int) -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step + rank)).to(DEVICE)


def train(
    net: nn.Module, stepped: nn.Module, *, may_wait: bool = False, steps: int = STEPS, looks: bool = False
) -> None:
    """Backward passes after the first ones must not make the host wait for the device, unless torch's own may.
    ``looks``: at each loss, for which it waits between two passes."""
    optimizer = torch.optim.SGD(stepped.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        loss = net(data(step, dist.get_rank())).square().mean()
        with contextlib.nullcontext() if may_wait or step < WARM_UP else not_waiting():
            loss.backward()
        optimizer.step()
        if looks:
            loss.item()


@contextlib.contextmanager
def not_waiting() -> Iterator[None]:
    if not ON_GPU:
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def expected(clip: float | None = None, steps: int = STEPS) -> nn.Module:
    """One process with the data of all ranks."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(dist.get_world_size()):
            (net(data(step, rank)).square().mean() / dist.get_world_size()).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
    return net


def assert_same(net: nn.Module, other: nn.Module) -> None:
    for one, wanted in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, wanted, rtol=1e-3, atol=1e-5)
    dist.barrier()


def collectives() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.full((1 << 20,), rank + 1.0, device=DEVICE)
    work = dist.all_reduce(x, async_op=True)
    future = work.get_future()
    if ON_GPU:
        assert future.done()
    future.wait()
    assert bool((x == size * (size + 1) / 2).all())
    narrow = torch.full((4, 3), rank + 1, dtype=torch.uint8, device=DEVICE)
    dist.all_reduce(narrow[:, 1])
    assert narrow.sum().item() == 8 * (rank + 1) + 4 * size * (size + 1) // 2
    gathered = torch.empty(2 * size, device=DEVICE)
    dist.all_gather_into_tensor(gathered, torch.full((2,), float(rank), device=DEVICE))
    assert gathered.tolist() == [float(r) for r in range(size) for _ in range(2)]
    listed = [torch.empty(2, device=DEVICE) for _ in range(size)]
    dist.all_gather(listed, torch.full((2,), float(rank), device=DEVICE))
    assert torch.equal(torch.cat(listed), gathered)
    part = torch.empty(3, device=DEVICE)
    dist.reduce_scatter_tensor(part, torch.arange(3.0 * size, device=DEVICE))
    assert part.tolist() == [size * (3.0 * rank + i) for i in range(3)]
    got = torch.empty(5, device=DEVICE)
    following = (rank + 1) % size
    sent = dist.isend(torch.full((5,), float(rank), device=DEVICE), following)
    dist.recv(got, (rank - 1) % size)
    assert sent is not None
    sent.wait()
    assert got.tolist() == [float((rank - 1) % size)] * 5
    dist.broadcast(got, 0)
    assert got.tolist() == [float(size - 1)] * 5
    dist.barrier()


def ddp_without_a_hook() -> None:
    net = model()
    train(DistributedDataParallel(net, bucket_cap_mb=1), net)
    assert_same(net, expected())


def _hook(nonfinite: str, **options: Any) -> None:
    net = model()
    ddp = DistributedDataParallel(net, bucket_cap_mb=1)
    with Communicator.from_torch(timeout_s=60) as comm:
        state = DDPState(comm, ddp, **objects_of(compress=None, nonfinite=nonfinite, **options))
        ddp.register_comm_hook(state, telegrad.ddp_hook)
        train(ddp, net)
        state.synchronize()
        assert state.step == STEPS
        assert not state.skipped
        assert_same(net, expected())


def hook_that_raises() -> None:
    _hook("raise")


def hook_that_skips() -> None:
    _hook("skip")


def hook_that_sends() -> None:
    _hook("send")


class Records:
    """Telemetry that is kept."""

    every = 1

    def __init__(self) -> None:
        self.kept: list[telegrad.ddp.StepRecord] = []

    def write(self, record: telegrad.ddp.StepRecord) -> None:
        self.kept.append(record)


def compressed_hook() -> None:
    """Entries of 360,000 elements come from a sample, those of the other layers do not."""
    for options in ({"select": "topk"}, {"select": "reused", "nonfinite": "skip"}, {"values": "packed-int8"}):
        net, records = model(), Records()
        ddp = DistributedDataParallel(net, bucket_cap_mb=1)
        with Communicator.from_torch(timeout_s=60) as comm:
            given = {"density": 0.05, "small_elements": 700, "telemetry": records, **options}
            state = DDPState(comm, ddp, **objects_of(**given))
            ddp.register_comm_hook(state, telegrad.ddp_hook)
            train(ddp, net)
            state.synchronize()
            assert state.step == STEPS == len(records.kept)
            assert sum(one.selected for record in records.kept for one in record.tensors) == state.stats.selected
            assert all(one.gradient_norm > 0 for record in records.kept for one in record.tensors)
            assert not any(map(torch.equal, net.parameters(), model().parameters()))
            assert_alike(net)
            assert state.stats.selected > 0


def compressed_synchronizer() -> None:
    for options in ({"select": "topk"}, {"select": "reused", "clip_norm": CLIP}):
        net = _synchronised(plan="single", compress="topk", density=0.05, small_elements=700, **options)
        assert_alike(net)


def quantised_synchronizer() -> None:
    net = _synchronised(plan="single", compress="quantised", formats="qsgd4", small_elements=700)
    assert_alike(net)


def compressed_dropped_steps() -> None:
    net = model()
    ddp = DistributedDataParallel(net, bucket_cap_mb=1)
    with Communicator.from_torch(timeout_s=60) as comm:
        options = {"density": 0.05, "small_elements": 700, "nonfinite": "skip"}
        state = DDPState(comm, ddp, **objects_of(**options))
        ddp.register_comm_hook(state, telegrad.ddp_hook)
        for step in range(2):
            ddp(data(step, comm.rank)).square().mean().backward()
        before = state.state_dict()["compressor"]["parameters"]
        _broken_on_rank_1(net)
        ddp(data(2, comm.rank)).square().mean().backward()
        assert state.skipped
        assert state.step == 2
        after = state.state_dict()["compressor"]["parameters"]
        for name, entry in before.items():
            assert torch.equal(entry["residual"], after[name]["residual"]), name
            assert (entry["threshold"], entry["calls"]) == (after[name]["threshold"], after[name]["calls"])
        comm.barrier()


def _broken_on_rank_1(net: nn.Sequential) -> None:
    if dist.get_rank() == 1:
        net[2].bias.register_hook(lambda gradient: gradient * float("nan"))


def dropped_steps() -> None:
    net = model()
    ddp = DistributedDataParallel(net, bucket_cap_mb=1)
    with Communicator.from_torch(timeout_s=60) as comm:
        state = DDPState(comm, ddp, compress=None, nonfinite="skip")
        ddp.register_comm_hook(state, telegrad.ddp_hook)
        _broken_on_rank_1(net)
        for step in range(3):
            ddp(data(step, comm.rank)).sum().backward()
            assert state.skipped
            assert all(not one.grad.any() for one in net.parameters() if one.grad is not None)
            net.zero_grad()
        assert state.step == 0
        state.synchronize()
        comm.barrier()


def late_errors() -> None:
    net = model()
    ddp = DistributedDataParallel(net, bucket_cap_mb=1)
    comm = Communicator.from_torch(timeout_s=60)
    # A rank that fails at once must not end the others' joining. Not comm's own barrier: who is through fails, and ends
    # that of those who are not.
    dist.barrier()
    state = DDPState(comm, ddp, compress=None)
    ddp.register_comm_hook(state, telegrad.ddp_hook)
    for step in range(2):  # before the second DDP speaks to the others itself, which who has failed would not answer
        ddp(data(step, comm.rank)).sum().backward()
    _broken_on_rank_1(net)
    wanted = NonFiniteGradient if comm.rank == 1 else TransportError

    def fail() -> None:
        for step in range(2, 6):
            ddp(data(step, comm.rank)).sum().backward()
            state.synchronize()

    with pytest.raises((RuntimeError, NonFiniteGradient, TransportError), match=r"2\.bias"):
        fail()
    assert isinstance(state.failure, wanted), state.failure
    dist.barrier()  # who closes at once may be gone before another, which stands still, has heard why
    comm.close()
    dist.barrier()


def mixed_precision() -> None:
    """A GradScaler, of which the hook's "skip" makes the averages of an overflowing step infinite on all ranks."""
    net = model()
    ddp = DistributedDataParallel(net, bucket_cap_mb=1)
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=2.0**16)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with Communicator.from_torch(timeout_s=60) as comm:
        state = DDPState(comm, ddp, compress=None, nonfinite="skip", scaler=scaler)
        ddp.register_comm_hook(state, telegrad.ddp_hook)
        for step in range(STEPS):
            optimizer.zero_grad()
            with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
                loss = ddp(data(step, comm.rank)).square().mean()
            if step == 2 and comm.rank == 0:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        assert state.step == STEPS - 1
        assert scaler.get_scale() == 2.0**15
        assert_alike(net)


def compressed_mixed_precision() -> None:
    """Autocast and a GradScaler with compressed gradients: the scale is never asked for in a backward pass, and a step
    that overflows on one rank leaves what waits as it was."""
    for dtype in (torch.bfloat16, torch.float16) if ON_GPU else (torch.bfloat16,):
        net = model()
        ddp = DistributedDataParallel(net, bucket_cap_mb=1)
        scaler = torch.amp.GradScaler(DEVICE.type, init_scale=2.0**10, growth_interval=2)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        options = {"density": 0.05, "small_elements": 700, "nonfinite": "skip", "scaler": scaler}
        with Communicator.from_torch(timeout_s=60) as comm:
            state = DDPState(comm, ddp, **objects_of(**options))
            ddp.register_comm_hook(state, telegrad.ddp_hook)
            for step in range(STEPS):
                optimizer.zero_grad()
                with torch.autocast(DEVICE.type, dtype=dtype):
                    loss = ddp(data(step, comm.rank)).square().mean()
                if step == 4 and comm.rank == 0:
                    loss = loss * float("inf")
                before = state.state_dict()["compressor"]["parameters"] if step == 4 else None
                with contextlib.nullcontext() if step < WARM_UP else not_waiting():
                    scaler.scale(loss).backward()
                if before is not None:
                    after = state.state_dict()["compressor"]["parameters"]
                    for name, entry in before.items():
                        assert torch.equal(entry["residual"], after[name]["residual"]), name
                        assert entry["unit"] == after[name]["unit"], name
                scaler.step(optimizer)
                scaler.update()
            assert state.step == STEPS - 1
            assert scaler.get_scale() == 2.0**11  # twice up, once down
            assert state.state_dict()["compressor"]["parameters"]["module.2.weight"]["unit"] == 2.0**-11
            assert_alike(net)


def mixed_precision_synchronizer() -> None:
    """A GradScaler, which clips what it has unscaled. Of bfloat16 it cannot on a GPU: parameters are float32."""
    net = model()
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=2.0**16)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with Communicator.from_torch(timeout_s=60) as comm:
        sync = Synchronizer(net, comm, plan="single")
        for step in range(STEPS):
            optimizer.zero_grad()
            with torch.autocast(DEVICE.type, torch.bfloat16):
                loss = net(data(step, comm.rank)).float().square().mean()
            if step == 2 and comm.rank == 0:
                loss = loss * float("inf")
            with not_waiting() if step >= WARM_UP else contextlib.nullcontext():
                scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), CLIP)
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 2.0**15
        assert_alike(net)
        sync.close()


def assert_alike(net: nn.Module) -> None:
    """On all ranks, and finite."""
    for one in net.parameters():
        least, most = one.detach().clone(), one.detach().clone()
        dist.all_reduce(least, dist.ReduceOp.MIN)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        assert torch.equal(least, most)
        assert bool(least.isfinite().all())


def _synchronised(**options: Any) -> nn.Module:
    net = model()
    with Communicator.from_torch(timeout_s=60) as comm:
        sync = Synchronizer(net, comm, **objects_of(**{"compress": None, **options}))
        train(net, net)
        sync.close()
    return net


def synchronizer() -> None:
    for plan in ("fixed", "single", "wfbp"):
        assert_same(_synchronised(plan=plan), expected())


def planned_synchronizer() -> None:
    """Groups change while it trains, by the device's times, alike on all ranks; no pass waits for the device."""
    for plan, steps in (("optimal", 12), ("auto", 40)):
        net = model()
        with Communicator.from_torch(timeout_s=60) as comm:
            sync = Synchronizer(net, comm, warmup=Warmup(3), plan=plan)
            train(net, net, steps=steps, looks=True)
            assert sync.plan is not None
            if plan == "optimal":  # of the others the last may have begun just now
                check_report(sync)
            sync.close()
        assert_same(net, expected(steps=steps))


def check_report(sync: Synchronizer) -> None:
    """What was measured beside the plan makes sense; all ranks call this."""
    assert sync.trace is not None
    assert sync.trace.backward_s > 0
    if ON_GPU:
        torch.cuda.synchronize()
    report = sync.report(slowest=True)
    assert [list(group.names) for group in report.groups] == sync.groups
    assert report.passes > 0
    assert report.backward_s > 0
    assert report.step_s > 0
    assert all(0 <= one.ready_s <= one.launched_s <= one.finish_s for one in report.groups)
    assert report.predicted_finish_s is not None


def synchronizer_that_clips() -> None:
    assert_same(_synchronised(plan="single", clip_norm=CLIP), expected(CLIP))


def sharded() -> None:
    net = model()
    mesh = dist.init_device_mesh(DEVICE.type, (dist.get_world_size(),))
    for layer in net:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    train(net, net, may_wait=True)
    wanted = expected()
    for one, other in zip(net.parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(one.full_tensor(), other.detach(), rtol=1e-3, atol=1e-5)  # type: ignore[attr-defined]
    dist.barrier()


SCENARIOS: tuple[Callable[[], None], ...] = (
    collectives,
    ddp_without_a_hook,
    hook_that_raises,
    hook_that_skips,
    hook_that_sends,
    dropped_steps,
    compressed_hook,
    compressed_bits,
    low_rank_sums,
    compressed_dropped_steps,
    mixed_precision,
    compressed_mixed_precision,
    mixed_precision_synchronizer,
    synchronizer,
    planned_synchronizer,
    synchronizer_that_clips,
    compressed_synchronizer,
    quantised_synchronizer,
    sharded,
    combined_bits,
    late_errors,
)


def run_all(store: str) -> None:
    """Prints ``name ok``, or what went wrong, for each scenario; stops at the first that fails."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    bound = None
    if ON_GPU:
        bound = torch.device("cuda", 0)  # of all ranks
        torch.cuda.set_device(bound)
    torch.set_num_threads(1)
    dist.init_process_group("telegrad", init_method=store, rank=rank, world_size=size, device_id=bound)
    run_scenarios(SCENARIOS)
    dist.destroy_process_group()
