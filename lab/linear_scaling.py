"""How long many ranks take to a linear model near the optimum, beside one: computing is measured, the network is not.

Every rank's part runs here, one rank after the other: of the ranks' threads only one computes at any time. Its
processor time is what the rank computes. Between two collectives a rank's virtual clock advances by that time. A
collective begins when the last rank has come to it, takes as long as the simulated network says, and the mean rank's
part of the processor time that the real algorithm needed here. So neither the machine's load nor its number of cores
matters, and computing never overlaps a collective. Not modelled: loss of packets, and ranks that share memory.

Times are from the first look at the rows on. The optimum is the largest lower bound, objective·(1 - gap), that any of
the runs of a set and loss ended with.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
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
from lab.linear_solution import LOSSES, NEAR, SCHEMES, newton_of
from telegrad import _core
from telegrad.linear import Rows, TrainingSettings
from telegrad.linear.newton import Newton
from telegrad.linear.problem import Problem
from telegrad.linear.rows import joined
from telegrad.tools.bench.machine import describe_machine, machine_text
from telegrad.tools.cli.options import RowsFile, among, count_of
from telegrad.tools.cli.outputs import check_all_writable, table_console
from telegrad.tools.report.figures import dated, duration, key_of, picture
from telegrad.tools.sim import World
from telegrad.tools.sim.measure import Network, network_of

Row = dict[str, Any]
_COLLECTIVES = ("all_reduce", "all_gather", "all_to_all", "reduce_scatter", "broadcast", "barrier")
_MADE_AT_ONCE = 64 * 500  # rows


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

    def __post_init__(self) -> None:
        costs = self.network.costs
        self._world = World(self.size, alpha_s=costs.alpha_s, beta_s_per_byte=costs.beta_s_per_byte)
        self.clocks = np.zeros(self.size)
        self._turns = [threading.Semaphore(0) for _ in range(self.size)]
        self._calls: list[Any] = [None] * self.size
        self._results: list[Any] = [None] * self.size
        self._began_s = 0.0
        self._failed: BaseException | None = None

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
        began_s, before_s = time.thread_time(), self._world.now_s
        calls = zip(self._world.communicators, self._calls, strict=True)
        works = [getattr(comm, name)(*args, async_op=True, **options) for comm, (name, args, options) in calls]
        self._results = [work.result() for work in works]
        took_s, computed_s = self._world.now_s - before_s, (time.thread_time() - began_s) / self.size
        last_s = float(self.clocks.max())
        self.waited_s += last_s - float(self.clocks.mean())
        self.network_s += took_s
        self.in_collectives_s += computed_s
        self.calls += 1
        self.clocks[:] = last_s + took_s + computed_s

    def received_bytes(self) -> int:
        """By the rank with most."""
        return max(int(comm.stats()["bytes_received"]) for comm in self._world.communicators)


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
    """``count`` rows, in columns that are numbered anew: no column that does not occur takes memory."""
    parts, used = [], np.zeros(SHAPES[shape].features, bool)
    for first in range(0, count, _MADE_AT_ONCE):
        parts.append(synthetic_rows(SHAPES[shape], first, min(first + _MADE_AT_ONCE, count)))
        used[parts[-1].indices] = True
    return joined(parts, SHAPES[shape].features)


def solved(rows: Rows, loss: str, tol: float, comm: Any, scheme: str, look: Callable[[], float]) -> Row:
    """One rank's training. ``look`` gives its virtual time. The row has the objective and the gap after each step."""
    total = len(rows)
    if comm is not None:
        total = int(comm.all_gather(np.array([total], np.int64)).sum())
    settings = TrainingSettings(loss=loss, l2=1 / total, tol=tol)
    problem = Problem(rows, settings, comm, alone=comm is None)
    newton = newton_of(problem, scheme)
    ready_s, trace, sums = look(), [], 0
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

    def act(comm: VirtualRank) -> Row:
        def look() -> float:
            return float(virtual.clocks[comm.rank]) + time.thread_time() - virtual._began_s

        own = rows.part(borders[comm.rank], borders[comm.rank + 1])
        return solved(own, loss, tol, comm, scheme, look)

    every = virtual.run(act)
    if len({str([(one["objective"], one["gap"]) for one in row["trace"]]) for row in every}) > 1:
        raise RuntimeError("ranks found other objectives")
    row = every[0]
    for step, alike in enumerate(zip(*(one["trace"] for one in every), strict=True)):
        row["trace"][step]["s"] = max(one["s"] for one in alike)
    total_s = float(virtual.clocks.max())
    spent = {"network_s": virtual.network_s, "wait_s": virtual.waited_s, "in_collectives_s": virtual.in_collectives_s}
    return {**row, "compute_s": total_s - sum(spent.values()), **spent, "mb": virtual.received_bytes() / 1e6}
