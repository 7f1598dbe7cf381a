"""Which interfaces the hosts of a job choose together, from what each says of itself."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from telegrad._interfaces import Interface, interfaces, rdma_ports
from telegrad.communicator.rendezvous import network_choice
from telegrad.communicator.rendezvous.joining import check_interface
from telegrad.communicator.rendezvous.network_choice import Host, Link, Table, agree, alone
from telegrad.errors import TransportError


def _host(number: int, *links: tuple[str, str, int], toward: str = "", **more: object) -> Host:
    return Host(f"host{number}", f"host{number}", tuple(Link(*one) for one in links), toward=toward, **more)  # type: ignore[arg-type]


def _nic(number: int, name: str = "eth0") -> tuple[str, str, int]:
    return (name, f"10.0.0.{number}", 24)


_DOCKER = ("docker0", "172.17.0.1", 16)
_FLANNEL = ("flannel.1", "10.244.0.0", 32)
_DNS = ("nodelocaldns", "169.254.20.10", 32)


def _chosen(
    hosts: Sequence[Host], ways: Callable[[str], str] = lambda _: "", ports: Sequence[str] = ()
) -> list[str | None]:
    """By host, each of which finds the way to an address by ``ways``; all common networks are found to work."""
    table = Table(hosts)
    table.check()
    networks = table.common_networks()
    return [table.devices(host.label, networks, ports, ways) for host in hosts]


def test_the_interface_by_which_rank_0_is_reached() -> None:
    hosts = [_host(1, _nic(1, "br0"), toward="br0"), _host(2, _nic(2), toward="eth0")]
    asked: list[str] = []

    def way(address: str) -> str:
        asked.append(address)
        return "eth0"

    assert _chosen(hosts, way) == ["br0", "eth0"]
    assert asked == ["10.0.0.1"]  # rank 0's host looks for no way to itself


@pytest.mark.parametrize("shared", [_DOCKER, _FLANNEL, _DNS], ids=lambda link: link[0])
def test_an_address_that_two_hosts_have_is_left_out(shared: tuple[str, str, int]) -> None:
    hosts = [_host(number, shared, _nic(number), toward="eth0") for number in (1, 2, 3)]
    assert _chosen(hosts, lambda _: "eth0") == ["eth0"] * 3


def test_also_where_master_addr_is_such_an_address() -> None:
    """As a service's address is on each host of a Kubernetes cluster."""
    hosts = [_host(number, _DNS, _nic(number), _DOCKER, toward="nodelocaldns", outward="eth0") for number in (1, 2)]
    assert _chosen(hosts, lambda _: "eth0") == ["eth0", "eth0"]


def test_an_interface_that_one_host_alone_has() -> None:
    hosts = [_host(1, _DOCKER, _nic(1), toward="eth0"), _host(2, _nic(2), toward="eth0")]
    assert _chosen(hosts, lambda _: "eth0") == ["eth0", "eth0"]


def test_rank_0_that_knows_its_own_name_as_loopback() -> None:
    """As Debian's /etc/hosts has it: the others know a better address."""
    hosts = [_host(1, _nic(1, "bond0"), _DOCKER), _host(2, _nic(2), _DOCKER, toward="eth0")]
    assert _chosen(hosts, {"10.0.0.2": "bond0"}.__getitem__) == ["bond0", "eth0"]


def test_nobody_knows_where_the_store_is() -> None:
    lone = [_host(1, _nic(1)), _host(2, _nic(2))]
    assert _chosen(lone, lambda _: "eth0") == ["eth0", "eth0"]
    routed = [_host(n, _nic(n), ("eth1", f"10.{n}.0.1", 24), outward="eth1") for n in (1, 2)]
    assert _chosen(routed, lambda _: "eth1") == ["eth1,eth0"] * 2
    unrouted = [_host(n, _nic(n), ("eth1", f"10.{n}.0.1", 24)) for n in (1, 2)]
    assert _chosen(unrouted) == ["eth0"] * 2


def test_a_store_on_a_host_of_no_rank() -> None:
    """Each has a route to it, but they meet by the route to rank 0."""
    hosts = [_host(n, ("eth0", f"10.0.{n}.1", 24), ("wg0", f"10.8.0.{n}", 24), toward="eth0") for n in (1, 2)]
    assert _chosen(hosts, {"10.0.1.1": "wg0"}.__getitem__) == ["eth0,wg0", "wg0"]


def test_a_network_that_all_have_is_used_besides() -> None:
    hosts = [_host(n, _nic(n), ("eth1", f"10.1.0.{n}", 24), ("ens2", f"10.2.{n}.1", 24), toward="eth0") for n in (1, 2)]
    assert _chosen(hosts, lambda _: "eth0") == ["eth0,eth1"] * 2


