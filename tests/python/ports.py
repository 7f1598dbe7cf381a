"""Ports on which processes of a test will listen."""

from __future__ import annotations

import socket

_HELD: list[socket.socket] = []


def free_port() -> int:
    """A port on which a process can listen that starts later. This process holds it until it ends, without listening:
    else the kernel may give it to another connection meanwhile. What listens on it must set SO_REUSEADDR, as the stores
    of PyTorch do."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("", 0))
    _HELD.append(held)
    return int(held.getsockname()[1])
