"""Runs ``telegrad bench sparse``: starts the ranks on their network, and turns what they say into rows with bounds."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from telegrad.bench.job import peers_store, run_job
from telegrad.bench.networks import payload_bytes_per_s
from telegrad.bench.plan import Timing
from telegrad.bench.sparse_plan import BY_ALGORITHM, DENSE, SparsePlan, entropy_bits, value_bits

Row = dict[str, object]

_TARGET = "telegrad.bench.sparse_ranks:main"

BOUND = (
    "What a rank must receive, at the rate of its link: of a dense sum 2(P-1)/P*n values; of a sparse one the K-k "
    "entries of the sum that it does not have, each with its value (packed: with the entropy of its exponent) and "
    "H(K/n)/(K/n) bits of index; null where links have no rate, or ranks share them"
)
"""What ``bound_s`` means in result files."""


@dataclass
class Outcome:
    """By contender: seconds per call of each sample, wrong values (``None``: not looked at) and bytes sent by the rank
    that sent most (``None``: a peer's). ``missing``: why a peer did not start. ``result_nnz``: K."""

    times: dict[str, list[float]] = field(default_factory=dict)
    wrong: dict[str, int | None] = field(default_factory=dict)
    wire_bytes: dict[str, int | None] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    result_nnz: int = 0


def run(plan: SparsePlan, *, timeout_s: float, on_sample: Callable[[str], None] = lambda _: None) -> Outcome:
    """Measures all that ``plan`` asks for; ``on_sample`` is called as each sample comes. Raises ``RankFailed``,
    ``RanksTimedOut`` and ``NetlabError``."""
    outcome = Outcome()

    def take(rank: int, line: str) -> None:
        if line.startswith('{"missing"'):
            said = json.loads(line)
            outcome.missing.setdefault(said["missing"], f"rank {rank}: {said['why']}")
        elif rank == 0 and line.startswith("{"):
            said = json.loads(line)
            if "result_nnz" in said:
                outcome.result_nnz = said["result_nnz"]
            elif "seconds" in said:
                outcome.times.setdefault(said["name"], []).append(said["seconds"])
                on_sample(said["name"])
            else:
                outcome.wrong[said["name"]], outcome.wire_bytes[said["name"]] = said["wrong"], said["wire_bytes"]

    with peers_store() as store:
        run_job(
            _TARGET,
            dataclasses.replace(plan, store=store),
            take,
            timeout_s=timeout_s,
            mpich="mpich" in plan.peers,
            nodes=plan.nodes,
        )
    return outcome


def bound_bytes(plan: SparsePlan, name: str, result_nnz: int) -> float:
    """What a rank must receive at least, see ``BOUND``."""
    if name in DENSE:
        return 2 * (plan.ranks - 1) / plan.ranks * plan.n * 4
    encoding = next((part for part in ("bf16", "int8") if part in name), "f32")
    packed = "packed" in name or name.removeprefix("telegrad-") in BY_ALGORITHM
    bits = value_bits(encoding, packed=packed) + entropy_bits(result_nnz / plan.n)
    return (result_nnz - plan.nnz) * bits / 8


def rows_of(plan: SparsePlan, outcome: Outcome, missing: Mapping[str, str] | None = None) -> list[Row]:
    """A row for each contender; one that did not run has null times, and says why."""
    absent = {**(missing or {}), **outcome.missing}
    rate = payload_bytes_per_s(plan.network)
    medians = {name: Timing.of(times).median_s for name, times in outcome.times.items()}
    best_dense = min((medians[name] for name in DENSE if name in medians), default=0.0)
    rows: list[Row] = []
    for name in plan.names:
        timing = Timing.of(outcome.times[name]) if name in outcome.times else None
        least = bound_bytes(plan, name, outcome.result_nnz)
        rows.append(
            {
                "name": name,
                "network": plan.network,
                "ranks": plan.ranks,
                "nodes": plan.nodes,
                "n": plan.n,
                "density": plan.density,
                "pattern": plan.pattern,
                "nnz": plan.nnz,
                "result_nnz": outcome.result_nnz,
                "median_s": timing and timing.median_s,
                "min_s": timing and timing.min_s,
                "p90_s": timing and timing.p90_s,
                "samples": len(outcome.times.get(name, [])),
                "wire_bytes": outcome.wire_bytes.get(name),
                "bound_bytes": least,
                "bound_s": least / rate if rate and plan.nodes == 1 else None,
                "wrong": outcome.wrong.get(name),
                **{
                    f"times_faster_than_{peer.replace('-', '_')}": medians[peer] / timing.median_s
                    if timing and peer in medians
                    else None
                    for peer in ("gloo-dense", "gloo-coo", "mpich-dense")
                },
                "times_faster_than_best_dense": best_dense / timing.median_s if timing and best_dense else None,
                "missing": None if timing else absent.get(name.partition("-")[0], "not asked for"),
            }
        )
    return rows
