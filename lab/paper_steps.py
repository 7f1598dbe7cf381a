"""Training steps as four papers predict or measure them, from closed forms: which machine, model and schemes.

What the papers do not publish is a free number here, stated in ``FREE_NUMBERS`` with where it comes from.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from lab.common.architectures import architecture
from lab.common.literature import PAPER_NETWORKS, dense, rgc, sum_cost
from telegrad.cost.network import Costs
from telegrad.cost.send_method import SendMethod
from telegrad.synchronizer.trace import Trace
from telegrad.tools.advise.architectures import Architecture, Parameter
from telegrad.tools.advise.sending import Cluster, PhasedWay
from telegrad.tools.advise.step import Row, Step, StepGroup, planned, simulate, times_of
from telegrad.tools.advise.workload import (
    DEVICES,
    EXACT_BYTES,
    REUSED_BYTES,
    Device,
    trace_of,
)
from telegrad.tools.cli.interrupts import ended_by_interrupt
from telegrad.tools.cli.options import among
from telegrad.tools.cli.outputs import check_all_writable, drawn, table_console, write_result
from telegrad.tools.cli.simulate import name_of, panel_title, table_of_steps, varying_of
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

MG_WFBP_COMPUTE_S = {"resnet50": 0.6, "googlenet": 0.25}

SIERRA = Costs(alpha_s=1.5e-6, beta_s_per_byte=5e-11)
SIERRA_FIXED_S, SIERRA_SAMPLE_S = 4e-3, 2.4e-3
HOST_FIXED_S = 60e-6
HOST = Costs(alpha_s=12e-6, beta_s_per_byte=1.6e-10)

PIZ_DAINT = Costs(alpha_s=2e-5, beta_s_per_byte=5e-10)
PIZ_DAINT_DEVICE = DEVICES["p100"]
REDSYNC_SAMPLES = {"vgg16": 32, "alexnet": 32, "resnet50": 32, "lstm": 5}
REDSYNC_DENSITY = 0.001
REDSYNC_SMALL_BYTES = 128 << 10
VGG_SPEED = 2.0
FUSION_BYTES, FUSION_S = 64 << 20, 5e-3
SEARCH_BYTES, SEARCH_EVERY = 44, 5

OKTOPK_COMPUTE_S = 0.377
OKTOPK_MESSAGE_S = 2.88e-4  # of a message that Python sends
OKTOPK_EXACT_S = 5.57e-9  # an element
OKTOPK_SUM_S_PER_BYTE = 1.29e-9
OKTOPK_DENSITY, OKTOPK_EXACT_EVERY = 0.01, 128
OKTOPK_BUCKET_BYTES = 25_000_000
GAUSSIAN_BYTES = 24


@dataclass(frozen=True)
class FreeNumber:
    """``source``: "paper", "fitted" to what the paper says of its figures, or "assumed", in more words."""

    figures: str
    what: str
    value: str
    source: str


FREE_NUMBERS = (
    FreeNumber("mg-wfbp-*", "step of one K80: ResNet-50, GoogleNet", "0.6 s, 0.25 s", "fitted to 1.75x, 1.45x at 64"),
    FreeNumber("mg-wfbp-*", "α, β of K80/10GbE", "32.4 µs, 1.05 ns/B", "paper, Figure 4 (a ring of 16)"),
    FreeNumber("aluminum-*", "step of a V100, b samples", "4 ms + b · 2.4 ms", "fitted to Figures 2 and 7"),
    FreeNumber("aluminum-*", "ring: α, β", "1.5 µs, 0.05 ns/B", "fitted to Figure 2 (12x at 2,048); β is 20 GB/s"),
    FreeNumber(
        "aluminum-8, -9",
        "host transfer: fixed, α, β a round of recursive doubling",
        "60 µs, 12 µs, 0.16 ns/B",
        "fitted to Figures 10 and 11",
    ),
    FreeNumber("redsync-*", "step of a P100", "half of 9.3 Tflop/s", "assumed; 32 images, 5 sequences (Table 1)"),
    FreeNumber("redsync-*", "the same, VGG-16", "9.3 Tflop/s", "fitted: VGG-16 gains; 3x3 convolutions by Winograd"),
    FreeNumber("redsync-*", "memory, starting a kernel", "488 GB/s, 10 µs", "assumed: two thirds of the peak"),
    FreeNumber("redsync-*", "α, β of Piz Daint through Horovod", "20 µs, 0.5 ns/B", "fitted: who gains, who does not"),
    FreeNumber("redsync-*", "Horovod's fusion", "5 ms, 64 MiB", "fitted: ResNet-50 gains nothing; its defaults"),
    FreeNumber("redsync-*", "traffic of trimmed top-k", "36 bytes an element, 10 kernels", "assumed"),
    FreeNumber("redsync-*", "traffic of a threshold search", "44 bytes an element, 10 kernels", "fitted to §3.3, 4"),
    FreeNumber("oktopk-12", "computation and input of an iteration", "377 ms", "fitted: 400,000 took 47 h on 32 GPUs"),
    FreeNumber("oktopk-12", "a message that Python sends", "0.288 ms", "fitted to 76.3 % efficiency from 32 to 256"),
    FreeNumber(
        "oktopk-12", "β, α of MPI's own collectives", "0.5 ns/B, 20 µs", "assumed: RedSync's fit of the same machine"
    ),
    FreeNumber("oktopk-12", "exact top-k of all gradients", "744 ms", "fitted to 12.95x at 256, which is gTopk here"),
    FreeNumber("oktopk-12", "a dense sum, copies and addition on the host", "1.29 ns/B", "fitted: 150 h on 32 GPUs"),
    FreeNumber("oktopk-12", "buckets of DenseOvlp", "25 MB", "assumed, DDP's"),
    FreeNumber("oktopk-12", "traffic of a known threshold, a normal fit", "12, 24 bytes an element", "assumed"),
)


def by_layer(model: Architecture) -> Architecture:
    """With a layer's weight and bias as one tensor, as in Caffe."""
    joined: dict[str, Parameter] = {}
    for one in model.parameters:
        layer = one.name.removesuffix(".weight").removesuffix(".bias")
        before = joined.get(layer, Parameter(layer, 0))
        joined[layer] = Parameter(layer, before.elements + one.elements, before.macs + one.macs)
    return replace(model, parameters=tuple(joined.values()))


