"""Plans that are tried on the live job, of which the fastest is kept, alike on all ranks."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hand_clock import HandClock
from synchronised_net import assert_same, loss_of, model_of, reference, sgd

from telegrad import AutoPlan, Communicator, Synchronizer
from telegrad.synchronizer import group_planning, merge, step_planning
from telegrad.synchronizer.measured_timeline import MeasuredTimeline
from telegrad.synchronizer.replanning import Replanning, Trial, agreed_step_s

OnRanks = Callable[..., list[Any]]

PLANS = [merge.fixed([4, 4, 4], [1.0, 1.0, 1.0], cost=lambda _: 1.0, cap_mb=size / 2**20) for size in (4, 8, 12)]


def tried(trial: Trial, step_s: Callable[[int], float]) -> list[int]:
    """The plans in the order of their turns, each of which took what ``step_s`` says of it."""
    turns = []
    while not trial.is_over:
        turns.append(PLANS.index(trial.plan))
        trial.note(step_s(turns[-1]))
    return turns


@pytest.mark.parametrize(
    ("steps_s", "kept"),
    [
        ([3.0, 2.0, 1.0], 2),
        ([1.0, 2.0, 3.0], 0),
        ([1.0, 0.996, 0.992], 0),
        ([1.0, 0.97, 0.98], 1),
        ([1.0, 0.5, 0.0], 0),
    ],
    ids=["the last", "the first", "within 1 %", "beyond 1 %", "not all measured"],
)
def test_the_fastest_is_kept_if_it_is_well_ahead(steps_s: list[float], kept: int) -> None:
    trial = Trial(PLANS)
    tried(trial, steps_s.__getitem__)
    assert trial.plan is PLANS[kept]


def test_turns_are_in_alternating_order_and_slow_plans_get_no_more() -> None:
    assert tried(Trial(PLANS, rounds=3), lambda _: 1.0) == [0, 1, 2, 2, 1, 0, 0, 1, 2]
    assert tried(Trial(PLANS, rounds=3), [1.0, 2.0, 1.0].__getitem__) == [0, 1, 2, 2, 1, 0, 0, 2]
    assert tried(Trial(PLANS), [1.0, 2.0, 3.0].__getitem__) == [0, 1, 2, 2, 1, 0]
    # A twelfth is too little after two rounds, and enough after four.
    assert tried(Trial(PLANS[:2]), [1.0, 1.08].__getitem__) == [0, 1, 1, 0, 0, 1, 1, 0]


def test_a_machine_that_grows_slower_does_not_decide() -> None:
    """By 3 % with each turn: the last plan of a round would look 6 % slower than the first."""
    slower = (1.03**turn for turn in itertools.count())
    trial = Trial(PLANS)
    tried(trial, lambda plan: next(slower) * [1.0, 1.0, 0.97][plan])
    assert trial.plan is PLANS[2]


def test_one_disturbance_does_not_decide() -> None:
    turns = itertools.count()
    trial = Trial(PLANS)
    tried(trial, lambda plan: [1.0, 0.96, 1.0][plan] * (10.0 if next(turns) == 4 else 1.0))  # round 2, plan 1
    assert trial.plan is PLANS[1]


def test_a_round_that_was_not_measured_is_left_out() -> None:
    turns = itertools.count()
    trial = Trial(PLANS)
    order = tried(trial, lambda plan: [1.0, 1.0, 0.5][plan] if next(turns) != 2 else 0.0)
    assert order == [0, 1, 2, 0, 1, 2, 2, 1, 0]
    assert trial.plan is PLANS[2]


def noisy(draw: np.random.Generator) -> Callable[[float], float]:
    """Steps of a busy machine by what they take on an idle one: it is slower for a while, by 10 %, each step differs by
    as much, and one in twenty is held up."""
    slow = 0.0

    def step_s(alone_s: float) -> float:
        nonlocal slow
        slow = 0.97 * slow + 0.024 * draw.standard_normal()
        held_up = draw.exponential() if draw.random() < 0.05 else 0.0
        return float(alone_s * np.exp(slow + 0.1 * draw.standard_normal()) * (1 + held_up))

    return step_s


def turn_s(step_s: Callable[[float], float], alone_s: list[float], plan: int) -> float:
    return float(np.mean([step_s(alone_s[plan]) for _ in range(4)]))


def test_plans_in_turn_are_told_apart_where_one_after_the_other_they_are_not() -> None:
    """Three plans, one of which is 10 % faster, on a noisy machine: as many steps of each in one block, by the median
    of the same means, would take a slower one more often."""
    draw = np.random.default_rng(3)
    missed, missed_in_blocks = 0, 0
    for number in range(150):
        alone_s = [1.0, 1.0, 1.0]
        alone_s[number % 3] = 0.9
        trial = Trial(PLANS)
        turns = tried(trial, functools.partial(turn_s, noisy(draw), alone_s))
        missed += trial.plan is not PLANS[number % 3]
        of_turn = functools.partial(turn_s, noisy(draw), alone_s)
        blocks = [np.median([of_turn(plan) for _ in range(len(turns) // 3)]) for plan in range(3)]
        missed_in_blocks += int(np.argmin(blocks)) != number % 3
    assert missed <= 20
    assert missed_in_blocks > 2 * missed


def test_one_plan_alone_is_kept_at_once() -> None:
    trial = Trial(PLANS[:1])
    assert trial.is_over
    assert trial.plan is PLANS[0]


def test_ranks_agree_on_the_slowest_of_them(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> list[float]:
        found = []
        for silent in (None, 1):
            clock = HandClock()
            timeline = MeasuredTimeline([4], clock)
            for _ in range(0 if comm.rank == silent else 5):
                timeline.begin()
                timeline.ready(0)
                timeline.launched(0)
                timeline.backward_over()
                clock.now += 1.0 + comm.rank
                timeline.close([clock.now])
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
    steps = 26
    expected = reference(2, steps)

    def run(comm: Communicator) -> list[int]:
        model = model_of(0)
        optimizer = sgd(model)
        sync = Synchronizer(model, comm, plan=AutoPlan(after=3, replan_factor=None))
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
    assert first == [1, 1, *[4] * 6, *[1] * 3, *[2] * 6, *[1] * 3, *[4] * 3, *[groups] * 3]


@pytest.mark.parametrize(("fastest", "timed"), [(4, 0), (1, 1)], ids=["timed before", "timed once more"])
def test_what_is_kept_is_predicted_from_times_in_its_own_groups(
    on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch, fastest: int, timed: int
) -> None:
    """``timed``: how often times are taken after the trial. Times before it are of passes with four groups."""
    monkeypatch.setattr(group_planning, "measured_group_cost", lambda *_, **__: lambda size: (1e3 * size) ** 2)
    monkeypatch.setattr(group_planning, "group_cost_while_computing", lambda *_, **__: lambda _: 0.0)
    monkeypatch.setattr(group_planning, "_RIVALS", (merge.single,))
    monkeypatch.setattr(
        step_planning, "agreed_step_s", lambda _, timeline: 1.0 if len(timeline._sizes) == fastest else 2.0
    )
    planned: list[int] = []
    monkeypatch.setattr(Replanning, "planned", lambda _, plan: planned.append(len(plan.groups)))

    def run(comm: Communicator) -> list[tuple[bool, int]]:
        model = model_of(0)
        sync = Synchronizer(model, comm, plan=AutoPlan(after=3))
        seen, traces = [], []
        for step in range(24):
            model.zero_grad()
            loss_of(model, step, comm.rank).backward()  # type: ignore[no-untyped-call]
            seen.append((sync.is_settled, len(sync.groups)))
            if sync.trace not in traces:
                traces.append(sync.trace)
        assert sync.plan is not None
        assert sync.trace is not None
        assert sync.plan.backward_times == sync.trace.backward_times
        assert len([one for one in traces if one is not None]) == 2 + timed
        return seen

    first, second = on_ranks(2, run)
    assert first == second
    trial_over = 6 + 3 * 4
    settles = trial_over + 3 * timed - 1
    assert first == [
        *[(False, 1)] * 2,
        *[(False, 4)] * 6,
        *[(False, 1)] * 6,
        *[(False, 4)] * 3,
        *[(at >= settles, fastest) for at in range(trial_over - 1, 24)],
    ]
    assert planned == [fastest] * 2


def halves(sizes: Any, backward_times: Any, *, cost: Any) -> Any:
    return merge.fixed(sizes, backward_times, cost=cost, cap_mb=sum(sizes) / 2**20, first_mb=0.0)


def test_only_auto_tries(on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_planning, "measured_group_cost", lambda *_, **__: lambda size: (1e3 * size) ** 2)
    monkeypatch.setattr(group_planning, "group_cost_while_computing", lambda *_, **__: lambda _: 0.0)

    def run(comm: Communicator) -> list[int]:
        model = model_of(0)
        sync = Synchronizer(model, comm, plan=AutoPlan("optimal", after=3))
        counts = []
        for step in range(12):
            model.zero_grad()
            torch.manual_seed(step)
            loss_of(model, step, comm.rank).backward()  # type: ignore[no-untyped-call]
            counts.append(len(sync.groups))
        return counts

    assert on_ranks(2, run) == [[1, 1, *[4] * 10]] * 2


def test_turns_of_a_synchronizer_and_right_averages(on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_planning, "measured_group_cost", lambda *_, **__: lambda size: (1e3 * size) ** 2)
    monkeypatch.setattr(group_planning, "group_cost_while_computing", lambda *_, **__: lambda _: 0.0)
    monkeypatch.setattr(group_planning, "_RIVALS", (merge.single, halves))
    monkeypatch.setattr(step_planning, "Trial", functools.partial(Trial, rounds=3))
    seen: list[int] = []

    def agreed(comm: Communicator, timeline: MeasuredTimeline) -> float:
        if comm.rank == 0:
            seen.append(timeline.passes)
        return 1.0

    monkeypatch.setattr(step_planning, "agreed_step_s", agreed)
    steps = 38
    expected = reference(2, steps)

    def run(comm: Communicator) -> list[int]:
        model = model_of(0)
        optimizer = sgd(model)
        sync = Synchronizer(model, comm, plan=AutoPlan(after=3, replan_factor=None))
        counts = []
        for step in range(steps):
            assert sync.is_settled == (step >= 33)
            optimizer.zero_grad()
            loss_of(model, step, comm.rank).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            counts.append(len(sync.groups))
        assert_same(model, expected)
        sync.close()
        return counts

    turns = [count for count in (4, 1, 2, 2, 1, 4, 4, 1, 2) for _ in range(3)]
    assert on_ranks(2, run) == [[1, 1, 4, 4, 4, *turns, *[4] * 6]] * 2
    assert seen == [1] * 9
