"""Residuals and velocities for another number of ranks: the sum over ranks is what it was."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from handmade_buckets import LARGE, ONE, REBUILT, SHAPES, Trainer, gradients_of, named, plain_sgd

from telegrad import Communicator
from telegrad.ddp import RankState, load_resharded, reshard

ALONE = {"no_dist": True} if "no_dist" in signature(dcp.save).parameters else {}  # torch 2.6 sees that itself

OnRanks = Callable[..., list[Any]]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"select": "topk", "values": "int8"},
    {"momentum": 0.9, "optimizer": plain_sgd},
    {"feedback": "steps", "optimizer": plain_sgd},
]


def sums_of(states: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Over all ranks, in float64."""
    sums = {}
    for group, kind in (("parameters", "residual"), ("velocities", "velocity")):
        for name in states[0]["compressor"].get(group, {}):
            entries = [state["compressor"][group][name] for state in states]
            sums[f"{kind} {name}"] = sum(entry[kind].double().numpy() * entry["unit"] for entry in entries)
    return sums


def assert_equal_sums(one: dict[str, np.ndarray], two: dict[str, np.ndarray]) -> None:
    assert one.keys() == two.keys()
    for name in one:
        np.testing.assert_allclose(one[name], two[name], rtol=1e-6, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("options", OPTIONS, ids=named)
def test_from_four_ranks_to_three_to_five(on_ranks: OnRanks, options: dict[str, Any]) -> None:
    """Trains on each; what is applied and what waits is in the end what was given."""
    states: list[dict[str, Any]] = []
    applied = {name: np.zeros(int(np.prod(shape))) for name, shape in SHAPES.items()}
    given = {name: np.zeros(int(np.prod(shape))) for name, shape in SHAPES.items()}
    before: dict[str, np.ndarray] = {}
    for first, ranks in ((0, 4), (7, 3), (14, 5)):

        def run(comm: Communicator, first: int = first) -> tuple[dict[str, Any], list[dict[str, np.ndarray]]]:
            trainer = Trainer(comm, **options)
            if states:
                trainer.state.load_state_dict(states[comm.rank])
                assert trainer.state.step == first
            loaded = trainer.state.state_dict()
            results = [trainer.step(gradients_of(comm.rank, step), REBUILT) for step in range(first, first + 7)]
            return trainer.state.state_dict(), [loaded, *results]  # type: ignore[list-item]

        if states:
            states[:] = reshard(reversed(states), ranks)
            assert_equal_sums(sums_of(states), before)
        outcomes = on_ranks(ranks, run)
        if before:
            assert_equal_sums(sums_of([results[0] for _, results in outcomes]), before)  # type: ignore[misc]
        states[:] = [state for state, _ in outcomes]
        before = sums_of(states)
        for name in applied:
            applied[name] += ranks * sum(result[name].astype(np.float64) for result in outcomes[0][1][1:])
            for rank in range(ranks):
                given[name] += sum(gradients_of(rank, step)[name] for step in range(first, first + 7))
    if "momentum" not in options:
        rate = 0.5 if "feedback" in options else 1.0
        for name in LARGE:
            np.testing.assert_allclose(rate * applied[name] + before[f"residual {name}"], rate * given[name], atol=0.1)


def _states(on_ranks: OnRanks, ranks: int = 2, **options: Any) -> list[dict[str, Any]]:
    def run(comm: Communicator) -> dict[str, Any]:
        trainer = Trainer(comm, **options)
        for step in range(3):
            trainer.step(gradients_of(comm.rank, step), ONE)
        return trainer.state.state_dict()

    return on_ranks(ranks, run)


def test_every_rank_gets_an_equal_share(on_ranks: OnRanks) -> None:
    states = _states(on_ranks)
    made = reshard(states, 3)
    for name in LARGE:
        total = sum(state["compressor"]["parameters"][name]["residual"].double() for state in states)
        for rank, state in enumerate(made):
            entry = state["compressor"]["parameters"][name]
            assert (state["rank"], state["world_size"], state["step"]) == (rank, 3, 3)
            assert (entry["threshold"], entry["calls"]) == (None, 0)
            torch.testing.assert_close(entry["residual"].double(), total / 3, rtol=1e-5, atol=1e-4)
    before = made[1]["compressor"]["parameters"]["hidden"]["residual"].clone()
    made[0]["compressor"]["parameters"]["hidden"]["residual"].fill_(0)
    assert torch.equal(made[1]["compressor"]["parameters"]["hidden"]["residual"], before)  # no memory in common


def test_the_last_share_has_what_dividing_rounds_away(on_ranks: OnRanks) -> None:
    """So the sum is off by no more than the rounding of one share."""
    states = _states(on_ranks, ranks=1)
    values = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    states[0]["compressor"]["parameters"]["hidden"]["residual"] = torch.from_numpy(values)
    made = [state["compressor"]["parameters"]["hidden"]["residual"].double() for state in reshard(states, 13)]
    error = np.abs(sum(share.numpy() for share in made) - values)
    assert (error <= np.abs(made[-1].numpy()) * 2.0**-24).all()


def test_ranks_may_have_residuals_in_different_units(on_ranks: OnRanks) -> None:
    """As where one rank has not used a parameter since the loss scale changed."""
    states = _states(on_ranks, momentum=0.9, optimizer=plain_sgd)
    before = sums_of(states)
    for group, kind in (("parameters", "residual"), ("velocities", "velocity")):
        states[1]["compressor"][group]["hidden"]["unit"] = 0.25
        states[1]["compressor"][group]["hidden"][kind] *= 4
    assert_equal_sums(sums_of(reshard(states, 3)), before)


def test_the_mean_may_be_kept_instead(on_ranks: OnRanks) -> None:
    states = _states(on_ranks, momentum=0.9, optimizer=plain_sgd)
    made = reshard(states, 6, keep="mean")
    old, new = sums_of(states), sums_of(made)
    for name in old:
        np.testing.assert_allclose(new[name] / 6, old[name] / 2, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (lambda states: states.pop(), ValueError, r"states are of ranks \[0\] of 2: give each rank's of one job once"),
        (lambda states: states.append(states[1]), ValueError, r"states are of ranks \[0, 1, 1\] of 2"),
        (lambda states: states.clear(), ValueError, "states is empty"),
        (lambda states: states[1].update(step=9), ValueError, r"steps 3 \(rank 0\) and 9 \(rank 1\)"),
        (lambda states: states[1]["compressor"].update(feedback="steps"), ValueError, "rank 0 and rank 1 have differ"),
        (lambda states: states[1]["compressor"]["parameters"].pop("hidden"), ValueError, "have different parameters"),
        (lambda states: states[0].pop("rank"), TypeError, "must be what DDPState.state_dict"),
    ],
)
def test_states_that_do_not_belong_together(
    on_ranks: OnRanks, damage: Callable[[Any], Any], error: type[Exception], message: str
) -> None:
    states = _states(on_ranks)
    damage(states)
    with pytest.raises(error, match=message):
        reshard(states, 3)


