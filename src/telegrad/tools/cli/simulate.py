"""``telegrad simulate``: collectives among any number of ranks in virtual time, and steps from closed forms."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import TextColumn
from rich.table import Table

from telegrad import _core
from telegrad.communicator.operands import WIRES, formats_named
from telegrad.cost import Cost
from telegrad.cost.decision import TWO_LEVEL
from telegrad.tools.advise.architectures import ARCHITECTURES
from telegrad.tools.advise.outer import OuterLoop
from telegrad.tools.advise.sending import SCHEMES, SELECTING, Cluster
from telegrad.tools.advise.step import PLANS, StepSweep
from telegrad.tools.advise.workload import ELEMENT_BYTES
from telegrad.tools.bench.plan import size_of, text_of
from telegrad.tools.cli.advise import as_bad_parameter_of_costs, table_of_rounds
from telegrad.tools.cli.interrupts import ended_by_interrupt
from telegrad.tools.cli.options import among, blaming, numbers_of, refuse_given
from telegrad.tools.cli.outputs import check_all_writable, check_writable, counting, drawn, table_console, write_result
from telegrad.tools.cli.workload_options import (
    ComputeOption,
    DeviceOption,
    GradientsOption,
    ModelOption,
    SamplesOption,
    TraceOption,
    bytes_of_values,
    chosen_device,
    chosen_workload,
)
from telegrad.tools.doctor.installation import is_installed
from telegrad.tools.report.figures import Panel, dated, draw, duration
from telegrad.tools.sim.measure import (
    ALGORITHMS,
    NAMED,
    SPARSE,
    Measurement,
    Network,
    Point,
    closed_form,
    network_of,
    sweep,
    with_costs,
)

# Tables, curves, and rows for JSON.

ShownRow = Mapping[str, Any]


Form = Callable[[Point], Cost | None]


def row_of(found: Measurement, form_of: Form = closed_form) -> dict[str, Any]:
    """As it is written with --json. Times in virtual seconds; per rank: of the rank that sends most."""
    point, form = found.point, form_of(found.point)
    row: dict[str, Any] = {
        "operation": point.operation,
        "algorithm": point.algorithm,
        "chosen": found.algorithm,
        "ranks": point.ranks,
        "bytes": point.size,
        "time_s": found.finish_s,
        "first_finish_s": float(found.finish_by_rank_s.min()),
        "closed_form_s": None if form is None else form.time_s,
        "messages_per_rank": int(found.messages_sent.max()),
        "bytes_per_rank": int(found.bytes_sent.max()),
        "messages": int(found.messages_sent.sum()),
        "bytes_sent": int(found.bytes_sent.sum()),
        "events": found.events,
        "seed": point.seed,
        "payloads": point.payloads or point.has_entries,
    }
    if point.operation in SPARSE:
        row |= {"nnz": point.nnz, "overlap": point.overlap, "wire": point.wire_format, "result_nnz": found.result_nnz}
    if found.words_sent is not None and found.words_received is not None:
        row |= {
            "keep": point.keep or point.nnz,
            "calls": point.calls,
            "words": int(max(found.words_sent.max(), found.words_received.max())),
            "words_most": _core.OkTopkState.words_most(max(point.nnz, found.result_nnz or 0), point.ranks),
        }
    return row


def table_of(rows: Sequence[ShownRow], title: str) -> Table:
    """A line per algorithm; ratio is to the fastest at the same ranks and size."""
    has_size = any(row["bytes"] for row in rows)
    has_form = any(row["closed_form_s"] is not None for row in rows)
    is_sparse = any("nnz" in row for row in rows)
    has_words = any("words" in row for row in rows)
    has_auto = any(row["algorithm"] == "auto" for row in rows)
    table = Table(title=title, title_justify="left", header_style="bold", box=SIMPLE_HEAD, padding=0)
    table.caption = _caption(rows)
    table.caption_justify = "left"
    for name in ("ranks", *_if(has_size, "size"), "algorithm", *_if(has_auto, "auto"), "time", "ratio"):
        table.add_column(name, justify="left" if name in ("algorithm", "auto") else "right", no_wrap=True)
    names = (*_if(has_form, "closed form"), "messages", *_if(has_size, "sent"), *_if(is_sparse, "entries of the sum"))
    names += ("words", "at most") if has_words else ()
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)

    chosen_by_auto = {_what(row) for row in rows if row["algorithm"] == "auto"}
    fastest: dict[tuple[int, int], float] = {}
    for row in rows:
        fastest[_where(row)] = min(row["time_s"], fastest.get(_where(row), row["time_s"]))
    shown = set()
    previous = None
    for row in rows:
        if _what(row) in shown:  # auto, and what it chose
            continue
        shown.add(_what(row))
        if previous not in (None, _where(row)):
            table.add_section()
        previous = _where(row)
        cells = [f"{row['ranks']:,}", *_if(has_size, text_of(row["bytes"])), row["chosen"]]
        cells += [*_if(has_auto, "✓" if _what(row) in chosen_by_auto else ""), duration(row["time_s"])]
        cells += [_ratio(row["time_s"], fastest[previous]), *_if(has_form, duration(row["closed_form_s"]))]
        cells += [f"{row['messages_per_rank']:,}", *_if(has_size, text_of(row["bytes_per_rank"]))]
        cells += _if(is_sparse, f"{row.get('result_nnz') or 0:,}")
        cells += [f"{row['words']:,}", f"{row['words_most']:,}"] if has_words else []
        table.add_row(*cells, style="bold" if row["time_s"] == fastest[previous] else None)
    return table


def _caption(rows: Sequence[ShownRow]) -> str:
    said = ["messages, sent: of the rank that sends most"]
    if any(row.get("calls", 1) > 1 for row in rows):
        said = [said[0] + ", over all calls", "entries of the sum, words: of the last call"]
    if any(row["algorithm"] == TWO_LEVEL != row["chosen"] for row in rows):
        said.append("two_level of ranks that are all on one node: what auto is there")
    return "\n".join(said)


def _where(row: ShownRow) -> tuple[int, int]:
    return row["ranks"], row["bytes"]


def _what(row: ShownRow) -> tuple[int, int, str]:
    return *_where(row), row["chosen"]


def _if(wanted: bool, cell: str) -> list[str]:
    return [cell] if wanted else []


def panel_of(across: str, about: str, rows: Sequence[ShownRow]) -> Panel:
    """Virtual time of each algorithm against ``across``: ``"ranks"`` or ``"bytes"``."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        curves.setdefault(row["algorithm"], []).append((row[across], row["time_s"]))
    return Panel(across, about, curves, base=2)


