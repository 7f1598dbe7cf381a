"""``telegrad advise``: whether to compress, how to merge, and the line of code for it, before there is a cluster."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.panel import Panel
from rich.syntax import Syntax

from telegrad.cost import Costs, Place, Tuning
from telegrad.tools.advise import advice
from telegrad.tools.advise.cluster import NODE, Cluster
from telegrad.tools.cli.console import table_console
from telegrad.tools.cli.interrupts import ended_by_interrupt
from telegrad.tools.cli.options import is_given, refuse_given
from telegrad.tools.cli.outputs import check_all_writable, say_file, written
from telegrad.tools.cli.simulate_run import write_json
from telegrad.tools.cli.workload_options import (
    ComputeOption,
    DeviceOption,
    ModelOption,
    SamplesOption,
    TraceOption,
    chosen_device,
    chosen_workload,
)
from telegrad.tools.report.advice import for_json, plot, table_of
from telegrad.tools.sim.networks import NAMED, Network, network_of, with_costs

TuningOption = Annotated[
    Path | None,
    typer.Option(
        "--tuning",
        exists=True,
        dir_okay=False,
        help="Measured costs instead of a named network's: what telegrad calibrate wrote with --json, or a file that "
        "it keeps.",
        rich_help_panel="The network",
        show_default=False,
    ),
]


def read_tuning(path: Path) -> Tuning:
    """Raises ``BadParameter`` for a file that holds none."""
    try:
        text = path.read_text()
        try:
            found = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"this is no tuning but damaged JSON ({error}): calibrate again") from error
        inner = found.get("tuning") if isinstance(found, dict) else None
        return Tuning.from_json(text) if inner is None else Tuning.from_data(inner)
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise typer.BadParameter(f"cannot read {path}: {error}", param_hint="--tuning") from error


def cluster_of(tuning: Tuning, nodes: int, per_node: int) -> Cluster:
    """So many ranks on the network that was measured, where those of a node share its link."""
    ranks, within = nodes * per_node, tuning.within or NODE
    if nodes == 1 and tuning.within is None and len(tuning.place.hosts) == 1:
        within = tuning.costs
    sharing = _ranks_to_a_link(tuning.place)
    port, oversubscription = tuning.costs.with_bytes_times(1 / sharing), float(per_node)
    if tuning.alone is not None and port.beta_s_per_byte > 0:  # one rank may send less than the link carries
        slower = min(max(1.0, tuning.alone.beta_s_per_byte / port.beta_s_per_byte), sharing)
        port, oversubscription = port.with_bytes_times(slower), max(1.0, per_node / slower)
    return Cluster(ranks, port, per_node, within, oversubscription=oversubscription)


def about_tuning(tuning: Tuning) -> str:
    """Its costs in words, and while how many ranks sent at once they were measured."""
    sharing = _ranks_to_a_link(tuning.place)
    return (
        f"measured among {tuning.place}, {sharing:.3g} rank{'' if sharing == 1 else 's'} to a link: "
        f"{about_costs(tuning.costs)}{_alone(tuning)}"
    )


def _alone(tuning: Tuning) -> str:
    return "" if tuning.alone is None else f", {_rate(tuning.alone)} while one rank of a node sends alone"


def _ranks_to_a_link(place: Place) -> float:
    """How many ranks shared one while messages were measured, as all ranks send at once then. A tuning of one host
    without levels does not say whether its ranks had a link each, as in the network laboratory; it is taken so."""
    if place.nodes:
        return place.ranks / len(set(place.nodes))
    return place.ranks / len(place.hosts) if len(place.hosts) > 1 else 1.0


def about_costs(costs: Costs) -> str:
    """In words."""
    return f"α {costs.alpha_s * 1e6:.3g} µs, {_rate(costs)}, γ {costs.gamma_s_per_byte * 1e9:.3g} ns per byte"


def _rate(costs: Costs) -> str:
    return f"{1e-9 / costs.beta_s_per_byte:.3g} GB/s" if costs.beta_s_per_byte else "any rate"


_MOST_RANKS = 8192
_NETWORK = "The network"
_DEVICE_ASSUMED = (
    "A trace does not say what selecting and unpacking take: they are assumed to run on a {}. --device names another."
)


def advise(
    context: typer.Context,
    model: ModelOption = "resnet50",
    trace: TraceOption = None,
    nodes: Annotated[int, typer.Option(min=1, help="Machines.", rich_help_panel=_NETWORK)] = 16,
    gpus_per_node: Annotated[
        int, typer.Option(min=1, help="Ranks of each, which share its link.", rich_help_panel=_NETWORK)
    ] = 1,
    network: Annotated[
        str,
        typer.Option(
            help=f"A node's link: {', '.join(NAMED)} or any other rate such as 2.5gbit, with costs that the "
            "output states.",
            rich_help_panel=_NETWORK,
        ),
    ] = "10gbit",
    alpha: Annotated[
        float | None,
        typer.Option(help="α: seconds of latency of a message.", rich_help_panel=_NETWORK, show_default=False),
    ] = None,
    beta: Annotated[
        float | None,
        typer.Option(help="β: seconds of a byte in a node's link.", rich_help_panel=_NETWORK, show_default=False),
    ] = None,
    tuning_file: TuningOption = None,
    density: Annotated[float, typer.Option(help="Share of entries that a rank would select.")] = 0.01,
    samples: SamplesOption = None,
    device: DeviceOption = "v100",
    compute_ms: ComputeOption = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", dir_okay=False, help="Write all predictions and timelines here.")
    ] = None,
    plot_file: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Draw the timelines of all schemes into this file.")
    ] = None,
) -> None:
    """Say whether compression pays for this model on this network, and which line of code to use.

    Every scheme's training step is predicted from closed forms: computation, selection, network, overlap. It may well
    say that you should not compress.

    [bold]Example:[/] telegrad advise --model vgg16 --nodes 16 --network 1gbit --plot-file vgg16.png

    On a network that is there: telegrad calibrate --json costs.json, then telegrad advise --tuning costs.json
    """
    console = table_console()
    check_all_writable({"--json": json_file, "--plot-file": plot_file})
    ranks = nodes * gpus_per_node
    if not 2 <= ranks <= _MOST_RANKS:
        raise typer.BadParameter(
            f"{nodes:,} nodes of {gpus_per_node:,} are {ranks:,} ranks: use 2 to {_MOST_RANKS:,}", param_hint="--nodes"
        )
    if not 0 < density <= 1:
        raise typer.BadParameter(f"{density:g} is no share: use a number above 0, up to 1", param_hint="--density")
    if tuning_file is None:
        costs = _named_costs(network, alpha, beta)
        about, place = costs.about, network
        cluster = Cluster(ranks, costs.costs, gpus_per_node, oversubscription=float(gpus_per_node))
    else:
        refuse_given(context, ("network", "alpha", "beta"), "--tuning has measured costs")
        tuning = read_tuning(tuning_file)
        cluster = cluster_of(tuning, nodes, gpus_per_node)
        about, place = about_tuning(tuning), tuning_file.stem
    chosen = chosen_device(device)
    workload = chosen_workload(context, model, trace, samples, chosen, compute_ms)
    with ended_by_interrupt(console, "interrupted: nothing was written"):
        try:
            found = advice.advise(workload, cluster, chosen, density=density)
        except (ValueError, OverflowError) as error:
            raise typer.BadParameter(
                f"no step can be reckoned from these costs and times ({error}): give smaller ones"
            ) from error
        if trace is not None and not is_given(context, "device"):
            found = replace(found, cautions=(*found.cautions, _DEVICE_ASSUMED.format(device)))
        console.print(table_of(found))
        text = "\n".join(["", *(f"• {one}" for one in found.reasons), "", *(f"Mind: {one}" for one in found.cautions)])
        panel = f"[bold]{found.verdict}[/]{text}"
        console.print(Panel(panel, title="advice", title_align="left"), highlight=False)
        # Not wrapped by us: whoever copies it must get one line.
        console.print(Syntax("", "python", background_color="default").highlight(found.line), soft_wrap=True, end="")
        if nodes == 1:
            about = "none is used: all ranks share a node"
        within = _about_within(cluster)
        said = [f"network: {about}"]
        if within is not None:
            said.append(f"inside of a node: {within}")
        said.append(f"computation: {workload.trace.about or workload.model}")
        said.append(f"selection and unpacking: {chosen.about}")
        for one in said:
            console.print(one, style="dim", highlight=False, markup=False)
        if json_file is not None:
            write_json(
                console, json_file, {**for_json(found), "network": about, "within": within, "device": chosen.about}
            )
            say_file(console, "predictions", json_file)
        if plot_file is not None:
            where = place if nodes > 1 else "one node"
            title = f"{workload.model}, {ranks:,} ranks, {where}: {found.verdict.partition(':')[0].lower()}"
            with written(console, plot_file):
                plot(found, title, plot_file)
            say_file(console, "plot", plot_file)


def _named_costs(network: str, alpha: float | None, beta: float | None) -> Network:
    try:
        costs = network_of(network)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--network") from error
    for option, name, value in (("--alpha", "alpha_s", alpha), ("--beta", "beta_s_per_byte", beta)):
        try:
            costs = with_costs(costs, **{name: value})
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint=option) from error
    return costs


def _about_within(cluster: Cluster) -> str | None:
    """What is assumed, or was measured, of the inside of a node, if ranks share one."""
    if cluster.ranks_per_node == 1:
        return None
    return f"{'assumes' if cluster.within is NODE else 'measured:'} {about_costs(cluster.within)}"
