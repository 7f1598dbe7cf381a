"""``interface=`` decides where a rank listens: read from the kernel's tables, not from what UCX says."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

from telegrad import _core
from telegrad.launch import SINGLE_THREADED, Ranks

pytestmark = [
    pytest.mark.skipif(not hasattr(_core.Communicator, "ucx"), reason="built without UCX"),
    pytest.mark.timeout(60),
]
_ENVIRONMENT = {
    **SINGLE_THREADED,
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)]),
}
_SIOCGIFADDR = 0x8915


def _address_of(interface: str) -> str | None:
    """The interface's IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


ADDRESSES = {name: address for _, name in socket.if_nameindex() if (address := _address_of(name)) is not None}


def _told(interface: str, transports: str) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = []
    with Ranks(
        "interface_program:join_and_tell",
        2,
        timeout_s=40.0,
        arguments=[interface],
        environment={**_ENVIRONMENT, **({"UCX_TLS": transports} if transports else {})},
        on_line=lambda _, line: told.append(json.loads(line)),
    ) as ranks:
        ranks.wait()
    assert len(told) == 2
    return told


@pytest.mark.parametrize("transports", ["tcp,self", "all"])
@pytest.mark.parametrize("interface", sorted(ADDRESSES))
def test_ranks_listen_on_the_interface_that_was_named_and_nowhere_else(interface: str, transports: str) -> None:
    for one in _told(interface, transports):
        assert set(one["listens"]) == {ADDRESSES[interface]}
        assert one["right"]


def test_without_an_interface_ranks_listen_on_single_addresses_only() -> None:
    for one in _told("", "tcp,self"):
        assert one["listens"]
        assert not {"0.0.0.0", "::"} & set(one["listens"])
        assert one["right"]


def test_ranks_that_share_memory_listen_nowhere() -> None:
    for one in _told("", ""):
        assert one == {"listens": [], "right": True}


@pytest.mark.parametrize("interface", ["nosuch0", "lo,nosuch0", "127.0.0.1", "lo,"])
def test_an_interface_that_is_not_there_is_refused(interface: str) -> None:
    for one in _told(interface, "all"):
        name = interface.rpartition(",")[2]
        asked = f"interface={interface!r}" + (f": {name!r}" if name != interface else "")
        assert f"{asked} does not exist on this machine" in one["error"]
