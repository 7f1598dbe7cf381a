"""Sizes, timings and rows: what a benchmark computes without running anything."""

from __future__ import annotations

import pytest

from telegrad.bench.machine import describe_machine
from telegrad.bench.networks import check_network, open_network
from telegrad.bench.plan import Measured, Plan, Timing, size_of, text_of
from telegrad.bench.runner import count_of, rows_of, why_without_peer

_PLAN = Plan("allreduce", "shm", ranks=4, sizes=(4, 1024), algorithms=("ring", "auto"))


@pytest.mark.parametrize(
    ("text", "size"), [("4", 4), ("1KiB", 1024), (" 16 MiB ", 16 << 20), ("1g", 1 << 30), ("8b", 8)]
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert size_of(text) == size
    assert size_of(text_of(size)) == size


@pytest.mark.parametrize("text", ["", "KiB", "1.5KiB", "1TiB", "-4", "0", "6"])
def test_bad_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"size {text!r} is"):
        size_of(text)


def test_timing_has_median_minimum_and_p90() -> None:
    assert Timing.of([4.0, 1.0, 3.0, 2.0]) == Timing(2.5, 1.0, 4.0)
    assert Timing.of([float(i) for i in range(1, 11)]) == Timing(5.5, 1.0, 9.0)
    assert Timing.of([2.0]) == Timing(2.0, 2.0, 2.0)


def test_plan_and_results_travel_as_json() -> None:
    assert Plan.from_json(_PLAN.to_json()) == _PLAN
    found = Measured("ring", 4, Timing(1.0, 0.5, 2.0), 6.0, 0, "ucx")
    assert Measured.from_json(found.to_json()) == found


def test_a_row_has_the_peers_time_and_the_bound_beside_ours() -> None:
    timing, slower = Timing(1e-3, 1e-3, 2e-3), Timing(2e-3, 1e-3, 3e-3)
    measured = [
        Measured("ring", 1024, timing, 1536.0, 0, "ucx"),
        Measured("gloo", 1024, slower, None, 3, "ucx"),
    ]
    (row,) = rows_of(_PLAN, measured)
    assert row == {
        "op": "allreduce",
        "algorithm": "ring",
        "driver": "ucx",
        "network": "shm",
        "ranks": 4,
        "bytes": 1024,
        "median_s": 1e-3,
        "min_s": 1e-3,
        "p90_s": 2e-3,
        "wire_bytes": 1536.0,
        "bound_bytes": 1536.0,
        "gloo_median_s": 2e-3,
        "ratio_to_gloo": 0.5,
        "gloo_wrong": 3,
        "wrong": 0,
        "busbw_bytes_per_s": pytest.approx(1024 / 1e-3 * 1.5),
    }
    (row,) = rows_of(_PLAN, measured[:1])
    assert row["gloo_median_s"] is None
    assert row["ratio_to_gloo"] is None
    assert count_of(_PLAN) == 6


def test_networks_and_peers_have_names() -> None:
    for name in ("shm", "tcp", "1gbit", "2.5gbit", "100mbit"):
        check_network(name)
    with pytest.raises(ValueError, match="network 'wifi' is not known: use shm, tcp, or a rate"):
        check_network("wifi")
    with open_network("tcp", 2) as network:
        assert network.environment["UCX_TLS"] == "tcp,self"
    assert why_without_peer("none") == "not asked for"
    with pytest.raises(ValueError, match="peer 'nccl' is not known"):
        why_without_peer("nccl")


def test_the_machine_is_described() -> None:
    described = describe_machine()
    assert described["cores"]
    assert described["numpy"]
    assert described["processor"]
