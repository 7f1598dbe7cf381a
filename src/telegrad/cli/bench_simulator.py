"""``telegrad bench simulator``: events a second and memory of the simulator, up to 4,096 ranks."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from telegrad.bench.machine import describe_machine, machine_text
from telegrad.bench.plan import text_of
from telegrad.bench.simulator import CASES, Row, run_cases
from telegrad.cli.options import RowsFile
from telegrad.cli.outputs import check_writable, write_result
from telegrad.cli.progress import counting


def simulator(
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
