"""How long ranks take to a linear model near the optimum, with sparse and with dense sums of the same method.

All schemes take the same steps, and find the same bits; C = 1. A dense sum has all features of the data, or those alone
that occur in any rank's rows. Times are of the slowest rank, from the first step on.
"""

from __future__ import annotations

import ctypes
import json
import time
import unittest.mock
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import typer
from rich import box
from rich.table import Table

from lab.common.commands import end_with_rows
from lab.common.synthetic_rows import SHAPES, synthetic_rows
from telegrad import Communicator
from telegrad.launch import LaunchError, join
from telegrad.linear import Rows, TrainingSettings
from telegrad.linear.newton import Newton
from telegrad.linear.problem import _GATHERED, Problem
from telegrad.tools.bench.netlab import NetlabError
from telegrad.tools.bench.plan import JsonFields, run_job
from telegrad.tools.cli.options import JobTimeout, RowsFile, among, networks_of
from telegrad.tools.cli.outputs import check_all_writable, counting, table_console
from telegrad.tools.report.figures import duration
from telegrad.tuning import calibrate

SCHEMES = ("sparse", "dense", "dense-occurring")
LOSSES = ("logistic", "squared_hinge", "hinge")
NEAR = (1e-2, 1e-3)
_TOLERANCE = 1e-4  # the default; times are compared with the objective that it ends at

Row = dict[str, Any]


@dataclass(frozen=True)
class SolutionPlan(JsonFields):
    """``data``: names of ``SHAPES``; ``rows``: of each rank."""

    data: tuple[str, ...]
    losses: tuple[str, ...]
    schemes: tuple[str, ...]
    network: str
    ranks: int
    rows: int


class DenseNewton(Newton):
    """With dense sums of all features of the data."""

    def _reduce(self, address: int, count: int, of_feature: int, largest: bool) -> None:
        comm, used, of_all = self._problem.comm, self._problem.used, self._problem.all_features
        if not of_feature or comm is None:
            super()._reduce(address, count, of_feature, largest)
            return
        assert used is not None
        assert of_feature == 1
        numbers = np.ctypeslib.as_array((ctypes.c_double * count).from_address(address))
        if not isinstance(comm, Communicator):  # in virtual time the same numbers may stand for all features
            comm.all_reduce_as_of(of_all + count - used.size, numbers, "max" if largest else "sum")
            return
        every = np.zeros(of_all + count - used.size)
        places = np.append(used, np.arange(of_all, every.size))
        every[places] = numbers
        began_s = time.perf_counter()
        comm.all_reduce(every, "max" if largest else "sum")
        self._comm_s += time.perf_counter() - began_s
        numbers[:] = every[places]


def as_of_many(entries: int) -> Any:
    """However few entries the rows have, ranks do what they do with many."""
    gathered = _GATHERED if entries > _GATHERED else 0
    return unittest.mock.patch.multiple("telegrad.linear.problem", _POOLED=0, _GATHERED=gathered)


def newton_of(rows: Rows, settings: TrainingSettings, comm: Any, scheme: str) -> tuple[Problem, Newton]:
    """The dense schemes hold the weights of all features that occur, on each rank."""
    alone = comm is None or comm.world_size == 1
    problem = Problem(rows, settings, comm, alone=alone, may_split=scheme == "sparse")
    return problem, (DenseNewton if scheme == "dense" else Newton)(problem)


def solved(rows: Rows, loss: str, comm: Communicator, scheme: str, best: float | None) -> tuple[Row, float]:
    """Figures of one scheme, and the optimum, which is found first if ``best`` is ``None``."""
    settings = TrainingSettings(loss=loss, l2=1 / (len(rows) * comm.world_size), tol=_TOLERANCE)
    problem, newton = newton_of(rows, settings, comm, scheme)
    comm.barrier()
    received = comm.stats()["bytes_received"]
    seconds, comm_s, steps, sums = 0.0, 0.0, 0, 0
    reached: dict[str, float] = {}
    while True:
        began_s = time.perf_counter()
        found = newton.epoch(steps, lambda step, all_steps: None)
        own = np.array([time.perf_counter() - began_s, found.comm_s])
        every = comm.all_gather(own)
        seconds, comm_s = seconds + float(every[:, 0].max()), comm_s + float(every[:, 1].min())
        steps, sums = steps + 1, sums + found.steps
        for near in NEAR:
            if best is not None and found.objective <= best * (1 + near):
                reached.setdefault(f"to_{near:g}_s", seconds)
        if found.has_ended or (best is not None and len(reached) == len(NEAR)):
            break
    row = {"scheme": scheme, "loss": loss, "steps": steps, "sums": sums, "objective": found.objective, **reached}
    row |= {"comm_s": comm_s, "received_mb": (comm.stats()["bytes_received"] - received) / 1e6}
    return {**row, "columns": problem.occurring, "features": problem.all_features}, found.objective


