"""Selections, as compressed training makes them, beside torch.topk and a memory copy, on a CPU or a GPU.

All contenders take turns on one thread of this processor, or between events of a GPU. Needs torch.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Protocol

import numpy as np
import torch
import typer
from rich.progress import TextColumn
from rich.table import Table

from lab.common.commands import counts_of
from lab.common.growing_result import GrowingResult
from telegrad.compress import Residual, ReusedThreshold, Selection, selection_named
from telegrad.kernels.select import queues_of
from telegrad.tools.bench.machine import describe_machine, machine_text
from telegrad.tools.bench.plan import Timing
from telegrad.tools.cli.options import RowsFile, among, densities_of, present_gpu
from telegrad.tools.cli.outputs import check_all_writable, counting, drawn, table_console
from telegrad.tools.report.figures import Panel, dated, draw, duration

Row = dict[str, Any]

# What is measured

METHODS: Mapping[str, str] = {
    "reused-threshold": "reused",
    "exact": "topk",
    "trimmed": "trimmed",
    "threshold-search": "search",
    "sampled-threshold": "sampled",
    "bucket-topk": "buckets",
    "gaussian": "gaussian",
    "random": "random",
}
"""What is measured, and its name as ``selection=``."""

QUEUED: Mapping[str, str] = {"exact-queued": "topk", "reused-threshold-queued": "reused"}
"""What is measured on a GPU alone, as a training step has it: in the stream behind other kernels, and nobody waits."""

SELECTION_OF: Mapping[str, str] = {**METHODS, **QUEUED}
"""By method, what it is as ``selection=``."""

BOUND = (
    "The bytes that must move (12 of every element: its gradient and residual read, its residual written; 8 of every "
    "selected entry: its index and value), at the bandwidth of the faster of numpy's and torch's copy (on a GPU: "
    "torch's, queued for what is queued) of as many elements, 8 bytes of each, in the same run"
)
"""What ``bound_s`` means in result files."""

PEER = "torch.topk"
"""As a contender: residual += gradient, torch.topk of the magnitudes, gather, clear."""

GPU_COPY = "copy, torch"
QUEUED_PEER, QUEUED_COPY = f"{PEER}, queued", f"{GPU_COPY}, queued"
DEVICES = ("cpu", "cuda")
COPIES = {"cpu": ("copy, numpy", "copy, torch"), "cuda": (GPU_COPY,)}
SETTLING_STEPS = 4
"""Of error feedback, before anything is timed: what is left by then looks like a residual."""
GRADIENTS = 3
"""That take turns, so that a reused threshold meets other entries than those from which it was found."""


def methods_on(device: str) -> tuple[str, ...]:
    """All that can be measured there."""
    return (*METHODS, *QUEUED) if device == "cuda" else tuple(METHODS)


@dataclass(frozen=True)
class SelectPlan:
    """One length and density, on ``device``: ``"cpu"`` or ``"cuda"``. A contender is measured in ``samples`` samples,
    fewer (but three) where all of them together would take longer than about ``seconds``."""

    elements: int
    density: float
    methods: tuple[str, ...] = tuple(METHODS)
    samples: int = 25
    seconds: float = 10.0
    device: str = "cpu"

    @property
    def k(self) -> int:
        """As ResidualStore has it."""
        return max(1, round(self.density * self.elements))

    @property
    def contenders(self) -> tuple[str, ...]:
        """All that is timed: methods, and the peers that these are compared with."""
        peers = [name for method in self.methods for name in _peers_of(method, self.device)]
        return (*dict.fromkeys(peers), *self.methods)


@dataclass
class Outcome:
    """By contender: seconds per call, by method the entries selected in each call, and of what is queued, methods and
    peers, seconds that the host took for each call."""

    times: dict[str, list[float]] = field(default_factory=dict)
    counts: dict[str, list[int]] = field(default_factory=dict)
    enqueued: dict[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Sample:
    """One call of a contender. ``count``: of a method, the entries selected; ``enqueue_s``: how long the host took for
    it, if it is queued."""

    seconds: float
    count: int | None = None
    enqueue_s: float | None = None


def rows_of(plan: SelectPlan, outcome: Outcome) -> list[Row]:
    """A row for each method."""
    rows: list[Row] = []
    for name in plan.methods:
        *copies, peer = _peers_of(name, plan.device)
        copy_s = min(Timing.of(outcome.times[copy]).median_s for copy in copies)
        peer_s = Timing.of(outcome.times[peer]).median_s
        timing, counts = Timing.of(outcome.times[name]), sorted(outcome.counts[name])
        selected = counts[len(counts) // 2]
        bound_s = bound_bytes(plan.elements, selected) * copy_s / (8 * plan.elements)
        rows.append(
            {
                "method": name,
                "name": SELECTION_OF[name],
                "elements": plan.elements,
                "density": plan.density,
                "k": plan.k,
                "selected": selected,
                "median_s": timing.median_s,
                "min_s": timing.min_s,
                "p90_s": timing.p90_s,
                "mean_s": sum(outcome.times[name]) / len(outcome.times[name]),
                "samples": len(outcome.times[name]),
                "enqueue_median_s": _enqueue_median_s(outcome, name),
                "device": plan.device,
                "threads": 1 if plan.device == "cpu" else None,
                "torch_topk_median_s": peer_s,
                "torch_topk_enqueue_median_s": _enqueue_median_s(outcome, peer),
                "times_faster_than_torch_topk": peer_s / timing.median_s,
                "copy_s": copy_s,
                "bound_s": bound_s,
                "of_bound": bound_s / timing.median_s,
            }
        )
    return rows


def bound_bytes(elements: int, selected: int) -> int:
    """The least that must move, see ``BOUND``."""
    return 12 * elements + 8 * selected


def _peers_of(method: str, device: str) -> tuple[str, ...]:
    """Copies, then torch.topk."""
    return (QUEUED_COPY, QUEUED_PEER) if method in QUEUED else (*COPIES[device], PEER)


def _enqueue_median_s(outcome: Outcome, name: str) -> float | None:
    return Timing.of(outcome.enqueued[name]).median_s if name in outcome.enqueued else None


# On a CPU


def run(plan: SelectPlan, on_sample: Callable[[str], None] = lambda _: None) -> Outcome:
    """Measures all that ``plan`` asks for; ``on_sample`` is called after each sample.

    Every sample begins with the same residual and has the next of ``GRADIENTS`` gradients, the same for all contenders.
    A method keeps its threshold from one to the next, so that
    a median is of calls that reuse it. Of the first sample, which touches memory for the first time, nothing is kept.
    """
    bench = _contenders(plan)
    outcome = Outcome({name: [] for name in plan.contenders}, {name: [] for name in plan.methods})
    order = np.random.default_rng(0)
    with _one_thread():
        for number in range(plan.samples + 1):
            for name in order.permutation(plan.contenders).tolist():  # nobody always finds the caches of the same other
                sample = bench.sample(name, number)
                if number == 0:
                    continue
                outcome.times[name].append(sample.seconds)
                if sample.count is not None:
                    outcome.counts[name].append(sample.count)
                if sample.enqueue_s is not None:
                    outcome.enqueued.setdefault(name, []).append(sample.enqueue_s)
                on_sample(name)
            if number == 0:  # in which kernels may have been compiled
                begin = time.perf_counter()
            elif number >= 3 and (time.perf_counter() - begin) * (number + 1) / number > plan.seconds:
                break
    return outcome


class _Contenders(Protocol):
    def sample(self, name: str, number: int) -> Sample: ...


def _contenders(plan: SelectPlan) -> _Contenders:
    if plan.device == "cpu":
        return _Arrays(plan)

    return Tensors(plan)


class _Arrays:
    """What all contenders work on."""

    def __init__(self, plan: SelectPlan) -> None:
        rng = np.random.default_rng(0)
        exact, k = selection_named("topk"), plan.k
        self._policies: dict[str, Selection] = {name: selection_named(METHODS[name]) for name in plan.methods}
        self._residual = np.zeros(plan.elements, np.float32)
        entries = {name: Residual(name, self._residual, k) for name in (PEER, *plan.methods)}
        self._entries = entries
        room = max([k, *(policy.capacity(entries[name]) for name, policy in self._policies.items())])
        self._indices, self._values = np.zeros(room, np.uint32), np.zeros(room, np.float32)
        for _ in range(SETTLING_STEPS):
            gradient = rng.standard_normal(plan.elements, np.float32)
            exact.select(entries[PEER], gradient, self._indices, self._values, 0)
        self._gradients = [rng.standard_normal(plan.elements, np.float32) for _ in range(GRADIENTS)]
        self._gradient = self._gradients[0]
        self._before = self._residual.copy()
        self._copy = np.zeros_like(self._residual)
        self._k = k

    def sample(self, name: str, number: int) -> Sample:
        """One call of this contender in that round.

        Seconds are the thread's own: what else runs on this machine takes caches and bandwidth from it, but not its
        time.
        """
        self._gradient = self._gradients[number % GRADIENTS]
        np.copyto(self._residual, self._before)
        if name in self._policies:
            policy, entry = self._policies[name], self._entries[name]
            begin = time.thread_time()
            count = policy.select(entry, self._gradient, self._indices, self._values, 0)
            return Sample(time.thread_time() - begin, count)
        by_numpy, by_torch = COPIES["cpu"]
        work = {by_numpy: self._copy_by_numpy, by_torch: self._copy_by_torch, PEER: self._select_by_torch}[name]
        begin = time.thread_time()
        work()
        return Sample(time.thread_time() - begin)

    def _copy_by_numpy(self) -> None:
        np.copyto(self._copy, self._gradient)

    def _copy_by_torch(self) -> None:
        torch.from_numpy(self._copy).copy_(torch.from_numpy(self._gradient))

    def _select_by_torch(self) -> None:
        residual = torch.from_numpy(self._residual)
        residual += torch.from_numpy(self._gradient)
        _, indices = torch.topk(residual.abs(), self._k, sorted=False)
        self._sent = residual[indices]
        residual[indices] = 0


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Ours has one thread: so has torch."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# On a GPU

Clock = Callable[[Callable[[], object]], float]
"""Does the work, and says how many seconds it took."""

_BUSY_CYCLES = 6_000_000
"""About 3 ms: a slow host launches the 40 kernels of a selection in less than half of them."""


def seconds_between_events(work: Callable[[], object]) -> float:
    """From the device's reaching ``work`` to its being through with it; what waits for the CPU in between counts."""
    begin, end = _events()
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e-3


