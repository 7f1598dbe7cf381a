"""Replicas of a sharded model, whose gradients telegrad averages: four processes, 2 replicas by 2 shards."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from telegrad.launch import Ranks

pytestmark = [
    pytest.mark.ranks("torch"),
    pytest.mark.skipif(
        not hasattr(torch.cpu.Stream, "record_event"), reason="fully_shard of torch 2.6 trains no model on the CPU"
    ),
]

RANKS = 4
SCENARIOS = [
    "dense_is_ddp_and_hsdp",
    "sparse_learns_and_resumes",
    "refusals",
    "models_that_change_are_refused",
    "steps_inside_the_backward_pass_are_refused",
    "other_dtypes_are_averaged",
    "averages_thrown_away",
]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], list[dict[str, str]]]:
    """What each rank said of each scenario; all of one job, since importing torch is slow."""

    @functools.cache
    def report() -> list[dict[str, str]]:
        folder = tmp_path_factory.mktemp("job")
        lines: list[list[str]] = [[] for _ in range(RANKS)]
        ranks = Ranks(
            "replicas_program:run",
            RANKS,
            arguments=[f"file://{folder / 'store'}"],
            environment={
                "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
                "OMP_NUM_THREADS": "1",
                "TMPDIR": str(folder),
            },
            environment_of=lambda rank: {"RANK": str(rank), "WORLD_SIZE": str(RANKS)},
            on_line=lambda rank, line: lines[rank].append(line.rstrip()),
            timeout_s=280,
        )
        with ranks:
            try:
                ranks.wait()
            except Exception as error:
                for said in lines:
                    said.append(f"- {error}")
        return [dict(line.split(" ", 1) for line in said) for said in lines]

    return report


@pytest.mark.timeout(300)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_four_ranks(reports: Callable[[], list[dict[str, str]]], scenario: str) -> None:
    said = [report.get(scenario, f"was not reached: {report.get('-')}") for report in reports()]
    assert said == ["ok"] * RANKS
