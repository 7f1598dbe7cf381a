"""``telegrad simulate``: collectives among any number of ranks in virtual time, and steps from closed forms."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from telegrad import _core
from telegrad.communicator.operands import WIRES, formats_named
from telegrad.tools.advise.sending import COLLECTIVES, SCHEMES, SELECTING, Cluster
from telegrad.tools.advise.step import PLANS, StepSweep, Stragglers
from telegrad.tools.cli.interrupts import ended_by_interrupt
from telegrad.tools.cli.options import names_among, refuse_given
from telegrad.tools.cli.outputs import say_file, table_console, written
from telegrad.tools.cli.simulate_run import (
    Asked,
    SimulationSettings,
    failures_said,
    run,
    shared,
    shared_but,
    sizes_of,
    write_json,
)
from telegrad.tools.cli.workload_options import (
    ComputeOption,
    DeviceOption,
    ModelOption,
    SamplesOption,
    TraceOption,
    chosen_device,
    chosen_workload,
)
from telegrad.tools.report.figures import (
    PART_COLORS,
    TEXT_POINTS,
    Look,
    counts_across,
    dated,
    duration,
    grid_of,
    key_of,
    looks_of,
    merged,
    name_lines,
    picture,
    seconds_across,
)
from telegrad.tools.sim.measure import ALGORITHMS, Network

# Steps as a table, and as curves with bars of the time's parts.

ShownRow = Mapping[str, Any]

_NAMES = ("scheme", "collective", "plan", "overlap")
PHASES = ("computing", "selecting", "decompressing", "exposed communication")
_PHASE_COLORS = PART_COLORS | {"exposed communication": PART_COLORS["communication"]}
_MOST_SHORTEST = 8.0  # shortest steps that a bar shows


def phases_of(row: ShownRow) -> dict[str, float]:
    """Seconds of a step by what its processor does in them; waiting for the network is what is left."""
    busy = {
        "computing": row["step_s"] - row["exposed_s"],
        "selecting": row["select_s"],
        "decompressing": row["decompress_s"],
    }
    return busy | {"exposed communication": max(0.0, row["step_s"] - sum(busy.values()))}


def name_of(row: ShownRow, varying: Sequence[str]) -> str:
    """By what differs between rows."""
    words = {"overlap": "overlap" if row["overlap"] else "no overlap"}
    return ", ".join(str(words.get(key, row[key])) for key in varying) or row["scheme"]


def varying_of(rows: Sequence[ShownRow]) -> list[str]:
    """Which of scheme, collective, plan and overlap tell rows of the same panel apart, beyond those before them."""
    kept: list[str] = []
    for key in _NAMES:
        without, with_it = (
            {(_panel(row), *(row[one] for one in keys)) for row in rows} for keys in (kept, [*kept, key])
        )
        if len(with_it) > len(without):
            kept.append(key)
    return kept


def table_of(rows: Sequence[ShownRow], title: str) -> Table:
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
        here = _where(row)
        if previous not in (None, here):
            table.add_section()
        previous = here
        best_s = min(other["step_s"] for other in rows if _where(other) == here)
        cells = [str(row.get(key, "–")) for key in several]
        cells += [f"{row['ranks']:,}", *(name_of(row, [key]) for key in varying), str(row["groups"])]
        cells += [duration(row[key]) for key in ("step_s", "exposed_s", "communicate_s")]
        cells += [duration(row[key]) for key in ("select_s", "decompress_s")] if compresses else []
        cells += [f"{row['efficiency']:.1%}", f"{row['speedup']:.1f}"]
        table.add_row(*cells, style="bold" if row["step_s"] == best_s and varying else None)
    return table


_BARS_ACROSS = 4  # panels of bars over the whole width, at most
_NAME_COLUMNS = 22  # characters above one of so many


def plot(rows: Sequence[ShownRow], title: str, path: Path) -> None:
    """For each model and kind of scaling a panel of efficiency against ranks, and below it, for each curve, bars of
    what the steps consist of. The format is that of the path's suffix; PNG without one."""
    panels: dict[str, list[ShownRow]] = {}
    for row in rows:
        panels.setdefault(_panel(row), []).append(row)
    varying = varying_of(rows)
    names = list(dict.fromkeys(name_of(row, varying) for row in rows))
    looks = looks_of(names)
    across = min(_BARS_ACROSS, len(names))
    down = -(-len(names) // across)
    with picture(path, title, height=0.8 + (3.0 + 1.7 * down) * len(panels)) as figure:
        blocks = figure.subfigures(len(panels), 1, squeeze=False, hspace=0.03)
        for (about, found), block in zip(panels.items(), blocks.flat, strict=True):
            curves = {name: [row for row in found if name_of(row, varying) == name] for name in names}
            curves = {name: own for name, own in curves.items() if own}
            above, below = block.subfigures(2, 1, height_ratios=[3.0, 1.75 * down]).flat
            axes = above.subplots()
            _draw_efficiencies(axes, curves, looks)
            axes.set_title(about)
            ranks = sorted({row["ranks"] for row in found})
            every = grid_of(below, len(curves), across)
            for place, ((name, own), axes) in enumerate(zip(curves.items(), every, strict=True)):
                if place:
                    axes.sharey(every[0])
                _draw_bars(axes, own, ranks, min(row["step_s"] for row in found))
                axes.set_title("\n".join(textwrap.wrap(name, _NAME_COLUMNS)), fontsize=TEXT_POINTS)
                axes.tick_params(labelleft=place % across == 0)
                if place % across == 0:
                    axes.set_ylabel("time of a step")
        shown = [phase for phase in PHASES if any(phases_of(row)[phase] > 0 for row in rows)]
        key_of(figure, {phase: _PHASE_COLORS[phase] for phase in shown})


def _draw_efficiencies(axes: Any, curves: Mapping[str, Sequence[ShownRow]], looks: Mapping[str, Look]) -> None:
    points = {
        name: [(row["ranks"], 100 * row["speedup"] / row["ranks"]) for row in own] for name, own in curves.items()
    }
    for alike, line in merged(points, logarithmic=False).items():
        axes.plot(*zip(*line, strict=True), label=",\n".join(alike), **looks[alike[0]].of_line())
    counts_across(axes, sorted({row["ranks"] for own in curves.values() for row in own}), most=12)
    axes.set(xlabel="ranks", ylabel="speed-up / ranks (%)", ylim=(0, 105))
    name_lines(axes)


def _draw_bars(axes: Any, rows: Sequence[ShownRow], ranks: Sequence[int], shortest_s: float) -> None:
    """Steps longer than some times the shortest are cut off; what they take is written there."""
    from matplotlib.patheffects import withStroke

    highest_s = _MOST_SHORTEST * shortest_s
    for row in rows:
        place, bottom = ranks.index(row["ranks"]), 0.0
        for phase, seconds in phases_of(row).items():
            axes.bar(place, seconds, 0.8, bottom=bottom, color=_PHASE_COLORS[phase])
            bottom += seconds
        if row["step_s"] > highest_s:
            axes.annotate(
                duration(row["step_s"]),
                (place, 0.96 * highest_s),
                rotation=90,
                ha="center",
                va="top",
                path_effects=[withStroke(linewidth=2.5, foreground="white")],
            )
    axes.set_ylim(0, min(highest_s, max(axes.get_ylim()[1], 1.05 * max(row["step_s"] for row in rows))))
    seconds_across(axes.yaxis, logarithmic=False)
    most = max(1, 18 // (1 + len(f"{ranks[-1]:,}")))  # that fit below a panel
    ticks = range(0, len(ranks), -(-len(ranks) // most))
    axes.set_xticks(ticks, [f"{ranks[tick]:,}" for tick in ticks])
    axes.set_xlim(-0.6, len(ranks) - 0.4)
    axes.grid(visible=False, axis="x")
    axes.set_xlabel("ranks")


def _panel(row: ShownRow) -> str:
    return ", ".join(str(row[key]) for key in ("model", "scaling") if key in row)


def _where(row: ShownRow) -> tuple[Any, ...]:
    return row["model"], row.get("scaling"), row["ranks"]


# `telegrad simulate training-step`: whole steps from closed forms, among more and more ranks.

_STEP, _LATE = "How gradients are sent", "Stragglers"


@shared_but(
    "jitter",
    "compute_noise",
    "start_noise",
    "payloads",
    "jobs",
    "critical_path",
    "timeline",
    "links",
    ranks="2..4096",
    network="10gbit",
)
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
    collective: Annotated[
        str,
        typer.Option(help=f"Of dense sums: {', '.join(COLLECTIVES)}; several with commas.", rich_help_panel=_STEP),
    ] = "telegrad",
    density: Annotated[
        float, typer.Option(help="Share of entries that each rank selects.", rich_help_panel=_STEP)
    ] = 0.01,
    overlap: Annotated[
        bool, typer.Option(help="Communicate beside the backward pass, or after it.", rich_help_panel=_STEP)
    ] = True,
    straggler_factor: Annotated[
        float, typer.Option(help="One rank takes always so many times as long.", rich_help_panel=_LATE)
    ] = 1.0,
    straggler_sigma: Annotated[
        float,
        typer.Option(
            help="Each rank's step is exp(this · z) times as long, z normal: means of 200 steps.", rich_help_panel=_LATE
        ),
    ] = 0.0,
    *,
    settings: SimulationSettings,
) -> None:
    """Predict a training step: compute, select, send, decompress, overlapped as data-parallel training does it.

    Closed forms, not the collectives themselves: thousands of ranks take seconds. [bold]telegrad[/] is the fastest of
    this library's algorithms for each group by the closed forms that the simulator is held against. Sparse sums fill in
    as random indices do. [bold]--ranks-per-node[/] ranks share a node; [bold]two-level[/] sums inside of it first.

    [bold]Example:[/] telegrad simulate training-step --model vgg16 --ranks 2..4096 --plan fixed,optimal --plot
    """
    console = table_console()
    settings.check_outputs()
    drawn = settings.drawn_into("training_step")
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
    schemes = _names(scheme, SCHEMES, "--scheme")
    if "dense" not in schemes:
        refuse_given(context, ("collective",), f"--scheme {scheme} has no dense sums")
    if not SELECTING.intersection(schemes):
        refuse_given(context, ("density",), f"--scheme {scheme} selects no entries")
    sweep = StepSweep(
        workload,
        _clusters(network, ranks),
        chosen,
        ranks,
        schemes,
        _names(plan, PLANS, "--plan"),
        _names(collective, COLLECTIVES, "--collective"),
        density,
        global_samples,
        overlap,
        _stragglers(straggler_factor, straggler_sigma, settings.seed),
    )
    title = f"training steps of {workload.model}, {settings.network}"
    computing = workload.trace.about or workload.model
    if global_samples is not None:
        computing += f" of {workload.samples:g} samples, of which a rank has its share of {global_samples:g}"
    computing += f"; selection: {chosen.about}"
    about = {
        "workload": workload.trace.about,
        "device": chosen.about,
        "density": density,
        "network": {"name": settings.network, "about": network.about, **network.fields_of_core()},
    }
    said = [network.about, computing]
    with ended_by_interrupt(console, "interrupted: nothing was written"), failures_said(console):
        rows = list(sweep.rows())
        console.print(table_of(rows, title))
        for line in said:
            console.print(line, style="dim", highlight=False, markup=False)
        if settings.json_file is not None:
            write_json(console, settings.json_file, {"rows": rows, **about})
            say_file(console, "rows", settings.json_file)
        if drawn is not None:
            _draw(console, rows, dated(f"simulated {title}"), drawn)


def _draw(console: Any, rows: Sequence[ShownRow], title: str, path: Path) -> None:
    with written(console, path):
        plot(rows, title, path)
    say_file(console, "plot", path)


def _names(text: str, known: Any, option: str) -> list[str]:
    found = names_among(text, (*known, "all"), option)
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


def _stragglers(factor: float, sigma: float, seed: int) -> Stragglers:
    try:
        Stragglers(factor=factor)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--straggler-factor") from error
    try:
        return Stragglers(factor, sigma, seed)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--straggler-sigma") from error


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


app = typer.Typer(
    help="Run the real algorithms among any number of ranks in virtual time.",
    no_args_is_help=True,
)

_Bytes = Annotated[
    str,
    typer.Option("--bytes", help="One rank's vector: one size, a list [bold]4,64KiB[/], or a range (×4): 4..64MiB."),
]


@app.command()
@shared
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

    [bold]Example:[/] telegrad simulate allreduce --ranks 2048 --bytes 8KiB --network 100gbit --plot
    """
    run(Asked("allreduce", _algorithms(algorithm, "allreduce", settings), sizes_of(bytes_)), settings)


@app.command(name="sparse-allreduce")
@shared
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

    [bold]Example:[/] telegrad simulate sparse-allreduce --ranks 2..256 --bytes 64MiB --density 0.01 --network 25gbit
    """
    if not 0 < density <= 1:
        raise typer.BadParameter(f"{density:g} is no share: use a number above 0 and up to 1", param_hint="--density")
    if not 0 <= overlap <= 1:
        raise typer.BadParameter(f"{overlap:g} is no share: use a number from 0 to 1", param_hint="--overlap")
    named = _algorithms(algorithm, "sparse_allreduce", settings)
    chosen = sparse_algorithms(named, wire, all_of_them="all" in algorithm)
    run(Asked("sparse_allreduce", chosen, sizes_of(bytes_), density, overlap, wire), settings)


@app.command()
@shared
def allgather(bytes_: _Bytes = "64KiB", *, settings: SimulationSettings) -> None:
    """Every rank's block to every rank. [bold]--bytes[/] is the length of one block.

    Short blocks go by Bruck's algorithm, long ones round a ring.

    [bold]Example:[/] telegrad simulate allgather --ranks 16 --bytes 4..1MiB --network 10gbit
    """
    run(Asked("allgather", ALGORITHMS["allgather"], sizes_of(bytes_)), settings)


@app.command()
@shared
def gather(bytes_: _Bytes = "64KiB", *, settings: SimulationSettings) -> None:
    """Every rank's block to one rank. [bold]--bytes[/] is the length of one block.

    Short blocks of many ranks go up a binomial tree, others directly.

    [bold]Example:[/] telegrad simulate gather --ranks 2..4096 --bytes 1KiB --network 25gbit
    """
    run(Asked("gather", ALGORITHMS["gather"], sizes_of(bytes_)), settings)


@app.command()
@shared
def scatter(bytes_: _Bytes = "64KiB", *, settings: SimulationSettings) -> None:
    """One rank's blocks to all ranks, a block each. [bold]--bytes[/] is the length of one block.

    Short blocks of many ranks go down a binomial tree, others directly.

    [bold]Example:[/] telegrad simulate scatter --ranks 2..4096 --bytes 1KiB --network 25gbit
    """
    run(Asked("scatter", ALGORITHMS["scatter"], sizes_of(bytes_)), settings)


@app.command(name="all-to-all")
@shared
def all_to_all(bytes_: _Bytes = "64KiB", *, settings: SimulationSettings) -> None:
    """A block of every rank to every rank. [bold]--bytes[/] is the length of one block, of which a rank has P.

    Short blocks of many ranks go by Bruck's algorithm, others in pairwise exchanges.

    [bold]Example:[/] telegrad simulate all-to-all --ranks 64 --bytes 4..64KiB --network 100gbit
    """
    run(Asked("all_to_all", ALGORITHMS["all_to_all"], sizes_of(bytes_)), settings)


@app.command()
@shared
def broadcast(bytes_: _Bytes = "1MiB", *, settings: SimulationSettings) -> None:
    """One rank's vector to all, down a binomial tree or, if it is long, along a chain.

    [bold]Example:[/] telegrad simulate broadcast --ranks 2..4096 --bytes 100MiB --critical-path
    """
    run(Asked("broadcast", ALGORITHMS["broadcast"], sizes_of(bytes_)), settings)


@app.command()
@shared
def reduce(bytes_: _Bytes = "1MiB", *, settings: SimulationSettings) -> None:
    """Sum a vector over all ranks to one of them: up a tree if it is short, by reduce-scatter and gather if it is long.

    [bold]Example:[/] telegrad simulate reduce --ranks 2..4096 --bytes 4KiB,16MiB --network 100gbit
    """
    run(Asked("reduce", ALGORITHMS["reduce"], sizes_of(bytes_)), settings)


@app.command(name="reduce-scatter")
@shared
def reduce_scatter(bytes_: _Bytes = "1MiB", *, settings: SimulationSettings) -> None:
    """Sum a vector over all ranks, of which each gets one block: by halving, or round a ring if blocks are long.

    [bold]Example:[/] telegrad simulate reduce-scatter --ranks 64 --bytes 4..256MiB --network 25gbit
    """
    run(Asked("reduce_scatter", ALGORITHMS["reduce_scatter"], sizes_of(bytes_)), settings)


@app.command()
@shared
def barrier(*, settings: SimulationSettings) -> None:
    """Wait until all ranks have come, by dissemination.

    [bold]Example:[/] telegrad simulate barrier --ranks 2..4096 --jitter 3 --seed 1
    """
    run(Asked("barrier", ALGORITHMS["barrier"], [0]), settings)


app.command(name="training-step")(training_step)


def _algorithms(text: str, operation: str, settings: SimulationSettings) -> tuple[str, ...]:
    known = (*ALGORITHMS[operation], *(["two_level"] if settings.ranks_per_node > 1 else []), "auto")
    chosen = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in chosen:
        if name not in (*known, "all"):
            raise typer.BadParameter(
                f"{name!r} does not exist: use {', '.join(known)}, all (two_level: with --ranks-per-node)",
                param_hint="--algorithm",
            )
    return known if "all" in chosen else chosen
