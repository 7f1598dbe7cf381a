"""Which network interfaces the ranks of a job use, where nobody names them.

Every rank tells the others which interfaces its host has. All see the same table, and choose by the same rules:

1. the interface that routes to rank 0's host, which is where MASTER_ADDR is reached by;
2. besides it, interfaces in networks that every host has, if one host can connect to the next one there.

An address that two hosts have (docker0, a node-local DNS cache, the interface of an overlay network) is nobody's: a
connection to it ends at the host where it began. Ranks of one host that share memory use no network, other ranks of one
host leave the choice to UCX. This module must not know how the bytes travel.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import selectors
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from telegrad._interfaces import Interface, host_name, interfaces, rdma_ports
from telegrad.communicator.nodes import machine_id, space_of_memory
from telegrad.errors import TransportError

Exchange = Callable[[bytes], list[bytes]]
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_CONNECTS_S = 2.0  # on a network that a host reaches by one hop
_ANY_PORT = 9  # of UDP, to which nothing is sent
_OUTSIDE = ("192.0.2.1", "2001:db8::1")  # kept for documentation: no host has them
_VARIABLE = "UCX_NET_DEVICES"
MEMORY = "memory"
"""As a device's name: shared memory, and no network."""
_MOST_LINKS = 64  # told to the others


@dataclass(frozen=True)
class Link:
    """An interface that is up, with the address that UCX takes: its first of IPv4, else of IPv6."""

    name: str
    address: str
    prefix: int

    @property
    def network(self) -> Network:
        """The one that its address is in."""
        return ipaddress.ip_network(f"{self.address}/{self.prefix}", strict=False)


@dataclass(frozen=True)
class Host:
    """What a rank says of its host. ``label``: no other network namespace has it. ``toward``: the interface by which it
    reaches the job's store, or that its program has named (``named``); ``outward``: that of the default route;
    ``memory``: who says the same shares memory and sees its processes, if it says anything."""

    label: str
    name: str
    links: tuple[Link, ...]
    toward: str = ""
    outward: str = ""
    named: bool = False
    rdma: bool = False
    memory: str = ""

    def packed(self) -> bytes:
        links = [[one.name, one.address, one.prefix] for one in self.links]
        rest = [self.toward, self.outward, self.named, self.rdma, self.memory]
        return json.dumps([self.label, self.name, links, *rest]).encode()

    @classmethod
    def unpacked(cls, packed: bytes) -> Host:
        """Raises ``ValueError`` for what ``packed()`` has not made."""
        try:
            label, name, links, *rest = json.loads(packed)
            return cls(label, name, tuple(Link(*one) for one in links), *rest)
        except (TypeError, ValueError) as error:
            raise ValueError(
                "exchange returned a blob that describes no host: all ranks must run the same version of telegrad"
            ) from error

    def link(self, name: str) -> Link | None:
        return next((one for one in self.links if one.name == name), None)


def agree(rank: int, exchange: Exchange, interface: str | None, address: str | None) -> str | None:
    """The devices that UCX is to use on this rank, as ``UCX_NET_DEVICES`` names them, or ``MEMORY``. ``None``: UCX
    chooses, or the program has named some (by ``interface``, or by that variable). All ranks call this. ``address``:
    where this host reaches the job's store.

    Raises ``TransportError`` on all ranks where a host has no address of its own.
    """
    present = _present()
    hosts = [Host.unpacked(blob) for blob in exchange(_own_host(interface, address, present).packed())]
    table = Table(hosts)
    if not table.spans_hosts:
        if hosts[rank].memory and len({one.memory for one in hosts}) == 1:
            return MEMORY
        return alone(interface, present)
    table.check()
    shared = table.common_networks()
    kept = _verified(rank, table, shared, exchange) if shared else []
    own = hosts[rank]
    if own.named:
        return None
    return table.devices(own.label, kept, rdma_ports(), lambda target: _way_to(target, present))


def alone(interface: str | None, present: Sequence[Interface] | None = None) -> str | None:
    """The same where this rank knows nothing of the others' hosts: UCX's choice, which leaves bridges out, and the
    bridge that the default route takes."""
    if interface is not None or os.environ.get(_VARIABLE):
        return None
    usable = [one for one in (_present() if present is None else present) if one.up and one.addresses]
    outward = _outward(usable)
    if not any(one.bridge and one.name == outward for one in usable):
        return None
    return ",".join([*(one.name for one in usable if not one.bridge or one.name == outward), *rdma_ports()])


