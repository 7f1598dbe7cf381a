"""``telegrad advise``: how long a job takes, whether to compress, and the line of code, before there is a cluster."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.syntax import Syntax
from rich.table import Table

from telegrad.communicator.tuning_cache import newest_between_hosts
from telegrad.cost import Costs, Place, Tuning
from telegrad.tools.advise import advice
from telegrad.tools.advise.advice import RECIPES, Advice, Prediction, Recipe, recipe_of
from telegrad.tools.advise.architectures import ARCHITECTURES
from telegrad.tools.advise.outer import MOST_SHARE, OuterLoop, Round
from telegrad.tools.advise.sending import NODE, Cluster
from telegrad.tools.advise.step import Step
from telegrad.tools.bench.plan import text_of
from telegrad.tools.cli.interrupts import ended_by_interrupt
from telegrad.tools.cli.options import blaming, is_given, refuse_given
from telegrad.tools.cli.outputs import check_all_writable, drawn, table_console, write_result
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
from telegrad.tools.report.figures import Timeline, draw_timelines, duration
from telegrad.tools.sim.measure import NAMED, Network, network_of, with_costs

# The table, the rows for JSON, and the timelines of all schemes.


def table_of(advice: Advice) -> Table:
    """A line for each scheme; the recommended one is bold."""
    ranks, nodes = advice.cluster.ranks, advice.cluster.nodes
    where = "1 node" if nodes == 1 else f"{nodes:,} nodes"
    passes = advice.workload.accumulate
    each = "" if passes == 1 else f", {passes:,} passes a step"
    title = escape(f"{advice.workload.model} with {advice.recipe.title} on {ranks:,} ranks, {where}{each}")
    table = Table(title=title, title_justify="left", header_style="bold", box=SIMPLE_HEAD, padding=0)
    table.caption = (
        "step: of the optimizer, after the dense first ones. job: the whole job's speed, with the dense first steps of "
        "selected entries, beside the first row. efficiency: of the samples a second without communication. "
        "accuracy: beside dense training, in a study of small models"
    )
    table.caption_justify = "left"
    table.add_column("scheme", no_wrap=True)
    table.add_column("what it sends")
    for name in ("step", "job", "efficiency", "samples/s", "network", "exposed", "select", "accuracy"):
        table.add_column(name, justify="right", no_wrap=True)
    first_s = advice.predictions[0].mean_s
    for one in advice.predictions:
        step = one.step
        cells = [one.scheme.name, one.scheme.about, duration(one.step_s), f"{first_s / one.mean_s:.2f}x"]
        cells += [f"{one.efficiency:.1%}", rate_of(one.samples_per_s), duration(step.communicate_s)]
        cells += [duration(step.exposed_s), duration(step.select_s) if step.select_s else "–"]
        unknown = "unknown" if one.scheme.compresses else "–"
        cells.append(unknown if one.accuracy is None else one.accuracy.text_at(advice.density))
        table.add_row(*cells, style="bold" if one is advice.recommended else None)
    return table


def table_of_rounds(rounds: Mapping[int, Sequence[Round]], title: str, recommended: Round | None = None) -> Table:
    """A line for each round, by the number of replicas."""
    table = Table(title=escape(title), title_justify="left", header_style="bold", box=SIMPLE_HEAD, padding=0)
    table.caption = "sent: by a replica in a round. exposed: how long training waits for an exchange"
    table.caption_justify = "left"
    for name in ("replicas", "format", "every", "fragments", "delay", "sent", "steps", "exchange", "exposed", "share"):
        table.add_column(name, justify="left" if name == "format" else "right", no_wrap=True)
    for replicas, found in rounds.items():
        for one in found:
            cells = [f"{replicas:,}", one.kind, f"{one.every:,}", f"{one.fragments:,}", f"{one.delay:,}"]
            cells += [text_of(round(one.bytes)), duration(one.compute_s), duration(one.exchange_s)]
            cells += [duration(one.exposed_s), f"{one.share:.1%}"]
            table.add_row(*cells, style="bold" if one == recommended else None)
        table.add_section()
    return table


def _advise_rounds(console: Console, loop: OuterLoop, model: str, said: Sequence[str], json_file: Path | None) -> None:
    best, replicas = loop.recommended(), loop.cluster.ranks
    rounds = [one for one in loop.rounds(None) if (one.kind, one.streams) != (best.kind, best.streams)]
    title = f"rounds of {model} on {replicas:,} replicas whose exchanges take {MOST_SHARE:.0%} at most"
    console.print(table_of_rounds({replicas: [*rounds, best]}, title, best))
    console.print(Syntax("", "python", background_color="default").highlight(best.line), soft_wrap=True, end="")
    for one in (f"an inner step: {duration(loop.step_s)}; the outer step on the host is not counted", *said):
        console.print(one, style="dim", highlight=False, markup=False)
    if json_file is not None:
        rows = [one.for_json() for one in (*rounds, best)]
        result = {"model": model, "replicas": replicas, "step_s": loop.step_s, "rounds": rows, "about": [*said]}
        write_result(console, json_file, {**result, "recommended": best.for_json()}, what="predictions")


def rate_of(per_s: float) -> str:
    """Three digits of a number a second; all digits of a whole one above 100."""
    return f"{per_s:,.0f}" if per_s >= _WHOLE_FROM else f"{per_s:.3g}"


_WHOLE_FROM = 99.5


def for_json(advice: Advice) -> dict[str, Any]:
    """All of it; seconds."""
    return {
        "model": advice.workload.model,
        "workload": advice.workload.trace.about,
        "samples": advice.workload.samples,
        "accumulate": advice.workload.accumulate,
        "optimizer": advice.recipe.optimizer,
        "steps": advice.steps,
        "dense_share": advice.recommended.dense_share,
        "speedup": advice.speedup,
        "ranks": advice.cluster.ranks,
        "ranks_per_node": advice.cluster.ranks_per_node,
        "density": advice.density,
        "recommended": advice.recommended.scheme.name,
        "verdict": advice.verdict,
        "reasons": list(advice.reasons),
        "cautions": list(advice.cautions),
        "line": advice.line,
        "rows": [_row(one, advice) for one in advice.predictions],
    }


def _row(one: Prediction, advice: Advice) -> dict[str, Any]:
    step, accuracy = one.step, one.accuracy
    return {
        "scheme": one.scheme.name,
        "about": one.scheme.about,
        "plan": one.scheme.plan,
        "compresses": one.scheme.compresses,
        "line": advice.line_of(one),
        "dense_share": one.dense_share,
        "mean_s": one.mean_s,
        "step_s": one.step_s,
        "pass_s": step.step_s,
        "compute_s": step.compute_s,
        "exposed_s": step.exposed_s,
        "select_s": step.select_s,
        "communicate_s": step.communicate_s,
        "decompress_s": step.decompress_s,
        "efficiency": one.efficiency,
        "samples_per_s": one.samples_per_s,
        "accuracy": None if accuracy is None else asdict(accuracy),
        "groups": [group._asdict() for group in step.groups],
    }


def segments_of(step: Step) -> list[tuple[str, str, float, float]]:
    """What the processor and the network do: (lane, what, from, for) in seconds, the backward pass without what holds
    it up."""
    found = [("processor", "forward", 0.0, step.forward_s)]
    at = step.forward_s
    left = step.backward_s
    for group in step.groups:
        if group.selected_s <= group.ready_s:
            continue
        computed = min(left, group.ready_s - at)
        found.append(("processor", "backward", at, computed))
        found.append(("processor", "selecting", group.ready_s, group.selected_s - group.ready_s))
        left -= computed
        at = group.selected_s
    found.append(("processor", "backward", at, left))
    for group in step.groups:
        found.append(("network", "on the network", group.start_s, group.arrived_s - group.start_s))
        found.append(("processor", "unpacking", group.finish_s - group.decompress_s, group.decompress_s))
    return [one for one in found if one[3] > 0]


def plot(advice: Advice, title: str, path: Path) -> None:
    """The timelines of all schemes, the shortest at the top: above, the processor, below, the network. Steps of more
    than four times the shortest are cut off. The format is that of the path's suffix; PNG without one."""
    timelines = [
        Timeline(one.scheme.name, segments_of(one.step), one.step.step_s, one is advice.recommended)
        for one in advice.predictions
    ]
    draw_timelines(timelines, advice.workload.trace.compute_s, title, path)


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
    is_same = (ranks, per_node) == (tuning.ranks, round(sharing))
    gloo = tuning.gloo if is_same else None
    return Cluster(ranks, port, per_node, within, oversubscription=oversubscription, gloo=gloo)


