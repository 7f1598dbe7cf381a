"""Training with torch's DistributedDataParallel in two processes, against DDP alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import ddp_discards_program
import ddp_methods_program
import ddp_program
import ddp_watch_program
import pytest

from telegrad.launch import Ranks

pytestmark = pytest.mark.ranks("torch")

RANKS = 2
HERE = Path(__file__).parent


def _environment() -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]), "OMP_NUM_THREADS": "1"}


def _ranks(function: str, folder: Path, lines: list[list[str]], **options: object) -> Ranks:
    return Ranks(
        function,
        RANKS,
        arguments=[f"file://{folder / 'store'}"],
        environment=_environment(),
        environment_of=lambda rank: {"RANK": str(rank), "WORLD_SIZE": str(RANKS)},
        on_line=lambda rank, line: lines[rank].append(line.rstrip()),
        **options,  # type: ignore[arg-type]
    )


SCENARIOS = {
    "ddp_program": [scenario.__name__ for scenario in ddp_program.SCENARIOS],
    "ddp_discards_program": [scenario.__name__ for scenario in ddp_discards_program.SCENARIOS],
    "ddp_methods_program": [scenario.__name__ for scenario in ddp_methods_program.SCENARIOS],
    "ddp_watch_program": [scenario.__name__ for scenario in ddp_watch_program.SCENARIOS],
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each rank said of each scenario. One job runs those of all programs: importing torch is slow."""
    lines: list[list[str]] = [[] for _ in range(RANKS)]
    folder = tmp_path_factory.mktemp("job")
    with _ranks("ddp_methods_program:run_all", folder, lines, timeout_s=360) as ranks:
        try:
            ranks.wait()
        except Exception as error:
            for said in lines:
                said.append(f"- {error}")
    return [dict(line.split(" ", 1) for line in said) for said in lines]


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("program", "scenario"), [(program, name) for program, names in SCENARIOS.items() for name in names]
)
def test_two_ranks(reports: list[dict[str, str]], program: str, scenario: str) -> None:
    said = [report.get(scenario, f"was not reached: {report.get('-')}") for report in reports]
    assert said == ["ok"] * RANKS


def test_a_dead_rank_is_reported(tmp_path: Path) -> None:
    lines: list[list[str]] = [[] for _ in range(RANKS)]
    with _ranks("ddp_program:die", tmp_path, lines, timeout_s=100) as ranks:
        exits = ranks.wait(until_all=True)
    assert [(exit.rank, exit.returncode) for exit in exits] == [(0, 0), (1, 9)]
    assert lines[0] == ["PeerFailed True 1"]


TORCHRUN_PROGRAM = """
import sys
import numpy as np
import telegrad
with telegrad.Communicator.from_torch() as comm:  # torch.distributed is not initialised: torchrun's store is enough
    x = np.full(1000, comm.rank + 1, np.float32)
    comm.all_reduce(x)
    assert (comm.driver, comm.world_size, set(x.tolist())) == ("ucx", 2, {3.0})
    import torch.distributed as dist
    dist.init_process_group("gloo")
    with telegrad.Communicator.from_torch() as other:  # and beside it
        assert other.all_gather(np.array(dist.get_rank())).tolist() == [0, 1]
    dist.destroy_process_group()
    sys.stdout.write(f"rank {comm.rank} is done\\n")
"""


def test_torchrun(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(TORCHRUN_PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, check=False, env={**os.environ, **_environment()}
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 is done", "rank 1 is done"]
