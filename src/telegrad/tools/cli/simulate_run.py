"""What all collectives of ``telegrad simulate`` share: options, runs of the simulator, tables, curves and files."""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import TextColumn
from rich.table import Table

from telegrad import _core
from telegrad.cost.decision import TWO_LEVEL
from telegrad.tools.bench.plan import size_of, text_of
from telegrad.tools.cli.interrupts import ended_by_interrupt
from telegrad.tools.cli.outputs import check_all_writable, check_writable, counting, say_file, table_console, written
from telegrad.tools.doctor.installation import is_installed
from telegrad.tools.report.figures import counts_across, dated, grid_of, looks_of, name_lines, picture, seconds_across
from telegrad.tools.sim.critical_path import KINDS, Stretch, critical_path, shares, write_trace
from telegrad.tools.sim.measure import (
    NAMED,
    SPARSE,
    Measurement,
    Network,
    Point,
    closed_form,
    measure_apart,
    network_of,
    sweep,
    with_costs,
)

# Tables, curves, and rows for JSON.

ShownRow = dict[str, Any]
_STRETCHES_SHOWN = 16


def row_of(found: Measurement) -> ShownRow:
    """As it is written with --json. Times in virtual seconds; per rank: of the rank that sends most."""
    point, form = found.point, closed_form(found.point)
    row: ShownRow = {
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
        row |= {
            "nnz": point.nnz,
            "overlap": point.overlap,
            "wire": point.wire_format,
            "result_nnz": found.result_nnz,
        }
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


def split_table(splits: Sequence[tuple[ShownRow, Mapping[str, float]]], title: str) -> Table:
    """Of rows and the seconds of their critical paths by kind: the kinds' shares, a line per algorithm."""
    table = Table(title=title, title_justify="left", header_style="bold", box=SIMPLE_HEAD, padding=0)
    has_size = any(row["bytes"] for row, _ in splits)
    for name in ("ranks", *_if(has_size, "size"), "algorithm", *KINDS):
        table.add_column(name, justify="left" if name == "algorithm" else "right", no_wrap=True)
    lines: dict[tuple[int, int, str], list[str]] = {}
    for row, split in splits:
        size = _if(has_size, text_of(row["bytes"]))
        shares_of = [_share(split[kind], row["time_s"]) for kind in KINDS]
        lines[_what(row)] = [f"{row['ranks']:,}", *size, row["chosen"], *shares_of]
    for cells in lines.values():
        table.add_row(*cells)
    return table


def path_table(path: Sequence[Stretch], title: str) -> Table:
    """The chain from the start to the last rank's end, work on one rank in one line; of a long one the first and the
    last lines."""
    table = Table(title=title, title_justify="left", header_style="bold")
    for name in ("from", "for"):
        table.add_column(name, justify="right")
    table.add_column("what")
    table.add_column("rank", justify="right")
    for name in ("other rank", "step", "bytes"):
        table.add_column(name, justify="right")
    lines = _joined(path)
    half = _STRETCHES_SHOWN // 2
    left_out = len(lines) - _STRETCHES_SHOWN
    shown = [*lines[:half], None, *lines[-half:]] if left_out > 0 else lines
    for one in shown:
        if one is None:
            table.add_row("…", "", f"{left_out:,} more", "", "", "", "")
            continue
        others = ("–" if value is None else f"{value:,}" for value in (one.peer, one.step, one.bytes))
        table.add_row(duration(one.start_s), duration(one.time_s), one.kind, str(one.rank), *others)
    return table


def _joined(path: Sequence[Stretch]) -> list[Stretch]:
    lines: list[Stretch] = []
    for one in path:
        last = lines[-1] if lines else None
        if last is not None and one.kind == last.kind == "compute" and one.rank == last.rank:
            lines[-1] = replace(last, end_s=one.end_s, bytes=(last.bytes or 0) + (one.bytes or 0))
        else:
            lines.append(one)
    return lines


def path_for_json(path: Sequence[Stretch]) -> ShownRow:
    return {"shares_s": shares(list(path)), "stretches": [asdict(one) for one in path]}


def counts_for_json(found: Measurement) -> ShownRow:
    """What every rank and every link carried. Raises ``ValueError`` for a measurement without links."""
    if found.links is None:
        raise ValueError("this measurement has no links: measure it with links=True")
    by_rank = {
        "finish_s": found.finish_by_rank_s,
        "messages_sent": found.messages_sent,
        "messages_received": found.messages_received,
        "bytes_sent": found.bytes_sent,
        "bytes_received": found.bytes_received,
    }
    columns = {name: values.tolist() for name, values in by_rank.items()}
    ranks = [
        {"rank": rank, **{name: column[rank] for name, column in columns.items()}} for rank in range(found.point.ranks)
    ]
    links = zip(
        *(
            part.tolist()
            for part in (found.links.source, found.links.destination, found.links.messages, found.links.bytes)
        ),
        strict=True,
    )
    names = ("from", "to", "messages", "bytes")
    return {"row": row_of(found), "ranks": ranks, "links": [dict(zip(names, link, strict=True)) for link in links]}


def plot(panels: Sequence[tuple[str, str, Sequence[ShownRow]]], title: str, path: Path) -> None:
    """A panel for each of (what the horizontal axis shows: "ranks" or "bytes"; its title; rows), a curve per algorithm:
    dots are simulated, thin lines closed forms. The format is that of the path's suffix; PNG without one.
    """
    names = list(dict.fromkeys(row["algorithm"] for _, _, rows in panels for row in rows))
    looks = looks_of(names)
    with picture(path, title, height=0.6 + 3.0 * len(panels)) as figure:
        for axes, (across, about, rows) in zip(grid_of(figure, len(panels), 1), panels, strict=True):
            curves: dict[str, list[ShownRow]] = {}
            for row in sorted(rows, key=lambda row: float(row[across])):
                curves.setdefault(row["algorithm"], []).append(row)
            for name, points in curves.items():
                look = looks[name].of_line()
                places = [row[across] for row in points]
                forms_s = [row["closed_form_s"] for row in points]
                has_form = None not in forms_s and name != "auto"
                if has_form:
                    axes.plot(places, forms_s, linewidth=1, **look | {"marker": ""})
                times_s = [row["time_s"] for row in points]
                axes.plot(places, times_s, label=name, **look | ({"linestyle": ""} if has_form else {}))
            # One rank alone may take no time at all.
            logarithmic = any(row["time_s"] > 0 for row in rows)
            places = sorted({row[across] for row in rows})
            counts_across(axes, places, [text_of(size) for size in places] if across == "bytes" else None)
            axes.set(yscale="log" if logarithmic else "linear", ylabel="virtual time")
            lines = "; dots: simulated, lines: closed forms" if any(row["closed_form_s"] for row in rows) else ""
            axes.set(xlabel="size of the vector" if across == "bytes" else across, title=about + lines)
            seconds_across(axes.yaxis, logarithmic=logarithmic)
            name_lines(axes)


def duration(seconds: float | None) -> str:
    """``180 ns``, ``18.20 µs``, ``5.400 ms``, ``1.200 s``; a dash for None."""
    if seconds is None:
        return "–"
    for factor, unit in ((1e9, "ns"), (1e6, "µs"), (1e3, "ms")):
        if seconds * factor < 1000:
            return f"{seconds * factor:.4g} {unit}"
    return f"{seconds:.4g} s"


def _ratio(seconds: float, least_s: float) -> str:
    return f"{seconds / least_s:.2f}" if least_s else "1.00"


def _share(seconds: float, whole_s: float) -> str:
    return f"{seconds / whole_s:.0%}" if whole_s else "–"


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
    critical_path: Annotated[
        bool,
        typer.Option("--critical-path", help="Say what the time went into, link by link.", rich_help_panel=_OUTPUT),
    ] = False
    timeline: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False, help="Write what ports and processors did, for ui.perfetto.dev.", rich_help_panel=_OUTPUT
        ),
    ] = None
    links: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="Write counts per rank and per link as JSON.", rich_help_panel=_OUTPUT),
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
        check_all_writable(
            {
                "--json": self.json_file,
                "--timeline": self.timeline,
                "--links": self.links,
                "--plot-file": self.plot_file,
            }
        )

    def all_ranks(self) -> list[int]:
        """Raises ``BadParameter`` for what is no number of ranks, and beyond ``MOST_RANKS``."""
        return ranks_of(self.ranks, "--ranks")

    def made_network(self) -> Network:
        """Raises ``BadParameter`` for names and costs that make no sense."""
        try:
            network = network_of(self.network)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--network") from error
        given = {
            "--alpha": ("alpha_s", self.alpha),
            "--beta": ("beta_s_per_byte", self.beta),
            "--beta-exchange": ("beta_exchange_s_per_byte", self.beta_exchange),
            "--gamma": ("gamma_s_per_byte", self.gamma),
        }
        for option, (name, value) in given.items():
            with _blaming(option):
                network = with_costs(network, **{name: value})
        others: dict[str, tuple[str, Any]] = {
            "--jitter": ("jitter", self.jitter),
            "--compute-noise": ("compute_noise", self.compute_noise),
            "--start-noise": ("start_noise_s", self.start_noise),
        }
        others |= self._nodes()
        for option, (name, value) in others.items():
            with _blaming(option):
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
    return _numbers(text, _rank_count_of, 2, option)