def test_other_families_and_long_prefixes() -> None:
    six = [_host(n, ("eth0", f"fd00::{n}", 64), toward="eth0") for n in (1, 2)]
    assert _chosen(six, {"fd00::1": "eth0"}.__getitem__) == ["eth0"] * 2
    cloud = [_host(n, ("ens4", f"10.128.0.{n}", 32), toward="ens4") for n in (1, 2)]
    assert _chosen(cloud, {"10.128.0.1": "ens4"}.__getitem__) == ["ens4"] * 2
    tunnel = [_host(n, ("tun0", f"10.9.0.{n}", 31), toward="tun0") for n in (2, 3)]
    assert _chosen(tunnel, {"10.9.0.2": "tun0"}.__getitem__) == ["tun0"] * 2


def test_rdma_stays() -> None:
    hosts = [_host(n, _nic(n), _DOCKER, toward="eth0") for n in (1, 2)]
    assert _chosen(hosts, lambda _: "eth0", ["mlx5_0:1", "mlx5_1:1"]) == ["eth0,mlx5_0:1,mlx5_1:1"] * 2


def test_a_rank_that_was_told_its_interface_is_who_the_others_look_for() -> None:
    hosts = [_host(1, ("eth1", "10.1.0.1", 24), toward="eth1", named=True), _host(2, _nic(2), ("eth1", "10.1.0.2", 24))]
    assert _chosen(hosts, {"10.1.0.1": "eth1"}.__getitem__)[1] == "eth1"


def test_several_ranks_of_a_host_are_one() -> None:
    hosts = [_host(1, _nic(1), _DOCKER, toward="eth0"), _host(1, _nic(1), _DOCKER, toward="eth0")]
    assert not Table(hosts).spans_hosts
    hosts += [_host(2, _nic(2), _DOCKER, toward="eth0")]
    assert Table(hosts).spans_hosts
    assert Table(hosts).speakers() == [0, 2]
    assert _chosen(hosts, lambda _: "eth0") == ["eth0"] * 3


def test_hosts_without_an_address_of_their_own() -> None:
    """As two containers have, each on its machine's own docker0."""
    hosts = [_host(n, ("eth0", "172.17.0.2", 16), toward="eth0") for n in (1, 2)]
    with pytest.raises(
        TransportError, match=r"each address of host host1 too \(eth0 172.17.0.2\).*--network=host"
    ) as told:
        Table(hosts).check()
    assert (told.value.peer, told.value.host, told.value.operation) == (0, "host1", "join")
    Table([_host(n, ("eth0", "172.17.0.2", 16), rdma=True) for n in (1, 2)]).check()
    Table([_host(1), _host(2, _nic(2))]).check()  # UCX has the last word where nothing is known


def test_what_hosts_say_goes_round() -> None:
    host = _host(1, _nic(1), _DOCKER, toward="eth0", outward="docker0", named=True, rdma=True, memory="m")
    assert Host.unpacked(host.packed()) == host
    for damaged in (b"", b"{}", b"[]", b"[1, 2, [[3]], 4]", b"\xff"):
        with pytest.raises(ValueError, match="describes no host: all ranks must run the same version"):
            Host.unpacked(damaged)


class _Hosts:
    """Two ranks in threads, each with a host of its own on this machine's loopback network."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *links: Sequence[Link]) -> None:
        self._blobs: list[bytes] = [b""] * len(links)
        self._barrier = threading.Barrier(len(links), timeout=60)
        self._links = links
        self.rounds = 0
        self._of_thread = threading.local()
        monkeypatch.setattr(network_choice, "_own_host", self._own_host)
        monkeypatch.setattr(network_choice, "_way_to", lambda *_: "eth0")
        monkeypatch.setattr(network_choice, "rdma_ports", list)

    def _own_host(self, *_: object) -> Host:
        rank = self._of_thread.rank
        return Host(f"host{rank}", f"host{rank}", tuple(self._links[rank]), toward="eth0")

    def agree(self) -> list[str | None]:
        def run(rank: int) -> str | None:
            self._of_thread.rank = rank

            def exchange(blob: bytes) -> list[bytes]:
                self._blobs[rank] = blob
                self._barrier.wait()
                everybodys = list(self._blobs)
                self._barrier.wait()
                if rank == 0:
                    self.rounds += 1
                return everybodys

            return agree(rank, exchange, None, "10.0.0.1")

        with ThreadPoolExecutor(len(self._links)) as pool:
            return list(pool.map(run, range(len(self._links))))


def test_a_second_network_is_tried_before_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = _Hosts(monkeypatch, *([Link("eth0", f"10.0.0.{n}", 24), Link("lo", f"127.1.0.{n}", 24)] for n in (1, 2, 3)))
    assert hosts.agree() == ["eth0,lo"] * 3
    assert hosts.rounds == 3


def test_one_that_leads_nowhere_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sites with one private network each, of the same numbers. Nobody can listen there, on this machine."""
    monkeypatch.setattr(network_choice, "_CONNECTS_S", 0.2)
    networks = [("eth0", "10.0.0"), ("lo", "127.1.0"), ("lan", "192.0.2")]
    hosts = _Hosts(monkeypatch, *([Link(name, f"{begin}.{n}", 24) for name, begin in networks] for n in (1, 2)))
    assert hosts.agree() == ["eth0,lo"] * 2


