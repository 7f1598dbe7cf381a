"""Training steps as five papers predict or measure them, from closed forms: which machine, model and schemes.

What the papers do not publish is a free number here, stated in ``FREE_NUMBERS`` with where it comes from.
"""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from lab.common.architectures import architecture
from lab.common.literature import PAPER_NETWORKS, dense, rgc, sum_cost
from telegrad.cost.network import Costs
from telegrad.cost.send_method import SendMethod
from telegrad.synchronizer.trace import Trace
from telegrad.tools.advise.architectures import Architecture, Parameter
from telegrad.tools.advise.sending import Cluster, PhasedWay, sparse
from telegrad.tools.advise.sending import dense as sum_of
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
MG_WFBP_SAMPLES = {"resnet152": 128, "densenet161": 64, "densenet201": 64, "inception-v4": 128}
HALF_SPEED = 2.0

SIERRA = Costs(alpha_s=1.5e-6, beta_s_per_byte=5e-11)
SIERRA_FIXED_S, SIERRA_SAMPLE_S = 4e-3, 2.4e-3
HOST_FIXED_S = 60e-6
HOST = Costs(alpha_s=12e-6, beta_s_per_byte=1.6e-10)

PIZ_DAINT = Costs(alpha_s=2e-5, beta_s_per_byte=5e-10)
PIZ_DAINT_DEVICE = DEVICES["p100"]
REDSYNC_SAMPLES = {"vgg16": 32, "alexnet": 32, "resnet50": 32, "lstm": 5}
REDSYNC_4_SAMPLES = {"lstm": 5, "lstm-wiki2": 5, "vgg16-cifar": 64}
TITAN_V = Device("titan-v", 14.9e12 / 2, 652.8e9 * 2 / 3)
RADIX_SELECT_TIMES = 38.13  # of what trimmed top-k takes: RedSync's Figure 1
REDSYNC_DENSITY = 0.001
REDSYNC_SMALL_BYTES = 128 << 10
VGG_SPEED = 2.0
FUSION_BYTES, FUSION_S = 64 << 20, 5e-3
SEARCH_BYTES, SEARCH_EVERY = 44, 5

SPEECH_HOURS, SPEECH_PASSES, SPEECH_BATCH, SPEECH_DENSE_DAYS = 30_000, 6, 512, 14
SPEECH_SAMPLE_S = 10  # of an utterance

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
    FreeNumber("mg-wfbp-9", "step of a V100", "half of 15.7 Tflop/s", "assumed; mini-batches of Table 4"),
    FreeNumber("mg-wfbp-9", "half precision: computation, gradients", "2x as fast, 2 bytes", "assumed"),
    FreeNumber(
        "mg-wfbp-9", "α, β of V100/10GbE and V100/56GbIB", "30.3 µs, 0.395 ns/B; 7.87 µs, 0.217 ns/B", "paper, Figure 4"
    ),
    FreeNumber(
        "sparcml-4, -5", "step of a P100", "half of 9.3 Tflop/s", "assumed; 16 images or sentences, 8 of ImageNet"
    ),
    FreeNumber("sparcml-4, -5", "α, β of Piz Daint", "20 µs, 0.5 ns/B", "assumed: RedSync's fit of the same machine"),
    FreeNumber("sparcml-4", "LSTM of ATIS", "4 cells of 5 million, 11 words", "assumed; 20 million in all (§8.3)"),
    FreeNumber("sparcml-6", "computation of a V100", "0.30 s an utterance", "fitted to 14 days on 16 GPUs, all of it"),
    FreeNumber("sparcml-6", "utterances, layers", "10 s each, six", "assumed; 30,000 hours, 60 million parameters"),
    FreeNumber(
        "sparcml-6", "between nodes; inside", "7.87 µs, 0.217 ns/B; 0.5 µs, 0.04 ns/B", "assumed: MG-WFBP's 56GbIB"
    ),
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
    FreeNumber("redsync-3, -4", "step of a TITAN V", "half of 14.9 Tflop/s", "assumed; 64 small images, 5 sequences"),
    FreeNumber(
        "redsync-3, -4",
        "α, β between eight GPUs of a server",
        "20 µs, 0.5 ns/B",
        "assumed: Piz Daint's, the same software",
    ),
    FreeNumber("redsync-3, -4", "selection by radixSelect", "38.13x of trimmed top-k", "paper, Figure 1"),
    FreeNumber(
        "oktopk-8, -10", "step of a P100", "half of 9.3 Tflop/s", "assumed; 16 images, 2 sequences of 200 frames"
    ),
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


