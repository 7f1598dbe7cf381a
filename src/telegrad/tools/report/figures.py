"""Times as text, and the one style of all pictures: fixed colours, names beside lines and bars, panels of curves."""

from __future__ import annotations

import datetime
import math
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


def duration(seconds: float | None) -> str:
    """``18.2 µs``, ``5.40 ms``, ``1.2 s``; a dash for None."""
    if seconds is None:
        return "–"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} µs"
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


# One size, one font, one palette. A page of the site shows a picture 750 pixels wide: 9 points are then 12 pixels high.

WIDTH_INCHES = 8.0
DOTS_PER_INCH = 200
TEXT_POINTS = 9.0
_TITLE_COLUMNS = 90

BLACK, GREY, LIGHT_GREY = "#000000", "#777777", "#CCCCCC"
BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"
COLORS = (BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY, GREY, BLACK)
"""Okabe and Ito's colors, which color-blind readers tell apart, without yellow: it is too pale for a line."""

PART_COLORS = {
    "computing": LIGHT_GREY,
    "communication": BLUE,
    "selecting": ORANGE,
    "adding": GREEN,
    "decompressing": PURPLE,
}
"""What the time of a step or a call is spent on."""

_STYLE: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.labelsize": TEXT_POINTS,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "figure.titlesize": 11,
    "font.size": TEXT_POINTS,
    "grid.alpha": 0.3,
    "legend.fontsize": TEXT_POINTS,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "lines.markersize": 3.5,
    "savefig.dpi": DOTS_PER_INCH,
    "xtick.labelsize": TEXT_POINTS,
    "ytick.labelsize": TEXT_POINTS,
}


@dataclass(frozen=True)
class Look:
    """Of a line: ``dashes`` is one of ``_DASHES``."""

    color: str
    dashes: int = 0
    marker: str = "o"

    def of_line(self) -> dict[str, Any]:
        """Arguments of ``Axes.plot``."""
        return {"color": self.color, "linestyle": _DASHES[self.dashes], "marker": self.marker}


_DASHES: tuple[Any, ...] = ("-", (0, (4, 1.5)), (0, (1, 1.2)), (0, (6, 1.5, 1, 1.5)))
_MARKERS = "osD^vPXh"

_LOOKS = {
    "dense": (BLACK, 0),
    "dense-overlapped": (BLACK, 1),
    "dense_ring": (BLUE, 1),
    "auto": (BLACK, 2),
    "bound": (BLACK, 3),
    "ring": (BLUE, 0),
    "recursive_doubling": (ORANGE, 0),
    "rabenseifner": (GREEN, 0),
    "split_allgather": (VERMILION, 0),
    "split_dense_allgather": (PURPLE, 0),
    "gloo": (GREY, 0),
    "mpich": (SKY, 0),
    "sparse": (VERMILION, 0),
    "topk": (ORANGE, 0),
    "exact": (ORANGE, 0),
    "exact-queued": (ORANGE, 1),
    "topka": (SKY, 0),
    "topkdsa": (GREEN, 0),
    "gtopk": (PURPLE, 0),
    "gaussiank": (VERMILION, 0),
    "oktopk": (BLUE, 0),
    "oktopk-bounded": (BLUE, 1),
    "bounded": (BLUE, 1),
    "oktopk-published": (BLUE, 2),
    "torch.topk": (GREY, 0),
    "reused": (GREEN, 1),
    "reused-threshold": (GREEN, 1),
    "reused-threshold-queued": (GREEN, 2),
    "trimmed": (PURPLE, 1),
    "search": (SKY, 1),
    "threshold-search": (SKY, 1),
    "sampled": (VERMILION, 1),
    "sampled-threshold": (VERMILION, 1),
    "buckets": (GREY, 1),
    "bucket-topk": (GREY, 1),
    "gaussian": (ORANGE, 2),
    "random": (GREY, 2),
    "same-sign": (SKY, 2),
    "steps": (GREEN, 3),
    "falling": (ORANGE, 3),
    "cold": (BLUE, 3),
    "momentum": (PURPLE, 3),
    "unmasked": (VERMILION, 3),
    "cold-momentum": (SKY, 3),
    "bf16": (ORANGE, 0),
    "f16": (GREEN, 0),
    "int8": (BLUE, 0),
    "qsgd8": (SKY, 0),
    "qsgd4": (PURPLE, 2),
    "qsgd2": (VERMILION, 2),
    "e3m0": (PURPLE, 1),
    "codebook2": (VERMILION, 1),
    "packed-f32": (BLACK, 2),
    "wfbp": (SKY, 0),
    "single": (VERMILION, 0),
    "greedy": (ORANGE, 0),
    "optimal": (BLUE, 0),
    "fixed": (GREEN, 0),
}


