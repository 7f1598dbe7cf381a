"""How much of a non-blocking allreduce on a GPU is hidden behind kernels.

Three ways, in turn: the sum alone, the kernels alone, and both at once. Times are between points of the device's
streams. All ranks compute at the same time, on the device that they share, in every way that has kernels.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.table import Table

from lab.common.commands import rank_counts
from lab.common.device_job import run_for_rows, tell_rows
from lab.common.device_profile import ProfiledDevice
from lab.common.growing_result import GrowingResult
from telegrad import Communicator
from telegrad.tools.bench.plan import JsonFields, Timing, text_of
from telegrad.tools.cli.options import JobTimeout, RowsFile, byte_sizes, described_gpu
from telegrad.tools.cli.outputs import check_all_writable, counting, drawn, table_console
from telegrad.tools.report.figures import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    dated,
    duration,
    grid_of,
    picture,
    seconds_across,
)

Row = dict[str, Any]

# What is measured

COMMUNICATION, COMPUTATION = "all_reduce", "kernels"
"""Lanes of a timeline."""

HIDDEN = (
    "(communication alone + kernels alone - both at once) / communication alone, of medians of the slowest rank: 1 "
    "where the communication costs nothing, 0 where it takes as long as if it came before the kernels"
)
"""What ``hidden`` means in result files."""


@dataclass(frozen=True)
class OverlapPlan(JsonFields):
    """One number of ranks, which share the device, and all lengths (``sizes``, in bytes) of the vector that is summed
    while kernels multiply matrices of ``matrix`` rows. So many kernels follow a call that they take about ``load``
    times as long as the communication."""

    ranks: int
    sizes: tuple[int, ...]
    matrix: int = 2048
    load: float = 1.3
    samples: int = 11
    network: str = "shm"


@dataclass(frozen=True)
class Sample:
    """One call with kernels behind it, on one rank, in seconds of the device's clock from the call: when the sum was
    there, when each kernel ended, and when the stream had come to what waits for both. ``enqueued_s``: how long the
    host took to put all of it into its streams."""

    communicated_s: float
    kernels_s: list[float]
    both_s: float
    enqueued_s: float

    @property
    def kernels_meanwhile(self) -> int:
        """How many kernels were over before the sum was there."""
        return sum(1 for end_s in self.kernels_s if end_s < self.communicated_s)

    def timeline(self) -> list[tuple[str, float, float]]:
        """Lane, begin and end. A kernel begins when the one before it has ended."""
        begins = [0.0, *self.kernels_s[:-1]]
        kernels = [(COMPUTATION, begin, end) for begin, end in zip(begins, self.kernels_s, strict=True)]
        return [(COMMUNICATION, 0.0, self.communicated_s), *kernels]


def row_of(
    plan: OverlapPlan,
    size: int,
    *,
    communication_s: Sequence[float],
    computation_s: Sequence[float],
    both_s: Sequence[float],
    own: Sequence[Sample],
    wrong: int,
) -> Row:
    """``communication_s``, ``computation_s``, ``both_s``: of the slowest rank, by sample. ``own``: of rank 0."""
    communication, computation, both = (
        Timing.of(list(times)).median_s for times in (communication_s, computation_s, both_s)
    )
    shown = sorted(own, key=lambda one: one.both_s)[len(own) // 2]
    return {
        "op": "overlap",
        "ranks": plan.ranks,
        "network": plan.network,
        "bytes": size,
        "matrix": plan.matrix,
        "kernels": len(shown.kernels_s),
        "communication_median_s": communication,
        "computation_median_s": computation,
        "both_median_s": both,
        "samples": len(both_s),
        "hidden": (communication + computation - both) / communication,
        "kernels_meanwhile": Timing.of([float(one.kernels_meanwhile) for one in own]).median_s,
        "enqueue_median_s": Timing.of([one.enqueued_s for one in own]).median_s,
        "timeline": shown.timeline(),
        "wrong": wrong,
    }


# What each rank runs

TARGET = "lab.overlap:rank_main"
"""What the ranks run."""

_WARM_UP = 3
_TRIED = 4  # kernels, by which one is timed
_FEWEST, _MOST = 8, 512


def run(plan: OverlapPlan, *, timeout_s: float, on_row: Callable[[Row], None]) -> None:
    """Everything that ``plan`` asks for; ``on_row`` gets each row as it comes, and last ``{"op": "trace", ...}``, what
    the profiler saw of rank 0's last way, or why it saw nothing. Raises ``RankFailed``, ``RanksTimedOut``."""
    run_for_rows(TARGET, plan, timeout_s=timeout_s, on_row=on_row)


def rank_main(plan_json: str) -> None:
    """One rank. Rank 0 prints a row as JSON for each size."""
    plan = OverlapPlan.from_json(plan_json)
    tell_rows(lambda communicator, device, tell: measure(plan, communicator, device, tell))


