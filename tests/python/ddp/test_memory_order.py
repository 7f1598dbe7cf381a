"""Weights of another memory format: what waits for them, what is saved of it, and ranks that differ."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from varied_options import module_of, objects_of

from telegrad import Communicator, DDPState, Synchronizer, TopK, ddp_hook
from telegrad.ddp.rank_state import MemoryOrder, MemoryOrders

OnRanks = Callable[..., list[Any]]

FORMATS = (torch.contiguous_format, torch.channels_last)
SHAPE = (4, 3, 5, 5)


class Weighted(nn.Module):
    """``model(x)`` has the gradient ``x``."""

    def __init__(self, memory_format: torch.memory_format) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SHAPE).to(memory_format=memory_format))
        self.point = nn.Parameter(torch.zeros(4, 3, 1, 1))  # in either format alike

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum() + self.point.sum() * 0


def _gradient(rank: int, step: int) -> Tensor:
    return torch.randint(-50, 50, SHAPE, generator=torch.Generator().manual_seed(10 * step + rank)).float()


def _synchronizer(model: nn.Module, comm: Communicator, **options: Any) -> Synchronizer:
    return Synchronizer(
        model, comm, **objects_of(plan="single", compress="topk", density=0.05, small_elements=20, **options)
    )


@pytest.mark.parametrize("order", [*itertools.permutations(range(4))])
def test_orders_are_undone(order: tuple[int, ...]) -> None:
    x = torch.arange(2 * 3 * 1 * 5.0).view(2, 3, 1, 5).permute(order).contiguous()
    parameter = nn.Parameter(torch.empty_like(x).permute([order.index(i) for i in range(4)]))
    parameter.data.copy_(x.permute([order.index(i) for i in range(4)]))
    found = MemoryOrder.of_gradient(parameter)
    flat = x.reshape(-1)  # the memory
    assert found.by_rows(flat).tolist() == list(range(30))
    assert torch.equal(found.from_rows(found.by_rows(flat)), flat)
    assert found.is_by_rows == (flat.tolist() == list(range(30)))


def test_what_differs_in_name_only_is_by_rows() -> None:
    model = Weighted(torch.channels_last).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    assert model.point.stride() != torch.zeros(4, 3, 1, 1).stride()
    orders = MemoryOrders(dict(model.named_parameters()))
    assert orders.has("point", MemoryOrder.of_gradient(nn.Parameter(torch.zeros(4, 3, 1, 1))))
    assert not orders.has("weight", MemoryOrder.of_gradient(Weighted(torch.contiguous_format).weight))


def _use_gradients(model: nn.Module) -> None:
    """Residuals keep what an optimizer has used; gradients do not depend on parameters here."""
    torch.optim.SGD(model.parameters(), lr=0.0).step()


@pytest.mark.parametrize("momentum", [None, 0.5])
@pytest.mark.parametrize("first", FORMATS)
@pytest.mark.parametrize("second", FORMATS)
def test_nothing_is_lost_on_the_way_to_another_format(
    on_ranks: OnRanks, first: torch.memory_format, second: torch.memory_format, momentum: float | None
) -> None:
    def run(comm: Communicator) -> tuple[Tensor, Tensor, Tensor]:
        averages, state = torch.zeros(SHAPE), None
        for half, memory_format in enumerate((first, second)):
            model = Weighted(memory_format)
            more = {}
            if momentum is not None:
                more = {
                    "momentum": momentum,
                    "masking": False,
                    "optimizer": torch.optim.SGD(model.parameters(), lr=1.0),
                }
            sync = _synchronizer(model, comm, **more)
            if state is not None:
                sync.load_state_dict(state)
            for step in range(3):
                model.zero_grad()
                model(_gradient(comm.rank, 3 * half + step)).backward()
                assert model.weight.grad is not None
                averages += model.weight.grad
                _use_gradients(model)
            state = sync.state_dict()
            sync.close()
        assert state is not None
        saved = state["compressor"]
        residual = saved["parameters"]["weight"]["residual"]
        velocity = saved["velocities"]["weight"]["velocity"] if momentum else torch.zeros(residual.shape)
        return averages, residual.view(SHAPE), velocity.view(SHAPE)

    ranks = on_ranks(2, run)
    for rank, (averages, _, velocity) in enumerate(ranks):
        assert torch.equal(averages, ranks[0][0])
        if momentum is None:
            continue
        expected = torch.zeros(SHAPE)
        for step in range(6):
            expected = momentum * expected + _gradient(rank, step)
        torch.testing.assert_close(velocity, expected)
    if momentum is None:
        whole = 2 * ranks[0][0] + ranks[0][1] + ranks[1][1]
        given = sum((_gradient(rank, step) for rank in range(2) for step in range(6)), torch.zeros(SHAPE))
        assert torch.equal(whole, given)


@pytest.mark.parametrize("compression", [None, "topk"])
def test_ranks_of_different_formats_are_refused(on_ranks: OnRanks, compression: str | None) -> None:
    def run(comm: Communicator) -> None:
        with pytest.raises(ValueError, match="parameters that require a gradient of rank 1 and rank 0 differ"):
            Synchronizer(Weighted(FORMATS[comm.rank]), comm, **objects_of(plan="single", compress=compression))

    on_ranks(2, run)


@pytest.mark.parametrize("in_time", [True, False])
def test_a_change_under_a_residual_is_refused_and_its_remedy_works(on_ranks: OnRanks, in_time: bool) -> None:
    def run(comm: Communicator) -> tuple[Tensor, Tensor]:
        model = Weighted(torch.contiguous_format)
        sync = _synchronizer(model, comm)
        model(_gradient(comm.rank, 0)).backward()
        assert model.weight.grad is not None
        averages = model.weight.grad.clone()
        _use_gradients(model)
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        model.zero_grad()
        if not in_time:
            with pytest.raises(
                RuntimeError, match=r"'weight' has another memory format .* load_state_dict\(state_dict"
            ):
                model(_gradient(comm.rank, 1)).backward()
            model.zero_grad()
        sync.load_state_dict(sync.state_dict())
        for step in (1, 2):
            model.zero_grad()
            model(_gradient(comm.rank, step)).backward()
            averages += model.weight.grad
            _use_gradients(model)
        residual = sync.state_dict()["compressor"]["parameters"]["weight"]["residual"].view(SHAPE)
        sync.close()
        return averages, residual

    ranks = on_ranks(2, run)
    whole = 2 * ranks[0][0] + ranks[0][1] + ranks[1][1]
    given = sum((_gradient(rank, step) for rank in range(2) for step in range(3)), torch.zeros(SHAPE))
    assert torch.equal(whole, given)


def test_a_ddp_state_is_saved_by_rows() -> None:
    comm = Communicator.local(1)[0]
    rows = torch.arange(300.0)
    for memory_format in FORMATS:
        weight = Weighted(memory_format).weight
        state = DDPState(comm, module_of({"weight": weight}), compress=TopK(density=0.05, small_elements=0))
        saved = state.state_dict()
        saved["compressor"]["parameters"]["weight"]["residual"] = rows
        state.load_state_dict(saved)
        assert torch.equal(state.state_dict()["compressor"]["parameters"]["weight"]["residual"], rows)
        held = torch.from_numpy(state._compressor.residuals["weight"].values)
        assert torch.equal(held.as_strided(SHAPE, weight.stride()), rows.view(SHAPE))
        short = state.state_dict()
        short["compressor"]["parameters"]["weight"]["residual"] = torch.zeros(7)
        with pytest.raises(ValueError, match=r"is float32 of shape \(7,\), but the parameter needs"):
            state.load_state_dict(short)
    comm.close()


@pytest.mark.parametrize("after", [0, 2], ids=["before DDP", "after the first pass"])  # between, DDP itself errs
def test_real_ddp_in_another_format(tmp_path: Path, after: int) -> None:
    """What was sent and what waits, by rows, is what was given, whenever the model changes its format."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        model = Weighted(torch.contiguous_format)
        change = lambda: model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # noqa: E731
        if after == 0:
            change()
        ddp = DistributedDataParallel(model)
        comm = Communicator.local(1)[0]
        state = DDPState(comm, ddp, compress=TopK(density=0.05, small_elements=20))
        ddp.register_comm_hook(state, ddp_hook)
        sent = torch.zeros(SHAPE)
        for step in range(4):
            if after == step + 1:
                change()
            ddp.zero_grad()
            ddp(_gradient(0, step)).backward()
            assert model.weight.grad is not None
            sent += model.weight.grad
            _use_gradients(model)
            residual = state.state_dict()["compressor"]["parameters"]["module.weight"]["residual"].view(SHAPE)
            given = sum((_gradient(0, earlier) for earlier in range(step + 1)), torch.zeros(SHAPE))
            assert torch.equal(sent + residual, given)
        comm.close()
    finally:
        dist.destroy_process_group()
