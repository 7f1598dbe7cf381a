"""One collective in virtual time, from Python: counts, noise, two levels, errors."""

from __future__ import annotations

import numpy as np
import pytest

from telegrad.cost import Costs
from telegrad.tools.sim.measure import ALGORITHMS, SPARSE, Network, Point, closed_form, measure

COSTS = Costs(alpha_s=10e-6, beta_s_per_byte=1e-9, gamma_s_per_byte=1e-10)
PLAIN = Network(COSTS)

EVERY = [(operation, algorithm) for operation, names in ALGORITHMS.items() for algorithm in names]


def point(operation: str, algorithm: str, network: Network = PLAIN, **more: int) -> Point:
    fields: dict[str, int] = {"ranks": 6, "size": 0 if operation == "barrier" else 24_000}
    if operation in SPARSE:
        fields["nnz"] = 60
    return Point(operation, algorithm, network=network, **{**fields, **more})  # type: ignore[arg-type]


@pytest.mark.parametrize(("operation", "algorithm"), EVERY)
def test_what_is_sent_is_received(operation: str, algorithm: str) -> None:
    found = measure(point(operation, algorithm))
    assert found.finish_s == found.finish_by_rank_s.max() > 0
    assert len(found.messages_sent) == 6
    assert found.messages_sent.sum() == found.messages_received.sum() > 0
    assert found.bytes_sent.sum() == found.bytes_received.sum()
    assert found.events > 0


@pytest.mark.parametrize(("operation", "algorithm"), EVERY)
def test_payloads_change_no_time_and_no_count(operation: str, algorithm: str) -> None:
    """Of sparse sums the size-only mode knows the statistics, not the indices."""
    sizes, values = (measure(point(operation, algorithm, payloads=payloads)) for payloads in (False, True))
    if operation == "sparse_allreduce":
        assert sizes.finish_s == pytest.approx(values.finish_s, rel=0.05)
        assert sizes.result_nnz == pytest.approx(values.result_nnz, rel=0.05)
        return
    assert sizes.finish_s == values.finish_s
    assert np.array_equal(sizes.bytes_sent, values.bytes_sent)
    assert sizes.events == values.events


@pytest.mark.parametrize(("operation", "algorithm"), EVERY)
def test_the_seed_decides_about_noise(operation: str, algorithm: str) -> None:
    noisy = Network(COSTS, jitter=1.0, compute_noise=1.0, start_noise_s=1e-4)
    times = [measure(point(operation, algorithm, noisy, seed=seed)).finish_s for seed in (1, 1, 2)]
    assert times[0] == times[1] != times[2]
    assert min(times) > measure(point(operation, algorithm)).finish_s
    assert closed_form(point(operation, algorithm, noisy)) is None


def test_nodes_are_fast_inside_and_their_uplinks_narrow() -> None:
    nodes = Network(COSTS, ranks_per_node=4, node_alpha_s=1e-6, node_beta_s_per_byte=1e-11)
    narrow = Network(COSTS, ranks_per_node=4, node_alpha_s=1e-6, node_beta_s_per_byte=1e-11, oversubscription=4.0)
    one_level, two_levels, narrowed = (
        measure(point("allreduce", "recursive_doubling", network, size=4 << 20, ranks=16)).finish_s
        for network in (PLAIN, nodes, narrow)
    )
    assert two_levels < one_level
    assert narrowed > 1.5 * two_levels


@pytest.mark.parametrize("size", [4 << 10, 16 << 10, 1 << 20])
def test_auto_of_ranks_on_one_node_goes_by_the_costs_inside_of_it(size: int) -> None:
    node = Network(COSTS, ranks_per_node=8, node_alpha_s=5e-7, node_beta_s_per_byte=4e-11)
    times = {
        name: measure(point("allreduce", name, node, size=size, ranks=8)).finish_s
        for name in ("auto", *ALGORITHMS["allreduce"])
    }
    assert times["auto"] <= 1.05 * min(times.values())


def test_auto_is_the_fastest_by_the_closed_forms() -> None:
    for size, name in ((4, "recursive_doubling"), (16 << 20, "ring")):
        found = measure(point("allreduce", "auto", size=size))
        assert found.algorithm == name
        assert found.point.algorithm == "auto"
        assert found.finish_s == measure(point("allreduce", name, size=size)).finish_s
    assert measure(point("allgather", "auto")).algorithm == "by_length"
    assert measure(point("sparse_allreduce", "auto")).algorithm == "auto"


def test_the_closed_form_of_a_point() -> None:
    for operation, algorithm in EVERY:
        form = closed_form(point(operation, algorithm))
        if operation != "allreduce":
            assert form is None
        else:
            assert form is not None
            assert form.time_s == pytest.approx(measure(point(operation, algorithm)).finish_s, rel=0.01)


def test_estimated_messages_are_about_right() -> None:
    for operation, algorithm in EVERY[: len(ALGORITHMS["allreduce"]) + len(ALGORITHMS["sparse_allreduce"])]:
        sent = int(measure(point(operation, algorithm)).messages_sent.sum())
        assert point(operation, algorithm).messages == pytest.approx(sent, rel=0.5)


def test_names_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match="operation 'magic' does not exist: use allreduce, sparse_allreduce"):
        Point("magic", "ring", 2, 4, PLAIN)
    with pytest.raises(ValueError, match="allgather has no algorithm 'recursive_doubling': use by_length, auto"):
        Point("allgather", "recursive_doubling", 2, 4, PLAIN)


def test_sizes_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="6"):
        measure(Point("allreduce", "ring", 2, 6, PLAIN))
    with pytest.raises(ValueError, match="rank"):
        measure(Point("allreduce", "ring", 0, 4, PLAIN))


@pytest.mark.parametrize(
    ("rounds", "size"), [(11, 1 << 24), pytest.param(11, 1 << 26, marks=pytest.mark.slow), (6, 1 << 31)]
)
def test_thousands_of_ranks(rounds: int, size: int) -> None:
    """And more bytes than memories have: only sizes travel."""
    ranks = 1 << rounds
    found = measure(Point("allreduce", "rabenseifner", ranks, size, Network(Costs(1e-6, 1e-9))))
    assert found.finish_s == pytest.approx(2 * (rounds * 1e-6 + (ranks - 1) / ranks * size * 1e-9))
    assert found.bytes_sent.sum() == 2 * (ranks - 1) * size


def test_two_levels_need_nodes() -> None:
    plain, nodes = Network(Costs(1e-6, 1e-9)), Network(Costs(1e-6, 1e-9), ranks_per_node=2)
    with pytest.raises(ValueError, match="'two_level': it needs nodes of some of the ranks"):
        measure(Point("allreduce", "two_level", 4, 64, plain))
    for payloads in (False, True):
        found = measure(Point("sparse_allreduce", "two_level", 4, 1 << 12, nodes, nnz=100, payloads=payloads))
        assert found.result_nnz is not None
        assert 300 < found.result_nnz < 400
    for operation in ("allreduce", "sparse_allreduce"):  # all on one node
        together, auto = (Point(operation, name, 2, 1 << 12, nodes, nnz=0) for name in ("two_level", "auto"))
        assert together.chosen == auto.chosen
        assert measure(together).finish_s == measure(auto).finish_s
    with pytest.raises(ValueError, match="barrier has no algorithm 'two_level'"):
        Point("barrier", "two_level", 4, 0, nodes)