def mg_wfbp_10() -> Iterator[Row]:
    """Figure 10: K80 and 10GbE, rings of 4 to 2,048."""
    yield from _mg_wfbp("mg-wfbp-10", _doubling(4, 2048), ("ring",))


def mg_wfbp_11() -> Iterator[Row]:
    """Figure 11: double binary trees of 128 to 2,048, a byte going up and down, and as the paper's Table 2 has them."""
    yield from _mg_wfbp("mg-wfbp-11", _doubling(128, 2048), ("double-binary-trees", "double-binary-trees-published"))


def mg_wfbp_server() -> Iterator[Row]:
    """§4.3: a parameter server beside a ring, push and pull through the server's one port."""
    yield from _mg_wfbp("mg-wfbp-server", _doubling(2, 64), ("ring", "parameter-server"))


def _mg_wfbp(figure: str, ranks: Sequence[int], collectives: Sequence[str]) -> Iterator[Row]:
    for model, compute_s in MG_WFBP_COMPUTE_S.items():
        shape = architecture(model)
        trace = trace_of(by_layer(shape) if model == "googlenet" else shape, compute_s)
        for count in ranks:
            for collective in collectives:
                way = dense(Cluster(count, PAPER_NETWORKS["k80-10gbe"]), collective)
                for plan in ("wfbp", "single", "greedy", "optimal"):
                    step = simulate(trace, planned(trace, plan, way))
                    yield _row(figure, model, count, step, plan=plan, collective=collective)


