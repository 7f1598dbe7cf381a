"""``telegrad bench nonblocking``: what a non-blocking sum costs beside a blocking one."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from telegrad.bench.nonblocking import run
from telegrad.bench.plan import Plan, text_of
from telegrad.bench.runner import Row
from telegrad.cli.console import table_console
from telegrad.cli.options import JobTimeout, RowsFile, byte_sizes, networks_of
from telegrad.cli.outputs import check_writable, end_with_rows
from telegrad.cli.progress import counting
from telegrad.launch import LaunchError
from telegrad.report.durations import duration


def nonblocking(
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
        plan = Plan("nonblocking", name, ranks, sizes_in_bytes, ("auto",), samples=samples)
        try:
            rows += _run_with_progress(console, plan, timeout)
        except (LaunchError, RuntimeError) as error:
            console.print(f"[red]{name}:[/] {error}", highlight=False)
            raise typer.Exit(1) from error
    console.print(_table_of(rows, f"all_reduce, {ranks} ranks: blocking and not"))
    end_with_rows(console, rows, json_file)


def _run_with_progress(console: Console, plan: Plan, timeout_s: float) -> list[Row]:
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