def mg_wfbp_9() -> Iterator[Row]:
    """Figure 9: 16 V100s over 10GbE and over InfiniBand, in float32 and in half precision, whose gradients are half as
    long."""
    for model, samples in MG_WFBP_SAMPLES.items():
        shape = architecture(model)
        alone_s = DEVICES["v100"].compute_s(shape, samples)
        for network in ("v100-10gbe", "v100-56gbib"):
            way = dense(Cluster(16, PAPER_NETWORKS[network]), "ring")
            for precision, compute_s, width in (("float32", alone_s, 4), ("float16", alone_s / HALF_SPEED, 2)):
                trace = trace_of(shape, compute_s, element_bytes=width)
                for plan in ("wfbp", "single", "greedy", "optimal"):
                    step = simulate(trace, planned(trace, plan, way))
                    yield _row("mg-wfbp-9", model, 16, step, plan=plan, scheme=precision, collective=network)


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


def redsync_3() -> Iterator[Row]:
    """Figure 3: CNNs on a server of eight TITAN V, and RGC that selects by radixSelect as well."""
    cnns = {model: samples for model, samples in REDSYNC_SAMPLES.items() if model != "lstm"}
    yield from _redsync("redsync-3", cnns, _doubling(2, 8), TITAN_V, pure=True)


def redsync_4() -> Iterator[Row]:
    """Figure 4: the same of LSTMs, and VGG-16 for small images."""
    yield from _redsync("redsync-4", REDSYNC_4_SAMPLES, _doubling(2, 8), TITAN_V, pure=True)


def redsync_5() -> Iterator[Row]:
    """Figures 5 and 6: RedSync on Piz Daint, dense, RGC and quantised RGC, 2 to 128 ranks."""
    yield from _redsync("redsync-5", REDSYNC_SAMPLES, _doubling(2, 128), PIZ_DAINT_DEVICE)


def _redsync(
    figure: str, models: Mapping[str, int], ranks: Sequence[int], device: Device, *, pure: bool = False
) -> Iterator[Row]:
    """``models``: with the samples of a rank. ``pure``: also RGC that selects by radixSelect."""
    for model, samples in models.items():
        recurs = model.startswith("lstm")
        shape = tied_lstm(model) if recurs else architecture(model)
        compute_s = device.compute_s(shape, samples) / (VGG_SPEED if model.startswith("vgg16") else 1)
        trace = trace_of(shape, compute_s)
        overlap = not recurs  # which are clipped before, §B
        for count in ranks:
            cluster = Cluster(count, PIZ_DAINT)
            baseline = dense(cluster, "halving-doubling")
            steps = {"dense": simulate(trace, fused(trace, baseline), overlap=overlap)}
            ways = [redsync_way(cluster, device, sampled=recurs, quantised=quantised) for quantised in (False, True)]
            if pure:
                slow = rgc(cluster, device, REDSYNC_DENSITY, element_bytes=RADIX_SELECT_TIMES * EXACT_BYTES)
                ways.append(replace(slow, name="rgc-pure"))
            for way in ways:
                steps[way.name] = simulate(trace, redsync_groups(trace, way, baseline), overlap=overlap)
            for scheme, step in steps.items():
                row = _row(figure, model, count, step, plan="fixed" if scheme == "dense" else "by size")
                yield row | {"scheme": scheme, "collective": "halving-doubling", "overlap": overlap}


