"""Collectives and schemes as papers reckon them: what they say of each other, and of merging."""

from __future__ import annotations

import pytest

from lab.common.architectures import architecture
from lab.common.literature import (
    COLLECTIVES,
    NAMES,
    PAPER_NETWORKS,
    costs_of_ring_fit,
    dense,
    rgc,
    ring,
    sum_cost,
    two_level,
)
from lab.paper_steps import by_layer
from telegrad.cost import Costs
from telegrad.cost.closed_forms import allreduce_ring
from telegrad.cost.send_method import LinearCost
from telegrad.synchronizer import merge
from telegrad.synchronizer.trace import Trace
from telegrad.tools.advise.sending import NODE, Cluster
from telegrad.tools.advise.workload import DEVICES, Device, trace_of
from telegrad.tools.sim.measure import network_of

K80 = PAPER_NETWORKS["k80-10gbe"]


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_the_ring_is_the_closed_form_of_a_short_vector(ranks: int) -> None:
    costs = Costs(1e-5, 1e-9, gamma_s_per_byte=1e-10)
    size = 4 * 840
    assert ring(ranks, costs)(size) == pytest.approx(allreduce_ring(ranks, size, costs).time_s)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_no_ranks_are_refused(name: str) -> None:
    for ranks in (0, -1):
        with pytest.raises(ValueError, match=f"ranks={ranks} must be at least 1"):
            COLLECTIVES[name](ranks, K80)


def test_one_rank_alone_sends_nothing() -> None:
    for name, collective in COLLECTIVES.items():
        if name != "parameter-server":
            assert collective(1, K80) == LinearCost(0.0, 0.0)


def test_a_fitted_ring_gives_the_fit_back() -> None:
    fitted = ring(16, costs_of_ring_fit(9.72e-4, 1.97e-9, 16))
    assert (fitted.startup_s, fitted.s_per_byte) == pytest.approx((9.72e-4, 1.97e-9))
    with pytest.raises(ValueError, match="ranks=1 must be 2 or more"):
        costs_of_ring_fit(1.0, 1.0, 1)


def test_two_levels() -> None:
    within = Costs(1e-6, 1e-11)
    assert two_level(8, 1, K80, within) == ring(8, K80)
    assert two_level(1, 8, K80, within) == ring(8, within)
    both = two_level(8, 4, K80, within, "double-binary-trees")
    assert both(1 << 24) < ring(32, K80)(1 << 24)
    with pytest.raises(ValueError, match="collective='star' is not known"):
        two_level(2, 2, K80, within, "star")


def speed_ups(trace: Trace, cost: LinearCost) -> dict[str, float]:
    """Steps per second of each scheme, greedy's being 1."""
    schemes = (merge.wfbp, merge.single, merge.fixed, merge.greedy, merge.optimal)
    plans = [scheme(trace.sizes, trace.backward_times, cost=cost) for scheme in schemes]
    steps = {plan.scheme: trace.forward_s + plan.finish_s for plan in plans}
    return {scheme: steps["greedy"] / step for scheme, step in steps.items()}


# The paper's figures with 64 workers over 10GbE; its backward times are not published: one number for each network.
RESNET50 = trace_of(architecture("resnet50"), 0.6)
GOOGLENET = trace_of(by_layer(architecture("googlenet")), 0.25)


@pytest.mark.parametrize(
    ("trace", "over_wfbp", "over_single"),
    [(RESNET50, 1.75, 1.45), (GOOGLENET, 1.78, 1.35)],
    ids=["resnet", "googlenet"],
)
def test_speed_ups_of_merging_are_the_published_ones(trace: Trace, over_wfbp: float, over_single: float) -> None:
    found = speed_ups(trace, ring(64, K80))
    assert 1 / found["wfbp"] == pytest.approx(over_wfbp, rel=0.25)
    assert 1 / found["single"] == pytest.approx(over_single, rel=0.25)
    assert found["optimal"] >= 1