class Table:
    """The hosts of a job by rank, and what follows from them for all alike."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        self._hosts: dict[str, Host] = {}
        self._first_rank: dict[str, int] = {}
        for rank, host in enumerate(hosts):
            if host.label not in self._hosts:
                self._hosts[host.label], self._first_rank[host.label] = host, rank
        holders: dict[str, set[str]] = {}
        for host in self._hosts.values():
            for link in host.links:
                holders.setdefault(link.address, set()).add(host.label)
        self._shared = {address for address, labels in holders.items() if len(labels) > 1}

    @property
    def spans_hosts(self) -> bool:
        return len(self._hosts) > 1

    def check(self) -> None:
        """Raises ``TransportError`` where a host has addresses, and other hosts have each of them too."""
        for host in self._hosts.values():
            if host.links and not self._own(host) and not host.rdma:
                said = ", ".join(f"{one.name} {one.address}" for one in host.links[:8])
                raise TransportError(
                    f"other hosts of this job have each address of host {host.name} too ({said}): nobody reaches it. "
                    "Give its network interface an address of its own (of containers on several hosts: an overlay "
                    "network, or docker run --network=host)",
                    peer=self._first_rank[host.label],
                    host=host.name,
                    operation="join",
                )

    def speakers(self) -> list[int]:
        """Of each host the first rank."""
        return list(self._first_rank.values())

    def common_networks(self) -> list[Network]:
        """Those in which every host has an address of its own, but for the one that all find by their routes."""
        everybodys: list[set[Network]] = [
            {one.network for one in self._own(host) if one.network.num_addresses > 1} for host in self._hosts.values()
        ]
        anchor = self._anchor()
        found = set.intersection(*everybodys)
        return sorted(
            (one for one in found if anchor is None or ipaddress.ip_address(anchor[1].address) not in one), key=str
        )

    def links_in(self, network: Network) -> list[Link]:
        """Of each host the first link there, in the order of ``speakers()``."""
        return [next(one for one in self._own(host) if one.network == network) for host in self._hosts.values()]

    def devices(
        self, label: str, networks: Iterable[Network], ports: Sequence[str], way_to: Callable[[str], str]
    ) -> str | None:
        """For UCX on the host ``label``: what reaches all others, and RDMA's ``ports``. ``way_to``: by which interface
        that host reaches an address."""
        own = self._own(self._hosts[label])
        first = self._first_choice(label, way_to)
        names = [] if first is None else [first.name]
        names += [one.name for network in networks for one in own if one.network == network and one.name not in names]
        return ",".join([*names, *ports]) if names else None

    def _own(self, host: Host) -> list[Link]:
        return [one for one in host.links if one.address not in self._shared]

    def _usable(self, host: Host, name: str) -> Link | None:
        return next((one for one in self._own(host) if one.name == name), None)

    def _own_choice(self, host: Host) -> Link | None:
        own = self._own(host)
        return (
            self._usable(host, host.toward) or self._usable(host, host.outward) or (own[0] if len(own) == 1 else None)
        )

    def _anchor(self) -> tuple[str, Link] | None:
        """A host and its link, to which the others look for their routes: rank 0's, unless that does not know it, as
        where MASTER_ADDR is loopback there."""
        everybody = list(self._hosts.values())
        for host in everybody:
            if link := self._usable(host, host.toward):
                return host.label, link
        for host in everybody:
            if link := self._own_choice(host):
                return host.label, link
        return None

    def _first_choice(self, label: str, way_to: Callable[[str], str]) -> Link | None:
        host, anchor = self._hosts[label], self._anchor()
        if anchor is None or anchor[0] == label:
            return self._own_choice(host)
        return self._usable(host, way_to(anchor[1].address)) or self._own_choice(host)


def _verified(rank: int, table: Table, networks: Sequence[Network], exchange: Exchange) -> list[Network]:
    """Those in which each host can connect to the next one: two sites may have the same private network."""
    speakers = table.speakers()
    place = speakers.index(rank) if rank in speakers else None
    links = [table.links_in(network) for network in networks]
    with contextlib.ExitStack() as stack:
        ports: list[int] = []
        if place is not None:
            ports = [_listening(of_hosts[place].address, stack) for of_hosts in links]
        told = exchange(json.dumps(ports).encode())
        reached: list[bool] = []
        if place is not None:
            following = (place + 1) % len(speakers)
            theirs = json.loads(told[speakers[following]])
            reached = _connects(
                [
                    (of_hosts[place].address, of_hosts[following].address, port)
                    for of_hosts, port in zip(links, theirs, strict=True)
                ]
            )
        answers = exchange(json.dumps(reached).encode())
    results = [json.loads(answers[speaker]) for speaker in speakers]
    return [network for network, *each in zip(networks, *results, strict=True) if all(each)]


def _listening(address: str, stack: contextlib.ExitStack) -> int:
    """A port at ``address`` where connections are taken until ``stack`` is closed; 0 where that cannot be."""
    try:
        listener = stack.enter_context(socket.socket(_family_of(address), socket.SOCK_STREAM))
        listener.bind((address, 0))
        listener.listen()
        return int(listener.getsockname()[1])
    except OSError:
        return 0


def _connects(ends: Sequence[tuple[str, str, int]]) -> list[bool]:
    """Whether a connection from an address to another one's port comes about, for each of ``ends``; all at once."""
    reached = [False] * len(ends)
    with contextlib.ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        for index, (source, target, port) in enumerate(ends):
            if port == 0:
                continue
            end = stack.enter_context(socket.socket(_family_of(source), socket.SOCK_STREAM))
            end.setblocking(False)
            with contextlib.suppress(OSError):
                end.bind((source, 0))
                end.connect_ex((target, port))
                selector.register(end, selectors.EVENT_WRITE, index)
        deadline_s = time.monotonic() + _CONNECTS_S
        while selector.get_map() and (left_s := deadline_s - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                end = key.fileobj  # type: ignore[assignment]
                reached[key.data] = end.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
                selector.unregister(end)
    return reached


def _own_host(interface: str | None, address: str | None, present: Sequence[Interface]) -> Host:
    asked = interface or os.environ.get(_VARIABLE, "")
    names = [] if asked in ("", "all") or asked.startswith("^") else asked.split(",")
    usable = [one for one in present if one.up and one.addresses and not one.loopback]
    if names:
        usable = [one for one in usable if one.name in names]
    links = [Link(one.name, one.addresses[0], one.prefixes[0]) for one in usable][:_MOST_LINKS]
    toward = next((one.name for one in links), "")
    if not names:
        toward = "" if address is None else _way_to(address, usable)
    return Host(
        label=_namespace(),
        name=socket.gethostname(),
        links=tuple(links),
        toward=toward,
        outward=_outward(usable),
        named=bool(asked),
        rdma=bool(rdma_ports()),
        memory="" if asked or os.environ.get("UCX_TLS") else space_of_memory(),
    )


def _present() -> list[Interface]:
    """Without addresses that need an interface's name beside them, which UCX does not give."""
    found = []
    with contextlib.suppress(OSError):
        for one in interfaces(only_addresses=True):
            kept = [pair for pair in zip(one.addresses, one.prefixes, strict=True) if not pair[0].startswith("fe80:")]
            addresses, prefixes = zip(*kept, strict=True) if kept else ((), ())
            found.append(replace(one, addresses=addresses, prefixes=prefixes))
    return found


def _source_of(address: str) -> str | None:
    """The address from which this host would send to ``address``, which may be a name; None: it has no route."""
    try:
        found = socket.getaddrinfo(host_name(address), _ANY_PORT, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, protocol, _, target in found:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as end:
            end.connect(target)
            return str(end.getsockname()[0]).partition("%")[0]
    return None


def _way_to(address: str, present: Iterable[Interface]) -> str:
    """The interface by which this host reaches ``address``, or which has it; empty: none of those present."""
    source = _source_of(address)
    return next((one.name for one in present if source in one.addresses), "")


def _outward(present: Sequence[Interface]) -> str:
    return next((name for one in _OUTSIDE if (name := _way_to(one, present))), "")


def _namespace() -> str:
    try:
        return f"{machine_id()}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return f"{machine_id()}/{socket.gethostname()}"


def _family_of(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
