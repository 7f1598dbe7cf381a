"""The estimate of a training's memory, beside what processes have taken, and what is free for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from telegrad.linear import TrainingSettings
from telegrad.linear.problem import available_bytes, bytes_needed

SHAPES = {"wide": (60_000, 4_000_000), "long": (800_000, 100_000)}  # rows, features

# Prints by how much the process has grown at most, and what was said; `clear_refs` begins the peak anew.
PROGRAM = """
import sys
import numpy as np
from telegrad.linear import Rows, TrainingSettings, train
from telegrad.linear.optimizers import SparseSum
from telegrad.linear.problem import bytes_needed

def status(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))

def rows_of(count, features, entries=10):
    first = np.random.default_rng(0).integers(0, features // entries, (count, 1))
    indices = (first + np.arange(entries) * (features // entries)).astype(np.uint32).ravel()
    labels = np.where(first.ravel() % 2, 1, -1).astype(np.float32)
    offsets = np.arange(0, indices.size + 1, entries, dtype=np.uint64)
    return Rows(offsets, indices, np.ones(indices.size, np.float32), labels, features)

optimizer, alone, checkpoint = sys.argv[1], sys.argv[2] == "alone", sys.argv[3] or None
count, features, l1 = map(float, sys.argv[4:])
batch = None if optimizer == "newton" else int(count) // 4
settings = TrainingSettings(optimizer=optimizer, epochs=2, batch=batch, l1=l1)
others = None if alone else SparseSum(None)
train(rows_of(8, 100), settings, aggregation=others)
rows = rows_of(int(count), int(features))
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
before = status("VmRSS")
train(rows, settings, aggregation=others, checkpoint=checkpoint)
among = dict(rows=len(rows), total=len(rows), alone=alone, with_checkpoints=checkpoint is not None)
said = bytes_needed(rows.n_features, rows.nnz, settings, **among)
print(status("VmHWM") - before, said)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("optimizer", "l1", "alone", "shape", "checkpoint"),
    [
        ("sgd", 0, "among", "long", ""),
        ("sgd", 0, "among", "long", "state.npz"),
        ("sgd", 1e-5, "alone", "long", ""),
        ("adagrad", 0, "among", "wide", ""),
        ("adagrad", 0, "among", "wide", "state.npz"),
        ("newton", 1e-5, "alone", "long", ""),
        ("newton", 1e-5, "alone", "wide", ""),
    ],
)
def test_training_takes_the_memory_that_is_said(
    optimizer: str, l1: float, alone: str, shape: str, checkpoint: str, tmp_path: Path
) -> None:
    count, features = SHAPES[shape]
    file = str(tmp_path / checkpoint) if checkpoint else ""
    command = [sys.executable, "-c", PROGRAM, optimizer, alone, file, str(count), str(features), str(l1)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    taken, said = map(int, done.stdout.split())
    assert 0.5 * said < taken < 1.1 * said + 12 * 2**20  # arrays begin in pages of 2 MiB of their own


def test_rows_that_ranks_gather_for_the_hinge_are_counted() -> None:
    """Of 4 Mi entries each an index, a value and a place, and of each feature in them a weight and its correction."""
    shape: dict[str, Any] = {"rows": 100_000, "total": 800_000, "most_occurring": 80_000_000}
    hinge, other = (
        bytes_needed(3_000_000, 10_000_000, TrainingSettings(loss=loss), **shape) for loss in ("hinge", "squared_hinge")
    )
    gathered = 1 << 22
    assert hinge - other >= gathered * (8 + 16 + 16) + 800_000 * gathered // 80_000_000 * 100 + 100_000 * 48
    assert hinge - other < gathered * 60 + 100_000 * 100


MIB = 2**20
UNLIMITED_V1 = 2**63 - 4096
CASES: dict[str, tuple[str, dict[str, object], int]] = {
    "no group": ("0::/", {}, 1000),
    "limited": ("0::/job/step", {"job/step/memory.max": 300 * MIB, "job/step/memory.current": 100 * MIB}, 200),
    "around it": (
        "0::/job/step",
        {
            "job/step/memory.max": "max",
            "job/step/memory.current": 100 * MIB,
            "job/memory.max": 400 * MIB,
            "job/memory.current": 350 * MIB,
        },
        50,
    ),
    "its own is the top": ("0::/", {"memory.max": 300 * MIB, "memory.current": 100 * MIB}, 200),
    "outside of what it sees": ("0::/../other", {"memory.max": 300 * MIB, "memory.current": 100 * MIB}, 200),
    "cached pages": (
        "0::/job",
        {
            "job/memory.max": 300 * MIB,
            "job/memory.current": 290 * MIB,
            "job/memory.stat": f"anon 5\ninactive_file {30 * MIB}\nactive_file {60 * MIB}\n",
        },
        100,
    ),
    "used up": ("0::/job", {"job/memory.max": MIB, "job/memory.current": 2 * MIB}, 0),
    "beyond the machine": ("0::/job", {"job/memory.max": 9000 * MIB, "job/memory.current": 0}, 1000),
    "version 1": (
        "9:cpu,cpuacct:/x\n4:memory:/docker/1\n1:name=systemd:/\n0::/",
        {
            "memory/docker/1/memory.limit_in_bytes": 300 * MIB,
            "memory/docker/1/memory.usage_in_bytes": 250 * MIB,
            "memory/docker/1/memory.stat": f"inactive_file 1\ntotal_inactive_file {20 * MIB}\n",
            "memory/memory.limit_in_bytes": UNLIMITED_V1,
            "memory/memory.usage_in_bytes": 700 * MIB,
        },
        70,
    ),
    "version 1, its own is the top": (
        "4:memory:/docker/1",
        {"memory/memory.limit_in_bytes": 300 * MIB, "memory/memory.usage_in_bytes": 100 * MIB},
        200,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_free_is_the_least_of_the_machine_and_the_control_groups(tmp_path: Path, case: str) -> None:
    entries, files, expected = CASES[case]
    texts = {"proc/meminfo": f"MemTotal: 9 kB\nMemAvailable: {1000 * 1024} kB\n", "proc/self/cgroup": entries + "\n"}
    texts |= {f"sys/fs/cgroup/{name}": f"{value}\n" for name, value in files.items()}
    if "memory.stat" not in " ".join(files):
        texts |= {name.rpartition("/")[0] + "/memory.stat": "" for name in texts if name.startswith("sys")}
    for name, text in texts.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert available_bytes(tmp_path) == expected * MIB


def test_a_machine_that_does_not_say_what_is_free_is_trusted(tmp_path: Path) -> None:
    assert available_bytes() > 2**20
    assert available_bytes(tmp_path) == -1
