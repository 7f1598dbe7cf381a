"""Gradients stay views of their group's memory, and their passes are told apart, whatever is done to a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from telegrad import Communicator, Synchronizer, TopK

OnRanks = Callable[..., list[Any]]


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Flatten(), nn.Linear(4 * 36, 2))


def _pass(model: nn.Module, rank: int, dtype: torch.dtype = torch.float32) -> list[float]:
    x = torch.full((2, 3, 6, 6), rank + 1.0, dtype=dtype)
    model(x).sum().backward()
    return [one.grad.double().sum().item() for one in model.parameters() if one.grad is not None]


@pytest.mark.parametrize("passes", [60, pytest.param(300, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("ranks", [3, 5, 7])
def test_long_runs_among_any_number_of_ranks(on_ranks: OnRanks, ranks: int, dtype: torch.dtype, passes: int) -> None:
    """The average of a pass's number is that number, in few bits too."""

    def run(comm: Communicator) -> None:
        parameter = nn.Parameter(torch.zeros(3, dtype=dtype))
        model = nn.ParameterList([parameter])
        with torch.no_grad():
            sync = Synchronizer(model, comm, plan="single")
        for _ in range(passes):
            parameter.grad = None
            (parameter * 2).sum().backward()
        assert parameter.grad is not None
        assert parameter.grad.tolist() == [2.0] * 3
        sync.close()

    on_ranks(ranks, run)


def _assigns_data(model: nn.Module) -> None:
    for one in model.parameters():
        assert one.grad is not None
        one.grad.data = one.grad.data * 0.5


def _takes_another_layout(model: nn.Module) -> None:
    model.to(memory_format=torch.channels_last)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("change", [_assigns_data, _takes_another_layout])
def test_averages_go_on_after_gradients_were_moved(
    on_ranks: OnRanks, change: Callable[[nn.Module], None], set_to_none: bool
) -> None:
    def run(comm: Communicator) -> list[float]:
        model = _model()
        Synchronizer(model, comm, plan="fixed")
        before = _pass(model, comm.rank)
        change(model)
        found = []
        for _ in range(2):
            model.zero_grad(set_to_none=set_to_none)
            found = _pass(model, comm.rank)
        assert found == pytest.approx(before, rel=1e-5)
        for one in model.parameters():
            assert one.grad is not None
            assert one.grad.stride() == torch.empty_like(one).stride()
        return found

    first, second = on_ranks(2, run)
    assert first == second


def test_another_dtype_is_refused(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> None:
        model = _model()
        Synchronizer(model, comm, plan="fixed")
        _pass(model, comm.rank)
        model.bfloat16()
        model.zero_grad()
        with pytest.raises(RuntimeError, match=r"torch.bfloat16 of shape .* and was torch.float32 .* make another one"):
            _pass(model, comm.rank, torch.bfloat16)

    on_ranks(1, run)


def test_what_is_wrong_on_one_rank_is_an_error_on_all(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> None:
        with pytest.raises(ValueError, match=r"^on rank 1: clip_norm=-1" if comm.rank != 1 else r"^clip_norm=-1"):
            Synchronizer(_model(), comm, clip_norm=-1.0 if comm.rank == 1 else None)

    on_ranks(3, run)


def test_clipping_leaves_what_did_not_come_as_it_is(on_ranks: OnRanks) -> None:
    """An average of an earlier pass is not a part of this one's gradient."""

    def run(comm: Communicator) -> list[float]:
        torch.manual_seed(0)
        used, unused = nn.Linear(50, 50), nn.Linear(50, 50)
        model = nn.ModuleList([used, unused])
        Synchronizer(model, comm, compress=TopK(small_elements=16), plan="single", clip_norm=1e-3)
        x = torch.full((1, 50), comm.rank + 1.0)
        (used(x).sum() + unused(x).sum()).backward()
        before = unused.weight.grad.clone()
        used.zero_grad()
        used(x).square().sum().backward()
        assert torch.equal(unused.weight.grad, before)
        return before.flatten().tolist()

    first, second = on_ranks(2, run)
    assert first == second


@pytest.mark.parametrize("kept", [0, 1, 3])
def test_neighbours_of_which_some_have_gradients_already(on_ranks: OnRanks, kept: int) -> None:
    """Small gradients are taken together, whether they add to an average or begin anew."""

    def run(comm: Communicator) -> list[list[float]]:
        torch.manual_seed(0)
        model = nn.ParameterList([nn.Parameter(torch.randn(2, 3)) for _ in range(3)])
        Synchronizer(model, comm, plan="single")

        def pass_() -> None:
            sum((number + 1) * (comm.rank + 1) * one.sum() for number, one in enumerate(model)).backward()

        pass_()
        for number, one in enumerate(model):
            if number >= kept:
                one.grad = None
        pass_()
        return [one.grad.flatten().tolist() for one in model if one.grad is not None]

    first, second = on_ranks(2, run)
    # An average of ranks 0 and 1 is 1.5; what was there counts once more.
    assert first == second == [[(number + 1) * (3.0 if number < kept else 1.5)] * 6 for number in range(3)]
