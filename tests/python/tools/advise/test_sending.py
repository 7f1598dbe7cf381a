"""Ways to send a group: against the simulator, by hand, and what is refused."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from lab.common.literature import PAPER_NETWORKS
from telegrad.cost.closed_forms import ALLREDUCES, Levels, allreduce, allreduce_two_level
from telegrad.cost.network import Costs
from telegrad.sparse_vector import SparseVector
from telegrad.tools.advise import sending
from telegrad.tools.advise.architectures import architecture
from telegrad.tools.advise.sending import (
    NODE,
    SCHEMES,
    Cluster,
    fill_in,
    gathered,
    ok_topk,
    qsgd,
    sparse,
    sum_cost,
    way_of,
)
from telegrad.tools.advise.workload import DEVICES, Device, device_of
from telegrad.tools.sim import World
from telegrad.tools.sim.measure import Point, measure, network_of

V100 = DEVICES["v100"]
K80 = PAPER_NETWORKS["k80-10gbe"]


@pytest.mark.parametrize("network", ["1gbit", "10gbit", "100gbit"])
@pytest.mark.parametrize("ranks", [4, 16, 64, 100])
@pytest.mark.parametrize("size", [1 << 16, 1 << 20, 25 << 20])
def test_sparse_sums_take_what_the_simulator_says(network: str, ranks: int, size: int) -> None:
    for density in (0.001, 0.01, 0.1):
        net = network_of(network)
        nnz = max(1, round(density * (size // 4)))
        found = measure(Point("sparse_allreduce", "auto", ranks=ranks, size=size, network=net, nnz=nnz)).finish_s
        way = sparse(Cluster(ranks, net.costs), V100, density)
        assert way.cost(size) - way.decompress(size) == pytest.approx(found, rel=0.3)


@pytest.mark.parametrize("ranks", [8, 32])
@pytest.mark.parametrize("network", ["1gbit", "10gbit", "100gbit"])
def test_sparse_sums_on_nodes_take_what_the_simulator_says(network: str, ranks: int) -> None:
    per_node = 8 if ranks == 32 else 4
    for density, size in itertools.product((0.001, 0.01, 0.1, 0.4), (1 << 16, 8 << 20)):
        net = replace(
            network_of(network),
            ranks_per_node=per_node,
            node_alpha_s=NODE.alpha_s,
            node_beta_s_per_byte=NODE.beta_s_per_byte,
            oversubscription=float(per_node),
        )
        cluster = Cluster(ranks, net.costs, per_node, oversubscription=float(per_node))
        nnz = round(density * size / 4)
        found = measure(
            Point("sparse_allreduce", "auto", ranks=ranks, size=size, network=net, nnz=nnz, payloads=True)
        ).finish_s
        way = sparse(cluster, V100, density)
        assert way.cost(size) - way.decompress(size) == pytest.approx(found, rel=0.35), (density, size)


@pytest.mark.parametrize("name", SCHEMES)
def test_all_ways_have_costs_that_make_sense(name: str) -> None:
    for ranks in (1, 2, 7, 64, 4096):
        way = way_of(name, Cluster(ranks, network_of("10gbit").costs), V100, density=0.01)
        assert way.name == name
        for size in (0, 4, 4096, 1 << 20, 1 << 28):
            for seconds in (way.cost(size), way.delay(size), way.decompress(size)):
                assert 0 <= seconds < math.inf
            assert way.decompress(size) <= way.cost(size)
    selects = name not in ("dense", "qsgd8", "qsgd4", "qsgd2")
    assert (way.delay(4096) > 0) == selects


def test_what_is_gathered_grows_with_the_ranks_and_what_ok_topk_moves_does_not() -> None:
    costs = network_of("10gbit").costs
    size = 100 << 20
    moved = {
        (maker, ranks): way.cost(size) - way.decompress(size)
        for maker in (gathered, ok_topk)
        for ranks in (4, 256)
        for way in [maker(Cluster(ranks, costs), V100, 0.01)]
    }
    assert 60 < moved[gathered, 256] / moved[gathered, 4] < 110  # 255/3
    assert 1 < moved[ok_topk, 256] / moved[ok_topk, 4] < 2.6
    assert moved[gathered, 256] > 5 * moved[ok_topk, 256]


def test_quantised_sums_move_their_bits() -> None:
    costs = Costs(1e-6, 1e-9)  # no work
    size = 64 << 20
    dense_s = sum_cost(Cluster(8, costs))(size)
    for bits in (8, 4, 2):
        share = qsgd(Cluster(8, costs), bits).cost(size) / dense_s
        assert share == pytest.approx((bits + 1 / 32) / 32, rel=0.03)


@pytest.mark.parametrize("network", ["1gbit", "10gbit", "100gbit"])
@pytest.mark.parametrize("ranks", [2, 4, 16])
@pytest.mark.parametrize("size", [64 << 10, 1 << 20, 8 << 20])
def test_quantised_sums_take_what_their_simulation_takes(network: str, ranks: int, size: int) -> None:
    costs = network_of(network).costs
    world = World(ranks, **{name: getattr(costs, name) for name in ("alpha_s", "beta_s_per_byte", "gamma_s_per_byte")})
    vector = np.ones(size // 4, np.float32)
    works = [
        comm.all_reduce(vector, wire="qsgd4", out=np.empty_like(vector), async_op=True) for comm in world.communicators
    ]
    for work in works:
        work.wait()
    took_s = max(world.finish_s(rank) for rank in range(ranks))
    world.close()
    assert qsgd(Cluster(ranks, costs), 4).cost(size) == pytest.approx(took_s, rel=0.21)


def bf16_bits(x: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    return (x.view(np.uint32) >> 16).astype(np.uint16)


@pytest.mark.parametrize("network", ["1gbit", "10gbit"])
@pytest.mark.parametrize("ranks", [2, 4, 16])
@pytest.mark.parametrize("density", [0.001, 0.01, 0.1])
def test_sums_of_bfloat16_take_what_their_simulation_takes(network: str, ranks: int, density: float) -> None:
    elements, costs = 1 << 20, network_of(network).costs
    cluster = Cluster(ranks, costs, value_bytes=2)
    given = {name: getattr(costs, name) for name in ("alpha_s", "beta_s_per_byte", "gamma_s_per_byte")}
    world = World(ranks, **given)
    streams = [
        SparseVector.trusted(
            np.sort(np.random.default_rng(rank).choice(elements, int(density * elements), False)).astype(np.uint32),
            bf16_bits(np.random.default_rng(rank).standard_normal(int(density * elements), np.float32)),
            elements,
            of_torch=True,
        )
        for rank in range(ranks)
    ]
    works = [
        comm.all_reduce(stream, async_op=True, wire="auto" if sending._packs(cluster, elements, stream.nnz) else "raw")
        for comm, stream in zip(world.communicators, streams, strict=True)
    ]
    for work in works:
        work.wait()
    took_s = max(world.finish_s(rank) for rank in range(ranks))
    world.close()
    way = sparse(cluster, V100, density)
    cost_s, wide_s = (
        one.cost(4 * elements) - one.decompress(4 * elements)
        for one in (way, sparse(Cluster(ranks, costs), V100, density))
    )
    assert cost_s == pytest.approx(took_s, rel=0.3)
    assert 0.5 < cost_s / wide_s < 1
    assert sum_cost(cluster)(4 * elements) == sum_cost(Cluster(ranks, costs))(2 * elements)


def test_bfloat16_is_not_quantised() -> None:
    with pytest.raises(ValueError, match="value_bytes=2: only float32 gradients are quantised"):
        qsgd(Cluster(4, Costs(1e-6, 1e-9), value_bytes=2), 8)


def test_fill_in() -> None:
    assert fill_in(1, 1000, 0.01) == pytest.approx(0.01)
    assert fill_in(64, 1_000_000, 0.01) == pytest.approx(1 - 0.99**64)
    assert fill_in(4, 0, 0.01) == 0


def test_a_sparse_sum_of_many_ranks_is_no_cheaper_than_fill_in_allows() -> None:
    """SparCML, Lemma 5.2: what has filled in gains at most a factor of 2 over the dense sum's bytes."""
    costs = Costs(1e-7, 1e-9)
    way = sparse(Cluster(1024, costs), V100, 0.01)
    size = 100 << 20
    assert way.cost(size) - way.decompress(size) > 0.5 * sum_cost(Cluster(1024, costs))(size)