def _ratio(seconds: float, least_s: float) -> str:
    return f"{seconds / least_s:.2f}" if least_s else "1.00"


# The simulator keeps about 28 bytes per pair of ranks: 2 GB at 8,192.
MOST_RANKS = 8192
MOST_BYTES = 1 << 40
_MOST_SEED = (1 << 64) - 1
# Inside a node, where --node-alpha and --node-beta are not given: GPUs of one machine on a switch of their own.
_NODE_ALPHA_S, _NODE_BETA_S_PER_BYTE = 0.5e-6, 4e-11
_NETWORK, _NODES, _NOISE, _OUTPUT = "The network", "Two levels", "Noise and seed", "What to write"


@dataclass(frozen=True)
class SimulationSettings:
    """As typed."""

    ranks: Annotated[
        str, typer.Option(help="How many: one number, a list [bold]4,64,2048[/], or a range that doubles: 2..4096.")
    ] = "64"
    network: Annotated[
        str,
        typer.Option(
            help=f"A rate: {', '.join(NAMED)} or any other such as 2.5gbit. It stands for costs α, β and γ; the table "
            "says which.",
            rich_help_panel=_NETWORK,
        ),
    ] = "100gbit"
    alpha: Annotated[
        float | None, typer.Option(help="α: seconds of latency of a message, such as 2e-6.", rich_help_panel=_NETWORK)
    ] = None
    beta: Annotated[
        float | None,
        typer.Option(help="β: seconds of a byte in a port: 8e-11 is 100 Gbit/s.", rich_help_panel=_NETWORK),
    ] = None
    beta_exchange: Annotated[
        float | None,
        typer.Option(help="β while two ranks send to each other at once; 0: the same.", rich_help_panel=_NETWORK),
    ] = None
    gamma: Annotated[
        float | None,
        typer.Option(help="γ: seconds of a byte in the processor: 1e-10 adds 10 GB/s.", rich_help_panel=_NETWORK),
    ] = None
    ranks_per_node: Annotated[
        int,
        typer.Option(
            min=0, max=MOST_RANKS, help="Ranks that share a node and its uplink; 0: one level.", rich_help_panel=_NODES
        ),
    ] = 0
    oversubscription: Annotated[
        float,
        typer.Option(help="1: an uplink carries what all ports of its node can; 4: a quarter.", rich_help_panel=_NODES),
    ] = 1.0
    node_alpha: Annotated[
        float | None,
        typer.Option(help=f"α inside a node. Default: {_NODE_ALPHA_S:g}.", show_default=False, rich_help_panel=_NODES),
    ] = None
    node_beta: Annotated[
        float | None,
        typer.Option(
            help=f"β inside a node. Default: {_NODE_BETA_S_PER_BYTE:g}, 25 GB/s.",
            show_default=False,
            rich_help_panel=_NODES,
        ),
    ] = None
    jitter: Annotated[
        float, typer.Option(help="A message's latency is up to α·(1 + this).", rich_help_panel=_NOISE)
    ] = 0.0
    compute_noise: Annotated[
        float, typer.Option(help="A slice of work takes up to 1 + this as long.", rich_help_panel=_NOISE)
    ] = 0.0
    start_noise: Annotated[
        float, typer.Option(help="Each rank begins up to so many seconds late.", rich_help_panel=_NOISE)
    ] = 0.0
    seed: Annotated[
        int,
        typer.Option(
            min=0,
            max=_MOST_SEED,
            help="Of noise and of sparse indices: the same gives the same.",
            rich_help_panel=_NOISE,
        ),
    ] = 0
    payloads: Annotated[
        bool,
        typer.Option("--payloads", help="Send real values and check the result; without, only their sizes travel."),
    ] = False
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes. Default: one per core.", show_default=False)] = (
        None
    )
    plot: Annotated[
        bool, typer.Option("--plot", help="Draw time against ranks and against size.", rich_help_panel=_OUTPUT)
    ] = False
    plot_file: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="Draw it into this file. Default: simulate-….png", rich_help_panel=_OUTPUT),
    ] = None
    json_file: Annotated[
        Path | None,
        typer.Option("--json", dir_okay=False, help="Write all rows and the network here.", rich_help_panel=_OUTPUT),
    ] = None

    def drawn_into(self, operation: str) -> Path | None:
        """Where the plot goes; None for no plot. Raises ``BadParameter`` if it cannot be drawn."""
        path = self.plot_file or (Path(f"simulate-{operation.replace('_', '-')}.png") if self.plot else None)
        if path is not None and not is_installed("matplotlib"):
            raise typer.BadParameter("a plot needs matplotlib: pip install 'telegrad[cli]'", param_hint="--plot")
        check_writable(path, "--plot-file")
        return path

    def check_outputs(self) -> None:
        """Raises ``BadParameter`` for files that cannot be written, and for one that is named twice."""
        check_all_writable({"--json": self.json_file, "--plot-file": self.plot_file})

    def all_ranks(self) -> list[int]:
        """Raises ``BadParameter`` for what is no number of ranks, and beyond ``MOST_RANKS``."""
        return ranks_of(self.ranks, "--ranks")

    def made_network(self) -> Network:
        """Raises ``BadParameter`` for names and costs that make no sense."""
        with blaming("--network"):
            network = network_of(self.network)
        given = {
            "--alpha": ("alpha_s", self.alpha),
            "--beta": ("beta_s_per_byte", self.beta),
            "--beta-exchange": ("beta_exchange_s_per_byte", self.beta_exchange),
            "--gamma": ("gamma_s_per_byte", self.gamma),
        }
        for option, (name, value) in given.items():
            with blaming(option):
                network = with_costs(network, **{name: value})
        others: dict[str, tuple[str, Any]] = {
            "--jitter": ("jitter", self.jitter),
            "--compute-noise": ("compute_noise", self.compute_noise),
            "--start-noise": ("start_noise_s", self.start_noise),
        }
        others |= self._nodes()
        for option, (name, value) in others.items():
            with blaming(option):
                network = replace(network, **{name: value})
        return network

    def _nodes(self) -> dict[str, tuple[str, Any]]:
        if self.ranks_per_node <= 1:
            for option, value in (
                ("--oversubscription", None if self.oversubscription == 1 else self.oversubscription),
                ("--node-alpha", self.node_alpha),
                ("--node-beta", self.node_beta),
            ):
                if value is not None:
                    raise typer.BadParameter(f"{value:g} needs nodes: give --ranks-per-node too", param_hint=option)
            return {}
        return {
            "--ranks-per-node": ("ranks_per_node", self.ranks_per_node),
            "--oversubscription": ("oversubscription", self.oversubscription),
            "--node-alpha": ("node_alpha_s", _NODE_ALPHA_S if self.node_alpha is None else self.node_alpha),
            "--node-beta": (
                "node_beta_s_per_byte",
                _NODE_BETA_S_PER_BYTE if self.node_beta is None else self.node_beta,
            ),
        }


