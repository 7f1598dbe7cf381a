"""Plans of groups whose gradients are on a device: from the times of its streams, which a test says (fake_device.py),
and from what sums cost there; ranks are threads whose hosts never wait for a device."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from computing_device import ComputingRuntime, computed_on, model_on
from device_ranks import RANKS
from device_synchronizers import Each, Rank
from fake_device import DEVICE_TYPE, FakeStream
from nccl_stand_in import StandIn, give_group
from synchronised_net import NAMED, data, reference
from torch import Tensor, nn
from tunings import tuning_of

from telegrad import Communicator, Synchronizer
from telegrad.cost import DeviceTuning, Place, Tuning
from telegrad.cost.send_method import LinearCost
from telegrad.synchronizer import StepProfile, group_planning, merge, shared_ways, step_planning
from telegrad.synchronizer import cuda_groups as device_group
from telegrad.tuning.group_cost import timed_sizes

WIDTHS = {"d": 24, "c": 12, "b": 8, "a": 4}
"""Of layers, in the order of the backward pass, which ends with the first one."""

SIZES = tuple(4 * 4 * width for width in WIDTHS.values())
BACKWARD_S = {"d": 1e-3, "c": 4e-3, "b": 0.5e-3, "a": 2e-3}

CHEAP = LinearCost(1e-6, 1e-9)
"""Each gradient by itself is best."""

DEAR = LinearCost(2.2e-3, 1e-6)
"""Some groups are best, others than those of any simple rule."""


class Spend(torch.autograd.Function):
    """The identity, whose backward pass takes seconds of the stream's time."""

    @staticmethod
    def forward(context: Any, x: Tensor, device: ComputingRuntime, seconds: Callable[[], float]) -> Tensor:
        context.device, context.seconds = device, seconds
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        context.device.current_stream(torch.device(DEVICE_TYPE)).spend(context.seconds())
        return gradient, None, None


class Layers(nn.Module):
    """Whose gradients come one after the other, at the times that ``seconds`` says."""

    def __init__(self, device: ComputingRuntime, seconds: dict[str, float]) -> None:
        super().__init__()
        for name, width in reversed(WIDTHS.items()):
            self.register_parameter(name, nn.Parameter(torch.linspace(-1.0, 1.0, 4 * width).view(4, width)))
        self.device, self.seconds = device, seconds

    def forward(self, x: Tensor) -> Tensor:
        total = x.mean()
        for name in reversed(WIDTHS):
            weight = Spend.apply(self.get_parameter(name), self.device, lambda name=name: self.seconds[name])  # type: ignore[no-untyped-call]
            total = torch.tanh(total * weight.mean() + weight.square().mean())
        return total  # type: ignore[no-any-return]


Plans = Callable[..., list[Any]]


@pytest.fixture
def nccl(device: ComputingRuntime, comms: list[Communicator], streams: list[FakeStream]) -> StandIn:
    """Sums that take DEAR by the streams' clocks."""
    made = give_group(device, comms, streams, met=True)
    made.takes = DEAR
    return made


@pytest.fixture
def planned(on_each: Each, device: ComputingRuntime, comms: list[Communicator], nccl: StandIn) -> Plans:
    """``planned(function, …)``: ranks that know what sums cost. ``seconds``: of a rank's backward pass."""

    def run(
        function: Callable[[Rank], Any],
        *,
        cost: LinearCost | None = DEAR,
        seconds: Callable[[int], dict[str, float]] = lambda _: dict(BACKWARD_S),
        **options: Any,
    ) -> list[Any]:
        for comm in comms:
            comm.use(None if cost is None else tuned(cost))
        options = {"plan_after": 4, **options}
        return on_each(function, model_for=lambda rank: Layers(device, seconds(rank)), **options)

    return run


def tuned(nccl: LinearCost | None, device: str = "fake") -> Tuning:
    on_device = DeviceTuning(device, nccl, LinearCost(1.0, 1e-3), 0.0)
    place = Place("local", ((socket.gethostname(), RANKS),))
    return replace(tuning_of(place, 1000), on_device=on_device)


