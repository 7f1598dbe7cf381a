"""Which ranks live together on one node: each says a label, and who says the same shares one. Also whether a process of
this node has ended, and the files of those that were killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

NODE_VARIABLE = "TELEGRAD_NODE"
"""Of the environment: this process's node, where the argument ``node`` does not say it."""

_NAMESPACES = ("pid", "ipc")  # beyond them memory is not shared
_SHARED_MEMORY = Path("/dev/shm")
_ORPHAN_AGE_S = 2.0  # until then the process that makes a file may not have it open yet


def checked_node(node: Any) -> str | None:
    """``node`` as ranks compare it. Raises ``TypeError`` and ``ValueError``."""
    if node is None:
        return None
    if isinstance(node, bool) or not isinstance(node, str | int | np.integer):
        raise TypeError(f"node={node!r} must be a str or an int that ranks of one node have in common, or None")
    if node == "":
        raise ValueError("node='' names no node: give ranks of one node the same name or number, or None")
    return str(node)


def label_of(node: str | None) -> str:
    """What this process says: ``node``, else ``TELEGRAD_NODE``, else which machine and namespaces it is in."""
    return node or os.environ.get(NODE_VARIABLE) or _own_label()


def numbered(labels: Sequence[object]) -> tuple[int, ...]:
    """Of each rank the number of its node; nodes count from 0 in the order of their first ranks."""
    numbers: dict[object, int] = {}
    return tuple(numbers.setdefault(label, len(numbers)) for label in labels)


def checked_nodes(nodes: Any, size: int) -> tuple[int, ...]:
    """The same of nodes that one caller gives for all ``size`` ranks (``None``: all on one). Raises ``TypeError`` and
    ``ValueError``."""
    if nodes is None:
        return (0,) * size
    if isinstance(nodes, np.ndarray):
        nodes = nodes.tolist()
    if isinstance(nodes, str) or not isinstance(nodes, Sequence):
        raise TypeError(f"nodes={nodes!r} must be a sequence: of each rank, which node it is on")
    if len(nodes) != size:
        raise ValueError(f"nodes={tuple(nodes)} names {len(nodes)} ranks' nodes: there are {size} ranks, give one each")
    labels = [checked_node(node) for node in nodes]
    if None in labels:
        raise TypeError(f"nodes={tuple(nodes)} has None: give every rank's node, or none at all")
    return numbered(labels)


def two_levels(nodes: Sequence[int]) -> bool:
    """Whether there is something to gain from knowing them: ranks are neither all together nor all alone."""
    return 1 < len(set(nodes)) < len(nodes)


def machine_id() -> str:
    """The same for all processes of this machine, in containers too, and no other machine's."""
    try:
        return _boot_id()
    except OSError:
        return socket.gethostname()


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _own_label() -> str:
    try:
        return _space()
    except OSError:
        return socket.gethostname()


def _space() -> str:
    return "/".join([_boot_id(), *(str(os.stat(f"/proc/self/ns/{name}").st_ino) for name in _NAMESPACES)])


def space_of_memory() -> str:
    """The same for processes that share memory and hear of each other's end from the kernel; empty: it tells nobody."""
    try:
        os.close(os.pidfd_open(os.getpid()))
        return _space()
    except (AttributeError, OSError):
        return ""


def process_mark() -> str:
    """Tells this process from all others of all machines."""
    pid = os.getpid()
    return f"{machine_id()}:{_process_space()}:{pid}:{_started(pid)[0]}"


def _process_space() -> str:
    try:
        return str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        return ""


def _started(pid: int) -> tuple[str, str]:
    """When that process has begun, and its state. Raises ``OSError`` where there is none."""
    said = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return said[19], said[0]


def state_here(mark: str) -> str:
    """Of the process of that mark: ``"gone"`` or ``"runs"``; empty for one that is frozen, or of another machine."""
    machine, space, pid, started = mark.split(":")
    if (machine, space) != (machine_id(), _process_space()) or not space:
        return ""
    try:
        found, state = _started(int(pid))
    except OSError:
        return "gone"
    if found != started or state in "ZX":
        return "gone"
    return "" if state in "Tt" else "runs"


def remove_orphans() -> None:
    """Removes this user's files of UCX in shared memory that no process has open or mapped, in any container. UCX makes
    such a file and removes its name at once: a process that is killed in between leaves the file."""
    for path in _SHARED_MEMORY.glob("ucx_shm_posix_*"):
        with contextlib.suppress(OSError):  # such as that another process has it open: there is no lease then
            found = path.lstat()
            if found.st_uid == os.geteuid() and time.time() - found.st_ctime > _ORPHAN_AGE_S:
                with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK)) as file:
                    fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)  # to one that opens it now: SIGIO would end this
                    fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
                    path.unlink()