def aluminum_2() -> Iterator[Row]:
    """Figure 2: ResNet-50 on Sierra, a ring for every buffer, no overlap: strong scaling of 256 samples, weak scaling
    of 32 a rank."""
    yield from _aluminum("aluminum-2", ("ring",), (False,))


def aluminum_7() -> Iterator[Row]:
    """Figure 7: the same with overlap."""
    yield from _aluminum("aluminum-7", ("ring",), (True,))


def aluminum_8() -> Iterator[Row]:
    """Figures 8 and 9: for every buffer the faster of the ring and the host-transfer allreduce, off and on."""
    yield from _aluminum("aluminum-8", ("ring", "minimal"), (False, True))


def _aluminum(figure: str, collectives: Sequence[str], overlaps: Sequence[bool]) -> Iterator[Row]:
    for scaling, ranks in (("strong", _doubling(8, 256)), ("weak", _doubling(8, 2048))):
        for count in ranks:
            samples = 256 / count if scaling == "strong" else 32
            trace = trace_of(without_classifier(), SIERRA_FIXED_S + samples * SIERRA_SAMPLE_S)
            for collective in collectives:
                way = SendMethod("dense", sierra_cost(count, collective))
                for overlap in overlaps:
                    step = simulate(trace, planned(trace, "wfbp", way), overlap=overlap)
                    row = _row(figure, "resnet50", count, step, plan="wfbp", collective=collective, overlap=overlap)
                    alone_s = SIERRA_FIXED_S + samples * count * SIERRA_SAMPLE_S  # with the whole mini-batch
                    more = {"speedup": alone_s / step.step_s} if scaling == "strong" else {}
                    yield row | more | {"scaling": scaling, "samples": samples}


def without_classifier() -> Architecture:
    """ResNet-50 without its last layer, as in Aluminum's benchmark (§II-C)."""
    shape = architecture("resnet50")
    return replace(shape, parameters=tuple(one for one in shape.parameters if not one.name.startswith("fc.")))


def sierra_cost(ranks: int, collective: str) -> Callable[[int], float]:
    """``ring``: NCCL's; ``host``: the host-transfer allreduce, by recursive doubling; ``minimal``: the faster one."""
    ring = sum_cost(Cluster(ranks, SIERRA), "ring")
    doubling = sum_cost(Cluster(ranks, HOST), "recursive-doubling")
    costs: dict[str, Callable[[int], float]] = {
        "ring": ring,
        "host": lambda size: HOST_FIXED_S + doubling(size),
        "minimal": lambda size: min(ring(size), HOST_FIXED_S + doubling(size)),
    }
    return costs[collective]


def redsync_5() -> Iterator[Row]:
    """Figures 5 and 6: RedSync on Piz Daint, dense, RGC and quantised RGC, 2 to 128 ranks."""
    for model, samples in REDSYNC_SAMPLES.items():
        shape = tied_lstm() if model == "lstm" else architecture(model)
        compute_s = PIZ_DAINT_DEVICE.compute_s(shape, samples) / (VGG_SPEED if model == "vgg16" else 1)
        trace = trace_of(shape, compute_s)
        overlap = model != "lstm"  # which is clipped before, §B
        for count in _doubling(2, 128):
            cluster = Cluster(count, PIZ_DAINT)
            baseline = dense(cluster, "halving-doubling")
            steps = {"dense": simulate(trace, fused(trace, baseline), overlap=overlap)}
            for quantised in (False, True):
                way = redsync_way(cluster, PIZ_DAINT_DEVICE, sampled=model == "lstm", quantised=quantised)
                steps[way.name] = simulate(trace, redsync_groups(trace, way, baseline), overlap=overlap)
            for scheme, step in steps.items():
                row = _row("redsync-5", model, count, step, plan="fixed" if scheme == "dense" else "by size")
                yield row | {"scheme": scheme, "collective": "halving-doubling", "overlap": overlap}