def _fixed_look(name: str) -> Look | None:
    """Of ``telegrad-ring``, ``oktopk 0.1 %`` and ``bound of int8`` too."""
    if name.startswith("bound of "):
        about = _fixed_look(name.removeprefix("bound of ").partition(",")[0])
        return None if about is None else Look(about.color, _LOOKS["bound"][1], about.marker)
    short = re.sub(r" [\d.]+ %$", "", name.lower()).removeprefix("telegrad").lstrip(" -")
    short = {"ddp-gloo": "gloo"}.get(short, short)
    short = short if short in _LOOKS else short.removesuffix("-dense")
    if short not in _LOOKS:
        return None
    color, dashes = _LOOKS[short]
    return Look(color, dashes, _MARKERS[[*_LOOKS].index(short) % len(_MARKERS)])


def looks_of(names: Sequence[str]) -> dict[str, Look]:
    """A look for each name, no two alike. An algorithm or scheme has the same colour in all pictures, other names have
    what is left, in their order. Of names of several words, such as ``ring, optimal``, the words count that differ
    most."""
    names = list(dict.fromkeys(names))
    words = list(zip(*(name.split(", ") for name in names), strict=False)) or [()]
    place = max(range(len(words)), key=lambda at: len(set(words[at])))
    wanted = {name: _fixed_look(name) or _fixed_look(word) for name, word in zip(names, words[place], strict=True)}
    every = [(color, dashes) for dashes in range(len(_DASHES)) for color in COLORS]
    looks: dict[str, Look] = {}

    def take(name: str, choices: Sequence[tuple[str, int]], marker: str) -> None:
        used = {(one.color, one.dashes) for one in looks.values()}
        color, dashes = next((one for one in choices if one not in used), choices[0])
        looks[name] = Look(color, dashes, marker)

    for is_first in (True, False):  # fixed looks first, then other dashes of a colour that is taken
        for name, look in wanted.items():
            if look is None or name in looks:
                continue
            same = [(look.color, look.dashes)]
            if is_first and (look.color, look.dashes) in {(one.color, one.dashes) for one in looks.values()}:
                continue
            take(name, same if is_first else [one for one in every if one[0] == look.color] + every, look.marker)
    for number, name in enumerate(name for name, look in wanted.items() if look is None):
        take(name, every, _MARKERS[number % len(_MARKERS)])
    return {name: looks[name] for name in names}


def ink_of(color: str) -> str:
    """The colour, dark enough for text on white."""
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    bright = sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), parts, strict=True))
    factor = min(1.0, 0.4 / bright) if bright else 1.0
    return "#" + "".join(f"{round(255 * factor * part):02x}" for part in parts)


def dated(title: str, day: str | None = None) -> str:
    """The title with the day, such as 2026-11-28; by default today."""
    return f"{title}; {day or datetime.datetime.now(datetime.UTC).date().isoformat()}"


# A picture: its axes, and names beside the ends of lines.


