"""``telegrad calibrate``: what a network costs, and which algorithm later jobs use on it."""

from __future__ import annotations

import itertools
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from telegrad.communicator import Communicator, tuning_cache
from telegrad.communicator.rendezvous.joining import variables_of_step
from telegrad.cost import ALLREDUCE_ALGORITHMS, DEVICE_ALGORITHMS, DeviceTuning, TableEntry, Tuning
from telegrad.cost.send_method import LinearCost
from telegrad.launch import LaunchError
from telegrad.tools.bench.machine import describe_machine, machine_text
from telegrad.tools.bench.plan import run_ranks, text_of
from telegrad.tools.cli.interrupts import ended_by_interrupt
from telegrad.tools.cli.options import described_gpu, networks_of, refuse_given
from telegrad.tools.cli.outputs import check_all_writable, drawn, sharing, write_result
from telegrad.tools.report.figures import (
    BLUE,
    ORANGE,
    counts_across,
    dated,
    duration,
    grid_of,
    looks_of,
    name_lines,
    picture,
    seconds_across,
)
from telegrad.tuning.calibration import DEFAULT_S, kept_in, measure, to_data
from telegrad.tuning.sweep import SHORTEST_GLOO_BYTES

# Costs, table and plot of a calibration (`telegrad.tuning.calibration.to_data`).

ShownRow = Mapping[str, Any]


def costs_text(tuning: Tuning, round_s: float) -> str:
    """The costs in one line, and how well they fit."""
    costs = tuning.costs
    rate = f" ({8e-9 / costs.beta_s_per_byte:.3g} Gbit/s)" if costs.beta_s_per_byte else ""
    return (
        f"α {duration(costs.alpha_s)} (an empty round: {duration(round_s)}), "
        f"β {costs.beta_s_per_byte * 1e9:.3g} ns/B{rate}, "
        f"β in exchange {costs.beta_exchange_s_per_byte * 1e9:.3g} ns/B, γ {costs.gamma_s_per_byte * 1e9:.3g} ns/B; "
        f"messages are {tuning.residual * 100:.0f} % off these (median)"
    )


def table_of(rows: Sequence[ShownRow], title: str) -> Table:
    """One line per size: what each algorithm took, and where lines were fitted, what its line says. The choice is bold.
    A dash: not measured there, hopeless."""
    table = Table(title=escape(title), title_justify="left", header_style="bold")
    known = (*ALLREDUCE_ALGORITHMS, *DEVICE_ALGORITHMS)
    names = [name for name in known if any(row["algorithm"] == name for row in rows)]
    fitted = any("fitted_s" in row for row in rows)
    headers = [header for name in names for header in (name, *(["fitted"] if fitted else []))]
    for name in ("size", *headers, *([] if fitted else ["choice / best"])):
        table.add_column(name, justify="right")
    for size, group in itertools.groupby(rows, key=lambda row: row["bytes"]):
        of = {row["algorithm"]: row for row in group}
        cells = []
        for row in map(of.get, names):
            text = duration(None if row is None else row["median_s"])
            cells.append(f"[bold]{text}[/]" if row is not None and row["chosen"] else text)
            if fitted:
                cells.append(duration(None if row is None else row["fitted_s"]))
        ratios = [f"{row['ratio_to_best']:.2f}" for row in of.values() if row["chosen"] and not fitted]
        table.add_row(text_of(size), *cells, *(ratios or ([] if fitted else ["–"])))
    return table


def device_costs_text(tuning: DeviceTuning) -> str:
    """The fitted lines, and how well they fit."""
    lines = {"nccl": tuning.nccl, "host_transfer": tuning.host_transfer}
    told = [
        f"{name} {duration(cost.startup_s)} + {cost.s_per_byte * 1e9:.3g} ns/B"
        for name, cost in lines.items()
        if cost is not None
    ]
    return f"{', '.join(told)}; sums are {tuning.residual * 100:.0f} % off these (median)"


def gloo_text(gloo: LinearCost, rows: Sequence[ShownRow]) -> str:
    """The fitted line, and the longest of telegrad's sums beside it, if both were timed at such lengths."""
    longest = max((row for row in rows if row["chosen"]), key=lambda row: row["bytes"])
    size, line = longest["bytes"], f"torch's Gloo: {duration(gloo.startup_s)} + {gloo.s_per_byte * 1e9:.3g} ns/B"
    if size < SHORTEST_GLOO_BYTES:
        return line
    return f"{line}, so {duration(gloo(size))} for {text_of(size)}; telegrad {duration(longest['median_s'])}"