def seconds_behind_others(work: Callable[[], object]) -> float:
    """As ``seconds_between_events``, but the device is busy until all of ``work`` is in its stream: only its own time
    counts. ``work`` must not wait for it, and be enqueued within 3 ms."""
    begin, end = _events()
    torch.cuda._sleep(_BUSY_CYCLES)  # type: ignore[no-untyped-call]
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e-3


def _events() -> list[torch.cuda.Event]:
    return [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]


class Tensors:
    """What all contenders work on: the same numbers in every run, but not those that the CPU's work on."""

    def __init__(
        self,
        plan: SelectPlan,
        device: str = "cuda",
        seconds_of: Clock = seconds_between_events,
        queued_seconds_of: Clock = seconds_behind_others,
    ) -> None:
        generator = torch.Generator(device).manual_seed(0)
        exact, self._k = selection_named("topk"), plan.k
        self._seconds_of, self._queued_seconds_of = seconds_of, queued_seconds_of
        self._policies: dict[str, Selection] = {name: selection_named(SELECTION_OF[name]) for name in plan.methods}
        self._residual = torch.zeros(plan.elements, device=device)
        names = (PEER, *plan.methods)
        self._entries = {name: Residual(name, self._residual, plan.k) for name in names}  # type: ignore[arg-type]
        room = max([plan.k, *(one.capacity(self._entries[name]) for name, one in self._policies.items())])
        self._indices = torch.zeros(room, dtype=torch.uint32, device=device)
        self._values = torch.zeros(room, device=device)
        for _ in range(SETTLING_STEPS):
            gradient = torch.randn(plan.elements, device=device, generator=generator)
            exact.select(self._entries[PEER], gradient, self._indices, self._values, 0)
        self._gradients = [torch.randn(plan.elements, device=device, generator=generator) for _ in range(GRADIENTS)]
        self._gradient = self._gradients[0]
        self._before, self._copy = self._residual.clone(), torch.empty_like(self._residual)
        self._queued = _Queued(self._residual, plan.k, self._indices, self._values)

    def sample(self, name: str, number: int) -> Sample:
        """One call of this contender in that round."""
        self._gradient = self._gradients[number % GRADIENTS]
        self._residual.copy_(self._before)
        if name in QUEUED:
            return self._sample_queued(lambda: self._queued.select(QUEUED[name], self._gradient), self._queued.count)
        if name in self._policies:
            counts: list[int] = []
            policy, entry = self._policies[name], self._entries[name]
            seconds = self._seconds_of(
                lambda: counts.append(policy.select(entry, self._gradient, self._indices, self._values, 0))
            )
            return Sample(seconds, counts[0])
        work = self._copy_by_torch if name in (GPU_COPY, QUEUED_COPY) else self._select_by_torch
        return self._sample_queued(work) if name in (QUEUED_COPY, QUEUED_PEER) else Sample(self._seconds_of(work))

    def _sample_queued(self, work: Callable[[], object], count: torch.Tensor | None = None) -> Sample:
        enqueue_s = 0.0

        def enqueue() -> None:
            nonlocal enqueue_s
            begin = time.perf_counter()
            work()
            enqueue_s = time.perf_counter() - begin

        seconds = self._queued_seconds_of(enqueue)
        return Sample(seconds, None if count is None else int(count), enqueue_s)

    def _copy_by_torch(self) -> None:
        self._copy.copy_(self._gradient)

    def _select_by_torch(self) -> None:
        self._residual += self._gradient
        _, indices = torch.topk(self._residual.abs(), self._k, sorted=False)
        self._sent = self._residual[indices]
        self._residual[indices] = 0


