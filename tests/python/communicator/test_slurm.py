"""Jobs that Slurm starts: what telegrad reads of its variables."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

import telegrad
from telegrad.communicator.rendezvous.joining import hosts_of, name_of_step, variables_of_step, why_not_found
from telegrad.errors import RendezvousError

STEP = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NODELIST": "node[07-08]",
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "2",
    "SLURM_LOCALID": "1",
}


def test_a_step_says_all_that_torch_asks() -> None:
    found = variables_of_step(STEP)
    port = int(found.pop("MASTER_PORT"))
    assert found == {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "node07"}
    assert 15000 <= port < 31000
    others = [{**STEP, "SLURM_STEP_ID": "3"}, {**STEP, "SLURM_JOB_ID": "1235"}]
    assert len({variables_of_step(one)["MASTER_PORT"] for one in others} | {str(port)}) == 3
    assert variables_of_step({**STEP, "SLURM_PROCID": "5"})["MASTER_PORT"] == str(port)


@pytest.mark.parametrize("missing", ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_JOB_ID"])
def test_no_step_says_nothing(missing: str) -> None:
    batch_script = {**STEP, "SLURM_NTASKS": "8", "SLURM_JOB_NODELIST": "node[07-08]"}
    del batch_script[missing]
    assert variables_of_step(batch_script) == {}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"SLURM_STEP_NUM_TASKS": ""},
            r"job 1234 is in no step of srun \(a batch script, .*: start the ranks with `srun ",
        ),
        ({"SLURM_STEP_ID": "4294967290"}, r"is in no step of srun \(a shell of salloc.*: start the ranks with `srun "),
        ({"SLURMD_NODENAME": "node09"}, r"SLURM_STEP_NODELIST='node\[07-08\]' is of another.*this node is node09"),
        (
            {"SLURM_NTASKS": "4"},
            "--preserve-env, which must be left out .*SLURM_NTASKS='4', but SLURM_STEP_NUM_TASKS='8'",
        ),
        (
            {"PMI_RANK": "5", "PMI_SIZE": "8"},
            r"job 1234 is rank 5 of 8 by PMI_RANK of mpiexec, and task 3 of 8 of srun.s step \(unset PMI.*mpi\(",
        ),
        (
            {"PMI_RANK": "3", "PMI_SIZE": "16"},
            "is rank 3 of 16 by PMI_RANK of mpiexec.*start the ranks with `srun .*, or, .*from_mpi",
        ),
        ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}, r"is rank 3 of 4 by OMPI.*from_mpi\("),
        ({"PMIX_RANK": "0"}, r"is rank 0 of 8 by PMIX_RANK of.*from_mpi\("),
    ],
)
def test_variables_of_the_shell_that_a_job_came_from(changes: dict[str, str], message: str) -> None:
    """What Slurm 22.05 leaves in a batch script that a step has submitted, and in the shell of salloc."""
    assert variables_of_step({**STEP, **changes}) == {}
    assert re.search(message, why_not_found({**STEP, **changes}))


def test_nothing_is_lacking_in_a_step_and_outside_slurm() -> None:
    of_srun = {**STEP, "SLURM_NTASKS": "8", "SLURMD_NODENAME": "node08"}
    with_pmi = {**of_srun, "PMI_RANK": "3", "PMI_SIZE": "8", "PMIX_RANK": "3"}  # srun --mpi=pmi2, --mpi=pmix
    assert variables_of_step(of_srun) == variables_of_step(STEP) == variables_of_step(with_pmi)
    assert [why_not_found(one) for one in (of_srun, STEP, {}, with_pmi)] == ["", "", "", ""]


def test_ranks_of_mpiexec_are_told_of_from_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside Slurm, and in a step of one task for each node, by which mpiexec starts its daemons: there each rank
    would train alone, or as another one's twin."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PMI_RANK", "1")
    monkeypatch.setenv("PMI_SIZE", "2")
    message = r"no RANK, .*, as mpiexec has started this process, call Communicator.from_mpi\(MPI.COMM_WORLD\)$"
    with pytest.raises(RendezvousError, match=message):
        telegrad.Communicator.from_torch()
    daemon = {**STEP, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NODELIST": "node07"}
    for name, value in daemon.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RendezvousError, match=message):
        telegrad.Communicator.from_torch()


HETEROGENEOUS = {
    **STEP,
    "SLURM_STEP_NODELIST": "n[1,3]",
    "SLURM_HET_SIZE": "3",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "n2",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "n3",
    "SLURM_JOB_NODELIST_HET_GROUP_2": "n1",
}


def test_rank_zero_of_a_heterogeneous_step_is_in_its_first_component() -> None:
    assert variables_of_step(HETEROGENEOUS)["MASTER_ADDR"] == "n3"
    old = {name.replace("HET_GROUP", "PACK_GROUP"): value for name, value in HETEROGENEOUS.items()}
    assert variables_of_step(old)["MASTER_ADDR"] == "n3"
    assert variables_of_step({**HETEROGENEOUS, "SLURM_STEP_NODELIST": "n1"})["MASTER_ADDR"] == "n1"
    assert variables_of_step({**HETEROGENEOUS, "SLURM_STEP_NODELIST": "n4"})["MASTER_ADDR"] == "n4"
    assert variables_of_step({**HETEROGENEOUS, "SLURM_HET_SIZE": "many"})["MASTER_ADDR"] == "n1"


@pytest.mark.parametrize(
    "changes",
    [{"SLURM_DISTRIBUTION": "arbitrary"}, {"SLURM_PROCID": "0", "SLURMD_NODENAME": "node08"}],
    ids=["told", "seen by rank 0"],
)
def test_rank_zero_on_another_host(changes: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**STEP, **changes}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RendezvousError, match="no MASTER_ADDR: rank 0 need not be on the first.*export MASTER_ADDR=<"):
        telegrad.Communicator.from_torch()
    assert "RANK" not in os.environ


def test_a_single_host_is_rank_zeros_in_any_distribution() -> None:
    alone = {**STEP, "SLURM_STEP_NODELIST": "n1", "SLURM_DISTRIBUTION": "arbitrary"}
    assert variables_of_step(alone)["MASTER_ADDR"] == "n1"


def test_a_job_that_starts_again_is_another() -> None:
    again = {**STEP, "SLURM_RESTART_COUNT": "1"}
    assert name_of_step(again) == "step 2 of Slurm's job 1234, restart 1"
    assert name_of_step({**STEP, "SLURM_RESTART_COUNT": "0"}) == name_of_step(STEP) == "step 2 of Slurm's job 1234"
    assert variables_of_step(again)["MASTER_PORT"] != variables_of_step(STEP)["MASTER_PORT"]


@pytest.mark.parametrize(
    ("nodes", "hosts"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1 node2"),
        ("gpu[007-009,12],login", "gpu007 gpu008 gpu009 gpu12 login"),
        ("gpu[12,007-009]", "gpu12 gpu007 gpu008 gpu009"),
        (
            "rack[0-1]node[3-4].cluster,x",
            "rack0node3.cluster rack0node4.cluster rack1node3.cluster rack1node4.cluster x",
        ),
        ("a,b[1-2]", "a b1 b2"),
        ("n[5]", "n5"),
        ("n[098-101]", "n098 n099 n100 n101"),
        ("n[x-y]", "nx-y"),
        ("", ""),
    ],
)
def test_a_list_of_hosts(nodes: str, hosts: str) -> None:
    assert hosts_of(nodes) == hosts.split()


JOINING = """
import os
import numpy as np
import telegrad
assert "RANK" not in os.environ
with telegrad.Communicator.from_torch() as comm:
    x = np.full(10, comm.rank + 1, np.float32)
    comm.all_reduce(x)
    assert (comm.world_size, set(x.tolist())) == (2, {3.0})
    import torch.distributed as dist
    dist.init_process_group("gloo")  # beside it, by the same variables
    assert dist.get_rank() == comm.rank == int(os.environ["SLURM_PROCID"])
    dist.barrier()  # Gloo's ranks may still be connecting to one that leaves
    dist.destroy_process_group()
"""


def test_srun_without_torchrun() -> None:
    own = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        own.pop(name, None)
    job = str(os.getpid())  # a port of this test's own
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost", "SLURM_JOB_ID": job, "SLURM_STEP_ID": "0"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", JOINING],
            env={**own, **step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=100)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], said
