"""Models that are TorchScript, or have parts that are."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from synchronised_net import OnRanks
from torch import Tensor, nn
from varied_options import objects_of

from telegrad import Communicator, Synchronizer
from telegrad.synchronizer import StepProfile

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


def layers() -> nn.Sequential:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    with torch.no_grad():
        for one in net.parameters():
            one.fill_(0.5)
    return net


def data(rank: int) -> Tensor:
    return torch.full((3, 4), rank + 1.0)


def script(model: nn.Module) -> nn.Module:
    return torch.jit.script(model)  # type: ignore[no-any-return]


def saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.jit.save(script(model), file)
    file.seek(0)
    return torch.jit.load(file)  # type: ignore[no-any-return, no-untyped-call]


def with_scripted_part(model: nn.Sequential) -> nn.Module:
    model[0] = script(model[0])
    return model


MODELS: dict[str, Callable[[Any], nn.Module]] = {
    "scripted": script,
    "loaded": saved,
    "traced": lambda model: torch.jit.trace(model, data(0)),
    "part": with_scripted_part,
}


def trained(comm: Communicator, model: nn.Module, plan: str) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sync = Synchronizer(model, comm, **objects_of(None, plan=plan, plan_after=3))
    for _ in range(8):
        optimizer.zero_grad()
        model(data(comm.rank)).square().mean().backward()
        optimizer.step()
    sync.close()
    return [one.detach() for one in model.parameters()]


@pytest.mark.parametrize(
    ("make", "plan"), [*((make, "single") for make in MODELS), ("traced", "auto"), ("part", "auto")]
)
def test_they_are_trained_as_others(on_ranks: OnRanks, make: str, plan: str) -> None:
    models = [MODELS[make](layers()) for _ in range(2)]  # here, as torch.jit.trace takes no threads
    expected = on_ranks(2, lambda comm: trained(comm, layers(), "single"))
    found = on_ranks(2, lambda comm: trained(comm, models[comm.rank], plan))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("make", ["scripted", "loaded"])
def test_what_must_see_its_passes_is_refused(on_ranks: OnRanks, make: str) -> None:
    models = [MODELS[make](layers()) for _ in range(2)]

    def run(comm: Communicator) -> None:
        model = models[comm.rank]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ValueError, match=r"TorchScript, and its forward passes cannot be seen: .*plan='fixed'"):
            Synchronizer(model, comm)
        with pytest.raises(ValueError, match=r"TorchScript, and its forward passes cannot be seen: .*wait_in"):
            Synchronizer(model, comm, plan="single", wait_in="step", optimizer=optimizer)
        with pytest.raises(ValueError, match=r"TorchScript, and its forward passes cannot be seen"):
            StepProfile(model)
        model(data(comm.rank)).sum().backward()
        assert all(one.grad is not None and one.grad._base is None for one in model.parameters())

    on_ranks(2, run)