def measure(plan: OverlapPlan, communicator: Communicator, device: ProfiledDevice, tell: Callable[[Row], None]) -> None:
    """What all ranks call; ``tell`` gets rank 0's rows. Raises what an operation fails with."""
    ways: _Ways | None = None
    for size in plan.sizes:
        ways = _Ways(plan, communicator, device, size)
        wrong = ways.verify()
        ways.choose_kernels()
        samples = [ways.sample(number) for number in range(plan.samples)]
        communicator.synchronize()
        if communicator.rank == 0:
            slowest: list[np.ndarray] = [times for times, _ in samples]
            communication, computation, both = (list(map(float, column)) for column in zip(*slowest, strict=True))
            own = [one for _, one in samples]
            row = row_of(
                plan, size, communication_s=communication, computation_s=computation, both_s=both, own=own, wrong=wrong
            )
            tell(row)
    if ways is not None:
        _trace(ways, communicator, tell)


def _trace(ways: _Ways, communicator: Communicator, tell: Callable[[Row], None]) -> None:
    communicator.barrier()
    if communicator.rank != 0:
        ways.both()
        return
    row: Row = {"op": "trace", "ranks": communicator.world_size, "bytes": ways.size}
    try:
        found = ways.device.profiled(ways.both)
        row["intervals"] = [(one.lane, one.begin_s, one.end_s) for one in found]
    except Exception as error:  # a profiler that does not work here takes nothing of what was measured along
        row["missing"] = f"{type(error).__name__}: {error}"
    tell(row)