def tied_lstm(name: str = "lstm") -> Architecture:
    """The LSTM whose output layer has the weights of the embedding, as in RedSync's Table 1 (204 and 344 MB)."""
    shape = architecture(name)
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
    yield from _oktopk("oktopk-12", "bert", trace, _doubling(32, 256), OKTOPK_DENSITY)


def oktopk_8() -> Iterator[Row]:
    """Figure 8 of Ok-Topk: VGG-16 on small images, 16 a rank, with what was fitted to BERT."""
    shape = architecture("vgg16-cifar")
    trace = trace_of(shape, PIZ_DAINT_DEVICE.compute_s(shape, 16))
    yield from _oktopk("oktopk-8", "vgg16-cifar", trace, _doubling(8, 32), 0.02)


def oktopk_10() -> Iterator[Row]:
    """Figure 10 of Ok-Topk: an LSTM on speech, 2 sequences a rank, likewise."""
    trace = trace_of(speech_lstm(), PIZ_DAINT_DEVICE.compute_s(speech_lstm(), 2))
    yield from _oktopk("oktopk-10", "lstm-speech", trace, _doubling(16, 64), 0.02)


def speech_lstm() -> Architecture:
    """As many parameters as the paper's Table 2 has, in four layers alike, each used in 200 steps (assumed)."""
    layers = tuple(Parameter(f"lstm{layer}", 6_892_392, 200 * 6_892_392) for layer in range(4))
    return Architecture("lstm-speech", "sequence of 200 frames", layers)


