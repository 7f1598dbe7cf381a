"""Which ways there are between two processes of this machine. Each is tried with two real ranks."""

from __future__ import annotations

import ctypes
import json
import os
import select
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from telegrad._interfaces import Interface, interfaces
from telegrad.tools.doctor.installation import Finding, NotTried, ProbeFailed, ask, loaded_ucx

MEETING_S = 20.0
MOST_INTERFACES = 5
"""Tried one by one; a machine with containers has many more."""
_LAST_LINES = 1
_TARGET = "telegrad.tools.doctor.transports:meet_as_rank"
_PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
_RDMA = Path("/sys/class/infiniband")
_ANSWER_S = 5.0


@dataclass(frozen=True)
class Meeting:
    """Two ranks have met and summed. ``over_network``: the data went through an interface, not through memory."""

    right: bool
    over_network: bool


def meet(transports: str | None, interface: str = "") -> Meeting:
    """Two ranks sum a vector. ``transports``: UCX_TLS, None for what the environment says.

    Raises ``ProbeFailed`` with the reason if they do not come together, ``NotTried`` if telegrad does not load.
    """
    try:
        from telegrad.launch import LaunchError, RankFailed, Ranks, RanksTimedOut
    except ImportError as error:
        raise NotTried("telegrad does not load") from error

    said: list[dict[str, float]] = []

    def take(_: int, line: str) -> None:
        if line.startswith("{"):
            said.append(json.loads(line))

    environment = {} if transports is None else {"UCX_TLS": transports}
    try:
        with Ranks(
            _TARGET, 2, timeout_s=MEETING_S, arguments=[interface], environment=environment, on_line=take
        ) as ranks:
            ranks.wait()
    except RanksTimedOut as error:
        raise ProbeFailed(f"two ranks were not done within {MEETING_S:g} s") from error
    except RankFailed as failure:
        last = failure.exits[0].stderr.strip().splitlines()[-_LAST_LINES:]
        raise ProbeFailed(last[0] if last else str(failure)) from failure
    except LaunchError as error:
        raise ProbeFailed(str(error)) from error
    if len(said) != 2:
        raise ProbeFailed(f"only {len(said)} of two ranks said what it saw")
    return Meeting(
        right=all(one["right"] for one in said),
        over_network=max(one["network_bytes"] for one in said) > PAYLOAD_BYTES / 2,
    )


def with_remedy(said: str, otherwise: str) -> tuple[str, str]:
    """What two ranks said as they did not come together, and the remedy: that which their error names, and so does that
    of a job, or ``otherwise``."""
    from telegrad import _core

    remedy = _core.join_remedy(said)
    return said.replace(f": {remedy}", "") if remedy else said, remedy or otherwise


def ranks() -> Finding:
    """Two ranks with this environment's settings: what every job on this machine does."""
    set_here = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("UCX_")]
    mend = (
        f"unset {', '.join(one.partition('=')[0] for one in set_here)} and try again; telegrad needs tcp among UCX_TLS"
        if set_here
        else "see the lines `shared memory` and `tcp …`; one of the two must work, tcp at least over lo"
    )
    try:
        meeting = meet(None)
    except ProbeFailed as error:
        said, own = with_remedy(str(error), mend)
        mend = f"{mend}; {own}" if set_here and own != mend else own
        return Finding("ranks", "error", f"two processes of this machine do not come together: {said}", mend)
    if not meeting.right:
        return Finding("ranks", "error", "two processes of this machine get a wrong sum", "report it: telegrad env")
    way = "TCP" if meeting.over_network else "shared memory"
    return Finding("ranks", "ok", f"two processes of this machine get the right sum, through {way}")


def shared_memory() -> Finding:
    """Do data between two processes go through memory?"""
    mend = (
        "look at the line `/dev/shm`; in containers, give the ranks one IPC namespace (docker run --ipc=host); "
        "until then ranks of one machine talk by TCP"
    )
    try:
        meeting = meet("shm,tcp,self")  # TCP: where the kernel does not tell of a death, it has to
    except ProbeFailed as error:
        said, mend = with_remedy(str(error), mend)
        return Finding("shared memory", "note", f"does not work: {said}", mend)
    if not meeting.right:
        return Finding("shared memory", "error", "gives a wrong sum", "report it: telegrad env")
    if meeting.over_network:
        return Finding("shared memory", "note", "UCX does not use it here, the data went by TCP", mend)
    return Finding("shared memory", "ok", "carries the data between two processes")


def tcp() -> list[Finding]:
    """TCP over each interface that is up and has an address, with two processes of this machine."""
    candidates = tcp_candidates(interfaces())
    if not candidates:
        return [
            Finding(
                "tcp",
                "error",
                "no interface is up and has an address, not even lo: ranks cannot find each other",
                "ip link set lo up",
            )
        ]
    found = [_tcp_over(one) for one in candidates[:MOST_INTERFACES]]
    if left := [one.name for one in candidates[MOST_INTERFACES:]]:
        found.append(Finding("tcp", "note", f"not tried: {', '.join(left)}"))
    return found


def tcp_candidates(present: list[Interface]) -> list[Interface]:
    """Those worth trying: real ones first, then virtual ones, loopback last."""
    usable = [one for one in present if one.up and any(not _is_link_local(address) for address in one.addresses)]
    inner = [one for one in usable if not one.loopback]
    outer = [one for one in usable if one.loopback]
    tried = sorted(inner, key=lambda one: one.virtual)[: MOST_INTERFACES - len(outer)]
    return [*tried, *outer, *(one for one in inner if one not in tried)]


