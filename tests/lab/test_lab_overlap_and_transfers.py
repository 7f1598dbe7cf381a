"""``python -m lab transfers`` and ``overlap`` from the command to the rows, over a device without hardware: the ranks
are processes, each with streams of its own (device_ranks_of_benchmarks.py)."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("matplotlib")

import torch
from computing_device import ComputingRuntime
from fake_device import DEVICE_TYPE
from measured_device import MeasuredDevice
from typer.testing import CliRunner

from lab import overlap, transfers
from lab.common.device_profile import KERNELS, TO_DEVICE, TO_HOST, Interval, intervals_of
from lab.common.experiments import app
from lab.overlap import OverlapPlan, Sample, row_of, timelines_of
from lab.transfers import OPERATIONS, Times, TransfersPlan, enqueueing_text, panels_of, quantile
from lab.transfers import row_of as transfers_row_of
from telegrad import Communicator
from telegrad.communicator.cuda import runtime as runtimes

HERE = Path(__file__).parent


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU, as far as commands look; the ranks they start have the fake one."""
    monkeypatch.setattr("telegrad.tools.bench.device.gpu_name", lambda: "A Fast GPU")
    monkeypatch.setattr(transfers, "TARGET", "device_ranks_of_benchmarks:transfers_main")
    monkeypatch.setattr(overlap, "TARGET", "device_ranks_of_benchmarks:overlap_main")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE.parent), *sys.path]))


def _run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app(arguments[:1]), arguments, env={"COLUMNS": "200"})
    return done.exit_code, done.output


@pytest.mark.ranks("torch")
@pytest.mark.usefixtures("gpu")
def test_transfers_of_one_and_two_ranks(tmp_path: Path) -> None:
    found, drawn = tmp_path / "rows.json", tmp_path / "plot.png"
    status, output = _run(
        *("transfers", "--ranks", "1,2", "--sizes", "4,5MiB", "--samples", "4", "--seconds", "1", "--timeout", "60"),
        *("--json", str(found), "--plot", str(drawn)),
    )
    assert status == 0, output
    result = json.loads(found.read_text())
    assert result["failures"] == []
    assert result["machine"]["gpu"] == "A Fast GPU"
    rows = result["rows"]
    alone = [name for name in OPERATIONS if name != "send"]
    assert [(row["ranks"], row["bytes"], row["op"]) for row in rows] == [
        (ranks, size, name) for ranks, names in ((1, alone), (2, OPERATIONS)) for size in (4, 5 << 20) for name in names
    ]
    for row in rows:
        assert row["wrong"] == 0
        assert row["samples"] >= 3
        assert row["enqueue_calls"] == row["samples"] * row["ranks"]
        assert 0 < row["min_s"] <= row["median_s"] <= row["p90_s"]
        assert 0 < row["enqueue_median_s"] <= row["enqueue_p99_s"]
        assert row["bound_s"] == max(row["copies_median_s"], row["host_median_s"])
    assert "enqueued within 50 µs:" in output
    assert drawn.read_bytes()[:4] == b"\x89PNG"
    assert not list(tmp_path.glob("*.partial"))


def test_long_vectors_are_measured_once_where_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    call = transfers._Case.call
    monkeypatch.setattr(transfers._Case, "call", lambda case, x: [calls.append(x.nbytes), call(case, x)][1])
    monkeypatch.setattr(transfers, "_LONG_BYTES", 4096)
    runtime = ComputingRuntime()
    monkeypatch.setitem(runtimes._makers, DEVICE_TYPE, lambda: runtime)
    monkeypatch.setitem(runtimes._runtimes, DEVICE_TYPE, runtime)
    rows: list[dict[str, Any]] = []
    plan = TransfersPlan(1, (4096, 8192), ("all_reduce",), seconds=0.0)
    with Communicator.local(1, timeout_s=60.0)[0] as alone, runtime.on(runtime.new_stream()):
        transfers.measure(plan, alone, MeasuredDevice(runtime), rows.append)
    runtime.stop()
    assert [(row["bytes"], row["samples"], row["wrong"]) for row in rows] == [(4096, 3, 0), (8192, 1, 0)]
    assert [calls.count(size) for size in (4096, 8192)] == [2 * (2 + 3), 2 * (1 + 1)]  # on the device and on the host


@pytest.mark.ranks("torch")
@pytest.mark.usefixtures("gpu")
def test_overlap_of_two_ranks(tmp_path: Path) -> None:
    found, drawn = tmp_path / "rows.json", tmp_path / "plot.png"
    status, output = _run(
        *("overlap", "--ranks", "2", "--sizes", "64KiB,5MiB", "--matrix", "64", "--samples", "3", "--timeout", "60"),
        *("--json", str(found), "--plot", str(drawn)),
    )
    assert status == 0, output
    rows = json.loads(found.read_text())["rows"]
    assert [(row["op"], row["bytes"]) for row in rows] == [
        *(("overlap", 64 << 10), ("overlap", 5 << 20), ("trace", 5 << 20))
    ]
    for row in rows[:2]:
        assert row["wrong"] == 0
        assert row["kernels"] >= 8
        lanes = [lane for lane, _, _ in row["timeline"]]
        assert lanes == ["all_reduce", *["kernels"] * row["kernels"]]
        ends = [end for _, _, end in row["timeline"][1:]]
        assert ends == sorted(ends)
        assert math.isfinite(row["hidden"])
    assert [lane for lane, _, _ in rows[2]["intervals"]] == [KERNELS]
    assert drawn.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.ranks("torch")
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("command", ["transfers", "overlap"])
def test_what_fails_is_written_and_takes_nothing_along(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "TARGET", "device_ranks_of_benchmarks:no_such_function")
    monkeypatch.setattr(overlap, "TARGET", "device_ranks_of_benchmarks:no_such_function")
    found = tmp_path / "rows.json"
    status, output = _run(command, "--ranks", "1,2", "--sizes", "4", "--json", str(found))
    assert status == 1
    assert "no_such_function" in output
    result = json.loads(found.read_text())
    assert result["rows"] == []
    assert [one["ranks"] for one in result["failures"]] == [1, 2]
    assert "no_such_function" in result["failures"][0]["error"]


