"""Programs for torch.distributed as its users write them, which name no backend. Each says what a rank has in the end;
every backend must say the same."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

warnings.filterwarnings("ignore", category=FutureWarning)  # names of before 2.13, which programs still use
_RELEASE = tuple(map(int, torch.__version__.split(".")[:2]))
GLOO_TAKES_LISTS = _RELEASE >= (2, 8)  # in 2.6 it refuses reduce_scatter and all_to_all of them
TRAINS_SHARDS = hasattr(torch.cpu.Stream, "record_event")  # without, fully_shard trains no model on the CPU (torch 2.6)


def of_rank(*shape: int, dtype: torch.dtype = torch.float32, rank: int | None = None) -> torch.Tensor:
    """Small integers, so that sums are exact in every dtype and order."""
    generator = torch.Generator().manual_seed(dist.get_rank() if rank is None else rank)
    return torch.randint(0, 4, shape, generator=generator).to(dtype)


def all_reduce() -> Any:
    found = []
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX):
            x = of_rank(5, 3, dtype=dtype)
            dist.all_reduce(x, op)
            found.append(x)
    for op in (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR):
        x = of_rank(7, dtype=torch.int32)
        dist.all_reduce(x, op)
        found.append(x)
    work = dist.all_reduce(of_rank(3) + 1j, async_op=True)
    work.wait()
    return [*found, work.result()[0], _sparse()]


def _sparse() -> torch.Tensor:
    x = torch.zeros(10)
    x[dist.get_rank()] = 1.0
    x[9] = 2.0
    sparse = x.to_sparse()
    dist.all_reduce(sparse)
    return sparse.to_dense()


def coalesced() -> Any:
    tensors = [of_rank(3), of_rank(2, 2), of_rank(4)]
    dist.all_reduce_coalesced(tensors)
    with dist._coalescing_manager():
        more = [of_rank(5), of_rank(1)]
        for x in more:
            dist.all_reduce(x)
    gathered = [[torch.empty(3), torch.empty(2, 2)] for _ in range(dist.get_world_size())]
    dist.all_gather_coalesced(gathered, [of_rank(3), of_rank(2, 2)])
    return [tensors, more, gathered]


def gathers() -> Any:
    size, rank = dist.get_world_size(), dist.get_rank()
    listed = [torch.empty(2, 3) for _ in range(size)]
    dist.all_gather(listed, of_rank(2, 3))
    behind, nothing = torch.empty(size * 4), torch.empty(0)
    dist.all_gather_into_tensor(behind, of_rank(4))
    dist.all_gather_into_tensor(nothing, torch.empty(0))
    root = size - 1
    on_root = [torch.empty(3, dtype=torch.int64) for _ in range(size)] if rank == root else None
    dist.gather(of_rank(3, dtype=torch.int64), on_root, dst=root)
    return [listed, behind, nothing, on_root]


def scatters() -> Any:
    size, rank = dist.get_world_size(), dist.get_rank()
    out = torch.empty(2, 2)
    dist.scatter(out, [of_rank(2, 2, rank=peer) for peer in range(size)] if rank == 1 else None, src=1)
    block = torch.empty(3)
    dist.reduce_scatter_tensor(block, of_rank(3 * size))
    listed = torch.zeros(2, 2)
    if GLOO_TAKES_LISTS:
        dist.reduce_scatter(listed, [of_rank(2, 2) + peer for peer in range(size)])
    reduced = of_rank(5)
    dist.reduce(reduced, dst=0, op=dist.ReduceOp.MAX)
    return [out, block, listed, reduced if rank == 0 else None]


def all_to_all() -> Any:
    size, rank = dist.get_world_size(), dist.get_rank()
    out = torch.empty(2 * size, 3)
    dist.all_to_all_single(out, of_rank(2 * size, 3))
    # rank r sends r + 1 rows to everybody
    uneven = torch.empty(sum(range(1, size + 1)), 2)
    dist.all_to_all_single(uneven, of_rank(size * (rank + 1), 2), list(range(1, size + 1)), [rank + 1] * size)
    listed = [torch.zeros(2) for _ in range(size)]
    if GLOO_TAKES_LISTS:
        dist.all_to_all(listed, [of_rank(2) + peer for peer in range(size)])
    return [out, uneven, listed]


def objects() -> Any:
    size, rank = dist.get_world_size(), dist.get_rank()
    told = [{"rank": rank, "text": "x" * (100 * rank)}, rank]
    dist.broadcast_object_list(told, src=size - 1)
    every = [None] * size
    dist.all_gather_object(every, ("of", rank))
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [f"for {peer}" for peer in range(size)] if rank == 0 else None, src=0)
    x = of_rank(4, dtype=torch.bool)
    dist.broadcast(x, src=1)
    return [told, every, mine, x]


def messages() -> Any:
    size, rank = dist.get_world_size(), dist.get_rank()
    following, before = (rank + 1) % size, (rank - 1) % size
    got = torch.empty(3)
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, of_rank(3), following), dist.P2POp(dist.irecv, got, before)])
    for work in works:
        work.wait()
    tagged = [torch.empty(2), torch.empty(2)]
    if rank == 0:
        first = dist.isend(torch.full((2,), 1.0), 1, tag=1)
        dist.send(torch.full((2,), 2.0), 1, tag=2)
        assert first is not None
        first.wait()
    if rank == 1:
        for at, tag in ((0, 2), (1, 1)):
            dist.recv(tagged[at], 0, tag=tag)
    anybody = []
    if rank == 0:
        for _ in range(size - 1):
            x = torch.empty(2)
            anybody.append((dist.recv(x), x))
        anybody.sort(key=lambda one: one[0])
    else:
        dist.send(torch.full((2,), float(rank)), 0)
    dist.barrier()
    return [got, tagged if rank == 1 else None, anybody]


def groups() -> Any:
    size, rank = dist.get_world_size(), dist.get_rank()
    found: list[Any] = []
    halves = [list(range(0, size, 2)), list(range(1, size, 2))]
    for ranks in halves:
        group = dist.new_group(ranks)
        if rank in ranks:
            x = of_rank(4)
            dist.all_reduce(x, group=group)
            y = of_rank(2)
            dist.broadcast(y, src=ranks[-1], group=group)
            every = [None] * len(ranks)
            dist.all_gather_object(every, rank, group=group)
            if len(ranks) > 1:
                found += [_round(group, ranks)]
            found += [x, y, every, dist.get_group_rank(group, rank)]
    mesh = init_device_mesh("cpu", (size,))
    sharded = distribute_tensor(torch.arange(12.0).view(4, 3), mesh, [Shard(0)])
    whole = functional.all_gather_tensor(of_rank(2), 0, dist.group.WORLD)
    return [*found, sharded.redistribute(mesh, [Replicate()]).to_local(), sharded.sum().full_tensor(), whole + 0]


def _round(group: Any, ranks: list[int]) -> torch.Tensor:
    at = ranks.index(dist.get_rank())
    got = torch.empty(2)
    sent = dist.isend(of_rank(2), ranks[(at + 1) % len(ranks)], group=group)
    assert sent is not None
    dist.recv(got, ranks[at - 1], group=group)
    sent.wait()
    return got


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 6, sparse=True)
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
        self.sometimes = nn.Linear(6, 3)

    def forward(self, tokens: torch.Tensor, more: bool) -> torch.Tensor:
        x = self.embedding(tokens).mean(1)
        out: torch.Tensor = self.layers(x)
        return out + self.sometimes(x) if more else out


def training() -> Any:
    """DDP with sparse gradients, buffers, unused parameters, accumulation and ranks that end early (``join``)."""
    torch.manual_seed(dist.get_rank())  # rank 0's parameters are everybody's
    model = DistributedDataParallel(_Model().double(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(6):
        tokens = of_rank(8, 4, dtype=torch.int64) + step
        with model.no_sync() if step % 3 == 0 else contextlib.nullcontext():
            (model(tokens, step % 2 == 0) ** 2).mean().backward()
        if step % 3 != 0:
            optimizer.step()
            optimizer.zero_grad()
    return list(model.module.parameters())


def low_rank_hook() -> Any:
    """torch's PowerSGD, in a single bucket. With more of them it calls its sums from threads, in no fixed order."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)).double())
    state = powerSGD_hook.PowerSGDState(None, 2, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(5):
        optimizer.zero_grad()
        (model(of_rank(8, 32, dtype=torch.float64) / (step + 1)) ** 2).mean().backward()
        optimizer.step()
    return [one.detach().round(decimals=6) for one in model.parameters()]


def uneven_inputs() -> Any:
    model = DistributedDataParallel(nn.Linear(4, 2).double())
    with model.join():
        for _ in range(2 + dist.get_rank()):
            model(of_rank(3, 4, dtype=torch.float64)).sum().backward()
    return [parameter.grad for parameter in model.parameters()]


def sharding() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).double()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model, mesh=mesh)
    model(of_rank(2, 8, dtype=torch.float64)).sum().backward()
    return [parameter.grad.full_tensor() for parameter in model.parameters()]


