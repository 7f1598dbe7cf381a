"""Runs a benchmark: starts its ranks on its network, and turns what rank 0 reports into rows with ratios and bounds."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from telegrad.bench.allreduce import WIRE_BITS
from telegrad.bench.job import peers_store, run_job
from telegrad.bench.networks import payload_bytes_per_s
from telegrad.bench.peers import PEERS
from telegrad.bench.plan import AllreducePlan, Measured, bound_bytes, bus_factor

Row = dict[str, object]

TARGET = "telegrad.bench.allreduce:main"


@dataclass
class AllreduceOutcome:
    """``measured``: each contender at each size once, sizes ascending. ``missing``: why a peer did not start, by
    name."""

    measured: list[Measured] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)


def run(
    plan: AllreducePlan, *, timeout_s: float, on_measured: Callable[[Measured], None] = lambda _: None
) -> AllreduceOutcome:
    """Everything that ``plan`` asks for; ``on_measured`` sees each result as it comes, and once more if it was measured
    again. Raises ``RankFailed`` and ``RanksTimedOut``."""
    found: dict[tuple[int, str], Measured] = {}
    outcome = AllreduceOutcome()

    def take(rank: int, line: str) -> None:
        if line.startswith('{"missing"'):
            said = json.loads(line)
            outcome.missing.setdefault(said["missing"], f"rank {rank}: {said['why']}")
        elif rank == 0 and line.startswith("{"):
            one = Measured.from_json(line)
            found[one.size, one.contender] = one
            on_measured(one)

    report_of(plan, take, timeout_s=timeout_s)
    outcome.measured = sorted(found.values(), key=lambda one: one.size)
    return outcome


def report_of(
    plan: AllreducePlan, on_line: Callable[[int, str], None], *, timeout_s: float, target: str = TARGET
) -> None:
    """Runs ``plan`` on its network; ``on_line(rank, line)`` gets what the ranks print, which run ``target``
    (``module:function``, with the plan as JSON). Raises ``RankFailed`` and ``RanksTimedOut``."""
    with peers_store() as store:
        run_job(
            target,
            dataclasses.replace(plan, store=store),
            on_line,
            timeout_s=timeout_s,
            mpich="mpich" in plan.peers,
            nodes=plan.nodes,
        )


def count_of(plan: AllreducePlan) -> int:
    """How many results ``run`` will see, without those that come again."""
    return len(plan.sizes) * (len(plan.contenders) + len(plan.peers))


def rows_of(plan: AllreducePlan, outcome: AllreduceOutcome, missing: Mapping[str, str] | None = None) -> list[Row]:
    """A row for each algorithm and size, with the peers' times of the same run beside it. ``missing``: why a peer was
    not even asked to start."""
    absent = {**(missing or {}), **outcome.missing}
    by_contender = {(one.contender, one.size): one for one in outcome.measured}
    return [
        _row(plan, one, {peer: by_contender.get((peer, one.size)) for peer in PEERS}, absent)
        for one in outcome.measured
        if one.contender not in PEERS
    ]


def _row(plan: AllreducePlan, ours: Measured, peers: Mapping[str, Measured | None], absent: Mapping[str, str]) -> Row:
    links = plan.nodes if plan.nodes > 1 else plan.ranks  # a node has one, whatever its ranks
    least_bytes = bound_bytes(links, ours.size) * WIRE_BITS.get(ours.contender, 32) / 32
    rate = payload_bytes_per_s(plan.network)
    return {
        "op": plan.benchmark,
        "algorithm": ours.contender,
        "chosen": ours.chosen,
        "driver": ours.driver,
        "network": plan.network,
        "ranks": plan.ranks,
        "nodes": plan.nodes,
        "bytes": ours.size,
        "median_s": ours.timing.median_s,
        "min_s": ours.timing.min_s,
        "p90_s": ours.timing.p90_s,
        "samples": ours.samples,
        "measured_again": ours.again,
        "algbw_bytes_per_s": ours.size / ours.timing.median_s,
        "busbw_bytes_per_s": ours.size / ours.timing.median_s * bus_factor(plan.ranks),
        "wire_bytes": ours.wire_bytes,
        "bound_bytes": least_bytes,
        "bound_s": least_bytes / rate if rate else None,
        "wrong": ours.wrong,
        **{name: value for peer, one in peers.items() for name, value in _beside(peer, ours, one, absent).items()},
    }


def _beside(peer: str, ours: Measured, theirs: Measured | None, absent: Mapping[str, str]) -> Row:
    return {
        f"{peer}_median_s": theirs.timing.median_s if theirs else None,
        f"{peer}_p90_s": theirs.timing.p90_s if theirs else None,
        f"{peer}_samples": theirs.samples if theirs else None,
        f"ratio_to_{peer}": ours.timing.median_s / theirs.timing.median_s if theirs else None,
        f"{peer}_wrong": theirs.wrong if theirs else None,
        f"{peer}_missing": None if theirs else absent.get(peer, "not asked for"),
    }
