"""What srun tells the processes that it starts, as the variables by which torch's rendezvous finds the others."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping

# Of a step: a batch script, and a shell of salloc, have SLURM_PROCID and SLURM_NTASKS too, and no other ranks.
_OF_STEP = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_JOB_ID")
_PORTS = range(15000, 31000)  # below those that systems hand out by themselves


def variables_of_step(environment: Mapping[str, str]) -> dict[str, str]:
    """RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT of a process that srun has started; of any other,
    nothing.

    The address is the step's first host, where Slurm puts rank 0 (unless it was told otherwise), the port one that
    follows from the numbers of job and step, so that steps beside each other are likely to have different ones.
    """
    if not all(environment.get(name) for name in _OF_STEP):
        return {}
    rank, size, nodes, _ = (environment[name] for name in _OF_STEP)
    return {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
        "MASTER_ADDR": first_host(nodes),
        "MASTER_PORT": str(_PORTS[zlib.crc32(name_of_step(environment).encode()) % len(_PORTS)]),
    }


def first_host(nodes: str) -> str:
    """Of a list in Slurm's notation: ``"gpu[007-009,12],login"`` is gpu007 and others."""
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", nodes).partition(",")[0]


def name_of_step(environment: Mapping[str, str]) -> str:
    """The same in all processes of a step; a step without a number counts as the first."""
    return f"step {environment.get('SLURM_STEP_ID', '0')} of Slurm's job {environment['SLURM_JOB_ID']}"
