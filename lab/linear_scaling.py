"""How long many ranks take to a linear model near the optimum, beside one: computing is measured, the network is not.

Every rank's part runs here, one rank after the other: of the ranks' threads only one computes at any time. Its
processor time is what the rank computes. Between two collectives a rank's virtual clock advances by that time. A
collective begins when the last rank has come to it, takes as long as the simulated network says, and the mean rank's
part of the processor time that the real algorithm needed here. So neither the machine's load nor its number of cores
matters, and computing never overlaps a collective. Not modelled: loss of packets, and ranks that share memory.

A dense sum of all features of the data, occurring or not, is run once. Every other one sums the features that occur
alone, and counts as long, and as many bytes, as that one. What ranks would need to lay out such vectors is not counted.

Times are from the first look at the rows on. The optimum is the largest lower bound, objective·(1 - gap), that any of
the runs of a set and loss ended with.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import multiprocessing
import os
import threading
import time
import unittest.mock
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich import box
from rich.table import Table

from lab.common.commands import rank_counts
from lab.common.growing_result import GrowingResult
from lab.common.synthetic_rows import SHAPES, synthetic_rows
from lab.linear_solution import LOSSES, NEAR, SCHEMES, as_of_many, newton_of
from telegrad.launch.joining import die_with
from telegrad.linear import Rows, TrainingSettings
from telegrad.tools.bench.machine import describe_machine, machine_text
from telegrad.tools.cli.options import RowsFile, among
from telegrad.tools.cli.outputs import check_all_writable, table_console
from telegrad.tools.report.figures import PART_COLORS, bars, dated, duration, key_of, picture, seconds_across
from telegrad.tools.sim import World
from telegrad.tools.sim.measure import Network, network_of

Row = dict[str, Any]
_AS_OF = "all_reduce_as_of"  # of a length, of which only these numbers are told
_COLLECTIVES = ("all_reduce", _AS_OF, "all_gather", "all_to_all", "reduce_scatter", "broadcast", "barrier")
_MADE_AT_ONCE = 64 * 100  # rows


@dataclass
class Ranks:
    """``size`` ranks that compute in turn, and meet in virtual time. ``clocks``: of each rank, in seconds."""

    size: int
    network: Network
    clocks: np.ndarray[Any, Any] = field(init=False)
    network_s: float = 0.0
    in_collectives_s: float = 0.0
    waited_s: float = 0.0  # by the mean rank, for slower ones
    calls: int = 0
    more_bytes: int = 0  # of vectors that shorter ones stood for

    def __post_init__(self) -> None:
        costs = self.network.costs
        self._world = World(self.size, alpha_s=costs.alpha_s, beta_s_per_byte=costs.beta_s_per_byte)
        self.clocks = np.zeros(self.size)
        self._turns = [threading.Semaphore(0) for _ in range(self.size)]
        self._calls: list[Any] = [None] * self.size
        self._results: list[Any] = [None] * self.size
        self._began_s = 0.0
        self._failed: BaseException | None = None
        self._known: dict[tuple[int, str], tuple[float, float, int]] = {}  # seconds and bytes of long sums

    def run(self, act: Callable[[VirtualRank], Any]) -> list[Any]:
        """What ``act`` gives on each rank. Raises what a rank raises."""
        results: list[Any] = [None] * self.size

        def one(rank: int) -> None:
            self._turns[rank].acquire()
            self._began_s = time.thread_time()
            try:
                if self._failed is None:
                    results[rank] = act(VirtualRank(self, rank))
                    self.clocks[rank] += time.thread_time() - self._began_s
            except BaseException as error:
                self._failed = self._failed or error
            self._turns[(rank + 1) % self.size].release()

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        self._turns[0].release()
        for thread in threads:
            thread.join()
        if self._failed is not None:
            raise self._failed
        return results

    def collective(self, rank: int, name: str, args: Any, options: Any) -> Any:
        """Called by the rank whose turn it is: hands the turn on, and returns once all ranks have been here."""
        self.clocks[rank] += time.thread_time() - self._began_s
        self._calls[rank] = (name, args, options)
        if rank == self.size - 1:
            self._meet()
        self._turns[(rank + 1) % self.size].release()
        self._turns[rank].acquire()
        if self._failed is not None:
            raise RuntimeError("another rank has failed")
        self._began_s = time.thread_time()
        return self._results[rank]

    def _meet(self) -> None:
        names = {name for name, _, _ in self._calls}
        if len(names) > 1:
            raise RuntimeError(f"ranks call {', '.join(sorted(names))} at once")
        if names == {_AS_OF}:
            length, _, op = self._calls[0][1]
            self._calls = [("all_reduce", args[1:], options) for _, args, options in self._calls]
            if (length, op) not in self._known:
                own, self._calls = self._calls, [("all_reduce", (np.zeros(length), op), {}) for _ in self._calls]
                self._known[length, op] = self._play()
                self.more_bytes -= self._known[length, op][2]
                self._calls = own
            received = self._play()[2]
            took_s, computed_s, long_received = self._known[length, op]
            self.more_bytes += long_received - received
        else:
            took_s, computed_s, _ = self._play()
        last_s = float(self.clocks.max())
        self.waited_s += last_s - float(self.clocks.mean())
        self.network_s += took_s
        self.in_collectives_s += computed_s
        self.calls += 1
        self.clocks[:] = last_s + took_s + computed_s

    def _play(self) -> tuple[float, float, int]:
        """Lets the ranks' calls meet: seconds of the network and of the mean processor, and the most bytes received."""
        began_s, before_s, before = time.thread_time(), self._world.now_s, self.received_bytes()
        calls = zip(self._world.communicators, self._calls, strict=True)
        works = [getattr(comm, name)(*args, async_op=True, **options) for comm, (name, args, options) in calls]
        self._results = [work.result() for work in works]
        computed_s = (time.thread_time() - began_s) / self.size
        return self._world.now_s - before_s, computed_s, self.received_bytes() - before

    def received_bytes(self) -> int:
        """By the rank with most."""
        return max(int(comm.stats()["bytes_received"]) for comm in self._world.communicators) + self.more_bytes