def plot(found: Mapping[str, Any], title: str, path: Path) -> None:
    """Above: the messages' times as points, the fitted costs as lines. Below: each algorithm's time against the
    vector's size, on the colour of the one that is chosen there; then the same of device tensors, if they were
    measured, with the fitted lines. As PNG."""
    tuning = Tuning.from_data(found["tuning"])
    has_device = bool(found["device_rows"])
    with picture(path, title, height=0.5 + 3.1 * (2 + has_device)) as figure:
        panels = grid_of(figure, 2 + has_device, 1)
        _draw_messages(panels[0], found, tuning)
        _draw_sums(panels[1], found["rows"], tuning.allreduce.choices)
        panels[1].set_title("algorithms, on the colour of the choice")
        if tuning.on_device is not None and has_device:
            _draw_sums(panels[2], found["device_rows"], tuning.on_device.choices)
            off = f"{tuning.on_device.residual * 100:.0f} % off (median)"
            panels[2].set_title(f"on {tuning.on_device.device}, on the colour of the choice; {off}")
        for axes, label in zip(panels, ("size of a message", "size of the vector", "size of the vector"), strict=False):
            sizes = sorted({size for line in axes.get_lines() for size in line.get_xdata()})
            sizes = [size for size in sizes if "." not in text_of(size)]  # 85.53 KiB needs the room of two
            axes.set(yscale="log", xlabel=label, ylabel="time (median)")
            if sizes:
                counts_across(axes, sizes, [text_of(size) for size in sizes], most=9)
            seconds_across(axes.yaxis)
            name_lines(axes)


def _draw_messages(axes: Any, found: Mapping[str, Any], tuning: Tuning) -> None:
    costs = tuning.costs
    exchange_s_per_byte = costs.beta_exchange_s_per_byte + costs.gamma_s_per_byte
    lines = {
        "one_way": (found["message_s"], costs.beta_s_per_byte, "one way: β, and what\na message takes besides", BLUE),
        "exchange": (costs.alpha_s, exchange_s_per_byte, "exchange and addition:\nα, β in exchange + γ", ORANGE),
    }
    for kind, (intercept_s, slope, label, color) in lines.items():
        points = sorted((probe["bytes"], probe["median_s"]) for probe in found["probes"] if probe["kind"] == kind)
        sizes = [size for size, _ in points]
        axes.plot(*zip(*points, strict=True), "o", color=color)
        axes.plot(sizes, [intercept_s + size * slope for size in sizes], color=color, label=label)
    axes.set_title(f"messages, and lines of the fitted costs; {tuning.residual * 100:.0f} % off (median)")


def _draw_sums(axes: Any, rows: Sequence[ShownRow], choices: Sequence[TableEntry]) -> None:
    """Times of each algorithm, with a line through them or, if there are some, fitted lines."""
    looks = looks_of(list(dict.fromkeys(row["algorithm"] for row in rows)))
    for name, look in looks.items():
        points = sorted(
            (row["bytes"], row["median_s"], row.get("fitted_s")) for row in rows if row["algorithm"] == name
        )
        sizes, medians, lines = zip(*points, strict=True)
        if None in lines:
            axes.plot(sizes, medians, label=name, **look.of_line())
        else:
            axes.plot(sizes, medians, "o", color=look.color)
            axes.plot(sizes, lines, color=look.color, label=name)
    ends = [row["bytes"] for row in rows]
    for choice, later in itertools.zip_longest(choices, choices[1:]):
        begin, end = max(choice.from_bytes, min(ends)), min(later.from_bytes, max(ends)) if later else max(ends)
        if begin < end and choice.algorithm in looks:
            axes.axvspan(begin, end, color=looks[choice.algorithm].color, alpha=0.12, linewidth=0)


_TARGET = "telegrad.tuning.calibration:rank_main"
_TARGETS_ON = {"cuda": "telegrad.tuning.calibration:rank_main_on_cuda"}


