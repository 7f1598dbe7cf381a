"""Parameters that are not float32 or bfloat16: averaged densely beside others that are compressed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from handmade_buckets import Bucket
from synchronised_net import OnRanks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from varied_options import module_of, objects_of

import telegrad
from telegrad import Communicator, DDPState, Momentum, Synchronizer
from telegrad.errors import NonFiniteGradient

DTYPES = [torch.float16, torch.float64, torch.complex64, torch.complex128]
Made = Callable[..., list[Communicator]]


def parameters(dtype: torch.dtype) -> dict[str, nn.Parameter]:
    """Of which only one can be compressed, and the last but one looks as if."""
    return {
        "plain": nn.Parameter(torch.zeros(40, 50)),
        "first": nn.Parameter(torch.zeros(3, dtype=dtype)),
        "second": nn.Parameter(torch.zeros(30, 100, dtype=dtype)),
    }


def gradient(dtype: torch.dtype, size: int, rank: int) -> Tensor:
    drawn = torch.randn(size, dtype=torch.complex128, generator=torch.Generator().manual_seed(rank))
    return drawn.to(dtype) if dtype.is_complex else drawn.real.contiguous().to(dtype)


def reduce(state: DDPState, named: dict[str, nn.Parameter], buffers: list[Tensor]) -> list[Tensor]:
    """DDP makes buckets of one dtype. Complex averages as the complex numbers that they are."""
    members = [[named["first"], named["second"]], [named["plain"]]]
    futures = [
        telegrad.ddp_hook(state, Bucket(of, buffer, index, last=index == 1))  # type: ignore[arg-type]
        for index, (of, buffer) in enumerate(zip(members, buffers, strict=True))
    ]
    averages = [future.wait() for future in futures]
    return [
        torch.view_as_complex(one.view(-1, 2)) if given.is_complex() else one
        for one, given in zip(averages, buffers, strict=True)
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"compress": None},
        {"density": 0.1, "small_elements": 100},
        {"density": 0.1, "small_elements": 100, "values": "packed-bf16"},
        {"density": 0.1, "small_elements": 100, "combine": "oktopk", "nonfinite": "skip"},
        {"compress": None, "nonfinite": "send", "clip_norm": 1e6},
    ],
    ids=["dense", "sparse", "wire", "oktopk", "clipped"],
)
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_hook_averages_them_densely(
    on_ranks: OnRanks, dtype: torch.dtype, options: dict[str, Any], ranks: int
) -> None:
    def run(comm: Communicator) -> list[Tensor]:
        named = parameters(dtype)
        state = DDPState(comm, module_of(named), **objects_of(**options))
        assert [*state.state_dict()["compressor"]["parameters"]] == (["plain"] if "density" in options else [])
        buffers = [gradient(dtype, 3003, comm.rank), gradient(torch.float32, 2000, comm.rank)]
        found = reduce(state, named, buffers)
        assert [one.dtype for one in found] == [dtype, torch.float32]
        assert found[0].data_ptr() == buffers[0].data_ptr()
        return found

    found = on_ranks(ranks, run)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    exact = sum(gradient(dtype, 3003, rank).to(wide) for rank in range(ranks)) / ranks
    for average, other in found:
        assert torch.equal(average, found[0][0])
        assert torch.equal(other, found[0][1])
        precision = {torch.float16: 2e-3, torch.complex64: 1e-6}.get(dtype, 1e-14)
        torch.testing.assert_close(average.to(wide), exact, rtol=precision, atol=precision)


def test_averages_of_half_precision_do_not_overflow(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> float:
        named = parameters(torch.float16)
        state = DDPState(comm, module_of(named), compress=None)
        buffers = [torch.full((3003,), 60_000.0, dtype=torch.float16), torch.zeros(2000)]
        return reduce(state, named, buffers)[0].max().item()

    assert on_ranks(3, run) == [60_000.0] * 3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_they_are_clipped_with_the_others(on_ranks: OnRanks, dtype: torch.dtype) -> None:
    def run(comm: Communicator) -> None:
        named = parameters(dtype)
        state = DDPState(comm, module_of(named), compress=None, clip_norm=1.0)
        buffers = [gradient(dtype, 3003, 0), gradient(torch.float32, 2000, 1)]
        whole = [one.clone() for one in buffers]
        norm = torch.stack([torch.linalg.vector_norm(one.to(torch.complex128)) for one in whole]).norm().item()
        for found, one in zip(reduce(state, named, buffers), whole, strict=True):
            torch.testing.assert_close(found, one / norm, rtol=2e-3 if dtype == torch.float16 else 1e-5, atol=1e-7)

    on_ranks(1, run)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_finite_is_found(on_ranks: OnRanks, dtype: torch.dtype) -> None:
    both_have_one = threading.Barrier(2)

    def run(comm: Communicator) -> None:
        for policy in ("skip", "raise"):
            named = parameters(dtype)
            state = DDPState(comm, module_of(named), compress=None, nonfinite=policy)
            both_have_one.wait(60)  # an abort ends also what another rank has not finished
            buffers = [gradient(dtype, 3003, comm.rank), torch.ones(2000)]
            if comm.rank == 1:
                buffers[0][-5] = complex(0, np.nan) if dtype.is_complex else np.nan
            if policy == "skip":
                assert not any(one.any() for one in reduce(state, named, buffers))
                assert state.skipped
            elif comm.rank == 1:
                with pytest.raises(NonFiniteGradient, match="rank 1, step 0: .*'second'"):
                    reduce(state, named, buffers)
            else:
                with pytest.raises(RuntimeError, match="NonFiniteGradient"):
                    reduce(state, named, buffers)

    on_ranks(2, run)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_momentum_correction_is_refused(local: Made, dtype: torch.dtype) -> None:
    named = parameters(dtype)
    optimizer = torch.optim.SGD(named.values(), lr=0.1)
    with pytest.raises(TypeError, match="momentum= has float32 velocities, and parameter 'first' is .*: leave"):
        DDPState(local(1)[0], module_of(named), momentum=Momentum(0.9), optimizer=optimizer)


def test_real_ddp_lists_complex_gradients_as_handmade_buckets_do(tmp_path: Path) -> None:
    """Handmade buckets and ``members_of`` go by what PyTorch 2.13 and 2.15 do, which a later one may change."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        model = Mixed(torch.complex64)
        seen, ddp = [], DistributedDataParallel(model, find_unused_parameters=True)

        def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
            if bucket.parameters()[0].is_complex():
                members, buffer = bucket.parameters(), torch.zeros(25, dtype=torch.complex64)
                handmade = Bucket(members, buffer, bucket.index(), bucket.is_last())  # type: ignore[arg-type]
                for one in (bucket, handmade):
                    places = [(each.shape, each.dtype, each.storage_offset()) for each in one.gradients()]
                    seen.append((one.buffer().shape, one.buffer().dtype, places))
            future: torch.futures.Future[Tensor] = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        hook.__annotations__ = {}  # which DDP compares with classes
        ddp.register_comm_hook(None, hook)
        ddp(torch.ones(3, 6)).square().mean().backward()
        assert len(seen) == 2
        assert seen[0] == seen[1]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("compress", [None, "topk"])
