"""The network interfaces of this machine, from the C library's getifaddrs() and the kernel's /sys/class/net."""

from __future__ import annotations

import ctypes
import os
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_IFF_UP, _IFF_LOOPBACK, _IFF_RUNNING = 0x1, 0x8, 0x40
_FAMILY_BYTES = 2
_ADDRESS_AT = {socket.AF_INET: (4, 4), socket.AF_INET6: (8, 16)}  # where it is in its sockaddr, and its length


@dataclass(frozen=True)
class Interface:
    """``mbit_per_s``: what the driver says, None where it does not. ``addresses``: IPv4 first; ``prefixes``: of each,
    how many of its bits name its network."""

    name: str
    up: bool
    loopback: bool
    addresses: tuple[str, ...]
    mbit_per_s: int | None = None
    mtu_bytes: int | None = None
    virtual: bool = False
    bridge: bool = False
    prefixes: tuple[int, ...] = ()

    def __str__(self) -> str:
        speed = "" if self.mbit_per_s is None else f", {self.mbit_per_s} Mbit/s"
        return f"{self.name} {'up' if self.up else 'down'} ({', '.join(self.addresses) or 'no address'}{speed})"


class _Ifaddrs(ctypes.Structure):
    pass


_Ifaddrs._fields_ = [
    ("next", ctypes.POINTER(_Ifaddrs)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
    ("mask", ctypes.c_void_p),
    ("other", ctypes.c_void_p),
    ("data", ctypes.c_void_p),
]


@dataclass
class _Seen:
    flags: int
    addresses: list[tuple[int, str, int]] = field(default_factory=list)  # family, text, prefix; one family's as given


def interfaces(*, only_addresses: bool = False) -> list[Interface]:
    """All interfaces, in the kernel's order; ``only_addresses``: no speed, MTU or ``virtual``. Raises ``OSError``."""
    library = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_Ifaddrs)()
    if library.getifaddrs(ctypes.byref(first)) != 0:
        raise OSError(ctypes.get_errno(), "getifaddrs failed")
    seen: dict[str, _Seen] = {}
    try:
        at = first
        while at:
            entry = at.contents
            one = seen.setdefault(os.fsdecode(entry.name), _Seen(entry.flags))
            found = _bytes_of(entry.address)
            if found is not None:
                family, address = found
                mask = _bytes_of(entry.mask)
                prefix = 8 * len(address) if mask is None else int.from_bytes(mask[1], "big").bit_count()
                one.addresses.append((family, socket.inet_ntop(family, address), prefix))
            at = entry.next
    finally:
        library.freeifaddrs(first)
    return [_interface(name, one, only_addresses) for name, one in seen.items()]


def rdma_ports() -> list[str]:
    """What UCX calls the ports of InfiniBand and RoCE adapters, such as ``mlx5_0:1``."""
    folder = Path("/sys/class/infiniband")
    if not folder.is_dir():  # the rule, and quicker to see than that a pattern fits nothing
        return []
    return sorted(f"{port.parts[-3]}:{port.name}" for port in folder.glob("*/ports/*"))


def host_name(name: str) -> Any:
    """``name`` as functions of ``socket`` take it without loading the tables of international names."""
    return name.encode() if name.isascii() else name


def _bytes_of(sockaddr: int | None) -> tuple[int, bytes] | None:
    if not sockaddr:
        return None
    family = int.from_bytes(ctypes.string_at(sockaddr, _FAMILY_BYTES), "little")
    for known, (offset, length) in _ADDRESS_AT.items():
        if family == known:
            return int(known), ctypes.string_at(sockaddr + offset, length)
    return None


def _interface(name: str, one: _Seen, only_addresses: bool) -> Interface:
    folder = Path("/sys/class/net") / name
    speed = None if only_addresses else _number(folder / "speed")
    addresses = sorted(one.addresses, key=lambda address: address[0])  # the first of a kind is the one that UCX takes
    return Interface(
        name=name,
        up=bool(one.flags & _IFF_UP) and bool(one.flags & _IFF_RUNNING),
        loopback=bool(one.flags & _IFF_LOOPBACK),
        addresses=tuple(text for _, text, _ in addresses),
        prefixes=tuple(prefix for _, _, prefix in addresses),
        bridge=(folder / "bridge").is_dir(),
        mbit_per_s=speed if speed is not None and speed > 0 else None,
        mtu_bytes=None if only_addresses else _number(folder / "mtu"),
        virtual=not only_addresses and "/virtual/" in os.path.realpath(folder),
    )


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # a link that is down has no speed to read
        return None