def rank_main(plan_json: str) -> None:
    """One rank. Rank 0 prints a row as JSON for each scheme."""
    plan = SolutionPlan.from_json(plan_json)
    with join(timeout_s=300.0, join_timeout_s=120.0) as comm:
        calibrate(comm, keep=False)
        for data in plan.data:
            rows = synthetic_rows(SHAPES[data], comm.rank * plan.rows, (comm.rank + 1) * plan.rows)
            entries = int(comm.all_gather(np.array([rows.nnz], np.int64)).sum())
            for loss in plan.losses:
                with as_of_many(entries):
                    best = solved(rows, loss, comm, "sparse", None)[1]
                    every = [solved(rows, loss, comm, scheme, best)[0] for scheme in plan.schemes]
                for row in every:
                    if comm.rank == 0:
                        print(json.dumps({"data": data, "rows_a_rank": plan.rows, **row}), flush=True)


def table_of(rows: Sequence[Row], title: str) -> Table:
    """A line for each data set, loss and scheme."""
    table = Table(title=title, title_justify="left", header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    names = ("data", "loss", "scheme", "to 1 %", "to 0.1 %", "its comm.", "steps", "sums", "MB received", "of dense")
    for name in names:
        table.add_column(name, justify="left" if name in names[:3] else "right", no_wrap=True)
    for row in rows:
        alike = (one for one in rows if (one["data"], one["loss"]) == (row["data"], row["loss"]))
        dense = next((one for one in alike if one["scheme"] == "dense"), None)
        ratio = "" if dense is None else f"{row['to_0.001_s'] / dense['to_0.001_s']:.3f}x"
        times = [duration(row[name]) for name in ("to_0.01_s", "to_0.001_s", "comm_s")]
        counts = [str(row["steps"]), str(row["sums"]), f"{row['received_mb']:.3g}", ratio]
        table.add_row(row["data"], row["loss"], row["scheme"], *times, *counts)
    return table


def command(
    ranks: Annotated[int, typer.Option(min=2, max=256, help="Processes to start on this machine.")] = 8,
    network: Annotated[str, typer.Option(help="shm, tcp, or a rate such as 1gbit (needs root).")] = "1gbit",
    data: Annotated[str, typer.Option(help=f"Made-up rows in the shapes of {', '.join(SHAPES)}.")] = ",".join(SHAPES),
    losses: Annotated[str, typer.Option(help=f"Some of {', '.join(LOSSES)}.")] = "logistic,squared_hinge",
    schemes: Annotated[str, typer.Option(help=f"Some of {', '.join(SCHEMES)}.")] = ",".join(SCHEMES),
    rows: Annotated[int, typer.Option(min=1, help="Of each rank.")] = 1000,
    json_file: RowsFile = None,
    timeout: JobTimeout = 600.0,
) -> None:
    """Time linear models among ranks to 1 % and 0.1 % above the optimum, with sparse and with dense sums."""
    console = table_console()
    networks_of([network])
    chosen = [tuple(among(*one)) for one in ((data, SHAPES, "--data"), (losses, LOSSES, "--losses"))]
    plan = SolutionPlan(chosen[0], chosen[1], tuple(among(schemes, SCHEMES, "--schemes")), network, ranks, rows)
    check_all_writable({"--json": json_file})
    found: list[Row] = []
    with counting(console) as progress:
        task = progress.add_task("schemes", total=len(plan.data) * len(plan.losses) * len(plan.schemes))

        def take(rank: int, line: str) -> None:
            if rank == 0 and line.startswith('{"data"'):
                found.append(
                    {"op": "linear_solution", "network": network, "ranks": ranks, "wrong": 0, **json.loads(line)}
                )
                progress.advance(task)

        try:
            run_job("lab.linear_solution:rank_main", plan, take, timeout_s=timeout)
        except (LaunchError, NetlabError) as error:
            console.print(str(error), style="red", highlight=False, markup=False)
            raise typer.Exit(1) from error
    console.print(table_of(found, f"{ranks} ranks over {network}, {rows:,} rows each"))
    end_with_rows(console, found, json_file)