@contextmanager
def picture(path: Path, title: str, *, height: float) -> Iterator[Any]:
    """An empty figure of ``height`` inches in the style of all pictures, written to ``path`` at the end. Lines of axes
    that were given to ``name_lines`` get their names. The format is that of the path's suffix; PNG without one."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.rcsetup import cycler

    with matplotlib.rc_context(_STYLE | {"axes.prop_cycle": cycler(color=COLORS)}):
        wrapped = "\n".join(textwrap.wrap(title, _TITLE_COLUMNS))
        figure = Figure(figsize=(WIDTH_INCHES, height + 0.2 * wrapped.count("\n")))
        FigureCanvasAgg(figure)
        figure.set_layout_engine("constrained", h_pad=0.08, w_pad=0.06)
        figure.suptitle(wrapped.replace("$", r"\$"))
        yield figure
        figure.draw_without_rendering()
        _move_names_apart(figure)
        figure.set_layout_engine("none")  # everything has its place: once more would take as long as all the rest
        figure.savefig(path, dpi=DOTS_PER_INCH, format=None if path.suffix else "png")


def grid_of(figure: Any, count: int, across: int) -> list[Any]:
    """``count`` axes, ``across`` in a row."""
    down = max(1, -(-count // across))
    every = list(figure.subplots(down, across, squeeze=False).flat)
    for axes in every[count:]:
        axes.remove()
    return every[:count]


def spread(wanted: Sequence[float], sizes: Sequence[float], low: float, high: float) -> list[float]:
    """Middles of labels along one axis, as close to ``wanted`` as they can be without touching each other.

    ``sizes``: of the labels; all that fit stay between ``low`` and ``high``. Labels that together need more room than
    there is are stacked around the middle of it. The order is that of ``wanted``.
    """
    order = sorted(range(len(wanted)), key=lambda at: wanted[at])
    stacks: list[tuple[list[int], float]] = []  # labels that touch, and where the lowest one begins
    for at in order:
        members, begin = [at], wanted[at] - sizes[at] / 2
        while True:
            height = sum(sizes[one] for one in members)
            begin = max(low, min(begin, high - height)) if height <= high - low else (low + high - height) / 2
            if not stacks or begin >= stacks[-1][1] + sum(sizes[one] for one in stacks[-1][0]):
                break
            members = stacks.pop()[0] + members
            begin, below = 0.0, 0.0  # where the members come to be closest to what they want, on average
            for one in members:
                begin += (wanted[one] - sizes[one] / 2 - below) / len(members)
                below += sizes[one]
        stacks.append((members, begin))
    middles = [0.0] * len(wanted)
    for members, begin in stacks:
        for one in members:
            middles[one] = begin + sizes[one] / 2
            begin += sizes[one]
    return middles


def name_lines(axes: Any) -> None:
    """Names each labelled line of ``axes`` right of its end, in its colour; call it when limits and scales are set.
    ``picture`` moves names apart that would overlap."""
    low, high = sorted(axes.get_xlim())
    bottom, top = sorted(axes.get_ylim())
    for line in axes.get_lines():
        if line.get_label().startswith("_child"):  # as matplotlib calls lines without a label
            continue
        points = [
            (x, y)
            for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)
            if math.isfinite(y) and low <= x <= high and bottom <= y <= top
        ]
        if points:
            name_at(axes, points[-1], str(line.get_label()), line.get_color())


def name_at(axes: Any, point: tuple[float, float], name: str, color: str) -> None:
    """``name`` right of the axes, with a thin line to ``point``."""
    axes.annotate(
        name.replace("$", r"\$"),
        point,
        xytext=(1.04, axes.transAxes.inverted().transform(axes.transData.transform(point))[1]),
        textcoords="axes fraction",
        va="center",
        color=ink_of(color),
        annotation_clip=False,
        gid=_NAME,
        arrowprops={
            "arrowstyle": "-",
            "color": color,
            "linewidth": 0.6,
            "shrinkA": 1,
            "shrinkB": 3,
            "relpos": (0, 0.5),
        },
    )


_NAME = "name of a line"


def names_of(axes: Any) -> list[Any]:
    """The texts that ``name_lines`` has put there."""
    return [text for text in axes.texts if text.get_gid() == _NAME]


def _move_names_apart(figure: Any) -> None:
    renderer = figure.canvas.get_renderer()
    for axes in figure.axes:
        names = names_of(axes)
        box = axes.get_window_extent(renderer)
        heights = [1.02 * _text_height(name, renderer) for name in names]
        wanted = [float(axes.transData.transform(name.xy)[1]) for name in names]
        for name, middle in zip(names, spread(wanted, heights, box.y0, box.y1), strict=True):
            name.set_position((name.get_position()[0], (middle - box.y0) / box.height))


def _text_height(text: Any, renderer: Any) -> float:
    from matplotlib.text import Text

    return float(Text.get_window_extent(text, renderer).height)


def key_of(figure: Any, colors: Mapping[str, str]) -> None:
    """What the colours of bars stand for, below all axes; nothing where there is one colour only."""
    from matplotlib.patches import Patch

    if len(colors) > 1:
        handles = [Patch(color=color, label=name) for name, color in colors.items()]
        figure.legend(handles=handles, loc="outside lower center", ncols=min(len(colors), 5))


def seconds_across(axis: Any, *, logarithmic: bool = True) -> None:
    """Ticks of an axis of seconds as ``10 µs``, ``1 ms``; call it when its limits are set."""
    from matplotlib.ticker import EngFormatter, MaxNLocator

    axis.set_major_formatter(EngFormatter(unit="s"))
    if not logarithmic:
        axis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
        return
    log_ticks(axis)


def log_ticks(axis: Any) -> None:
    """So many ticks of a logarithmic axis that a short one has some too; call it when its limits are set."""
    from matplotlib.ticker import LogLocator, NullFormatter

    low, high = sorted(axis.get_view_interval())
    span = high / low if low > 0 else math.inf
    between = (1.0, 2.0, 5.0) if span < 40 else (1.0, 3.0) if span < 300 else (1.0,)
    axis.set_major_locator(LogLocator(subs=between, numticks=14))
    axis.set_minor_formatter(NullFormatter())


def counts_across(axes: Any, counts: Sequence[float], texts: Sequence[str] | None = None, *, most: int = 8) -> None:
    """A horizontal axis that doubles, with these counts on it: at most ``most``, none close to the next."""
    named = dict(zip(counts, texts or [_text_of_count(count) for count in counts], strict=True))
    every = sorted(named)
    apart = math.log2(every[-1] / every[0]) / most if every and every[0] > 0 else 0.0
    ticks = every[-1:]
    for count in reversed(every[:-1]):
        if math.log2(ticks[0] / count) >= apart:
            ticks.insert(0, count)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [named[tick] for tick in ticks])
    axes.minorticks_off()


def _text_of_count(count: float) -> str:
    for unit, name in ((1 << 30, "Gi"), (1 << 20, "Mi"), (1 << 10, "Ki")):
        if count >= 100_000 and count % unit == 0:
            return f"{count // unit:,} {name}"
    return f"{count:,}"


def bars(
    axes: Any,
    names: Sequence[str],
    parts: Mapping[str, Sequence[float]],
    texts: Sequence[str] | None = None,
    colors: Mapping[str, str] = PART_COLORS,
) -> None:
    """Horizontal bars from top to bottom, each with its name left of it and its text at its end. ``parts``: by their
    names in ``colors``, one length for each bar."""
    ends = [0.0] * len(names)
    places = range(len(names))
    for part, lengths in parts.items():
        axes.barh(places, lengths, left=ends, height=0.75, color=colors[part])
        ends = [end + length for end, length in zip(ends, lengths, strict=True)]
    for place, text in enumerate(texts or ()):
        axes.annotate(text, (ends[place], place), xytext=(3, 0), textcoords="offset points", va="center")
    axes.set_yticks(places, names)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(names) - 0.45, -0.55)
    axes.grid(visible=False, axis="y")
    axes.set_xlim(0, (1.3 if texts else 1.04) * max(ends, default=1.0) or 1.0)


def key_of_marks(figure: Any, marks: Mapping[str, Mapping[str, Any]]) -> None:
    """What lines and markers stand for, below all axes: by name, arguments of ``Axes.plot``."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], label=name, **look) for name, look in marks.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=5)


