"""How the processes of a job find each other: through torch's store, which torchrun or init_process_group provides, or
rank 0 of a Slurm step.

Peers exchange opaque addresses here, once, when a communicator is made. This module must not know what is in them."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import socket
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from telegrad._interfaces import rdma_ports
from telegrad.communicator.rendezvous.store_exchange import (
    VARIABLES,
    JobPlace,
    StoreExchange,
    attempt,
    check_not_inherited,
    store_again,
    store_of,
)
from telegrad.communicator.torch_terms import address_of
from telegrad.errors import RendezvousError

# Slurm: srun's variables become those by which torch's rendezvous finds the other processes.

# Of a step: a batch script, and a shell of salloc, have SLURM_PROCID and SLURM_NTASKS too, and no other ranks.
_OF_STEP = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_JOB_ID")
_NUMBERS_OF_NO_RANKS = 0xFFFFFFF0  # and up: of what Slurm runs as a step by itself, as the shell of salloc on a node
_LAUNCHED_BY_MPI = {  # the variables of rank and size; PMIx has none of size
    "PMI_RANK": "PMI_SIZE",
    "OMPI_COMM_WORLD_RANK": "OMPI_COMM_WORLD_SIZE",
    "PMIX_RANK": "",
}
_PORTS = range(15000, 31000)  # below those that systems hand out by themselves


def variables_of_step(environment: Mapping[str, str]) -> dict[str, str]:
    """RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT of a process that srun has started; of any other,
    nothing. MASTER_ADDR is left out where the variables do not tell the host of rank 0 (``why_not_found`` says more).

    The port is one that follows from the numbers of job and step, so that steps beside each other are likely to have
    different ones."""
    if _why_no_rank(environment):
        return {}
    rank, size, _, _ = (environment[name] for name in _OF_STEP)
    place = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
        "MASTER_PORT": str(_PORTS[zlib.crc32(name_of_step(environment).encode()) % len(_PORTS)]),
    }
    host = _host_of_rank_0(environment)
    return place if host is None else {**place, "MASTER_ADDR": host}


def why_not_found(environment: Mapping[str, str]) -> str:
    """What a process of a Slurm job lacks to find its peers, and the remedy; of any other process, and where nothing
    is lacking, the empty text."""
    if not environment.get("SLURM_JOB_ID"):
        return ""
    why = _why_no_rank(environment)
    if why:
        return f"{why}: start the ranks with `srun python script.py`{_how_of_mpi(environment)}"
    if _host_of_rank_0(environment) is None:
        return (
            f"rank 0 need not be on the first host of SLURM_STEP_NODELIST={environment['SLURM_STEP_NODELIST']!r} here "
            "(srun --distribution=arbitrary, or a heterogeneous step): export MASTER_ADDR=<host of rank 0> before srun"
        )
    return ""


def _how_of_mpi(environment: Mapping[str, str]) -> str:
    """The remedy for a rank of mpiexec, after others; of any other process, the empty text."""
    if not any(environment.get(name) for name in _LAUNCHED_BY_MPI):
        return ""
    return ", or, as mpiexec has started this process, call Communicator.from_mpi(MPI.COMM_WORLD)"


def hosts_of(nodes: str) -> list[str]:
    """A list in Slurm's notation: ``"gpu[007-008,12],login"`` is gpu007, gpu008, gpu12 and login."""
    found: list[str] = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodes):
        pieces = re.split(r"\[([^\]]*)\]", part)  # in turn text and ranges
        choices = [_numbers_of(piece) if index % 2 else [piece] for index, piece in enumerate(pieces)]
        found += map("".join, itertools.product(*choices))
    return found


def name_of_step(environment: Mapping[str, str]) -> str:
    """The same in all processes of a step, and another after a requeue; a step without a number counts as the first."""
    restarts = environment.get("SLURM_RESTART_COUNT") or "0"
    restarted = "" if restarts == "0" else f", restart {restarts}"
    return f"step {environment.get('SLURM_STEP_ID', '0')} of Slurm's job {environment['SLURM_JOB_ID']}{restarted}"