@pytest.mark.parametrize("trace", [RESNET50, GOOGLENET], ids=["resnet", "googlenet"])
def test_greedy_merges_all_on_many_ranks_where_that_is_not_the_best(trace: Trace) -> None:
    behind = {}
    for ranks in (2**exponent for exponent in range(2, 12)):
        for collective in COLLECTIVES.values():
            assert speed_ups(trace, collective(ranks, K80))["optimal"] >= 1
        behind[ranks] = speed_ups(trace, ring(ranks, K80))["optimal"]
    assert len(merge.greedy(trace.sizes, trace.backward_times, cost=ring(1024, K80)).groups) == 1
    assert max(behind.values()) > 1.2


def test_with_trees_wfbp_is_ahead_of_one_message() -> None:
    """Figure 11."""
    for trace in (RESNET50, GOOGLENET):
        for ranks in (128, 512, 2048):
            for name in ("double-binary-trees", "double-binary-trees-published"):
                found = speed_ups(trace, COLLECTIVES[name](ranks, K80))
                assert found["single"] < found["wfbp"] <= found["optimal"]


def test_rgc_is_the_paper_s_formula() -> None:
    device = Device("plain", 1e12, 1e9, launch_s=0.0)
    costs = Costs(1e-5, 1e-9)
    way = rgc(Cluster(8, costs), device, 0.001, element_bytes=4, kernels=0)
    n, k = 1_000_000, 1000
    assert way.delay(4 * n) == pytest.approx(4e-3)
    assert way.decompress(4 * n) == pytest.approx(8 * k * 16e-9)
    assert way.cost(4 * n) - way.decompress(4 * n) == pytest.approx(3e-5 + 7 * k * 8 * 1e-9)
    mean = rgc(Cluster(8, costs), device, 0.001, quantised=True, element_bytes=4, kernels=0)
    assert mean.cost(4 * n) - mean.decompress(4 * n) == pytest.approx(3e-5 + 7 * k * 4 * 1e-9)


def test_the_cheapest_is_no_dearer_than_those_it_chooses_from() -> None:
    cluster = Cluster(24, network_of("10gbit").costs)
    for size in (4, 1 << 10, 1 << 16, 1 << 22, 1 << 28):
        among = ("ring", "recursive-doubling", "halving-doubling", "double-binary-trees")
        times = [sum_cost(cluster, name)(size) for name in among]
        assert sum_cost(cluster, "cheapest")(size) == min(times)


def test_ranks_of_a_node_share_its_link() -> None:
    cluster = Cluster(32, K80, 8, oversubscription=8)
    size = 16 << 20
    halving, flat = "halving-doubling", Cluster(32, K80)
    assert sum_cost(Cluster(32, K80, 8), halving)(size) == sum_cost(flat, halving)(size)
    assert sum_cost(Cluster(32, K80, 8, oversubscription=16), "ring")(size) > 1.5 * ring(32, K80)(size)
    assert cluster.nodes == 4
    assert sum_cost(cluster, "ring")(size) == ring(32, K80)(size)  # one message each way passes it
    assert sum_cost(cluster, halving)(size) > 4 * sum_cost(flat, halving)(size)
    assert sum_cost(cluster, "two-level")(size) == two_level(4, 8, K80, NODE)(size)
    assert sum_cost(cluster, "two-level")(size) < sum_cost(cluster, "ring")(size)
    assert sum_cost(Cluster(8, K80, 8), "ring")(size) == ring(8, NODE)(size)  # one node: nothing leaves it


@pytest.mark.parametrize("name", NAMES)
def test_one_rank_sums_for_nothing_and_more_ranks_do_not(name: str) -> None:
    assert sum_cost(Cluster(1, K80), name)(1 << 20) == 0
    assert sum_cost(Cluster(2, K80), name)(1 << 20) > 0


def test_what_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="collective='star' is not known: use one of ring, "):
        dense(Cluster(4, K80), "star")
    with pytest.raises(ValueError, match="density=.* is no share"):
        rgc(Cluster(4, K80), DEVICES["v100"], 1.5)
