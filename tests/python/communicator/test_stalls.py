"""What a rank says of an operation that others have not called, long before it times out."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from telegrad import Communicator

PATIENCE_S = 60.0


def eventually(found: Callable[[], str | None]) -> str:
    until = time.monotonic() + PATIENCE_S
    while (what := found()) is None:
        assert time.monotonic() < until
        time.sleep(0.02)
    return what


def test_a_stall_is_told_once_and_reported_by_the_ranks_concerned(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("TELEGRAD_STALL_S", "2")
    monkeypatch.setenv("TELEGRAD_REPORT_DIR", str(tmp_path))
    one, two = Communicator.local(2)
    with one, two:
        x, y = np.ones(5, np.float32), np.ones(5, np.float32)
        waiting = one.all_reduce(x, async_op=True)
        assert waiting is not None
        said = eventually(lambda: capfd.readouterr().err or None)
        eventually(lambda: "both" if len(list(tmp_path.glob("*.json"))) == 2 else None)
        two.all_reduce(y)
        waiting.wait()
    np.testing.assert_array_equal(x, [2] * 5)
    assert said.count("\n") == 1
    assert said.startswith("telegrad: rank 0: has waited 2 s in allreduce(count=5, dtype=f32, ")
    assert "(operation 0); rank 1 has not called it (rank 1 has called nothing yet); an error follows after " in said
    assert said.endswith(f"; for more: `telegrad report {tmp_path}`\n")
    assert {json.loads(path.read_text())["why"] for path in tmp_path.glob("*.json")} == {"stall"}


@pytest.mark.parametrize("value", ["0", "-1", "1.9", "soon", "inf", "nan"])
def test_a_time_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("TELEGRAD_STALL_S", value)
    with pytest.raises(
        ValueError, match=f"TELEGRAD_STALL_S='{value}' must be a number of seconds, at least 2, or none"
    ):
        Communicator.local(1)


def test_stalls_can_be_silenced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TELEGRAD_STALL_S", "none")
    with Communicator.local(1)[0] as alone:
        alone.barrier()