def calibrate(
    context: typer.Context,
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
    which use it by themselves, and for [bold]telegrad advise[/]. For a network between hosts, start it on each of them:

    torchrun --nnodes 2 --node-rank [0, then 1] --nproc-per-node 1 --master-addr HOST0 --master-port 29500
    -m telegrad calibrate

    docs/reference/tuning.md says more.
    """
    in_job = started_in_job(os.environ)
    if in_job:
        refuse_given(context, ("ranks", "network"), "the launcher has started the ranks, on their own network")
        refuse_given(context, ("device",), "in a job, call telegrad.calibrate(comm, device=…)")
    console = Console(quiet=in_job and os.environ.get("RANK", os.environ.get("SLURM_PROCID")) != "0")
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
            if in_job:
                said = _measure_in_job(console, seconds, timeout)
            else:
                said = _run_with_progress(console, ranks, network, seconds, device, timeout)
        except (LaunchError, RuntimeError) as error:
            of = "calibration" if in_job else network
            Console().print(f"[red]{of}:[/] {escape(str(error))}", highlight=False)
            raise typer.Exit(1) from error
    if not said:
        return  # rank 0 tells
    found = said["found"]
    tuning = Tuning.from_data(found["tuning"])
    title = f"all_reduce, {tuning.place}"
    console.print(table_of(found["rows"], title))
    console.print(costs_text(tuning, found["round_s"]), highlight=False)
    console.print(str(tuning.allreduce), highlight=False)
    if tuning.gloo is not None:
        console.print(gloo_text(tuning.gloo, found["rows"]), highlight=False)
    if tuning.on_device is not None and found["device_rows"]:
        console.print(table_of(found["device_rows"], f"all_reduce on {tuning.on_device.device}"))
        console.print(device_costs_text(tuning.on_device), highlight=False)
        console.print(str(tuning.on_device), highlight=False)
    machine = describe_machine()
    console.print(machine_text(machine), style="dim")
    if json_file is not None:
        write_result(console, json_file, {**found, "machine": machine}, what="times")
    if plot_file is not None:
        with drawn(console, plot_file):
            plot(found, dated(title), plot_file)
    if "not_kept" in said:
        console.print(f"not kept for later jobs: {said['not_kept']}", style="red", highlight=False, markup=False)
        if in_job:
            return  # of an exit with 1 a launcher says so much that nobody finds this line
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


def started_in_job(environment: Mapping[str, str]) -> bool:
    """Whether torchrun or srun has started this process as one of several ranks."""
    step = variables_of_step(environment)
    return int(step.get("WORLD_SIZE") or (environment.get("WORLD_SIZE") if "RANK" in environment else None) or 1) > 1


def _measure_in_job(console: Console, seconds: float, timeout_s: float) -> dict[str, Any]:
    """On rank 0 what was found and whether it is kept; on the others nothing."""
    with (
        Communicator.from_torch(timeout_s=timeout_s, join_timeout_s=timeout_s) as communicator,
        sharing(console) as progress,
    ):
        task = progress.add_task(f"{communicator.world_size} ranks of the job", total=1.0, what="")
        found = measure(
            communicator,
            seconds=seconds,
            on_progress=lambda part, what: progress.update(task, completed=part, what=what),
            with_gloo=True,
        )
        return {"found": to_data(found), **kept_in(found)} if communicator.rank == 0 else {}


def _run_with_progress(
    console: Console, ranks: int, network: str, seconds: float, device: str | None, timeout_s: float
) -> dict[str, Any]:
    """All that rank 0 says besides its progress."""
    said: dict[str, Any] = {}
    target, arguments, environment = _TARGET, [str(seconds)], dict[str, str]()
    with (
        sharing(console) as progress,
        tempfile.TemporaryDirectory(prefix="telegrad-calibrate-") as folder,
    ):
        if device is not None:
            target, arguments = _TARGETS_ON[device], [*arguments, str(Path(folder) / "store")]
            environment = device_environment()
        task = progress.add_task(f"{ranks} ranks over {network}", total=1.0, what="starting ranks")

        def take(rank: int, line: str) -> None:
            if rank != 0 or not line.startswith("{"):
                return
            one = json.loads(line)
            if "part" in one:
                progress.update(task, completed=one["part"], what=one["what"])
            else:
                said.update(one)

        run_ranks(target, network, ranks, arguments, take, timeout_s=timeout_s, environment=environment)
    return said