def _oktopk(figure: str, model: str, trace: Trace, ranks: Sequence[int], density: float) -> Iterator[Row]:
    whole = tuple(range(len(trace.sizes)))
    for count in ranks:
        cluster = Cluster(count, PIZ_DAINT)
        summed = _summed_on_host(cluster)
        steps = {
            "dense": simulate(trace, [StepGroup(whole, summed)], overlap=False),
            "dense-overlapped": simulate(trace, bucketed(trace, summed, OKTOPK_BUCKET_BYTES)),
        }
        for way in oktopk_ways(cluster, PIZ_DAINT_DEVICE, density):
            steps[way.name] = simulate(trace, [StepGroup(whole, way)], overlap=False)
        for scheme, step in steps.items():
            overlap = scheme == "dense-overlapped"
            yield _row(figure, model, count, step, plan="fixed" if overlap else "single") | {
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


def oktopk_ways(cluster: Cluster, device: Device, density: float) -> list[PhasedWay]:
    """The sparse schemes of Ok-Topk's Table 1. What Python sends message by message takes longer each than what a
    collective of MPI does."""
    ranks, alpha_s, beta = cluster.ranks, cluster.costs.alpha_s, cluster.costs.beta_s_per_byte
    rounds, others = math.log2(ranks), (ranks - 1) / ranks

    def entries_of(size: int) -> float:
        return density * size / 4

    def exact(size: int) -> float:
        return OKTOPK_EXACT_S * size / 4

    def gathered(size: int) -> float:
        return rounds * alpha_s + 8 * entries_of(size) * (ranks - 1) * beta

    def dynamic(size: int) -> float:
        filled = size / 4 * (1 - (1 - density) ** ranks)
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


def sparcml_4() -> Iterator[Row]:
    """§8.3, whose accuracy is Figure 4: ResNet-110 on CIFAR-10 with 16 of 512 entries, and the LSTMs of ATIS with 2, on
    2 to 16 P100s of Piz Daint."""
    yield from _sparcml("sparcml-4", {"resnet110-cifar": architecture("resnet110-cifar")}, 16, 16 / 512, (2, 16))
    yield from _sparcml("sparcml-4", {"lstm-atis": atis_lstm()}, 16, 2 / 512, (2, 16))


def sparcml_5() -> Iterator[Row]:
    """§8.4, whose accuracy is Figure 5: ResNets of four times the channels, 1 of 512 entries, up to 64 P100s."""
    models = {name: architecture(name) for name in ("resnet18-4x", "resnet34-4x")}
    yield from _sparcml("sparcml-5", models, 8, 1 / 512, (4, 64))


def _sparcml(
    figure: str, models: Mapping[str, Architecture], samples: int, density: float, ranks: tuple[int, int]
) -> Iterator[Row]:
    """A message for every layer, dense or of entries, as soon as its gradient is there."""
    for model, shape in models.items():
        trace = trace_of(shape, PIZ_DAINT_DEVICE.compute_s(shape, samples))
        for count in _doubling(*ranks):
            cluster = Cluster(count, PIZ_DAINT)
            for way in (dense(cluster, "cheapest"), sparse(cluster, PIZ_DAINT_DEVICE, density)):
                step = simulate(trace, planned(trace, "wfbp", way))
                yield _row(figure, model, count, step, plan="wfbp", scheme=way.name)


def sparcml_6() -> Iterator[Row]:
    """§8.4, Figure 6b: an LSTM with attention for speech, 4 of 512 entries, 512 samples in all, nodes of four V100.
    ``days``: of six passes over the data."""
    shape = speech_with_attention()
    steps = SPEECH_PASSES * SPEECH_HOURS * 3600 / SPEECH_SAMPLE_S / SPEECH_BATCH
    sample_s = SPEECH_DENSE_DAYS * 86400 * 16 / (steps * SPEECH_BATCH)
    for count in _doubling(16, 128):
        trace = trace_of(shape, sample_s * SPEECH_BATCH / count)
        cluster = Cluster(count, PAPER_NETWORKS["v100-56gbib"], ranks_per_node=4)
        for way in (sum_of(cluster), sparse(cluster, DEVICES["v100"], 4 / 512)):
            step = simulate(trace, planned(trace, "wfbp", way))
            row = _row("sparcml-6", "speech", count, step, plan="wfbp", scheme=way.name)
            yield row | {"days": step.step_s * steps / 86400}


def speech_with_attention() -> Architecture:
    """Six layers (assumed) of 60 million parameters, of which 2.4 million are the attention's."""
    cells = tuple(Parameter(f"cell{cell}", 9_600_000, 9_600_000) for cell in range(6))
    return Architecture("speech", "utterance", (*cells, Parameter("attention", 2_400_000, 2_400_000)))


def atis_lstm() -> Architecture:
    """Two cells to encode and two to decode, of 20 million parameters, on sentences of 11 words (assumed)."""
    layers = tuple(Parameter(f"cell{cell}", 5_000_000, 11 * 5_000_000) for cell in range(4))
    return Architecture("lstm-atis", "sentence of 11 words", layers)


FIGURES: dict[str, Callable[[], Iterator[Row]]] = {
    "sparcml-4": sparcml_4,
    "sparcml-5": sparcml_5,
    "sparcml-6": sparcml_6,
    "mg-wfbp-9": mg_wfbp_9,
    "mg-wfbp-10": mg_wfbp_10,
    "mg-wfbp-11": mg_wfbp_11,
    "mg-wfbp-server": mg_wfbp_server,
    "aluminum-2": aluminum_2,
    "aluminum-7": aluminum_7,
    "aluminum-8": aluminum_8,
    "redsync-3": redsync_3,
    "redsync-4": redsync_4,
    "redsync-5": redsync_5,
    "oktopk-8": oktopk_8,
    "oktopk-10": oktopk_10,
    "oktopk-12": oktopk_12,
}
"""By name. Aluminum's Figure 9 is made of the rows of 8, RedSync's Figure 6 of those of 5."""


# Figures that show no steps.


def aluminum_1() -> Iterator[Row]:
    """Figure 1: how many buffers of AlexNet and ResNet-50 have up to so many bytes, but more than half of them."""
    for model in ("alexnet", "resnet50"):
        sizes = Counter(1 << (4 * one.elements - 1).bit_length() for one in architecture(model).parameters)
        for most in sorted(sizes):
            yield {"figure": "aluminum-1", "model": model, "bytes_most": most, "buffers": sizes[most]}


def aluminum_10() -> Iterator[Row]:
    """Figure 10: up to how many parameters the host-transfer allreduce is faster than the ring."""
    published = {64: 1 << 15, 2048: 1 << 19}
    for ranks in _doubling(8, 2048):
        faster = [one["elements"] for one in aluminum_11() if one["ranks"] == ranks and one["host_s"] < one["ring_s"]]
        yield {"figure": "aluminum-10", "ranks": ranks, "host_up_to": max(faster, default=0)} | {
            "published": published.get(ranks)
        }


def aluminum_11() -> Iterator[Row]:
    """Figure 11: an allreduce of 1 to 2^28 parameters by the ring and by host transfer."""
    for ranks in _doubling(8, 2048):
        for power in range(29):
            ring_s, host_s = (sierra_cost(ranks, name)(4 << power) for name in ("ring", "host"))
            row = {"figure": "aluminum-11", "ranks": ranks, "elements": 1 << power}
            yield row | {"ring_s": ring_s, "host_s": host_s, "ring_over_host": ring_s / host_s}


TABLES: dict[str, Callable[[], Iterator[Row]]] = {
    "aluminum-1": aluminum_1,
    "aluminum-10": aluminum_10,
    "aluminum-11": aluminum_11,
}
"""By name: figures whose rows are no steps."""


def rows_of(figure: str) -> list[Row]:
    """Of a figure. Raises ``ValueError`` for a name that is in neither ``FIGURES`` nor ``TABLES``."""
    every = FIGURES | TABLES
    if figure not in every:
        raise ValueError(f"figure={figure!r} is not known: use one of {', '.join(every)}")
    return list(every[figure]())


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


def plain_table(rows: Sequence[Row]) -> Table:
    """Of rows that are no steps: their keys as columns."""
    title, *columns = rows[0]
    table = Table(title=escape(str(rows[0][title])), title_justify="left", box=SIMPLE_HEAD, padding=0)
    for column in columns:
        table.add_column(column.removesuffix("_s").replace("_", " "), justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(_cell(column, row[column]) for column in columns))
    return table


def _cell(column: str, value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or "–"
    return duration(value) if column.endswith("_s") else f"{value:,}" if isinstance(value, int) else f"{value:.2f}"


def command(
    figure: Annotated[
        str,
        typer.Option(
            help=f"{', '.join(FIGURES | TABLES)}, several with commas, or all. What is fitted: "
            "docs/results/training-step.md."
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
    every = FIGURES | TABLES
    names = among(figure, (*every, "all"), "--figure")
    names = list(every) if "all" in names else names
    of_steps = [name for name in names if name in FIGURES]
    if plot_file is not None and not of_steps:
        raise typer.BadParameter(f"--figure={figure} has no steps, which are drawn: leave it out", param_hint="--plot")
    families = {name.split("-")[0] for name in names}
    numbers = [one for one in FREE_NUMBERS if one.figures.split("-")[0] in families]
    title = f"training steps: {', '.join(of_steps)}"
    with ended_by_interrupt(console, "interrupted: nothing was written"):
        rows = [row for name in names for row in rows_of(name)]
        steps = [row for row in rows if row["figure"] in of_steps]
        if steps:
            console.print(table_of_steps(steps, title))
        for name in names:
            if name in TABLES:
                console.print(plain_table([row for row in rows if row["figure"] == name]))
        for one in numbers:
            said = f"{one.figures}: {one.what}: {one.value} ({one.source})"
            console.print(said, style="dim", highlight=False, markup=False)
        if json_file is not None:
            write_result(console, json_file, {"rows": rows, "free_numbers": [vars(one) for one in numbers]})
        if plot_file is not None:
            with drawn(console, plot_file):
                plot(steps, dated(f"predicted {title}"), plot_file)
