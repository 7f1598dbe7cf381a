"""Runs ``telegrad bench linear``: starts the ranks on their network, and collects what they say."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

from telegrad.bench.job import peers_store, run_job
from telegrad.bench.linear_plan import LinearPlan
from telegrad.launch import LaunchError

BOUND = (
    "What a rank must receive in a step: of a dense sum 2(P-1)/P*n values of 4 bytes; of a sparse one the K-k entries "
    "that it does not have, of 24 bits (exponents may be packed) and H(K/n)/(K/n) bits of index; of the allgather of "
    "coordinate descent (P-1)/P*n values, or the others' coordinates as such entries. received_bytes also has what "
    "coordinate descent sums to find its moves"
)
"""What ``bound_bytes`` means in result files."""

Row = dict[str, Any]


def run(plan: LinearPlan, *, timeout_s: float, on_row: Callable[[Row], None] = lambda _: None) -> list[Row]:
    """A row for each scheme that could run. ``step_s`` and ``step_comm_s``: of a step, of the slowest rank and of the
    rank that waited least for others; ``epoch_s`` and ``comm_s``: the same for as many rows (of coordinate descent,
    communication for as many columns) as the data have, scaled from ``steps``. ``received_bytes``: in a step, of the
    rank that received most, ``None`` for peers; ``bound_bytes``: see ``BOUND``. Raises ``RankFailed``,
    ``RanksTimedOut`` and ``NetlabError``, and ``ValueError`` for data that ranks cannot read or train on."""
    found: list[Row] = []
    errors: list[str] = []

    def take(rank: int, line: str) -> None:
        if line.startswith('{"error"'):
            errors.append(json.loads(line)["error"])
        if rank or not line.startswith('{"scheme"'):
            return
        place = {"op": "linear", "data": plan.name, "network": plan.network, "ranks": plan.ranks}
        found.append({**place, **json.loads(line)})
        on_row(found[-1])

    with peers_store() as store:
        own = dataclasses.replace(plan, store=store)
        try:
            run_job("telegrad.bench.linear_ranks:main", own, take, timeout_s=timeout_s, mpich="mpich" in plan.peers)
        except LaunchError as error:
            if errors:  # a rank has said what is wrong
                raise ValueError(errors[0]) from error
            raise
    return found
