"""Operations on tensors of a GPU that ranks share, beside host tensors and the copies alone.

A sample is a barrier and one call; its time is the slowest rank's, until its stream is through. Sizes ascend, and each
row is printed when it is known: what a large size breaks does not take the small ones along.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.progress import Progress, TaskID, TextColumn
from rich.table import Table

from lab.common.commands import rank_counts
from lab.common.device_job import run_for_rows, tell_rows
from lab.common.growing_result import GrowingResult
from telegrad import Communicator
from telegrad.tools.bench.device import BenchmarkDevice
from telegrad.tools.bench.plan import JsonFields, Timing, text_of
from telegrad.tools.cli.options import JobTimeout, RowsFile, among, byte_sizes, described_gpu
from telegrad.tools.cli.outputs import check_all_writable, counting, drawn, table_console
from telegrad.tools.report.figures import Panel, dated, draw, duration

Row = dict[str, Any]

# What is measured

OPERATIONS = ("all_reduce", "all_reduce_async", "broadcast", "send")
"""``all_reduce_async`` is called with ``async_op=True``, and the stream waits for it at once. ``send``: each even rank
to the next one."""

ENQUEUED_WITHIN_S = 50e-6
"""So long the host may take to put an operation into its stream."""

BOUND = (
    "the slower of a copy of as many bytes to pinned memory and back (copies_median_s) and of the same operation on "
    "host tensors (host_median_s), both in the same run: what an operation takes whose copies and communication "
    "overlap wholly"
)
"""What ``bound_s`` means in result files."""


@dataclass(frozen=True)
class TransfersPlan(JsonFields):
    """One number of ranks, which share the device. ``sizes`` in bytes. Each way is measured in ``samples`` samples,
    fewer (but three, and above 256 MiB one) where all of it together would take longer than about ``seconds``."""

    ranks: int
    sizes: tuple[int, ...]
    operations: tuple[str, ...] = OPERATIONS
    samples: int = 101
    seconds: float = 60.0
    network: str = "shm"

    def cases(self) -> list[tuple[int, str]]:
        """Sizes ascending, and what is done at each: one rank has nobody to send to."""
        done = [name for name in self.operations if self.ranks > 1 or name != "send"]
        return [(size, name) for size in sorted(self.sizes) for name in done]


@dataclass(frozen=True)
class Times:
    """Seconds of each sample, of the slowest rank: ``device`` from the call until the stream is through with it,
    ``copies`` and ``host`` as in ``BOUND``. ``enqueued``: of the call alone, of every rank."""

    device: list[float]
    copies: list[float]
    host: list[float]
    enqueued: list[float]


def row_of(plan: TransfersPlan, operation: str, size: int, times: Times, wrong: int) -> Row:
    """``wrong``: values that differ from the right ones, over all ranks."""
    device, copies, host = (Timing.of(one) for one in (times.device, times.copies, times.host))
    enqueued = Timing.of(times.enqueued)
    bound_s = max(copies.median_s, host.median_s)
    return {
        "op": operation,
        "ranks": plan.ranks,
        "network": plan.network,
        "bytes": size,
        "median_s": device.median_s,
        "min_s": device.min_s,
        "p90_s": device.p90_s,
        "samples": len(times.device),
        "bytes_per_s": size / device.median_s,
        "enqueue_median_s": enqueued.median_s,
        "enqueue_p99_s": quantile(times.enqueued, 0.99),
        "enqueue_calls": len(times.enqueued),
        "enqueued_within_50_us": enqueued.median_s <= ENQUEUED_WITHIN_S,
        "copies_median_s": copies.median_s,
        "copies_bytes_per_s": 2 * size / copies.median_s,
        "host_median_s": host.median_s,
        "bound_s": bound_s,
        "of_bound": bound_s / device.median_s,
        "ratio_to_copies": device.median_s / copies.median_s,
        "ratio_to_host": device.median_s / host.median_s,
        "ratio_to_one_after_the_other": device.median_s / (copies.median_s + host.median_s),
        "wrong": wrong,
    }


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


# What each rank runs

TARGET = "lab.transfers:rank_main"
"""What the ranks run."""

_FEWEST_SAMPLES = 3
_WARM_UP = 2  # calls: the first ones allocate pinned memory
_LONG_BYTES = 256 << 20  # of what is longer, which takes seconds, one of each is enough
_PERIOD = 1009  # of the values that are communicated: whole numbers that float32 adds exactly


def run(plan: TransfersPlan, *, timeout_s: float, on_row: Callable[[Row], None]) -> None:
    """Everything that ``plan`` asks for; ``on_row`` gets each row as it comes. Raises ``RankFailed``,
    ``RanksTimedOut``."""
    run_for_rows(TARGET, plan, timeout_s=timeout_s, on_row=on_row)


def rank_main(plan_json: str) -> None:
    """One rank. Rank 0 prints a row as JSON for each operation at each size."""
    plan = TransfersPlan.from_json(plan_json)
    tell_rows(lambda communicator, device, tell: measure(plan, communicator, device, tell))


def measure(
    plan: TransfersPlan, communicator: Communicator, device: BenchmarkDevice, tell: Callable[[Row], None]
) -> None:
    """What all ranks call; ``tell`` gets rank 0's rows. Raises what an operation fails with."""
    cases = plan.cases()
    begin = time.monotonic()
    vectors: _Vectors | None = None
    for number, (size, operation) in enumerate(cases):
        if vectors is None or vectors.size != size:
            vectors = None  # frees the smaller ones first
            vectors = _Vectors.of(size, device)
        case = _Case(communicator, device, vectors, operation)
        wrong = case.verify()
        left_s = max(plan.seconds - (time.monotonic() - begin), 0.0) / (len(cases) - number)
        case.sample(plan.samples, communicator.all_gather(np.array([left_s]))[0, 0])
        enqueued = communicator.all_gather(np.array(case.enqueued_s))
        communicator.synchronize()
        if communicator.rank == 0:
            times = Times(
                case.times_s["device"], case.times_s["copies"], case.times_s["host"], enqueued.ravel().tolist()
            )
            tell(row_of(plan, operation, size, times, wrong))