class _Ways:
    def __init__(self, plan: OverlapPlan, communicator: Communicator, device: ProfiledDevice, size: int) -> None:
        self.device, self.size = device, size
        self._plan, self._communicator = plan, communicator
        self._vector, self._staged = device.empty(size // 4), device.pinned(size // 4)
        squares = [device.empty(plan.matrix**2).view(plan.matrix, plan.matrix) for _ in range(3)]
        self._left, self._right, self._product = squares
        for square in squares:
            square.fill_(1.0 / plan.matrix)
        self._kernels = _TRIED
        self._aside = device.new_stream()

    def verify(self) -> int:
        """Wrong values of sums with kernels behind them, over all ranks; it also warms up."""
        ranks = self._communicator.world_size
        self.computed()  # libraries are loaded before a stream waits for a peer
        for _ in range(_WARM_UP):
            self._staged.fill_(self._communicator.rank + 1.0)
            self._vector.copy_(self._staged, non_blocking=True)
            self.both()
            self._staged.fill_(math.nan)
            self._staged.copy_(self._vector, non_blocking=True)
            self.device.synchronize()
        wrong = int((self._staged != ranks * (ranks + 1) // 2).sum())
        self._vector.fill_(0.0)
        self.device.synchronize()
        return int(self._communicator.all_gather(np.array([wrong], np.int64)).sum())

    def choose_kernels(self) -> None:
        """As many as take ``load`` times as long as the communication; the same on all ranks."""
        tried = np.array([(self.communicated(), self.computed()) for _ in range(_WARM_UP)]).min(axis=0)
        communication_s, computation_s = self._communicator.all_gather(tried).max(axis=0)
        wanted = self._plan.load * communication_s / max(computation_s / self._kernels, 1e-9)
        self._kernels = int(min(max(math.ceil(wanted), _FEWEST), _MOST))

    def sample(self, number: int) -> tuple[Any, Sample]:
        """Seconds of the three ways, of the slowest rank, and this rank's part of the last one."""
        order = np.random.default_rng(number).permutation(3)  # alike on all ranks
        mine, own = np.zeros(3), None
        for index in order:
            self._communicator.barrier()
            if index == 0:
                mine[0] = self.communicated()
            elif index == 1:
                mine[1] = self.computed()
            else:
                own = self.both()
                mine[2] = own.both_s
        assert own is not None
        return self._communicator.all_gather(mine).max(axis=0), own

    def communicated(self) -> float:
        begin = self.device.mark()
        self._reduce().wait()
        end = self.device.mark()
        self.device.synchronize()
        return self.device.seconds(begin, end)

    def computed(self) -> float:
        begin = self.device.mark()
        for _ in range(self._kernels):
            torch.mm(self._left, self._right, out=self._product)
        end = self.device.mark()
        self.device.synchronize()
        return self.device.seconds(begin, end)

    def both(self) -> Sample:
        """The sum is called first, then the kernels; a stream beside them says when the sum was there."""
        device = self.device
        begun_s = time.perf_counter()
        begin = device.mark()
        work = self._reduce()
        with device.on(self._aside):
            work.wait()
            communicated = device.mark()
        kernels = []
        for _ in range(self._kernels):
            torch.mm(self._left, self._right, out=self._product)
            kernels.append(device.mark())
        work.wait()
        end = device.mark()
        enqueued_s = time.perf_counter() - begun_s
        device.synchronize()
        with device.on(self._aside):
            device.synchronize()
        return Sample(
            device.seconds(begin, communicated),
            [device.seconds(begin, one) for one in kernels],
            device.seconds(begin, end),
            enqueued_s,
        )

    def _reduce(self) -> Any:
        return self._communicator.all_reduce(self._vector, async_op=True)


# Table and plot

Bar = tuple[str, float, float]
"""Lane, begin and end in seconds."""

_COLORS = {COMMUNICATION: BLUE, COMPUTATION: GREY}
_OTHERS = (ORANGE, GREEN, PURPLE)


def table_of(rows: Sequence[Row], title: str) -> Table:
    """A line per size."""
    table = Table(title=title, title_justify="left", header_style="bold")
    names = ("size", "all_reduce alone", "kernels alone", "both", "hidden", "kernels meanwhile", "enqueueing", "wrong")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            text_of(row["bytes"]),
            duration(row["communication_median_s"]),
            duration(row["computation_median_s"]),
            duration(row["both_median_s"]),
            f"{row['hidden']:.0%}",
            f"{row['kernels_meanwhile']:.0f} of {row['kernels']}",
            duration(row["enqueue_median_s"]),
            str(row["wrong"]),
        )
    return table


def timelines_of(rows: Sequence[Row]) -> dict[str, list[Bar]]:
    """By title: what rank 0's device did, of each row; and of each trace that is not empty."""
    found: dict[str, list[Bar]] = {}
    for row in rows:
        about = f"{text_of(row['bytes'])}, {row['ranks']} ranks"
        if row["op"] == "overlap":
            found[f"{about}: {row['hidden']:.0%} hidden"] = [tuple(one) for one in row["timeline"]]
        elif row.get("intervals"):
            found[f"{about}, by torch's profiler"] = [tuple(one) for one in row["intervals"]]
    return found


def picture_title(machine: Mapping[str, Any]) -> str:
    """What the picture of rows from this machine shows."""
    return f"a non-blocking all_reduce and kernels called after it, {machine['gpu']}"


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
    """A timeline below the other, a lane for each kind of work. The format is that of the path's suffix."""
    timelines = timelines_of(rows)
    with picture(path, title, height=0.6 + 1.7 * max(1, len(timelines))) as figure:
        for axes, (about, spans) in zip(grid_of(figure, len(timelines), 1), timelines.items(), strict=True):
            lanes = list(dict.fromkeys(lane for lane, _, _ in spans))
            for place, lane in enumerate(lanes):
                own = [(begin, end - begin) for name, begin, end in spans if name == lane]
                color = _COLORS.get(lane, _OTHERS[place % len(_OTHERS)])
                axes.broken_barh(own, (place - 0.4, 0.8), facecolors=color, edgecolors="white", linewidth=0.3)
            axes.set_yticks(range(len(lanes)), lanes)
            axes.set(title=about, xlabel="time since the call")
            seconds_across(axes.xaxis, logarithmic=False)
            axes.invert_yaxis()
            axes.grid(visible=False, axis="y")


# The command


def command(
    ranks: Annotated[str, typer.Option(help="Processes that share the GPU; several numbers: 2,4.")] = "2,4",
    sizes: Annotated[str, typer.Option(help="Lengths of the vector, separated by commas.")] = "4MiB,64MiB,256MiB",
    matrix: Annotated[int, typer.Option(min=1, help="Rows of the matrices that a kernel multiplies.")] = 2048,
    load: Annotated[float, typer.Option(min=0.01, help="Time of all kernels, in times of the communication.")] = 1.3,
    samples: Annotated[int, typer.Option(min=3, help="Samples of each way at each size.")] = 11,
    json_file: RowsFile = None,
    plot_file: Annotated[
        Path | None,
        typer.Option("--plot", dir_okay=False, help="Draw what the device did, and when, into this PNG file."),
    ] = None,
    timeout: JobTimeout = 200.0,
) -> None:
    """Time kernels that are put behind a non-blocking all_reduce, beside the sum and the kernels alone.

    [bold]hidden[/]: what part of the communication costs no time beside the kernels. [bold]kernels meanwhile[/]: how
    many were over before the sum was there (rank 0). [bold]enqueueing[/]: how long the host took for the call and all
    kernels. The ranks share the GPU: all compute at the same time, alone too.
    """
    console = table_console()
    counts, sizes_in_bytes = rank_counts(ranks), byte_sizes(sizes)
    check_all_writable({"--json": json_file, "--plot": plot_file})
    machine = described_gpu(console)
    result = GrowingResult(json_file, {"hidden": HIDDEN, "machine": machine})
    for count in counts:
        plan = OverlapPlan(count, sizes_in_bytes, matrix, load, samples)
        with counting(console) as bar:
            task = bar.add_task(f"{count} ranks", total=len(sizes_in_bytes) + 1)
            _measure(plan, timeout, result, partial(bar.advance, task))
        measured = [row for row in result.rows if (row["op"], row["ranks"]) == ("overlap", count)]
        if measured:
            console.print(table_of(measured, f"on {machine['gpu']}, {count} ranks"))
    result.say_failures(console)
    if result.rows and plot_file is not None:
        with drawn(console, plot_file):
            plot(result.rows, dated(picture_title(machine)), plot_file)
    result.end(console)


def _measure(plan: OverlapPlan, timeout_s: float, result: GrowingResult, advance: Callable[[], None]) -> None:

    def take(row: Row) -> None:
        result.add(row)
        advance()

    with result.failing_as(ranks=plan.ranks):
        run(plan, timeout_s=timeout_s, on_row=take)
