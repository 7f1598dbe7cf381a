"""Over what the ranks of a benchmark talk: shared memory, loopback TCP, or links of a given rate between network
namespaces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from telegrad.bench.netlab import INTERFACE, Netlab, parse_rate

_TCP_ONLY = {"UCX_TLS": "tcp,self", "MPIR_CVAR_NOLOCAL": "1"}  # MPICH has a shared memory of its own besides UCX's

# Of each frame of 1,514 bytes, as tc counts it, TCP's user gets 1,448: 1,500 without the headers of IP and TCP (20 and
# 20 + 12 for time stamps).
_TCP_SHARE = 1448 / 1514

BOUND_FORMULA = (
    "bound_bytes / (rate / 8 * 1448 / 1514), where a link has a rate: of each Ethernet frame of 1514 bytes TCP carries "
    "1448; null for shm and tcp, whose links have none"
)
"""What ``bound_s`` means in result files."""


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


def rate_bytes_per_s(name: str) -> float | None:
    """Bytes per second of a rank's link in each direction, headers included; None where no link has a rate (shared
    memory, loopback). Raises ``ValueError`` for unknown names."""
    check_network(name)
    return None if name in ("shm", "tcp") else parse_rate(name) / 8


def payload_bytes_per_s(name: str) -> float | None:
    """The same, but only what TCP's user gets at most."""
    rate = rate_bytes_per_s(name)
    return None if rate is None else rate * _TCP_SHARE


@contextmanager
def open_network(name: str, ranks: int) -> Iterator[Network]:
    """``shm``: what UCX takes on one machine; ``tcp``: sockets over loopback; a rate such as ``1gbit``: one network
    namespace per rank, links shaped by tc (needs root). Raises ``ValueError`` for other names, ``NetlabError`` if the
    namespaces cannot be made."""
    check_network(name)
    if name == "shm":
        yield Network(name, {"GLOO_SOCKET_IFNAME": "lo"})
    elif name == "tcp":
        yield Network(name, {**_TCP_ONLY, "GLOO_SOCKET_IFNAME": "lo"})
    else:
        # No transport but TCP: shared memory would go round the namespaces.
        # Named, since a host's name does not tell one laboratory's tuning from another's.
        environment = {**_TCP_ONLY, "GLOO_SOCKET_IFNAME": INTERFACE, "TELEGRAD_NETWORK": f"netlab {name}"}
        with Netlab(ranks, name) as laboratory:
            yield Network(name, environment, laboratory.prefix_of)
