"""Training runs: live bars while they train, a table when they are done, and a plot (needs matplotlib)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from telegrad.tools.demo.results import FIRST_LOSS, RunResult, equal_wall_s
from telegrad.tools.report.durations import duration

_RECENT = 10


class TrainingProgress:
    """A bar per run and, below, the figures of the one that trains; use it in a ``with`` statement.

    Where the output is no terminal, it prints a line at each validation instead.
    """

    def __init__(self, console: Console, names: Sequence[str], steps: int) -> None:
        self._console = console
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
        )
        self._tasks: dict[str, TaskID] = {
            name: self._bars.add_task(name, total=steps, start=False, visible=console.is_terminal) for name in names
        }
        self._figures = Text("", no_wrap=True, overflow="ellipsis")
        self._live = Live(Group(self._bars, self._figures), console=console, refresh_per_second=5)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._figures.plain = ""
        self._live.stop()

    def begin(self, name: str) -> None:
        """The run's ranks are being started."""
        self._bars.start_task(self._tasks[name])
        self._figures.plain = f"{name}: starting ranks"

    def update(self, result: RunResult, kind: str) -> None:
        """A run has sent a message of this kind."""
        figures = figures_of(result)
        self._bars.update(self._tasks[result.name], completed=len(result.steps))
        self._figures.plain = figures
        if kind == "validation" and not self._console.is_terminal:
            self._console.print(f"{result.name}, step {len(result.steps)}: {figures}", soft_wrap=True, highlight=False)

    def finish(self, name: str) -> None:
        """The run is over."""
        self._bars.stop_task(self._tasks[name])


def figures_of(result: RunResult) -> str:
    """The latest figures of a run that goes on: means over its last steps, and the last validation."""
    if not result.steps:
        return "starting training"
    recent = result.steps[-_RECENT:]
    held_out = f" (held out {result.validation_loss:.3f})" if result.validations else ""
    return (
        f"loss {result.smoothed_loss():.3f}{held_out} · "
        f"step {statistics.fmean(step.step_s for step in recent) * 1e3:.0f} ms · "
        f"exposed {statistics.fmean(step.exposed_s for step in recent) * 1e3:.0f} ms · "
        f"{result.steps[-1].sent / 1e6:,.1f} MB sent"
    )


def reference_of(results: Sequence[RunResult]) -> RunResult:
    """The run that the others are compared with: plain DDP if it is among them, else the first."""
    return next((result for result in results if result.name == "ddp-gloo"), results[0])


def table_of(results: Sequence[RunResult], title: str) -> Table:
    """A column per run; in brackets the ratio to plain DDP."""
    reference, at_s = reference_of(results), equal_wall_s(results)
    table = Table(title=title, title_justify="left", header_style="bold")
    table.add_column("")
    for result in results:
        table.add_column(result.name, justify="right", no_wrap=True)

    def row(name: str, figure: Callable[[RunResult], float], text: Callable[[float], str], *, inverse: bool) -> None:
        cells = []
        for result in results:
            cell = text(figure(result))
            if result is not reference and figure(reference) > 0 and figure(result) > 0:
                ratio = figure(result) / figure(reference)
                cell += f" (1/{1 / ratio:.1f})" if inverse else f" ({ratio:.2f}x)"
            cells.append(cell)
        table.add_row(name, *cells)

    def nats(value: float) -> str:
        return f"{value:.3f}"

    row("held-out loss (nats/byte)", lambda result: result.validation_loss, nats, inverse=False)
    row("bits per byte", lambda result: result.bits_per_byte, nats, inverse=False)
    row(f"held-out loss after {duration(at_s)}", lambda result: result.loss_at(at_s), nats, inverse=False)
    row("training time", lambda result: result.training_s, lambda value: f"{value:.1f} s", inverse=False)
    row("median step", lambda result: result.step_s_median, _milliseconds, inverse=False)
    row("exposed communication", lambda result: result.exposed_s_median, _milliseconds, inverse=False)
    row(
        "sent per rank and step",
        lambda result: result.bytes_per_rank_step,
        lambda value: f"{value / 1e6:.2f} MB",
        inverse=True,
    )
    return table


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms"


_COLOURS = {"ddp-gloo": "#444444", "telegrad-dense": "#1f77b4", "telegrad-sparse": "#d62728"}


def plot(results: Sequence[RunResult], title: str, path: Path) -> None:
    """Writes a PNG with two panels: loss over training time, where a line marks the time at which the fastest run was
    done and dots each run's loss then; and loss over the bytes that one rank has sent.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), layout="constrained")
    FigureCanvasAgg(figure)
    over_time, over_bytes = figure.subplots(1, 2, sharey=True)
    at_s = equal_wall_s(results)
    for result in results:
        colour = _COLOURS.get(result.name)
        losses = [one.loss for one in result.validations]
        over_time.plot(
            [0.0, *(one.training_s for one in result.validations)],
            [FIRST_LOSS, *losses],
            marker="o",
            markersize=4,
            color=colour,
            label=f"{result.name}: {result.loss_at(at_s):.3f} at {at_s:.0f} s, {result.validation_loss:.3f} at the end",
        )
        over_time.plot([at_s], [result.loss_at(at_s)], marker="o", markersize=11, fillstyle="none", color=colour)
        over_bytes.plot(
            [one.sent / 1e6 for one in result.validations],
            losses,
            marker="o",
            markersize=4,
            color=colour,
            label=f"{result.name}: {result.bytes_per_rank_step / 1e6:.2f} MB a step",
        )
    over_time.axvline(at_s, color="grey", linestyle=":", linewidth=1)
    over_time.annotate(
        "equal wall time",
        (at_s, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(4, -12),
        textcoords="offset points",
        color="grey",
        fontsize=9,
    )
    over_time.set(xlabel="training time (s)", ylabel="held-out loss (nats per byte)")
    over_bytes.set(xlabel="sent by one rank (MB)")
    seen = [one for result in results for one in result.validations if math.isfinite(one.loss)]
    if seen:  # the fall from the first loss would flatten everything else
        finite = [one.loss for one in seen]
        over_time.set_ylim(0.95 * min(finite), 1.05 * max(finite))
    if any(one.sent > 0 for one in seen):  # a logarithmic axis with nothing on it cannot be drawn
        over_bytes.set_xscale("log")
    for axes in (over_time, over_bytes):
        axes.grid(visible=True, alpha=0.3)
        axes.legend(fontsize=8)
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
