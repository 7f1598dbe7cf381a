"""Jobs on hosts with several interfaces. A host is a network namespace, which is one of its own to sockets and UCX."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from telegrad.launch import Ranks
from telegrad.tools.bench import netlab

pytestmark = pytest.mark.skipif(netlab.why_unavailable() is not None, reason=str(netlab.why_unavailable()))

_serial = itertools.count()
_NETWORK = "192.168.77"


class Hosts:
    """Two of them, with a cable between their interfaces ``nic``, which have no address yet."""

    def __init__(self) -> None:
        self.names = [f"tgh{os.getpid()}x{next(_serial)}n{number}" for number in range(2)]

    def __enter__(self) -> Hosts:
        for name in self.names:
            subprocess.run(["ip", "netns", "add", name], check=True)
        cable = ["type", "veth", "peer", "name", "nic", "netns", self.names[1]]
        self.ip(0, "link", "add", "nic", *cable)
        for number in range(2):
            self.ip(number, "link", "set", "lo", "up")
            self.ip(number, "link", "set", "nic", "up")
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False)

    def ip(self, number: int, *arguments: str) -> None:
        """The command ``ip`` on a host. A kind of link that this kernel has not skips the test."""
        done = subprocess.run(["ip", "-n", self.names[number], *arguments], capture_output=True, text=True, check=False)
        if "Unknown device type" in done.stderr or "not supported" in done.stderr:
            pytest.skip(f"this kernel has no {' '.join(arguments)}")
        assert done.returncode == 0, (arguments, done.stderr)

    def address(self, number: int, interface: str = "nic", network: str = _NETWORK, prefix: int = 24) -> None:
        """Gives a host its address in a network."""
        self.ip(number, "addr", "add", f"{network}.{number + 1}/{prefix}", "dev", interface)

    def end(self, number: int, name: str, address: str) -> None:
        """An interface whose other end is in the same host, as those of containers are."""
        self.ip(number, "link", "add", name, "type", "veth", "peer", "name", f"{name}-in")
        self.ip(number, "addr", "add", address, "dev", name)
        self.ip(number, "link", "set", name, "up")
        self.ip(number, "link", "set", f"{name}-in", "up")

    def prefix_of(self, number: int) -> Sequence[str]:
        return ["ip", "netns", "exec", self.names[number]]


def _met(hosts: Hosts, *arguments: str, target: str = "meet", **environment: str) -> list[dict[str, Any]]:
    said: dict[int, dict[str, Any]] = {}
    own = {name: value for name, value in environment.items() if name != "UCX_TLS"}
    with Ranks(
        f"networks_program:{target}",
        2,
        timeout_s=100,
        arguments=arguments,
        environment={"UCX_TLS": environment.get("UCX_TLS", "tcp,self"), "PYTHONPATH": os.path.dirname(__file__), **own},
        environment_of=lambda rank: {"RANK": str(rank)},
        prefix_of=hosts.prefix_of,
        on_line=lambda rank, line: said.update({rank: json.loads(line)}),
    ) as ranks:
        ranks.wait()
    return [said[rank] for rank in range(2)]


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts() as made:
        yield made


def _bridge(hosts: Hosts, name: str = "br0") -> None:
    for number in range(2):
        hosts.ip(number, "link", "add", name, "type", "bridge")
        hosts.ip(number, "link", "set", "nic", "master", name)
        hosts.ip(number, "link", "set", name, "up")
        hosts.address(number, name)


def _service(hosts: Hosts) -> None:
    """An address that each host has: a node-local DNS cache."""
    for number in range(2):
        hosts.end(number, "svc", "10.96.0.10/32")
        hosts.address(number)


def _containers(hosts: Hosts) -> None:
    """Bridges of containers, docker0 with one address on all hosts, cni0 with a network of each host's own."""
    for number in range(2):
        for bridge, address in (("docker0", "172.17.0.1/16"), ("cni0", f"10.244.{number}.1/24")):
            hosts.ip(number, "link", "add", bridge, "type", "bridge")
            hosts.end(number, f"c-{bridge}", f"169.254.{number + 1}.{len(bridge)}/32")
            hosts.ip(number, "link", "set", f"c-{bridge}-in", "master", bridge)
            hosts.ip(number, "addr", "add", address, "dev", bridge)
            hosts.ip(number, "link", "set", bridge, "up")
        hosts.address(number)


