"""Over what the ranks of a benchmark talk: shared memory, loopback TCP, or links of a given rate between network
namespaces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from telegrad.bench.netlab import INTERFACE, Netlab, parse_rate


@dataclass(frozen=True)
class Network:
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


@contextmanager
def open_network(name: str, ranks: int) -> Iterator[Network]:
    """``shm``: what UCX takes on one machine; ``tcp``: sockets over loopback; a rate such as ``1gbit``: one network
    namespace per rank, links shaped by tc (needs root). Raises ``ValueError`` for other names, ``NetlabError`` if the
    namespaces cannot be made."""
    check_network(name)
    if name == "shm":
        yield Network(name, {"GLOO_SOCKET_IFNAME": "lo"})
    elif name == "tcp":
        yield Network(name, {"UCX_TLS": "tcp,self", "GLOO_SOCKET_IFNAME": "lo"})
    else:
        # No transport but TCP: shared memory would go round the namespaces.
        # Named, since a host's name does not tell one laboratory's tuning from another's.
        environment = {"UCX_TLS": "tcp,self", "GLOO_SOCKET_IFNAME": INTERFACE, "TELEGRAD_NETWORK": f"netlab {name}"}
        with Netlab(ranks, name) as laboratory:
            yield Network(name, environment, laboratory.prefix_of)
