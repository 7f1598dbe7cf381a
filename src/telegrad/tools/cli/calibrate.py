"""``telegrad calibrate``: what a network costs, and which algorithm later jobs use on it."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from telegrad.communicator import tuning_cache
from telegrad.cost import Tuning
from telegrad.launch import SINGLE_THREADED, LaunchError, Ranks
from telegrad.tools.bench.machine import describe_machine, machine_text
from telegrad.tools.bench.networks import open_network
from telegrad.tools.cli.gpu_options import described_gpu
from telegrad.tools.cli.interrupts import ended_by_interrupt
from telegrad.tools.cli.options import networks_of
from telegrad.tools.cli.outputs import check_all_writable, say_file, write_result, written
from telegrad.tools.report.calibration import costs_text, device_costs_text, device_table_of, plot, table_of
from telegrad.tuning.calibration import DEFAULT_S

_TARGET = "telegrad.tuning.ranks:main"
_TARGETS_ON = {"cuda": "telegrad.tuning.ranks:main_on_cuda"}


def calibrate(
    ranks: Annotated[int, typer.Option(min=2, max=256, help="Processes to start on this machine.")] = 4,
    network: Annotated[
        str,
        typer.Option(
            help="Over what they talk: [bold]shm[/] (shared memory), [bold]tcp[/] (loopback), or a rate such as "
            "[bold]1gbit[/] (one network namespace per rank, links shaped by tc; needs root)."
        ),
    ] = "shm",
    seconds: Annotated[
        float, typer.Option(min=0.01, help="About how long to measure; on a slow network long vectors take their time.")
    ] = DEFAULT_S,
    device: Annotated[
        str | None,
        typer.Option(
            help="Also time dense sums on this kind of device ([bold]cuda[/]), by NCCL and through host memory; each "
            "rank takes a GPU, or all share those that there are, where NCCL cannot be."
        ),
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", dir_okay=False, help="Write the tuning, all measured times and the machine here."),
    ] = None,
    plot_file: Annotated[
        Path | None,
        typer.Option("--plot", dir_okay=False, help="Draw the fit, the times and the choice into this PNG file."),
    ] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds after which it is given up.")] = 120.0,
) -> None:
    """Measure a network and keep the choice of algorithms for the next jobs.

    Messages between pairs of ranks and additions give the costs α, β and γ; formulas say from them where the allreduce
    algorithms cross; their measured times around there decide. With [bold]--device[/] straight lines through the times
    of a few lengths decide where tensors on a GPU go by NCCL. The result is kept in the user's cache directory
    ([bold]TELEGRAD_CACHE[/] names another) for jobs on the same hosts with as many ranks and the same UCX settings,
    which use it by themselves. In a job of several hosts let every rank call [bold]telegrad.calibrate(communicator)[/].
    docs/tuning.md says more.
    """
    console = Console()
    networks_of([network])
    if device is not None and device not in _TARGETS_ON:
        raise typer.BadParameter(
            f"{device!r} is not known: use {', '.join(_TARGETS_ON)}, or leave it out", param_hint="--device"
        )
    if not seconds < timeout:
        raise typer.BadParameter(
            f"{seconds:g} s of measuring are not over before --timeout {timeout:g}: give a longer --timeout, or less "
            "here",
            param_hint="--seconds",
        )
    check_all_writable({"--json": json_file, "--plot": plot_file})
    try:
        tuning_cache.check_writable()
    except (OSError, RuntimeError) as error:
        raise typer.BadParameter(str(error), param_hint="TELEGRAD_CACHE") from error
    if device is not None:
        described_gpu(console)
    _warn_if_busy(console)
    with ended_by_interrupt(console, "interrupted; nothing is kept"):
        try:
            said = _run_with_progress(console, ranks, network, seconds, device, timeout)
        except (LaunchError, RuntimeError) as error:
            console.print(f"[red]{network}:[/] {escape(str(error))}", highlight=False)
            raise typer.Exit(1) from error
    found = said["found"]
    tuning = Tuning.from_data(found["tuning"])
    title = f"all_reduce, {tuning.place}"
    console.print(table_of(found["rows"], title))
    console.print(costs_text(tuning, found["round_s"]), highlight=False)
    console.print(str(tuning.allreduce), highlight=False)
    if tuning.on_device is not None and found["device_rows"]:
        console.print(device_table_of(found["device_rows"], f"all_reduce on {tuning.on_device.device}"))
        console.print(device_costs_text(tuning.on_device), highlight=False)
        console.print(str(tuning.on_device), highlight=False)
    machine = describe_machine()
    console.print(machine_text(machine), style="dim")
    if json_file is not None:
        with written(console, json_file):
            write_result(console, json_file, {**found, "machine": machine}, what="times")
    if plot_file is not None:
        with written(console, plot_file):
            plot(found, title, plot_file)
        say_file(console, "plot", plot_file)
    if "not_kept" in said:
        console.print(f"not kept for later jobs: {said['not_kept']}", style="red", highlight=False, markup=False)
        raise typer.Exit(1)
    console.print(f"kept for later jobs: {said['kept']}", highlight=False, markup=False, soft_wrap=True)
    if found["doubts"]:
        console.print(
            f"This may be noise: {'; '.join(found['doubts'])}. Calibrate again when the machine is quiet.",
            style="yellow",
            markup=False,
        )


def device_environment() -> dict[str, str]:
    """Of ranks with a device."""
    from telegrad.tools.bench.device import ENVIRONMENT

    return ENVIRONMENT


def _warn_if_busy(console: Console) -> None:
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load > cores:
        console.print(
            f"[yellow]This machine is busy[/] (load {load:.1f} on {cores} cores): what is measured now will be noisy; "
            "calibrate again when it is quiet."
        )


def _run_with_progress(
    console: Console, ranks: int, network: str, seconds: float, device: str | None, timeout_s: float
) -> dict[str, Any]:
    """All that rank 0 says besides its progress."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[what]}"),
    )
    said: dict[str, Any] = {}
    target, arguments, environment = _TARGET, [str(seconds)], SINGLE_THREADED
    with (
        Progress(*columns, console=console, transient=True) as progress,
        open_network(network, ranks) as opened,
        tempfile.TemporaryDirectory(prefix="telegrad-calibrate-") as folder,
    ):
        if device is not None:
            target, arguments = _TARGETS_ON[device], [*arguments, str(Path(folder) / "store")]
            environment = {**environment, **device_environment()}
        task = progress.add_task(f"{ranks} ranks over {network}", total=1.0, what="starting ranks")

        def take(rank: int, line: str) -> None:
            if rank != 0 or not line.startswith("{"):
                return
            one = json.loads(line)
            if "part" in one:
                progress.update(task, completed=one["part"], what=one["what"])
            else:
                said.update(one)

        with Ranks(
            target,
            ranks,
            timeout_s=timeout_s,
            arguments=arguments,
            environment={**environment, **opened.environment},
            prefix_of=opened.prefix_of,
            on_line=take,
        ) as started:
            started.wait()
    return said
