"""Jobs of benchmarks and over what their ranks talk: shared memory, loopback TCP, or links of a given rate between
network namespaces. What ranks measure and what they print, this must not know.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from telegrad.launch import SINGLE_THREADED, Ranks
from telegrad.tools.bench.netlab import INTERFACE, Netlab, parse_rate

_TCP_ONLY = {"UCX_TLS": "tcp,self", "MPIR_CVAR_NOLOCAL": "1"}  # MPICH has a shared memory of its own besides UCX's

_WITHIN_NODES = {"UCX_TLS": "posix,sysv,cma,tcp,self", "MPIR_CVAR_NOLOCAL": "1"}

# Of each frame of 1,514 bytes, as tc counts it, TCP's user gets 1,448: 1,500 without the headers of IP and TCP (20 and
# 20 + 12 for time stamps).
_TCP_SHARE = 1448 / 1514

BOUND_FORMULA = (
    "bound_bytes / (rate / 8 * 1448 / 1514), where a link has a rate: of each Ethernet frame of 1514 bytes TCP carries "
    "1448; null for shm and tcp, whose links have none"
)
"""What ``bound_s`` means in result files."""


@dataclass(frozen=True)
class OpenNetwork:
    """What the ranks' processes are started with so that they meet this network, and nothing faster."""

    name: str
    environment: Mapping[str, str] = field(default_factory=dict)
    prefix_of: Callable[[int], Sequence[str]] | None = None


def check_network(name: str) -> None:
    """Raises ``ValueError`` for a name that ``open_network`` does not know."""
    if name in ("shm", "tcp"):
        return
    try:
        parse_rate(name)
    except ValueError as error:
        raise ValueError(f"network {name!r} is not known: use shm, tcp, or a rate such as 1gbit or 100mbit") from error


def rate_bytes_per_s(name: str) -> float | None:
    """Bytes per second of a rank's link in each direction, headers included; None where no link has a rate (shared
    memory, loopback). Raises ``ValueError`` for unknown names."""
    check_network(name)
    return None if name in ("shm", "tcp") else parse_rate(name) / 8


def payload_bytes_per_s(name: str) -> float | None:
    """The same, but only what TCP's user gets at most."""
    rate = rate_bytes_per_s(name)
    return None if rate is None else rate * _TCP_SHARE


def node_of(rank: int, ranks: int, nodes: int) -> int:
    """Where ``rank`` runs: neighbours together, and nodes as alike as can be."""
    return rank * nodes // ranks


def check_nodes(name: str, ranks: int, nodes: int) -> None:
    """Raises ``ValueError`` unless ``ranks`` on that network can be put on so many nodes."""
    check_network(name)
    if not 1 <= nodes <= ranks:
        raise ValueError(f"nodes={nodes} must be between 1 and ranks={ranks}: every node has a rank")
    if nodes > 1 and name in ("shm", "tcp"):
        raise ValueError(f"network {name!r} has no nodes: give a rate such as 1gbit, or nodes=1")


@contextmanager
def open_network(name: str, ranks: int, nodes: int = 1) -> Iterator[OpenNetwork]:
    """``shm``: what UCX takes on one machine; ``tcp``: sockets over loopback; a rate such as ``1gbit``: one network
    namespace per rank, links shaped by tc (needs root); with more than one of ``nodes``, one per node, whose ranks
    share its link and memory. Raises ``ValueError`` for other names and nodes, ``NetlabError`` if the namespaces cannot
    be made."""
    check_nodes(name, ranks, nodes)
    if name == "shm":
        yield OpenNetwork(name, {"GLOO_SOCKET_IFNAME": "lo"})
    elif name == "tcp":
        yield OpenNetwork(name, {**_TCP_ONLY, "GLOO_SOCKET_IFNAME": "lo"})
    elif nodes > 1:
        environment = {**_WITHIN_NODES, "GLOO_SOCKET_IFNAME": INTERFACE, "TELEGRAD_NETWORK": f"netlab {name}"}
        with Netlab(nodes, name) as laboratory:
            laboratory.open_memory()
            yield OpenNetwork(name, environment, lambda rank: laboratory.prefix_of(node_of(rank, ranks, nodes)))
    else:
        # No transport but TCP: shared memory would go round the namespaces.
        # Named, since a host's name does not tell one laboratory's tuning from another's.
        environment = {**_TCP_ONLY, "GLOO_SOCKET_IFNAME": INTERFACE, "TELEGRAD_NETWORK": f"netlab {name}"}
        with Netlab(ranks, name) as laboratory:
            yield OpenNetwork(name, environment, laboratory.prefix_of)


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
