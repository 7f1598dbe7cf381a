"""Sums by torch's Gloo among ranks that have joined for a calibration."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from telegrad.launch import Ranks

pytestmark = pytest.mark.ranks("torch")


def _told(case: str, address: str | None = "127.0.0.1") -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = [{}, {}]
    environment = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    if address is not None:
        environment["MASTER_ADDR"] = address
    with Ranks(
        "gloo_program:main",
        2,
        timeout_s=100.0,
        arguments=[case],
        environment=environment,
        on_line=lambda rank, line: lines[rank].update(json.loads(line)),
    ) as ranks:
        ranks.wait()
    return lines


def test_a_line_through_the_times_of_short_and_long_sums() -> None:
    for told in _told("plain"):
        startup_s, s_per_byte = told["found"]
        assert 0 <= startup_s < 60
        assert 0 <= s_per_byte < 60
        assert told["said"][:2] == ["0 sums of 65536 bytes by Gloo", "0.25 sums of 1048576 bytes by Gloo"]
        assert not told["left"]


@pytest.mark.parametrize(("case", "address"), [("torchless", "127.0.0.1"), ("plain", None), ("elsewhere", "192.0.2.1")])
def test_all_go_without_where_one_rank_cannot(case: str, address: str | None) -> None:
    for told in _told(case, address):
        assert told == {"found": None, "said": [], "left": False}