@dataclass
class _Vectors:
    """What the ways of one size work on; ``staged`` is pinned."""

    size: int
    device: torch.Tensor
    copied: torch.Tensor
    staged: torch.Tensor
    host: torch.Tensor
    values: torch.Tensor  # what rank 0 gives

    @classmethod
    def of(cls, size: int, device: BenchmarkDevice) -> _Vectors:
        n = size // 4
        values = torch.arange(_PERIOD, dtype=torch.float32).repeat(-(-n // _PERIOD))[:n]
        return cls(size, device.empty(n), device.empty(n), device.pinned(n), torch.empty(n), values)


def _unequal(x: torch.Tensor, expected: torch.Tensor) -> int:
    return 0 if torch.equal(x, expected) else int((x != expected).sum())


@dataclass
class _Case:
    communicator: Communicator
    device: BenchmarkDevice
    vectors: _Vectors
    operation: str
    times_s: dict[str, list[float]] = field(default_factory=dict)
    enqueued_s: list[float] = field(default_factory=list)

    def call(self, x: torch.Tensor) -> None:
        """The operation, so that the current stream (of a host tensor: the host) waits for its result."""
        communicator = self.communicator
        if self.operation == "all_reduce":
            communicator.all_reduce(x)
        elif self.operation == "all_reduce_async":
            work = communicator.all_reduce(x, async_op=True)
            assert work is not None
            work.wait()
        elif self.operation == "broadcast":
            communicator.broadcast(x, 0)
        elif communicator.rank % 2 == 1:
            communicator.recv(x, communicator.rank - 1)
        elif communicator.rank + 1 < communicator.world_size:
            communicator.send(x, communicator.rank + 1)

    def verify(self) -> int:
        """Wrong values of a call on the device and of one on the host, over all ranks; it also warms up."""
        vectors, rank = self.vectors, self.communicator.rank
        for _ in range(1 if vectors.size > _LONG_BYTES else _WARM_UP):
            torch.add(vectors.values, rank, out=vectors.staged)
            vectors.device.copy_(vectors.staged, non_blocking=True)
            torch.add(vectors.values, rank, out=vectors.host)
            self.call(vectors.device)
            self.device.synchronize()
            self.call(vectors.host)
            self.communicator.synchronize()
        vectors.staged.fill_(float("nan"))
        vectors.staged.copy_(vectors.device, non_blocking=True)
        self.device.synchronize()
        expected = self._expected(vectors.values)
        wrong = max(_unequal(vectors.staged, expected), _unequal(vectors.host, expected))
        vectors.host.zero_()  # sums of zeros stay zeros, however often they are taken
        vectors.staged.zero_()
        self._copies()
        vectors.device.copy_(vectors.staged.zero_(), non_blocking=True)
        self.device.synchronize()
        return int(self.communicator.all_gather(np.array([wrong], np.int64)).sum())

    def _expected(self, values: torch.Tensor) -> torch.Tensor:
        ranks, rank = self.communicator.world_size, self.communicator.rank
        if self.operation.startswith("all_reduce"):
            return (values * ranks).add_(ranks * (ranks - 1) // 2)
        if self.operation == "broadcast":
            return values
        return values + (rank - rank % 2)

    def sample(self, samples: int, most_s: float) -> None:
        """Up to ``samples`` rounds of all ways, fewer where they take longer than ``most_s``."""
        ways: dict[str, Callable[[], None]] = {
            "device": self._timed_on_device,
            "copies": self._copies,
            "host": lambda: self.call(self.vectors.host),
        }
        self.times_s = {name: [] for name in ways}
        names = list(ways)
        fewest = 1 if self.vectors.size > _LONG_BYTES else _FEWEST_SAMPLES
        spent_s = 0.0
        for number in range(samples):
            if number >= fewest and spent_s > most_s:
                break
            for index in np.random.default_rng(number).permutation(len(names)):  # alike on all ranks
                self.communicator.barrier()
                begin = time.perf_counter()
                ways[names[index]]()
                mine = time.perf_counter() - begin
                slowest = float(self.communicator.all_gather(np.array([mine])).max())
                self.times_s[names[index]].append(slowest)
                spent_s += slowest

    def _timed_on_device(self) -> None:
        begin = time.perf_counter()
        self.call(self.vectors.device)
        self.enqueued_s.append(time.perf_counter() - begin)
        self.device.synchronize()

    def _copies(self) -> None:
        self.vectors.staged.copy_(self.vectors.device, non_blocking=True)
        self.vectors.copied.copy_(self.vectors.staged, non_blocking=True)
        self.device.synchronize()


# Table and plot


def table_of(rows: Sequence[Row], title: str) -> Table:
    """A line per operation and size."""
    table = Table(title=title, title_justify="left", header_style="bold")
    table.add_column("", no_wrap=True)
    for name in ("size", "median", "rate", "copies", "host", "of bound", "enqueue", "p99", "wrong"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row["op"],
            text_of(row["bytes"]),
            duration(row["median_s"]),
            f"{row['bytes_per_s'] / 1e9:.3g} GB/s",
            duration(row["copies_median_s"]),
            duration(row["host_median_s"]),
            f"{row['of_bound']:.0%}",
            duration(row["enqueue_median_s"]),
            duration(row["enqueue_p99_s"]),
            str(row["wrong"]),
        )
    return table


def enqueueing_text(rows: Sequence[Row]) -> str:
    """In how many rows the host puts an operation into its stream within 50 µs."""
    within = sum(1 for row in rows if row["enqueued_within_50_us"])
    worst = max(rows, key=lambda row: row["enqueue_median_s"])
    return (
        f"enqueued within 50 µs: {within} of {len(rows)} rows; the longest median is "
        f"{duration(worst['enqueue_median_s'])} ({worst['op']} of {text_of(worst['bytes'])}, {worst['ranks']} ranks)"
    )


def picture_title(machine: Mapping[str, Any]) -> str:
    """What the picture of rows from this machine shows."""
    return f"collectives of GPU tensors, {machine['gpu']}"


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
    """Time against bytes, a panel for each operation and number of ranks."""
    draw(panels_of(rows), title, path)


def panels_of(rows: Sequence[Row]) -> list[Panel]:
    """By number of ranks, then by operation."""
    panels = []
    for ranks, operation in dict.fromkeys((row["ranks"], row["op"]) for row in rows):
        own = [row for row in rows if (row["ranks"], row["op"]) == (ranks, operation)]
        names = {
            "on the device": "median_s",
            "copies": "copies_median_s",
            "on the host": "host_median_s",
            "enqueueing": "enqueue_median_s",
        }
        curves = {name: [(row["bytes"], row[key]) for row in own] for name, key in names.items()}
        panels.append(Panel("bytes", f"{operation}, {ranks} rank{'s' * (ranks > 1)}", curves, base=2))
    return panels


# The command


def command(
    ranks: Annotated[str, typer.Option(help="Processes that share the GPU; several numbers: 1,2,4.")] = "1,2,4",
    sizes: Annotated[
        str, typer.Option(help="Lengths of the vector, separated by commas.")
    ] = "4B,4KiB,64KiB,1MiB,16MiB,64MiB,256MiB,1GiB",
    operations: Annotated[str, typer.Option(help="Which, separated by commas.")] = ",".join(OPERATIONS),
    samples: Annotated[int, typer.Option(min=3, help="Samples of each way (fewer where one takes long).")] = 101,
    seconds: Annotated[
        float, typer.Option(min=0.1, help="About how long to measure, with each number of ranks.")
    ] = 60.0,
    json_file: RowsFile = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", dir_okay=False, help="Draw the times into this PNG file.")
    ] = None,
    timeout: JobTimeout = 300.0,
) -> None:
    """Time all_reduce, broadcast and send of tensors on a GPU, from the call until the stream is through with them.

    Beside it, in turn: [bold]copies[/], of as many bytes to pinned memory and back, by all ranks at once;
    [bold]host[/], the same operation on host tensors. [bold]of bound[/]: the slower of these two over the median.
    [bold]enqueue[/]: how long the call itself takes the host. Rows are written as they come; a number of ranks that
    fails takes no other along.
    """
    console = table_console()
    counts, sizes_in_bytes = rank_counts(ranks), byte_sizes(sizes)
    chosen = tuple(among(operations, OPERATIONS, "--operations"))
    check_all_writable({"--json": json_file, "--plot": plot_file})
    machine = described_gpu(console)
    result = GrowingResult(json_file, {"bound": BOUND, "machine": machine})
    for count in counts:
        plan = TransfersPlan(count, sizes_in_bytes, chosen, samples, seconds)
        with counting(console, TextColumn("{task.fields[latest]}")) as bar:
            task = bar.add_task(f"{count} ranks", total=len(plan.cases()), latest="starting")
            _measure(plan, timeout, result, _following(bar, task))
        rows = [row for row in result.rows if row["ranks"] == count]
        if rows:
            console.print(table_of(rows, f"on {machine['gpu']}, {count} ranks, {plan.network}"))
    result.say_failures(console)
    if result.rows:
        console.print(enqueueing_text(result.rows), highlight=False)
        if plot_file is not None:
            with drawn(console, plot_file):
                plot(result.rows, dated(picture_title(machine)), plot_file)
    result.end(console)


def _measure(plan: TransfersPlan, timeout_s: float, result: GrowingResult, on_row: Callable[[str], None]) -> None:

    def take(row: Row) -> None:
        result.add(row)
        on_row(f"{row['op']} of {text_of(row['bytes'])}")

    with result.failing_as(ranks=plan.ranks):
        run(plan, timeout_s=timeout_s, on_row=take)


def _following(bar: Progress, task: TaskID) -> Callable[[str], None]:
    return lambda latest: bar.update(task, advance=1, latest=latest)
