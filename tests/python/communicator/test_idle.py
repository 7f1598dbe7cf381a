"""A communicator that nobody uses leaves the cores to others, heartbeats included."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from telegrad.launch import Ranks

_ENVIRONMENT = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}


def test_an_idle_communicator_uses_next_to_no_processor_time() -> None:
    shares: list[float] = []
    with Ranks(
        "idle_program:rest",
        4,
        arguments=["3"],
        environment=_ENVIRONMENT,
        on_line=lambda _, line: shares.append(float(line)),
        timeout_s=60,
    ) as ranks:
        ranks.wait()
    assert len(shares) == 4
    assert max(shares) < 0.01, shares  # processor time, not wall time: other processes do not count
