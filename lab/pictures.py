"""The pictures of the explanation pages, drawn from the closed forms, the predictions and the Compressor themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import typer

from lab.common.programs import ROOT
from telegrad.compress import Compressor
from telegrad.cost import ALLREDUCE_ALGORITHMS
from telegrad.cost.closed_forms import allreduce
from telegrad.cost.network import ELEMENT_BYTES
from telegrad.tools.advise.advice import Prediction, advise
from telegrad.tools.advise.sending import Cluster
from telegrad.tools.advise.workload import DEVICES, of_model
from telegrad.tools.cli.advise import segments_of
from telegrad.tools.cli.interrupts import ended_by_interrupt
from telegrad.tools.cli.outputs import drawn, table_console
from telegrad.tools.report.figures import duration
from telegrad.tools.sim.measure import network_of

FOLDER = ROOT / "docs" / "pictures"

# Okabe and Ito's colors, which color-blind readers tell apart. Hatches, labels and lightness tell them apart in print.
BLACK, BLUE, ORANGE, SKY, VERMILION = "#000000", "#0072B2", "#E69F00", "#56B4E9", "#D55E00"
DARK, LIGHT, PALE = "#777777", "#D0D0D0", "#CFE6F5"
WIDTH_INCHES = 7.2  # of a page of the site
STYLE: dict[Any, Any] = {
    "axes.labelsize": 10,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 11,
    "font.size": 10,
    "hatch.linewidth": 0.6,
    "legend.fontsize": 9.5,
    "svg.fonttype": "path",  # looks the same whatever fonts the reader has
    "svg.hashsalt": "telegrad",  # the same bytes each time
    "xtick.labelsize": 9.5,
    "ytick.labelsize": 9.5,
}


# The path of a gradient.


@dataclass(frozen=True)
class Stage:
    """``files``: the sources that do it, from the root of the tree; none where torch does."""

    name: str
    about: str
    files: tuple[str, ...] = ()


PATH = (
    Stage("backward pass", "torch computes gradients"),
    Stage(
        "bucket or group",
        "gradients that travel together",
        ("src/telegrad/ddp/hook.py", "src/telegrad/synchronizer/gradient_group.py"),
    ),
    Stage(
        "compress",
        "add the residual, select, pack",
        ("src/telegrad/compress/compressor.py", "src/telegrad/kernels/select/"),
    ),
    Stage("collective", "add over all ranks", ("core/collectives/", "core/progress/engine.cpp")),
    Stage(
        "expand",
        "write averages into the bucket",
        ("core/kernels/scatter.cpp", "src/telegrad/ddp/exchange.py"),
    ),
    Stage("optimizer step", "torch changes the parameters"),
)


def draw_path(pyplot: Any) -> Any:
    """The stages from top to bottom, what each talks to, and its files."""
    figure, axes = pyplot.subplots(figsize=(WIDTH_INCHES, 5.36))
    figure.subplots_adjust(0.01, 0.01, 0.99, 0.99)
    axes.set(xlim=(0, WIDTH_INCHES), ylim=(0.33, 5.69))
    axes.axis("off")
    left, wide, high, every = 0.05, 2.45, 0.62, 0.92
    side_left, side_wide, files_left = 3.1, 1.3, 4.6

    def box(x: float, y: float, width: float, text: str, **look: Any) -> None:
        axes.add_patch(pyplot.Rectangle((x, y), width, high, linewidth=1.2, **look))
        axes.text(x + width / 2, y + high / 2, text, ha="center", va="center", linespacing=1.35)

    def arrow(begin: tuple[float, float], end: tuple[float, float], style: str = "-|>") -> None:
        axes.annotate("", end, begin, arrowprops={"arrowstyle": style, "color": BLACK, "shrinkA": 0, "shrinkB": 0})

    bottoms = {}
    for place, stage in enumerate(PATH):
        bottom = bottoms[stage.name] = 5.0 - place * every
        face = PALE if stage.files else "#EEEEEE"
        box(left, bottom, wide, f"{stage.name}\n{stage.about}", facecolor=face, edgecolor=BLACK)
        if place:
            arrow((left + wide / 2, bottom + every), (left + wide / 2, bottom + high))
        text = "\n".join(one.removeprefix("src/telegrad/") for one in stage.files) or "torch"
        axes.text(files_left, bottom + high / 2, text, va="center", family="monospace", fontsize=9, linespacing=1.5)
    for name, text in (("compress", "residual\nof this rank"), ("collective", "the other\nranks")):
        bottom = bottoms[name]
        box(side_left, bottom, side_wide, text, facecolor="white", edgecolor=BLACK, linestyle="--")
        arrow((left + wide, bottom + high / 2), (side_left, bottom + high / 2), "<|-|>")
    return figure


# A step's timeline.

MODEL, NODES, NETWORK, DENSITY, DEVICE = "resnet50", 8, "10gbit", 0.01, "v100"
SCHEMES = ("ddp", "topk")
_LOOKS: dict[str, dict[str, Any]] = {
    "forward": {"facecolor": "white", "edgecolor": DARK, "hatch": r"\\\\"},
    "backward": {"facecolor": LIGHT, "edgecolor": LIGHT},
    "selecting": {"facecolor": VERMILION, "edgecolor": VERMILION},
    "unpacking": {"facecolor": BLACK, "edgecolor": BLACK},
    "on the network": {"facecolor": SKY, "edgecolor": BLUE, "hatch": "///"},
}


def predictions() -> list[Prediction]:
    """The steps with and without compression, as ``telegrad advise`` predicts them."""
    device = DEVICES[DEVICE]
    found = advise(of_model(MODEL, device), Cluster(NODES, network_of(NETWORK).costs), device, density=DENSITY)
    return [found.of(name) for name in SCHEMES]


def draw_timelines(pyplot: Any) -> Any:
    """A pair of axes with one scale of time: the processor above, the network below."""
    from matplotlib.patches import Patch

    found = predictions()
    longest_ms = max(one.step.step_s for one in found) * 1e3
    names = {
        "ddp": "all values (compress=None)",
        "topk": f"the largest {DENSITY * 100:g} % of each gradient (TopK({DENSITY:g}))",
    }
    figure, every = pyplot.subplots(
        len(found), 1, sharex=True, figsize=(WIDTH_INCHES, 4.1), layout="constrained", squeeze=False
    )
    shown = set()
    for axes, one in zip(every[:, 0], found, strict=True):
        step = one.step
        for lane, what, start_s, length_s in segments_of(step):
            shown.add(what)
            axes.broken_barh(
                [(start_s * 1e3, length_s * 1e3)],
                (0.55 if lane == "processor" else 0.05, 0.4),
                linewidth=0.8,
                **_LOOKS[what],
            )
        end_ms, computed_ms = step.step_s * 1e3, (step.step_s - step.exposed_s) * 1e3
        axes.axvline(computed_ms, color=BLACK, linestyle=":", linewidth=1.2)
        axes.annotate(
            "",
            (end_ms, 1.08),
            (computed_ms, 1.08),
            arrowprops={"arrowstyle": "|-|, widthA=.3, widthB=.3", "shrinkA": 0, "shrinkB": 0},
        )
        axes.text(computed_ms + 2, 1.13, f"exposed: {duration(step.exposed_s)}", va="bottom")
        axes.set_title(f"{names[one.scheme.name]}: {duration(step.step_s)}", loc="left", pad=16)
        axes.set(ylim=(0, 1.2), xlim=(0, longest_ms * 1.04))
        axes.set_yticks([0.75, 0.25], ["processor", "network"])
        axes.tick_params(axis="y", length=0)
    every[-1, 0].set_xlabel("ms from the start of the step")
    looks = {what: look for what, look in _LOOKS.items() if what in shown}
    figure.legend(
        handles=[Patch(label=what, **look) for what, look in looks.items()],
        loc="outside lower center",
        ncols=len(looks),
        frameon=False,
        handlelength=1.4,
        columnspacing=1.2,
    )
    return figure


# When which allreduce algorithm wins.

MAP_NETWORK = "1gbit"
RANKS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
TIE = 0.01
LEAST_BYTES, MOST_BYTES = 1 << 10, 256 << 20
UNCALIBRATED_RING_BYTES = 128 << 10  # a rank; kRingMessageBytes of core/collectives/dense/choice.cpp


_SIZES_PER_DOUBLING = 16


@dataclass(frozen=True)
class Region:
    """Sizes for which the same ``algorithms`` are the fastest, or take at most ``TIE`` longer, among ``ranks``."""

    ranks: int
    algorithms: tuple[str, ...]
    from_bytes: int
    to_bytes: int


def winners(ranks: int, size: int) -> tuple[str, ...]:
    """The fastest dense allreduce of ``size`` bytes by the closed forms, and those that take at most ``TIE`` longer."""
    costs = network_of(MAP_NETWORK).costs
    times_s = {name: allreduce(name, ranks, size, costs).time_s for name in ALLREDUCE_ALGORITHMS}
    return tuple(name for name, time_s in times_s.items() if time_s <= (1 + TIE) * min(times_s.values()))


def regions() -> Iterator[Region]:
    """All of the map, by ranks and size."""
    steps = (MOST_BYTES // LEAST_BYTES).bit_length() - 1
    sizes = [
        round(LEAST_BYTES * 2 ** (step / _SIZES_PER_DOUBLING) / ELEMENT_BYTES) * ELEMENT_BYTES
        for step in range(steps * _SIZES_PER_DOUBLING + 1)
    ]
    for ranks in RANKS:
        begin, algorithms = sizes[0], winners(ranks, sizes[0])
        for size in sizes[1:]:
            here = winners(ranks, size)
            if here != algorithms or size == sizes[-1]:
                yield Region(ranks, algorithms, begin, size)
                begin, algorithms = size, here


def default_ring_bytes() -> list[int]:
    """From which size on telegrad takes the ring where nothing was measured, of all of ``RANKS`` but two ranks, which
    never take it."""
    return [ranks * UNCALIBRATED_RING_BYTES for ranks in RANKS if ranks > 2]


def _map_look(algorithms: tuple[str, ...]) -> dict[str, Any]:
    """Orange: recursive doubling, maybe beside others; light and dark blue: one; hatched: both of these."""
    if {"rabenseifner", "ring"} == set(algorithms):
        return {"facecolor": PALE, "edgecolor": BLUE, "hatch": "///", "linewidth": 0}
    color = {"recursive_doubling": ORANGE, "rabenseifner": PALE, "ring": BLUE}[algorithms[0]]
    return {"facecolor": color, "edgecolor": color, "linewidth": 0.5}


def draw_map(pyplot: Any) -> Any:
    """A column for each number of ranks, as high as its sizes."""
    from matplotlib.patches import Patch

    figure, axes = pyplot.subplots(figsize=(WIDTH_INCHES, 4.9), layout="constrained")
    for region in regions():
        axes.bar(
            RANKS.index(region.ranks),
            region.to_bytes - region.from_bytes,
            bottom=region.from_bytes,
            width=1.0,
            **_map_look(region.algorithms),
        )
    edges = np.arange(len(RANKS) + 1) - 0.5
    axes.stairs(default_ring_bytes(), edges[1:], baseline=None, color=BLACK, linestyle="--", linewidth=1.8)
    axes.set_yscale("log", base=2)
    kib = [1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144]
    axes.set_yticks([one << 10 for one in kib], [f"{k} KiB" if k < 1024 else f"{k >> 10} MiB" for k in kib])
    axes.minorticks_off()
    axes.set_xticks(range(len(RANKS)), [f"{ranks}" for ranks in RANKS])
    axes.set(
        xlim=(-0.5, len(RANKS) - 0.5),
        ylim=(LEAST_BYTES, MOST_BYTES),
        xlabel="ranks",
        ylabel="size of the vector",
        title="the fastest dense allreduce at 1 Gbit/s, by the closed forms",
    )
    ring, doubling, halving = ("ring",), ("recursive_doubling",), ("rabenseifner",)
    shown = {ring: "ring", doubling: "recursive doubling", halving: "Rabenseifner", halving + ring: "both within 1 %"}
    handles = [Patch(**_map_look(algorithms), label=label) for algorithms, label in shown.items()]
    line = pyplot.Line2D([], [], color=BLACK, linestyle="--", linewidth=1.8, label="default: ring above")
    figure.legend(
        handles=[*handles[1:3], handles[0], handles[3], line],
        loc="outside lower center",
        ncols=5,
        frameon=False,
        handlelength=1.6,
        handletextpad=0.5,
        columnspacing=1.0,
    )
    return figure


# The life of a residual.

ENTRIES, SENT_ENTRIES, STEPS, WATCHED = 16, 2, 40, 5
_SEED = 3

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class ResidualLife:
    """One entry by step: its ``gradient``, ``sent`` value (0: not sent) and ``residual`` after the step; ``least``:
    the smallest magnitude that any entry sent."""

    gradient: Floats
    sent: Floats
    residual: Floats
    least: Floats


def residual_life() -> ResidualLife:
    """Gradient, residual and sent value of each entry, as the Compressor gives them. Means and noise differ."""
    generator = np.random.default_rng(_SEED)
    means = generator.normal(0, 0.4, ENTRIES)
    means[WATCHED] = 0.2
    gradients = (means + generator.normal(0, 0.3, (STEPS, ENTRIES))).astype(np.float32)
    compressor = Compressor({"weight": ENTRIES}, density=SENT_ENTRIES / ENTRIES, selection="topk")
    parts = [compressor.part("weight", 0)]
    capacity = compressor.capacity(parts)
    indices, values = np.empty(capacity, np.uint32), np.empty(capacity, np.float32)
    life = ResidualLife(gradients[:, WATCHED].copy(), *(np.zeros(STEPS, np.float32) for _ in range(3)))
    for step, gradient in enumerate(gradients):
        count = compressor.compress(parts, gradient.copy(), indices, values)
        life.sent[step] = values[:count][indices[:count] == WATCHED].sum()
        life.least[step] = np.abs(values[:count]).min()
        life.residual[step] = parts[0].entry.values[WATCHED]
    return life


def draw_residual(pyplot: Any) -> Any:
    """Gradient, residual with the values that are sent, and both sums so far."""
    life = residual_life()
    steps = np.arange(1, STEPS + 1)
    sent = life.sent != 0
    figure, (above, middle, below) = pyplot.subplots(
        3, 1, sharex=True, figsize=(WIDTH_INCHES, 6.2), layout="constrained", height_ratios=(1, 1.5, 1.5)
    )
    above.bar(steps, life.gradient, color=DARK, width=0.7)
    above.axhline(0, color=BLACK, linewidth=0.8)
    above.set_title(f"the gradient of one entry of {ENTRIES}", loc="left")

    middle.plot(steps, life.least, color=BLACK, linestyle=":", label="smallest magnitude sent by any entry")
    middle.bar(steps, life.residual, color=SKY, edgecolor=BLUE, width=0.7, label="residual after the step")
    middle.bar(steps[sent], life.sent[sent], color="white", edgecolor=VERMILION, hatch="////", width=0.7, label="sent")
    middle.axhline(0, color=BLACK, linewidth=0.8)
    middle.set_title(f"its residual; {SENT_ENTRIES} of {ENTRIES} entries are sent in each step", loc="left")

    below.step(steps, np.cumsum(life.gradient), where="mid", color=BLACK, linewidth=1.2, label="sum of its gradients")
    below.step(steps, np.cumsum(life.sent), where="mid", color=VERMILION, linewidth=2, label="sum of sent values")
    below.fill_between(
        steps,
        np.cumsum(life.sent),
        np.cumsum(life.gradient),
        step="mid",
        color=SKY,
        alpha=0.6,
        label="difference: the residual",
    )
    below.set_title("sums over all steps so far", loc="left")
    below.set_xlabel("step")
    below.legend(loc="upper left", frameon=False)
    middle.legend(loc="upper left", frameon=False, ncols=3, borderaxespad=0.0, columnspacing=1.4)
    middle.set(ylim=(0, 1.3 * float(max(life.least.max(), life.sent.max()))), xlim=(0.3, STEPS + 0.7))
    return figure


# All of them.

PICTURES: dict[str, Callable[[Any], Any]] = {
    "gradient-path.svg": draw_path,
    "step-timeline.svg": draw_timelines,
    "allreduce-map.svg": draw_map,
    "residual-life.svg": draw_residual,
}
"""By the names of their files."""


def draw(name: str, folder: Path) -> None:
    """Writes one of ``PICTURES`` into ``folder``; the same bytes whenever it is called with the same matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context(STYLE):
        figure = PICTURES[name](pyplot)
        figure.savefig(folder / name, metadata={"Date": None}, facecolor="white")
        pyplot.close(figure)


def command(
    folder: Annotated[
        Path, typer.Option(file_okay=False, exists=True, writable=True, help="Where the pictures are written.")
    ] = FOLDER,
) -> None:
    """Draw the pictures of the explanation pages, as SVG files.

    [bold]Example:[/] python -m lab pictures --folder docs/pictures
    """
    console = table_console()
    with ended_by_interrupt(console, "interrupted: some pictures were not drawn"):
        for name in PICTURES:
            with drawn(console, folder / name):
                draw(name, folder)
