"""One job of a benchmark: its ranks on their network. What they measure and what they print, this must not know."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from telegrad.bench.networks import open_network
from telegrad.launch import SINGLE_THREADED, Ranks


class JobPlan(Protocol):
    """What a job needs of its plan."""

    @property
    def network(self) -> str: ...

    @property
    def ranks(self) -> int: ...

    def to_json(self) -> str: ...


def run_job(
    target: str,
    plan: JobPlan,
    on_line: Callable[[int, str], None],
    *,
    timeout_s: float,
    mpich: bool = False,
    nodes: int = 1,
) -> None:
    """Runs ``target`` (``module:function``, ``plan`` as JSON) on every rank; ``on_line(rank, line)`` gets what they
    print. ``mpich``: they call MPI; ``nodes``: on how many they live. Raises ``RankFailed``, ``RanksTimedOut``
    and ``NetlabError``."""
    with (
        open_network(plan.network, plan.ranks, nodes) as network,
        Ranks(
            target,
            plan.ranks,
            timeout_s=timeout_s,
            arguments=[plan.to_json()],
            environment={**SINGLE_THREADED, **network.environment},
            prefix_of=network.prefix_of,
            on_line=on_line,
            mpich=mpich,
        ) as ranks,
    ):
        ranks.wait()


@contextmanager
def peers_store() -> Iterator[str]:
    """A path at which Gloo's processes can meet."""
    with tempfile.TemporaryDirectory(prefix="telegrad-bench-") as folder:
        yield str(Path(folder) / "store")
