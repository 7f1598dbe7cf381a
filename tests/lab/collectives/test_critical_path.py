"""Why it took as long as it did: handmade cases with known answers, and real ones whose stretches must add up."""

from __future__ import annotations

import numpy as np
import pytest

from lab.collectives.critical_path import (
    COMPUTE,
    KINDS,
    RECEIVE,
    SEND,
    Activities,
    Recording,
    Stretch,
    critical_path,
    record,
    record_apart,
    shares,
)
from telegrad.cost import Costs
from telegrad.tools.sim.measure import Network, Point, measure

# α 2 s, β 1 s per byte, γ 0.5 s per byte.
ALPHA, BETA, GAMMA = 2.0, 1.0, 0.5


class Script:
    """Activities in the order in which they are written down."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int, int, int, int, int, float, float]] = []

    def message(self, source: int, to: int, size: int, left: float, came: float, step: int = 0) -> Script:
        self.rows.append((SEND, source, to, 0, step, size, left, left + size * BETA))
        self.rows.append((RECEIVE, to, source, 0, step, size, came, came + size * BETA))
        return self

    def work(self, rank: int, start: float, end: float) -> Script:
        self.rows.append((COMPUTE, rank, rank, 0, 0, int((end - start) / GAMMA), start, end))
        return self

    def activities(self) -> Activities:
        types = (np.uint8, np.uint32, np.uint32, np.uint32, np.uint32, np.uint64, np.float64, np.float64)
        return Activities(
            *(np.array(column, kind) for column, kind in zip(zip(*self.rows, strict=True), types, strict=True))
        )  # type: ignore[arg-type]

    def path(self, *finish: float) -> list[Stretch]:
        return critical_path(self.activities(), np.array(finish))


def test_a_message_is_latency_and_then_the_receivers_port() -> None:
    path = Script().message(0, 1, 3, left=0, came=2).path(5, 5)
    assert [(one.kind, one.start_s, one.end_s) for one in path] == [("latency", 0, 2), ("port in", 2, 5)]
    assert path[0] == Stretch("latency", 0, 0.0, 2.0, peer=1, step=0, bytes=3)
    assert path[1] == Stretch("port in", 1, 2.0, 5.0, peer=0, step=0, bytes=3)


def test_work_on_what_came_is_part_of_it() -> None:
    path = Script().message(0, 1, 4, left=0, came=2).work(1, 6, 8).path(6, 8)
    assert [(one.kind, one.rank, one.time_s) for one in path] == [
        ("latency", 0, 2),
        ("port in", 1, 4),
        ("compute", 1, 2),
    ]


def test_two_messages_of_one_rank_wait_for_its_port_out() -> None:
    path = Script().message(0, 1, 5, left=0, came=2).message(0, 2, 5, left=5, came=7).path(12, 7, 12)
    assert [(one.kind, one.rank, one.time_s) for one in path] == [
        ("port out", 0, 5),
        ("latency", 0, 2),
        ("port in", 2, 5),
    ]


def test_two_messages_for_one_rank_wait_for_its_port_in() -> None:
    path = Script().message(1, 0, 5, left=0, came=2).message(2, 0, 5, left=0, came=7).path(12, 7, 12)
    assert [(one.kind, one.rank, one.peer, one.time_s) for one in path] == [
        ("latency", 1, 0, 2),
        ("port in", 0, 1, 5),
        ("port in", 0, 2, 5),
    ]


def test_a_late_start_is_waiting() -> None:
    path = Script().message(0, 1, 1, left=10, came=12).path(13, 13)
    assert [(one.kind, one.rank, one.time_s) for one in path] == [
        ("waiting", 0, 10),
        ("latency", 0, 2),
        ("port in", 1, 1),
    ]


def test_a_sender_goes_on_when_its_receiver_has_taken_the_message() -> None:
    """Rank 1 works until 20 and only then takes what came at 3; rank 0 goes on with it and sends to rank 2."""
    script = Script().message(0, 1, 1, left=0, came=2).work(1, 0, 20).message(0, 2, 1, left=20, came=22, step=1)
    path = script.path(23, 20, 23)
    assert [(one.kind, one.rank, one.time_s) for one in path] == [
        ("compute", 1, 20),
        ("latency", 0, 2),
        ("port in", 2, 1),
    ]


def test_nothing_happened() -> None:
    empty = Activities(*(np.zeros(0, np.uint32) for _ in range(8)))  # type: ignore[arg-type]
    assert critical_path(empty, np.zeros(1)) == []
    assert [(one.kind, one.time_s) for one in critical_path(empty, np.array([0.0, 3.0]))] == [("waiting", 3.0)]


def test_a_message_that_never_came_is_refused() -> None:
    script = Script().message(0, 1, 1, left=0, came=2)
    del script.rows[-1]
    with pytest.raises(ValueError, match="some message was sent and not received"):
        script.path(1, 1)


def run(operation: str, algorithm: str, ranks: int, size: int, network: Network, **more: int) -> Recording:
    return record(Point(operation, algorithm, ranks, size, network, **more))  # type: ignore[arg-type]


def path_of(found: Recording) -> list[Stretch]:
    return critical_path(found.activities, found.finish_by_rank_s)


PLAIN = Network(Costs(alpha_s=ALPHA, beta_s_per_byte=BETA, gamma_s_per_byte=GAMMA))


def test_recursive_doubling_is_a_chain_of_its_rounds() -> None:
    path = path_of(run("allreduce", "recursive_doubling", 8, 40, PLAIN))
    assert [one.kind for one in path] == ["latency", "port in", "compute"] * 3
    assert shares(path) == pytest.approx(
        dict(zip(KINDS, (3 * ALPHA, 0, 3 * 40 * BETA, 3 * 40 * GAMMA, 0), strict=True))
    )


def test_a_ring_is_a_chain_of_its_steps() -> None:
    split = shares(path_of(run("allreduce", "ring", 5, 200, PLAIN)))
    expected = {"latency": 8 * ALPHA, "port in": 8 * 40 * BETA, "compute": 4 * 40 * GAMMA, "port out": 0, "waiting": 0}
    assert split == pytest.approx(expected)


def test_two_lanes_of_a_long_ring_are_bound_by_the_ports() -> None:
    network = Network(Costs(alpha_s=1e-6, beta_s_per_byte=1e-9))
    found = run("allreduce", "ring", 4, 16 << 20, network)
    split = shares(path_of(found))
    assert split["port in"] + split["port out"] > 0.95 * found.finish_by_rank_s.max()


NOISY = (
    PLAIN,
    Network(Costs(1e-5, 1e-9, 1.7e-9, 3e-10), jitter=2.0, compute_noise=1.0),
    Network(Costs(1e-5, 1e-9, 0.0, 3e-10), start_noise_s=1e-3),
    Network(Costs(1e-5, 1e-9), ranks_per_node=4, node_alpha_s=1e-6, node_beta_s_per_byte=1e-10, oversubscription=4.0),
    Network(Costs(0.0, 1e-9)),
    Network(Costs(1e-6, 0.0)),
)


@pytest.mark.parametrize("network", NOISY)
@pytest.mark.parametrize(
    ("operation", "algorithm", "size"),
    [
        ("allreduce", "ring", 100_000),
        ("allreduce", "ring", 8 << 20),
        ("allreduce", "recursive_doubling", 100_000),
        ("allgather", "by_length", 4096),
        ("broadcast", "by_length", 100_000),
        ("broadcast", "by_length", 400),
        ("barrier", "dissemination", 0),
    ],
)
def test_stretches_follow_one_another_from_0_to_the_end(
    operation: str, algorithm: str, size: int, network: Network
) -> None:
    for ranks in (2, 7, 16):
        found = run(operation, algorithm, ranks, size, network, seed=3)
        path = path_of(found)
        assert sum(shares(path).values()) == pytest.approx(found.finish_by_rank_s.max())
        clock = 0.0
        for one in path:
            assert one.start_s == pytest.approx(clock, abs=1e-12 * found.finish_by_rank_s.max())
            clock = one.end_s
        assert clock == found.finish_by_rank_s.max()
        if not network.start_noise_s:
            assert shares(path)["waiting"] == 0


def test_sparse_sums_have_a_path_too() -> None:
    found = record(Point("sparse_allreduce", "split_allgather", 9, 400_000, PLAIN, nnz=1000))
    assert sum(shares(path_of(found)).values()) == pytest.approx(found.finish_by_rank_s.max())


def test_links_add_up_to_what_ranks_count_and_another_process_records_the_same() -> None:
    point = Point("allreduce", "ring", 6, 24_000, PLAIN, seed=3)
    counted, found, apart = measure(point), record(point), record_apart(point)
    ends = (counted.messages_sent, found.links.source), (counted.messages_received, found.links.destination)
    for by_rank, of in ends:
        assert np.array_equal(np.bincount(of, found.links.messages, minlength=6), by_rank)
    assert found.links.bytes.sum() == counted.bytes_sent.sum()
    assert np.array_equal(apart.links.bytes, found.links.bytes)
    assert np.array_equal(apart.activities.end_s, found.activities.end_s)
