"""Errors of a group that is not the whole job say which ranks of the job they mean."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from telegrad.launch import Ranks

pytestmark = pytest.mark.ranks("torch")

HERE = Path(__file__).parent


@pytest.mark.timeout(200)
@pytest.mark.parametrize("backend", ["gloo", "telegrad"])
def test_they_are_named_as_the_job_numbers_them(tmp_path: Path, backend: str) -> None:
    lines: list[tuple[int, str]] = []
    with Ranks(
        "group_ranks_program:main",
        4,
        arguments=[f"file://{tmp_path / 'store'}", backend],
        environment={"PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]), "OMP_NUM_THREADS": "1"},
        environment_of=lambda rank: {"RANK": str(rank), "WORLD_SIZE": "4"},
        on_line=lambda rank, line: lines.append((rank, line.rstrip())),
        timeout_s=180,
    ) as ranks:
        ranks.wait()
    ways = ["from_torch"] if backend == "gloo" else ["from_torch", "new_group"]
    said = sorted((rank, line) for rank, line in lines if line.startswith(("from_torch", "new_group")))
    assert said == [(rank, f"{way} 1 {rank} 3") for rank in (1, 3) for way in ways]