def sizes_of(text: str) -> list[int]:
    """Of --bytes. Raises ``BadParameter`` for what is no size, and beyond ``MOST_BYTES``."""
    return _numbers(text, _bytes_of, 4, "--bytes")


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


shared = shared_but()


class _blaming:  # noqa: N801 - reads as a statement
    """Within it, a ``ValueError`` is a bad value of ``option``."""

    def __init__(self, option: str) -> None:
        self._option = option

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, ValueError):
            raise typer.BadParameter(str(error), param_hint=self._option) from error


def _numbers(text: str, number_of: Callable[[str], int], factor: int, option: str) -> list[int]:
    """Of ``4``, ``4,64`` or ``4..64``, ascending; a range grows by ``factor`` and ends with its end."""
    found: set[int] = set()
    try:
        for part in text.split(","):
            first, dots, last = part.partition("..")
            numbers = [number_of(first)]
            if dots:
                end = number_of(last)
                if end < numbers[0]:
                    raise ValueError(f"range {part.strip()!r} ends before it begins: write the smaller number first")
                while (following := numbers[-1] * factor or factor) < end:
                    numbers.append(following)
                numbers.append(end)
            found.update(numbers)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from error
    return sorted(found)


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
                plot(drawn_panels, dated(f"simulated {name}, {_short(settings)}"), drawn)
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
