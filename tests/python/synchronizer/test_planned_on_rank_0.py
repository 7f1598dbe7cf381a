"""Rank 0 makes the plan for all ranks, and what goes wrong there ends none of them in a wait."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from synchronised_net import OnRanks, loss_of, model_of

from telegrad import AutoPlan, Cheapest, Communicator, Synchronizer, TopK
from telegrad.cost.send_method import SendMethod
from telegrad.synchronizer import group_planning, shared_ways
from telegrad.synchronizer.compression import GroupCompression
from telegrad.synchronizer.group_planning import GroupPlanner
from telegrad.synchronizer.merge_plan import MergePlan
from telegrad.synchronizer.trace import Trace

TRACE = Trace(("a", "b", "c"), (40, 80, 120), (0.1, 0.2, 0.3), 0.1, "by hand")


def test_only_rank_0_searches_and_all_ranks_get_its_plan(on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_planning, "measured_group_cost", lambda *_, **__: lambda size: 0.01 + 1e-3 * size)
    monkeypatch.setattr(group_planning, "group_cost_while_computing", lambda *_, **__: lambda _: 0.0)
    searched: list[int] = []
    search = shared_ways.optimal

    def optimal(sizes: Sequence[int], *arguments: Any, **options: Any) -> MergePlan:
        searched.append(len(sizes))
        return search(sizes, *arguments, **options)

    monkeypatch.setattr(shared_ways, "optimal", optimal)

    def run(comm: Communicator) -> list[MergePlan]:
        planner = GroupPlanner("auto", None)
        planner.measure(comm, most_bytes=TRACE.bytes)
        plan = planner.plan(TRACE, comm, kept=None)
        return [plan, planner.plan(TRACE, comm, kept=plan), *planner.rivals(plan, TRACE, comm)]

    first, *others = on_ranks(3, run)
    assert searched == [3, 3]
    assert others == [first] * 2
    assert first[0] == search(TRACE.sizes, TRACE.backward_times, idle=lambda size: 0.01 + 1e-3 * size, busy=lambda _: 0)
    cuts = [plan.groups for plan in first[1:]]
    assert cuts[0] == first[0].groups  # what is kept
    assert len({*cuts}) == len(cuts) > 2


def test_ways_are_of_rank_0_too(on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    ways = [
        SendMethod("dense", lambda size: 1e-3 * size, busy=lambda size: 1e-3 * size),
        SendMethod("sparse", lambda size: 0.02 + 1e-4 * size, delay=lambda _: 0.01, beside=lambda _: 0.0),
    ]
    monkeypatch.setattr(group_planning, "measured_ways", lambda *_, **__: ways)
    searched: list[int] = []
    search = shared_ways.joint

    def joint(sizes: Sequence[int], *arguments: Any, **options: Any) -> MergePlan:
        searched.append(len(sizes))
        return search(sizes, *arguments, **options)

    monkeypatch.setattr(shared_ways, "joint", joint)

    def run(comm: Communicator) -> MergePlan:
        model = model_of(0)
        parameters = dict(model.named_parameters())
        of_model = GroupCompression(Cheapest(TopK(0.5, small_elements=5)), comm, parameters)
        trace = Trace((*parameters,), tuple(4 * one.numel() for one in parameters.values()), (0.1,) * 5, 0.1, "by hand")
        planner = GroupPlanner("auto", of_model)
        planner.measure(comm, most_bytes=trace.bytes)
        plan = planner.plan(trace, comm, kept=None)
        assert planner.rivals(plan, trace, comm) == []
        return plan

    first, second = on_ranks(2, run)
    assert searched == [5]
    assert first == second
    assert first.ways


@pytest.mark.parametrize(
    ("cost_s", "error", "said"),
    [(math.inf, ValueError, "must be finite and 0 or more"), (None, MemoryError, "no memory left")],
    ids=["a bad cost", "memory"],
)
def test_what_goes_wrong_on_rank_0_reaches_all(
    on_ranks: OnRanks,
    monkeypatch: pytest.MonkeyPatch,
    cost_s: float | None,
    error: type[Exception],
    said: str,
) -> None:
    def cost(_: int) -> float:
        if cost_s is None:
            raise MemoryError("no memory left")
        return cost_s

    monkeypatch.setattr(group_planning, "measured_group_cost", lambda *_, **__: cost)
    monkeypatch.setattr(group_planning, "group_cost_while_computing", lambda *_, **__: lambda _: 0.0)

    def run(comm: Communicator) -> None:
        model = model_of(0)
        sync = Synchronizer(model, comm, plan=AutoPlan(after=3))
        for step in range(2):
            loss_of(model, step, comm.rank).backward()  # type: ignore[no-untyped-call]
        with pytest.raises(error if comm.rank == 0 else RuntimeError, match=said):
            loss_of(model, 2, comm.rank).backward()  # type: ignore[no-untyped-call]
        assert sync.plan is None
        sync.close()

    on_ranks(2, run)
