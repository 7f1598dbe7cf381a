"""Nodes as containers are: network, IPC and PID namespaces of their own, a torchrun in each, and no setting of ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from torchrun_stand_ins import FORKING_TORCHRUN

from telegrad.tools.bench import netlab
from telegrad.tools.bench.netlab import Netlab

PROGRAM = Path(__file__).parent / "torchrun_nodes_program.py"
NODES = 2


def run(lab: Netlab, ranks_per_node: int, report: Path, size: int) -> dict[str, Any]:
    """What the program finds in a job of so many ranks in each of two nodes."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("TELEGRAD_", "UCX_"))}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    rendezvous = [f"--nnodes={NODES}", f"--nproc-per-node={ranks_per_node}", "--rdzv-backend=static"]
    with tempfile.TemporaryFile() as said:
        nodes = [
            subprocess.Popen(
                [
                    *lab.prefix_of(node),
                    *("unshare", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"),
                    *(sys.executable, str(FORKING_TORCHRUN), *rendezvous, f"--node-rank={node}"),
                    *(
                        f"--master-addr={lab.address_of(0)}",
                        "--master-port=29511",
                        str(PROGRAM),
                        str(report),
                        str(size),
                    ),
                ],
                env=environment,
                stdout=said,
                stderr=subprocess.STDOUT,
            )
            for node in range(NODES)
        ]
        try:
            deadline = time.monotonic() + 150
            for node in nodes:
                node.wait(max(0.0, deadline - time.monotonic()))
            said.seek(0)
            assert [node.returncode for node in nodes] == [0] * NODES, said.read().decode()
        finally:
            for node in nodes:
                node.kill()
                node.wait()
    return json.loads(report.read_text())


@pytest.mark.skipif(netlab.why_unavailable() is not None, reason=str(netlab.why_unavailable()))
@pytest.mark.timeout(200)
@pytest.mark.parametrize(("ranks_per_node", "size"), [(2, 1 << 20), pytest.param(4, 4 << 20, marks=pytest.mark.slow)])
def test_ranks_of_a_container_are_a_node(tmp_path: Path, ranks_per_node: int, size: int) -> None:
    """``size``: elements of the vector."""
    with Netlab(NODES, "1gbit") as lab:
        found = run(lab, ranks_per_node, tmp_path / "report.json", size)
    print(found["times_s"])
    assert found["nodes"] == [0] * ranks_per_node + [1] * ranks_per_node
    assert found["chosen"] == "Algorithm.two_level"
