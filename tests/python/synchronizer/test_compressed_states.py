"""States of a Synchronizer that compresses: training goes on from them, on as many ranks or on others."""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from given_gradients import LARGE, NAMED, SHAPES, Rank, given, gradients_of, sgd, total
from synchronised_net import OnRanks
from torch import Tensor

from telegrad import Communicator, LowRank
from telegrad.ddp import RankState, load_resharded, reshard
from telegrad.ddp.bucket import BucketLayout
from telegrad.synchronizer.compression import CompressedGroup

ALONE = {"no_dist": True} if "no_dist" in signature(dcp.save).parameters else {}  # torch 2.6 sees that itself


def layouts_of(rank: Rank) -> list[BucketLayout]:
    groups = [group for group in rank.sync._groups if isinstance(group, CompressedGroup)]
    return [layout for group in groups for layout in group._layouts.values()]


def test_a_state_goes_on_bitwise(on_ranks: OnRanks) -> None:
    for options in (
        {"select": "topk"},
        {"momentum": 0.9, "optimizer": sgd},
        {"select": "sampled"},
        {"combine": "oktopk"},
        {"combine": "oktopk", "values": "int8"},
        {"combine": "gtopk"},
        {"combine": "bounded"},
        {"compress": LowRank(2, 100)},
    ):

        def run(comm: Communicator, options: dict[str, Any] = options) -> None:
            first = Rank(comm, plan=NAMED, **options)
            for step in range(4):
                first.step(gradients_of(comm.rank, step))
            state = first.sync.state_dict()
            assert state["step"] == 4
            second = Rank(comm, plan=NAMED, **options)
            second.sync.load_state_dict(state)
            for step in range(4, 7):
                averages = [one.step(gradients_of(comm.rank, step)) for one in (first, second)]
                assert all(torch.equal(averages[0][name], averages[1][name]) for name in SHAPES)
            assert str(first.sync.state_dict()) == str(second.sync.state_dict())
            assert all(torch.equal(one, second.waiting()[name]) for name, one in first.waiting().items())

        on_ranks(2, run)


def test_a_state_is_loaded_while_a_parameter_is_frozen(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> None:
        first, second = (Rank(comm, plan=NAMED) for _ in range(2))
        for step in range(3):
            first.step(gradients_of(comm.rank, step))
        frozen = next(second.model.parameters())
        frozen.requires_grad_(False)
        second.sync.load_state_dict(first.sync.state_dict())
        assert not frozen.requires_grad
        frozen.requires_grad_(True)
        for step in range(3, 5):
            averages = [one.step(gradients_of(comm.rank, step)) for one in (first, second)]
            assert all(torch.equal(averages[0][name], averages[1][name]) for name in SHAPES)

    on_ranks(2, run)


def test_a_state_of_an_earlier_step_is_the_same_in_a_new_one(on_ranks: OnRanks) -> None:
    """Thresholds of sums are those of the state, not of the steps that are left behind."""

    def run(comm: Communicator) -> None:
        first, second = (Rank(comm, plan=NAMED, combine="oktopk") for _ in range(2))
        for step in range(3):
            first.step(gradients_of(comm.rank, step))
        state = first.sync.state_dict()
        for step in range(3, 5):
            first.step({name: 1.5 * one for name, one in gradients_of(comm.rank, step).items()})
        assert all(layout.topk is not None for layout in layouts_of(first))
        for one in (first, second):
            one.sync.load_state_dict(state)
        assert all(layout.topk is None for layout in layouts_of(first))
        for step in range(5, 8):
            averages = [one.step(gradients_of(comm.rank, step)) for one in (first, second)]
            assert all(torch.equal(averages[0][name], averages[1][name]) for name in SHAPES)

    on_ranks(2, run)


def test_sums_of_other_groups_are_found_anew(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> None:
        first, second = Rank(comm, plan=NAMED, combine="oktopk"), Rank(comm, plan="single", combine="oktopk")
        for step in range(3):
            first.step(gradients_of(comm.rank, step))
        state = first.sync.state_dict()
        assert [one["calls"] for one in state["sums"]] == [3] * len(state["sums"])
        assert {name for one in state["sums"] for name, *_ in one["places"]} == {*LARGE}
        second.sync.load_state_dict(state)
        second.step(gradients_of(comm.rank, 3))
        (of_all,) = second.sync.state_dict()["sums"]
        assert {name for name, *_ in of_all["places"]} == {*LARGE}
        assert of_all["calls"] == 1
        as_before = Rank(comm, plan=first.sync.groups, combine="oktopk")
        as_before.sync.load_state_dict(state)
        for step in range(3, 6):
            averages = [one.step(gradients_of(comm.rank, step)) for one in (first, as_before)]
            assert all(torch.equal(averages[0][name], averages[1][name]) for name in SHAPES)

    on_ranks(2, run)


def test_damaged_sums_change_nothing(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> None:
        rank = Rank(comm, plan=NAMED, combine="oktopk")
        rank.step(gradients_of(comm.rank, 0))
        saved = rank.sync.state_dict()
        rank.step(gradients_of(comm.rank, 1))
        before = str(rank.sync.state_dict())
        with pytest.raises(ValueError, match=r"state\['sums'\]\[0\] has no places of parameters"):
            rank.sync.load_state_dict({**saved, "sums": [{}]})
        assert str(rank.sync.state_dict()) == before

    on_ranks(1, run)


def test_other_numbers_of_ranks(on_ranks: OnRanks, tmp_path: Path) -> None:
    def train(comm: Communicator) -> tuple[list[dict[str, Tensor]], dict[str, Any]]:
        rank = Rank(comm, plan=NAMED)
        averages = [rank.step(gradients_of(comm.rank, step)) for step in range(4)]
        return averages, rank.sync.state_dict()

    results = on_ranks(2, train)
    states = reshard([state for _, state in results], 3)

    def go_on(comm: Communicator) -> dict[str, Tensor]:
        rank = Rank(comm, plan="wfbp")
        with pytest.raises(ValueError, match="state is of rank 0 of 2, but rank"):
            rank.sync.load_state_dict(results[0][1])
        rank.sync.load_state_dict(states[comm.rank])
        assert rank.sync.state_dict()["step"] == 4
        return rank.waiting()

    waiting = total(on_ranks(3, go_on))
    for name in LARGE:
        whole = 2 * total(results[0][0])[name] + waiting[name]
        torch.testing.assert_close(whole, given(2, 4)[name], rtol=0, atol=1e-2)

    def saved(comm: Communicator) -> None:
        rank = Rank(comm, plan=NAMED)
        rank.step(gradients_of(comm.rank, 0))
        dcp.save({"telegrad": RankState(rank.sync)}, checkpoint_id=tmp_path, **ALONE)
        other = Rank(comm, plan=NAMED)
        load_resharded(other.sync, tmp_path)
        assert all(torch.equal(one, other.waiting()[name]) for name, one in rank.waiting().items())

    on_ranks(1, saved)
