"""One process that plays all ranks gives bitwise what a job of as many processes with DDP gives, and sends as much."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from lab.accuracy.one_process import checksum
from lab.accuracy.problems import open_problem
from lab.accuracy.runs import METHODS, TASKS, Method, Run
from lab.accuracy.training import Training
from telegrad.launch import SINGLE_THREADED, Ranks

pytestmark = pytest.mark.ranks("torch")

RANKS = 4  # with two, any order of summation gives the same bits


def task_for(method: Method) -> str:
    return next(name for name in ("vgg", *TASKS) if method.fits(TASKS[name]))


def steps_of(method: Method) -> int:
    """A reused threshold is evaluated anew at the ninth."""
    reuses = method.sparse and method.options.get("select", "reused") in ("reused", "sampled")
    return 10 if reuses else 4


RUNS = [
    *(
        Run(task_for(one), one.name, 0.01 if one.sparse else 1.0, 0, steps_of(one), RANKS, RANKS)
        for one in METHODS.values()
        if not one.is_torchs  # by a formula: test_rivals.py
        and one.name not in ("lowrank-1", "lowrank-3", "lowrank-16")  # as lowrank-4, of another rank
    ),
    Run("gpt", "reused", 0.05, 1, 3, 4, RANKS),  # its first step is dense
    Run("lstm", "topk", 0.05, 1, 2, 4, RANKS),
    Run("resnet18", "momentum", 0.05, 1, 3, 8, RANKS, rate=0.5),
    Run("lstm-words", "dense", 1.0, 1, 2, 4, RANKS),
    Run("gpt-clipped", "reused", 0.05, 1, 3, 4, RANKS),
    Run("masked", "lowrank-2", 1.0, 1, 2, 4, RANKS),
]


@pytest.fixture(scope="module")
def said(places: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    """What each rank of the real job said of each run. One start of the processes: importing torch is slow."""
    lines: list[list[dict[str, Any]]] = [[] for _ in range(RANKS)]
    store = tmp_path_factory.mktemp("job") / "store"
    with Ranks(
        "real_job_program:train_all",
        RANKS,
        timeout_s=240,
        arguments=[f"file://{store}", json.dumps([dataclasses.asdict(run) for run in RUNS]), *map(str, places)],
        environment={
            **SINGLE_THREADED,
            "UCX_TLS": "tcp,self",  # a network: over shared memory, streams are not packed
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
        },
        environment_of=lambda rank: {"RANK": str(rank), "WORLD_SIZE": str(RANKS)},
        on_line=lambda rank, line: lines[rank].append(json.loads(line)),
    ) as ranks:
        ranks.wait()
    return [{line["run"]: line for line in of_rank} for of_rank in lines]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.task}-{run.method}")
def test_bits_and_bytes_are_those_of_a_real_job(
    run: Run, said: list[dict[str, dict[str, Any]]], places: tuple[Path, Path], tmp_path: Path
) -> None:
    with Training(run, open_problem(run.task, *places), tmp_path / "saved.npz") as training:
        training.go_on()
        result = training.result()
        buffers = checksum(training.model.buffers())
    assert said[0][run.name]["buffers_crc32"] == buffers  # the other ranks' are overwritten with these
    assert {line[run.name]["weights_crc32"] for line in said} == {result["weights_crc32"]}
    sent = [line[run.name]["sent_bytes"] for line in said]
    assert result["points"][-1]["sent_bytes"] == sum(sent) / RANKS > 0
