"""From options to points, through the simulator, to tables and files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import TextColumn

from telegrad.bench.plan import text_of
from telegrad.cli.console import counting, table_console
from telegrad.cli.interrupts import ended_by_interrupt
from telegrad.cli.outputs import say_file, written
from telegrad.cli.simulate_settings import SimulationSettings
from telegrad.report.simulation import (
    counts_for_json,
    duration,
    path_for_json,
    path_table,
    plot,
    row_of,
    split_table,
    table_of,
)
from telegrad.sim.critical_path import Stretch, critical_path, shares
from telegrad.sim.measure import SPARSE, Measurement, Point
from telegrad.sim.networks import Network
from telegrad.sim.sweep import measure_apart, sweep
from telegrad.sim.timeline import write_trace

# A plot's own points, where one number of ranks, or one size, was asked for: up to it, or these sizes.
_PLOT_SIZES = tuple(4 * 8**power for power in range(9))  # 4 B … 64 MiB
# Each message is two slices and an arrow in a trace, about half a kilobyte.
_TRACE_MESSAGES = 250_000
_PATH_MESSAGES = 4_000_000


@dataclass(frozen=True)
class Asked:
    """What one command was asked for, besides the options that all share."""

    operation: str
    algorithms: Sequence[str]
    sizes: Sequence[int]
    density: float = 0.0
    overlap: float = 0.0
    wire: str = "auto"
    keep: int = 0
    calls: int = 1

    def points(
        self, ranks: Sequence[int], sizes: Sequence[int], network: Network, settings: SimulationSettings
    ) -> list[Point]:
        return [
            Point(
                self.operation,
                algorithm,
                ranks=count,
                size=size,
                network=network,
                nnz=max(1, round(self.density * (size // 4))) if self.density and size else 0,
                overlap=self.overlap,
                wire=self.wire,
                payloads=settings.payloads,
                seed=settings.seed,
                keep=self.keep,
                calls=self.calls,
            )
            for count in ranks
            for size in sizes
            for algorithm in self.algorithms
        ]


def run(asked: Asked, settings: SimulationSettings) -> None:
    """Ends with status 2 for options that make no sense, 1 if the simulation fails, 130 on Ctrl-C."""
    console = table_console()
    ranks, network = settings.all_ranks(), settings.made_network()
    settings.check_outputs()
    drawn = settings.drawn_into(asked.operation)
    points = asked.points(ranks, asked.sizes, network, settings)
    _check_single(points, settings)

    panels = _panels(asked, ranks, network, settings) if drawn is not None else []
    every = list(dict.fromkeys([*points, *(point for _, _, wanted in panels for point in wanted)]))
    with ended_by_interrupt(console, "interrupted: nothing was written"), failures_said(console):
        found = dict(zip(every, swept(console, every, settings.jobs), strict=True))
        paths = _paths(console, points) if settings.critical_path else {}
        rows = [row_of(found[point]) for point in points]
        name = ", ".join(filter(None, (asked.operation.replace("_", " "), points[0].wire_format)))
        calls = f" of all {asked.calls:,} calls" if asked.calls > 1 else ""
        console.print(table_of(rows, f"{name}: virtual time{calls}"))
        console.print(network.about + _levels(network), style="dim", highlight=False)
        if paths:
            splits = [(row, shares(paths[point])) for row, point in zip(rows, points, strict=True)]
            console.print(split_table(splits, "where the time went, along the critical path"))
        if len(points) == 1 and paths:
            console.print(path_table(paths[points[0]], "critical path: what had to happen one after the other"))
        if settings.timeline is not None:
            _write_timeline(console, points[0], settings.timeline)
        if settings.links is not None:
            write_json(console, settings.links, counts_for_json(measure_apart(points[0], links=True)))
            say_file(console, "counts", settings.links)
        if settings.json_file is not None:
            told = [row_of(one) for one in found.values()]
            for place, path in enumerate(paths[point] for point in points if point in paths):
                told[place]["critical_path"] = path_for_json(path)
            about = {"name": settings.network, "about": network.about, **network.fields_of_core()}
            write_json(console, settings.json_file, {"rows": told, "network": about})
            say_file(console, "rows", settings.json_file)
        if drawn is not None:
            drawn_panels = [(across, about, [row_of(found[one]) for one in wanted]) for across, about, wanted in panels]
            with written(console, drawn):
                plot(drawn_panels, f"{name}, {_short(settings)}", drawn)
            say_file(console, "plot", drawn)


def _panels(
    asked: Asked, ranks: Sequence[int], network: Network, settings: SimulationSettings
) -> list[tuple[str, str, list[Point]]]:
    """What to draw: time against ranks at the largest size, and against size at the most ranks."""
    size, most = asked.sizes[-1], ranks[-1]
    counts = ranks if len(ranks) > 1 else _doubling_up_to(most)
    about = "" if asked.operation == "barrier" else f"{text_of(size)} per rank"
    panels = [("ranks", about, asked.points(counts, [size], network, settings))]
    if asked.operation != "barrier":
        sizes = asked.sizes if len(asked.sizes) > 1 else sorted({*_plot_sizes(asked), size})
        panels.append(("bytes", f"{most:,} ranks", asked.points([most], sizes, network, settings)))
    return panels


def _doubling_up_to(most: int) -> list[int]:
    return sorted({min(2, most), most, *(1 << power for power in range(1, most.bit_length()) if 1 << power <= most)})


def _plot_sizes(asked: Asked) -> Sequence[int]:
    # Of a sparse vector the smallest have no entries to speak of.
    return _PLOT_SIZES[3:] if asked.operation in SPARSE else _PLOT_SIZES


def _check_single(points: Sequence[Point], settings: SimulationSettings) -> None:
    for option, wanted in (("--timeline", settings.timeline), ("--links", settings.links)):
        if wanted is None:
            continue
        shown = len({replace(point, algorithm=point.chosen) for point in points})  # auto is one of the others
        if shown != 1:
            raise typer.BadParameter(
                f"it shows a single point, and these are {shown}: give one --ranks, one --bytes, one --algorithm",
                param_hint=option,
            )
    messages = max(point.messages for point in points)
    for option, is_wanted, most in (
        ("--timeline", settings.timeline is not None, _TRACE_MESSAGES),
        ("--critical-path", settings.critical_path, _PATH_MESSAGES),
    ):
        if is_wanted and messages > most:
            raise typer.BadParameter(
                f"{messages:,} messages are too many for it: use fewer ranks, {most:,} messages at most",
                param_hint=option,
            )


def swept(console: Console, points: Sequence[Point], jobs: int | None) -> list[Measurement]:
    """Every point's measurement, in order, under a progress bar."""
    with _progress(console, "simulating", len(points)) as advance:

        def show(one: Measurement) -> None:
            size = f", {text_of(one.point.size)}" if one.point.size else ""
            advance(f"{one.algorithm}, {one.point.ranks:,} ranks{size}: {duration(one.finish_s)}")

        return sweep(points, processes=jobs, on_measured=show)