def passes(rank: Rank, count: int, *, first: int = 0) -> None:
    """Of which the device has come to the end before the next begins."""
    for step in range(first, first + count):
        rank.optimizer.zero_grad()
        rank.backward(step)
        rank.optimizer.step()
        rank.stream.synchronize()


def cuts(sync: Synchronizer) -> list[str]:
    return ["".join(group) for group in sync.groups]


def test_the_plan_is_that_of_the_devices_times_and_costs(planned: Plans, device: ComputingRuntime) -> None:
    best = merge.optimal(SIZES, [*BACKWARD_S.values()], cost=DEAR)
    simple = [rule(SIZES, [*BACKWARD_S.values()], cost=DEAR) for rule in (merge.single, merge.greedy, merge.wfbp)]
    assert best.groups not in [one.groups for one in simple]

    def train(rank: Rank) -> Any:
        before = device.host_waits
        passes(rank, 3)
        assert rank.sync.plan is None
        assert rank.sync.report().waits_for == 4
        passes(rank, 2, first=3)  # the device need not have told of the fourth when the host comes to its end
        plan, trace = rank.sync.plan, rank.sync.trace
        assert trace is not None
        assert trace.names == tuple(WIDTHS)
        assert trace.backward_times == pytest.approx([*BACKWARD_S.values()])
        assert plan == shared_ways.optimal(trace.sizes, trace.backward_times, idle=DEAR, busy=DEAR)
        assert plan.groups == best.groups
        assert [len(group) for group in rank.sync.groups] == [len(group) for group in best.groups]
        assert device.host_waits == before
        return plan, trace

    found = planned(train)
    assert found == found[:1] * RANKS


def test_the_report_shows_the_plan_and_what_streams_took(planned: Plans) -> None:
    def train(rank: Rank) -> None:
        passes(rank, 30)
        report, plan = rank.sync.report(), rank.sync.plan
        assert plan is not None
        assert report.scheme == "optimal"
        assert report.waits_for is None
        assert report.passes > 2
        # The groups' flags travel, too.
        close = pytest.approx
        assert report.backward_s == close(sum(BACKWARD_S.values()))
        assert report.predicted_backward_s == close(sum(BACKWARD_S.values()))
        assert report.finish_s == close(plan.finish_s, rel=0.02)
        assert report.network_s == close(sum(plan.costs), rel=0.02)
        assert report.step_s == close(plan.finish_s, rel=0.02)
        for group, slot in zip(report.groups, plan.timeline, strict=True):
            assert (group.size, group.ready_s) == (slot.size, close(slot.ready_s))
            assert group.finish_s == close(slot.finish_s, rel=0.02)
        assert "The prediction is off by" in str(report)

    planned(train, plan="optimal")


@pytest.mark.parametrize("plan", ["fixed", "wfbp", [["d", "c"], ["b"], ["a"]]])
def test_groups_that_need_no_times_are_timed_too(planned: Plans, plan: Any) -> None:
    def train(rank: Rank) -> None:
        passes(rank, 6)
        report = rank.sync.report()
        assert report.passes == 4
        assert report.predicted_finish_s is None
        # Before the first gradient nothing is seen.
        assert report.backward_s == pytest.approx(sum(BACKWARD_S.values()) - BACKWARD_S["d"])
        assert report.network_s >= DEAR(sum(SIZES))

    planned(train, plan=plan)


def test_a_gradient_counts_when_the_slowest_device_has_it(planned: Plans) -> None:
    def train(rank: Rank) -> Any:
        passes(rank, 5)
        return rank.sync.plan

    found = planned(train, seconds=lambda rank: {**BACKWARD_S, "c": 4e-3 + rank * 1e-3})
    assert found == found[:1] * RANKS
    assert found[0].backward_times == pytest.approx([1e-3, 6e-3, 0.5e-3, 2e-3])


