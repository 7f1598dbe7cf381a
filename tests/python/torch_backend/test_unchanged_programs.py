"""Programs written for torch.distributed run over telegrad unchanged, and find what they find over Gloo."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch_programs

from telegrad.launch import Ranks

pytestmark = pytest.mark.ranks("torch")

HERE = Path(__file__).parent


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("backend", "size"), [("cpu:telegrad", 2), ("telegrad", 3), pytest.param("telegrad", 8, marks=pytest.mark.slow)]
)
def test_programs_find_what_they_find_over_gloo(tmp_path: Path, backend: str, size: int) -> None:
    found = _run(size, f"file://{tmp_path / 'store'}", "gloo", backend)
    assert len(found) == 2 * size * len(torch_programs.PROGRAMS)
    for name in torch_programs.PROGRAMS:
        for rank in range(size):
            assert found[backend, name, rank] == found["gloo", name, rank], f"{name} on rank {rank}"


def _run(size: int, *arguments: str) -> dict[tuple[str, str, int], str]:
    """By backend, program and rank, what was found."""
    found = {}

    def take(rank: int, line: str) -> None:
        words = line.split()
        if len(words) == 3 and words[1] in torch_programs.PROGRAMS:
            found[words[0], words[1], rank] = words[2]

    environment = {"PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]), "OMP_NUM_THREADS": "1"}
    with Ranks(
        "torch_programs:main",
        size,
        arguments=list(arguments),
        environment=environment,
        environment_of=lambda rank: {"RANK": str(rank), "WORLD_SIZE": str(size)},
        on_line=take,
        timeout_s=300,
    ) as ranks:
        ranks.wait()
    return found