@pytest.mark.parametrize("density", [0.0, -0.1, 1.5, math.nan])
def test_densities_are_shares(density: float) -> None:
    cluster = Cluster(4, K80)
    for maker in (sparse, ok_topk, gathered):
        with pytest.raises(ValueError, match="density=.* is no share"):
            maker(cluster, V100, density)
    with pytest.raises(ValueError, match="density=.* is no share"):
        fill_in(4, 10, density)


def test_what_does_not_exist_is_refused() -> None:
    cluster = Cluster(4, K80)
    with pytest.raises(ValueError, match="scheme='topk' is not known: use one of dense, sparse, "):
        way_of("topk", cluster, V100, density=0.01)
    with pytest.raises(ValueError, match="bits=3 must be 2, 4 or 8"):
        qsgd(cluster, 3)
    with pytest.raises(ValueError, match="device 'tpu' is not known: use one of k80, p100, "):
        device_of("tpu")
    with pytest.raises(ValueError, match="ranks=0 must be at least 1"):
        Cluster(0, K80)
    for per_node in (0, 3):
        with pytest.raises(ValueError, match=f"ranks_per_node={per_node} does not divide ranks=4"):
            Cluster(4, K80, per_node)
    with pytest.raises(ValueError, match="oversubscription=0.5 must be 1"):
        Cluster(4, K80, 2, oversubscription=0.5)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"flops_per_s": 0.0}, "flops_per_s=0.0 must be above 0"),
        ({"memory_bytes_per_s": math.inf}, "memory_bytes_per_s=inf must be above 0 and finite"),
        ({"launch_s": -1.0}, "launch_s=-1.0 must be 0 or more"),
    ],
)
def test_devices_that_make_no_sense_are_refused(change: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Device(**{"name": "x", "flops_per_s": 1.0, "memory_bytes_per_s": 1.0, **change})  # type: ignore[arg-type]


def test_a_device_s_step_is_its_multiplications() -> None:
    model = architecture("resnet50")
    assert V100.compute_s(model, 32) == pytest.approx(32 * 6 * model.macs / 7.85e12)
    assert V100.compute_s(model, 64) == 2 * V100.compute_s(model, 32)


def test_a_dense_sum_goes_by_the_fastest_of_the_library_s_algorithms() -> None:
    costs = network_of("10gbit").costs
    for size in (4, 1 << 10, 1 << 16, 1 << 22, 1 << 28):
        times = [allreduce(name, 24, size, costs).time_s for name in ALLREDUCES]
        assert sum_cost(Cluster(24, costs))(size) == min(times)
    assert sum_cost(Cluster(8, costs))(6) == sum_cost(Cluster(8, costs))(8)  # whole floats


def test_two_levels_are_one_of_them_where_there_are_some() -> None:
    costs = network_of("10gbit").costs
    cluster = Cluster(16, costs, ranks_per_node=4, oversubscription=4.0)
    levels = Levels(tuple(rank // 4 for rank in range(16)), cluster.within, costs)
    for size in (4, 1 << 16, 1 << 24):
        times = {name: allreduce(name, 16, size, cluster.shared_costs).time_s for name in ALLREDUCES}
        times["ring"] = allreduce("ring", 16, size, cluster.ring_costs).time_s
        times["two_level"] = allreduce_two_level(levels, size, cluster.shared_costs).time_s
        assert sum_cost(cluster)(size) == min(times.values())
    one_node = Cluster(16, costs, ranks_per_node=16)
    assert sum_cost(one_node)(1 << 24) == sum_cost(Cluster(16, one_node.within))(1 << 24)  # nothing leaves it


def test_one_rank_sums_for_nothing_and_more_ranks_do_not() -> None:
    assert sum_cost(Cluster(1, K80))(1 << 20) == 0
    assert sum_cost(Cluster(2, K80))(1 << 20) > 0
