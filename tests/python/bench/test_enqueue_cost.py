"""The measurement of what the host spends on an operation of a device."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from telegrad.comm.device import runtime, transfers

PROGRAM = Path(__file__).resolve().parents[3] / "benchmarks" / "enqueue_cost.py"


def test_enqueue_costs_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "CHUNK_BYTES", transfers.CHUNK_BYTES)
    monkeypatch.setattr(runtime, "_makers", dict(runtime._makers))
    monkeypatch.setattr(runtime, "_runtimes", dict(runtime._runtimes))
    spec = importlib.util.spec_from_file_location("enqueue_cost", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    rows = program.measure([1, 3], 10)
    assert [(row["chunks"], row["form"].count("wait")) for row in rows] == [
        *((1, 0), (1, 0), (1, 1)),
        *((3, 0), (3, 0), (3, 1)),
    ]
    assert all(0 < row["median_us"] <= row["p99_us"] for row in rows)
