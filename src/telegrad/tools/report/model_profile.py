"""How a profiled step looks: its largest and its slowest gradients, and the bytes that are there as time passes."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

from rich.table import Table

from telegrad.synchronizer.trace import Trace
from telegrad.tools.bench.plan import text_of
from telegrad.tools.report.durations import duration

_LABELLED = 5


def summary_of(trace: Trace) -> str:
    """One sentence."""
    return (
        f"{trace.about}: forward pass {duration(trace.forward_s)}, backward pass {duration(trace.backward_s)}, "
        f"{len(trace.names)} gradients, {text_of(trace.bytes)}"
    )


def tables_of(trace: Trace, most: int) -> list[Table]:
    """Two, of at most so many gradients: the largest, and those that the backward pass takes longest for."""
    places = range(len(trace.names))
    largest = sorted(places, key=lambda place: -trace.sizes[place])[:most]
    slowest = sorted(places, key=lambda place: -trace.backward_times[place])[:most]
    return [_table(trace, "largest gradients", largest), _table(trace, "slowest gradients", slowest)]


def _table(trace: Trace, title: str, places: list[int]) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold")
    table.add_column("parameter", overflow="fold")
    for name in ("place", "bytes", "of all", "takes", "of the pass", "there after"):
        table.add_column(name, justify="right", no_wrap=True)
    there = [*accumulate(trace.backward_times)]
    for place in places:
        table.add_row(
            trace.names[place],
            str(place),
            text_of(trace.sizes[place]),
            _share(trace.sizes[place], trace.bytes),
            duration(trace.backward_times[place]),
            _share(trace.backward_times[place], trace.backward_s),
            duration(there[place]),
        )
    return table


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole > 0 else "–"


def plot(trace: Trace, path: Path) -> None:
    """The bytes of the gradients that are there, against the time since the backward pass began; the largest ones are
    named. The format is that of the path's suffix; PNG without one."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    at_ms = [second * 1e3 for second in accumulate(trace.backward_times)]
    held = [size / (1 << 20) for size in accumulate(trace.sizes)]
    axes.step([0.0, *at_ms], [0.0, *held], where="post")
    for place in sorted(range(len(held)), key=lambda place: -trace.sizes[place])[:_LABELLED]:
        axes.annotate(
            trace.names[place],
            (at_ms[place], held[place]),
            xytext=(-4, 3),
            textcoords="offset points",
            ha="right",
            fontsize=8,
        )
    axes.set(
        xlabel="ms since the backward pass began", ylabel="MiB of gradients that are there", title=summary_of(trace)
    )
    axes.grid(visible=True, alpha=0.3)
    figure.savefig(path, dpi=130, format=None if path.suffix else "png")
