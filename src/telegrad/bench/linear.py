"""``telegrad bench linear``: epochs of linear models with dense and with sparse sums of the gradients.

All schemes take the same steps on the same made-up rows, one scheme after the other in the same processes. Each passes
over its rows twice; the second pass counts. A whole epoch is more steps of the same kind: its time is scaled up, and
the row says from how many steps.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from telegrad import Communicator, SparseStream
from telegrad.bench.job import peers_store, run_job
from telegrad.bench.peers import start_peers
from telegrad.calibration import calibrate
from telegrad.launch import join
from telegrad.linear import Rows, TrainingSettings, objective, train
from telegrad.linear.synthetic import SHAPES, synthetic_rows

SCHEMES = ("gloo-dense", "mpich-dense", "telegrad-dense", "telegrad-sparse")

_TIMEOUT_S, _JOIN_TIMEOUT_S = 300.0, 120.0
_L2 = 1e-6

Row = dict[str, Any]


@dataclass(frozen=True)
class LinearPlan:
    """``rows``: of each rank in a step; ``steps``: of a pass; ``network``: as ``open_network`` knows it."""

    data: str
    network: str
    ranks: int
    schemes: tuple[str, ...]
    rows: int = 1000
    steps: int = 3
    calibrates: bool = True
    store: str = ""

    def __post_init__(self) -> None:
        if self.data not in SHAPES:
            raise ValueError(f"data={self.data!r} does not exist: use {', '.join(SHAPES)}")
        for scheme in self.schemes:
            if scheme not in SCHEMES:
                raise ValueError(f"scheme {scheme!r} does not exist: use {', '.join(SCHEMES)}")

    @property
    def peers(self) -> tuple[str, ...]:
        names = (scheme.removesuffix("-dense") for scheme in self.schemes)
        return tuple(name for name in names if not name.startswith("telegrad"))

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        fields = json.loads(text)
        return cls(**{**fields, "schemes": tuple(fields["schemes"])})


class DenseSum:
    """Gradients as dense vectors, which ``all_reduce`` sums in place."""

    def __init__(self, n: int, all_reduce: Callable[[npt.NDArray[np.float32]], object]) -> None:
        self._vector = np.zeros(n, np.float32)
        self._all_reduce = all_reduce

    def prepare(self, gradient: SparseStream) -> npt.NDArray[np.float32]:
        self._vector[:] = 0
        self._vector[gradient.raw_indices] = gradient.raw_values
        return self._vector

    def sum(self, prepared: npt.NDArray[np.float32]) -> SparseStream:
        self._all_reduce(prepared)
        return SparseStream.trusted(None, prepared, prepared.size)


def main(plan_json: str) -> None:
    """One rank. Rank 0 prints a row as JSON for each scheme."""
    plan = LinearPlan.from_json(plan_json)
    with join(timeout_s=_TIMEOUT_S, join_timeout_s=_JOIN_TIMEOUT_S) as comm:
        if plan.calibrates:
            calibrate(comm, keep=False)
        count = plan.rows * plan.steps
        rows = synthetic_rows(SHAPES[plan.data], comm.rank * count, (comm.rank + 1) * count)
        columns = _columns_of(rows, comm)
        peers = start_peers(plan, comm)
        sums: dict[str, Callable[[npt.NDArray[np.float32]], object]] = {p.name: p.all_reduce for p in peers}
        sums["telegrad"] = comm.all_reduce
        for scheme in plan.schemes:
            name, _, kind = scheme.partition("-")
            if name in sums:
                row = _measured(plan, comm, rows, None if kind == "sparse" else sums[name])
                if comm.rank == 0:
                    print(json.dumps({"scheme": scheme, "non_empty_columns": columns, **row}), flush=True)
        for peer in peers:
            comm.barrier()
            peer.close()


def run(plan: LinearPlan, *, timeout_s: float, on_row: Callable[[Row], None] = lambda _: None) -> list[Row]:
    """A row for each scheme that could run. ``step_s`` and ``step_comm_s``: of a step, of the slowest rank and of the
    rank that waited least; ``epoch_s`` and ``comm_s``: the same for as many rows as published, scaled from ``steps``.
    Raises ``RankFailed``, ``RanksTimedOut`` and ``NetlabError``."""
    shape = SHAPES[plan.data]
    found: list[Row] = []

    def take(rank: int, line: str) -> None:
        if rank or not line.startswith('{"scheme"'):
            return
        row = json.loads(line)
        in_epoch = shape.rows / (plan.rows * plan.ranks)
        about = {"op": "linear", "data": plan.data, "synthetic": True, "exponent": shape.popularity.exponent}
        scaled = {"epoch_s": row["step_s"] * in_epoch, "comm_s": row["step_comm_s"] * in_epoch}
        place = {"network": plan.network, "ranks": plan.ranks, "rows_a_step": plan.rows * plan.ranks}
        found.append({**about, **place, "scaled_to_rows": shape.rows, **scaled, **row})
        on_row(found[-1])

    with peers_store() as store:
        own = dataclasses.replace(plan, store=store)
        run_job("telegrad.bench.linear:main", own, take, timeout_s=timeout_s, mpich="mpich" in plan.peers)
    return found


def _columns_of(rows: Rows, comm: Communicator) -> int:
    """How many features some rank's rows have."""
    indices = np.unique(rows.indices)
    mine = SparseStream.trusted(indices, np.ones(indices.size, np.float32), rows.n_features)
    total: SparseStream = comm.all_reduce(mine, "max")
    return int(np.count_nonzero(total.memory(0.0)[1] > 0))


def _measured(
    plan: LinearPlan,
    comm: Communicator,
    rows: Rows,
    all_reduce: Callable[[npt.NDArray[np.float32]], object] | None,
) -> Row:
    settings = TrainingSettings(l2=_L2, epochs=2, batch=plan.rows * plan.ranks)
    dense = None if all_reduce is None else DenseSum(rows.n_features + 2, all_reduce)
    comm.barrier()
    trained = train(rows, settings, comm, aggregation=dense)
    last = trained.epochs[-1]
    own = np.array([last.compute_s + last.comm_s, last.comm_s, last.entries], np.float64) / last.steps
    every = comm.all_gather(own)
    return {
        "calibrated": plan.calibrates,
        "steps": last.steps,
        "step_s": float(every[:, 0].max()),
        "step_comm_s": float(every[:, 1].min()),
        "entries_a_rank": float(every[:, 2].mean()),
        "objective": objective(trained.model, rows, _L2, comm),
    }