def _vlan(hosts: Hosts) -> None:
    for number in range(2):
        hosts.ip(number, "link", "add", "link", "nic", "name", "nic.100", "type", "vlan", "id", "100")
        hosts.address(number, "nic.100")
        hosts.ip(number, "link", "set", "nic.100", "up")


def _vlan_of_bridge(hosts: Hosts) -> None:
    for number in range(2):
        hosts.ip(number, "link", "add", "br0", "type", "bridge")
        hosts.ip(number, "link", "set", "nic", "master", "br0")
        hosts.ip(number, "link", "set", "br0", "up")
        hosts.ip(number, "link", "add", "link", "br0", "name", "br0.100", "type", "vlan", "id", "100")
        hosts.address(number, "br0.100")
        hosts.ip(number, "link", "set", "br0.100", "up")


def _routed(hosts: Hosts) -> None:
    """As clouds have it: a network of one address, and the default route."""
    for number in range(2):
        hosts.address(number, prefix=32)
        hosts.ip(number, "route", "add", "default", "dev", "nic")


def _shared_flannel(hosts: Hosts) -> None:
    for number in range(2):
        hosts.ip(number, "link", "add", "flannel.1", "type", "dummy")
        hosts.ip(number, "addr", "add", "10.244.0.0/32", "dev", "flannel.1")
        hosts.ip(number, "link", "set", "flannel.1", "up")
        hosts.address(number)


@pytest.mark.parametrize(
    ("build", "found"),
    [
        (_bridge, "br0"),
        (_service, "nic"),
        (_containers, "nic"),
        (_vlan, "nic.100"),
        (_vlan_of_bridge, "br0.100"),
        (_routed, "nic"),
        (_shared_flannel, "nic"),
    ],
    ids=["bridge", "service", "containers", "vlan", "vlan of a bridge", "routed", "flannel"],
)
@pytest.mark.parametrize("named", [False, True], ids=["by itself", "by name"])
def test_hosts_find_each_other(hosts: Hosts, build: Callable[[Hosts], None], found: str, named: bool) -> None:
    build(hosts)
    for said in _met(hosts, f"{_NETWORK}.1", found if named else ""):
        assert said == {"sum": 6.0, "interface": found, "of_part": found}


@pytest.mark.parametrize("by", ["launcher", "environment"])
def test_a_bridge_without_a_store_to_look_for(hosts: Hosts, by: str) -> None:
    _bridge(hosts)
    environment = {"UCX_NET_DEVICES": "br0"} if by == "environment" else {}
    for said in _met(hosts, "", "", **environment):
        assert said["sum"] == 6.0
        assert said["interface"] == (None if environment else "br0")


def test_a_bridge_where_hosts_cannot_choose_together(hosts: Hosts) -> None:
    _bridge(hosts)
    for number in range(2):
        hosts.ip(number, "route", "add", "default", "via", f"{_NETWORK}.{2 - number}", "dev", "br0")
    for said in _met(hosts, "", target="meet_once"):
        assert said["sum"] == 6.0
        assert "br0" in said["interface"].split(",")
    assert [said["interface"] for said in _met(hosts, "br0", target="meet_once")] == ["br0"] * 2


def test_only_ipv6(hosts: Hosts) -> None:
    for number in range(2):
        hosts.ip(number, "addr", "add", f"fd00::{number + 1}/64", "dev", "nic", "nodad")
    for said in _met(hosts, "fd00::1", ""):
        assert said == {"sum": 6.0, "interface": "nic", "of_part": "nic"}


