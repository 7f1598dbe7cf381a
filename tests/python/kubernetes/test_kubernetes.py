"""The manifests of examples/kubernetes: what they say, and their jobs in imitated pods."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pods
import pytest
from torchrun_stand_ins import FORKING_TORCHRUN

from telegrad import _core

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: pip install PyYAML")

EXAMPLES = Path(__file__).parents[3] / "examples"
MANIFESTS = EXAMPLES / "kubernetes"
KINDS = {"runtime": "TrainingRuntime", "trainjob": "TrainJob", "jobset": "JobSet"}
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def manifest(name: str) -> dict[str, Any]:
    (document,) = yaml.safe_load_all((MANIFESTS / f"{name}.yaml").read_text())
    return document


def pod_of(spec: dict[str, Any]) -> dict[str, Any]:
    """The pods' spec in the only job of a JobSet's spec."""
    (job,) = spec["replicatedJobs"]
    assert job["name"] == "node"
    return job["template"]["spec"]["template"]["spec"]


def given(container: dict[str, Any], index: int) -> dict[str, str]:
    """The variables of a container in the pod of this index."""
    found = {}
    for variable in container.get("env", ()):
        if "valueFrom" in variable:
            assert variable["valueFrom"]["fieldRef"]["fieldPath"] == INDEX
        found[variable["name"]] = str(index) if "valueFrom" in variable else variable["value"]
    return found


def of_trainjob() -> tuple[str, list[str], list[dict[str, str]]]:
    """Name, command, and each pod's variables as Kubeflow Trainer 2.3 sets them."""
    job, runtime = manifest("trainjob"), manifest("runtime")
    name, trainer = job["metadata"]["name"], job["spec"]["trainer"]
    (container,) = pod_of(runtime["spec"]["template"]["spec"])["containers"]
    environments = [
        {
            **given(container, index),
            **given(trainer, index),
            "PET_NNODES": str(trainer["numNodes"]),
            "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
            "PET_NODE_RANK": str(index),
            "PET_MASTER_ADDR": f"{name}-node-0-0.{name}",
            "PET_MASTER_PORT": "29500",
        }
        for index in range(trainer["numNodes"])
    ]
    return name, trainer["command"], environments


def of_jobset() -> tuple[str, list[str], list[dict[str, str]]]:
    job = manifest("jobset")
    (container,) = pod_of(job["spec"])["containers"]
    pods_of_job = job["spec"]["replicatedJobs"][0]["template"]["spec"]["completions"]
    return job["metadata"]["name"], container["command"], [given(container, index) for index in range(pods_of_job)]


@pytest.mark.parametrize("path", sorted(MANIFESTS.iterdir()), ids=lambda path: path.name)
def test_manifests_are_yaml_of_one_object(path: Path) -> None:
    found = manifest(path.stem)
    assert found["kind"] == KINDS[path.stem]
    assert found["apiVersion"] == (
        "jobset.x-k8s.io/v1alpha2" if path.stem == "jobset" else "trainer.kubeflow.org/v1alpha1"
    )


def test_the_job_names_its_runtime() -> None:
    reference, runtime = manifest("trainjob")["spec"]["runtimeRef"], manifest("runtime")
    assert (reference["kind"], reference["name"]) == (runtime["kind"], runtime["metadata"]["name"])
    assert runtime["spec"]["mlPolicy"]["torch"] == {}


def test_trainjob_and_jobset_are_one_job() -> None:
    """Nothing that the controller sets is missing in the JobSet, and its service has the name of its pods."""
    assert of_trainjob() == of_jobset()
    network = manifest("jobset")["spec"]["network"]
    assert network["enableDNSHostnames"]
    assert network["publishNotReadyAddresses"]
    trainer = manifest("trainjob")["spec"]["trainer"]
    reserved = {variable["name"] for variable in trainer["env"] if variable["name"].startswith("PET_")}
    assert not reserved, "Kubeflow Trainer refuses a TrainJob with them"


def test_pods_have_more_shared_memory_than_a_containers() -> None:
    for spec in (manifest("runtime")["spec"]["template"]["spec"], manifest("jobset")["spec"]):
        pod = pod_of(spec)
        (volume,), (container,) = pod["volumes"], pod["containers"]
        assert volume["emptyDir"]["medium"] == "Memory"
        assert {"name": volume["name"], "mountPath": "/dev/shm"} in container["volumeMounts"]


@pytest.mark.timeout(300)
@pytest.mark.skipif(not hasattr(_core.Communicator, "ucx"), reason="built without UCX")
@pytest.mark.skipif(pods.why_unavailable() is not None, reason=str(pods.why_unavailable()))
@pytest.mark.parametrize(
    ("job", "network", "changed"),
    [
        (of_trainjob, "bridge", {}),
        (of_jobset, "single address", {"PET_NPROC_PER_NODE": "1"}),  # ranks that share a pod are seen in the first job
        (of_jobset, "host network", {"PET_NPROC_PER_NODE": "1"}),
    ],
)
def test_a_job_trains_in_pods(job: Any, network: str, changed: dict[str, str], tmp_path: Path) -> None:
    """With 64 MB of /dev/shm, as where no volume is mounted there."""
    name, command, environments = job()
    assert command == ["torchrun", "/workspace/train.py"]
    command = [sys.executable, str(FORKING_TORCHRUN), str(EXAMPLES / "ddp.py")]
    container = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "TELEGRAD_CACHE": str(tmp_path),
        "TELEGRAD_REPORT_DIR": str(tmp_path),
        "OMP_NUM_THREADS": "1",
    }
    names = [f"{name}-node-0-{index}" for index in range(len(environments))]
    with pods.Pods(names, name, network) as laboratory:
        said = laboratory.run(
            [command] * len(names),
            [{**container, **environment, **changed} for environment in environments],
            timeout_s=270,
        )
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+), ", said[0], re.MULTILINE)]
    assert len(losses) == 4, said
    assert losses[-1] < losses[0] - 0.5
