"""Training steps under torch.compile end with the bits of those that are not compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from handmade_buckets import ONE, Trainer, gradients_of, plain_sgd
from synchronised_net import OnRanks
from torch import Tensor, nn
from varied_options import objects_of

from telegrad import Communicator, Synchronizer

Step = Callable[..., Tensor]


def compiled(step: Step) -> Step:
    return torch.compile(step, backend="eager")


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "options",
    [
        {"plan": "auto", "plan_after": 3},
        {"plan": "single", "clip_norm": 0.1, "wait_in": True},
        {"plan": "single", "compress": "topk", "density": 0.1, "small_elements": 8, "momentum": 0.9},
    ],
    ids=["auto", "clipped and waits", "topk"],
)
def test_with_a_synchronizer(on_ranks: OnRanks, options: dict[str, Any]) -> None:
    def run(comm: Communicator) -> None:
        found = []
        for how in (lambda step: step, compiled):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
            optimizer = plain_sgd(model.parameters())
            with_it = {name: {"wait_in": optimizer}.get(name, value) for name, value in options.items()}
            if "momentum" in options:
                with_it["optimizer"] = optimizer
            sync = Synchronizer(model, comm, **objects_of(**{"compress": None, **with_it}))

            def step(x: Tensor, model: Any = model, optimizer: Any = optimizer, sync: Any = sync) -> Tensor:
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                sync.wait()
                optimizer.step()
                return loss

            take = how(step)
            losses = [take(torch.full((2, 8), float(number))) for number in range(10)]
            found.append([*losses, *(one.detach() for one in model.parameters())])
            sync.close()
        assert all(map(torch.equal, *found))

    on_ranks(1, run)


def test_with_the_hook(local: Callable[..., list[Communicator]]) -> None:
    found = []
    for how in (lambda step: step, compiled):
        trainer = Trainer(local(1)[0], momentum=0.9, optimizer=plain_sgd, nonfinite="skip")

        def step(x: Tensor, gradients: dict[str, np.ndarray], trainer: Trainer = trainer) -> Tensor:
            _, future = trainer.start(gradients, ONE[0], 0, True)
            return future.wait() + x

        take = how(step)
        found += [take(torch.ones(1), gradients_of(0, number)) for number in range(4)]
    assert all(map(torch.equal, found[:4], found[4:]))


def test_a_sum_that_is_left_out(local: Callable[..., list[Communicator]]) -> None:
    """The remedy in docs/explanation/ddp-hook.md."""
    comm = local(1)[0]
    all_reduce = torch.compiler.disable(comm.all_reduce)

    @compiled
    def step(x: Tensor) -> Tensor:
        all_reduce(x, "avg")
        return 2 * x

    assert step(torch.ones(3)).tolist() == [2.0] * 3