class _Queued:
    """Selections as ``ddp.cuda.selection`` puts them in a stream. ``count``: the entries moved by the last one."""

    def __init__(self, residual: torch.Tensor, k: int, indices: torch.Tensor, values: torch.Tensor) -> None:
        kernels = self._kernels = queues_of(residual)
        policy = ReusedThreshold()
        self._residual, self._k, self._indices, self._values = residual, k, indices, values
        self.count, self._active = residual.new_zeros(1, dtype=torch.int64), residual.new_ones(1, dtype=torch.int64)
        threshold, calls = residual.new_zeros(1, dtype=torch.float64), residual.new_zeros(1, dtype=torch.int64)
        self._parts = [kernels.Reusing(residual, k, threshold, calls, 0, 0, 0)]
        self._policy, self._table = policy, kernels.reuse_table(self._parts).to(residual.device)

    def select(self, selection: str, gradient: torch.Tensor) -> None:
        """``"topk"`` or ``"reused"``, which keeps its threshold from one to the next. Does not wait."""
        kernels, residual, k, active = self._kernels, self._residual, self._k, self._active
        outputs = self._indices, self._values, self.count
        if k == residual.numel():
            kernels.queue_all(residual, gradient, *outputs, 0, active)
        elif selection == "topk":
            kernels.queue_topk(residual, gradient, k, *outputs, 0, active=active)
        else:
            kept = {"interval": self._policy.interval, "gain": self._policy.gain}
            kernels.queue_reused(self._parts, self._table, gradient, *outputs, active=active, **kept)


