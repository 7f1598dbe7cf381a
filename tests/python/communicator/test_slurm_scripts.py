"""The scripts of examples/slurm with a stand-in for Slurm: it starts tasks here, and refuses what Slurm 22.05 refuses.

``tests/slurm`` runs them on a real cluster.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).parents[3] / "examples" / "slurm").glob("*.sbatch"))
(ELASTIC,) = (script for script in SCRIPTS if script.stem == "elastic")

# When $LOST exists, the step that ran before holds the CPUs of the other node, as in Slurm 22.05.
# A step that would wait for ever ends the script, so that the test fails at once.
SRUN = r"""#!/bin/bash
# Nodes, two unless it is told, are all this machine.
nodes= overlap= immediate=
while [[ $1 == --* ]]; do
  [[ $1 == --nodes=* ]] && nodes=${1#*=}
  [[ $1 == --overlap ]] && overlap=1
  [[ $1 == --immediate=* ]] && immediate=1
  shift
done
unable() { echo "srun: error: Unable to create step for job $SLURM_JOB_ID: $1" >&2; exit 1; }
if [ -z "$nodes" ]; then
  nodes=$SLURM_NNODES
  [ ! -e "$LOST" ] || unable "More processors requested than permitted"
fi
if [ -n "$BUSY" ] || { [ -e "$LOST" ] && [ -z "$overlap" ]; }; then
  echo "srun: Job $SLURM_JOB_ID step creation temporarily disabled, retrying (Requested nodes are busy)" >&2
  [ -z "$immediate" ] || unable "Requested nodes are busy"
  echo "this srun would wait for ever" >&2
  kill -KILL "$PPID"
  exit 1
fi
if [[ $1 == bash && "$*" == *squeue* ]]; then exec "$@"; fi
export SLURM_NTASKS=$((nodes * SLURM_NTASKS_PER_NODE)) SLURM_STEP_ID=0 SCRIPT=$PPID
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
case "$*" in
"show hostnames cluster[1-2]") printf 'localhost\nlocalhost.\n' ;;
"show hostnames cluster1") echo localhost ;;
"show hostnames cluster2") echo localhost. ;;
"requeue $SLURM_JOB_ID") touch "$REQUEUED" ;;
*) exit 1 ;;
esac
"""
# The second node, which is localhost by another name, is lost when $LOST exists; the first, when $FIRST_LOST exists.
SQUEUE = r"""#!/bin/bash
[[ "$*" == *"--jobs=$SLURM_JOB_ID"* ]] || exit 1
if [ -e "$LOST" ]; then echo cluster1; elif [ -e "$FIRST_LOST" ]; then echo cluster2; else echo 'cluster[1-2]'; fi
"""
SINFO = r"""#!/bin/bash
[ -z "$SILENT" ] || exit 0
case "$*" in
*"--nodes=cluster[1-2]"*) printf 'localhost\nlocalhost.\nlocalhost.\n' ;;
*"--nodes=cluster1"*) echo localhost ;;
*) exit 1 ;;
esac
"""
# One rank, for tests of what the script does meanwhile.
TORCHRUN = r"""#!/bin/bash
while [[ $1 == --* ]]; do shift; done
[ "$SLURM_PROCID" != 0 ] || exec python "$@"
"""
PROGRAM = """
import os, sys
names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS"
assert os.environ["MASTER_ADDR"] and int(os.environ["MASTER_PORT"])
sys.stdout.write(" ".join([*(os.environ[name] for name in names), *sys.argv[1:]]) + "\\n")  # a line in one piece
"""
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
UNTIL_REQUEUED = """
import os, signal, time
if {warned}:
    os.kill(int(os.environ["SCRIPT"]), signal.SIGUSR1)
else:
    open(os.environ["FIRST_LOST"], "w").close()
while not os.path.exists(os.environ["REQUEUED"]):
    time.sleep(0.05)
