"""Time to a loss on a network: a study's held-out losses, over the time that the cost model gives their steps.

Forward and backward pass and the optimizer's step are measured, in processor time of one rank. Selection, products and
exchanges are those of ``telegrad advise``, overlapped with the backward pass. torch's hooks get this library's
collectives and the same overlap, which is more than they have.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.table import Table

from lab.accuracy.plots import curve_of
from lab.accuracy.results import Result, Row, grouped
from lab.accuracy.runs import DENSE, METHODS, TASKS, Run
from telegrad.cost.network import ELEMENT_BYTES
from telegrad.synchronizer.trace import Trace
from telegrad.tools.advise.sending import Cluster, PhasedWay, dense, gathered, low_rank, ok_topk, sparse, sum_cost
from telegrad.tools.advise.step import planned, simulate
from telegrad.tools.advise.workload import DEVICES, scaled
from telegrad.tools.report.figures import duration, looks_of, picture, seconds_across
from telegrad.tools.sim.measure import network_of

TARGETS = (1.02, 1.05, 1.15)
"""Losses to reach, as multiples of where dense training ends."""
_TIMED = 5
_CPU = DEVICES["cpu"]


def measured_trace(run: Run, problem: Any) -> Trace:
    """One rank's forward and backward pass, and the optimizer's step (``rest_s``), in processor time, the least of a
    few. How the backward pass divides among the gradients is counted in operations. Needs torch."""
    from telegrad.tools.bench.model_profile import counted

    model = problem.model(run.size, run.device)
    optimizer = problem.optimizer(model)
    inputs, targets = (one.to(run.device) for one in problem.batch(run, 0, 0))
    passes, steps = [], []
    for _ in range(_TIMED):
        optimizer.zero_grad()
        begin = time.process_time()
        problem.loss(model, inputs, targets).backward()
        middle = time.process_time()
        optimizer.step()
        passes.append(middle - begin)
        steps.append(time.process_time() - middle)
    trace = counted(model, lambda model: problem.loss(model, inputs, targets), _CPU)
    return replace(scaled(trace, min(passes) / trace.compute_s), rest_s=min(steps))


def step_seconds(trace: Trace, network: str, ranks: int, method: str, density: float) -> float:
    """Of one step of that method among ``ranks`` over a network named as ``telegrad simulate`` does: gradients in DDP's
    buckets of 25 MiB."""
    cluster = Cluster(ranks, network_of(network).costs)
    way = _way_of(cluster, trace, method, density)
    return simulate(trace, planned(trace, "fixed", way)).step_s + trace.rest_s


def _way_of(cluster: Cluster, trace: Trace, method: str, density: float) -> PhasedWay:
    one = METHODS[method]
    combine = one.options.get("combine", "allreduce")
    if one.is_torchs:
        return _half(cluster) if one.rank is None else _powersgd(cluster, trace, one.rank)
    if one.rank is not None:
        return low_rank(cluster, _CPU, trace, one.rank)
    if not one.sparse:
        return dense(cluster)
    if combine == "allgather":
        return gathered(cluster, _CPU, density)
    return (sparse if combine == "allreduce" else ok_topk)(cluster, _CPU, density)


def _half(cluster: Cluster) -> PhasedWay:
    whole = sum_cost(cluster)

    def convert(size: int) -> float:
        return _CPU.pass_s(1.5 * size)

    return PhasedWay("fp16", lambda size: whole(size // 2) + convert(size), convert, convert)


def _powersgd(cluster: Cluster, trace: Trace, rank: int) -> PhasedWay:
    """As ``low_rank``, in 32 bits."""
    own, whole = low_rank(cluster, _CPU, trace, rank), sum_cost(cluster)
    numbers = rest = total = 0
    for size, rows in zip(trace.sizes, trace.rows, strict=True):
        elements = size // ELEMENT_BYTES
        factors = (rows + elements // rows) * min(rank, rows, elements // rows)
        total += elements
        if rows > 1 and 2 * factors < elements:
            numbers += factors
        else:
            rest += elements

    def seconds(size: int) -> float:
        sums = [size * part / total for part in (numbers / 2, numbers / 2, rest)]
        return sum(whole(int(part)) for part in sums if part >= ELEMENT_BYTES) + own.decompress(size)

    return PhasedWay(f"powersgd-{rank}", seconds, own.delay, own.decompress)


def clock_of(run: Mapping[str, Any], dense_s: float, step_s: float) -> Callable[[float], float]:
    """Seconds from the start of a run to the end of a step; its dense first steps take longer."""
    method, task = METHODS[run["method"]], TASKS[run["task"]]
    first = round(task.warmup * run["steps"]) if method.sparse and not method.cold else 0
    first = 2 if method.is_torchs and method.rank is not None else first

    def seconds(step: float) -> float:
        return min(step, first) * dense_s + max(0.0, step - first) * step_s

    return seconds


def timed_curves(results: Sequence[Result], traces: Mapping[str, Trace], networks: Sequence[str]) -> list[Row]:
    """A row for each method and network, at the method's best rate: ``curve`` has step, seconds and the mean held-out
    loss over seeds, all on the same samples; ``step_s`` is of a step that is not dense. ``traces``: by task."""
    rows: list[Row] = []
    for alike in grouped(results).values():
        run = alike[0]["run"]
        same = [{"points": [{"held_out": _loss(point), **point} for point in one["points"]]} for one in alike]
        losses = [(step, loss) for step, loss, *_ in curve_of(same, "step", "held_out")]
        for network in networks:
            step_s, dense_s = (
                step_seconds(traces[run["task"]], network, run["ranks"], name, run["density"])
                for name in (run["method"], DENSE)
            )
            clock = clock_of(run, dense_s, step_s)
            rows.append(
                {name: run[name] for name in ("task", "method", "density", "steps", "ranks", "size")}
                | {"rate": run.get("rate", 1.0), "seeds": len(alike), "network": network, "step_s": step_s}
                | {"curve": [[step, clock(step), loss] for step, loss in losses]}
            )
    return rows


def _loss(point: Mapping[str, float]) -> float:
    return point.get("loss_on_the_way", point["loss"])


def times_to(rows: Sequence[Row], targets: Sequence[float] = TARGETS) -> list[Row]:
    """Of ``timed_curves``, for each target that dense training of the same task and network gives: ``loss``,
    ``steps_to`` and ``seconds``, both None where the method does not get there."""
    found: list[Row] = []
    for row in rows:
        same = [one for one in rows if all(one[name] == row[name] for name in ("task", "network", "steps", "size"))]
        ends = [one["curve"][-1][2] for one in same if one["method"] == DENSE and one["curve"]]
        for target in targets if ends else ():
            step, seconds = (_first(row["curve"], across, target * ends[0]) for across in (0, 1))
            about = {name: row[name] for name in ("task", "method", "density", "rate", "network")}
            found.append(about | {"target": target, "loss": target * ends[0], "steps_to": step, "seconds": seconds})
    return found


def _first(curve: Sequence[Sequence[float]], across: int, loss: float) -> float | None:
    """Where a curve first comes down to ``loss``, interpolated between two points. None: nowhere."""
    if curve and curve[0][2] <= loss:
        return curve[0][across]
    for before, after in itertools.pairwise(curve):
        if after[2] <= loss < before[2]:
            return before[across] + (after[across] - before[across]) * (before[2] - loss) / (before[2] - after[2])
    return None


def times_table(times: Sequence[Row]) -> Table:
    """Of ``times_to``: a line for each method, task and target; the shortest time on each network is bold."""
    networks = list(dict.fromkeys(row["network"] for row in times))
    table = Table(title="time to a held-out loss (processor time of one rank; networks by the cost model)")
    for name in ("task", "loss", "method", "rate", "step", *networks):
        table.add_column(name, justify="left" if name in ("task", "method") else "right")
    groups: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in times:
        key = row["task"], row["target"], row["method"], row["density"]
        groups.setdefault(key, {})[row["network"]] = row
    for (task, target, method, _), own in sorted(groups.items(), key=lambda item: (item[0][0], -item[0][1])):
        cells = []
        for network, row in own.items():
            rivals = [one for one in times if (one["task"], one["target"], one["network"]) == (task, target, network)]
            best = min((one["seconds"] for one in rivals if one["seconds"] is not None), default=None)
            said = "–" if row["seconds"] is None else duration(row["seconds"])
            cells.append(f"[bold]{said}[/]" if row["seconds"] is not None and row["seconds"] == best else said)
        first = next(iter(own.values()))
        step = "–" if first["steps_to"] is None else f"{first['steps_to']:.0f}"
        table.add_row(task, f"{first['loss']:.3f}", method, f"{first['rate']:g}", step, *cells)
    return table


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
    """Of ``timed_curves``: a row of panels for each task, one for each network. Needs matplotlib. PNG unless the path's
    suffix says otherwise."""
    tasks, networks = (list(dict.fromkeys(row[name] for row in rows)) for name in ("task", "network"))
    with picture(path, title, height=0.5 + 3.1 * len(tasks)) as figure:
        grid = figure.subplots(len(tasks), len(networks), squeeze=False, sharey="row")
        for task, panels in zip(tasks, grid, strict=True):
            of_task = [row for row in rows if row["task"] == task and row["curve"]]
            looks = looks_of([row["method"] for row in of_task])
            for network, panel in zip(networks, panels, strict=True):
                for row in of_task:
                    if row["network"] == network:
                        look = looks[row["method"]].of_line() | {"marker": ""}
                        _, seconds, losses = zip(*row["curve"], strict=True)
                        panel.plot(seconds, losses, label=row["method"], **look)
                panel.set(xscale="log", title=f"{task}, {network}")
                seconds_across(panel.xaxis)
            panels[0].set_ylabel(f"held-out loss (nats/{TASKS[task].unit})")
            panels[-1].legend(frameon=False, fontsize="small")
