"""A Synchronizer that sends all values in fewer bits: against the same sums and residuals made by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from given_gradients import LARGE, NAMED, SHAPES, Rank, given, gradients_of, sgd
from synchronised_net import OnRanks
from torch import Tensor

from telegrad import Communicator
from telegrad.cost.send_method import SendMethod
from telegrad.synchronizer import group_planning

STEPS = 6
DENSE = tuple(name for name in SHAPES if name not in LARGE)


@pytest.mark.parametrize("wire", ["bf16", "int8", "qsgd8", "qsgd4"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_as_by_hand(on_ranks: OnRanks, ranks: int, wire: str) -> None:
    """The average of gradient + residual in that wire, and its error as the next residual; small ones as they are."""

    def run(comm: Communicator) -> None:
        by_hand = comm.split(0, comm.rank)
        assert by_hand is not None
        rank = Rank(comm, plan="single", compress="quantised", formats=wire)
        order = [name for name in rank.sync.groups[0] if name in LARGE]
        waits = torch.zeros(sum(torch.Size(SHAPES[name]).numel() for name in LARGE))
        for step in range(STEPS):
            gradients = {name: one / 7 for name, one in gradients_of(comm.rank, step).items()}
            averages = rank.step(gradients)
            x = torch.cat([gradients[name].flatten() for name in order]) + waits
            by_hand.all_reduce(x, "avg", wire=wire, error=waits)
            assert torch.equal(x, torch.cat([averages[name].flatten() for name in order]))
            waiting = rank.waiting()
            assert torch.equal(waits.double(), torch.cat([waiting[name].flatten() for name in order]))
            for name in DENSE:
                exact = sum(gradients_of(other, step)[name] / 7 for other in range(ranks)) / ranks
                torch.testing.assert_close(averages[name], exact, rtol=1e-5, atol=1e-4)
        assert waits.any() or ranks == 1
        assert rank.sync.stats is not None
        assert rank.sync.stats.selected == 0
        by_hand.close()

    on_ranks(ranks, run)


@pytest.mark.parametrize("chosen", ["sparse", "int8", "dense"])
def test_the_plan_chooses(on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch, chosen: str) -> None:
    """And what waits survives the change from one way to another."""

    def ways(*_: object, **__: object) -> list[SendMethod]:
        return [
            SendMethod(name, lambda size, name=name: 1.0 if name == chosen else 2.0)
            for name in ("dense", "sparse", "int8")
        ]  # type: ignore[misc]

    monkeypatch.setattr(group_planning, "measured_ways", ways)

    def run(comm: Communicator) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        rank = Rank(comm, compress="cheapest", formats="int8", plan_after=3)
        sent = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
        for step in range(9):
            if step == 7:
                rank.sync._set_groups(NAMED, ["sparse", "int8"])
            for name, one in rank.step(gradients_of(comm.rank, step)).items():
                sent[name] += one
            if step == 4:
                assert rank.sync.plan is not None
                assert {*rank.sync.plan.ways} == {chosen}
                assert any(one.any() for one in rank.waiting().values()) == (chosen != "dense")
        return sent, rank.waiting()

    results = on_ranks(2, run)
    for name, whole in given(2, 9).items():
        found = 2 * results[0][0][name] + sum(waiting[name] for _, waiting in results if name in waiting)
        torch.testing.assert_close(found, whole, rtol=0, atol=0.5)
        assert torch.equal(results[0][0][name], results[1][0][name])


def test_the_warm_up_is_dense_and_a_state_goes_on(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> None:
        options: dict[str, Any] = {"plan": "fixed", "compress": "quantised", "formats": ["int8", "bf16"]}
        rank = Rank(comm, warmup_steps=2, **options)
        for step in range(2):
            rank.step(gradients_of(comm.rank, step))
            assert not any(one.any() for one in rank.waiting().values())
        rank.step(gradients_of(comm.rank, 2))
        assert any(one.any() for one in rank.waiting().values())
        state = rank.sync.state_dict()
        expected = [rank.step(gradients_of(comm.rank, step)) for step in (3, 4)]
        rank.sync.load_state_dict(state)
        for step, averages in zip((3, 4), expected, strict=True):
            again = rank.step(gradients_of(comm.rank, step))
            assert all(torch.equal(again[name], one) for name, one in averages.items())

    on_ranks(2, run)


def test_momentum_is_corrected_before_rounding(on_ranks: OnRanks) -> None:
    """What is sent is the velocity, of which bf16 loses nothing here."""

    def run(comm: Communicator) -> None:
        rank = Rank(comm, plan="single", compress="quantised", formats="bf16", optimizer=sgd, momentum=0.5)
        velocity = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        for step in range(3):
            gradients = {name: one.sign() for name, one in gradients_of(0, step).items()}
            for name, one in rank.step(gradients).items():
                velocity[name] = 0.5 * velocity[name] + gradients[name]
                assert torch.equal(one, velocity[name])

    on_ranks(1, run)


def test_values_that_bfloat16_cannot_take(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> None:
        with pytest.raises(TypeError, match=r"values=\('int8',\) is for float32 gradients, and that of 'embedding'"):
            Rank(comm, torch.bfloat16, compress="cheapest", formats="int8")

    on_ranks(1, run)
