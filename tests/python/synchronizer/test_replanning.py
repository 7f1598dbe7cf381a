"""When a Synchronizer plans again: the decision on numbers in hand, and averages that stay right across it."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable

import pytest
import torch
from synchronised_net import Net, OnRanks, assert_same, loss_of, model_of, reference, sgd
from torch import Tensor
from varied_options import objects_of

from telegrad import AutoPlan, Communicator, Synchronizer
from telegrad.synchronizer import group_planning, merge, step_planning
from telegrad.synchronizer.measured_timeline import MeasuredTimeline
from telegrad.synchronizer.replanning import Replanning, Times, agreed_times, departure

PLAN = merge.single([1000], [0.1], cost=lambda _: 0.04)
EXPECTED = Times(0.1, 0.04)


def test_a_plan_expects_its_own_times() -> None:
    assert Times.of_plan(PLAN) == EXPECTED


@pytest.mark.parametrize(
    ("measured", "factor"),
    [
        (Times(0.1, 0.04), 1.0),
        (Times(0.104, 0.042), 1.0),  # less than a twentieth of the pass
        (Times(0.2, 0.04), 2.0),
        (Times(0.1, 0.16), 4.0),
        (Times(0.1, 0.02), 2.0),
        (Times(0.025, 0.08), 4.0),
        (Times(0.1, 0.0), math.inf),
    ],
    ids=["equal", "close", "backward", "network", "faster network", "both", "no network"],
)
def test_by_which_factor_times_have_left_what_was_expected(measured: Times, factor: float) -> None:
    assert departure(measured, EXPECTED) == pytest.approx(factor)


def test_sums_that_were_free_may_begin_to_cost() -> None:
    assert departure(Times(0.1, 0.004), Times(0.1, 0.0)) == 1.0
    assert departure(Times(0.1, 0.04), Times(0.1, 0.0)) == math.inf


def looks(replanning: Replanning, measured: Times, count: int) -> list[bool]:
    return [replanning.look(measured) for _ in range(count)]


def test_two_looks_in_a_row_decide() -> None:
    replanning = Replanning(1.5)
    assert looks(replanning, Times(9.0, 9.0), 3) == [False] * 3  # there is no plan yet
    replanning.planned(PLAN)
    near, far = Times(0.12, 0.04), Times(0.1, 0.1)
    assert [replanning.look(one) for one in (near, far, near, far, far)] == [False, False, False, False, True]


def test_what_planning_again_did_not_mend_is_no_reason_to_do_it_again() -> None:
    replanning = Replanning(1.5)
    replanning.planned(PLAN)
    far = Times(0.1, 0.1)
    assert looks(replanning, far, 2) == [False, True]
    replanning.planned(PLAN)  # which predicts the same again
    assert not any(looks(replanning, far, 100))
    assert looks(replanning, Times(0.1, 0.3), 2) == [False, True]  # but this has changed since


def test_a_plan_that_was_mended_is_believed() -> None:
    replanning = Replanning(1.5)
    replanning.planned(PLAN)
    assert looks(replanning, Times(0.1, 0.1), 2) == [False, True]
    replanning.planned(merge.single([1000], [0.1], cost=lambda _: 0.1))
    assert not any(looks(replanning, Times(0.1, 0.12), 10))
    assert looks(replanning, EXPECTED, 2) == [False, True]


def test_noise_cannot_keep_a_job_planning() -> None:
    draw = random.Random(1)
    replanning, plans = Replanning(1.5), []
    replanning.planned(PLAN)
    for number in range(2000):
        if replanning.look(Times(0.1, 0.04 * draw.choice([0.1, 1.0, 10.0]))):
            plans.append(number)
            replanning.planned(PLAN)
    gaps = [after - before for before, after in itertools.pairwise(plans)]
    assert 3 < len(plans) < 40
    assert all(gap > min(2**number, 64) for number, gap in enumerate(gaps))


def test_ranks_agree_on_times(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> list[Times | None]:
        own = [(1.0, 5.0), (2.0, 3.0), None][comm.rank]
        return [agreed_times(comm, own), agreed_times(comm, None)]

    assert on_ranks(3, run) == [[Times(2.0, 3.0), None]] * 3


Cost = Callable[[int], float]


def scripted(monkeypatch: pytest.MonkeyPatch, costs: list[Cost], times: list[tuple[float, float]]) -> list[list[int]]:
    """Sums cost what the next of ``costs`` says (the last one again), and passes take what the next of ``times`` says.
    Returns what is asked for: sums on rank 0, and looks on both ranks."""
    asked: list[list[int]] = [[], []]

    def measure(comm: Communicator, *, most_bytes: int) -> Cost:
        if comm.rank == 0:
            asked[0].append(most_bytes)
        comm.barrier()
        return costs[min(len(asked[0]), len(costs)) - 1]

    def totals(timeline: MeasuredTimeline, last: int) -> tuple[float, float]:
        asked[1].append(last)
        return times[min((len(asked[1]) - 1) // 2, len(times) - 1)]  # of two ranks

    monkeypatch.setattr(group_planning, "measured_group_cost", measure)
    monkeypatch.setattr(group_planning, "group_cost_while_computing", lambda *_, **__: lambda _: 0.0)
    monkeypatch.setattr(step_planning, "LOOK_EVERY", 2)
    monkeypatch.setattr(group_planning.GroupPlanner, "rivals", lambda *_: [])
    monkeypatch.setattr(MeasuredTimeline, "totals", totals)
    return asked


def slow_to_begin(size: int) -> float:
    """One message is best."""
    return 1e6


def slow_when_long(size: int) -> float:
    """Many messages are best."""
    return (1e3 * size) ** 2


def test_averages_stay_right_across_another_plan(on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = scripted(monkeypatch, [slow_to_begin, slow_when_long], [(1.0, 1.0)])
    steps = 30
    expected = reference(2, steps)

    def run(comm: Communicator) -> tuple[list[int], list[Tensor]]:
        model = model_of(0)
        optimizer = sgd(model)
        sync = Synchronizer(model, comm, plan=AutoPlan(after=3))
        counts = []
        for step in range(steps):
            optimizer.zero_grad()
            loss_of(model, step, comm.rank).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            counts.append(len(sync.groups))
        assert_same(model, expected)
        assert sync.replans == 1
        # A plan at the end of pass 3, once more at 6; looks at 8 and 10; plans at 13 and 16; no more of them.
        assert counts[2:12] == [1] * 10
        assert counts[12:] == [4] * (steps - 12)
        assert "optimal" in str(sync.report())
        sync.close()
        return counts, [one.detach().clone() for one in model.parameters()]

    first, second = on_ranks(2, run)
    assert len(asked[0]) == 2
    assert first[0] == second[0]
    assert all(map(torch.equal, first[1], second[1]))


def test_what_is_no_longer_used_when_there_is_another_plan(on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    def loss(model: Net, step: int, rank: int) -> Tensor:
        return loss_of(model, step, rank, scaled=step < 9)

    scripted(monkeypatch, [slow_to_begin, slow_when_long], [(1.0, 1.0)])
    expected = reference(2, 20, loss)

    def run(comm: Communicator) -> None:
        model = model_of(0)
        optimizer = sgd(model)
        sync = Synchronizer(model, comm, plan=AutoPlan(after=3))
        for step in range(20):
            optimizer.zero_grad()
            loss(model, step, comm.rank).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        assert_same(model, expected)
        assert sync.replans == 1
        assert sync.trace is not None
        assert len(sync.trace.names) == 3
        assert len(sync.groups) == 3
        assert sync.groups[-1][-1] == "scale"

    on_ranks(2, run)


def test_times_as_predicted_change_nothing(on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = scripted(monkeypatch, [slow_to_begin], [(1.0, 1e6)])

    def run(comm: Communicator) -> int:
        model = model_of(0)
        sync = Synchronizer(model, comm, plan=AutoPlan(after=3))
        for step in range(20):
            model.zero_grad()
            loss_of(model, step, comm.rank).backward()  # type: ignore[no-untyped-call]
        return sync.replans

    assert on_ranks(2, run) == [0, 0]
    assert [len(one) for one in asked] == [1, 14]  # looks at 8, 10, … 20


@pytest.mark.parametrize(
    "options",
    [{"replan_factor": None}, {"plan": "greedy"}, {"plan": "optimal"}],
    ids=["None", "greedy", "optimal"],
)
def test_who_does_not_ask_for_it_is_left_alone(
    on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch, options: dict[str, str | None]
) -> None:
    asked = scripted(monkeypatch, [slow_to_begin], [(1.0, 1.0)])

    def run(comm: Communicator) -> None:
        model = model_of(0)
        sync = Synchronizer(model, comm, **objects_of(**{"compress": None, "plan_after": 3, **options}))  # type: ignore[arg-type]
        for step in range(14):
            model.zero_grad()
            loss_of(model, step, comm.rank).backward()  # type: ignore[no-untyped-call]
        assert sync.replans == 0
        assert sync.plan is not None
        assert sync.trace is not None

    on_ranks(2, run)
    assert [len(one) for one in asked] == [1, 0]
