"""The network interfaces of this machine, from the C library's getifaddrs() and the kernel's /sys/class/net."""

from __future__ import annotations

import ctypes
import os
import socket
from dataclasses import dataclass, field
from pathlib import Path

_IFF_UP, _IFF_LOOPBACK, _IFF_RUNNING = 0x1, 0x8, 0x40
_FAMILY_BYTES = 2
_ADDRESS_AT = {socket.AF_INET: (4, 4), socket.AF_INET6: (8, 16)}  # where it is in its sockaddr, and its length


@dataclass(frozen=True)
class Interface:
    """``mbit_per_s``: what the driver says, None where it does not. ``addresses``: IPv4 first."""

    name: str
    up: bool
    loopback: bool
    addresses: tuple[str, ...]
    mbit_per_s: int | None = None
    mtu_bytes: int | None = None
    virtual: bool = False

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
    addresses: list[tuple[int, str]] = field(default_factory=list)


def interfaces() -> list[Interface]:
    """All interfaces, in the kernel's order. Raises ``OSError`` if the kernel does not tell."""
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
            address = _address_of(entry.address)
            if address is not None:
                one.addresses.append(address)
            at = entry.next
    finally:
        library.freeifaddrs(first)
    return [_interface(name, one) for name, one in seen.items()]


def _address_of(sockaddr: int | None) -> tuple[int, str] | None:
    if not sockaddr:
        return None
    family = int.from_bytes(ctypes.string_at(sockaddr, _FAMILY_BYTES), "little")
    for known, (offset, length) in _ADDRESS_AT.items():
        if family == known:
            return int(known), socket.inet_ntop(known, ctypes.string_at(sockaddr + offset, length))
    return None


def _interface(name: str, one: _Seen) -> Interface:
    folder = Path("/sys/class/net") / name
    speed = _number(folder / "speed")
    return Interface(
        name=name,
        up=bool(one.flags & _IFF_UP) and bool(one.flags & _IFF_RUNNING),
        loopback=bool(one.flags & _IFF_LOOPBACK),
        addresses=tuple(text for _, text in sorted(one.addresses)),
        mbit_per_s=speed if speed is not None and speed > 0 else None,
        mtu_bytes=_number(folder / "mtu"),
        virtual="/virtual/" in os.path.realpath(folder),
    )


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # a link that is down has no speed to read
        return None