def ranks_of(text: str, option: str) -> list[int]:
    """Of ``option``. Raises ``BadParameter`` for what is no number of ranks, and beyond ``MOST_RANKS``."""
    return numbers_of(text, _rank_count_of, 2, option)


def sizes_of(text: str) -> list[int]:
    """Of --bytes. Raises ``BadParameter`` for what is no size, and beyond ``MOST_BYTES``."""
    return numbers_of(text, _bytes_of, 4, "--bytes")


_Command = Callable[..., None]


def shared_but(*left_out: str, **defaults: Any) -> Callable[[_Command], _Command]:
    """``command(…, settings)`` with the fields of ``SimulationSettings`` as options of its own, except those that are
    left out; ``defaults`` are other ones than theirs."""
    hints = get_type_hints(SimulationSettings, include_extras=True)
    common = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=defaults.get(field.name, field.default),
            annotation=hints[field.name],
        )
        for field in fields(SimulationSettings)
        if field.name not in left_out
    ]

    def with_options(command: _Command) -> _Command:
        own_hints = get_type_hints(command, include_extras=True)
        kept = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=own_hints[name])
            for name, parameter in inspect.signature(command).parameters.items()
            if name != "settings"
        ]

        @functools.wraps(command)
        def call(**options: Any) -> None:
            settings = SimulationSettings(**{parameter.name: options.pop(parameter.name) for parameter in common})
            command(**options, settings=settings)

        parameters = [common[0], *kept, *common[1:]]
        vars(call)["__signature__"] = inspect.Signature(parameters)
        call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return call

    return with_options


