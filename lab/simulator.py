"""Events a second and memory of the simulator, up to 4,096 ranks: each case in a process of its own.

The cases are those that tell whether thousands of ranks can be simulated: every collective at 4,096 ranks with sizes
only, and real payloads where they fit. Needs neither network nor torch.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from telegrad import _core
from telegrad.launch.joining import die_with
from telegrad.tools.bench.machine import describe_machine, machine_text
from telegrad.tools.bench.plan import text_of
from telegrad.tools.cli.options import RowsFile
from telegrad.tools.cli.outputs import check_writable, counting, write_result

Row = dict[str, Any]


# Cases


@dataclass(frozen=True)
class Case:
    """One operation of ``ranks`` ranks. ``bytes``: one rank's vector; sparse: four per index of the dimension. ``nnz``:
    entries of each rank. ``payloads``: real values, whose result is compared with the expected sum.
    """

    operation: str
    algorithm: str
    ranks: int
    bytes: int
    nnz: int = 0
    payloads: bool = False


_MIB = 1 << 20

CASES: tuple[Case, ...] = (
    Case("allreduce", "ring", 1024, 64 << 10, payloads=True),
    Case("allreduce", "ring", 2048, 8 << 10),
    Case("allreduce", "recursive_doubling", 2048, 8 << 10),
    Case("sparse_allreduce", "split_allgather", 2048, 4 * _MIB, nnz=8, payloads=True),
    Case("sparse_allreduce", "split_allgather", 2048, 256 * _MIB, nnz=671_088),
    Case("allreduce", "ring", 4096, 64 * _MIB),
    Case("allreduce", "recursive_doubling", 4096, 64 * _MIB),
    Case("sparse_allreduce", "split_allgather", 4096, 256 * _MIB, nnz=671_088),
    Case("allgather", "", 4096, _MIB),
    Case("broadcast", "", 4096, 64 * _MIB),
    Case("barrier", "", 4096, 0),
    Case("allreduce", "ring", 4096, 64 << 10, payloads=True),
    Case("allreduce", "recursive_doubling", 4096, 64 << 10, payloads=True),
    Case("sparse_allreduce", "split_allgather", 4096, 4 * _MIB, nnz=4, payloads=True),
    Case("allgather", "", 4096, 4, payloads=True),
    Case("broadcast", "", 4096, 64 << 10, payloads=True),
)


def run_cases(cases: Sequence[Case] = CASES, *, on_row: Callable[[Row], None] = lambda row: None) -> list[Row]:
    """A row per case, in their order. Raises ``RuntimeError`` if a result is wrong or a simulation does not end."""
    rows = []
    context = multiprocessing.get_context("spawn")
    for case in cases:
        with concurrent.futures.ProcessPoolExecutor(1, context, die_with, (os.getpid(),)) as process:
            rows.append(process.submit(run_case, case).result())
        on_row(rows[-1])
    return rows


def run_case(case: Case) -> Row:
    """The case itself and what it took: ``wall_s``, ``events_per_s``, ``peak_bytes`` (of this process)."""
    before_s = time.perf_counter()
    found = _core.measure(case.operation, case.algorithm, case.ranks, case.bytes, nnz=case.nnz, payloads=case.payloads)
    wall_s = time.perf_counter() - before_s
    return {
        **asdict(case),
        "time_s": found["finish_s"],
        "events": found["events"],
        "messages": int(found["messages_sent"].sum()),
        "wall_s": wall_s,
        "events_per_s": found["events"] / wall_s,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


# The command


def command(
    most_ranks: Annotated[
        int, typer.Option(min=2, help="Leave out the cases with more ranks than this (the smallest has 1,024).")
    ] = 4096,
    json_file: RowsFile = None,
) -> None:
    """Time the simulator itself: every collective up to 4,096 ranks, with real payloads where they fit.

    Each case has a process of its own; [bold]memory[/] is its peak, the interpreter included. Results with payloads are
    compared with the expected sum. All cases take a few minutes and up to some gigabytes; fewer with
    [bold]--most-ranks[/].
    """
    console = Console()
    check_writable(json_file, "--json")
    cases = [case for case in CASES if case.ranks <= most_ranks]
    if not cases:
        least = min(case.ranks for case in CASES)
        raise typer.BadParameter(f"no case has so few ranks: give at least {least}", param_hint="--most-ranks")
    with counting(console) as progress:
        task = progress.add_task("cases", total=len(cases))
        rows = run_cases(cases, on_row=lambda _: progress.advance(task))
    console.print(_table_of(rows))
    machine = describe_machine()
    console.print(machine_text(machine), style="dim")
    if json_file is not None:
        write_result(console, json_file, {"rows": rows, "machine": machine})


def _table_of(rows: list[Row]) -> Table:
    table = Table(title="The simulator, one process per case", title_justify="left", header_style="bold")
    for name in ("operation", "algorithm", "payloads"):
        table.add_column(name)
    for name in ("ranks", "size", "entries", "events", "seconds", "M events/s", "memory"):
        table.add_column(name, justify="right")
    for row in rows:
        number = {name: float(str(value)) for name, value in row.items() if name in _NUMBERS}
        table.add_row(
            str(row["operation"]),
            str(row["algorithm"]),
            "real" if row["payloads"] else "sizes",
            str(row["ranks"]),
            text_of(int(number["bytes"])) if row["bytes"] else "",
            f"{number['nnz']:,.0f}" if row["nnz"] else "",
            f"{number['events']:,.0f}",
            f"{number['wall_s']:.2f}",
            f"{number['events_per_s'] / 1e6:.1f}",
            f"{number['peak_bytes'] / 2**30:.2f} GiB",
        )
    return table


_NUMBERS = ("bytes", "nnz", "events", "wall_s", "events_per_s", "peak_bytes")
