"""``telegrad bench linear``: epochs of linear models with dense and with sparse sums of the gradients.

All schemes take the same steps on the same rows, one scheme after the other in the same processes. Each passes over its
rows twice; the second pass counts. A whole epoch is more steps of the same kind: its time is scaled up, and the row
says from how many steps.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from telegrad import Communicator, SparseStream
from telegrad.bench.job import peers_store, run_job
from telegrad.bench.linear_data import rows_of
from telegrad.bench.linear_plan import LinearPlan, algorithm_of
from telegrad.bench.peers import start_peers
from telegrad.bench.sparse_plan import entropy_bits
from telegrad.calibration import calibrate
from telegrad.launch import join
from telegrad.linear import EpochReport, Rows, TrainingSettings, objective, train
from telegrad.linear.training import Aggregation

_TIMEOUT_S, _JOIN_TIMEOUT_S = 300.0, 120.0
_L2 = 1e-6

BOUND = (
    "What a rank must receive of a step's sum: of a dense one 2(P-1)/P*n values of 4 bytes; of a sparse one the K-k "
    "entries that it does not have, of 24 bits (exponents may be packed) and H(K/n)/(K/n) bits of index"
)
"""What ``bound_bytes`` means in result files."""

Row = dict[str, Any]
Vector = npt.NDArray[np.float32]


class DenseSum:
    """Gradients as dense vectors, which ``all_reduce`` sums in place."""

    def __init__(self, n: int, all_reduce: Callable[[Vector], object]) -> None:
        self._vector = np.zeros(n, np.float32)
        self._all_reduce = all_reduce

    def prepare(self, gradient: SparseStream) -> Vector:
        self._vector[:] = 0
        self._vector[gradient.raw_indices] = gradient.raw_values
        return self._vector

    def sum(self, prepared: Vector) -> SparseStream:
        self._all_reduce(prepared)
        return SparseStream.trusted(None, prepared, prepared.size)


class SparseSum:
    """Gradients as they are, summed by one algorithm. ``entries``: of all sums so far."""

    def __init__(self, comm: Communicator, algorithm: str) -> None:
        self._comm, self._algorithm = comm, algorithm
        self.entries = 0

    def prepare(self, gradient: SparseStream) -> SparseStream:
        return gradient

    def sum(self, prepared: SparseStream) -> SparseStream:
        total: SparseStream = self._comm.all_reduce(prepared, algorithm=self._algorithm)
        self.entries += total.nnz
        return total


def main(plan_json: str) -> None:
    """One rank. Rank 0 prints a row as JSON for each scheme."""
    plan = LinearPlan.from_json(plan_json)
    with join(timeout_s=_TIMEOUT_S, join_timeout_s=_JOIN_TIMEOUT_S) as comm:
        if plan.calibrates:
            calibrate(comm, keep=False)
        rows, about = rows_of(plan, comm)
        peers = start_peers(plan, comm)
        sums: dict[str, Callable[[Vector], object]] = {p.name: p.all_reduce for p in peers}
        sums["telegrad"] = comm.all_reduce
        for scheme in plan.schemes:
            name = scheme.partition("-")[0]
            if name in sums:
                row = _measured(plan, comm, rows, algorithm_of(scheme), sums[name], counts=name == "telegrad")
                if comm.rank == 0:
                    print(json.dumps({"scheme": scheme, **about, **row}), flush=True)
        for peer in peers:
            comm.barrier()
            peer.close()


def run(plan: LinearPlan, *, timeout_s: float, on_row: Callable[[Row], None] = lambda _: None) -> list[Row]:
    """A row for each scheme that could run. ``step_s`` and ``step_comm_s``: of a step, of the slowest rank and of the
    rank that waited least; ``epoch_s`` and ``comm_s``: the same for as many rows as the data have, scaled from
    ``steps``. ``received_bytes``: in a step, of the rank that received most, ``None`` for peers; ``bound_bytes``: see
    ``BOUND``. Raises ``RankFailed``, ``RanksTimedOut`` and ``NetlabError``."""
    found: list[Row] = []

    def take(rank: int, line: str) -> None:
        if rank or not line.startswith('{"scheme"'):
            return
        row = json.loads(line)
        in_epoch = row["scaled_to_rows"] / row["rows_a_step"]
        scaled = {"epoch_s": row["step_s"] * in_epoch, "comm_s": row["step_comm_s"] * in_epoch}
        place = {"op": "linear", "data": plan.name, "network": plan.network, "ranks": plan.ranks}
        found.append({**place, **scaled, **row})
        on_row(found[-1])

    with peers_store() as store:
        own = dataclasses.replace(plan, store=store)
        run_job("telegrad.bench.linear:main", own, take, timeout_s=timeout_s, mpich="mpich" in plan.peers)
    return found


def _measured(
    plan: LinearPlan,
    comm: Communicator,
    rows: Rows,
    algorithm: str | None,
    all_reduce: Callable[[Vector], object],
    *,
    counts: bool,
) -> Row:
    each = min(plan.rows, len(rows))
    settings = TrainingSettings(l2=_L2, epochs=2, batch=each * plan.ranks)
    sparse = None if algorithm is None else SparseSum(comm, algorithm)
    aggregation: Aggregation = sparse or DenseSum(rows.n_features + 2, all_reduce)
    received = summed = 0

    def after_first_pass(report: EpochReport) -> None:
        nonlocal received, summed
        if report.epoch == 1:
            received, summed = comm.stats()["bytes_received"], sparse.entries if sparse else 0

    comm.barrier()
    trained = train(rows, settings, comm, aggregation=aggregation, on_epoch=after_first_pass)
    last = trained.epochs[-1]
    received = comm.stats()["bytes_received"] - received
    own = np.array([last.compute_s + last.comm_s, last.comm_s, last.entries, received], np.float64) / last.steps
    every = comm.all_gather(own)
    n, entries = rows.n_features + 2, float(every[:, 2].mean())
    if sparse:
        total = (sparse.entries - summed) / last.steps
        bound = (total - entries) * (24 + entropy_bits(total / n)) / 8
    else:
        total, bound = None, 2 * (plan.ranks - 1) / plan.ranks * 4 * n
    return {
        "calibrated": plan.calibrates,
        "rows_a_step": each * plan.ranks,
        "steps": last.steps,
        "step_s": float(every[:, 0].max()),
        "step_comm_s": float(every[:, 1].min()),
        "entries_a_rank": entries,
        "entries_of_sum": total,
        "received_bytes": float(every[:, 3].max()) if counts else None,
        "bound_bytes": bound,
        "objective": objective(trained.model, rows, _L2, comm),
    }