def tied_lstm() -> Architecture:
    """The LSTM whose output layer has the weights of the embedding, as in RedSync's Table 1 (204 MB)."""
    shape = architecture("lstm")
    tied = (replace(one, elements=0) if one.name == "output.weight" else one for one in shape.parameters)
    return replace(shape, parameters=tuple(tied))


def redsync_way(cluster: Cluster, device: Device, *, sampled: bool, quantised: bool) -> SendMethod:
    """CNNs take trimmed top-k; the LSTM a threshold search, which is reused for four calls unless it is quantised."""
    traffic: float = EXACT_BYTES
    if sampled:
        traffic = SEARCH_BYTES if quantised else REUSED_BYTES + (SEARCH_BYTES - REUSED_BYTES) / SEARCH_EVERY
    return rgc(cluster, device, REDSYNC_DENSITY, quantised=quantised, element_bytes=traffic)


def redsync_groups(trace: Trace, way: SendMethod, small: SendMethod) -> list[StepGroup]:
    """Tensors of more than 128 KB alone, the others together when the backward pass is over."""
    large = [one for one, size in enumerate(trace.sizes) if size > REDSYNC_SMALL_BYTES]
    others = tuple(one for one, size in enumerate(trace.sizes) if size <= REDSYNC_SMALL_BYTES)
    return [*(StepGroup((one,), way) for one in large), *([StepGroup(others, small)] if others else [])]


def fused(trace: Trace, way: SendMethod) -> list[StepGroup]:
    """Horovod's fusion: what is ready within the same 5 ms leaves together, up to 64 MiB."""
    groups: list[list[int]] = []
    held, began_s, now_s = 0, -FUSION_S, 0.0
    for one, (size, backward_s) in enumerate(zip(trace.sizes, trace.backward_times, strict=True)):
        now_s += backward_s
        if held + size > FUSION_BYTES or now_s >= began_s + FUSION_S or not groups:
            groups.append([])
            held, began_s = 0, now_s
        groups[-1].append(one)
        held += size
    return [StepGroup(tuple(one), way) for one in groups]


def oktopk_12() -> Iterator[Row]:
    """Figure 12 of Ok-Topk: BERT on Piz Daint, weak scaling of 8 sequences a rank, 32 to 256 ranks. Costs are those of
    its Table 1 in entries of 8 bytes; sums fill in as random indices do."""
    trace = trace_of(bert_with_heads(), OKTOPK_COMPUTE_S)
    whole = tuple(range(len(trace.sizes)))
    for count in _doubling(32, 256):
        cluster = Cluster(count, PIZ_DAINT)
        summed = _summed_on_host(cluster)
        steps = {
            "dense": simulate(trace, [StepGroup(whole, summed)], overlap=False),
            "dense-overlapped": simulate(trace, bucketed(trace, summed, OKTOPK_BUCKET_BYTES)),
        }
        for way in oktopk_ways(cluster, PIZ_DAINT_DEVICE):
            steps[way.name] = simulate(trace, [StepGroup(whole, way)], overlap=False)
        for scheme, step in steps.items():
            overlap = scheme == "dense-overlapped"
            yield _row("oktopk-12", "bert", count, step, plan="fixed" if overlap else "single") | {
                "scheme": scheme,
                "overlap": overlap,
            }


def bert_with_heads() -> Architecture:
    """BERT-base with both heads of its pre-training, the output layer with weights of its own: the 133,547,324
    parameters of the paper's Table 2."""
    shape = architecture("bert-base")
    width, vocabulary = 768, 30522
    positions = 128
    heads = (
        Parameter("head.transform.weight", width * width, width * width * positions),
        Parameter("head.transform.bias", width),
        Parameter("head.norm", 2 * width),
        Parameter("head.output.weight", vocabulary * width, vocabulary * width * positions),
        Parameter("head.output.bias", vocabulary),
        Parameter("head.next", 2 * width + 2),
    )
    return replace(shape, parameters=(*shape.parameters, *heads))


