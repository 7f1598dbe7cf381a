"""``telegrad bench overlap``: how much of a non-blocking sum on a GPU is hidden behind kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from telegrad.bench.overlap_plan import HIDDEN, OverlapPlan, Row
from telegrad.cli.console import table_console
from telegrad.cli.gpu_options import described_gpu, rank_counts
from telegrad.cli.options import JobTimeout, RowsFile, byte_sizes
from telegrad.cli.outputs import GrowingResult, check_all_writable, drawn
from telegrad.cli.progress import counting
from telegrad.report.overlap import plot, table_of


def overlap(
    ranks: Annotated[str, typer.Option(help="Processes that share the GPU; several numbers: 2,4.")] = "2,4",
    sizes: Annotated[str, typer.Option(help="Lengths of the vector, separated by commas.")] = "4MiB,64MiB,256MiB",
    matrix: Annotated[int, typer.Option(min=1, help="Rows of the matrices that a kernel multiplies.")] = 2048,
    load: Annotated[float, typer.Option(min=0.01, help="Time of all kernels, in times of the communication.")] = 1.3,
    samples: Annotated[int, typer.Option(min=3, help="Samples of each way at each size.")] = 11,
    json_file: RowsFile = None,
    plot_file: Annotated[
        Path | None,
        typer.Option("--plot", dir_okay=False, help="Draw what the device did, and when, into this PNG file."),
    ] = None,
    timeout: JobTimeout = 200.0,
) -> None:
    """Time kernels that are put behind a non-blocking all_reduce, beside the sum and the kernels alone.

    [bold]hidden[/]: what part of the communication costs no time beside the kernels. [bold]kernels meanwhile[/]: how
    many were over before the sum was there (rank 0). [bold]enqueueing[/]: how long the host took for the call and all
    kernels. The ranks share the GPU: all compute at the same time, alone too.
    """
    console = table_console()
    counts, sizes_in_bytes = rank_counts(ranks), byte_sizes(sizes)
    check_all_writable({"--json": json_file, "--plot": plot_file})
    machine = described_gpu(console)
    result = GrowingResult(json_file, {"hidden": HIDDEN, "machine": machine})
    for count in counts:
        plan = OverlapPlan(count, sizes_in_bytes, matrix, load, samples)
        with counting(console) as bar:
            task = bar.add_task(f"{count} ranks", total=len(sizes_in_bytes) + 1)
            _measure(plan, timeout, result, partial(bar.advance, task))
        measured = [row for row in result.rows if (row["op"], row["ranks"]) == ("overlap", count)]
        if measured:
            console.print(table_of(measured, f"on {machine['gpu']}, {count} ranks"))
    result.say_failures(console)
    if result.rows and plot_file is not None:
        with drawn(console, plot_file):
            plot(result.rows, f"kernels behind a non-blocking all_reduce on {machine['gpu']}", plot_file)
    result.end(console)


def _measure(plan: OverlapPlan, timeout_s: float, result: GrowingResult, advance: Callable[[], None]) -> None:
    from telegrad.bench.overlap import run

    def take(row: Row) -> None:
        result.add(row)
        advance()

    with result.failing_as(ranks=plan.ranks):
        run(plan, timeout_s=timeout_s, on_row=take)