@pytest.mark.parametrize("command", ["transfers", "overlap"])
def test_without_a_gpu_they_say_so(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert _run(command) == (1, "no GPU: torch sees none here, and nothing was measured\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["transfers", "--ranks", "0"], "'0' is no number from 1 to 64"),
        (["transfers", "--sizes", "3"], "'3' is not a whole number of 4-byte floats"),
        (["transfers", "--operations", "scan"], "'scan' does not exist: use all_reduce"),
        (["transfers", "--json", "/nowhere/x.json"], "the folder /nowhere does not exist"),
        (["overlap", "--plot", "/nowhere/x.png"], "the folder /nowhere does not exist"),
    ],
)
def test_bad_options_of_gpu_benchmarks(arguments: list[str], message: str) -> None:
    status, output = _run(*arguments)
    assert status == 2
    assert message in " ".join(output.replace("│", " ").split())


def test_a_row_of_transfers() -> None:
    times = Times([4e-3] * 3, [1e-3] * 3, [2e-3] * 3, [40e-6] * 99 + [1e-3])
    row = transfers_row_of(TransfersPlan(2, (1 << 20,)), "all_reduce", 1 << 20, times, 0)
    assert row["bound_s"] == 2e-3
    assert row["of_bound"] == pytest.approx(0.5)
    assert (row["ratio_to_copies"], row["ratio_to_host"]) == (pytest.approx(4), pytest.approx(2))
    assert row["ratio_to_one_after_the_other"] == pytest.approx(4 / 3)
    assert row["copies_bytes_per_s"] == pytest.approx(2 * (1 << 20) / 1e-3)
    assert row["enqueued_within_50_us"] is True
    assert row["enqueue_p99_s"] == 40e-6
    late = transfers_row_of(
        TransfersPlan(2, (4,)), "send", 4, Times([1.0] * 3, [1.0] * 3, [1.0] * 3, [51e-6, 52e-6, 53e-6]), 0
    )
    assert late["enqueued_within_50_us"] is False
    assert "1 of 2 rows; the longest median is 52.0 µs (send of 4 B, 2 ranks)" in enqueueing_text([row, late])
    assert [panel.about for panel in panels_of([row, late])] == ["all_reduce, 2 ranks", "send, 2 ranks"]
    assert quantile([3.0, 1.0, 2.0], 0.99) == 3.0
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0


def test_what_is_hidden() -> None:
    own = Sample(2.0, [1.0, 1.5, 3.0], 3.5, 0.1)
    row = row_of(
        OverlapPlan(2, (4,)),
        4,
        communication_s=[2.0] * 3,
        computation_s=[3.0] * 3,
        both_s=[3.5] * 3,
        own=[own] * 3,
        wrong=0,
    )
    assert row["hidden"] == pytest.approx(0.75)
    assert row["kernels_meanwhile"] == 2
    assert row["timeline"] == [
        *(("all_reduce", 0.0, 2.0), ("kernels", 0.0, 1.0), ("kernels", 1.0, 1.5), ("kernels", 1.5, 3.0))
    ]
    trace = {"op": "trace", "ranks": 2, "bytes": 4, "intervals": [["kernels", 0.0, 1.0]]}
    missing = {"op": "trace", "ranks": 2, "bytes": 4, "missing": "RuntimeError: no CUPTI"}
    assert list(timelines_of([row, trace, missing])) == [
        "4 B, 2 ranks: 75% hidden",
        "4 B, 2 ranks, by torch's profiler",
    ]


def test_intervals_of_a_trace() -> None:
    events = [
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy DtoH (Device -> Pinned)", "ts": 1010.0, "dur": 20.0},
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)", "ts": 1040, "dur": 5},
        {"ph": "X", "cat": "kernel", "name": "sgemm", "ts": 1000.0, "dur": 15.0, "args": {"stream": 7}},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 990.0, "dur": 5.0},
        {"ph": "f", "cat": "ac2g", "name": "ac2g", "ts": 990.0},
        {"ph": "M", "name": "process_name", "ts": 0},
    ]
    found = intervals_of({"traceEvents": events})
    assert [one.lane for one in found] == [KERNELS, TO_HOST, TO_DEVICE]
    assert found[1] == Interval(TO_HOST, pytest.approx(10e-6), pytest.approx(30e-6))
    assert intervals_of({}) == []
