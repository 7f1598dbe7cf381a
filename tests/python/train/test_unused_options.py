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
from telegrad.compress import ReusedThreshold
from telegrad.ddp import BySize

Local = Callable[..., list[Communicator]]
LARGE_ALONE = {"small_tensor_elements": 1000}  # the output layer, which keeps its values, is dense then


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mode": "dense", "wire": "qsgd4"}, "wire='qsgd4' is not used with mode='dense'"),
        ({"mode": "dense", "collective": "oktopk"}, "collective='oktopk' is not used with mode='dense'"),
        (
            {"mode": "dense", "density": 0.5},
            "density=0.5 is not used with mode='dense', which sums all values as they are",
        ),
        ({"mode": "dense", "selection": "topk"}, "selection='topk' is not used with mode='dense'"),
        ({"mode": "dense", "selection": ReusedThreshold(3)}, "selection=ReusedThreshold("),
        ({"mode": "dense", "small_tensor_elements": 16}, "small_tensor_elements=16 is not used with mode='dense'"),
        ({"mode": "dense", "same_sign": True}, "same_sign=True is not used with mode='dense'"),
        ({"mode": "dense", "output": ["hidden"]}, "output=['hidden'] is not used with mode='dense'"),
        ({"mode": "dense", "policy": BySize()}, "policy=BySize("),
        ({"mode": "dense", "warmup_steps": 3}, "warmup_steps=3 is not used with mode='dense'"),
        ({"mode": "dense", "feedback": "steps"}, "feedback='steps' is not used with mode='dense'"),
        ({"warmup": "falling"}, "warmup='falling' is not used without warmup_steps=: give both, or neither"),
        ({"wire": None}, "wire=None does not exist: use 'auto', or leave it out"),
    ],
    ids=named,
)
def test_the_hook_refuses(local: Local, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        Trainer(local(1)[0], **options)


def test_the_synchronizer_refuses(local: Local) -> None:
    said = "compression_warmup='falling' is not used without compression_warmup_steps=: give both, or neither"
    with pytest.raises(ValueError, match=said):
        given_gradients.Rank(local(1)[0], compression_warmup="falling")


BOTH: list[tuple[dict[str, Any], str]] = [
    ({"masking": False}, "masking=False needs momentum=, as 0.9"),
    ({"interval": 5, "selection": "topk"}, "interval=5 is not used with selection='topk': use one of reused, sampled"),
    ({"interval": 5, "selection": "topk", "large_tensor_elements": 9, "large_selection": "buckets"}, "interval=5 is"),
    ({"interval": 5, "selection": ReusedThreshold(3)}, "interval=5 is not used with selection=ReusedThreshold("),
    ({"large_selection": "topk"}, "large_selection='topk' is not used without large_tensor_elements=: give both"),
    (
        {"same_sign": True, "selection": "topk", "collective": "oktopk", **LARGE_ALONE},
        "collective='oktopk' is not used with same_sign=True",
    ),
    (
        {"same_sign": True, "selection": "search", "wire": "qsgd4", **LARGE_ALONE},
        "wire='qsgd4' is not used with same_sign=True",
    ),
]


@pytest.mark.parametrize(("options", "said"), BOTH, ids=named)
@pytest.mark.parametrize("make", [Trainer, given_gradients.Rank], ids=["hook", "synchronizer"])
def test_both_refuse(local: Local, make: Callable[..., Any], options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        make(local(1)[0], **options)


@pytest.mark.parametrize("make", [Trainer, given_gradients.Rank], ids=["hook", "synchronizer"])
@pytest.mark.parametrize("selection", [None, 3])
def test_what_is_no_selection(local: Local, make: Callable[..., Any], selection: Any) -> None:
    with pytest.raises(TypeError, match=f"^selection={selection} must be a selection or its name"):
        make(local(1)[0], selection=selection)


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "dense", "wire": "auto", "collective": "allreduce", "density": 0.01, "warmup": "dense"},
        {"interval": 5, "selection": "topk", "large_tensor_elements": 1000},
        {"large_selection": "reused", "wire": "auto"},
        {"same_sign": True, "selection": "topk", "collective": "oktopk", "wire": "int8"},  # both of the output layer
        {"same_sign": True, "selection": "topk", "wire": "mean", **LARGE_ALONE},
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