def test_a_second_network_is_used_only_where_it_leads_to_the_other_host(hosts: Hosts) -> None:
    """``rail`` is a second cable; ``lan`` has the same private network at both sites, and no cable."""
    hosts.ip(0, "link", "add", "rail", "type", "veth", "peer", "name", "rail", "netns", hosts.names[1])
    for number in range(2):
        hosts.address(number)
        hosts.ip(number, "link", "set", "rail", "up")
        hosts.address(number, "rail", "10.1.0")
        hosts.end(number, "lan", f"192.168.1.{number + 5}/24")
    for said in _met(hosts, f"{_NETWORK}.1", ""):
        assert said["sum"] == 6.0
        assert said["interface"] == "nic,rail"


def test_addresses_that_are_all_shared_end_the_join_on_all_ranks(hosts: Hosts) -> None:
    for number in range(2):
        hosts.ip(number, "addr", "add", "172.17.0.2/16", "dev", "nic")
    for said in _met(hosts, "", ""):
        assert "have each address of host" in said["error"]
        assert "(nic 172.17.0.2)" in said["error"]
        assert "docker run --network=host" in said["error"]


def test_an_interface_that_is_not_there(hosts: Hosts) -> None:
    for number in range(2):
        hosts.address(number)
    for said in _met(hosts, f"{_NETWORK}.1", "eth9"):
        assert "ValueError: interface='eth9' does not exist on this machine: use one of lo" in said["error"]
        assert "nic" in said["error"]


def test_an_interface_that_is_down(hosts: Hosts) -> None:
    for number in range(2):
        hosts.address(number)
        hosts.end(number, "spare", f"10.3.0.{number + 1}/24")
        hosts.ip(number, "link", "set", "spare", "down")
    for said in _met(hosts, f"{_NETWORK}.1", "spare"):
        assert "TransportError" in said["error"]
        assert f"interfaces tried: spare 10.3.0.{1 + ('rank 1: join' in said['error'])} (down)" in said["error"]
        assert f"not tried: lo 127.0.0.1, nic {_NETWORK}." in said["error"]
        assert "set: UCX_TLS=tcp,self" in said["error"]
        assert "file descriptors are open): " in said["error"]


def test_no_common_network(hosts: Hosts) -> None:
    hosts.address(0)
    hosts.ip(1, "addr", "add", "10.9.9.9/24", "dev", "nic")
    for said in _met(hosts, f"{_NETWORK}.1", "nic"):
        assert "Destination is unreachable (set: UCX_TLS=tcp,self; interfaces tried: nic " in said["error"]
        assert "give every rank interface=<name> of a network by which the hosts reach each other" in said["error"]


@pytest.mark.ranks("torch")
@pytest.mark.parametrize("build", [_bridge, _service], ids=["bridge", "service"])
def test_jobs_of_torch(hosts: Hosts, build: Callable[[Hosts], None]) -> None:
    """Rank 0 serves the store at its own address; the other one finds it by its route."""
    build(hosts)
    port = _free_port()
    environment = {"MASTER_ADDR": f"{_NETWORK}.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    found = "br0" if build is _bridge else "nic"
    for said in _met(hosts, target="meet_by_torch", **environment):
        assert said == {"sum": 6.0, "interface": found, "of_part": found}


@pytest.mark.ranks("torch")
def test_the_interface_towards_the_store_is_down(hosts: Hosts) -> None:
    """On rank 1's host: it says where it looked, and rank 0 who is missing."""
    hosts.address(0)
    hosts.ip(1, "link", "set", "nic", "down")
    environment = {"MASTER_ADDR": f"{_NETWORK}.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": "2"}
    said = _met(hosts, "3", target="miss_by_torch", **environment)
    assert "of 2 ranks, rank 1 did not join within 3 s" in said[0]["error"]
    assert f"no peers found at {_NETWORK}.1:{environment['MASTER_PORT']} within 3 s" in said[1]["error"]


def _free_port() -> int:
    with contextlib.closing(socket.socket()) as free:
        free.bind(("", 0))
        port: int = free.getsockname()[1]
    return port
