"""Sizes, timings and rows: what a benchmark computes without running anything."""

from __future__ import annotations

import dataclasses
import importlib.util

import pytest

from telegrad.tools.bench.allreduce import AllreduceOutcome, result_count_of, rows_of
from telegrad.tools.bench.machine import describe_machine
from telegrad.tools.bench.plan import (
    AllreducePlan,
    Measured,
    Timing,
    check_network,
    is_slower,
    open_network,
    payload_bytes_per_s,
    rate_bytes_per_s,
    size_of,
    text_of,
    why_missing,
)

_PLAN = AllreducePlan(
    "allreduce", "shm", ranks=4, sizes=(4, 1024), algorithms=("ring", "auto"), peers=("gloo", "mpich")
)


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


def test_an_unknown_unit_is_told_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"write it like 4, 64KiB or 16MiB \(units: B, KiB, MiB, GiB\)"):
        size_of("100TiB")


def test_timing_has_median_minimum_and_p90() -> None:
    assert Timing.of([4.0, 1.0, 3.0, 2.0]) == Timing(2.5, 1.0, 4.0)
    assert Timing.of([float(i) for i in range(1, 11)]) == Timing(5.5, 1.0, 9.0)
    assert Timing.of([2.0]) == Timing(2.0, 2.0, 2.0)


def test_plan_and_results_travel_as_json() -> None:
    assert AllreducePlan.from_json(_PLAN.to_json()) == _PLAN
    found = Measured("ring", 4, Timing(1.0, 0.5, 2.0), 6.0, 0, "ucx")
    assert Measured.from_json(found.to_json()) == found


def test_a_row_has_the_peers_time_and_the_bound_beside_ours() -> None:
    timing, slower = Timing(1e-3, 1e-3, 2e-3), Timing(2e-3, 1e-3, 3e-3)
    measured = [
        Measured("ring", 1024, timing, 1536.0, 0, "ucx", 31, True),
        Measured("gloo", 1024, slower, None, 3, "ucx", 30),
    ]
    (row,) = rows_of(_PLAN, AllreduceOutcome(measured, {"mpich": "rank 1: no MPICH"}))
    assert row == {
        "op": "allreduce",
        "algorithm": "ring",
        "chosen": None,
        "driver": "ucx",
        "network": "shm",
        "ranks": 4,
        "nodes": 1,
        "bytes": 1024,
        "median_s": 1e-3,
        "min_s": 1e-3,
        "p90_s": 2e-3,
        "samples": 31,
        "measured_again": True,
        "wire_bytes": 1536.0,
        "bound_bytes": 1536.0,
        "bound_s": None,
        "wrong": 0,
        "algbw_bytes_per_s": pytest.approx(1024 / 1e-3),
        "busbw_bytes_per_s": pytest.approx(1024 / 1e-3 * 1.5),
        "gloo_median_s": 2e-3,
        "gloo_p90_s": 3e-3,
        "gloo_samples": 30,
        "ratio_to_gloo": 0.5,
        "gloo_wrong": 3,
        "gloo_missing": None,
        "mpich_median_s": None,
        "mpich_p90_s": None,
        "mpich_samples": None,
        "ratio_to_mpich": None,
        "mpich_wrong": None,
        "mpich_missing": "rank 1: no MPICH",
        **{f"ratio_to_{peer}": None for peer in ("openmpi", "impi", "oneccl")},
        **{
            f"{peer}_{what}": "not asked for" if what == "missing" else None
            for peer in ("openmpi", "impi", "oneccl")
            for what in ("median_s", "p90_s", "samples", "wrong", "missing")
        },
    }
    (row,) = rows_of(_PLAN, AllreduceOutcome(measured[:1]), {"gloo": "torch is not installed"})
    assert row["gloo_median_s"] is None
    assert (row["gloo_missing"], row["mpich_missing"]) == ("torch is not installed", "not asked for")
    assert result_count_of(_PLAN) == 8


def test_a_link_with_a_rate_has_a_bound_in_seconds() -> None:
    plan = dataclasses.replace(_PLAN, network="1gbit")
    (row,) = rows_of(
        plan, AllreduceOutcome([Measured("auto", 1 << 20, Timing(0.02, 0.02, 0.02), 1.5 * 2**20, 0, "ucx")])
    )
    assert row["bound_s"] == pytest.approx(1.5 * 2**20 / (1e9 / 8 * 1448 / 1514))
    assert rate_bytes_per_s("100mbit") == 12.5e6
    assert payload_bytes_per_s("100mbit") == pytest.approx(12.5e6 * 1448 / 1514)
    assert rate_bytes_per_s("tcp") is payload_bytes_per_s("shm") is None


@pytest.mark.parametrize(
    ("seconds", "than_s", "slower"),
    [(1.2e-3, 1e-3, True), (1.09e-3, 1e-3, False), (2.9e-6, 1e-6, False), (3.5e-6, 1e-6, True), (1e-3, 2e-3, False)],
)
def test_slower_is_what_is_so_by_a_share_and_by_two_microseconds(seconds: float, than_s: float, slower: bool) -> None:
    assert is_slower(seconds, than_s, share=0.1) is slower


def test_networks_and_peers_have_names() -> None:
    for name in ("shm", "tcp", "1gbit", "2.5gbit", "100mbit"):
        check_network(name)
    with pytest.raises(ValueError, match="network 'wifi' is not known: use shm, tcp, or a rate"):
        check_network("wifi")
    with open_network("tcp", 2) as network:
        assert network.environment["UCX_TLS"] == "tcp,self"
        assert network.environment["MPIR_CVAR_NOLOCAL"] == "1"  # or MPICH's own shared memory goes round TCP
    with pytest.raises(ValueError, match="peer 'nccl' is not known: use gloo, mpich, openmpi, impi, oneccl or none"):
        why_missing("nccl")


def test_a_peer_that_is_not_installed_says_what_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert why_missing("gloo") == "torch is not installed: pip install 'telegrad[torch]'"
    assert why_missing("mpich") == "mpi4py is not installed: pip install 'telegrad[bench]'"


def test_the_machine_is_described() -> None:
    described = describe_machine()
    assert described["cores"]
    assert described["numpy"]
    assert described["processor"]
