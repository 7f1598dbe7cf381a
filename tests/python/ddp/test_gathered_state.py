"""GatheredState: what all ranks have not sent yet, in a checkpoint that rank 0 writes."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from handmade_buckets import LARGE, ONE, Trainer, given, gradients_of, plain_sgd

from telegrad import Communicator, LowRank
from telegrad.ddp import GatheredState, RankState

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dense": {"compress": None},
    "momentum": {"momentum": 0.5, "optimizer": plain_sgd},
    "oktopk": {"combine": "oktopk"},
    "low rank": {"compress": LowRank(2, 100)},
}


def trained(comm: Communicator, options: dict[str, Any], steps: range) -> Trainer:
    trainer = Trainer(comm, **options)
    for step in steps:
        trainer.step(gradients_of(comm.rank, step), ONE)
    return trainer


def written_and_read(saved: list[dict[str, Any]]) -> dict[str, Any]:
    assert saved[1:] == [{}] * (len(saved) - 1), "rank 0 alone writes"
    file = io.BytesIO()
    torch.save(saved[0], file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("options", OPTIONS)
def test_as_many_ranks_go_on_bitwise(on_ranks: Callable[..., list[Any]], options: str) -> None:
    def first(comm: Communicator) -> Any:
        trainer = trained(comm, OPTIONS[options], range(4))
        saved = GatheredState(trainer.state).state_dict()
        return saved, trainer.step(gradients_of(comm.rank, 4), ONE), trainer.memory()

    saved, averages, memories = zip(*on_ranks(3, first), strict=True)
    read = written_and_read(list(saved))

    def second(comm: Communicator) -> Any:
        trainer = Trainer(comm, **OPTIONS[options])
        GatheredState(trainer.state).load_state_dict(read)
        assert trainer.state.step == 4
        return trainer.step(gradients_of(comm.rank, 4), ONE), trainer.memory()

    for rank, (average, memory) in enumerate(on_ranks(3, second)):
        for name, values in averages[rank].items():
            np.testing.assert_array_equal(average[name], values)
        np.testing.assert_equal(memory, memories[rank])


def test_another_number_of_ranks_shares_what_waits(on_ranks: Callable[..., list[Any]]) -> None:
    def first(comm: Communicator) -> Any:
        trainer = Trainer(comm)
        sums = dict.fromkeys(LARGE, 0.0)
        for step in range(4):
            averages = trainer.step(gradients_of(comm.rank, step), ONE)
            sums = {name: sums[name] + 3.0 * averages[name].astype(np.float64) for name in LARGE}
        return GatheredState(trainer.state).state_dict(), sums

    saved, sums = zip(*on_ranks(3, first), strict=True)
    read = written_and_read(list(saved))

    def second(comm: Communicator) -> Any:
        trainer = Trainer(comm)
        GatheredState(trainer.state).load_state_dict(read)
        return {name: trainer.waiting(name) for name in LARGE}

    shares = on_ranks(2, second)
    for name in LARGE:
        whole = sum(share[name] for share in shares) + sums[0][name]
        np.testing.assert_allclose(whole, given(name, 3, 4), rtol=1e-6, atol=1e-3)


@pytest.mark.parametrize("state", [None, {}, {"ranks": []}, {"ranks": {}}])
def test_what_is_no_such_state(local: Callable[..., list[Communicator]], state: Any) -> None:
    trainer = Trainer(local(1)[0])
    with pytest.raises(ValueError, match="state has no 'ranks'"):
        GatheredState(trainer.state).load_state_dict(state)


@pytest.mark.parametrize("wrapper", [GatheredState, RankState])
def test_only_what_has_residuals_is_wrapped(wrapper: Any) -> None:
    with pytest.raises(TypeError, match="state is a dict: give the DDPState, Synchronizer, ReplicaSynchronizer or"):
        wrapper({"rank": 0})


def test_shards_of_a_replica_are_not_gathered_to_rank_0() -> None:
    state: Any = type("ReplicaSynchronizer", (), {"shard": (0, 2)})()
    with pytest.raises(TypeError, match=r"state is a ReplicaSynchronizer.*save a RankState"):
        GatheredState(state)