def _rank_count_of(text: str) -> int:
    if not re.fullmatch(r"\s*\d+\s*", text):
        raise ValueError(f"{text!r} is no number of ranks: write it like 2048, 4,64,2048 or 2..4096")
    ranks = int(text)
    if not 1 <= ranks <= MOST_RANKS:
        raise ValueError(
            f"{ranks} ranks cannot be simulated: use 1 to {MOST_RANKS:,}; memory grows with the pairs of ranks"
        )
    return ranks


def _bytes_of(text: str) -> int:
    if re.fullmatch(r"\s*0+\s*([kmg]i)?b?\s*", text.lower()):
        return 0  # a vector may be empty
    size = size_of(text)
    if size > MOST_BYTES:
        raise ValueError(f"{text.strip()} cannot be simulated: use {MOST_BYTES >> 40} TiB (1024GiB) at most")
    return size


# A plot's own points, where one number of ranks, or one size, was asked for: up to it, or these sizes.
_PLOT_SIZES = tuple(4 * 8**power for power in range(9))  # 4 B … 64 MiB


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


def run(asked: Asked, settings: SimulationSettings, form_of: Form = closed_form) -> None:
    """Ends with status 2 for options that make no sense, 1 if the simulation fails, 130 on Ctrl-C."""
    console = table_console()
    ranks, network = settings.all_ranks(), settings.made_network()
    settings.check_outputs()
    target = settings.drawn_into(asked.operation)
    points = asked.points(ranks, asked.sizes, network, settings)
    panels = _panels(asked, ranks, network, settings) if target is not None else []
    every = list(dict.fromkeys([*points, *(point for _, _, wanted in panels for point in wanted)]))
    with ended_by_interrupt(console, "interrupted: nothing was written"), failures_said(console):
        found = dict(zip(every, swept(console, every, settings.jobs), strict=True))
        rows = [row_of(found[point], form_of) for point in points]
        name = ", ".join(filter(None, (asked.operation.replace("_", " "), points[0].wire_format)))
        calls = f" of all {asked.calls:,} calls" if asked.calls > 1 else ""
        console.print(table_of(rows, f"{name}: virtual time{calls}"))
        console.print(network.about + _levels(network), style="dim", highlight=False)
        told = {point: row_of(one, form_of) for point, one in found.items()}
        if settings.json_file is not None:
            about = {"name": settings.network, "about": network.about, **network.fields_of_core()}
            write_result(console, settings.json_file, {"rows": [*told.values()], "network": about})
        if target is not None:
            shown = [panel_of(across, about, [told[one] for one in wanted]) for across, about, wanted in panels]
            with drawn(console, target):
                draw(shown, dated(f"simulated {name}, {_short(settings)}"), target, seconds="virtual time")


