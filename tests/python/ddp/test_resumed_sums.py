"""What sums that keep a part leave to the next step goes through ``state_dict()``: training goes on bitwise."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from handmade_buckets import LARGE, ONE, REBUILT, Trainer, gradients_of, named, plain_sgd

from telegrad import BoundedTopk, Communicator, OkTopk
from telegrad.ddp import RankState, load_resharded, reshard

ALONE = {"no_dist": True} if "no_dist" in signature(dcp.save).parameters else {}  # torch 2.6 sees that itself

OnRanks = Callable[..., list[Any]]
RANKS, STEPS = 3, 72  # thresholds are found anew at every 32nd, slices cut at every 64th
OTHER_ORDER = [list(reversed(ONE[0]))]


def _after_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)  # type: ignore[no-any-return]


def _assert_alike(found: Any, expected: Any) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values)


def _set_rate(trainer: Trainer, step: int) -> None:
    """One that falls from step to step, where residuals hold steps."""
    if trainer.state._compressor.feedback == "steps":
        optimizer = trainer.state._scales._optimizer
        assert optimizer is not None
        optimizer.param_groups[0]["lr"] = 0.5 * 0.97**step


def _compare(
    comm: Communicator, saved_at: int, first: Sequence[Sequence[str]], buckets: Sequence[Sequence[str]], **options: Any
) -> None:
    """Two trainings, the second of which goes on from the first one's state, its first pass in ``first``."""
    whole = Trainer(comm, **options)
    for step in range(saved_at):
        _set_rate(whole, step)
        whole.step(gradients_of(comm.rank, step), buckets)
    resumed = Trainer(comm, **options)
    resumed.state.load_state_dict(_after_a_file(whole.state.state_dict()))
    for step in range(saved_at, STEPS):
        for trainer in (whole, resumed):
            _set_rate(trainer, step)
        gradients = gradients_of(comm.rank, step)
        expected = whole.step(gradients, buckets)
        found = resumed.step(gradients, first if step == saved_at else buckets)
        _assert_alike(found, expected)
        for name in LARGE:
            np.testing.assert_array_equal(resumed.residual(name), whole.residual(name))
    assert resumed.state.state_dict()["sums"] == whole.state.state_dict()["sums"]


SUMS: list[dict[str, Any]] = [
    {"combine": "oktopk"},
    {"combine": "gtopk"},
    {"combine": "bounded"},
    {"combine": BoundedTopk(slack=2, boundaries_every=7)},
]
OPTIONS: list[dict[str, Any]] = [
    {"combine": "oktopk", "values": "int8", "nonfinite": "skip"},
    {"combine": "oktopk", "values": "qsgd4"},
    {"combine": "oktopk", "feedback": "steps", "optimizer": plain_sgd},
    {"combine": "oktopk", "momentum": 0.9, "optimizer": plain_sgd, "warmup_steps": 10},
    {"combine": "oktopk", "warmup_steps": 50, "warmup": "falling"},
    {"combine": OkTopk(threshold_every=5)},
    {"combine": "bounded", "dtype": torch.bfloat16, "select": "topk"},
]


@pytest.mark.parametrize(
    ("options", "saved_at"),
    [*((options, 5) for options in (*SUMS, *OPTIONS)), *((options, 64) for options in SUMS)],
    ids=named,
)
def test_a_resumed_training_is_that_which_was_not_interrupted(
    on_ranks: OnRanks, options: dict[str, Any], saved_at: int
) -> None:
    on_ranks(RANKS, lambda comm: _compare(comm, saved_at, REBUILT, REBUILT, **options))


@pytest.mark.parametrize("saved_at", [5, 33])  # mean squares of tensors are known from the 32nd on
def test_thresholds_of_oktopk_outlive_another_order_of_a_bucket(on_ranks: OnRanks, saved_at: int) -> None:
    def given(rank: int, step: int) -> dict[str, np.ndarray]:
        gradients = gradients_of(rank, step)
        return gradients | {"hidden": gradients["hidden"] / np.float32(64)}

    def run(comm: Communicator) -> None:
        whole, resumed = (Trainer(comm, combine="oktopk") for _ in range(2))
        for step in range(saved_at):
            whole.step(given(comm.rank, step), OTHER_ORDER)
        resumed.state.load_state_dict(whole.state.state_dict())
        for step in range(saved_at, saved_at + 40):
            gradients = given(comm.rank, step)
            expected = whole.step(gradients, OTHER_ORDER)
            _assert_alike(resumed.step(gradients, ONE if step == saved_at else OTHER_ORDER), expected)

    on_ranks(RANKS, run)


