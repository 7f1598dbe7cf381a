"""What the scripts of examples/slurm do on a real cluster whose nodes are lost and come back."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from cluster import Cluster
from jobs import Job

STEPS = 300
"""Of a training of examples/elastic.py: more than it does while a case learns of step 40 and takes a node away."""


@dataclass(frozen=True)
class Case:
    """``check`` raises ``CaseFailed`` where a script does not do what it promises."""

    name: str
    check: Callable[[Cluster], None]
    nodes: int = 2
    slurmd_timeout_s: int = 30


def _training(cluster: Cluster, **settings: str) -> Job:
    """The example as it is, when it has done 40 steps."""
    folder = str(cluster.folder / "run")
    job = Job(cluster, "elastic.sbatch", "examples/elastic.py", folder, str(STEPS), **settings)
    job.wait_until_printed(r"^step 40: loss")
    return job


def _resumed(job: Job, *ranks: int) -> None:
    """Until the training has resumed with those numbers of ranks, one after the other, each time from a checkpoint."""
    job.wait_until_printed(r"^goes on from ", len(ranks))
    found = re.findall(r"^goes on from \S*step-(\d+) on (\d+) ranks$", job.said(), re.MULTILINE)
    job.expect(
        tuple(int(one[1]) for one in found) == ranks, f"resumed with other numbers of ranks than {ranks}: {found}"
    )
    steps = [int(one[0]) for one in found]
    job.expect(steps[0] >= 20 and steps == sorted(steps), f"resumed from the steps {steps}")


def _finished(job: Job) -> None:
    job.wait_until_completed()
    job.expect(f"step {STEPS}: loss" in job.said(), "the training has not done all its steps")


def healthy(cluster: Cluster) -> None:
    for script in ("torchrun.sbatch", "srun.sbatch"):
        job = Job(cluster, script, "examples/ddp.py")
        job.wait_until_completed()
        job.expect("step 200: loss" in job.said(), "the training has not done all its steps")
    job = _training(cluster)
    _finished(job)
    job.expect("goes on from" not in job.said() and "elastic.sbatch, job" not in job.said(), "the job was disturbed")
    cluster.wait_until_idle(cluster.names)  # the step that watches does not hold the job


def second_node_is_killed(cluster: Cluster) -> None:
    job = _training(cluster)
    cluster.lose("node2")
    _resumed(job, 2)
    _finished(job)


def second_node_loses_power(cluster: Cluster) -> None:
    """Without an answer of the lost machine's kernel; and the residuals of all ranks are kept."""
    report = cluster.folder / "report.json"
    program = "tests/python/ddp/elastic_program.py"
    job = Job(cluster, "elastic.sbatch", program, str(cluster.folder / "run"), str(STEPS), str(report))
    job.wait_until_printed(r"^step 40: loss")
    cluster.lose("node2", silently=True)
    _resumed(job, 2)
    _finished(job)
    found = json.loads(report.read_text())
    job.expect(found["ranks_before"] == 4, f"the checkpoint had the residuals of {found['ranks_before']} ranks, not 4")
    job.expect(found["residual_error"] < 1e-6, f"residuals are not kept: relative error {found['residual_error']}")


def three_nodes_two_one(cluster: Cluster) -> None:
    job = _training(cluster)
    cluster.lose("node3")
    _resumed(job, 4)
    cluster.lose("node2", silently=True)
    _resumed(job, 4, 2)
    _finished(job)


def lost_node_comes_back(cluster: Cluster) -> None:
    """Slurm does not give it back to the job, and another job may have it when the ranks fail once more."""
    job = _training(cluster)
    cluster.lose("node2")
    _resumed(job, 2)
    cluster.bring_back("node2")
    cluster.wait_until_idle(["node2"])
    cluster.run("sbatch", "--nodelist=node2", "--output=/dev/null", "--wrap=sleep 1000")
    job.wait(lambda: cluster.state_of("node2") in ("mix", "alloc") or None, "job on the node that came back")
    job.expect(job.nodes() == "node1", f"the job has the nodes {job.nodes()}")
    cluster.run_on("node1", "bash", "-c", "kill -9 $(pgrep -f 'elastic.py .* [0-9]*$' | tail -n 1)")
    _resumed(job, 2, 2)
    _finished(job)


def first_node_is_killed(cluster: Cluster) -> None:
    """The node of the batch script: the job is queued again, and starts when there are two nodes."""
    job = _training(cluster)
    cluster.lose("node1")
    job.wait_until("PENDING")
    cluster.bring_back("node1")
    job.wait_until_printed(r"elastic\.sbatch, job \d+: restart 1")
    _resumed(job, 4)
    _finished(job)


def no_node_is_left(cluster: Cluster) -> None:
    job = _training(cluster)
    for name in cluster.names:
        cluster.lose(name)
    job.wait_until("PENDING")
    for name in cluster.names:
        cluster.bring_back(name)
    _resumed(job, 4)
    _finished(job)


def time_limit_is_near(cluster: Cluster) -> None:
    """The signal of ``sbatch --signal=B:USR1@120``."""
    job = _training(cluster)
    cluster.run("scancel", "--batch", "--signal=USR1", job.id)
    job.wait_until_printed(r"the time limit is near: requeueing")
    _resumed(job, 4)
    _finished(job)


def slurm_notices_late(cluster: Cluster) -> None:
    """The controller counts on the lost node much longer than the script waits."""
    job = _training(cluster, SECONDS_TO_NOTICE="5")
    cluster.lose("node2", silently=True)
    _resumed(job, 2)
    _finished(job)


CASES = [
    Case("healthy cluster, all three scripts", healthy),
    Case("second node is killed", second_node_is_killed),
    Case("second node loses power", second_node_loses_power),
    Case("three nodes, then two, then one", three_nodes_two_one, nodes=3),
    Case("lost node comes back, and runs another job", lost_node_comes_back),
    Case("first node is killed, the batch script's", first_node_is_killed),
    Case("no node is left", no_node_is_left),
    Case("time limit is near", time_limit_is_near),
    Case("Slurm notices late", slurm_notices_late, slurmd_timeout_s=150),
]
