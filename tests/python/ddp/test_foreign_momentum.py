"""Momentum that an optimiser gets after the hook has been made: it would be applied twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import given_gradients
import pytest
import torch
from device_trainer import DeviceTrainer, step_on_device
from handmade_buckets import ONE, Trainer, gradients_of, plain_sgd
from triton_arrays import DEVICE

from telegrad import Communicator

OnRanks = Callable[..., list[Any]]


def one_cycle(optimizer: torch.optim.Optimizer) -> None:
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)


def a_saved_state(optimizer: torch.optim.Optimizer) -> None:
    parameters = optimizer.param_groups[0]["params"]
    optimizer.load_state_dict(torch.optim.SGD(parameters, lr=0.1, momentum=0.9).state_dict())


@pytest.mark.parametrize("give_momentum", [one_cycle, a_saved_state])
@pytest.mark.parametrize("compress", ["topk", None])
def test_the_next_pass_of_the_hook_raises(
    on_ranks: OnRanks, compress: str | None, give_momentum: Callable[[torch.optim.Optimizer], None]
) -> None:
    def run(comm: Communicator) -> None:
        optimizers: list[torch.optim.Optimizer] = []

        def made(parameters: Any) -> torch.optim.Optimizer:
            optimizers.append(plain_sgd(parameters))
            return optimizers[0]

        trainer = Trainer(comm, compress=compress, momentum=0.9, optimizer=made)
        trainer.step(gradients_of(comm.rank, 0), ONE)
        give_momentum(optimizers[0])
        with pytest.raises(ValueError, match="optimizer has momentum=0.9.* applied twice: .*cycle_momentum=False"):
            trainer.step(gradients_of(comm.rank, 1), ONE)

    on_ranks(1, run)


@pytest.mark.parametrize("give_momentum", [one_cycle, a_saved_state])
def test_the_next_pass_of_a_synchronizer_raises(
    on_ranks: OnRanks, give_momentum: Callable[[torch.optim.Optimizer], None]
) -> None:
    def run(comm: Communicator) -> None:
        optimizers: list[torch.optim.Optimizer] = []

        def made(parameters: Any) -> torch.optim.Optimizer:
            optimizers.append(given_gradients.sgd(parameters))
            return optimizers[0]

        rank = given_gradients.Rank(comm, momentum=0.9, optimizer=made)
        rank.step(given_gradients.gradients_of(comm.rank, 0))
        give_momentum(optimizers[0])
        with pytest.raises(ValueError, match=r"optimizer has momentum=0.9.* applied twice"):
            rank.step(given_gradients.gradients_of(comm.rank, 1))

    on_ranks(1, run)


@pytest.mark.skipif(DEVICE != "cpu", reason="the fake device's memory is the host's: set TRITON_INTERPRET=1")
@pytest.mark.parametrize("give_momentum", [one_cycle, a_saved_state])
def test_the_next_pass_on_a_device_raises(
    make: Callable[..., list[DeviceTrainer]], give_momentum: Callable[[torch.optim.Optimizer], None]
) -> None:
    optimizers: list[torch.optim.Optimizer] = []

    def made(parameters: Any) -> torch.optim.Optimizer:
        optimizers.append(plain_sgd(parameters))
        return optimizers[-1]

    trainers = make(select="topk", momentum=0.9, optimizer=made)
    step_on_device(trainers, [gradients_of(trainer.comm.rank, 0) for trainer in trainers], ONE)
    give_momentum(optimizers[0])
    with pytest.raises(ValueError, match=r"optimizer has momentum=0.9.* applied twice"):
        trainers[0].start(gradients_of(0, 1), ONE)


def test_an_optimizer_of_other_parameters_raises(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> None:
        with pytest.raises(ValueError, match="optimizer does not have parameter 'embedding'"):
            Trainer(comm, momentum=0.9, optimizer=lambda _: plain_sgd([torch.nn.Parameter(torch.zeros(3))]))

    on_ranks(1, run)
