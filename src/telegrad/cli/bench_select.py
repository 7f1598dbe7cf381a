"""``telegrad bench select``: ways to choose what is sent, beside torch.topk and a memory copy, on a CPU or a GPU."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import TextColumn

from telegrad.bench.machine import describe_machine, machine_text
from telegrad.bench.select_plan import BOUND, DEVICES, METHODS, QUEUED, SelectPlan, methods_on, rows_of
from telegrad.cli.console import table_console
from telegrad.cli.gpu_options import present_gpu
from telegrad.cli.options import RowsFile, among, counts_of, densities_of
from telegrad.cli.outputs import GrowingResult, check_all_writable, drawn
from telegrad.cli.progress import counting
from telegrad.report.select import plot, table_of

_MOST = 1 << 30  # 4 GiB an array, of which there are a dozen with torch's


def select(
    elements: Annotated[
        str, typer.Option(help="Elements of the tensor; several: 16Mi,64Mi or 16Ki..64Mi (×4).")
    ] = "16Ki..64Mi",
    density: Annotated[
        str, typer.Option(help="What part of them k is; several: 0.001,0.01 or 0.001..0.05 (×4).")
    ] = "0.001,0.01,0.05",
    methods: Annotated[
        str | None,
        typer.Option(
            help=f"Which to measure, separated by commas: {', '.join(METHODS)}; on cuda {', '.join(QUEUED)}, too. "
            "Default: all.",
            show_default=False,
        ),
    ] = None,
    samples: Annotated[int, typer.Option(min=3, help="Samples of each contender (fewer where one takes long).")] = 25,
    device: Annotated[str, typer.Option(help="Where to measure: cpu or cuda.")] = "cpu",
    seconds: Annotated[float, typer.Option(min=0.1, help="About how long to measure, of each combination.")] = 10.0,
    json_file: RowsFile = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", dir_okay=False, help="Draw the times into this PNG file.")
    ] = None,
) -> None:
    """Time the ways to choose what is sent, beside torch.topk and a memory copy: interleaved, on one thread or a GPU.

    Each adds a gradient to a residual, chooses entries of the sums, packs their indices and values and clears them in
    the residual. [bold]torch.topk and residual[/] does the same with torch: add, topk of the magnitudes, gather, clear.
    [bold]bound[/] is how long the bytes that must move take at the bandwidth of a copy of as many elements in the same
    run; below a few million elements they lie in a cache and Python's call counts. Times are the thread's own; with
    [bold]--device cuda[/] they are between events of the GPU, where the host's launches count. [bold]-queued[/], on a
    GPU only: as a training step has them, behind other kernels, without waiting; between the events is then the GPU's
    time alone, and [bold]enqueue[/] is the host's. The kernels for GPUs are Triton's; they serve ROCm too.
    """
    console = table_console()
    if device not in DEVICES:
        raise typer.BadParameter(f"{device!r} does not exist: use {' or '.join(DEVICES)}", param_hint="--device")
    from telegrad.bench.device import describe_gpu
    from telegrad.bench.select import run

    gpu = present_gpu(console) if device == "cuda" else None
    if device == "cuda" and importlib.util.find_spec("triton") is None:
        raise typer.BadParameter("triton is not installed: pip install 'telegrad[gpu]'", param_hint="--device")
    chosen = _methods_of(methods, device)
    lengths = counts_of(elements, 1, _MOST, "--elements")
    plans = [
        SelectPlan(length, share, chosen, samples, seconds, device)
        for length, share in itertools.product(lengths, densities_of(density, "--density"))
    ]
    check_all_writable({"--json": json_file, "--plot": plot_file})
    machine = describe_machine() if gpu is None else describe_gpu(gpu)
    result = GrowingResult(json_file, {"bound_s": BOUND, "machine": machine})
    with counting(console, TextColumn("{task.fields[latest]}")) as bar:
        passed = 0
        task = bar.add_task("", total=sum(len(plan.contenders) * samples for plan in plans), latest="")
        for plan in plans:
            about = f"{plan.elements:,} elements, {plan.density * 100:.4g} %"
            bar.update(task, description=about, completed=passed, latest="")
            outcome = run(plan, lambda name: bar.update(task, advance=1, latest=name))
            passed += len(plan.contenders) * samples
            found = rows_of(plan, outcome)
            console.print(table_of(found, f"{about}: k = {plan.k:,}"))
            for row in found:
                result.add(row)
    console.print(machine_text(machine) + ("" if gpu is None else f"; {gpu}"), style="dim")
    if plot_file is not None:
        with drawn(console, plot_file):
            plot(result.rows, f"selection on {gpu or 'one thread'}", plot_file)
    result.end(console)


def _methods_of(text: str | None, device: str) -> tuple[str, ...]:
    """Those named, or all that ``device`` has. Raises ``BadParameter``."""
    there = methods_on(device)
    if text is None:
        return there
    for name in (one.strip() for one in text.split(",")):
        if name in QUEUED and name not in there:
            raise typer.BadParameter(
                f"{name!r} is measured on a GPU only: give --device cuda, or use {', '.join(there)}",
                param_hint="--methods",
            )
    return tuple(among(text, there, "--methods"))
