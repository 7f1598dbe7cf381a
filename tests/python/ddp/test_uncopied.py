"""Who copies or saves a DDP with the hook hears what to copy instead; and wrapped optimisers are unwrapped."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from varied_options import objects_of

from telegrad import Communicator, DDPState, ddp_hook
from telegrad.ddp.gradient_scales import unwrapped


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_state_stays_where_it_is(copied: Callable[[Any], Any]) -> None:
    with Communicator.local(1)[0] as comm:
        state = DDPState(comm, torch.nn.Linear(2, 2))
        message = r"a DDPState belongs to its process.*AveragedModel\(ddp.module\); .* is in state.state_dict\(\)"
        with pytest.raises(TypeError, match=message):
            copied(state)


def test_a_hook_without_a_state_says_what_it_needs() -> None:
    with Communicator.local(1)[0] as comm, pytest.raises(TypeError, match=r"a Communicator: .*DDPState\(comm, ddp\)"):
        ddp_hook(comm, None)  # type: ignore[arg-type]


def test_optimisers_of_trainers_are_unwrapped() -> None:
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

    parameters = [torch.nn.Parameter(torch.ones(2))]
    sgd, adam = torch.optim.SGD(parameters), Wrapper(torch.optim.Adam(parameters))
    assert unwrapped(Wrapper(sgd)) is sgd
    assert unwrapped(sgd) is sgd
    assert unwrapped(adam) is adam


@pytest.mark.parametrize("compress", ["topk", None])
def test_dtypes_that_are_not_reduced_are_refused_at_once(compress: str | None) -> None:
    with Communicator.local(1)[0] as comm, pytest.raises(TypeError, match="'weight' has dtype torch.float8_e5m2"):
        DDPState(comm, torch.nn.Linear(2, 2).to(torch.float8_e5m2), **objects_of(compress))