# Table and plot


def table_of(rows: Sequence[Row], title: str) -> Table:
    """One line per method, the slowest first, below torch.topk and above what no method can beat; these two once more
    for methods that are queued."""
    waited = next((row for row in rows if row["method"] not in QUEUED), None)
    queued = next((row for row in rows if row["method"] in QUEUED), None)
    peers = [(name, row) for name, row in (("", waited), (", queued", queued)) if row is not None]
    table = Table(title=title, title_justify="left", header_style="bold")
    table.add_column("", no_wrap=True)
    for name in ("selected/k", "median", "mean", "bound", "of bound", "to torch.topk"):
        table.add_column(name, justify="right", no_wrap=True)
    if queued is not None:
        table.add_column("enqueue", justify="right", no_wrap=True)
    for how, row in peers:
        table.add_row(
            f"torch.topk{how or ' and residual'}",
            *("1.00", duration(row["torch_topk_median_s"]), "", "", "", ""),
            *_enqueue(row["torch_topk_enqueue_median_s"]),
            style="dim",
        )
    for row in sorted(rows, key=lambda row: -row["median_s"]):
        table.add_row(
            row["method"],
            f"{row['selected'] / row['k']:.2f}",
            duration(row["median_s"]),
            duration(row["mean_s"]),
            duration(row["bound_s"]),
            f"{row['of_bound']:.0%}",
            f"{row['times_faster_than_torch_topk']:.1f}x",
            *_enqueue(row["enqueue_median_s"]),
        )
    for how, row in peers:
        table.add_row(f"one copy{how}", "", duration(row["copy_s"]), style="dim")
    return table