print("requeued")
"""


def _run(
    script: Path, tmp_path: Path, program_text: str, *arguments: str, torchrun: str = "", **settings: str
) -> subprocess.CompletedProcess[str]:
    """Runs a script as sbatch would. Ends its steps when it ends, as Slurm does. ``torchrun``: a stand-in for it."""
    text = script.read_text()
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", text, re.MULTILINE))
    after = text[text.index("\nset -e") :]
    assert "#SBATCH" not in after, "sbatch reads no option behind the first command"
    folder = tmp_path / "bin"
    folder.mkdir()
    programs = {"srun": SRUN, "scontrol": SCONTROL, "squeue": SQUEUE, "sinfo": SINFO, "torchrun": torchrun}
    for name, body in programs.items():
        if body:
            (folder / name).write_text(body)
            (folder / name).chmod(0o755)
    (program := tmp_path / "program.py").write_text(program_text)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "OMP_"))},
        "PATH": os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "SLURM_JOB_ID": str(os.getpid() + 1 + SCRIPTS.index(script)),  # a port of this run's own
        "SLURM_JOB_NODELIST": "cluster[1-2]",
        "SLURM_NNODES": "2",
        "SLURMD_NODENAME": "localhost",
        "SECONDS_TO_NOTICE": "0",
        "SECONDS_TO_WATCH": "0.1",
        "SLURM_NTASKS_PER_NODE": asked["ntasks-per-node"],
        "SLURM_CPUS_PER_TASK": asked["cpus-per-task"],
        **{name: str(tmp_path / name.lower()) for name in ("LOST", "FIRST_LOST", "REQUEUED")},
        "BUSY": "",
        "SILENT": "",
        **settings,
    }
    with subprocess.Popen(
        ["bash", str(script), str(program), *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            said, errors = process.communicate(timeout=110)
        finally:
            with contextlib.suppress(ProcessLookupError):  # nothing runs any more
                os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(process.args, process.returncode, said, errors)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_starts_all_ranks(script: Path, tmp_path: Path) -> None:
    done = _run(script, tmp_path, PROGRAM, "an argument")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"{rank} 4 {rank % 2} 4 an argument" for rank in range(4)]


def test_a_lost_node(tmp_path: Path) -> None:
    """The step that has lost it holds the CPUs of the other node for ever."""
    done = _run(ELASTIC, tmp_path, FAILING)
    assert done.returncode == 0, done.stderr
    of_four = [f"{rank} 4 {rank % 2} 4" for rank in range(4)]
    assert sorted(done.stdout.splitlines()) == sorted([*of_four, *(f"{rank} 2 {rank} 4" for rank in range(2))])
    assert re.search(r"start 1, on localhost localhost\., ended with status 1$", done.stderr, re.MULTILINE)


def test_nodes_that_stay_busy(tmp_path: Path) -> None:
    done = _run(ELASTIC, tmp_path, PROGRAM, torchrun=TORCHRUN, BUSY="1")
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert "gives up after 10 starts" in done.stderr


def test_no_node_answers(tmp_path: Path) -> None:
    done = _run(ELASTIC, tmp_path, PROGRAM, torchrun=TORCHRUN, SILENT="1")
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert "no node of the job answers: see 'squeue --jobs=" in done.stderr


def test_the_time_limit_is_near(tmp_path: Path) -> None:
    done = _run(ELASTIC, tmp_path, UNTIL_REQUEUED.format(warned=True), torchrun=TORCHRUN)
    assert (done.returncode, done.stdout) == (0, "requeued\n"), done.stderr
    assert "the time limit is near: requeueing" in done.stderr


def test_the_node_of_the_script_is_lost(tmp_path: Path) -> None:
    """Only the script's own end is not shown: here it lives on, while Slurm says that its node is lost."""
    done = _run(ELASTIC, tmp_path, UNTIL_REQUEUED.format(warned=False), torchrun=TORCHRUN)
    assert (done.returncode, done.stdout) == (0, "requeued\n"), done.stderr


def test_ports_of_two_jobs_differ() -> None:
    text = ELASTIC.read_text()
    (rule,) = re.findall(r"^ +port=\$\(\((.*)\)\)$", text, re.MULTILINE)
    (starts,) = re.findall(r"^for start in \{1\.\.(\d+)\}", text, re.MULTILINE)
    asked = [f"SLURM_JOB_ID={job} start={start}" for job in (100, 101, 1599) for start in (1, int(starts))]
    lines = "\n".join(f"{one}; echo $(({rule}))" for one in asked)
    said = subprocess.run(["bash", "-c", lines], capture_output=True, text=True, check=True).stdout.split()
    ports = [int(port) for port in said]
    assert len(set(ports)) == len(ports)
    assert all(1024 < port < 32768 for port in ports)
    for first, last, following in zip(ports[::2], ports[1::2], ports[2::2], strict=False):
        assert not first <= following <= last
