"""What each rank of ``telegrad bench linear`` does.

All schemes of an optimiser take the same steps on the same rows, one scheme after the other in the same processes. Each
makes two passes; the second counts. A whole epoch is more of the same: its time is scaled up, and the row says from how
many steps.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from telegrad import Communicator, SparseStream
from telegrad.bench.linear_data import About, columns_of, rows_of
from telegrad.bench.linear_plan import CD_SCHEMES, LinearPlan, algorithm_of
from telegrad.bench.peers import start_peers
from telegrad.bench.sparse_plan import entropy_bits
from telegrad.calibration import calibrate
from telegrad.launch import join
from telegrad.linear import EpochReport, Rows, Trained, TrainingSettings, objective, train
from telegrad.linear.aggregation import DenseGather, SparseGather

_TIMEOUT_S, _JOIN_TIMEOUT_S = 300.0, 120.0
_L2 = 1e-6
COORDINATES = 100  # of a rank in a step, as in SparCML

Row = dict[str, Any]
Vector = npt.NDArray[np.float32]


class DenseSum:
    """Gradients as dense vectors, which ``all_reduce`` sums in place. ``seconds``: of each sum so far."""

    def __init__(self, n: int, all_reduce: Callable[[Vector], object]) -> None:
        self._vector = np.zeros(n, np.float32)
        self._all_reduce = all_reduce
        self.seconds: list[float] = []

    def prepare(self, gradient: SparseStream) -> Vector:
        self._vector[:] = 0
        self._vector[gradient.raw_indices] = gradient.raw_values
        return self._vector

    def sum(self, prepared: Vector) -> SparseStream:
        began_s = time.perf_counter()
        self._all_reduce(prepared)
        self.seconds.append(time.perf_counter() - began_s)
        return SparseStream.trusted(None, prepared, prepared.size)


class AlgorithmSum:
    """Gradients as they are, summed by one algorithm. ``seconds`` and ``entries``: of each sum so far."""

    def __init__(self, comm: Communicator, algorithm: str) -> None:
        self._comm, self._algorithm = comm, algorithm
        self.seconds: list[float] = []
        self.entries: list[int] = []

    def prepare(self, gradient: SparseStream) -> SparseStream:
        return gradient

    def sum(self, prepared: SparseStream) -> SparseStream:
        began_s = time.perf_counter()
        total: SparseStream = self._comm.all_reduce(prepared, algorithm=self._algorithm)
        self.seconds.append(time.perf_counter() - began_s)
        self.entries.append(total.nnz)
        return total


class _Received:
    """The bytes that this rank receives in the second pass."""

    def __init__(self, comm: Communicator) -> None:
        self._comm, self._before = comm, 0

    def on_epoch(self, report: EpochReport) -> None:
        if report.epoch == 1:
            self._before = self._comm.stats()["bytes_received"]

    def bytes(self) -> int:
        return self._comm.stats()["bytes_received"] - self._before


def main(plan_json: str) -> None:
    """One rank. Rank 0 prints a row as JSON for each scheme; a rank whose data are wrong prints ``{"error"}`` and ends
    with status 1."""
    plan = LinearPlan.from_json(plan_json)
    with join(timeout_s=_TIMEOUT_S, join_timeout_s=_JOIN_TIMEOUT_S) as comm:
        if plan.calibrates:
            calibrate(comm, keep=False)
        try:
            rows, about = rows_of(plan, comm)
        except (ValueError, OSError, ImportError) as error:
            print(json.dumps({"error": str(error)}), flush=True)
            sys.exit(1)
        peers = start_peers(plan, comm)
        sums: dict[str, Callable[[Vector], object]] = {p.name: p.all_reduce for p in peers}
        sums["telegrad"] = comm.all_reduce
        for scheme in plan.schemes:
            name = scheme.partition("-")[0]
            if scheme in CD_SCHEMES:
                row = _descent(plan, comm, rows, about, dense=scheme.endswith("-dense"))
            elif name in sums:
                row = _gradients(plan, comm, rows, about, algorithm_of(scheme), sums[name], counts=name == "telegrad")
            else:
                continue
            if comm.rank == 0:
                print(json.dumps({"scheme": scheme, "calibrated": plan.calibrates, **about, **row}), flush=True)
        for peer in peers:
            comm.barrier()
            peer.close()


def _gradients(
    plan: LinearPlan,
    comm: Communicator,
    rows: Rows,
    about: About,
    algorithm: str | None,
    all_reduce: Callable[[Vector], object],
    *,
    counts: bool,
) -> Row:
    """SGD, whose gradients are summed densely by ``all_reduce``, or by a sparse ``algorithm``."""
    batch = min(plan.rows, len(rows)) * plan.ranks
    sparse = None if algorithm is None else AlgorithmSum(comm, algorithm)
    aggregation = sparse or DenseSum(rows.n_features + 2, all_reduce)
    received = _Received(comm)
    comm.barrier()
    settings = TrainingSettings(l2=_L2, epochs=2, batch=batch)
    trained = train(rows, settings, comm, aggregation=aggregation, on_epoch=received.on_epoch)
    row = _times(comm, trained, aggregation.seconds, received.bytes() if counts else None)
    n, in_epoch = rows.n_features + 2, about["scaled_to_rows"] / batch
    total = float(np.mean(sparse.entries[-row["steps"] :])) if sparse else None
    return {
        "optimizer": "sgd",
        "rows_a_step": batch,
        **row,
        "epoch_s": row["step_s"] * in_epoch,
        "comm_s": row["step_comm_s"] * in_epoch,
        "entries_of_sum": total,
        "bound_bytes": 2 * (plan.ranks - 1) / plan.ranks * 4 * n
        if total is None
        else (total - row["entries_a_rank"]) * _entry_bytes(total / n),
        "objective": objective(trained.model, rows, _L2, comm),
    }


def _descent(plan: LinearPlan, comm: Communicator, rows: Rows, about: About, *, dense: bool) -> Row:
    """Coordinate descent on the rows of one step of SGD: a pass has a step for each block of the columns they have. In
    an epoch, computing grows with the rows, and communication with the columns."""
    rows = rows.part(0, min(plan.rows, len(rows)))
    columns, n = columns_of(rows, comm), rows.n_features
    settings = TrainingSettings(l2=_L2, epochs=2, optimizer="coordinate_descent", coordinates=COORDINATES)
    received = _Received(comm)
    comm.barrier()
    gathering = DenseGather(comm) if dense else SparseGather(comm)
    trained = train(rows, settings, comm, aggregation=gathering, on_epoch=received.on_epoch)
    row = _times(comm, trained, None, received.bytes())
    comm_s = row["steps"] * row["step_comm_s"] * about["non_empty_columns"] / columns
    compute_s = row["steps"] * (row["step_s"] - row["step_comm_s"]) * about["scaled_to_rows"] / (len(rows) * plan.ranks)
    others = COORDINATES * (plan.ranks - 1)
    return {
        "optimizer": "coordinate_descent",
        "rows_a_step": len(rows) * plan.ranks,
        **row,
        "epoch_s": compute_s + comm_s,
        "comm_s": comm_s,
        "entries_of_sum": None,
        "bound_bytes": 4 * n * (plan.ranks - 1) / plan.ranks
        if dense
        else others * _entry_bytes(COORDINATES * plan.ranks / n),
        "objective": objective(trained.model, rows, _L2, comm),
    }


def _times(comm: Communicator, trained: Trained, sums_s: list[float] | None, received: int | None) -> Row:
    """Of a step of the second pass: the slowest rank's time, and the communication of the rank that waited least for
    others in each step (without ``sums_s``, each sum's seconds: in all of them)."""
    last = trained.epochs[-1]
    own = np.array([last.compute_s + last.comm_s, last.comm_s, last.entries, received or 0], np.float64) / last.steps
    every = comm.all_gather(own)
    comm_s = every[:, 1].min()
    if sums_s is not None:
        comm_s = comm.all_gather(np.array(sums_s[-last.steps :], np.float64)).min(0).mean()
    return {
        "steps": last.steps,
        "step_s": float(every[:, 0].max()),
        "step_comm_s": float(comm_s),
        "entries_a_rank": float(every[:, 2].mean()),
        "received_bytes": None if received is None else float(every[:, 3].max()),
    }


def _entry_bytes(density: float) -> float:
    """What an entry needs at least: sign and digits of its value, whose exponent may be packed, and its index."""
    return (24 + entropy_bits(density)) / 8
