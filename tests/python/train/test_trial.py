"""Plans that are tried on the live job, of which the fastest is kept, alike on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from synchronised_net import assert_same, loss_of, model_of, reference, sgd

from telegrad import Communicator, Synchronizer
from telegrad.plan import merge
from telegrad.train import group_planning, step_planning
from telegrad.train.measured_timeline import MeasuredTimeline
from telegrad.train.trial import Trial, agreed_step_s

OnRanks = Callable[..., list[Any]]

PLANS = [merge.fixed([4, 4, 4], [1.0, 1.0, 1.0], cost=lambda _: 1.0, cap_mb=size / 2**20) for size in (4, 8, 12)]


@pytest.mark.parametrize(
    ("steps_s", "kept"),
    [([3.0, 2.0, 1.0], 2), ([1.0, 2.0, 3.0], 0), ([1.0, 0.99, 0.985], 0), ([1.0, 0.97, 0.9], 2), ([1.0, 0.5, 0.0], 0)],
    ids=["the last", "the first", "within 2 %", "beyond 2 %", "not all measured"],
)
def test_the_fastest_is_kept_if_it_is_well_ahead(steps_s: list[float], kept: int) -> None:
    trial = Trial(PLANS)
    for plan, step_s in zip(PLANS, steps_s, strict=True):
        assert not trial.is_over
        assert trial.plan is plan
        trial.note(step_s)
    assert trial.is_over
    assert trial.plan is PLANS[kept]


def test_one_plan_alone_is_kept_at_once() -> None:
    trial = Trial(PLANS[:1])
    assert trial.is_over
    assert trial.plan is PLANS[0]


def test_ranks_agree_on_the_slowest_of_them(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> list[float]:
        found = []
        for silent in (None, 1):
            now = [0.0]
            timeline = MeasuredTimeline([4], clock=lambda now=now: now[0])
            for _ in range(0 if comm.rank == silent else 5):
                timeline.begin()
                timeline.ready(0)
                timeline.launched()
                timeline.backward_over()
                now[0] += 1.0 + comm.rank
                timeline.close([now[0]])
            found.append(agreed_step_s(comm, timeline))
        return found

    assert on_ranks(3, run) == [[3.0, 0.0]] * 3


@pytest.mark.parametrize(("fastest", "groups"), [(4, 4), (1, 1), (2, 2)])
def test_a_synchronizer_tries_simple_plans_and_keeps_the_fastest(
    on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch, fastest: int, groups: int
) -> None:
    """``fastest``: with so many groups steps take least. Planned are four groups of the model's four parameters."""
    monkeypatch.setattr(group_planning, "measured_group_cost", lambda *_, **__: lambda size: (1e3 * size) ** 2)
    monkeypatch.setattr(group_planning, "group_cost_while_computing", lambda *_, **__: lambda _: 0.0)
    monkeypatch.setattr(group_planning, "_RIVALS", (merge.single, halves))
    monkeypatch.setattr(
        step_planning, "agreed_step_s", lambda _, timeline: 1.0 if len(timeline._sizes) == fastest else 2.0
    )
    steps = 20
    expected = reference(2, steps)

    def run(comm: Communicator) -> list[int]:
        model = model_of(0)
        optimizer = sgd(model)
        sync = Synchronizer(model, comm, warmup_steps=3, replan_factor=None)
        counts = []
        for step in range(steps):
            optimizer.zero_grad()
            loss_of(model, step, comm.rank).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            counts.append(len(sync.groups))
        assert_same(model, expected)
        assert sync.plan is not None
        assert len(sync.plan.groups) == groups
        sync.close()
        return counts

    first, second = on_ranks(2, run)
    assert first == second
    assert first == [1, 1, *[4] * 6, *[1] * 3, *[2] * 3, *[groups] * 6]


def halves(sizes: Any, backward_times: Any, *, cost: Any) -> Any:
    return merge.fixed(sizes, backward_times, cost=cost, cap_mb=sum(sizes) / 2**20, first_mb=0.0)


def test_only_auto_tries(on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_planning, "measured_group_cost", lambda *_, **__: lambda size: (1e3 * size) ** 2)
    monkeypatch.setattr(group_planning, "group_cost_while_computing", lambda *_, **__: lambda _: 0.0)

    def run(comm: Communicator) -> list[int]:
        model = model_of(0)
        sync = Synchronizer(model, comm, plan="optimal", warmup_steps=3)
        counts = []
        for step in range(12):
            model.zero_grad()
            torch.manual_seed(step)
            loss_of(model, step, comm.rank).backward()  # type: ignore[no-untyped-call]
            counts.append(len(sync.groups))
        return counts

    assert on_ranks(2, run) == [[1, 1, *[4] * 10]] * 2