def asynchronous_checkpoint() -> Any:
    """Saved in the background, on a group of its own, while the default group goes on."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    state = {"weights": of_rank(4, rank=0), "step": 7}
    saved = checkpoint.async_save(state, checkpoint_id=folder[0], process_group=dist.new_group())
    x = of_rank(5)
    dist.all_reduce(x)
    saved.result()
    loaded = {"weights": torch.zeros(4), "step": 0}
    checkpoint.load(loaded, checkpoint_id=folder[0])
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    return [x, loaded["weights"], loaded["step"]]


def short_forms() -> Any:
    """A group's own methods, without lists and options."""
    group, size = dist.group.WORLD, dist.get_world_size()
    x, y, z, part = of_rank(3), of_rank(4), of_rank(2), torch.zeros(2)
    blocks = [torch.zeros(3) for _ in range(size)]
    group.allreduce(x).wait()
    group.allreduce(y, dist.ReduceOp.MAX, timedelta(seconds=60)).wait()
    group.allreduce([z], op=dist.ReduceOp.MIN).wait()
    group.broadcast(y, 1).wait()
    group.broadcast(tensor=z, root=0).wait()
    reduced = of_rank(3)
    group.reduce(reduced, 1, op=dist.ReduceOp.SUM).wait()
    group.allgather(blocks, of_rank(3)).wait()
    gathered = [torch.zeros(2) for _ in range(size)] if dist.get_rank() == 1 else []
    group.gather(gathered, of_rank(2), 1).wait()
    group.scatter(part, [of_rank(2) + i for i in range(size)] if dist.get_rank() == 0 else [], 0).wait()
    summed = torch.zeros(2)
    group.reduce_scatter(summed, [of_rank(2) + i for i in range(size)]).wait()
    group.allreduce_coalesced([z]).wait()
    own = torch.zeros(2)
    group._reduce_scatter_base(own, torch.cat([of_rank(2)] * size)).wait()
    dealt = torch.zeros(size)
    group.alltoall_base(dealt, of_rank(size), [], []).wait()
    group.barrier(timeout=timedelta(seconds=60)).wait()
    group.barrier().wait()
    return [x, y, z, reduced if dist.get_rank() == 1 else 0, blocks, gathered, part, summed, own, dealt]