@dataclass(frozen=True)
class Timeline:
    """A training step. ``segments``: lane (``"processor"`` or ``"network"``), what it does, from, for, in seconds."""

    name: str
    segments: Sequence[tuple[str, str, float, float]]
    step_s: float
    is_chosen: bool = False


SEGMENT_COLORS = {
    "forward": GREY,
    "backward": LIGHT_GREY,
    "selecting": PART_COLORS["selecting"],
    "unpacking": PART_COLORS["decompressing"],
    "on the network": PART_COLORS["communication"],
}
_LONGEST = 4.0  # shortest steps to be shown


def draw_timelines(timelines: Sequence[Timeline], computed_s: float, title: str, path: Path) -> None:
    """The shortest step at the top, the chosen one in bold with a check mark: above, the processor, below, the network.
    Steps of more than four times the shortest are cut off. A dotted line is at ``computed_s``, where a step without
    communication ends. The format is that of the path's suffix; PNG without one."""
    ordered = sorted(timelines, key=lambda one: one.step_s)
    longest_s = min(ordered[-1].step_s, _LONGEST * ordered[0].step_s)
    with picture(path, title, height=1.2 + 0.52 * len(ordered)) as figure:
        axes = figure.subplots()
        for place, one in enumerate(ordered):
            for lane, what, start_s, length_s in one.segments:
                for_s = min(length_s, longest_s - start_s)
                if for_s > 0:
                    bottom = place - 0.4 if lane == "processor" else place + 0.02
                    edge = {"edgecolor": "white", "linewidth": 0.3} if lane == "network" else {"linewidth": 0.0}
                    axes.broken_barh([(start_s, for_s)], (bottom, 0.38), facecolor=SEGMENT_COLORS[what], **edge)
            axes.annotate(
                duration(one.step_s) + (" →" if one.step_s > longest_s else ""),
                (min(one.step_s, longest_s), place + 0.21),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                weight="bold" if one.is_chosen else "normal",
            )
        axes.set_yticks(
            [place + shift for place in range(len(ordered)) for shift in (-0.21, 0.21)],
            [text for one in ordered for text in (f"{one.name}{'  ✓' if one.is_chosen else ''}: processor", "network")],
        )
        for label, one in zip(axes.get_yticklabels()[::2], ordered, strict=True):
            label.set_weight("bold" if one.is_chosen else "normal")
        axes.tick_params(axis="y", length=0)
        axes.set(xlabel="time from the start of the step", xlim=(0, longest_s * 1.12))
        axes.set_ylim(len(ordered) - 0.45, -0.55)
        seconds_across(axes.xaxis, logarithmic=False)
        axes.grid(visible=False, axis="y")
        axes.axvline(computed_s, color=BLACK, linestyle=":", linewidth=1)
        shown = {what for one in ordered for _, what, _, _ in one.segments}
        key_of(figure, {what: color for what, color in SEGMENT_COLORS.items() if what in shown})


