"""``telegrad simulate training-step``: whole steps from closed forms, among more and more ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from telegrad.tools.advise.cluster import COLLECTIVES, Cluster
from telegrad.tools.advise.sending import SCHEMES, SELECTING
from telegrad.tools.advise.step import PLANS, StepSweep, Stragglers
from telegrad.tools.cli.console import table_console
from telegrad.tools.cli.interrupts import ended_by_interrupt
from telegrad.tools.cli.options import names_among, refuse_given
from telegrad.tools.cli.outputs import say_file, written
from telegrad.tools.cli.simulate_run import SimulationSettings, failures_said, shared_but, write_json
from telegrad.tools.cli.workload_options import (
    ComputeOption,
    DeviceOption,
    ModelOption,
    SamplesOption,
    TraceOption,
    chosen_device,
    chosen_workload,
)
from telegrad.tools.report.training_step import Row, plot, table_of
from telegrad.tools.sim.networks import Network

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
            _draw(console, rows, title, drawn)


def _draw(console: Any, rows: Sequence[Row], title: str, path: Path) -> None:
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