def _why_no_rank(environment: Mapping[str, str]) -> str:
    """sbatch and salloc hand the variables of the shell that they are called in on to their job: if that was one of a
    step, they look like this job's."""
    job = f"this process of Slurm's job {environment.get('SLURM_JOB_ID')} is in no step of srun"
    if not all(environment.get(name) for name in _OF_STEP):
        return f"{job} (a batch script, or a shell of salloc)"
    step = environment.get("SLURM_STEP_ID", "0")
    if step.isdecimal() and int(step) >= _NUMBERS_OF_NO_RANKS:
        return f"{job} (a shell of salloc, or a batch script submitted from one)"
    node, nodes = environment.get("SLURMD_NODENAME"), environment["SLURM_STEP_NODELIST"]
    if node and node not in hosts_of(nodes):
        return f"{job} (SLURM_STEP_NODELIST={nodes!r} is of another one: this node is {node}, SLURMD_NODENAME)"
    size = environment["SLURM_STEP_NUM_TASKS"]
    tasks = environment.get("SLURM_NTASKS") or size
    if tasks != size:
        return (
            f"{job}, or was started by srun --preserve-env, which must be left out (SLURM_NTASKS={tasks!r}, but "
            f"SLURM_STEP_NUM_TASKS={size!r})"
        )
    # mpiexec may start its daemons by srun. Ranks then have the variables of their daemon's task.
    rank = environment["SLURM_PROCID"]
    for name, of_size in _LAUNCHED_BY_MPI.items():
        place = (environment.get(name, rank), environment.get(of_size, size))
        if place != (rank, size):
            return (
                f"this process of Slurm's job {environment['SLURM_JOB_ID']} is rank {place[0]} of {place[1]} by {name} "
                f"of mpiexec, and task {rank} of {size} of srun's step (unset {name} if it is left from another job)"
            )
    return ""


def _host_of_rank_0(environment: Mapping[str, str]) -> str | None:
    """The step's first host, where Slurm puts rank 0 unless it was told otherwise. The list is sorted, so that of a
    heterogeneous step's hosts the first may be of any component; rank 0 is in the step's first component."""
    hosts = hosts_of(environment["SLURM_STEP_NODELIST"])
    if not hosts or (len(hosts) > 1 and environment.get("SLURM_DISTRIBUTION") == "arbitrary"):
        return None
    first = hosts[0]
    for group in range(_components(environment)):
        names = (f"SLURM_JOB_NODELIST_{kind}_GROUP_{group}" for kind in ("HET", "PACK"))
        of_group = hosts_of(next((environment[name] for name in names if environment.get(name)), ""))
        if of_group and set(of_group) <= set(hosts):
            first = of_group[0]
            break
    node = environment.get("SLURMD_NODENAME")
    return None if environment["SLURM_PROCID"] == "0" and node and node != first else first


def _components(environment: Mapping[str, str]) -> int:
    size = environment.get("SLURM_HET_SIZE", "")
    return int(size) if size.isdecimal() else 0


def _numbers_of(ranges: str) -> list[str]:
    numbers: list[str] = []
    for one in ranges.split(","):
        first, _, last = one.partition("-")
        if first.isdecimal() and last.isdecimal():
            numbers += (f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1))
        else:
            numbers.append(one)
    return numbers


Exchange = Callable[[bytes], list[bytes]]
"""Gives every rank's bytes, by rank, for one's own."""

_HOW_TO_START = (
    "start the job with `torchrun --nproc-per-node N script.py` or, under Slurm, with srun, or call "
    "torch.distributed.init_process_group() before, or use Communicator.local(n) for ranks inside one process"
)
_made: Counter[str] = Counter()  # communicators per set of ranks: every rank counts alike
_step = ""  # of Slurm's, if its variables say where the job is