# Times against what differs between them, on logarithmic axes: a panel for each thing, a curve for each contender.

_WIDE_NAME = 16  # characters; with longer ones a panel needs the whole width
_PANEL_INCHES = 2.9
_APART = 0.008  # of the height of a panel: about the width of a line


@dataclass(frozen=True)
class Panel:
    """``curves``: by name, points (x, seconds); ``levels``: seconds that do not depend on x; ``base``: that of the
    horizontal axis."""

    across: str
    about: str
    curves: Mapping[str, Sequence[tuple[float, float]]]
    levels: Mapping[str, float] = field(default_factory=dict)
    base: int = 10


Curves = Mapping[str, Sequence[tuple[float, float]]]


def merged(curves: Curves, *, logarithmic: bool = True) -> dict[tuple[str, ...], list[tuple[float, float]]]:
    """Curves that lie on each other, nowhere further apart than a line is wide, as one with all their names."""

    def height(value: float) -> float:
        return math.log(value) if logarithmic and value > 0 else value

    heights = [height(y) for points in curves.values() for _, y in points]
    apart = _APART * ((max(heights) - min(heights)) if heights else 0.0)
    found: dict[tuple[str, ...], list[tuple[float, float]]] = {}
    for name, unsorted in curves.items():
        points = sorted(unsorted)
        for names, others in found.items():
            alike = [x for x, _ in points] == [x for x, _ in others] and points
            if alike and all(
                abs(height(a) - height(b)) <= apart for (_, a), (_, b) in zip(points, others, strict=True)
            ):
                found[*names, name] = found.pop(names)
                break
        else:
            found[name,] = points
    return found


def draw(panels: Sequence[Panel], title: str, path: Path, *, seconds: str = "time") -> None:
    """All panels into one picture, each curve with its name at its end and in the same colour in all of them.
    ``seconds``: what the vertical axis says. The format is that of the path's suffix; PNG without one."""
    names = list(dict.fromkeys(name for panel in panels for name in (*panel.curves, *panel.levels)))
    across = 1 if any(len(name) > _WIDE_NAME for name in names) else min(2, max(1, len(panels)))
    down = max(1, -(-len(panels) // across))
    with picture(path, title, height=0.6 + max(_PANEL_INCHES, 0.16 * len(names) + 0.6) * down) as figure:
        looks = looks_of(names)
        for panel, axes in zip(panels, grid_of(figure, len(panels), across), strict=True):
            _draw_panel(axes, panel, looks, seconds=seconds, most=10 if across == 1 else 4)


def _draw_panel(axes: Any, panel: Panel, looks: Mapping[str, Look], *, seconds: str, most: int) -> None:
    from telegrad.tools.bench.plan import text_of

    places = sorted({x for points in panel.curves.values() for x, _ in points})
    curves = dict(panel.curves) | {
        name: [(x, level_s) for x in (places[0], places[-1])] for name, level_s in panel.levels.items() if places
    }
    logarithmic = any(second > 0 for points in curves.values() for _, second in points)
    for alike, points in merged(curves, logarithmic=logarithmic).items():
        look = looks[alike[0]].of_line() | ({"marker": ""} if alike[0] in panel.levels else {})
        width = 2.4 if alike[0] == "auto" else 1.4
        axes.plot(*zip(*points, strict=True), label=",\n".join(alike), linewidth=width, **look)
    axes.set_yscale("log" if logarithmic else "linear")
    if panel.base == 2 and places:
        texts = [text_of(int(x)) for x in places] if panel.across == "bytes" else None
        counts_across(axes, places, texts, most=most)
    else:
        axes.set_xscale("log", base=panel.base)
    axes.set(xlabel={"bytes": "size of the vector"}.get(panel.across, panel.across), ylabel=seconds, title=panel.about)
    seconds_across(axes.yaxis, logarithmic=logarithmic)
    name_lines(axes)