def _panels(
    asked: Asked, ranks: Sequence[int], network: Network, settings: SimulationSettings
) -> list[tuple[str, str, list[Point]]]:
    """What to draw: time against ranks at the largest size, and against size at the most ranks."""
    size, most = asked.sizes[-1], ranks[-1]
    counts = ranks if len(ranks) > 1 else sorted({most, *(1 << power for power in range(1, most.bit_length()))})
    about = "" if asked.operation == "barrier" else f"{text_of(size)} per rank"
    panels = [("ranks", about, asked.points(counts, [size], network, settings))]
    if asked.operation != "barrier":
        least = 3 if asked.operation in SPARSE else 0  # the smallest sparse vectors have few entries, or none
        sizes = asked.sizes if len(asked.sizes) > 1 else sorted({*_PLOT_SIZES[least:], size})
        panels.append(("bytes", f"{most:,} ranks", asked.points([most], sizes, network, settings)))
    return panels


def swept(console: Console, points: Sequence[Point], jobs: int | None) -> list[Measurement]:
    """Every point's measurement, in order, under a progress bar."""
    with _progress(console, "simulating", len(points)) as advance:

        def show(one: Measurement) -> None:
            size = f", {text_of(one.point.size)}" if one.point.size else ""
            advance(f"{one.algorithm}, {one.point.ranks:,} ranks{size}: {duration(one.finish_s)}")

        return sweep(points, processes=jobs, on_measured=show)


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


# `telegrad simulate training-step`: whole steps from closed forms, among more and more ranks.

_NAMES = ("scheme", "collective", "plan", "overlap")


def name_of(row: ShownRow, varying: Sequence[str]) -> str:
    """By what differs between rows."""
    words = {"overlap": "overlap" if row["overlap"] else "no overlap"}
    return ", ".join(str(words.get(key, row.get(key))) for key in varying) or row["scheme"]


def varying_of(rows: Sequence[ShownRow]) -> list[str]:
    """Which of scheme, collective, plan and overlap tell rows of the same panel apart, beyond those before them."""
    kept: list[str] = []
    for key in _NAMES:
        without, with_it = (
            {(panel_title(row), *(row.get(one) for one in keys)) for row in rows} for keys in (kept, [*kept, key])
        )
        if len(with_it) > len(without):
            kept.append(key)
    return kept


def table_of_steps(rows: Sequence[ShownRow], title: str) -> Table:
    """A line for each row; of the same ranks the shortest step is bold."""
    table = Table(title=escape(title), title_justify="left", header_style="bold", box=SIMPLE_HEAD, padding=0)
    table.caption = "exposed: by how much the step is longer than its computation"
    table.caption_justify = "left"
    varying = varying_of(rows)
    compresses = any(row["select_s"] or row["decompress_s"] for row in rows)
    several = [key for key in ("model", "scaling") if len({row.get(key) for row in rows}) > 1]
    for name in (*several, "ranks"):
        table.add_column(name, justify="right" if name == "ranks" else "left", no_wrap=True)
    for name in varying:
        table.add_column(name)
    names = ("groups", "step", "exposed", "network", *(("select", "decompress") if compresses else ()), "efficiency")
    for name in (*names, "speed-up"):
        table.add_column(name, justify="right", no_wrap=True)
    previous = None
    for row in rows:
        here = _here(row)
        if previous not in (None, here):
            table.add_section()
        previous = here
        best_s = min(other["step_s"] for other in rows if _here(other) == here)
        cells = [str(row.get(key, "–")) for key in several]
        cells += [f"{row['ranks']:,}", *(name_of(row, [key]) for key in varying), str(row["groups"])]
        cells += [duration(row[key]) for key in ("step_s", "exposed_s", "communicate_s")]
        cells += [duration(row[key]) for key in ("select_s", "decompress_s")] if compresses else []
        cells += [f"{row['efficiency']:.1%}", f"{row['speedup']:.1f}"]
        table.add_row(*cells, style="bold" if row["step_s"] == best_s and varying else None)
    return table


