"""Calibration of sums of device tensors, on a device whose streams compute and with what stands for NCCL: that all is
there and alike on all ranks, whatever it took; and what lines make of times that are known."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from computing_device import ComputingRuntime, computed_on
from device_ranks import RANKS
from fake_device import FakeStream
from nccl_stand_in import StandIn, give_group

import telegrad
from telegrad import Communicator
from telegrad.cost import Tuning
from telegrad.tuning import Calibration, calibration, measure, sweep
from telegrad.tuning.calibration import to_data
from telegrad.tuning.sweep import MeasuredDeviceSums, fitted, measure_device_sums

SIZES = (1 << 10, 1 << 12, 1 << 14)


@pytest.fixture(autouse=True)
def _small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TELEGRAD_CACHE", str(tmp_path / "cache"))
    for name in ("UCX_TLS", "UCX_NET_DEVICES", "TELEGRAD_NETWORK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sweep, "_SIZES", SIZES)
    monkeypatch.setattr(sweep, "_DEVICE_SAMPLE_S", 1e-4)
    monkeypatch.setattr(calibration, "_ONE_WAY_BYTES", (1 << 15, 1 << 17))
    monkeypatch.setattr(calibration, "_EXCHANGE_BYTES", (256, 1 << 15))
    monkeypatch.setattr(calibration, "_SAMPLE_S", 1e-3)
    monkeypatch.setattr(sweep, "_SAMPLE_S", 1e-4)
    monkeypatch.setattr(calibration, "grid", lambda _crossings: [4, 1024])
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setattr(calibration, "_MOST_STEPS", 1000)
    monkeypatch.setattr(calibration, "_LONG_BYTES", 4)


def times_of(startup_s: float, s_per_byte: float, noise: float = 1.0) -> dict[int, list[float]]:
    return {size: [noise * (startup_s + s_per_byte * size)] * 3 for size in (1 << 10, 1 << 16, 1 << 20, 1 << 24)}


def samples_of(**times: dict[int, list[float]]) -> dict[int, dict[str, list[float]]]:
    return {size: {name: of[size] for name, of in times.items()} for size in next(iter(times.values()))}


def test_lines_go_through_the_medians() -> None:
    found = fitted("H200", samples_of(nccl=times_of(4e-5, 1e-10), host_transfer=times_of(2e-5, 5e-10)))
    assert found.nccl is not None
    assert (found.nccl.startup_s, found.nccl.s_per_byte) == pytest.approx((4e-5, 1e-10))
    assert (found.host_transfer.startup_s, found.host_transfer.s_per_byte) == pytest.approx((2e-5, 5e-10))
    assert found.residual < 1e-6
    assert found.choices[1].from_bytes == pytest.approx(50_000, rel=1e-3)
    assert [one.algorithm for one in found.choices] == ["host_transfer", "nccl"]


def test_one_disturbed_sample_bends_no_line() -> None:
    disturbed = times_of(4e-5, 1e-10)
    disturbed[1 << 20][1] = 1.0
    assert fitted("H200", samples_of(host_transfer=disturbed)) == fitted(
        "H200", samples_of(host_transfer=times_of(4e-5, 1e-10))
    )


def test_what_was_not_measured_has_no_line() -> None:
    found = fitted("H200", samples_of(host_transfer=times_of(2e-5, 5e-10)))
    assert found.nccl is None
    assert [one.algorithm for one in found.choices] == ["host_transfer"]


def on_each(device: ComputingRuntime, streams: list[FakeStream], call: Callable[[int, Any], Any]) -> list[Any]:
    """Each rank in a thread, with a tensor of its stream."""

    def run(rank: int) -> Any:
        with device.on(streams[rank]):
            return call(rank, computed_on(device, torch.empty(0)))

    with ThreadPoolExecutor(RANKS) as pool:
        futures = [pool.submit(run, rank) for rank in range(RANKS)]
        return [future.result(timeout=120) for future in futures]


@pytest.mark.parametrize("places", [None, ["one", "two", "one"]])
def test_all_ranks_find_the_same(
    device: ComputingRuntime, comms: list[Communicator], streams: list[FakeStream], places: list[str] | None
) -> None:
    shared = give_group(device, comms, streams, places=places)
    said: list[str] = []

    def run(rank: int, like: Any) -> MeasuredDeviceSums:
        return measure_device_sums(comms[rank], like, 60.0, lambda part, what: said.append(what) if rank == 0 else None)

    found = on_each(device, streams, run)
    assert len({json.dumps([asdict(one.tuning), one.rows()]) for one in found}) == 1
    names = ["nccl", "host_transfer"] if places is None else ["host_transfer"]
    rows = found[0].rows()
    assert [(row["bytes"], row["algorithm"]) for row in rows] == [(size, name) for size in SIZES for name in names]
    assert all(row["samples"] == 5 and row["median_s"] > 0 for row in rows)
    assert all(row["chosen"] == (found[0].tuning.algorithm(row["bytes"]) == row["algorithm"]) for row in rows)
    assert (found[0].tuning.nccl is None) == (places is not None)
    assert found[0].tuning.device == "fake"
    assert set(shared.sums[0]) == (set(SIZES) if places is None else set())
    assert said == [f"sums of {size} bytes on fake" for size in SIZES]


def test_little_time_measures_two_lengths(
    device: ComputingRuntime, comms: list[Communicator], streams: list[FakeStream]
) -> None:
    found = on_each(device, streams, lambda rank, like: measure_device_sums(comms[rank], like, 1e-6, lambda *_: None))
    assert [row["bytes"] for row in found[0].rows()] == [*SIZES[:2]]


def test_devices_of_several_kinds_are_refused(
    device: ComputingRuntime, comms: list[Communicator], streams: list[FakeStream]
) -> None:
    give_group(device, comms, streams, kinds=["H200", "H200", "A100"])

    def run(rank: int, like: Any) -> None:
        with pytest.raises(ValueError, match=r"several kinds \(A100, H200\).*calibrate without device="):
            measure_device_sums(comms[rank], like, 1.0, lambda *_: None)

    on_each(device, streams, run)


def joined(
    device: ComputingRuntime, streams: list[FakeStream], call: Callable[[Communicator, Any], Any], shared: StandIn
) -> list[Any]:
    """The same over UCX, as calibration needs a network; each rank has a group of NCCL's."""
    barrier, blobs = threading.Barrier(RANKS), [b""] * RANKS

    def run(rank: int, like: Any) -> Any:
        def exchange(blob: bytes) -> list[bytes]:
            blobs[rank] = blob
            barrier.wait(30)
            return list(blobs)

        with Communicator.from_exchange(rank, RANKS, exchange, device_group=shared.group_of(rank)) as comm:
            return call(comm, like)

    return on_each(device, streams, run)


