"""What a non-blocking allreduce costs beside a blocking one.

Three ways, in turn: blocking; issued and waited for at once; issued, and then the main thread multiplies small matrices
until the operation is over. The last one's time is until the end of the multiplication during which it was over, so
that it is too long by half a multiplication on average (``matmul_s`` says how long one takes).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from lab.common.commands import end_with_rows
from telegrad import Communicator
from telegrad.launch import LaunchError, join
from telegrad.tools.bench.allreduce import Row, report_of
from telegrad.tools.bench.plan import AllreducePlan, Timing, text_of
from telegrad.tools.cli.options import JobTimeout, RowsFile, byte_sizes, networks_of
from telegrad.tools.cli.outputs import check_writable, counting, table_console
from telegrad.tools.report.figures import duration

TARGET = "lab.nonblocking:rank_main"
"""What the ranks run."""

# What each rank runs, and the job

WAYS = ("blocking", "nonblocking", "computing")
_MATRIX = 48  # a multiplication takes about 10 µs, without threads
_MOST_CALLS = 500
_TIMEOUT_S, _JOIN_TIMEOUT_S = 300.0, 120.0


@dataclass
class _Way:
    call: Callable[[], object]
    calls: int = 1


def rank_main(plan_json: str) -> None:
    """One rank. Rank 0 prints a row as JSON for each size."""
    plan = AllreducePlan.from_json(plan_json)
    with join(timeout_s=_TIMEOUT_S, join_timeout_s=_JOIN_TIMEOUT_S) as communicator:
        for size in plan.sizes:
            row = _measured(plan, communicator, size)
            if communicator.rank == 0:
                print(json.dumps(row), flush=True)


def run(plan: AllreducePlan, *, timeout_s: float, on_row: Callable[[Row], None] = lambda _: None) -> list[Row]:
    """A row per size: medians in seconds and their ratios to blocking. Raises ``RankFailed`` and ``RanksTimedOut``."""
    rows: list[Row] = []

    def take(rank: int, line: str) -> None:
        if rank == 0 and line.startswith("{"):
            row = json.loads(line)
            about = {"op": plan.benchmark, "network": plan.network, "ranks": plan.ranks}
            ratios = {f"{way}_ratio": row[f"{way}_median_s"] / row["blocking_median_s"] for way in WAYS[1:]}
            rows.append({**about, **row, **ratios})
            on_row(rows[-1])

    report_of(plan, take, timeout_s=timeout_s, target=TARGET)
    return rows


def _measured(plan: AllreducePlan, communicator: Communicator, size: int) -> Row:
    x = np.zeros(size // 4, np.float32)
    left, right = np.ones((2, _MATRIX, _MATRIX), np.float32)
    product = np.empty_like(left)

    def compute_meanwhile() -> None:
        work = communicator.all_reduce(x, async_op=True)
        while not work.is_completed():
            np.matmul(left, right, out=product)
        work.wait()

    ways = {
        "blocking": _Way(lambda: communicator.all_reduce(x)),
        "nonblocking": _Way(lambda: communicator.all_reduce(x, async_op=True).wait()),
        "computing": _Way(compute_meanwhile),
    }
    wrong = sum(_wrong(communicator, x, way.call) for way in ways.values())
    for way in ways.values():
        once_s = min(_sample(communicator, way) for _ in range(3))
        way.calls = int(np.clip(plan.sample_s / max(once_s, 1e-9), 1, _MOST_CALLS))
    times_s: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(plan.samples):
        for index in np.random.default_rng(number).permutation(len(WAYS)):  # as on all ranks
            times_s[WAYS[index]].append(_sample(communicator, ways[WAYS[index]]))
    medians = {f"{name}_median_s": Timing.of(times).median_s for name, times in times_s.items()}
    matmul = _Way(lambda: np.matmul(left, right, out=product), calls=20)
    return {"bytes": size, **medians, "matmul_s": _sample(communicator, matmul), "wrong": wrong}


def _wrong(communicator: Communicator, x: np.ndarray, call: Callable[[], object]) -> int:
    """Wrong values of one call over all ranks; it also warms up. ``x`` is zero afterwards."""
    ranks = communicator.world_size
    x.fill(communicator.rank + 1)
    call()
    wrong = int(np.count_nonzero(x != ranks * (ranks + 1) // 2))
    x.fill(0)
    return int(communicator.all_gather(np.array([wrong], np.int64)).sum())


def _sample(communicator: Communicator, way: _Way) -> float:
    """Seconds per call, of the slowest rank; the same number on all."""
    communicator.barrier()
    begin = time.perf_counter()
    for _ in range(way.calls):
        way.call()
    mine = (time.perf_counter() - begin) / way.calls
    return float(communicator.all_gather(np.array([mine])).max())


# The command


def command(
    ranks: Annotated[int, typer.Option(min=1, max=256, help="Processes to start on this machine.")] = 4,
    network: Annotated[str, typer.Option(help="shm, tcp, or a rate such as 1gbit; several: shm,tcp.")] = "shm",
    sizes: Annotated[
        str, typer.Option(help="Lengths of the vector, separated by commas.")
    ] = "4B,256B,1KiB,4KiB,16KiB,64KiB",
    samples: Annotated[int, typer.Option(min=3, help="Samples of each way at each size.")] = 51,
    json_file: RowsFile = None,
    timeout: JobTimeout = 300.0,
) -> None:
    """Time sums that block, sums issued and waited for at once, and sums while the main thread computes, in turn.

    Times are medians of the slowest rank. [bold]computing[/] is the time until a sum is over while the main thread
    multiplies small matrices (one takes [bold]matmul[/], the resolution). Ratios are to blocking.
    """
    console = table_console()
    networks, sizes_in_bytes = networks_of([name.strip() for name in network.split(",")]), byte_sizes(sizes)
    check_writable(json_file, "--json")
    rows: list[Row] = []
    for name in networks:
        plan = AllreducePlan("nonblocking", name, ranks, sizes_in_bytes, ("auto",), samples=samples)
        try:
            rows += _run_with_progress(console, plan, timeout)
        except (LaunchError, RuntimeError) as error:
            console.print(f"[red]{name}:[/] {error}", highlight=False)
            raise typer.Exit(1) from error
    console.print(_table_of(rows, f"all_reduce, {ranks} ranks: blocking and not"))
    end_with_rows(console, rows, json_file)


def _run_with_progress(console: Console, plan: AllreducePlan, timeout_s: float) -> list[Row]:
    with counting(console) as progress:
        task = progress.add_task(f"sizes over {plan.network}", total=len(plan.sizes))
        return run(plan, timeout_s=timeout_s, on_row=lambda _: progress.advance(task))


def _table_of(rows: list[Row], title: str) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold")
    table.add_column("network")
    for name in ("size", "blocking", "non-blocking", "ratio", "computing", "ratio", "matmul", "wrong"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            str(row["network"]),
            text_of(int(str(row["bytes"]))),
            duration(float(str(row["blocking_median_s"]))),
            duration(float(str(row["nonblocking_median_s"]))),
            f"{row['nonblocking_ratio']:.2f}",
            duration(float(str(row["computing_median_s"]))),
            f"{row['computing_ratio']:.2f}",
            duration(float(str(row["matmul_s"]))),
            str(row["wrong"]),
        )
    return table
