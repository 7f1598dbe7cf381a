"""Calibration over a real network, UCX between ranks in threads: that everything is there, whatever it took."""

from __future__ import annotations

import json
import math
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
from telegrad.calibration import Calibration, calibration, measure, sweep
from telegrad.calibration.calibration import to_data
from telegrad.calibration.probes import ADDED_BYTES
from telegrad.comm.tuning_cache import file_of
from telegrad.plan import ALLREDUCE_ALGORITHMS, Place


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


def _on_ucx_ranks(size: int, function: Callable[[Communicator], Any]) -> list[Any]:
    barrier, blobs = threading.Barrier(size), [b""] * size

    def run(rank: int) -> Any:
        def exchange(blob: bytes) -> list[bytes]:
            blobs[rank] = blob
            barrier.wait(30)
            return list(blobs)

        with Communicator.from_exchange(rank, size, exchange) as comm:
            return function(comm)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_rank_finds_the_same(size: int) -> None:
    said: list[tuple[float, str]] = []

    def run(comm: Communicator) -> Calibration:
        found = measure(comm, seconds=60.0, on_progress=lambda *what: said.append(what) if comm.rank == 0 else None)
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


def test_what_cannot_be_calibrated_is_told(local: Callable[..., list[Communicator]]) -> None:
    with pytest.raises(ValueError, match=r"cannot be calibrated: make it with from_torch\(\) or from_exchange\(\)"):
        telegrad.calibrate(local(2)[0])
    with pytest.raises(ValueError, match="one rank alone has no network to calibrate: start 2 or more"):
        _on_ucx_ranks(1, telegrad.calibrate)
    with pytest.raises(ValueError, match="seconds=0 must be above 0: about how long to measure"):
        telegrad.calibrate(local(2)[0], seconds=0)