def test_one_network_needs_no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = _Hosts(monkeypatch, *([Link("eth0", f"10.0.0.{n}", 24), Link("docker0", "172.17.0.1", 16)] for n in (1, 2)))
    assert hosts.agree() == ["eth0"] * 2
    assert hosts.rounds == 1


def test_a_port_that_refuses_does_not_reach() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        assert network_choice._connects([("127.0.0.1", "127.0.0.1", held.getsockname()[1])]) == [False]


def test_ranks_of_one_host_with_transports_of_their_own_leave_it_to_ucx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "all")
    assert agree(0, lambda blob: [blob, blob], None, "127.0.0.1") == alone(None)


@pytest.mark.parametrize("value", ["eth0", "^docker0", "all"])
def test_what_the_user_says_stays(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", value)
    own = network_choice._own_host(None, None, network_choice._present())
    assert own.named
    assert alone(None) is None
    assert {one.name for one in own.links} <= (
        {"eth0"} if value == "eth0" else {name for _, name in socket.if_nameindex()}
    )
    monkeypatch.delenv("UCX_NET_DEVICES")
    assert not network_choice._own_host(None, None, network_choice._present()).named
    assert alone("lo") is None


@pytest.mark.parametrize(
    ("of_ranks", "chosen"),
    [(("m", "m"), network_choice.MEMORY), (("m", "n"), None), (("m", ""), None), (("", ""), None)],
)
def test_ranks_of_one_host_that_share_memory_take_no_network(
    monkeypatch: pytest.MonkeyPatch, of_ranks: tuple[str, str], chosen: str | None
) -> None:
    hosts = [replace(_host(1, _nic(1)), memory=memory) for memory in of_ranks]
    monkeypatch.setattr(network_choice, "_own_host", lambda *_: hosts[0])
    monkeypatch.setattr(network_choice, "_present", list)
    assert agree(0, lambda _: [one.packed() for one in hosts], None, None) == chosen


def test_who_names_transports_or_interfaces_means_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("UCX_TLS", "UCX_NET_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    assert network_choice._own_host(None, None, []).memory
    assert network_choice._own_host("lo", None, []).memory == ""
    monkeypatch.setenv("UCX_TLS", "all")
    assert network_choice._own_host(None, None, []).memory == ""
    monkeypatch.delenv("UCX_TLS")
    monkeypatch.delattr(os, "pidfd_open")
    assert network_choice._own_host(None, None, []).memory == ""


def test_a_host_whose_default_route_takes_a_bridge(monkeypatch: pytest.MonkeyPatch) -> None:
    """And where the ranks cannot tell each other of their hosts."""
    present = [
        Interface("lo", up=True, loopback=True, addresses=("127.0.0.1",), prefixes=(8,)),
        Interface("br0", up=True, loopback=False, addresses=("10.0.0.1",), prefixes=(24,), bridge=True),
        Interface("docker0", up=True, loopback=False, addresses=("172.17.0.1",), prefixes=(16,), bridge=True),
        Interface("eth1", up=False, loopback=False, addresses=("10.1.0.1",), prefixes=(24,)),
    ]
    monkeypatch.setattr(network_choice, "_present", lambda: present)
    monkeypatch.setattr(network_choice, "_source_of", lambda _: "10.0.0.1")
    monkeypatch.setattr(network_choice, "rdma_ports", lambda: ["mlx5_0:1"])
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    assert alone(None) == "lo,br0,mlx5_0:1"
    monkeypatch.setattr(network_choice, "_source_of", lambda _: "10.9.9.9")
    assert alone(None) is None


def test_this_machines_interfaces_have_prefixes() -> None:
    for one in interfaces():
        assert len(one.prefixes) == len(one.addresses)
        assert all(
            0 < prefix <= (128 if ":" in address else 32)
            for address, prefix in zip(one.addresses, one.prefixes, strict=True)
        )
    (loopback,) = [one for one in interfaces() if one.name == "lo"]
    assert dict(zip(loopback.addresses, loopback.prefixes, strict=True))["127.0.0.1"] == 8
    assert all(":" in port for port in rdma_ports())


def test_several_interfaces_by_name() -> None:
    first = socket.if_nameindex()[0][1]
    check_interface(f"{first},{first}")
    with pytest.raises(
        ValueError, match=rf"interface='{first},eth9': 'eth9' does not exist on this machine: use one of"
    ):
        check_interface(f"{first},eth9")


def test_the_own_host() -> None:
    own = network_choice._own_host(None, "127.0.0.1", network_choice._present())
    assert own.toward == ""  # loopback is no way to another host
    assert all(link.network.prefixlen == link.prefix for link in own.links)
    for link in own.links:
        assert network_choice._own_host(None, link.address, network_choice._present()).toward == link.name
        named = network_choice._own_host(link.name, None, network_choice._present())
        assert [one.name for one in named.links] == [link.name] == [named.toward]
    assert json.loads(own.packed())[0] == own.label
    assert network_choice._own_host(None, "nowhere.invalid", network_choice._present()).toward == ""
