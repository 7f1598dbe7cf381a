"""StepReport: what it says of numbers in hand, and what a Synchronizer reports."""

from __future__ import annotations

import json
from typing import Any

import pytest
from synchronised_net import NAMED, OnRanks, loss_of, model_of

from telegrad import AutoPlan, Communicator, Synchronizer
from telegrad.synchronizer import StepReport, merge
from telegrad.synchronizer.measured_timeline import MeasuredGroup, MeasuredPass

NAMES = [["head.weight", "head.bias"], ["body.<weight>"]]
PLAN = merge.of_cuts("optimal", [600, 424, 2048], [0.010, 0.010, 0.020], [2, 3], cost=lambda size: size * 1e-5)


def measured(*, backward_s: float = 0.040, exposed_s: float = 0.02048, network_s: float = 0.03072) -> MeasuredPass:
    finish_s = backward_s + exposed_s
    groups = (MeasuredGroup(1024, 0.020, 0.021, 0.031), MeasuredGroup(2048, backward_s, backward_s, finish_s))
    return MeasuredPass(7, groups, backward_s, exposed_s, network_s, 0.1)


def report(found: MeasuredPass | None = None, plan: Any = PLAN, waits_for: int | None = None) -> StepReport:
    scheme = plan.scheme if plan else "fixed"
    return StepReport.of(scheme, NAMES, found, plan, rank=1, ranks=4, waits_for=waits_for)


def test_measured_beside_predicted() -> None:
    one = report(measured())
    assert one.bytes == 3072
    assert (one.backward_s, one.exposed_s, one.network_s, one.step_s) == (0.040, 0.02048, 0.03072, 0.1)
    assert one.predicted_backward_s == PLAN.backward_s
    assert one.predicted_exposed_s == PLAN.exposed_s
    assert one.predicted_finish_s == PLAN.finish_s
    assert one.predicted_network_s == pytest.approx(0.03072)
    first = one.groups[0]
    assert (first.names, first.size) == (("head.weight", "head.bias"), 1024)
    assert (first.ready_s, first.launched_s, first.finish_s) == (0.020, 0.021, 0.031)
    slot = PLAN.timeline[0]
    assert (first.predicted_ready_s, first.predicted_start_s, first.predicted_finish_s) == tuple(slot[1:])


@pytest.mark.parametrize(
    ("one", "said"),
    [
        (report(), "nothing is measured yet"),
        (report(measured()), "34% of the backward pass waits for the network: sums take 30.72 ms, the gradients 40.00"),
        (report(measured()), "The prediction is off by +0%."),
        (report(measured(exposed_s=0.001)), "2% of the backward pass waits for the network: communication is hidden"),
        (report(measured(exposed_s=0.08, network_s=0.09)), "no cut into groups hides them"),
        (report(measured(exposed_s=0.08, network_s=0.09)), "off by +98%: sums take 2.93 times what they took alone"),
        (report(measured(exposed_s=0.08, network_s=0.09)), "is busier than when it was measured"),
        (report(measured(exposed_s=0.002, network_s=0.01)), "was busier when it was measured"),
        (report(measured(backward_s=0.120)), "gradients take 3.00 times what they took when they were profiled; other"),
        (report(measured(backward_s=0.010)), "the processor was busier when it was profiled"),
        (report(measured(), None, 10), "There is no plan yet: it is made after backward pass 10."),
        (report(measured(), None), "Nothing was predicted"),
    ],
    ids=lambda value: value if isinstance(value, str) else "report",
)
def test_what_the_numbers_say(one: StepReport, said: str) -> None:
    assert said in one.suggestion


def test_the_table() -> None:
    text = str(report(measured()))
    lines = text.splitlines()
    assert lines[0] == ("rank 1 of 4 (this rank only), groups: optimal, 2 of them, 3.0 KiB; medians over 7 passes")
    assert lines[2].split() == ["backward", "pass", "40.00", "ms", "40.00", "ms"]
    assert lines[6].split() == ["step", "100.00", "ms", "-"]
    assert lines[8].split()[:6] == ["0", "2", "1.0", "20.00/20.00", "21.00/20.00", "31.00/30.24"]
    assert set(lines[8].split()[6]) == {".", "#"}
    assert lines[-1] == report(measured()).suggestion
    assert "21.00/- " in str(report(measured(), None))
    assert str(report()).endswith(report().suggestion)


def test_json_gives_the_same_report() -> None:
    for one in (report(), report(measured()), report(measured(), None, 10)):
        assert StepReport.from_json(one.to_json()) == one
        assert json.loads(one.to_json())["suggestion"] == one.suggestion


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "this is no report of a step"),
        (json.dumps({"format": "telegrad-step-report", "version": 9}), "this report has version 9"),
        (json.dumps({"format": "telegrad-step-report", "version": 1}), "this report is damaged"),
        (json.dumps({"format": "telegrad-step-report", "version": 1, "groups": [{}]}), "this report is damaged"),
    ],
    ids=["no report", "version", "empty", "group"],
)
def test_what_is_no_report_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        StepReport.from_json(text)


def test_a_synchronizer_reports_before_and_with_a_plan(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> StepReport:
        model = model_of(0)
        sync = Synchronizer(model, comm, plan=AutoPlan(after=4))
        reports = []
        for step in range(7):
            reports.append(sync.report())
            model.zero_grad()
            loss_of(model, step, comm.rank).backward()  # type: ignore[no-untyped-call]
        reports.append(sync.report())
        assert [one.passes for one in reports] == [0, 0, 0, 1, 0, 0, 0, 1]
        assert "no plan yet: it is made after backward pass 4" in reports[3].suggestion
        assert reports[3].scheme == "fixed"
        last = reports[-1]
        assert sync.plan is not None
        assert (last.scheme, last.predicted_finish_s) == ("optimal", sync.plan.finish_s)
        assert (last.rank, last.ranks, last.of_slowest) == (comm.rank, 2, False)
        assert [[*one.names] for one in last.groups] == sync.groups
        slowest = sync.report(slowest=True)
        sync.close()
        return slowest

    first, second = on_ranks(2, run)
    assert first == second
    assert first.of_slowest
    assert "the rank whose step takes longest" in str(first)


@pytest.mark.parametrize(("plan", "scheme"), [("wfbp", "wfbp"), (NAMED, "named")], ids=["wfbp", "named"])
def test_groups_that_no_times_made(on_ranks: OnRanks, plan: Any, scheme: str) -> None:
    def run(comm: Communicator) -> StepReport:
        model = model_of(0)
        sync = Synchronizer(model, comm, plan=plan)
        for step in range(3):
            model.zero_grad()
            loss_of(model, step, comm.rank).backward()  # type: ignore[no-untyped-call]
        return sync.report()

    (one,) = on_ranks(1, run)
    assert (one.scheme, one.passes) == (scheme, 1)
    assert "Nothing was predicted" in one.suggestion