def test_times_that_a_device_has_not_come_to_are_not_read(planned: Plans, device: ComputingRuntime) -> None:
    """One rank's device is passes behind: all ranks plan in the same pass, when its times are there."""
    held, behind = threading.Event(), threading.Barrier(RANKS)

    def train(rank: Rank) -> Any:
        before = device.host_waits
        if rank.comm.rank == 1:
            rank.stream.put(held.wait)
        plans = []
        for step in range(9):
            rank.optimizer.zero_grad()
            rank.backward(step)
            rank.optimizer.step()
            plans.append(rank.sync.plan is not None)
        behind.wait(60)
        held.set()
        rank.stream.synchronize()
        behind.wait(60)
        for step in range(9, 12):
            passes(rank, 1, first=step)
            plans.append(rank.sync.plan is not None)
        assert device.host_waits == before
        assert rank.sync.trace is not None
        assert rank.sync.trace.backward_times == pytest.approx([*BACKWARD_S.values()])
        return plans, rank.sync.plan

    found = planned(train)
    assert found == found[:1] * RANKS
    assert found[0][0] == [False] * 9 + [True] * 3


@pytest.mark.parametrize("plan", ["auto", "optimal", "greedy"])
@pytest.mark.parametrize("by_nccl", [False, True])
def test_averages_stay_right_across_plans(
    on_each: Each,
    device: ComputingRuntime,
    comms: list[Communicator],
    streams: list[FakeStream],
    plan: str,
    by_nccl: bool,
) -> None:
    if by_nccl:
        give_group(device, comms, streams)
    expected = reference(RANKS, 16)

    def train(rank: Rank) -> Any:
        before, changes = device.host_waits, []
        for step in range(16):
            rank.optimizer.zero_grad()
            rank.backward(step)
            rank.optimizer.step()
            changes.append(rank.sync.groups)
            if step % 2:  # so that devices are behind, and not far
                rank.stream.synchronize()
        assert rank.sync.plan is not None
        assert device.host_waits == before
        rank.stream.synchronize()
        for one, other in zip(rank.model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(one.memory, other.detach(), rtol=1e-4, atol=1e-6)
        return changes

    found = on_each(train, plan=plan, plan_after=3)
    assert found == found[:1] * RANKS


def test_without_a_calibration_sums_are_timed_before_the_first_pass(
    planned: Plans, nccl: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[Any] = []
    measure = device_group.measured_device_cost

    def noted(comm: Communicator, like: Tensor, *, most_bytes: int) -> Callable[[int], float]:
        cost = measure(comm, like, most_bytes=most_bytes)
        timed.append((comm.rank, [cost(size) for size in SIZES]))
        return cost

    monkeypatch.setattr(device_group, "measured_device_cost", noted)

    def train(rank: Rank) -> Any:
        before = [*nccl.sums[rank.comm.rank]]
        passes(rank, 5)
        return before, rank.sync.plan

    found = planned(train, cost=None)
    (sums, plan), *_ = found
    assert found == [(sums, plan)] * RANKS
    assert [size for size in timed_sizes(sum(SIZES)) for _ in range(6)] == sums
    costs = [cost for _, cost in sorted(timed)]
    assert costs == costs[:1] * RANKS
    assert plan.scheme == "optimal"
    assert all(cost >= min(costs[0]) > 0 for cost in plan.costs)


@pytest.mark.parametrize("tuning", [tuned(None), tuned(DEAR, "older")], ids=["without NCCL", "another device"])
def test_what_calibration_does_not_say_is_timed(
    on_each: Each,
    device: ComputingRuntime,
    comms: list[Communicator],
    nccl: StandIn,
    tuning: Tuning,
) -> None:
    for comm in comms:
        comm.use(tuning)
    assert (
        on_each(lambda rank: len(nccl.sums[rank.comm.rank]), model_for=lambda _: Layers(device, BACKWARD_S))
        == [6 * len(timed_sizes(sum(SIZES)))] * RANKS
    )


@pytest.mark.parametrize("options", [{"plan": "fixed"}, {"plan": "wfbp"}, {"compress": "topk"}])
def test_nothing_is_timed_for_groups_that_need_no_costs(planned: Plans, nccl: StandIn, options: dict[str, str]) -> None:
    assert planned(lambda rank: nccl.sums[rank.comm.rank], cost=None, **options) == [[]] * RANKS


def test_sums_that_have_become_slower_are_planned_anew(
    planned: Plans, nccl: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the same pass on all ranks; sums are not timed for it, but count as passes have found them."""
    monkeypatch.setattr(step_planning, "LOOK_EVERY", 4)
    monkeypatch.setattr(group_planning.GroupPlanner, "rivals", lambda *_: [])
    slow = LinearCost(CHEAP.startup_s * 6000, CHEAP.s_per_byte * 6000)
    nccl.takes = CHEAP
    slowed = threading.Barrier(RANKS)

    def train(rank: Rank) -> Any:
        passes(rank, 14)
        assert [len(group) for group in rank.sync.groups] == [1, 1, 1, 1]
        assert rank.sync.is_settled
        slowed.wait(60)
        nccl.takes = slow
        replans = []
        for step in range(30):
            passes(rank, 1, first=14 + step)
            replans.append((rank.sync.replans, cuts(rank.sync)))
        assert rank.sync.is_settled
        plan = rank.sync.plan
        assert plan is not None
        assert rank.sync.report().network_s == pytest.approx(sum(plan.costs), rel=0.05)
        return replans

    found = planned(train, cost=CHEAP)
    assert found == found[:1] * RANKS
    assert found[0][0][0] == 0
    best = merge.optimal(SIZES, [*BACKWARD_S.values()], cost=slow)
    assert found[0][-1] == (1, ["".join("dcba"[one] for one in group) for group in best.groups])


def test_plans_are_tried_by_the_devices_steps(planned: Plans, nccl: StandIn) -> None:
    """Calibrated are costs by which each gradient goes alone; what sums take makes one message the fastest."""
    nccl.takes = LinearCost(20e-3, 0.0)

    def train(rank: Rank) -> Any:
        tried = []
        for step in range(60):
            passes(rank, 1, first=step)
            tried.append(tuple(cuts(rank.sync)))
            if rank.sync.is_settled:
                break
        assert rank.sync.is_settled
        return tried

    found = planned(train, cost=CHEAP, replan_factor=None)
    assert found == found[:1] * RANKS
    assert len({*found[0]}) > 2
    assert found[0][-1] == ("dcba",)


def test_where_forward_is_never_called_groups_stay(on_each: Each) -> None:
    def train(rank: Rank) -> None:
        for step in range(5):
            rank.optimizer.zero_grad()
            inner = rank.model.body(computed_on(rank.device, data(step, 0)))
            rank.model.tail(inner * rank.model.scale).sum().backward()
            rank.stream.synchronize()
        assert rank.sync.plan is None
        assert rank.sync.is_settled

    with pytest.warns(RuntimeWarning, match="groups stay as they are, because no times were taken"):
        on_each(train, plan_after=3)


def test_a_profile_waits_for_the_device_when_it_is_asked(device: ComputingRuntime) -> None:
    stream, held = device.new_stream(), threading.Event()
    with device.on(stream):
        model = model_on(device, Layers(device, BACKWARD_S))
        with StepProfile(model, skip=1) as profile:
            for step in range(3):
                if step == 2:
                    stream.put(held.wait)
                model(computed_on(device, data(step, 0))).square().mean().backward()
        assert profile.samples == 2
        assert not profile.is_known
        assert device.host_waits == 0
        threading.Timer(0.05, held.set).start()
        trace = profile.trace()
        assert device.host_waits > 0
        assert profile.is_known
    assert trace.names == tuple(WIDTHS)
    assert trace.backward_times == pytest.approx([*BACKWARD_S.values()])


def test_names_of_groups_are_left_alone(on_each: Each) -> None:
    def train(rank: Rank) -> None:
        passes(rank, 6)
        assert rank.sync.groups == NAMED

    on_each(train, plan=NAMED, plan_after=3)