@pytest.mark.parametrize(
    ("dtype", "remedy"), [(torch.complex32, "view_as_complex"), (torch.float8_e5m2, "use torch.autocast")], ids=str
)
def test_others_are_refused_with_a_remedy(local: Made, compress: str | None, dtype: torch.dtype, remedy: str) -> None:
    one = nn.Parameter(torch.zeros(3).to(dtype))
    with pytest.raises(TypeError, match=rf"'only' has dtype {dtype}: telegrad reduces .*{remedy}"):
        DDPState(local(1)[0], module_of({"only": one}), **objects_of(compress))


class Mixed(nn.Module):
    """A complex or otherwise special parameter within a usual model, and a complex buffer."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 20), nn.Linear(20, 4)
        with torch.no_grad():
            for number, one in enumerate(self.parameters()):
                one.copy_(torch.linspace(-1, 1, one.numel()).view_as(one) / (number + 1))
        self.special = nn.Parameter(torch.linspace(1, 2, 20).to(dtype))
        self.unused = nn.Parameter(torch.ones(5, dtype=dtype))
        self.register_buffer("turn", torch.full((20,), 1j, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) * self.special
        x = (x * self.turn).imag if x.is_complex() else x
        return self.last(x.float())  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"plan": "single"},
        {"plan": "wfbp", "clip_norm": 0.5},
        {"plan": "single", "wait_in": True},
        {"plan": "single", "compress": "topk", "density": 1.0, "small_elements": 10},
        {"plan": "fixed", "compress": "quantised", "formats": "bf16", "small_elements": 10},
    ],
    ids=["plain", "clipped", "waits", "topk", "quantised"],
)
def test_a_synchronizer_averages_them_densely(on_ranks: OnRanks, dtype: torch.dtype, options: dict[str, Any]) -> None:
    def loss(model: nn.Module, step: int, rank: int) -> Tensor:
        return model(torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * step + rank))).square().mean()  # type: ignore[no-any-return]

    def run(comm: Communicator) -> list[Tensor]:
        model, alone = Mixed(dtype), Mixed(dtype)
        optimizer, other = (torch.optim.SGD(one.parameters(), lr=0.01) for one in (model, alone))
        given = {**options, "wait_in": optimizer} if "wait_in" in options else options
        sync = Synchronizer(model, comm, **objects_of(**{"compress": None, **given}))
        for step in range(3):
            loss(model, step, comm.rank).backward()  # type: ignore[no-untyped-call]
            for rank in range(2):
                (loss(alone, step, rank) / 2).backward()  # type: ignore[no-untyped-call]
            if "clip_norm" in options:
                nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
            optimizer.step()
            other.step()
            optimizer.zero_grad()
            other.zero_grad()
        assert model.unused.grad is None
        rough = dtype == torch.float16 or "formats" in options
        for one, exact in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(one, exact, rtol=2e-2 if rough else 1e-4, atol=2e-2 if rough else 1e-5)
        sync.close()
        return [one.detach() for one in model.parameters()]

    for one, same in zip(*on_ranks(2, run), strict=True):
        assert torch.equal(one, same)