_COSTS = ("network", "alpha", "beta")
_KEPT = "; kept by telegrad calibrate on {}, --network names another"


def _kept_tuning(context: typer.Context) -> Tuning | None:
    """The network between hosts that was calibrated last, unless the command line names costs."""
    if any(is_given(context, name) for name in _COSTS):
        return None
    return newest_between_hosts()


def about_tuning(tuning: Tuning) -> str:
    """Its costs in words, and while how many ranks sent at once they were measured."""
    sharing = _ranks_to_a_link(tuning.place)
    alone = "" if tuning.alone is None else f", {_rate(tuning.alone)} while one rank of a node sends alone"
    return (
        f"measured among {tuning.place}, {sharing:.3g} rank{'' if sharing == 1 else 's'} to a link: "
        f"{about_costs(tuning.costs)}{alone}"
    )


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
_NETWORK, _JOB = "The network", "The job"
_MANY = 4  # mini-batches
_ONE_PASS = (
    "--samples {0:g} is taken as one pass, all of whose backward pass hides the exchange. If you accumulate smaller "
    "mini-batches, say so: --samples {1} --accumulate N."
)
_FLOAT16 = (
    "float16 gradients are sent densely: only float32 and bfloat16 are compressed. With autocast, parameters and their "
    "gradients stay float32 (docs/how-to/mixed-precision.md)."
)
_NO_SAMPLES = "The mini-batch is not known, so samples/s counts passes: --samples names it."
_BOTH_WAYS = 2
_BUSY = (
    "When two ranks sent to each other, a byte took {:.2g} times as long as in one direction. Was a machine busy "
    "then? So much slower sums flatter compression: telegrad calibrate on quiet machines, or name the --network."
)
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
    optimizer: Annotated[
        str | None,
        typer.Option(
            help=f"{', '.join(RECIPES)}: says how many first steps are dense, and the density. Default: the model's.",
            rich_help_panel=_JOB,
            show_default=False,
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            min=1, help="Optimizer steps of the whole job. Default: many.", rich_help_panel=_JOB, show_default=False
        ),
    ] = None,
    accumulate: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Forward and backward passes of each optimizer step. Only the last one exchanges gradients. Default: "
            "1, or as many as the trace says.",
            rich_help_panel=_JOB,
            show_default=False,
        ),
    ] = None,
    density: Annotated[
        float | None,
        typer.Option(
            help="Share of entries that a rank would select. Default: the optimizer's, 0.01 or 0.001.",
            rich_help_panel=_JOB,
            show_default=False,
        ),
    ] = None,
    samples: SamplesOption = None,
    device: DeviceOption = "v100",
    compute_ms: ComputeOption = None,
    gradients: GradientsOption = "float32",
    outer: Annotated[
        bool,
        typer.Option(
            "--outer",
            help="Advise on DiLoCo instead: each node is a replica. Says which every, fragments and format keep the "
            f"exchange under {MOST_SHARE:.0%} of the time.",
            rich_help_panel=_JOB,
        ),
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", dir_okay=False, help="Write all predictions and timelines here.")
    ] = None,
    plot_file: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Draw the timelines of all schemes into this file.")
    ] = None,
) -> None:
    """Say whether compression pays for this job on this network, and which line of code to use.

    The whole job is predicted from closed forms: computation, selection, network, overlap, accumulated passes, and the
    dense first steps that the optimizer needs. It may well say that you should not compress.

    [bold]Example:[/] telegrad advise --model vgg16 --nodes 16 --network 1gbit --plot-file vgg16.png

    [bold]Example:[/] telegrad advise --model gpt2-medium --device h100 --nodes 4 --accumulate 8 --steps 20000

    [bold]Example:[/] telegrad advise --outer --model llama-1b --device h100 --nodes 8 --network 500mbit

    Where telegrad calibrate has measured a network between hosts, that is used unless --network names another."""
    console = table_console()
    check_all_writable({"--json": json_file, "--plot-file": plot_file})
    ranks = nodes * gpus_per_node
    if not 2 <= ranks <= _MOST_RANKS:
        raise typer.BadParameter(
            f"{nodes:,} nodes of {gpus_per_node:,} are {ranks:,} ranks: use 2 to {_MOST_RANKS:,}", param_hint="--nodes"
        )
    if density is not None and not 0 < density <= 1:
        raise typer.BadParameter(f"{density:g} is no share: use a number above 0, up to 1", param_hint="--density")
    if tuning_file is not None:
        refuse_given(context, _COSTS, "--tuning has measured costs")
        tuning: Tuning | None = read_tuning(tuning_file)
        assert tuning is not None
        cluster = cluster_of(tuning, nodes, gpus_per_node)
        about, place = about_tuning(tuning), tuning_file.stem
    elif (tuning := _kept_tuning(context)) is not None:
        cluster = cluster_of(tuning, nodes, gpus_per_node)
        about, place = f"{about_tuning(tuning)}{_KEPT.format(tuning.measured_at[:10])}", "the network measured here"
    else:
        costs = _named_costs(network, alpha, beta)
        about, place = costs.about, network
        cluster = Cluster(ranks, costs.costs, gpus_per_node, oversubscription=float(gpus_per_node))
    chosen = chosen_device(device)
    workload = chosen_workload(context, model, trace, samples, chosen, compute_ms)
    width = bytes_of_values(context, gradients, known=model in ARCHITECTURES and trace is None)
    cluster = replace(cluster, value_bytes=width)
    if accumulate is not None:
        workload = replace(workload, accumulate=accumulate)
    if outer:
        refuse_given(context, ("optimizer", "steps", "density", "gradients", "plot_file"), "--outer has no use for it")
        inside = Cluster(gpus_per_node, cluster.within, gpus_per_node, cluster.within)
        with as_bad_parameter_of_costs():
            loop = OuterLoop.of(workload, Cluster(nodes, cluster.ring_costs), inside)
            said = [f"network: {about}", f"computation: {workload.trace.about or workload.model}"]
            _advise_rounds(console, loop, workload.model, said, json_file)
        return
    known = ARCHITECTURES.get(model) if trace is None else None
    recipe = _chosen_recipe(optimizer or ("adamw" if known is None else known[0].optimizer))
    with ended_by_interrupt(console, "interrupted: nothing was written"):
        with as_bad_parameter_of_costs():
            schemes = [one for one in advice.SCHEMES if gradients != "float16" or not one.compresses]
            found = advice.advise(
                workload, cluster, chosen, optimizer=recipe.optimizer, steps=steps, density=density, schemes=schemes
            )
        if gradients == "float16":
            found = replace(found, cautions=(*found.cautions, _FLOAT16))
        if trace is not None and not is_given(context, "device"):
            found = replace(found, cautions=(*found.cautions, _DEVICE_ASSUMED.format(device)))
        if known is not None and accumulate is None and samples is not None and samples >= _MANY * known[1]:
            found = replace(found, cautions=(*found.cautions, _ONE_PASS.format(samples, known[1])))
        if tuning is not None and len(tuning.place.hosts) > 1:
            ratio = tuning.costs.beta_exchange_s_per_byte / (tuning.costs.beta_s_per_byte or math.inf)
            if ratio > _BOTH_WAYS:
                found = replace(found, cautions=(*found.cautions, _BUSY.format(ratio)))
        if workload.trace.samples is None and known is None and samples is None:
            found = replace(found, cautions=(*found.cautions, _NO_SAMPLES))
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
        if gradients != "float32":
            said.append(f"gradients: {gradients}")
        said.append(f"selection and unpacking: {chosen.about}")
        for one in said:
            console.print(one, style="dim", highlight=False, markup=False)
        if json_file is not None:
            result = {**for_json(found), "network": about, "within": within, "device": chosen.about}
            result["gradients"] = gradients
            write_result(console, json_file, result, what="predictions")
        if plot_file is not None:
            where = place if nodes > 1 else "one node"
            title = f"{workload.model}, {ranks:,} ranks, {where}: {found.verdict.partition(':')[0].lower()}"
            with drawn(console, plot_file):
                plot(found, title, plot_file)


@contextlib.contextmanager
def as_bad_parameter_of_costs() -> Iterator[None]:
    """Raises ``BadParameter`` where no time follows from what was given."""
    try:
        yield
    except (ValueError, OverflowError) as error:
        raise typer.BadParameter(
            f"no step can be reckoned from these costs and times ({error}): give smaller ones"
        ) from error


def _chosen_recipe(optimizer: str) -> Recipe:
    try:
        return recipe_of(optimizer)
    except ValueError as error:
        said = str(error).removeprefix("optimizer=")
        raise typer.BadParameter(said, param_hint="--optimizer") from error


def _named_costs(network: str, alpha: float | None, beta: float | None) -> Network:
    with blaming("--network"):
        costs = network_of(network)
    with blaming("--alpha"):
        costs = with_costs(costs, alpha_s=alpha)
    with blaming("--beta"):
        return with_costs(costs, beta_s_per_byte=beta)


def _about_within(cluster: Cluster) -> str | None:
    """What is assumed, or was measured, of the inside of a node, if ranks share one."""
    if cluster.ranks_per_node == 1:
        return None
    return f"{'assumes' if cluster.within is NODE else 'measured:'} {about_costs(cluster.within)}"
