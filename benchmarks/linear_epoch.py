"""An epoch of logistic regression on one rank, beside scikit-learn's SGDClassifier, on made-up rows in URL's shape.

    python benchmarks/linear_epoch.py [--rows 20000] [--rounds 7] [--epochs 5] [--threads 1]

Each takes its turn in every round; printed are medians of an epoch's time, by the clock and of the processor (which
others' work on the machine changes less), with what is done once (weights made, labels read) shared among the epochs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
from scipy.sparse import csr_matrix
from sklearn.linear_model import SGDClassifier

from telegrad.linear import TrainingSettings, train
from telegrad.linear.synthetic import SHAPES, synthetic_rows

BATCHES = (1000, 100)
L2 = 1e-6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    rows = synthetic_rows(SHAPES["url"], 0, asked.rows)
    matrix = csr_matrix(rows.to_csr())

    def scikit_learn() -> None:
        # without a tolerance it passes over the data as often as is asked
        model = SGDClassifier(loss="log_loss", alpha=L2, max_iter=asked.epochs, tol=None, random_state=0)
        model.fit(matrix, rows.labels)

    def telegrad(optimizer: str, batch: int) -> Callable[[], None]:
        settings = TrainingSettings(l2=L2, epochs=asked.epochs, batch=batch, optimizer=optimizer, threads=asked.threads)
        return lambda: (train(rows, settings), None)[1]

    ways: dict[str, Callable[[], None]] = {"SGDClassifier": scikit_learn}
    for optimizer in ("sgd", "adagrad"):
        ways |= {f"{optimizer}, batches of {batch}": telegrad(optimizer, batch) for batch in BATCHES}
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(asked.rounds):
        for name, way in ways.items():
            clock_s, processor_s = time.perf_counter(), time.process_time()
            way()
            used = time.perf_counter() - clock_s, time.process_time() - processor_s
            taken[name].append((used[0] / asked.epochs, used[1] / asked.epochs))
    medians = {
        name: [statistics.median(column) for column in zip(*found, strict=True)] for name, found in taken.items()
    }
    peer = medians["SGDClassifier"]
    print(f"{asked.rows} rows of {np.diff(rows.offsets).mean():.1f} entries, {asked.rounds} rounds, an epoch:")
    for name, (clock_s, processor_s) in medians.items():
        ratios = f"{clock_s / peer[0]:.2f}x and {processor_s / peer[1]:.2f}x of SGDClassifier"
        print(f"{name:24} {1e3 * clock_s:7.1f} ms, processor {1e3 * processor_s:7.1f} ms   {ratios}")


if __name__ == "__main__":
    main()