def _summed_on_host(cluster: Cluster) -> PhasedWay:
    moved = sum_cost(cluster, "halving-doubling")
    return PhasedWay("dense", lambda size: moved(size) + size * OKTOPK_SUM_S_PER_BYTE)


def bucketed(trace: Trace, way: SendMethod, most_bytes: int) -> list[StepGroup]:
    """Gradients in the order in which they are ready, a bucket being full at so many bytes."""
    groups: list[list[int]] = [[]]
    held = 0
    for one, size in enumerate(trace.sizes):
        if groups[-1] and held + size > most_bytes:
            groups.append([])
            held = 0
        groups[-1].append(one)
        held += size
    return [StepGroup(tuple(one), way) for one in groups]


def oktopk_ways(cluster: Cluster, device: Device) -> list[PhasedWay]:
    """The sparse schemes of Ok-Topk's Table 1. What Python sends message by message takes longer each than what a
    collective of MPI does."""
    ranks, alpha_s, beta = cluster.ranks, cluster.costs.alpha_s, cluster.costs.beta_s_per_byte
    rounds, others = math.log2(ranks), (ranks - 1) / ranks

    def entries_of(size: int) -> float:
        return OKTOPK_DENSITY * size / 4

    def exact(size: int) -> float:
        return OKTOPK_EXACT_S * size / 4

    def gathered(size: int) -> float:
        return rounds * alpha_s + 8 * entries_of(size) * (ranks - 1) * beta

    def dynamic(size: int) -> float:
        filled = size / 4 * (1 - (1 - OKTOPK_DENSITY) ** ranks)
        moved = 8 * entries_of(size) + min(8 * filled, size)
        return (ranks + 2 * rounds) * OKTOPK_MESSAGE_S + moved * others * beta

    def tree(size: int) -> float:
        return rounds * (2 * OKTOPK_MESSAGE_S + 16 * entries_of(size) * beta + exact(size))

    def ok_topk(size: int) -> float:
        return (2 * ranks + 2 * rounds) * OKTOPK_MESSAGE_S + 24 * entries_of(size) * others * beta

    def reused(size: int) -> float:
        return device.select_s(size) + exact(size) / OKTOPK_EXACT_EVERY

    def fitted(size: int) -> float:
        return device.select_s(size, element_bytes=GAUSSIAN_BYTES)

    return [
        PhasedWay("topka", gathered, exact),
        PhasedWay("topkdsa", dynamic, exact),
        PhasedWay("gtopk", tree, exact),
        PhasedWay("gaussiank", gathered, fitted),
        PhasedWay("oktopk", ok_topk, reused),
    ]


FIGURES: dict[str, Callable[[], Iterator[Row]]] = {
    "mg-wfbp-10": mg_wfbp_10,
    "mg-wfbp-11": mg_wfbp_11,
    "mg-wfbp-server": mg_wfbp_server,
    "aluminum-2": aluminum_2,
    "aluminum-7": aluminum_7,
    "aluminum-8": aluminum_8,
    "redsync-5": redsync_5,
    "oktopk-12": oktopk_12,
}
"""By name. Aluminum's Figure 9 is made of the rows of 8, RedSync's Figure 6 of those of 5."""


def rows_of(figure: str) -> list[Row]:
    """Of a figure. Raises ``ValueError`` for a name that is not in ``FIGURES``."""
    if figure not in FIGURES:
        raise ValueError(f"figure={figure!r} is not known: use one of {', '.join(FIGURES)}")
    return list(FIGURES[figure]())


