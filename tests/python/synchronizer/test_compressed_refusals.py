"""What a Synchronizer that compresses refuses: misuse, ranks that differ, and states that do not fit."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from given_gradients import SHAPES, Rank, gradients_of
from handmade_buckets import named, plain_sgd
from synchronised_net import OnRanks
from torch import nn

from telegrad import Communicator, Synchronizer
from telegrad.compress import ExactTopK
from telegrad.ddp import ParameterCompression
from telegrad.synchronizer.synchronizer import PLANS

Local = Callable[..., list[Communicator]]


def of_one(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([next(iter(parameters))], lr=0.1)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"nonfinite": "skip"}, ValueError, "nonfinite='skip' does not exist: use one of raise, send"),
        ({"plan": "greedy"}, ValueError, "plan='greedy' looks at one cost, and compression has several"),
        ({"plan": "wfbp", "compress": "cheapest"}, ValueError, "compress=Cheapest() is decided with the plan"),
        ({"plan": [[*SHAPES]], "compress": "cheapest"}, ValueError, "compress=Cheapest() is decided with the plan"),
        ({"momentum": 0.9}, ValueError, "momentum needs optimizer="),
        ({"feedback": "steps"}, ValueError, "feedback='steps' needs optimizer="),
        (
            {"dtype": torch.float64, "momentum": 0.9, "optimizer": plain_sgd},
            TypeError,
            "momentum= has float32 velocities, and",
        ),
    ],
    ids=named,
)
def test_misuse(local: Local, options: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=re.escape(said)):
        Rank(local(1)[0], **options)


def test_an_optimizer_that_leaves_parameters_out(local: Local) -> None:
    with pytest.raises(ValueError, match="optimizer does not have parameter 'norm': give the optimizer that steps all"):
        Rank(local(1)[0], plan="single", feedback="steps", optimizer=of_one)


def some(tensor: Any) -> ParameterCompression:
    return ParameterCompression(ExactTopK(), 0.1)


def others(tensor: Any) -> ParameterCompression:
    return ParameterCompression(ExactTopK(), 0.1 if tensor.elements < 500 else 0.2)


@pytest.mark.parametrize(
    ("first", "second", "what"),
    [
        ({"compress": "topk"}, {"compress": None}, "compress"),
        ({"compress": None}, {"compress": "topk"}, "compress"),
        ({"compress": "topk"}, {"compress": "cheapest"}, "compress"),
        ({}, {"density": 0.06}, "density"),
        ({}, {"values": "int8"}, "values"),
        ({}, {"combine": "oktopk"}, "combine"),
        ({}, {"select": "topk"}, "select"),
        ({}, {"warmup_steps": 3}, "warmup_steps"),
        ({}, {"nonfinite": "send"}, "nonfinite"),
        ({"policy": some}, {"policy": others}, "what is compressed"),
    ],
    ids=named,
)
def test_ranks_that_differ(on_ranks: OnRanks, first: dict[str, Any], second: dict[str, Any], what: str) -> None:
    def run(comm: Communicator) -> None:
        with pytest.raises(ValueError, match=f"{what} of rank 1 and rank 0 differ: give all ranks the same"):
            Rank(comm, **[first, second][comm.rank])

    on_ranks(2, run)


def test_states_that_do_not_fit(local: Local) -> None:
    rank = Rank(local(1)[0], plan="single")
    rank.step(gradients_of(0, 0))
    state, before = rank.sync.state_dict(), rank.waiting()
    for change, said in (
        ({"version": 9}, "must come from Synchronizer.state_dict() of version 1"),
        ({"world_size": 2}, "state is of rank 0 of 2, but rank 0 of 1 loads it"),
        ({"step": -1}, "state['step']=-1 must not be negative"),
        ({"compressor": {"parameters": {}}}, "state has no residual for 'embedding', 'hidden'"),
    ):
        with pytest.raises(ValueError, match=re.escape(said)):
            rank.sync.load_state_dict({**state, **change})
    with pytest.raises(ValueError, match="state is a int"):
        rank.sync.load_state_dict(3)  # type: ignore[arg-type]
    assert all(torch.equal(one, rank.waiting()[name]) for name, one in before.items())
    assert rank.sync.state_dict()["step"] == 1


def test_without_compression_nothing_waits(local: Local) -> None:
    sync = Synchronizer(nn.Linear(2, 2), local(1)[0])
    assert sync.stats is None
    with pytest.raises(ValueError, match="this Synchronizer compresses nothing, so nothing waits: it has no state"):
        sync.state_dict()
    with pytest.raises(ValueError, match="this Synchronizer compresses nothing"):
        sync.load_state_dict({})


def test_every_plan_is_taken_or_refused(local: Local) -> None:
    for plan in PLANS:
        if plan != "greedy":
            Rank(local(1)[0], plan=plan).step(gradients_of(0, 0))
