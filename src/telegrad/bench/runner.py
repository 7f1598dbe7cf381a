"""Runs a benchmark: starts its ranks on its network, and turns what rank 0 reports into rows with ratios and bounds."""

from __future__ import annotations

import dataclasses
import importlib.util
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from telegrad.bench.networks import open_network
from telegrad.bench.plan import Measured, Plan
from telegrad.bench.registry import BENCHMARKS
from telegrad.launch import SINGLE_THREADED, Ranks

Row = dict[str, object]


def why_without_peer(peer: str) -> str | None:
    """Why ``peer`` cannot run here; None if it can. Raises ``ValueError`` for an unknown name."""
    if peer == "none":
        return "not asked for"
    if peer != "gloo":
        raise ValueError(f"peer {peer!r} is not known: use gloo or none")
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed: pip install 'telegrad[torch]'"
    return None


def run(plan: Plan, *, timeout_s: float, on_measured: Callable[[Measured], None] = lambda _: None) -> list[Measured]:
    """Everything that ``plan`` asks for; ``on_measured`` sees each result as it comes. Raises ``RankFailed`` and
    ``RanksTimedOut``."""
    measured: list[Measured] = []

    def take(rank: int, line: str) -> None:
        if rank == 0 and line.startswith("{"):
            measured.append(Measured.from_json(line))
            on_measured(measured[-1])

    with (
        tempfile.TemporaryDirectory(prefix="telegrad-bench-") as folder,
        open_network(plan.network, plan.ranks) as network,
    ):
        plan = dataclasses.replace(plan, store=str(Path(folder) / "store"))
        with Ranks(
            BENCHMARKS[plan.benchmark].target,
            plan.ranks,
            timeout_s=timeout_s,
            arguments=[plan.to_json()],
            environment={**SINGLE_THREADED, **network.environment},
            prefix_of=network.prefix_of,
            on_line=take,
        ) as ranks:
            ranks.wait()
    return measured


def count_of(plan: Plan) -> int:
    """How many results ``run`` will see."""
    return len(plan.sizes) * (len(plan.algorithms) + (plan.peer is not None))


def rows_of(plan: Plan, measured: Iterable[Measured]) -> list[Row]:
    """A row for each algorithm and size, with the peer's time of the same run beside it."""
    found = list(measured)
    benchmark = BENCHMARKS[plan.benchmark]
    peers = {one.size: one for one in found if one.contender == plan.peer}
    return [
        _row(plan, one, peers.get(one.size), benchmark.bound_bytes(plan.ranks, one.size))
        | {"busbw_bytes_per_s": one.size / one.timing.median_s * benchmark.bus_factor(plan.ranks)}
        for one in found
        if one.contender != plan.peer
    ]


def _row(plan: Plan, ours: Measured, peer: Measured | None, bound_bytes: float) -> Row:
    return {
        "op": plan.benchmark,
        "algorithm": ours.contender,
        "driver": ours.driver,
        "network": plan.network,
        "ranks": plan.ranks,
        "bytes": ours.size,
        "median_s": ours.timing.median_s,
        "min_s": ours.timing.min_s,
        "p90_s": ours.timing.p90_s,
        "wire_bytes": ours.wire_bytes,
        "bound_bytes": bound_bytes,
        "gloo_median_s": peer.timing.median_s if peer else None,
        "ratio_to_gloo": ours.timing.median_s / peer.timing.median_s if peer else None,
        "gloo_wrong": peer.wrong if peer else None,
        "wrong": ours.wrong,
    }
