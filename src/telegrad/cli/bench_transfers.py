"""``telegrad bench transfers``: operations on tensors of a GPU that ranks share, beside copies and host tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress, TaskID, TextColumn

from telegrad.bench.plan import text_of
from telegrad.bench.transfers_plan import BOUND, OPERATIONS, Row, TransfersPlan
from telegrad.cli.console import table_console
from telegrad.cli.gpu_options import described_gpu, rank_counts
from telegrad.cli.options import JobTimeout, RowsFile, byte_sizes, names_among
from telegrad.cli.outputs import GrowingResult, check_all_writable, drawn
from telegrad.cli.progress import counting
from telegrad.report.transfers import enqueueing_text, plot, table_of


def transfers(
    ranks: Annotated[str, typer.Option(help="Processes that share the GPU; several numbers: 1,2,4.")] = "1,2,4",
    sizes: Annotated[
        str, typer.Option(help="Lengths of the vector, separated by commas.")
    ] = "4B,4KiB,64KiB,1MiB,16MiB,64MiB,256MiB,1GiB",
    operations: Annotated[str, typer.Option(help="Which, separated by commas.")] = ",".join(OPERATIONS),
    samples: Annotated[int, typer.Option(min=3, help="Samples of each way (fewer where one takes long).")] = 101,
    seconds: Annotated[
        float, typer.Option(min=0.1, help="About how long to measure, with each number of ranks.")
    ] = 60.0,
    json_file: RowsFile = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", dir_okay=False, help="Draw the times into this PNG file.")
    ] = None,
    timeout: JobTimeout = 300.0,
) -> None:
    """Time all_reduce, broadcast and send of tensors on a GPU, from the call until the stream is through with them.

    Beside it, in turn: [bold]copies[/], of as many bytes to pinned memory and back, by all ranks at once;
    [bold]host[/], the same operation on host tensors. [bold]of bound[/]: the slower of these two over the median.
    [bold]enqueue[/]: how long the call itself takes the host. Rows are written as they come; a number of ranks that
    fails takes no other along.
    """
    console = table_console()
    counts, sizes_in_bytes = rank_counts(ranks), byte_sizes(sizes)
    chosen = tuple(names_among(operations, OPERATIONS, "--operations"))
    check_all_writable({"--json": json_file, "--plot": plot_file})
    machine = described_gpu(console)
    result = GrowingResult(json_file, {"bound": BOUND, "machine": machine})
    for count in counts:
        plan = TransfersPlan(count, sizes_in_bytes, chosen, samples, seconds)
        with counting(console, TextColumn("{task.fields[latest]}")) as bar:
            task = bar.add_task(f"{count} ranks", total=len(plan.cases()), latest="starting")
            _measure(plan, timeout, result, _following(bar, task))
        rows = [row for row in result.rows if row["ranks"] == count]
        if rows:
            console.print(table_of(rows, f"on {machine['gpu']}, {count} ranks, {plan.network}"))
    result.say_failures(console)
    if result.rows:
        console.print(enqueueing_text(result.rows), highlight=False)
        if plot_file is not None:
            with drawn(console, plot_file):
                plot(result.rows, f"device tensors on {machine['gpu']}", plot_file)
    result.end(console)


def _measure(plan: TransfersPlan, timeout_s: float, result: GrowingResult, on_row: Callable[[str], None]) -> None:
    from telegrad.bench.transfers import run

    def take(row: Row) -> None:
        result.add(row)
        on_row(f"{row['op']} of {text_of(row['bytes'])}")

    with result.failing_as(ranks=plan.ranks):
        run(plan, timeout_s=timeout_s, on_row=take)


def _following(bar: Progress, task: TaskID) -> Callable[[str], None]:
    return lambda latest: bar.update(task, advance=1, latest=latest)
