"""Jobs that Slurm starts: what telegrad reads of its variables, and the scripts of examples/slurm with a Slurm that
starts its tasks here."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import telegrad
from telegrad.comm.slurm import hosts_of, name_of_step, variables_of_step, why_not_found
from telegrad.errors import RendezvousError

SCRIPTS = sorted((Path(__file__).parents[3] / "examples" / "slurm").glob("*.sbatch"))
STEP = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NODELIST": "node[07-08]",
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "2",
    "SLURM_LOCALID": "1",
}

SRUN = r"""#!/bin/bash
# Nodes, two unless it is told, are all this machine.
nodes=2
while [[ $1 == --* ]]; do
  [[ $1 == --nodes=* ]] && nodes=${1#*=}
  shift
done
export SLURM_NTASKS=$((nodes * SLURM_NTASKS_PER_NODE)) SLURM_STEP_ID=0
pids=()
for ((rank = 0; rank < SLURM_NTASKS; rank++)); do
  SLURM_PROCID=$rank SLURM_LOCALID=$((rank % SLURM_NTASKS_PER_NODE)) "$@" &
  pids+=($!)
done
status=0
for pid in "${pids[@]}"; do wait "$pid" || status=1; done
exit $status
"""
SCONTROL = r"""#!/bin/bash
[ "$*" = "show hostnames cluster[1-2]" ] && printf 'localhost\nlocalhost\n'
"""
# The second node, which is localhost by another name, is lost when it has failed once.
SINFO = r"""#!/bin/bash
[[ "$*" == *"--nodes=cluster[1-2]"* ]] || exit 1
echo localhost
[ -e "$LOST" ] || printf 'localhost.\nlocalhost.\n'
"""
PROGRAM = """
import os, sys
names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS"
assert os.environ["MASTER_ADDR"] and int(os.environ["MASTER_PORT"])
sys.stdout.write(" ".join([*(os.environ[name] for name in names), *sys.argv[1:]]) + "\\n")  # a line in one piece
"""


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
    ],
)
def test_variables_of_the_shell_that_a_job_came_from(changes: dict[str, str], message: str) -> None:
    """What Slurm 22.05 leaves in a batch script that a step has submitted, and in the shell of salloc."""
    assert variables_of_step({**STEP, **changes}) == {}
    assert re.search(message, why_not_found({**STEP, **changes}))


def test_nothing_is_lacking_in_a_step_and_outside_slurm() -> None:
    of_srun = {**STEP, "SLURM_NTASKS": "8", "SLURMD_NODENAME": "node08"}
    assert variables_of_step(of_srun) == variables_of_step(STEP)
    assert [why_not_found(one) for one in (of_srun, STEP, {})] == ["", "", ""]


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


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_starts_all_ranks(script: Path, tmp_path: Path) -> None:
    said = _said(script, tmp_path, PROGRAM, ["an argument"])
    assert said == [f"{rank} 4 {rank % 2} 4 an argument" for rank in range(4)]


FAILING = (
    PROGRAM
    + """
if os.environ["WORLD_SIZE"] == "4":
    import time
    mark, rank = os.environ["LOST"], os.environ["RANK"]
    open(mark + rank, "w").close()
    # The last rank is lost when all have said who they are: a torchrun whose rank has left stops the others.
    for other in "0123":
        while not os.path.exists(mark + other):
            time.sleep(0.05)
    if rank == "3":
        open(mark, "w").close()
        os._exit(1)
    while not os.path.exists(mark):
        time.sleep(0.05)
    sys.exit(1)  # as with telegrad's PeerFailed; a torchrun that has the store would wait for the lost one
"""
)


def test_a_lost_node(tmp_path: Path) -> None:
    (script,) = (one for one in SCRIPTS if one.stem == "elastic")
    said = _said(script, tmp_path, FAILING, [])
    of_four = [f"{rank} 4 {rank % 2} 4" for rank in range(4)]
    assert said == sorted([*of_four, *(f"{rank} 2 {rank} 4" for rank in range(2))])


def _said(script: Path, tmp_path: Path, program_text: str, arguments: list[str]) -> list[str]:
    """What the ranks print, in alphabetical order."""
    text = script.read_text()
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", text, re.MULTILINE))
    after = text[text.index("\nset -e") :]
    assert "#SBATCH" not in after, "sbatch reads no option behind the first command"
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, body in {"srun": SRUN, "scontrol": SCONTROL, "sinfo": SINFO}.items():
        (folder / name).write_text(body)
        (folder / name).chmod(0o755)
    (program := tmp_path / "program.py").write_text(program_text)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "OMP_"))},
        "PATH": os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "SLURM_JOB_ID": str(os.getpid() + 1 + SCRIPTS.index(script)),  # a port of this run's own
        "SLURM_JOB_NODELIST": "cluster[1-2]",
        "SLURM_NNODES": "2",
        "LOST": str(tmp_path / "lost"),
        "SECONDS_TO_NOTICE": "0",
        "SLURM_NTASKS_PER_NODE": asked["ntasks-per-node"],
        "SLURM_CPUS_PER_TASK": asked["cpus-per-task"],
    }
    done = subprocess.run(
        ["bash", str(script), str(program), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.splitlines())
