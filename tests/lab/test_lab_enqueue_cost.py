"""The measurement of what the host spends on an operation of a device."""

from __future__ import annotations

import pytest

from lab import enqueue_cost
from telegrad.communicator.cuda import runtime, transfers


def test_enqueue_costs_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "CHUNK_BYTES", transfers.CHUNK_BYTES)
    monkeypatch.setattr(runtime, "_makers", dict(runtime._makers))
    monkeypatch.setattr(runtime, "_runtimes", dict(runtime._runtimes))
    rows = enqueue_cost.measure([1, 3], 10)
    assert [(row["chunks"], row["form"].count("wait")) for row in rows] == [
        *((1, 0), (1, 0), (1, 1)),
        *((3, 0), (3, 0), (3, 1)),
    ]
    assert all(0 < row["median_us"] <= row["p99_us"] for row in rows)