def _enqueue(seconds: float | None) -> list[str]:
    return [] if seconds is None else [duration(seconds)]


def picture_title(gpu: str | None) -> str:
    """What the picture of rows from this GPU, or from a CPU, shows."""
    return f"time to select entries of a gradient, {gpu or 'one thread'}"


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
    """Time per call against the number of elements, a panel for each density; against density where there is one length
    only. torch.topk and bound are those of methods that are waited for, unless all are queued."""
    draw(panels_of(rows), title, path)


def panels_of(rows: Sequence[Row]) -> list[Panel]:
    """By density over elements, if there are several lengths; else by length over density."""
    lengths = {row["elements"] for row in rows}
    by, across, says, base = ("density", "elements", "elements", 2)
    if len(lengths) == 1:
        by, across, says, base = ("elements", "density", "density", 10)
    compared = [row for row in rows if row["method"] not in QUEUED] or rows
    panels = []
    for value in sorted({row[by] for row in rows}):
        curves: dict[str, list[tuple[float, float]]] = {"torch.topk": [], "bound": []}
        for row in compared:
            place = row[across]
            if row[by] == value and not any(x == place for x, _ in curves["torch.topk"]):
                curves["torch.topk"].append((place, row["torch_topk_median_s"]))
                curves["bound"].append((place, row["bound_s"]))
        for row in rows:
            if row[by] == value:
                curves.setdefault(row["method"], []).append((row[across], row["median_s"]))
        about = f"{value:g} of the elements" if by == "density" else f"{value:,} elements"
        panels.append(Panel(says, about, curves, base=base))
    return panels


# The command

_MOST = 1 << 30  # 4 GiB an array, of which there are a dozen with torch's


