"""An epoch of logistic regression on one rank, beside scikit-learn's SGDClassifier, on made-up rows in URL's shape.

Each takes its turn in every round; printed are medians of an epoch's time, by the clock and of the processor (which
others' work on the machine changes less), with what is done once (weights made, labels read) shared among the epochs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Annotated

import numpy as np
import typer
from scipy.sparse import csr_matrix
from sklearn.linear_model import SGDClassifier

from lab.common.synthetic_rows import SHAPES, synthetic_rows
from telegrad.linear import TrainingSettings, train

BATCHES = (1000, 100)
L2 = 1e-6


def command(
    rows: Annotated[int, typer.Option(min=1, help="Of the data.")] = 20_000,
    rounds: Annotated[int, typer.Option(min=1, help="In which each takes its turn.")] = 7,
    epochs: Annotated[int, typer.Option(min=1, help="In each turn.")] = 5,
    threads: Annotated[int, typer.Option(min=1, help="Of telegrad's.")] = 1,
) -> None:
    """Time epochs of stochastic gradient descent and AdaGrad on one rank, beside scikit-learn's SGDClassifier."""
    data = synthetic_rows(SHAPES["url"], 0, rows)
    matrix = csr_matrix(data.to_csr())

    def scikit_learn() -> None:
        # without a tolerance it passes over the data as often as is asked
        model = SGDClassifier(loss="log_loss", alpha=L2, max_iter=epochs, tol=None, random_state=0)
        model.fit(matrix, data.labels)

    def telegrad(optimizer: str, batch: int) -> Callable[[], None]:
        settings = TrainingSettings(l2=L2, epochs=epochs, batch=batch, optimizer=optimizer, threads=threads)
        return lambda: (train(data, settings), None)[1]

    ways: dict[str, Callable[[], None]] = {"SGDClassifier": scikit_learn}
    for optimizer in ("sgd", "adagrad"):
        ways |= {f"{optimizer}, batches of {batch}": telegrad(optimizer, batch) for batch in BATCHES}
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            clock_s, processor_s = time.perf_counter(), time.process_time()
            way()
            used = time.perf_counter() - clock_s, time.process_time() - processor_s
            taken[name].append((used[0] / epochs, used[1] / epochs))
    medians = {
        name: [statistics.median(column) for column in zip(*found, strict=True)] for name, found in taken.items()
    }
    peer = medians["SGDClassifier"]
    print(f"{rows} rows of {np.diff(data.offsets).mean():.1f} entries, {rounds} rounds, an epoch:")
    for name, (clock_s, processor_s) in medians.items():
        ratios = f"{clock_s / peer[0]:.2f}x and {processor_s / peer[1]:.2f}x of SGDClassifier"
        print(f"{name:24} {1e3 * clock_s:7.1f} ms, processor {1e3 * processor_s:7.1f} ms   {ratios}")
