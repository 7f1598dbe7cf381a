"""The commands of docs/how-to/two-machines.md on two machines that share nothing: each is a network namespace with a
cable to the other, and has processes, a host name, memory and folders of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from test_pages import ROOT, blocks_of

from telegrad.tools.bench import netlab
from telegrad.tools.bench.netlab import Netlab

PAGE = ROOT / "docs" / "how-to" / "two-machines.md"
INSTALLS = 2  # blocks that build and install the wheel, which is there
ADDRESS = "192.168.1.10"
RATE = "100mbit"


@dataclass
class Machine:
    lab: Netlab
    number: int
    folder: Path
    exports: list[str] = field(default_factory=list)

    def start(self, code: str) -> subprocess.Popen[str]:
        """Runs it in a shell there, after the exports of earlier blocks."""
        self.exports += re.findall(r"^export .*$", code, re.M)
        own = ["unshare", "--uts", "--ipc", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc"]
        memory = (
            f"hostname machine-{'ab'[self.number]} && mount -t tmpfs tmpfs /dev/shm && mount -t tmpfs tmpfs /run/netns"
        )
        script = "\n".join([memory, *self.exports, code.replace(ADDRESS, self.lab.address_of(0))])
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = {"PATH": path, "HOME": str(self.folder), "TMPDIR": str(self.folder), "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            [*self.lab.prefix_of(self.number), *own, "bash", "-euc", script],
            cwd=self.folder,
            env=environment | {"COLUMNS": "150", "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


def steps() -> list[dict[str, str]]:
    """What each machine runs, step by step; blocks of A and B behind each other are one step."""
    found: list[dict[str, str]] = []
    before = ""
    for block in blocks_of(PAGE.read_text()):
        where = re.match(r"# on (A|B|both)\n", block.code)
        if block.language != "sh" or where is None:
            before = ""
            continue
        if where[1] == "B" and before == "A":
            found[-1]["B"] = block.code
        else:
            found.append(dict.fromkeys("AB" if where[1] == "both" else where[1], block.code))
        before = where[1]
    return found[INSTALLS:]


@pytest.mark.skipif(netlab.why_unavailable() is not None, reason=str(netlab.why_unavailable()))
@pytest.mark.timeout(300)
def test_two_machines_get_to_a_training_step(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    (script,) = re.findall(r"^```python\n(# train\.py\n.*?)^```$", readme, re.M | re.S)
    said: list[dict[str, str]] = []
    with Netlab(2, RATE) as lab:
        machines = {name: Machine(lab, number, tmp_path / name) for number, name in enumerate("AB")}
        for machine in machines.values():
            machine.folder.mkdir()
            (machine.folder / "train.py").write_text(script)
        for step in steps():
            started = {name: machines[name].start(code) for name, code in step.items()}
            try:
                said.append({name: one.communicate(timeout=250)[0] for name, one in started.items()})
            finally:
                for one in started.values():
                    one.kill()
                    one.wait()
            assert all(one.returncode == 0 for one in started.values()), said[-1]
    check, _, calibration, advice, training = said
    assert "telegrad can be used here" in check["A"]
    assert "telegrad can be used here" in check["B"]
    assert "eth0" in check["B"]
    assert "kept for later jobs: " in calibration["A"]
    rate = re.search(r"β [\d.]+ ns/B \((\d+(?:\.\d+)?) Mbit/s\)|β [\d.]+ ns/B \((0\.\d+) Gbit/s\)", calibration["A"])
    assert rate is not None, calibration["A"]
    assert "all_reduce" not in calibration["B"]
    assert "measured among 2 ranks on 2 hosts (machine-a, …)" in " ".join(advice["A"].split())
    assert re.search(r"loss [\d.]+; sent \d+ MB instead of \d+ MB", training["A"])