class VirtualRank:
    """A rank's communicator: its collectives are a simulated network's."""

    def __init__(self, ranks: Ranks, rank: int) -> None:
        self._ranks, self.rank, self.world_size = ranks, rank, ranks.size
        for name in _COLLECTIVES:
            setattr(self, name, self._collective(name))

    def _collective(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            return self._ranks.collective(self.rank, name, args, options)

        return call


def made(shape: str, count: int) -> Rows:
    """``count`` rows, in memory that is not held twice meanwhile."""
    every, entries = np.zeros(count + 1, np.uint64), 0
    labels = np.empty(count, np.float32)
    most = int(1.02 * SHAPES[shape].entries * count) + 10_000
    indices, values = np.empty(most, np.uint32), np.empty(most, np.float32)
    for first in range(0, count, _MADE_AT_ONCE):
        part = synthetic_rows(SHAPES[shape], first, min(first + _MADE_AT_ONCE, count))
        end = first + len(part)
        every[first + 1 : end + 1] = part.offsets[1:] + np.uint64(entries)
        indices[entries : entries + part.nnz] = part.indices
        values[entries : entries + part.nnz] = part.values
        labels[first:end] = part.labels
        entries += part.nnz
    return Rows(every, indices[:entries], values[:entries], labels, SHAPES[shape].features)


def solved(rows: Rows, loss: str, tol: float, comm: Any, scheme: str, look: Callable[[], float]) -> Row:
    """One rank's training. ``look`` gives its virtual time. The row has the objective and the gap after each step."""
    total = len(rows)
    if comm is not None:
        total = int(comm.all_gather(np.array([total], np.int64)).sum())
    settings = TrainingSettings(loss=loss, l2=1 / total, tol=tol)
    newton = newton_of(rows, settings, comm, scheme)[1]
    trace: list[Row] = []
    ready_s, sums = look(), 0
    while True:
        found = newton.epoch(len(trace), lambda step, steps: None)
        sums += found.steps
        trace.append({"s": look(), "objective": found.objective, "gap": found.gap})
        if found.has_ended or found.gap <= tol:
            break
    newton.model()
    return {"begin_s": ready_s, "trace": trace, "steps": len(trace), "sums": sums, "model_s": look()}


def measured(rows: Rows, loss: str, tol: float, ranks: int, scheme: str, network: Network) -> Row:
    """Of the whole training: virtual seconds, and what they consist of."""
    if ranks == 1:
        began_s = time.thread_time()
        row = solved(rows, loss, tol, None, scheme, lambda: time.thread_time() - began_s)
        return {**row, "compute_s": row["model_s"], "network_s": 0.0, "wait_s": 0.0, "in_collectives_s": 0.0, "mb": 0.0}
    virtual = Ranks(ranks, network)
    borders = [len(rows) * rank // ranks for rank in range(ranks + 1)]
    parts = [rows.part(*ends) for ends in itertools.pairwise(borders)]

    def act(comm: VirtualRank) -> Row:
        def look() -> float:
            return float(virtual.clocks[comm.rank]) + time.thread_time() - virtual._began_s

        return solved(parts[comm.rank], loss, tol, comm, scheme, look)

    every = virtual.run(act)
    if len({str([(one["objective"], one["gap"]) for one in row["trace"]]) for row in every}) > 1:
        raise RuntimeError("ranks found other objectives")
    row = every[0]
    for step, alike in enumerate(zip(*(one["trace"] for one in every), strict=True)):
        row["trace"][step]["s"] = max(one["s"] for one in alike)
    total_s = float(virtual.clocks.max())
    spent = {"network_s": virtual.network_s, "wait_s": virtual.waited_s, "in_collectives_s": virtual.in_collectives_s}
    spent["compute_s"] = total_s - sum(spent.values())
    return {**row, "model_s": total_s, **spent, "mb": virtual.received_bytes() / 1e6}


_made: list[Rows] = []


def _measured(*case: Any) -> Row:
    # what ranks need together need not be this machine's, and an upper bound is far above what they take
    in_memory = unittest.mock.patch("telegrad.linear.problem.available_bytes", return_value=-1)
    with in_memory, as_of_many(_made[0].nnz):
        return measured(_made[0], *case)


def with_times(rows: Sequence[Row]) -> list[Row]:
    """With virtual seconds to ``NEAR`` of the optimum: of each set and loss the largest lower bound of any run."""
    found: list[Row] = []
    for row in rows:
        alike = [one for one in rows if all(one[name] == row[name] for name in ("data", "rows", "loss"))]
        best = max(step["objective"] * (1 - step["gap"]) for one in alike for step in one["trace"][-1:])
        reached = {}
        for near in NEAR:
            steps = (step["s"] for step in row["trace"] if step["objective"] <= best * (1 + near))
            reached[f"to_{near:g}_s"] = next(steps, None)
        found.append({**row, **reached})
    return found


def _ratio(row: Row, rows: Sequence[Row], **other: Any) -> float | None:
    """Of the times to 0.1 %, to that of the same set and loss with ``other``."""
    wanted = {**{name: row[name] for name in ("data", "rows", "loss", "ranks", "scheme")}, **other}
    found = next((one for one in rows if all(one[name] == value for name, value in wanted.items())), None)
    own, others = row[f"to_{NEAR[1]:g}_s"], found and found[f"to_{NEAR[1]:g}_s"]
    return own / others if own and others else None


def table_of(rows: Sequence[Row], title: str) -> Table:
    """A line for each set, loss, scheme and number of ranks."""
    table = Table(title=title, title_justify="left", header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    names = ["data", "loss", "sums", "ranks", "to 1 %", "to 0.1 %", "of one rank", "of dense", "of occurring"]
    names += ["computing", "network", "waiting", "in sums", "steps, sums", "MB"]
    for name in names:
        table.add_column(name, justify="left" if name in names[:3] else "right", no_wrap=True)
    for row in rows:
        times = [duration(row[f"to_{near:g}_s"]) for near in NEAR]
        ratios = [_ratio(row, rows, ranks=1, scheme="sparse"), _ratio(row, rows, scheme="dense")]
        ratios.append(_ratio(row, rows, scheme="dense-occurring"))
        texts = ["" if one in (None, 1) else f"{one:.3f}x" for one in ratios]
        spent = [duration(row[f"{name}_s"]) for name in ("compute", "network", "wait", "in_collectives")]
        counts = [f"{row['steps']}, {row['sums']}", f"{row['mb']:.3g}"]
        table.add_row(row["data"], row["loss"], row["scheme"], str(row["ranks"]), *times, *texts, *spent, *counts)
    return table


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
    """A panel for each set and loss: of each number of ranks and scheme what the virtual time consists of."""
    sets: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        sets.setdefault((row["data"], row["loss"]), []).append(row)
    with picture(path, title, height=0.7 + sum(0.8 + 0.24 * len(alike) for alike in sets.values())) as figure:
        ratios = [2 + len(alike) for alike in sets.values()]
        every = figure.subplots(len(sets), 1, squeeze=False, height_ratios=ratios).flat
        for axes, ((data, loss), alike) in zip(every, sets.items(), strict=True):
            parts = {"computing": [row["compute_s"] + row["in_collectives_s"] for row in alike]}
            parts["communication"] = [row["network_s"] + row["wait_s"] for row in alike]
            names = [f"{row['ranks']} ranks, {row['scheme']}" if row["ranks"] > 1 else "1 rank" for row in alike]
            bars(axes, names, parts, [f"to 0.1 %: {duration(row['to_0.001_s'])}" for row in alike])
            seconds_across(axes.xaxis, logarithmic=False)
            axes.set(
                xlabel="virtual time", title=f"{data}'s shape, {alike[0]['rows']:,} rows, {loss.replace('_', ' ')}"
            )
        key_of(figure, {part: PART_COLORS[part] for part in parts})


def command(
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, such as 1,8,32.")] = "1,8,32",
    network: Annotated[str, typer.Option(help="A rate: costs as of telegrad simulate.")] = "1gbit",
    data: Annotated[str, typer.Option(help=f"Made-up rows in the shapes of {', '.join(SHAPES)}.")] = ",".join(SHAPES),
    losses: Annotated[str, typer.Option(help=f"Some of {', '.join(LOSSES)}.")] = ",".join(LOSSES),
    schemes: Annotated[str, typer.Option(help=f"Of several ranks: some of {', '.join(SCHEMES)}.")] = "sparse",
    rows: Annotated[int, typer.Option(min=64, help="Of all ranks together.")] = 100_000,
    together: Annotated[int, typer.Option(min=1, help="Processes that measure at once, each a case.")] = 1,
    tol: Annotated[float, typer.Option(help="As of TrainingSettings.")] = 1e-4,
    json_file: RowsFile = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", dir_okay=False, help="Draw a picture.")] = None,
) -> None:
    """Time linear models on many ranks in virtual time: computing is measured, the network simulated."""
    console = table_console()
    chosen = [tuple(among(*one)) for one in ((data, SHAPES, "--data"), (losses, LOSSES, "--losses"))]
    counts, kinds, net = rank_counts(ranks), among(schemes, SCHEMES, "--schemes"), network_of(network)
    check_all_writable({"--json": json_file, "--plot": plot_file})
    machine = describe_machine()
    result = GrowingResult(json_file, {"machine": machine, "network": net.about})
    done: list[Row] = []
    for shape in chosen[0]:
        _made[:] = [made(shape, rows)]  # which forked processes share
        alike = {"op": "linear_scaling", "data": shape, "rows": rows, "entries": _made[0].nnz, "wrong": 0}
        cases = [
            (loss, tol, count, scheme, net)
            for loss, count in itertools.product(chosen[1], counts)
            for scheme in (kinds if count > 1 else ("sparse",))
        ]
        context = multiprocessing.get_context("fork")
        with concurrent.futures.ProcessPoolExecutor(together, context, die_with, (os.getpid(),)) as processes:
            begun = {processes.submit(_measured, *case): case for case in cases}
            for future in concurrent.futures.as_completed(begun):
                loss, _, count, scheme, _ = begun[future]
                done.append({**alike, "loss": loss, "ranks": count, "scheme": scheme, **future.result()})
                result.add(done[-1])
                took = duration(done[-1]["model_s"])
                console.print(f"{shape}, {loss}, {count} ranks, {scheme}: {took}", style="dim", highlight=False)
    done.sort(key=lambda row: (chosen[0].index(row["data"]), chosen[1].index(row["loss"]), row["ranks"]))
    found = with_times(done)
    result.rows = found
    if json_file is not None and found:
        result.rows, last = found[:-1], found[-1]
        result.add(last)
    console.print(table_of(found, f"{rows:,} rows, {net.about}"))
    console.print(machine_text(machine), style="dim")
    if plot_file is not None:
        plot(found, dated("linear models in virtual time, 1 Gbit/s"), plot_file)
    result.end(console)