def panel_of_steps(rows: Sequence[ShownRow]) -> Panel:
    """The time of a step against the number of ranks."""
    varying, curves = varying_of(rows), dict[str, list[tuple[float, float]]]()
    for row in rows:
        curves.setdefault(name_of(row, varying), []).append((row["ranks"], row["step_s"]))
    return Panel("ranks", panel_title(rows[0]), curves, base=2)


def panel_title(row: ShownRow) -> str:
    """The model, and how its mini-batch grows if the row says so."""
    return ", ".join(str(row[key]) for key in ("model", "scaling") if key in row)


def _here(row: ShownRow) -> tuple[Any, ...]:
    return row["model"], row.get("scaling"), row["ranks"]


_STEP = "How gradients are sent"


@shared_but("jitter", "compute_noise", "start_noise", "seed", "payloads", "jobs", ranks="2..4096", network="10gbit")
def training_step(
    context: typer.Context,
    model: ModelOption = "resnet50",
    trace: TraceOption = None,
    samples: SamplesOption = None,
    global_samples: Annotated[
        float | None,
        typer.Option(
            help="Strong scaling: the mini-batch of all ranks together. Default: each rank has its own.",
            rich_help_panel="What a step computes",
            show_default=False,
        ),
    ] = None,
    device: DeviceOption = "v100",
    compute_ms: ComputeOption = None,
    gradients: GradientsOption = "float32",
    fixed_ms: Annotated[
        float,
        typer.Option(
            help="Milliseconds of a step that do not shrink with the mini-batch: small ones are inefficient.",
            rich_help_panel="What a step computes",
        ),
    ] = 0.0,
    scheme: Annotated[
        str, typer.Option(help=f"{', '.join(SCHEMES)}, several with commas, or all.", rich_help_panel=_STEP)
    ] = "dense,sparse,oktopk",
    plan: Annotated[
        str,
        typer.Option(
            help=f"How gradients are merged: {', '.join(PLANS)}, several with commas, or all.", rich_help_panel=_STEP
        ),
    ] = "fixed",
    density: Annotated[
        float, typer.Option(help="Share of entries that each rank selects.", rich_help_panel=_STEP)
    ] = 0.01,
    overlap: Annotated[
        bool, typer.Option(help="Communicate beside the backward pass, or after it.", rich_help_panel=_STEP)
    ] = True,
    outer: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Predict rounds of DiLoCo of so many inner steps instead; each rank is a replica.",
            rich_help_panel=_STEP,
            show_default=False,
        ),
    ] = None,
    *,
    settings: SimulationSettings,
) -> None:
    """Predict a training step: compute, select, send, decompress, overlapped as data-parallel training does it.

    Closed forms, not the collectives themselves: thousands of ranks take seconds. Dense sums go by the fastest
    of this library's algorithms for each group. Sparse sums fill in as random indices do.

    [bold]Example:[/] telegrad simulate training-step --model vgg16 --ranks 2..4096 --plan fixed,optimal --plot

    [bold]Example:[/] telegrad simulate training-step --outer 30 --model qwen-72b --ranks 20 --network 500mbit
    --compute-ms 40000"""
    console = table_console()
    settings.check_outputs()
    target = settings.drawn_into("training_step")
    network, ranks = settings.made_network(), settings.all_ranks()
    chosen = chosen_device(device)
    workload = chosen_workload(context, model, trace, samples, chosen, compute_ms, fixed_ms)
    if global_samples is not None and not 0 < global_samples < float("inf"):
        raise typer.BadParameter(
            f"{global_samples:g} is no mini-batch: use a number above 0", param_hint="--global-samples"
        )
    if not 0 < density <= 1:
        raise typer.BadParameter(f"{density:g} is no share: use a number above 0, up to 1", param_hint="--density")
    if global_samples is not None and global_samples < max(ranks):
        raise typer.BadParameter(
            f"{global_samples:g} is less than a sample for each of {max(ranks):,} ranks: give at least as many, or "
            "fewer --ranks",
            param_hint="--global-samples",
        )
    if outer is not None:
        no_use = ("global_samples", "scheme", "plan", "density", "overlap", "gradients")
        refuse_given(context, no_use, "--outer has no use for it")
        refuse_given(context, ("plot", "plot_file"), "--outer draws nothing")
        if min(ranks) < 2:
            raise typer.BadParameter("1 replica exchanges nothing: give at least 2", param_hint="--ranks")
        cluster = _clusters(network, ranks)
        with as_bad_parameter_of_costs():
            rounds = {count: [*OuterLoop.of(workload, cluster(count)).rounds(outer)] for count in ranks}
        title = f"rounds of {workload.model}, {outer:,} inner steps, {settings.network}"
        console.print(table_of_rounds(rounds, title))
        for line in (network.about, workload.trace.about or workload.model):
            console.print(line, style="dim", highlight=False, markup=False)
        if settings.json_file is not None:
            of_all = [{"replicas": count, **one.for_json()} for count, found in rounds.items() for one in found]
            write_result(console, settings.json_file, {"rows": of_all, "network": network.about})
        return
    schemes = _names(scheme, SCHEMES, "--scheme")
    width = bytes_of_values(context, gradients, known=model in ARCHITECTURES and trace is None)
    if width != ELEMENT_BYTES and any(one.startswith("qsgd") for one in schemes):
        raise typer.BadParameter(f"{gradients} is not quantised: leave qsgd out", param_hint="--gradients")
    if gradients == "float16" and {*schemes} != {"dense"}:
        raise typer.BadParameter("float16 is sent densely: give --scheme dense", param_hint="--gradients")
    of_float32 = _clusters(network, ranks)
    if not SELECTING.intersection(schemes):
        refuse_given(context, ("density",), f"--scheme {scheme} selects no entries")
    sweep = StepSweep(
        workload,
        lambda count: replace(of_float32(count), value_bytes=width),
        chosen,
        ranks,
        schemes,
        _names(plan, PLANS, "--plan"),
        density,
        global_samples,
        overlap,
    )
    title = f"training steps of {workload.model}, {settings.network}"
    computing = workload.trace.about or workload.model
    if global_samples is not None:
        computing += f" of {workload.samples:g} samples, of which a rank has its share of {global_samples:g}"
    computing += f"{'' if width == ELEMENT_BYTES else f'; gradients: {gradients}'}; selection: {chosen.about}"
    about = {
        "workload": workload.trace.about,
        "device": chosen.about,
        "density": density,
        "gradients": gradients,
        "network": {"name": settings.network, "about": network.about, **network.fields_of_core()},
    }
    said = [network.about, computing]
    with ended_by_interrupt(console, "interrupted: nothing was written"), failures_said(console):
        rows = list(sweep.rows())
        console.print(table_of_steps(rows, title))
        for line in said:
            console.print(line, style="dim", highlight=False, markup=False)
        if settings.json_file is not None:
            write_result(console, settings.json_file, {"rows": rows, **about})
        if target is not None:
            with drawn(console, target):
                draw([panel_of_steps(rows)], dated(f"simulated {title}"), target, seconds="time of a step")


