"""What failure detection costs: heartbeats, liveness, and telling calls to whom one waits for.

The same sums are timed in jobs that do all that and in jobs that do none of it, one pair of jobs after the other, each
pair in the other order: two communicators in one process would share the engine, and with it the cost. What comes with
every message (an envelope, and the comparison of the call in it) is in both.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from lab.common.commands import end_with_rows
from telegrad import Communicator, _core
from telegrad.launch import LaunchError, rank_and_size
from telegrad.launch.joining import exchange
from telegrad.tools.bench.allreduce import JOIN_TIMEOUT_S, TIMEOUT_S, measure, run
from telegrad.tools.bench.plan import AllreducePlan, text_of
from telegrad.tools.cli.options import JobTimeout, RowsFile, byte_sizes, networks_of
from telegrad.tools.cli.outputs import check_writable, counting
from telegrad.tools.report.figures import duration

Row = dict[str, Any]


# What each rank runs


def watched(plan_json: str) -> None:
    """One rank, as that of ``telegrad bench allreduce``."""
    measure(AllreducePlan.from_json(plan_json))


def unwatched(plan_json: str) -> None:
    """One rank without heartbeats and all that looks after peers."""
    rank, size = rank_and_size()
    # No user may have this, so it is no argument of the public functions.
    core = _core.Communicator.ucx(rank, size, exchange(JOIN_TIMEOUT_S), TIMEOUT_S, None, None, checks=False)
    measure(AllreducePlan.from_json(plan_json), joined=Communicator(core))


# Pairs of jobs


def run_pairs(
    plan: AllreducePlan, pairs: int, *, timeout_s: float, on_job: Callable[[], None] = lambda: None
) -> list[Row]:
    """A row per size: the medians of both kinds of job in seconds, and the median of the pairs' ratios. ``on_job`` is
    called after each of the ``2 * pairs`` jobs. Raises ``RankFailed`` and ``RanksTimedOut``."""
    medians: dict[bool, dict[int, list[float]]] = {True: {}, False: {}}
    wrong = 0
    for pair in range(pairs):
        for watched in (True, False) if pair % 2 else (False, True):
            target = f"lab.checks:{'watched' if watched else 'unwatched'}"
            for one in run(dataclasses.replace(plan, peers=()), timeout_s=timeout_s, target=target).measured:
                medians[watched].setdefault(one.size, []).append(one.timing.median_s)
                wrong += one.wrong
            on_job()
    return [_row(plan, size, medians[True][size], medians[False][size], wrong) for size in plan.sizes]


def _row(plan: AllreducePlan, size: int, watched: Sequence[float], unwatched: Sequence[float], wrong: int) -> Row:
    ratios = sorted(one / other for one, other in zip(watched, unwatched, strict=True))
    return {
        "op": plan.benchmark,
        "network": plan.network,
        "ranks": plan.ranks,
        "bytes": size,
        "watched_median_s": statistics.median(watched),
        "unwatched_median_s": statistics.median(unwatched),
        "ratio": statistics.median(ratios),
        "least_ratio": ratios[0],
        "most_ratio": ratios[-1],
        "pairs": len(ratios),
        "wrong": wrong,
    }


# The command


def command(
    ranks: Annotated[int, typer.Option(min=2, max=256, help="Processes to start; more than cores drown in noise.")] = 2,
    network: Annotated[str, typer.Option(help="shm, tcp, or a rate such as 1gbit; several: shm,tcp.")] = "shm,tcp",
    sizes: Annotated[str, typer.Option(help="Lengths of the vector, separated by commas.")] = "64KiB,16MiB",
    pairs: Annotated[int, typer.Option(min=1, help="Pairs of jobs, with and without, one after the other.")] = 15,
    seconds: Annotated[float, typer.Option(min=0.01, help="About how long to measure each size in each job.")] = 1.5,
    json_file: RowsFile = None,
    timeout: JobTimeout = 300.0,
) -> None:
    """Time sums in jobs with heartbeats, liveness and the watch over stuck operations, and in jobs without.

    [bold]ratio[/] is the median over all pairs of jobs: above 1 the watch costs time. The jobs last [bold]--seconds[/]
    per size, so that heartbeats, one a second, do come.
    """
    console = Console()
    names = [name.strip() for name in network.split(",")]
    networks_of(names)
    lengths = byte_sizes(sizes)
    check_writable(json_file, "--json")
    rows: list[Row] = []
    with counting(console) as progress:
        task = progress.add_task("jobs", total=2 * pairs * len(names))
        for name in names:
            plan = AllreducePlan("checks", name, ranks, lengths, ("auto",), samples=400, seconds=seconds * len(lengths))
            try:
                rows += run_pairs(plan, pairs, timeout_s=timeout, on_job=lambda: progress.advance(task))
            except (LaunchError, RuntimeError) as error:
                console.print(f"[red]{name}:[/] {error}", highlight=False)
                raise typer.Exit(1) from error
    console.print(_table_of(rows, f"all_reduce, {ranks} ranks: with the watch over peers, and without"))
    end_with_rows(console, rows, json_file)


def _table_of(rows: list[Row], title: str) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold")
    table.add_column("network")
    for name in ("size", "with", "without", "ratio", "of the pairs"):
        table.add_column(name, justify="right")
    for row in rows:
        seconds = [float(str(row[name])) for name in ("watched_median_s", "unwatched_median_s")]
        table.add_row(
            str(row["network"]),
            text_of(int(str(row["bytes"]))),
            *map(duration, seconds),
            f"{row['ratio']:.3f}",
            f"{row['least_ratio']:.2f} … {row['most_ratio']:.2f}",
        )
    return table