def command(
    elements: Annotated[
        str, typer.Option(help="Elements of the tensor; several: 16Mi,64Mi or 16Ki..64Mi (×4).")
    ] = "16Ki..64Mi",
    density: Annotated[
        str, typer.Option(help="What part of them k is; several: 0.001,0.01 or 0.001..0.05 (×4).")
    ] = "0.001,0.01,0.05",
    methods: Annotated[
        str | None,
        typer.Option(
            help=f"Which to measure, separated by commas: {', '.join(METHODS)}; on cuda {', '.join(QUEUED)}, too. "
            "Default: all.",
            show_default=False,
        ),
    ] = None,
    samples: Annotated[int, typer.Option(min=3, help="Samples of each contender (fewer where one takes long).")] = 25,
    device: Annotated[str, typer.Option(help="Where to measure: cpu or cuda.")] = "cpu",
    seconds: Annotated[float, typer.Option(min=0.1, help="About how long to measure, of each combination.")] = 10.0,
    json_file: RowsFile = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", dir_okay=False, help="Draw the times into this PNG file.")
    ] = None,
) -> None:
    """Time the ways to choose what is sent, beside torch.topk and a memory copy: interleaved, on one thread or a GPU.

    Each adds a gradient to a residual, chooses entries of the sums, packs their indices and values and clears them in
    the residual. [bold]torch.topk and residual[/] does the same with torch: add, topk of the magnitudes, gather, clear.
    [bold]bound[/] is how long the bytes that must move take at the bandwidth of a copy of as many elements in the same
    run; below a few million elements they lie in a cache and Python's call counts. Times are the thread's own; with
    [bold]--device cuda[/] they are between events of the GPU, where the host's launches count. [bold]-queued[/], on a
    GPU only: as a training step has them, behind other kernels, without waiting; between the events is then the GPU's
    time alone, and [bold]enqueue[/] is the host's. The kernels for GPUs are Triton's; they serve ROCm too.
    """
    console = table_console()
    if device not in DEVICES:
        raise typer.BadParameter(f"{device!r} does not exist: use {' or '.join(DEVICES)}", param_hint="--device")
    from telegrad.tools.bench.device import describe_gpu

    gpu = present_gpu(console) if device == "cuda" else None
    if device == "cuda" and importlib.util.find_spec("triton") is None:
        raise typer.BadParameter("triton is not installed: pip install 'telegrad[gpu]'", param_hint="--device")
    chosen = _methods_of(methods, device)
    lengths = counts_of(elements, 1, _MOST, "--elements")
    plans = [
        SelectPlan(length, share, chosen, samples, seconds, device)
        for length, share in itertools.product(lengths, densities_of(density, "--density"))
    ]
    check_all_writable({"--json": json_file, "--plot": plot_file})
    machine = describe_machine() if gpu is None else describe_gpu(gpu)
    result = GrowingResult(json_file, {"bound_s": BOUND, "machine": machine})
    with counting(console, TextColumn("{task.fields[latest]}")) as bar:
        passed = 0
        task = bar.add_task("", total=sum(len(plan.contenders) * samples for plan in plans), latest="")
        for plan in plans:
            about = f"{plan.elements:,} elements, {plan.density * 100:.4g} %"
            bar.update(task, description=about, completed=passed, latest="")
            outcome = run(plan, lambda name: bar.update(task, advance=1, latest=name))
            passed += len(plan.contenders) * samples
            found = rows_of(plan, outcome)
            console.print(table_of(found, f"{about}: k = {plan.k:,}"))
            for row in found:
                result.add(row)
    console.print(machine_text(machine) + ("" if gpu is None else f"; {gpu}"), style="dim")
    if plot_file is not None:
        with drawn(console, plot_file):
            plot(result.rows, dated(picture_title(gpu)), plot_file)
    result.end(console)


def _methods_of(text: str | None, device: str) -> tuple[str, ...]:
    """Those named, or all that ``device`` has. Raises ``BadParameter``."""
    there = methods_on(device)
    if text is None:
        return there
    for name in (one.strip() for one in text.split(",")):
        if name in QUEUED and name not in there:
            raise typer.BadParameter(
                f"{name!r} is measured on a GPU only: give --device cuda, or use {', '.join(there)}",
                param_hint="--methods",
            )
    return tuple(among(text, there, "--methods"))