def _names(text: str, known: Any, option: str) -> list[str]:
    found = among(text, (*known, "all"), option)
    return list(known) if "all" in found else found


def _clusters(network: Network, ranks: list[int]) -> Callable[[int], Cluster]:
    per_node = max(1, network.ranks_per_node)
    for count in ranks:
        if count > per_node and count % per_node:
            raise typer.BadParameter(
                f"{per_node} ranks a node do not make {count} ranks: use a divisor, so that nodes are alike",
                param_hint="--ranks-per-node",
            )
    within = replace(
        network.costs,
        alpha_s=network.node_alpha_s,
        beta_s_per_byte=network.node_beta_s_per_byte,
        beta_exchange_s_per_byte=0.0,
    )

    def cluster(count: int) -> Cluster:
        if per_node == 1:
            return Cluster(count, network.costs)
        return Cluster(count, network.costs, min(per_node, count), within, network.oversubscription)

    return cluster


# `telegrad simulate allreduce` and `sparse-allreduce`.

WireOption = Annotated[
    str,
    typer.Option(
        help="How messages hold entries: [bold]raw[/] or [bold]blocked[/] indices, [bold]packed[/] indices and values "
        f"or packed [bold]indices[/] alone, and values as they are or as {', '.join(WIRES)} or their mean: "
        "[bold]packed-bf16[/]. [bold]auto[/]: as a communicator does that is calibrated on this network."
    ),
]