def test_bad_arguments(on_ranks: OnRanks) -> None:
    states = _states(on_ranks)
    with pytest.raises(ValueError, match="world_size=0 must be at least 1"):
        reshard(states, 0)
    with pytest.raises(ValueError, match="keep='all' does not exist: use one of sum, mean"):
        reshard(states, 2, keep="all")
    for no_list, kind in ((None, "NoneType"), (states[0], "dict")):
        with pytest.raises(TypeError, match=f"states is a {kind}: give a list of what state_dict"):
            reshard(no_list, 2)  # type: ignore[arg-type]


def test_the_state_of_another_rank_is_refused(on_ranks: OnRanks) -> None:
    states = _states(on_ranks)

    def run(comm: Communicator) -> None:
        trainer = Trainer(comm)
        trainer.state.load_state_dict(states[comm.rank])
        with pytest.raises(ValueError, match=rf"state is of rank {1 - comm.rank} of 2, but rank {comm.rank} of"):
            trainer.state.load_state_dict(states[1 - comm.rank])

    on_ranks(2, run)
    with pytest.raises(ValueError, match="state is of rank 0 of 2, but rank 0 of 1 loads it: .*telegrad.ddp.reshard"):
        on_ranks(1, lambda comm: Trainer(comm).state.load_state_dict(states[0]))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("options", OPTIONS, ids=named)
def test_a_checkpoint_of_one_process(on_ranks: OnRanks, tmp_path: Path, options: dict[str, Any]) -> None:
    """``torch.distributed.checkpoint`` without torch.distributed; with two ranks it is in ddp_program."""

    def run(comm: Communicator) -> None:
        one, two, three = (Trainer(comm, **options) for _ in range(3))
        for step in range(5):
            one.step(gradients_of(0, step), REBUILT)
        dcp.save({"telegrad": RankState(one.state)}, checkpoint_id=tmp_path, **ALONE)
        dcp.load({"telegrad": RankState(two.state)}, checkpoint_id=tmp_path, **ALONE)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            load_resharded(three.state, tmp_path)
        assert repr(two.state.state_dict()) == repr(one.state.state_dict())
        assert_equal_sums(sums_of([three.state.state_dict()]), sums_of([one.state.state_dict()]))
        for step in range(5, 9):
            expected = one.step(gradients_of(0, step), REBUILT)
            found = two.step(gradients_of(0, step), REBUILT)
            for name in SHAPES:
                np.testing.assert_array_equal(found[name], expected[name])
        with pytest.raises(ValueError, match="holds nothing under 'residuals': name what dcp.save was given"):
            load_resharded(three.state, tmp_path, key="residuals")
        with pytest.raises(ValueError, match="has no 'rank 0': it is of other ranks than these 1; .*load_resharded"):
            RankState(three.state).load_state_dict({"rank 3": one.state.state_dict()})

    on_ranks(1, run)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_of_a_state_with_nothing_compressed(on_ranks: OnRanks, tmp_path: Path) -> None:
    def run(comm: Communicator) -> None:
        one, two = (Trainer(comm, compress=None) for _ in range(2))
        one.step(gradients_of(0, 0), REBUILT)
        dcp.save({"telegrad": RankState(one.state)}, checkpoint_id=tmp_path, **ALONE)
        load_resharded(two.state, tmp_path)
        assert two.state.step == 1

    on_ranks(1, run)


def test_states_of_another_version_and_damaged_ones_are_refused() -> None:
    comms = Communicator.local(2)
    states = [Trainer(comm).state.state_dict() for comm in comms]
    with pytest.raises(ValueError, match="the state of rank 1 has version 7, not 1"):
        reshard([states[0], {**states[1], "version": 7}], 3)
    states[1]["compressor"]["parameters"][LARGE[0]]["residual"][3] = float("nan")
    with pytest.raises(
        ValueError, match=f"the residual of '{LARGE[0]}' of rank 1 holds NaN .* damaged, take an earlier"
    ):
        reshard(states, 3)
    for comm in comms:
        comm.close()