def test_a_tuning_has_what_was_measured_and_later_jobs_go_by_it(
    device: ComputingRuntime,
    comms: list[Communicator],
    streams: list[FakeStream],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shared = give_group(device, comms, streams)
    monkeypatch.setattr(calibration, "_tensor_on", lambda given: given)
    first = joined(device, streams, lambda comm, like: telegrad.calibrate(comm, device=like), shared)
    assert first == [first[0]] * RANKS
    assert first[0].on_device is not None
    assert first[0].on_device.nccl is not None

    def later(comm: Communicator, like: Any) -> tuple[Tuning | None, list[int]]:
        before = len(shared.sums[comm.rank])
        for size in (8, 1 << 20):
            comm.all_reduce(like.new_ones(size // 4))
        comm.synchronize()
        return comm.tuning, shared.sums[comm.rank][before:]

    expected = [size for size in (8, 1 << 20) if first[0].on_device.algorithm(size) == "nccl"]
    assert joined(device, streams, later, shared) == [(first[0], expected)] * RANKS

    def without(comm: Communicator, like: Any) -> Calibration:
        return measure(comm, seconds=1e-6)

    again = joined(device, streams, without, shared)  # of hosts alone: what was known of devices stays
    assert [one.tuning.on_device for one in again] == [first[0].on_device] * RANKS
    assert to_data(again[0])["device_rows"] == []


def test_ranks_measure_devices_all_or_none(
    device: ComputingRuntime, comms: list[Communicator], streams: list[FakeStream]
) -> None:
    shared = give_group(device, comms, streams)

    def run(comm: Communicator, like: Any) -> None:
        with pytest.raises(ValueError, match="device= was given on rank 0 and not on rank 1: give it on all ranks or"):
            measure(comm, seconds=1.0, like=None if comm.rank == 1 else like)

    joined(device, streams, run, shared)


@pytest.mark.parametrize("given", ["cpu", "meta"])
def test_devices_that_have_no_streams(given: str) -> None:
    with pytest.raises(ValueError, match=f"device='{given}' has no streams that communicate: give a CUDA device"):
        telegrad.calibrate(Communicator.local(1)[0], device=given)