def _is_link_local(address: str) -> bool:
    return address.startswith(("fe80:", "169.254."))


def _tcp_over(one: Interface) -> Finding:
    name = f"tcp {one.name}"
    mend = "choose another interface by interface= of from_torch() or UCX_NET_DEVICES"
    try:
        meeting = meet("tcp,self", one.name)
    except ProbeFailed as error:
        said, mend = with_remedy(str(error), mend)
        return Finding(name, "note", f"does not work: {said}", mend)
    if not meeting.right:
        return Finding(name, "error", "gives a wrong sum", "report it: telegrad env")
    return Finding(name, "ok", f"two processes of this machine meet at {one.addresses[0]}")


def rdma() -> Finding:
    """InfiniBand or RoCE: a device, and a UCX that can use it."""
    devices = sorted(path.name for path in _RDMA.glob("*")) if _RDMA.is_dir() else []
    if not devices:
        return Finding("rdma", "note", "no RDMA device (InfiniBand, RoCE): TCP carries the data between machines")
    ucx = loaded_ucx()
    if ucx["bundled"]:
        return Finding(
            "rdma",
            "note",
            f"{', '.join(devices)} found, but the bundled UCX has no RDMA: TCP carries the data",
            "build against the system's UCX: pip install . -C cmake.define.TELEGRAD_UCX=system",
        )
    try:
        meeting = meet("ib,self")
    except ProbeFailed as error:
        return Finding(
            "rdma",
            "note",
            f"{', '.join(devices)} found but does not carry data: {error}",
            "is the link up (ibstat), may this user lock memory (ulimit -l unlimited), has UCX its module uct_ib?",
        )
    if not meeting.right:
        return Finding("rdma", "error", "gives a wrong sum", "report it: telegrad env")
    return Finding("rdma", "ok", f"{', '.join(devices)}: carries the data between two processes of this machine")


# What UCX's cma does: one process lets others read its memory, a sibling of it reads.
_OWNER = """
import ctypes, sys
ctypes.CDLL(None).prctl(0x59616d61, ctypes.c_ulong(-1), 0, 0, 0)
ctypes.CDLL(None).prctl(1, 9)
data = ctypes.create_string_buffer(b"telegrad")
print(ctypes.addressof(data), flush=True)
sys.stdin.read()
"""
_READER = """
import os
class Part(ctypes.Structure):
    _fields_ = [("at", ctypes.c_void_p), ("bytes", ctypes.c_size_t)]
copy = ctypes.create_string_buffer(8)
library = ctypes.CDLL(None, use_errno=True)
mine, theirs = Part(ctypes.addressof(copy), 8), Part({address}, 8)
count = library.process_vm_readv({process}, ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0)
print(json.dumps({{"works": count == 8 and copy.raw == b"telegrad",
                   "reason": "" if count >= 0 else os.strerror(ctypes.get_errno())}}))
"""


def single_copy() -> Finding:
    """May one process read another's memory? Then shared memory copies large messages once, not twice."""
    if not hasattr(ctypes.CDLL(None), "process_vm_readv"):
        return Finding("single copy", "note", "this C library has no process_vm_readv: large messages go by two copies")
    owner = subprocess.Popen([sys.executable, "-P", "-c", _OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert owner.stdout is not None
        if not select.select([owner.stdout], [], [], _ANSWER_S)[0]:
            raise ProbeFailed(f"a process did not start within {_ANSWER_S:g} s")
        address = int(owner.stdout.readline())
        answer = ask(_READER.format(address=address, process=owner.pid), timeout_s=_ANSWER_S)
    finally:
        owner.kill()
        owner.communicate()
    scope = _ptrace_scope()
    said = "" if scope is None else f", ptrace_scope={scope}"
    if answer["works"]:
        return Finding("single copy", "ok", f"a process may read its sibling's memory (CMA{said})")
    return Finding(
        "single copy",
        "note",
        f"a process may not read its sibling's memory (CMA: {answer['reason']}{said}): large messages are copied twice",
        "sysctl kernel.yama.ptrace_scope=1 or less; in a container: docker run --cap-add=SYS_PTRACE",
    )


def _ptrace_scope() -> str | None:
    try:
        return _PTRACE_SCOPE.read_text().strip()
    except OSError:  # a kernel without Yama
        return None


# The two ranks that try a transport.

_ELEMENTS = 4 << 20
PAYLOAD_BYTES = _ELEMENTS * 4
_TIMEOUT_S = 12.0


def meet_as_rank(interface: str) -> None:
    """Sums a vector, compares it with the known sum, and prints what was seen as a line of JSON.

    ``interface``: as in ``join()``; empty for UCX's choice.
    """
    from telegrad.launch import join

    with join(timeout_s=_TIMEOUT_S, join_timeout_s=_TIMEOUT_S, interface=interface or None) as communicator:
        x = np.full(_ELEMENTS, communicator.rank + 1, np.float32)
        communicator.barrier()
        before = _bytes_sent_by_interfaces()
        communicator.all_reduce(x, algorithm="ring")
        communicator.barrier()
        after = _bytes_sent_by_interfaces()
        size = communicator.world_size
        right = bool((x == size * (size + 1) // 2).all())
    print(json.dumps({"right": right, "network_bytes": after - before}), flush=True)


def _bytes_sent_by_interfaces() -> int:
    """By all interfaces together, loopback too: shared memory leaves no trace in them."""
    return sum(int(path.read_text()) for path in Path("/sys/class/net").glob("*/statistics/tx_bytes"))