@dataclass(frozen=True)
class Peers:
    """This process's place in the job, and the way to swap bytes with the others. ``prefix``: of the store's keys that
    belong to this. ``is_first``: of the whole job, for the first time."""

    rank: int
    size: int
    exchange: StoreExchange
    prefix: str
    is_first: bool


def find_peers(group: Any = None, *, join_timeout_s: float = 300.0) -> Peers:
    """Peers of ``group`` (a torch process group; ``None`` is the whole job).

    Raises ``RendezvousError`` if there is no job to join or its store cannot be reached, ``ImportError`` without
    torch and ``ValueError`` if this process is not in ``group``."""
    try:
        import torch.distributed as dist
    except ImportError as error:
        raise ImportError(
            "Communicator.from_torch() needs torch, which finds the peers: pip install 'telegrad[torch]'"
        ) from error
    place = None
    if dist.is_available() and dist.is_initialized():
        rank = dist.get_rank(group)
        if rank < 0:
            raise ValueError(
                f"group does not hold this process (rank {dist.get_rank()}): call from_torch(group) on its members only"
            )
        size = dist.get_world_size(group)
        # Torch 2.6 has no get_process_group_ranks(None).
        name = "all" if size == dist.get_world_size() else _name_of(dist.get_process_group_ranks(group))
        store: Any = dist.distributed_c10d._get_default_store()  # the only way to the job's store, public or not
        check_not_inherited(store)
    else:
        if group is not None:
            raise ValueError(
                "group was given but torch.distributed is not initialised: call init_process_group() first"
            )
        place = _place_in_environment()
        rank, size, name = place.rank, place.size, "all"
        store = store_of(place, join_timeout_s)
    own, prefix = dist.distributed_c10d.PrefixStore, f"telegrad/{name}/{_made[name]}"
    _made[name] += 1
    exchange = StoreExchange(
        own(prefix, store),
        rank,
        size,
        join_timeout_s,
        job=os.environ.get("TORCHELASTIC_RUN_ID") or _step,
        attempt=attempt(),
        again=None if place is None else lambda left_s: own(prefix, store_again(place, left_s)),
        address=address_of(store) if place is None else place.address,
    )
    return Peers(rank, size, exchange, prefix, prefix == "telegrad/all/0")


def check_interface(interface: str | None) -> None:
    """Raises ``ValueError`` if this machine has no network interface, nor a port of RDMA, of that name, or of one of
    several that are separated by commas."""
    if interface is None:
        return
    present = [*(name for _, name in socket.if_nameindex()), *rdma_ports()]
    for name in interface.split(","):
        if name not in present:
            asked = f"interface={interface!r}" + (f": {name!r}" if name != interface else "")
            raise ValueError(f"{asked} does not exist on this machine: use one of {', '.join(present)}")


def _place_in_environment() -> JobPlace:
    global _step
    step, why = {}, ""
    if not os.environ.get("RANK"):
        step, why = variables_of_step(os.environ), why_not_found(os.environ)
        if step and (size := os.environ.get("WORLD_SIZE", "")) not in ("", step["WORLD_SIZE"]):
            raise RendezvousError(
                f"WORLD_SIZE={size!r}, but this is a step of {step['WORLD_SIZE']} tasks (SLURM_STEP_NUM_TASKS), and "
                "there is no RANK: unset WORLD_SIZE, or set all of " + ", ".join(VARIABLES)
            )
    missing = [name for name in VARIABLES if not (os.environ.get(name) or step.get(name))]
    if missing:
        raise RendezvousError(
            "no peers found: torch.distributed is not initialised, and the environment has no "
            f"{', '.join(missing)}: {why or _HOW_TO_START + _how_of_mpi(os.environ)}"
        )
    for name, value in step.items():
        if not os.environ.get(name):
            os.environ[name] = value  # here, so that a later init_process_group() finds the same job
    _step = name_of_step(os.environ) if step else _step
    return JobPlace.of(os.environ)


def _name_of(members: Sequence[int]) -> str:
    text = ".".join(map(str, members))
    return text if len(members) <= 64 else hashlib.sha256(text.encode()).hexdigest()[:16]
