"""Calibration over a real network, UCX between ranks in threads: that everything is there, whatever it took."""

from __future__ import annotations

import json
import math
import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import telegrad
from telegrad import Communicator, Tuning
from telegrad.communicator.tuning_cache import file_of
from telegrad.cost import ALLREDUCE_ALGORITHMS, Place
from telegrad.tuning import Calibration, calibration, measure, sweep
from telegrad.tuning.calibration import to_data
from telegrad.tuning.probes import ADDED_BYTES


@pytest.fixture(autouse=True)
def _small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few sizes, short samples."""
    monkeypatch.setenv("TELEGRAD_CACHE", str(tmp_path / "cache"))
    for name in ("UCX_TLS", "UCX_NET_DEVICES", "TELEGRAD_NETWORK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(calibration, "_ONE_WAY_BYTES", (1 << 15, 1 << 17))
    monkeypatch.setattr(calibration, "_EXCHANGE_BYTES", (256, 1 << 15))
    monkeypatch.setattr(calibration, "_SAMPLE_S", 1e-3)
    monkeypatch.setattr(sweep, "_SAMPLE_S", 1e-4)
    monkeypatch.setattr(calibration, "grid", lambda _crossings: [4, 1024, 1 << 18])
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setattr(calibration, "_MOST_STEPS", 1000)  # so short samples are noise
    monkeypatch.setattr(calibration, "_LONG_BYTES", 4)


def _on_ucx_ranks(size: int, function: Callable[[Communicator], Any], *, nodes: int = 1) -> list[Any]:
    barrier, blobs = threading.Barrier(size), [b""] * size

    def run(rank: int) -> Any:
        def exchange(blob: bytes) -> list[bytes]:
            blobs[rank] = blob
            barrier.wait(100)
            return list(blobs)

        with Communicator.from_exchange(rank, size, exchange, node=f"node {rank % nodes}") as comm:
            return function(comm)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


@pytest.mark.parametrize("size", [2, 3])
def test_every_rank_finds_the_same(size: int) -> None:
    said: list[tuple[float, str]] = []

    def run(comm: Communicator) -> Calibration:
        found = measure(comm, seconds=600.0, on_progress=lambda *what: said.append(what) if comm.rank == 0 else None)
        assert comm.tuning is None
        return found

    found = _on_ucx_ranks(size, run)
    assert len({json.dumps(to_data(one)) for one in found}) == 1
    tuning = found[0].tuning
    assert tuning.place == Place("ucx", ((socket.gethostname(), size),))
    assert tuning.telegrad_version
    assert tuning.measured_at.endswith("+00:00")
    assert all(cost >= 0 and math.isfinite(cost) for cost in vars(tuning.costs).values())
    assert tuning.costs.gamma_s_per_byte > 0
    for rows in (found[0].rows(),):
        assert {row["bytes"] for row in rows} >= {4, 1024, 1 << 18}
        assert {row["algorithm"] for row in rows if row["bytes"] == 4} == set(ALLREDUCE_ALGORITHMS)
        assert all(row["samples"] >= 4 and row["median_s"] > 0 and row["ratio_to_best"] >= 1 for row in rows)
        assert all(row["chosen"] == (tuning.allreduce.algorithm(row["bytes"]) == row["algorithm"]) for row in rows)
    kinds = [(probe.kind, probe.bytes) for probe in found[0].probe_medians]
    assert kinds[0] == ("round", 0)
    assert kinds[-1] == ("addition", ADDED_BYTES)
    parts = [part for part, _ in said]
    assert parts == sorted(parts)
    assert parts[0] == 0
    assert said[-1] == (1.0, "done")


def test_on_two_levels_messages_inside_of_nodes_and_of_one_rank_alone_have_costs_too() -> None:
    said: list[str] = []

    def run(comm: Communicator) -> Calibration:
        return measure(comm, seconds=600.0, on_progress=lambda _, what: said.append(what))

    found = _on_ucx_ranks(4, run, nodes=2)
    assert len({json.dumps(to_data(one)) for one in found}) == 1
    tuning = found[0].tuning
    assert tuning.place.nodes == (0, 1, 0, 1)
    for costs in (tuning.within, tuning.alone):
        assert costs is not None
        assert costs != tuning.costs
        assert all(cost >= 0 and math.isfinite(cost) for cost in vars(costs).values())
    for level in ("within nodes", "between nodes", "of one rank of each node"):
        assert f"one_way of {1 << 17} bytes {level}" in said


def test_what_was_found_is_used_at_once_kept_and_used_by_the_next_job() -> None:
    def run(comm: Communicator) -> Tuning:
        tuning = telegrad.calibrate(comm)
        assert comm.tuning == tuning
        x = np.ones(100, np.float32)
        comm.all_reduce(x)
        assert set(x) == {2.0}
        return tuning

    first, second = _on_ucx_ranks(2, run)
    assert first == second
    assert Tuning.from_json(file_of(first.place).read_text()) == first
    assert _on_ucx_ranks(2, lambda comm: comm.tuning) == [first, first]


def test_without_keep_nothing_is_kept_and_little_time_measures_little() -> None:
    found = _on_ucx_ranks(2, lambda comm: telegrad.calibrate(comm, seconds=1e-6, keep=False))
    assert not file_of(found[0].place).exists()
    small = _on_ucx_ranks(2, lambda comm: measure(comm, seconds=1e-6))[0]
    assert set(small.samples) == {4}
    assert {len(times) for times in small.samples[4].values()} == {4}


def _is_kept(tuning: Tuning) -> bool:
    return file_of(tuning.place).exists() and Tuning.from_json(file_of(tuning.place).read_text()) == tuning


def test_noise_is_not_kept_in_the_place_of_an_earlier_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(comm: Communicator) -> Tuning:
        return telegrad.calibrate(comm, seconds=1e-6)

    monkeypatch.setattr(os, "getloadavg", lambda: (1e6, 0.0, 0.0))
    with pytest.warns(
        UserWarning, match=r"\.json may be noise: the machine of rank 0 was busy before \(load 1000000.0 on"
    ):
        noisy = _on_ucx_ranks(2, run)[0]
    assert _is_kept(noisy)
    with pytest.warns(UserWarning, match=r"not kept for later jobs: .*busy.*\.json stays as it is: calibrate again"):
        other = _on_ucx_ranks(2, run)[0]
    assert _is_kept(noisy)
    assert not _is_kept(other)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    assert _is_kept(_on_ucx_ranks(2, run)[0])


def test_too_short_a_calibration_is_not_kept_in_the_place_of_an_earlier_one(monkeypatch: pytest.MonkeyPatch) -> None:
    long = _on_ucx_ranks(2, telegrad.calibrate)[0]
    assert _is_kept(long)
    monkeypatch.setattr(calibration, "_LONG_BYTES", 1 << 20)
    with pytest.warns(UserWarning, match=r"not kept for later jobs: nothing longer than 4 bytes was measured: give"):
        _on_ucx_ranks(2, lambda comm: telegrad.calibrate(comm, seconds=1e-6))
    assert _is_kept(long)


def test_seconds_that_differ_are_an_error_on_all_ranks() -> None:
    def run(comm: Communicator) -> str:
        with pytest.raises(ValueError, match="seconds differs between ranks") as told:
            telegrad.calibrate(comm, seconds=1e-6 * (1 + comm.rank // 2))
        comm.barrier()  # it stays usable
        return str(told.value)

    texts = _on_ucx_ranks(3, run)
    assert set(texts) == {"seconds differs between ranks (rank 0: 1e-06, rank 2: 2e-06): give all the same"}


def test_a_communicator_of_split_is_calibrated_for_later_ones_of_its_size_and_place() -> None:
    def run(comm: Communicator) -> tuple[Tuning | None, Tuning | None, Tuning | None]:
        child = comm.split(None if comm.rank == 1 else 0, key=-comm.rank)
        if child is None:
            again = comm.split(None)
            assert again is None
            return None, None, None
        with child:
            before, found = child.tuning, telegrad.calibrate(child)
            again = comm.split(0)
            assert again is not None
            with again:
                return before, found, again.tuning

    (no_one, first, later), bystander, (_, same, also) = _on_ucx_ranks(3, run)
    assert bystander == (None, None, None)
    assert no_one is None  # nothing was kept, and the parent had no tuning
    assert first is not None
    assert first.place == Place("ucx", ((socket.gethostname(), 2),))
    assert first == same == later == also
    assert _is_kept(first)
    assert _on_ucx_ranks(2, lambda comm: comm.tuning) == [first, first]


def test_a_closed_communicator_and_a_forked_childs_open_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "open_pairs", lambda *_: pytest.fail("a connection was opened"))

    def run(comm: Communicator) -> None:
        core, comm._live = comm._live, None  # as after a fork
        comm._process -= 1
        with pytest.raises(ValueError, match="belongs to process [0-9]+, which forked this one"):
            telegrad.calibrate(comm)
        comm._process += 1
        comm._live = core
        comm.close()
        with pytest.raises(ValueError, match="is closed: make a new one"):
            telegrad.calibrate(comm)

    _on_ucx_ranks(2, run)


@pytest.mark.parametrize("what", [None, "comm", 3])
def test_what_is_no_communicator(what: Any) -> None:
    with pytest.raises(TypeError, match=r"communicator is a .*: give the Communicator that from_torch\(\)"):
        telegrad.calibrate(what)


def test_what_cannot_be_calibrated_is_told(local: Callable[..., list[Communicator]]) -> None:
    with pytest.raises(ValueError, match=r"cannot be calibrated: make it with from_torch\(\) or from_exchange\(\)"):
        telegrad.calibrate(local(2)[0])
    with pytest.raises(ValueError, match="one rank alone has no network to calibrate: start 2 or more"):
        _on_ucx_ranks(1, telegrad.calibrate)
    with pytest.raises(ValueError, match="seconds=0 must be above 0: about how long to measure"):
        telegrad.calibrate(local(2)[0], seconds=0)
    with pytest.raises(TypeError, match="seconds='7' must be a number"):
        telegrad.calibrate(local(2)[0], seconds="7")  # type: ignore[arg-type]
