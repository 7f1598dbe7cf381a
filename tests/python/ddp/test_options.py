"""The options objects: what they refuse, and what papers' choices are."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from telegrad import (
    BoundedTopk,
    Cheapest,
    Communicator,
    DDPState,
    Momentum,
    OkTopk,
    Quantised,
    Synchronizer,
    TopK,
    Warmup,
)
from telegrad.compress import BucketTopK, BySize, ReusedThreshold
from telegrad.ddp.options import plain_options

Local = Callable[..., list[Communicator]]


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: TopK(-0.01), ValueError, "density=-0.01 must be in (0, 1]: 0.01 sends one entry in a hundred"),
        (lambda: TopK(0), ValueError, "density=0 must be in"),
        (lambda: TopK(2), ValueError, "density=2 must be in"),
        (lambda: TopK("1%"), TypeError, "density='1%' must be a number"),  # type: ignore[arg-type]
        (lambda: TopK(True), TypeError, "density=True must be a number"),
        (lambda: TopK(select="best"), ValueError, "select='best' does not exist: use one of reused, topk"),
        (lambda: TopK(select=3), TypeError, "select=3 must be a selection or its name"),  # type: ignore[arg-type]
        (lambda: TopK(interval=0), ValueError, "interval=0 must be at least 1"),
        (lambda: TopK(interval=np.bool_(True)), TypeError, "must be an int"),  # type: ignore[arg-type]
        (lambda: TopK(select="topk", interval=5), ValueError, "interval=5 is not used with select='topk': use one of"),
        (lambda: TopK(select=ReusedThreshold(3), interval=5), ValueError, "interval=5 is not used with select=Reused"),
        (lambda: TopK(small_elements=-1), ValueError, "small_elements=-1 must not be negative"),
        (lambda: TopK(small_elements=1.5), TypeError, "small_elements=1.5 must be an int"),  # type: ignore[arg-type]
        (lambda: TopK(same_sign=True), ValueError, "same_sign=True does not fit select='reused': use one of topk"),
        (lambda: TopK(same_sign=1), TypeError, "same_sign=1 must be True or False"),  # type: ignore[arg-type]
        (lambda: TopK(output="head"), TypeError, "output='head' must be a list of names: output=['head']"),
        (lambda: TopK(output=3), TypeError, "output=3 must be a list of names"),  # type: ignore[arg-type]
        (lambda: TopK(values=None), ValueError, "values=None does not exist: use 'auto'"),  # type: ignore[arg-type]
        (lambda: TopK(values="zip"), ValueError, "values='zip' does not exist"),
        (lambda: TopK(combine="ring"), ValueError, "combine='ring' does not exist: use one of allreduce"),
        (lambda: TopK(combine=3), ValueError, "combine=3 does not exist"),  # type: ignore[arg-type]
        (lambda: TopK(combine="bounded", values="packed"), ValueError, "values='packed' makes messages whose sizes"),
        (
            lambda: TopK(feedback="weights"),
            ValueError,
            "feedback='weights' does not exist: use one of gradients, steps",
        ),
        (lambda: TopK(policy=3), TypeError, "policy is a int: give a BySize, or a function from"),  # type: ignore[arg-type]
        (lambda: TopK(0.5, policy=BySize()), ValueError, "density=0.5 is not used with policy="),
        (lambda: TopK(select="topk", policy=BySize()), ValueError, "select='topk' is not used with policy="),
        (lambda: TopK(small_elements=9, policy=BySize()), ValueError, "small_elements=9 is not used with policy="),
        (lambda: OkTopk(0), ValueError, "boundaries_every=0"),
        (lambda: BoundedTopk(0.5), ValueError, "slack=0.5 must be"),
        (lambda: BoundedTopk(boundaries_every=0), ValueError, "boundaries_every=0"),
        (lambda: TopK.oktopk(slack=2, balance_factor=3), ValueError, "balance_factor=3 is not used with slack=2"),
        (lambda: TopK(combine=BoundedTopk(), values="packed"), ValueError, "makes messages whose sizes"),
        (lambda: TopK.oktopk(threshold_every=0), ValueError, "threshold_every=0"),
        (lambda: TopK.oktopk(balance_factor=0.5), ValueError, "balance_factor=0.5 must be 1 or more"),
        (lambda: TopK.sparcml(600), ValueError, "per_bucket=600 must be at least 1 and at most 512"),
        (lambda: TopK.redsync(3), ValueError, "density=3 must be in"),
        (lambda: Quantised("f16"), ValueError, "values='f16' does not exist: use one of bf16, int8, qsgd8, qsgd4"),
        (lambda: TopK(output=["head"]), ValueError, "output=('head',) is not used without same_sign=True or policy="),
        (lambda: Quantised(8), TypeError, "values=8 must be one or more of bf16, int8"),  # type: ignore[arg-type]
        (lambda: Quantised(None), TypeError, "values=None must be one or more of"),  # type: ignore[arg-type]
        (lambda: Cheapest(values=8), TypeError, "values=8 must be one or more of"),  # type: ignore[arg-type]
        (lambda: Quantised(()), ValueError, "values=() must name one or more of bf16, int8, qsgd8, qsgd4, each once"),
        (lambda: Quantised(["int8", "int8"]), ValueError, "values=['int8', 'int8'] must name one or more"),
        (lambda: Quantised("int8", -1), ValueError, "small_elements=-1 must not be negative"),
        (lambda: Quantised("int8", feedback="x"), ValueError, "feedback='x' does not exist"),
        (lambda: Cheapest("topk"), TypeError, "topk is a str: give a telegrad.TopK"),  # type: ignore[arg-type]
        (lambda: Cheapest(values="zip"), ValueError, "values='zip' does not exist"),
        (lambda: Momentum("much"), TypeError, "factor='much' must be a number in (0, 1)"),  # type: ignore[arg-type]
        (lambda: Momentum(0.0), ValueError, "factor=0.0 must be in (0, 1), as Momentum(0.9); without any leave"),
        (lambda: Momentum(1.0), ValueError, "factor=1.0 must be in (0, 1)"),
        (lambda: Momentum(float("nan")), ValueError, "factor=nan must be in (0, 1)"),
        (lambda: Momentum(0.9, nesterov=1), TypeError, "nesterov=1 must be True or False"),  # type: ignore[arg-type]
        (lambda: Momentum(0.9, masking=None), TypeError, "masking=None must be True or False"),  # type: ignore[arg-type]
        (lambda: Warmup(-1), ValueError, "steps=-1 must not be negative"),
        (lambda: Warmup(True), TypeError, "steps=True must be an int"),
        (lambda: Warmup(np.float64(3)), TypeError, "must be an int"),  # type: ignore[arg-type]
        (lambda: Warmup(5, "slow"), ValueError, "kind='slow' does not exist: use one of dense, falling"),
    ],
)
def test_what_is_refused_when_it_is_made(make: Callable[[], Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=re.escape(said)):
        make()


def test_options_do_not_change() -> None:
    for made, name in (
        (TopK(), "density"),
        (Warmup(3), "steps"),
        (Momentum(0.9), "factor"),
        (OkTopk(), "threshold_every"),
    ):
        with pytest.raises(AttributeError):
            setattr(made, name, 1)


def test_papers_choices() -> None:
    sparcml = TopK.sparcml()
    assert (sparcml.density, sparcml.values, sparcml.feedback) == (8 / 512, "qsgd4", "steps")
    assert sparcml.select == BucketTopK(512, 8)
    assert TopK.sparcml(2, bucket_elements=128, values="packed", feedback="gradients") == TopK(
        2 / 128, BucketTopK(128, 2), values="packed"
    )
    assert TopK.redsync() == TopK(policy=BySize.redsync(0.001))
    assert TopK.redsync(0.01, same_sign=True).per_parameter == BySize.redsync(0.01, same_sign=True)
    oktopk = TopK.oktopk(0.02, boundaries_every=7, threshold_every=5, balance_factor=2.0)
    assert (oktopk.density, oktopk.interval, oktopk.combine) == (0.02, 5, OkTopk(7, 5, 2.0))
    assert oktopk.feedback == "steps"
    assert TopK.oktopk(feedback="gradients") == TopK(interval=32, combine=OkTopk())
    bounded = TopK.oktopk(0.02, boundaries_every=7, slack=2)
    assert (bounded.interval, bounded.combine) == (32, BoundedTopk(2, 7))


def test_a_dense_warm_up() -> None:
    warmup = Warmup(3)
    assert [warmup.is_dense(step) for step in range(5)] == [True, True, True, False, False]
    assert not any(warmup.least_density(step) for step in range(5))


def test_a_falling_density() -> None:
    warmup = Warmup(10, "falling")
    densities = [warmup.least_density(step) for step in range(12)]
    assert densities == [*np.repeat([0.25, 0.0625, 0.0156, 0.004, 0.001], 2), 0, 0]
    assert not any(warmup.is_dense(step) for step in range(12))
    assert [Warmup(2, "falling").least_density(step) for step in range(3)] == [0.25, 0.0156, 0]
    assert Warmup(0, "falling").least_density(0) == 0


def test_numpy_numbers_are_plain_in_what_is_saved() -> None:
    topk = TopK(np.float32(0.25), interval=np.int64(4), small_elements=np.uint16(9))  # type: ignore[arg-type]
    saved = plain_options(topk, Momentum(np.float64(0.5)), Warmup(np.int32(3)))  # type: ignore[arg-type]
    kinds = {name: (saved[name], type(saved[name])) for name in ("density", "interval", "small_elements")}
    assert kinds == {"density": (0.25, float), "interval": (4, int), "small_elements": (9, int)}
    assert (saved["momentum"], type(saved["warmup_steps"])) == (0.5, int)


def _state(local: Local, **options: Any) -> DDPState:
    return DDPState(local(1)[0], torch.nn.Linear(100, 50), **options)


def test_ok_topks_settings_reach_its_sums(local: Local) -> None:
    settings = {"boundaries_every": 7, "threshold_every": 5, "balance_factor": 2.0}
    state = _state(local, compress=TopK.oktopk(0.1, feedback="gradients", **settings))
    sums = state._exchange.topk_states
    assert sums is not None
    made = sums.of(tuple(state._compressor.part(one.name, 0) for one in state._compressor.residuals))
    assert {
        name: made.state_dict()[name] for name in ("k", "boundaries_every", "threshold_every", "balance_factor")
    } == {
        "k": 500,
        "boundaries_every": 7,
        "threshold_every": 5,
        "balance_factor": 2.0,
    }


def test_what_needs_an_optimizer_says_so(local: Local) -> None:
    with pytest.raises(ValueError, match="feedback='steps' needs optimizer=: residuals hold gradients times its"):
        _state(local, compress=TopK.sparcml())
    with pytest.raises(ValueError, match="feedback='steps' needs optimizer=.*or use feedback='gradients'"):
        _state(local, compress=TopK.oktopk())
    with pytest.raises(ValueError, match="momentum needs optimizer=: an SGD with momentum=0"):
        _state(local, momentum=Momentum(0.9))


def test_names_that_the_model_does_not_have(local: Local) -> None:
    for topk, said in (
        (TopK(select="topk", same_sign=True, output=["head"]), "output names 'head', which the model does not have"),
        (TopK(policy=BySize(dense=("head",))), "dense names 'head', which the model does not have"),
    ):
        with pytest.raises(ValueError, match=said):
            _state(local, compress=topk)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        (
            {"compress": "topk"},
            TypeError,
            "compress='topk' must be a telegrad.TopK or telegrad.LowRank or telegrad.Quantised",
        ),
        ({"compress": TopK}, TypeError, "compress is the class TopK: call it, as TopK()"),
        ({"momentum": Momentum(0.9)}, ValueError, "is not used with compress=None: give compress=TopK() too"),
        ({"optimizer": 3}, ValueError, "optimizer=3 is not used with compress=None"),
        ({"nonfinite": "raise"}, ValueError, "nonfinite='raise' is not used with compress=None"),
        (
            {"nonfinite": "skip", "compress": TopK()},
            ValueError,
            "nonfinite='skip' does not exist: use one of raise, send",
        ),
        ({"compress": Quantised("int8"), "warmup": Warmup(3, "falling")}, ValueError, "Quantised sends all values"),
    ],
)
def test_what_a_synchronizer_refuses(local: Local, options: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=re.escape(said)):
        Synchronizer(torch.nn.Linear(9, 9), local(1)[0], **options)


def test_entry_points_have_few_options() -> None:
    import inspect

    from telegrad import ReplicaSynchronizer

    for entry in (DDPState, Synchronizer, ReplicaSynchronizer, Communicator.from_torch, Communicator.all_reduce):
        keywords = [one for one in inspect.signature(entry).parameters.values() if one.kind is one.KEYWORD_ONLY]
        assert len(keywords) <= 10, entry
        assert not any(one.kind is one.VAR_KEYWORD for one in inspect.signature(entry).parameters.values()), entry
