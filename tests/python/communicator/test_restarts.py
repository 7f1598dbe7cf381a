"""Jobs that torchrun starts again, whose store holds what the attempt before has left; and children that ranks fork."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from ports import free_port
from torchrun_stand_ins import FORKING_TORCHRUN

from telegrad.launch import SINGLE_THREADED, Ranks

HERE = Path(__file__).parent
_ENVIRONMENT = {**SINGLE_THREADED, "PYTHONPATH": os.pathsep.join(sys.path)}


@pytest.mark.parametrize("backend", [None, "telegrad", "gloo"])
def test_torchrun_starts_the_ranks_again(backend: str | None) -> None:
    environment = {**os.environ, **_ENVIRONMENT}
    if backend == "gloo":  # whose ranks do not find each other in a store that is not new
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    real = ["-m", "torch.distributed.run"]  # of all that it starts anew, ranks of one job are enough
    torchrun = [sys.executable, *(real if backend == "telegrad" else [str(FORKING_TORCHRUN)])]
    options = ["--standalone", "--nproc-per-node=2", "--max-restarts=1", "--monitor-interval=0.1"]
    command = [*torchrun, *options, str(HERE / "restart_program.py"), *([backend] if backend else [])]
    for _ in range(3):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
        if "EADDRINUSE" not in done.stderr:  # a port that torchrun had found free, and another process took
            break
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.split("\n")[:-1]) == [f"attempt 1: rank {rank} is through" for rank in range(2)]


@pytest.mark.ranks("torch")
@pytest.mark.parametrize(
    ("how", "place", "heard"),
    [
        (
            "launcher",
            "open",
            "this process was forked from one that had a Communicator, and UCX works in that",
        ),
        ("torch", "open", "this process was forked from a rank that had joined its job"),
        ("torch", "closed", "this process was forked from a rank that had joined its job"),
    ],
)
def test_a_forked_child_does_not_join_in_its_parents_place(how: str, place: str, heard: str) -> None:
    lines = defaultdict[int, list[str]](list)
    with Ranks(
        str(HERE / "forking_program.py"),
        2,
        arguments=[how, place],
        timeout_s=100.0,
        environment={**_ENVIRONMENT, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())},
        environment_of=lambda rank: {"RANK": str(rank)},
        on_line=lambda rank, line: lines[rank].append(line),
    ) as ranks:
        ranks.wait()
    for rank in range(2):
        assert lines[rank][0].startswith(f"child: {heard}")
        assert lines[rank][1:] == (["parent: 20"] if place == "open" else [])
