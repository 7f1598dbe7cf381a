"""The estimate of a training's memory, beside what processes have taken."""

from __future__ import annotations

import subprocess
import sys

import pytest

SHAPES = {"wide": (60_000, 4_000_000), "long": (800_000, 100_000)}  # rows, features

# Prints by how much the process has grown at most, and what was said; `clear_refs` begins the peak anew.
PROGRAM = """
import sys
import numpy as np
from telegrad.linear import Rows, TrainingSettings, train
from telegrad.linear.aggregation import SparseGather, SparseSum
from telegrad.linear.memory import bytes_needed

def status(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))

def rows_of(count, features, entries=10):
    first = np.random.default_rng(0).integers(0, features // entries, (count, 1))
    indices = (first + np.arange(entries) * (features // entries)).astype(np.uint32).ravel()
    labels = np.where(first.ravel() % 2, 1, -1).astype(np.float32)
    offsets = np.arange(0, indices.size + 1, entries, dtype=np.uint64)
    return Rows(offsets, indices, np.ones(indices.size, np.float32), labels, features)

optimizer, alone, count, features, l1 = sys.argv[1], sys.argv[2] == "alone", *map(float, sys.argv[3:])
coordinates = max(int(features) // 20, 1)  # so that a pass is short
settings = TrainingSettings(optimizer=optimizer, epochs=2, batch=int(count) // 4, l1=l1, coordinates=coordinates)
others = None if alone else SparseGather(None) if optimizer == "coordinate_descent" else SparseSum(None)
train(rows_of(8, 100), settings, aggregation=others)
rows = rows_of(int(count), int(features))
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
before = status("VmRSS")
train(rows, settings, aggregation=others)
said = bytes_needed(rows.n_features, rows.nnz, settings, rows=len(rows), total=len(rows), alone=alone)
print(status("VmHWM") - before, said)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("optimizer", "l1", "alone", "shape"),
    [
        ("sgd", 0, "among", "long"),
        ("sgd", 1e-5, "alone", "long"),
        ("adagrad", 0, "among", "wide"),
        ("coordinate_descent", 0, "alone", "long"),
        ("coordinate_descent", 0, "among", "long"),
        ("coordinate_descent", 0, "among", "wide"),
    ],
)
def test_training_takes_the_memory_that_is_said(optimizer: str, l1: float, alone: str, shape: str) -> None:
    count, features = SHAPES[shape]
    command = [sys.executable, "-c", PROGRAM, optimizer, alone, str(count), str(features), str(l1)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    taken, said = map(int, done.stdout.split())
    assert 0.5 * said < taken < 1.1 * said + 12 * 2**20  # arrays begin in pages of 2 MiB of their own