def _paths(console: Console, points: Sequence[Point]) -> dict[Point, list[Stretch]]:
    found: dict[Point, list[Stretch]] = {}
    with _progress(console, "critical paths", len(points)) as advance:
        for point in points:
            one = measure_apart(point, timeline=True)
            if one.activities is not None:
                found[point] = critical_path(one.activities, one.finish_by_rank_s)
            advance("")
    return found


def _write_timeline(console: Console, point: Point, path: Path) -> None:
    found = measure_apart(point, timeline=True)
    if found.activities is not None:
        chain = critical_path(found.activities, found.finish_by_rank_s)
        with written(console, path):
            count = write_trace(path, found.activities, chain)
        console.print(
            f"timeline: {path} ({count:,} events; open it at https://ui.perfetto.dev)", highlight=False, markup=False
        )


@contextmanager
def _progress(console: Console, name: str, total: int) -> Iterator[Callable[[str], None]]:
    with counting(console, TextColumn("{task.fields[latest]}")) as progress:
        task = progress.add_task(name, total=total, latest="")
        yield lambda latest: progress.update(task, advance=1, latest=latest)


@contextmanager
def failures_said(console: Console) -> Iterator[None]:
    """Within it, an error of the simulation ends the command: with status 2 if options make no sense, else with 1."""
    try:
        yield
    except typer.Exit:  # a RuntimeError too, but said already
        raise
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    except (RuntimeError, OSError) as error:
        console.print(f"[red]the simulation failed:[/] {escape(str(error))}", highlight=False)
        raise typer.Exit(1) from error
    except MemoryError as error:
        console.print("[red]out of memory:[/] use fewer ranks, less bytes, fewer --jobs, or no --payloads")
        raise typer.Exit(1) from error


def write_json(console: Console, path: Path, content: dict[str, Any]) -> None:
    """Ends with status 1 if ``path`` cannot be written after all."""
    with written(console, path):
        path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")


def _levels(network: Network) -> str:
    noise = {"jitter": network.jitter, "compute noise": network.compute_noise, "start noise": network.start_noise_s}
    said = [f"{name} {value:g}" for name, value in noise.items() if value]
    if network.ranks_per_node > 1:
        said.append(
            f"{network.ranks_per_node} ranks per node (α {duration(network.node_alpha_s)}, β "
            f"{network.node_beta_s_per_byte:g} s per byte inside), oversubscription {network.oversubscription:g}"
        )
    return "".join(f"; {one}" for one in said)


def _short(settings: SimulationSettings) -> str:
    own = any(value is not None for value in (settings.alpha, settings.beta, settings.beta_exchange, settings.gamma))
    nodes = f", {settings.ranks_per_node} ranks per node" if settings.ranks_per_node > 1 else ""
    return settings.network + (" with own costs" if own else "") + nodes
