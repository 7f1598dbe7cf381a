"""Interfaces, the name of this host, and whether a network laboratory can be built here."""

from __future__ import annotations

import ipaddress
import os
import socket

from telegrad._interfaces import interfaces as all_interfaces
from telegrad.bench.netlab import Netlab, NetlabError, why_unavailable
from telegrad.doctor.finding import Finding

_LABORATORY_RATE = "100mbit"


def interfaces() -> list[Finding]:
    """Names, addresses, up or down, speed."""
    present = all_interfaces()
    said = "; ".join(map(str, present))
    if not any(one.up and not one.loopback and one.addresses for one in present):
        return [
            Finding(
                "interfaces",
                "note",
                f"{said or 'none'}: none but loopback has an address, so jobs stay on this machine",
                "in a container: docker run --network=host",
            )
        ]
    return [Finding("interfaces", "ok", said)]


def host_name() -> list[Finding]:
    """Does the name of this host resolve, and to an address that others can reach? Jobs hang where it does not."""
    name = socket.gethostname()
    found = [_resolved(name, "host name", f"add a line `127.0.1.1 {name}` to /etc/hosts, or mend the name service")]
    master = os.environ.get("MASTER_ADDR")
    if master and master != name:
        found.append(_resolved(master, "MASTER_ADDR", "set MASTER_ADDR to rank 0's address, as other machines see it"))
    return found


def _resolved(name: str, check: str, mend: str) -> Finding:
    try:
        addresses = sorted({str(found[4][0]) for found in socket.getaddrinfo(name, None)})
    except OSError as error:
        return Finding(
            check, "note", f"{name!r} does not resolve ({error}): torch's rendezvous and Gloo may hang or fail", mend
        )
    if all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses):
        return Finding(
            check,
            "note",
            f"{name!r} is {', '.join(addresses)}, loopback: fine on one machine, unreachable from others",
            "for several machines: MASTER_ADDR = an address of rank 0, GLOO_SOCKET_IFNAME = the interface",
        )
    return Finding(check, "ok", f"{name!r} is {', '.join(addresses)}")


def laboratory() -> list[Finding]:
    """Network namespaces with shaped links, for `telegrad demo` and `telegrad bench --network 1gbit`: one is built."""
    reason = why_unavailable()
    if reason is not None:
        what, _, how = reason.partition(": ")
        return [Finding("laboratory", "missing", f"no links of a given rate for demo and bench: {what}", how)]
    try:
        with Netlab(1, _LABORATORY_RATE):
            pass
    except NetlabError as error:
        return [
            Finding(
                "laboratory",
                "missing",
                f"no links of a given rate for demo and bench: {error}",
                "use --network loopback or shm, or run on a machine of your own as root",
            )
        ]
    return [Finding("laboratory", "ok", "root, ip, tc and tbf: a link of 100 Mbit/s was built and removed")]