def _row(figure: str, model: str, ranks: int, step: Step, **more: Any) -> Row:
    return {"figure": figure, "model": model, "ranks": ranks, "scheme": "dense", "overlap": True, **more} | times_of(
        step, ranks
    )


def _doubling(least: int, most: int) -> list[int]:
    found = [least]
    while found[-1] < most:
        found.append(found[-1] * 2)
    return found


# Efficiency as curves, with bars of the time's parts.

PHASES = ("computing", "selecting", "decompressing", "exposed communication")
_PHASE_COLORS = PART_COLORS | {"exposed communication": PART_COLORS["communication"]}
_MOST_SHORTEST = 8.0  # shortest steps that a bar shows


def phases_of(row: Row) -> dict[str, float]:
    """Seconds of a step by what its processor does in them; waiting for the network is what is left."""
    busy = {
        "computing": row["step_s"] - row["exposed_s"],
        "selecting": row["select_s"],
        "decompressing": row["decompress_s"],
    }
    return busy | {"exposed communication": max(0.0, row["step_s"] - sum(busy.values()))}


_BARS_ACROSS = 4  # panels of bars over the whole width, at most
_NAME_COLUMNS = 22  # characters above one of so many


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
    """For each model and kind of scaling a panel of efficiency against ranks, and below it, for each curve, bars of
    what the steps consist of. The format is that of the path's suffix; PNG without one."""
    panels: dict[str, list[Row]] = {}
    for row in rows:
        panels.setdefault(panel_title(row), []).append(row)
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


def _draw_efficiencies(axes: Any, curves: Mapping[str, Sequence[Row]], looks: Mapping[str, Look]) -> None:
    points = {
        name: [(row["ranks"], 100 * row["speedup"] / row["ranks"]) for row in own] for name, own in curves.items()
    }
    for alike, line in merged(points, logarithmic=False).items():
        axes.plot(*zip(*line, strict=True), label=",\n".join(alike), **looks[alike[0]].of_line())
    counts_across(axes, sorted({row["ranks"] for own in curves.values() for row in own}), most=12)
    axes.set(xlabel="ranks", ylabel="speed-up / ranks (%)", ylim=(0, 105))
    name_lines(axes)


def _draw_bars(axes: Any, rows: Sequence[Row], ranks: Sequence[int], shortest_s: float) -> None:
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


def command(
    figure: Annotated[
        str,
        typer.Option(
            help=f"{', '.join(FIGURES)}, several with commas, or all. What is fitted: docs/results/training-step.md."
        ),
    ] = "all",
    json_file: Annotated[
        Path | None, typer.Option("--json", dir_okay=False, help="Write all rows and the free numbers here.")
    ] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", dir_okay=False, help="Draw efficiency and phases into this file.")
    ] = None,
) -> None:
    """Predict the training steps of papers' figures, each with its own model, network and ranks.

    Closed forms, as in [bold]telegrad simulate training-step[/]. Below the table: what is fitted or assumed, and from
    where it comes.
    """
    console = table_console()
    check_all_writable({"--json": json_file, "--plot": plot_file})
    names = among(figure, (*FIGURES, "all"), "--figure")
    names = list(FIGURES) if "all" in names else names
    families = {name.split("-")[0] for name in names}
    numbers = [one for one in FREE_NUMBERS if one.figures.split("-")[0] in families]
    title = f"training steps: {', '.join(names)}"
    with ended_by_interrupt(console, "interrupted: nothing was written"):
        rows = [row for name in names for row in rows_of(name)]
        console.print(table_of_steps(rows, title))
        for one in numbers:
            said = f"{one.figures}: {one.what}: {one.value} ({one.source})"
            console.print(said, style="dim", highlight=False, markup=False)
        if json_file is not None:
            write_result(console, json_file, {"rows": rows, "free_numbers": [vars(one) for one in numbers]})
        if plot_file is not None:
            with drawn(console, plot_file):
                plot(rows, dated(f"predicted {title}"), plot_file)
