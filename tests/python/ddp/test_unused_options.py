"""Options that would be accepted and do nothing are refused, by the names that they were given under."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import given_gradients
import pytest
import torch
from handmade_buckets import ONE, Trainer, gradients_of, named

from telegrad import Communicator, Synchronizer
from telegrad.ddp import BySize

Local = Callable[..., list[Communicator]]
LARGE_ALONE = {"small_elements": 1000}  # the output layer, which keeps its values, is dense then


BOTH: list[tuple[dict[str, Any], str]] = [
    (
        {"same_sign": True, "select": "topk", "combine": "oktopk", **LARGE_ALONE},
        "combine='oktopk' is not used with same_sign=True",
    ),
    (
        {"same_sign": True, "select": "search", "values": "qsgd4", **LARGE_ALONE},
        "values='qsgd4' is not used with same_sign=True",
    ),
]


@pytest.mark.parametrize(("options", "said"), BOTH, ids=named)
@pytest.mark.parametrize("make", [Trainer, given_gradients.Rank], ids=["hook", "synchronizer"])
def test_both_refuse(local: Local, make: Callable[..., Any], options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        make(local(1)[0], **options)


@pytest.mark.parametrize(
    "options",
    [
        {"compress": None, "warmup_steps": 0},
        {"policy": BySize(middle="topk", large_elements=1000, interval=5)},
        {"same_sign": True, "select": "topk", "combine": "oktopk", "values": "int8"},  # both of the output layer
        {"same_sign": True, "select": "topk", "values": "mean", **LARGE_ALONE},
    ],
    ids=named,
)
def test_what_has_an_effect_or_is_the_default_is_taken(local: Local, options: dict[str, Any]) -> None:
    Trainer(local(1)[0], **options).step(gradients_of(0, 0), ONE)


def test_a_policy_by_its_own_names() -> None:
    for make, said in (
        (lambda: BySize(middle="topk", interval=5), "interval=5 is not used with middle='topk'"),
        (lambda: BySize(large="topk"), "large='topk' is not used without large_elements="),
    ):
        with pytest.raises(ValueError, match=said):
            make()
    assert BySize(middle="topk", large_elements=9, interval=5).interval == 5


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"scaler": 3}, "scaler is a int: give the torch.amp.GradScaler"),  # with nonfinite="raise" too
        ({"group": 3}, "group=3 must be the torch.distributed.ProcessGroup that DDP was given, or None"),
    ],
    ids=named,
)
def test_the_argument_that_is_wrong_is_named(local: Local, options: dict[str, Any], said: str) -> None:
    with pytest.raises(TypeError, match=said):
        Trainer(local(1)[0], **options)


def test_a_closed_communicator_is_refused_at_once(local: Local) -> None:
    comm = local(1)[0]
    comm.close()
    with pytest.raises(ValueError, match="is closed: make a new one"):
        Trainer(comm)
    with pytest.raises(ValueError, match="is closed: make a new one"):
        Synchronizer(torch.nn.Linear(2, 2), comm)