def sparse_algorithms(chosen: Sequence[str], wire: str, *, all_of_them: bool) -> tuple[str, ...]:
    """``chosen``, and of ``all_of_them`` only those that ``wire`` is for: recursive doubling takes no rounded values.
    Raises ``BadParameter``."""
    try:
        encoding = formats_named(wire, "f32").values
    except (TypeError, ValueError) as error:
        raise typer.BadParameter(str(error), param_hint="--wire") from error
    if encoding == _core.ValueEncoding.native:
        return tuple(chosen)
    if "recursive_doubling" in chosen and not all_of_them:
        raise typer.BadParameter(
            f"recursive_doubling takes no rounded values, as {wire!r} makes them: use another --algorithm",
            param_hint="--wire",
        )
    return tuple(name for name in chosen if name != "recursive_doubling")


app = typer.Typer(help="Run the real algorithms among any number of ranks in virtual time.", no_args_is_help=True)

_Bytes = Annotated[
    str,
    typer.Option("--bytes", help="One rank's vector: one size, a list [bold]4,64KiB[/], or a range (×4): 4..64MiB."),
]


@app.command()
@shared_but()
def allreduce(
    bytes_: _Bytes = "1MiB",
    algorithm: Annotated[
        str,
        typer.Option(
            help="ring, recursive_doubling, rabenseifner, two_level (with --ranks-per-node), auto (the fastest by the "
            "closed forms), several with commas, or all."
        ),
    ] = "all",
    *,
    settings: SimulationSettings,
) -> None:
    """Sum a vector of floats over all ranks: how long does each algorithm take?

    The coroutines that run on a real network run here, one per rank, on a network that is a formula: a message takes
    α and then β per byte, each rank has one port out and one port in, adding takes γ per byte. [bold]ratio[/] is to the
    fastest at the same ranks and size, [bold]auto[/] marks what would be chosen, [bold]closed form[/] is what theory
    says. docs/explanation/simulation.md tells what the model leaves out.

    [bold]Example:[/] telegrad simulate allreduce --ranks 2048 --bytes 8KiB --network 100gbit --plot"""
    run(Asked("allreduce", chosen_algorithms(algorithm, "allreduce", settings), sizes_of(bytes_)), settings)


@app.command(name="sparse-allreduce")
@shared_but()
def sparse_allreduce(
    bytes_: Annotated[
        str, typer.Option("--bytes", help="The whole vector if it were dense, 4 bytes an entry; lists and ranges too.")
    ] = "64MiB",
    density: Annotated[
        float, typer.Option(help="Share of the vector's entries that each rank has, above 0 and up to 1.")
    ] = 0.01,
    overlap: Annotated[
        float, typer.Option(help="Share of its entries that a rank has in common with all others; the rest is random.")
    ] = 0.0,
    algorithm: Annotated[
        str,
        typer.Option(
            help="auto (what ranks come to by themselves), split_allgather, split_dense_allgather, recursive_doubling, "
            "ring, two_level (with --ranks-per-node), several with commas, or all."
        ),
    ] = "split_allgather",
    wire: WireOption = "auto",
    *,
    settings: SimulationSettings,
) -> None:
    """Sum sparse vectors over all ranks: how long does each algorithm take?

    Without [bold]--payloads[/] indices and values are counted, not stored: sizes on the wire are those of random
    indices. [bold]entries of the sum[/] tells how far it has filled in. Packing is free here, but for its bytes.

    [bold]Example:[/] telegrad simulate sparse-allreduce --ranks 2..256 --bytes 64MiB --density 0.01 --network 25gbit"""
    if not 0 < density <= 1:
        raise typer.BadParameter(f"{density:g} is no share: use a number above 0 and up to 1", param_hint="--density")
    if not 0 <= overlap <= 1:
        raise typer.BadParameter(f"{overlap:g} is no share: use a number from 0 to 1", param_hint="--overlap")
    named = chosen_algorithms(algorithm, "sparse_allreduce", settings)
    chosen = sparse_algorithms(named, wire, all_of_them="all" in algorithm)
    run(Asked("sparse_allreduce", chosen, sizes_of(bytes_), density, overlap, wire), settings)


app.command(name="training-step")(training_step)


def chosen_algorithms(text: str, operation: str, settings: SimulationSettings) -> tuple[str, ...]:
    known = (*ALGORITHMS[operation], *(["two_level"] if settings.ranks_per_node > 1 else []), "auto")
    chosen = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in chosen:
        if name not in (*known, "all"):
            raise typer.BadParameter(
                f"{name!r} does not exist: use {', '.join(known)}, all (two_level: with --ranks-per-node)",
                param_hint="--algorithm",
            )
    return known if "all" in chosen else chosen
