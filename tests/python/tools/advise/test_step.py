"""The timeline of a training step: by hand, against merge plans, with selection and decompression."""

from __future__ import annotations

import pytest

from lab.common.architectures import architecture
from lab.common.literature import PAPER_NETWORKS, ring
from telegrad.cost.send_method import SendMethod
from telegrad.synchronizer import merge
from telegrad.synchronizer.trace import Trace
from telegrad.tools.advise.sending import SCHEMES, Cluster, PhasedWay, way_of
from telegrad.tools.advise.step import PLANS, StepGroup, interpolated, planned, simulate
from telegrad.tools.advise.workload import DEVICES, trace_of

K80 = PAPER_NETWORKS["k80-10gbe"]
RESNET50 = trace_of(architecture("resnet50"), 0.6)
BY_HAND = Trace(("c", "b", "a"), (4, 8, 12), (1.0, 2.0, 3.0), 10.0)


def constant(seconds: float) -> SendMethod:
    return SendMethod("constant", lambda size: seconds)


def test_a_step_by_hand() -> None:
    step = simulate(BY_HAND, [StepGroup((0,), constant(4.0)), StepGroup((1, 2), constant(0.5))])
    first, second = step.groups
    assert first[1:7] == (4, 11.0, 11.0, 11.0, 15.0, 15.0)
    assert second[1:7] == (20, 16.0, 16.0, 16.0, 16.5, 16.5)
    assert (step.step_s, step.exposed_s, step.communicate_s) == (16.5, 0.5, 4.5)
    assert step.efficiency == pytest.approx(16 / 16.5)
    assert (step.select_s, step.decompress_s) == (0, 0)


def test_without_overlap_groups_leave_after_the_backward_pass() -> None:
    step = simulate(BY_HAND, [StepGroup((0,), constant(4.0)), StepGroup((1, 2), constant(0.5))], overlap=False)
    assert [one.start_s for one in step.groups] == [16.0, 20.0]
    assert step.step_s == 20.5


def test_selection_holds_the_backward_pass_up_and_decompression_waits_for_its_end() -> None:
    way = PhasedWay("picked", lambda size: 1.5, lambda size: 0.25, lambda size: 0.5)
    step = simulate(BY_HAND, [StepGroup((0,), way), StepGroup((1, 2), way)])
    first, second = step.groups
    assert first[2:7] == (11.0, 11.25, 11.25, 12.25, 17.0)  # 16 s of passes, 0.25 s of selection, twice
    assert second[2:7] == (16.25, 16.5, 16.5, 17.5, 18.0)
    assert (step.select_s, step.communicate_s, step.decompress_s) == (0.5, 2.0, 1.0)
    assert step.exposed_s == 2.0


def test_groups_need_not_be_neighbours() -> None:
    step = simulate(BY_HAND, [StepGroup((0, 2), constant(1.0)), StepGroup((1,), constant(1.0))])
    assert [(one.size, one.ready_s) for one in step.groups] == [(8, 13.0), (16, 16.0)]


def test_an_empty_trace_takes_its_forward_pass() -> None:
    empty = Trace((), (), (), 1.0)
    assert simulate(empty, []).step_s == 1.0
    assert simulate(Trace((), (), (), 0.0), []).efficiency == 1.0
    for plan in PLANS:
        assert planned(empty, plan, constant(1.0)) in ([], [StepGroup((), constant(1.0))])


@pytest.mark.parametrize("groups", [[(0,)], [(0, 1), (1, 2)], [(0, 1, 2, 3)]], ids=["missing", "twice", "beyond"])
def test_each_gradient_is_in_one_group(groups: list[tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match="groups must hold each of the positions 0 to 2 once"):
        simulate(BY_HAND, [StepGroup(one, constant(1.0)) for one in groups])


@pytest.mark.parametrize("name", ["wfbp", "single", "fixed", "greedy"])
@pytest.mark.parametrize("ranks", [4, 64, 1024])
def test_dense_steps_are_those_of_merge_plans(name: str, ranks: int) -> None:
    cost = ring(ranks, K80)
    plan = getattr(merge, name)(RESNET50.sizes, RESNET50.backward_times, cost=cost)
    step = simulate(RESNET50, planned(RESNET50, name, SendMethod("dense", cost)))
    assert step.step_s == pytest.approx(RESNET50.forward_s + plan.finish_s, rel=1e-12)
    assert step.exposed_s == pytest.approx(plan.exposed_s, abs=1e-12)
    assert [one.start_s - RESNET50.forward_s for one in step.groups] == pytest.approx(
        [slot.start_s for slot in plan.timeline]
    )


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("ranks", [2, 16, 100, 4096])
def test_optimal_is_never_behind(scheme: str, ranks: int) -> None:
    trace = trace_of(architecture("googlenet"), 0.1)
    way = way_of(scheme, Cluster(ranks, K80), DEVICES["v100"], density=0.01)
    steps = {plan: simulate(trace, planned(trace, plan, way)).step_s for plan in PLANS}
    assert steps["optimal"] == min(steps.values())
    assert steps["optimal"] >= trace.compute_s


def test_optimal_with_linear_costs_is_exact() -> None:
    for ranks in (4, 64, 256):
        cost = ring(ranks, K80)
        found = simulate(RESNET50, planned(RESNET50, "optimal", SendMethod("dense", cost)))
        best = merge.optimal(RESNET50.sizes, RESNET50.backward_times, cost=cost)
        assert found.step_s == pytest.approx(RESNET50.forward_s + best.finish_s, rel=1e-12)


def test_optimal_with_selection_is_near_the_exact_one() -> None:
    trace = trace_of(architecture("googlenet"), 0.05)
    way = way_of("sparse", Cluster(16, K80), DEVICES["v100"], density=0.01)
    exact = merge.optimal(trace.sizes, trace.backward_times, cost=way.cost, delay=way.delay)
    best = simulate(trace, [StepGroup(one, way) for one in exact.groups]).step_s
    assert simulate(trace, planned(trace, "optimal", way)).step_s == pytest.approx(best, rel=0.01)


def test_an_unknown_plan_is_refused() -> None:
    with pytest.raises(ValueError, match="plan='best' is not known: use one of fixed, wfbp,"):
        planned(BY_HAND, "best", constant(1.0))


def test_interpolation_is_exact_for_straight_lines_and_asks_seldom() -> None:
    asked = []

    def cost(size: int) -> float:
        asked.append(size)
        return 3.0 + 2.0 * size

    line = interpolated(cost)
    for size in range(0, 100_000, 4):
        assert line(size) == pytest.approx(3.0 + 2.0 * size)
    assert len(set(asked)) < 80