def test_a_distributed_checkpoint_has_them(tmp_path: Path, on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> None:
        whole, resumed = (Trainer(comm, combine="oktopk") for _ in range(2))
        for step in range(3):
            whole.step(gradients_of(0, step), REBUILT)
        dcp.save({"telegrad": RankState(whole.state)}, checkpoint_id=tmp_path, **ALONE)
        dcp.load({"telegrad": RankState(resumed.state)}, checkpoint_id=tmp_path, **ALONE)
        saved = whole.state.state_dict()["sums"]
        assert len(saved) == 2
        assert resumed.state.state_dict()["sums"] == saved
        load_resharded(resumed.state, tmp_path)
        assert resumed.state.state_dict()["sums"] == ()

    on_ranks(1, run)


def test_a_state_has_what_the_present_buckets_have_left(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> None:
        trainer = Trainer(comm, combine="oktopk")
        trainer.step(gradients_of(comm.rank, 0), ONE)
        (one,) = trainer.state.state_dict()["sums"]
        assert one["places"] == [["embedding", 0, 1200], ["hidden", 1216, 1000]]
        assert (one["combine"], one["calls"], sum(one["slices"])) == ("oktopk", 1, 2226)
        trainer.step(gradients_of(comm.rank, 1), REBUILT)
        first, second = trainer.state.state_dict()["sums"]
        assert (first["places"], second["places"]) == ([["hidden", 10, 1000]], [["embedding", 0, 1200]])
        assert (first["calls"], second["calls"]) == (1, 1)

    on_ranks(2, run)


def test_sums_of_another_collective_and_of_other_ranks_are_left_out(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> list[Any]:
        trainer, other = Trainer(comm, combine="oktopk"), Trainer(comm, combine="bounded")
        trainer.step(gradients_of(comm.rank, 0), ONE)
        saved = trainer.state.state_dict()
        other.state.load_state_dict(saved)
        assert other.state.state_dict()["sums"] == ()
        without = {name: value for name, value in saved.items() if name != "sums"}
        trainer.state.load_state_dict(without)  # as earlier versions saved it
        assert trainer.state.state_dict()["sums"] == ()
        dense = Trainer(comm)
        dense.state.load_state_dict(saved)
        assert dense.state.state_dict()["sums"] == ()
        return [saved]

    saved = [outcome[0] for outcome in on_ranks(2, run)]
    assert [one["sums"] for one in reshard(saved, 3)] == [(), (), ()]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda sums: "nothing", r"state\['sums'\] is a str: it must come from state_dict\(\)"),
        (lambda sums: 3, r"state\['sums'\] is a int"),
        (lambda sums: [{}], r"state\['sums'\]\[0\] has no places of parameters"),
        (lambda sums: [{**sums[0], "places": [["a", "b", 1]]}], r"state\['sums'\]\[0\] has no places of parameters"),
        (lambda sums: [{**sums[0], "k": "three"}], r"state\['sums'\]\[0\]: k='three'"),
        (lambda sums: [{**sums[0], "threshold": -1.0}], r"state\['sums'\]\[0\]: state\['threshold'\] is -1.0"),
    ],
    ids=["text", "number", "empty", "places", "k", "threshold"],
)
def test_damaged_sums_are_refused_and_change_nothing(
    damage: Callable[[Any], Any], said: str, on_ranks: OnRanks
) -> None:
    def run(comm: Communicator) -> None:
        trainer = Trainer(comm, combine="oktopk")
        trainer.step(gradients_of(comm.rank, 0), ONE)
        saved = trainer.state.state_dict()
        trainer.step(gradients_of(comm.rank, 1), ONE)
        before = copy.deepcopy(trainer.state.state_dict())
        with pytest.raises(ValueError, match=said):
            trainer.state.load_state_dict({**saved, "sums": damage(saved["sums"])})
        after = trainer.state.state_dict()
        assert (after["sums"], after["step"]) == (before["sums"], before["step"])
        for name in LARGE:
            entries = (one["compressor"]["parameters"][name]["residual"] for one in (after, before))
            np.testing.assert_array_equal(*entries)

    on_ranks(1, run)