def compiled() -> Any:
    torch._dynamo.reset()  # what it has compiled is of another group
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
    whole = torch.compile(ddp, backend="eager")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        whole(of_rank(2, 4)).sum().backward()
        optimizer.step()

    @torch.compile(backend="eager")
    def sums(x: torch.Tensor) -> torch.Tensor:
        dist.barrier()
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        everything = torch.empty(dist.get_world_size() * x.numel())
        dist.all_gather_into_tensor(everything, x)
        dist.broadcast(everything, 0)
        return everything + x.sum()

    return [[one.detach().double().round(decimals=4) for one in ddp.parameters()], sums(of_rank(5)), sums(of_rank(5))]


PROGRAMS: dict[str, Callable[[], Any]] = {
    program.__name__: program
    for program in (
        all_reduce,
        coalesced,
        gathers,
        scatters,
        all_to_all,
        objects,
        messages,
        groups,
        training,
        low_rank_hook,
        uneven_inputs,
        *([sharding] if TRAINS_SHARDS else []),
        asynchronous_checkpoint,
        *([short_forms] if _RELEASE >= (2, 8) else []),  # torch 2.6 has fewer of them
        compiled,
    )
}


def _told(value: Any) -> Any:
    """Floats of sums in another order differ in their last bits."""
    if isinstance(value, torch.Tensor):
        plain = value.detach()
        if plain.dtype in (torch.float64, torch.complex64):
            plain = torch.view_as_real(plain) if plain.is_complex() else plain
            plain = plain.double().round(decimals=9) + 0.0
        return [str(value.dtype), list(value.shape), plain.reshape(-1).tolist()]
    if isinstance(value, (list, tuple)):
        return [_told(one) for one in value]
    return value


def main(store: str, *backends: str) -> None:
    """Prints ``backend name digest`` for each backend and program."""
    import telegrad.torch_backend  # noqa: F401

    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    destroyed: list[Any] = []
    for number, backend in enumerate(backends):
        dist.init_process_group(
            backend, init_method=f"{store}{number}", rank=rank, world_size=size, timeout=timedelta(seconds=60)
        )
        for name, program in PROGRAMS.items():
            told = repr(_told(program()))
            print(backend, name, hashlib.sha1(told.encode()).hexdigest(), flush=True)
        destroyed.append(dist.group.WORLD)  # torch 2.6 may deadlock where it frees a Gloo group
        dist.destroy_process_group()
