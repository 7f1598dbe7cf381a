"""A network laboratory on one machine: one network namespace per rank, joined by a bridge, each link with a rate.

To the sockets in it, it is a real network: what a rank sends leaves by its own ``eth0``, whose byte counters tell the
truth, and nothing goes faster than the link. It needs root, ``ip`` and ``tc`` (Debian: iproute2). It must not know what
the ranks run.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import NamedTuple, Self

INTERFACE = "eth0"
"""The only interface of a rank besides its own loopback."""

_BURST_BYTES = 128 << 10
_QUEUE = "50ms"
_RATE = re.compile(r"([1-9]\d*(?:\.\d+)?)([kmg]?)bit")
_FACTOR = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
_NAME = re.compile(r"tg(\d+)x\d+(?:hub|n\d+)")
_MOST_RANKS = 250
_KEEPER_MOST_S = 5.0
_serial = itertools.count()


class NetlabError(RuntimeError):
    """The laboratory cannot be built here; the message says why and what to do."""


class LinkBytes(NamedTuple):
    """What a rank's ``eth0`` has counted since it exists, in bytes with Ethernet, IP and TCP headers."""

    sent: int
    received: int


def burst_bytes(bits_per_s: float) -> int:
    """So many bytes a link that was idle passes at once, whatever its rate."""
    return max(_BURST_BYTES, int(bits_per_s / 8 / 1000))  # a millisecond's worth, for the timer's sake


def parse_rate(rate: str) -> float:
    """Bits per second of a rate such as ``"1gbit"`` or ``"2.5gbit"``. Raises ``ValueError`` for anything else."""
    match = _RATE.fullmatch(rate.lower())
    if match is None:
        raise ValueError(f"rate={rate!r} is no rate of a link: write a number and kbit, mbit or gbit, such as 1gbit")
    return float(match[1]) * _FACTOR[match[2]]


def why_unavailable() -> str | None:
    """Why no laboratory can be built by this process, as far as one can tell without trying; None if nothing speaks
    against it.
    """
    if os.geteuid() != 0:
        return "network namespaces need root: run the command as root (sudo)"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found: install iproute2 (Debian: apt-get install iproute2)"
    return None


class Netlab:
    """``ranks`` namespaces behind a bridge; every link has ``rate`` in both directions (None: as fast as it goes).

    Use it in a ``with`` statement: it is removed on the way out, also by Ctrl-C and exceptions. Rank ``r`` has the
    address ``address_of(r)`` and starts its program with ``prefix_of(r)`` before it. Leave UCX no transport but
    ``tcp,self`` in it, or shared memory goes round the namespaces. Names contain this process's id, so that several
    laboratories live side by side. Raises ``ValueError`` for bad arguments, ``NetlabError`` where none can be built.
    """

    def __init__(self, ranks: int, rate: str | None = "1gbit", *, mtu: int = 1500) -> None:
        if not 1 <= ranks <= _MOST_RANKS:
            raise ValueError(f"ranks={ranks} must be between 1 and {_MOST_RANKS}: one address each in one subnet")
        self.ranks = ranks
        self.rate = rate
        self._bits_per_s = None if rate is None else parse_rate(rate)
        self._mtu = mtu
        self._prefix = f"tg{os.getpid()}x{next(_serial)}"
        self._created = False
        self._keepers: list[subprocess.Popen[bytes]] = []

    @property
    def hub(self) -> str:
        """The namespace with the bridge."""
        return f"{self._prefix}hub"

    def namespace_of(self, rank: int) -> str:
        """The name of a rank's namespace. Raises ``ValueError`` for a rank that is not there."""
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank={rank} is not in this laboratory of {self.ranks} ranks")
        return f"{self._prefix}n{rank}"

    def address_of(self, rank: int) -> str:
        """The IPv4 address by which the others reach ``rank``."""
        self.namespace_of(rank)
        return f"10.77.0.{rank + 1}"

    def prefix_of(self, rank: int) -> Sequence[str]:
        """What to put before a command so that it runs as ``rank``; it replaces itself by the command."""
        memory = ["nsenter", f"--ipc=/proc/{self._keepers[rank].pid}/ns/ipc"] if self._keepers else []
        return [*self._network_of(rank), *memory]

    def _network_of(self, rank: int) -> list[str]:
        return ["ip", "netns", "exec", self.namespace_of(rank)]

    def open_memory(self) -> None:
        """From now on the programs of one namespace share memory with each other and with nobody else: each gets an IPC
        namespace beside that of its network. Raises ``NetlabError`` where that is refused."""
        for rank in range(self.ranks):
            command = [*self._network_of(rank), "unshare", "--ipc", "cat"]  # which ends with this process
            keeper = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            self._keepers.append(keeper)
            deadline = time.monotonic() + _KEEPER_MOST_S
            while _ipc_of(keeper.pid) in (None, _ipc_of(os.getpid())):
                if keeper.poll() is not None or time.monotonic() > deadline:
                    raise NetlabError(
                        f"`{' '.join(command)}` made no IPC namespace: the process needs the capability to make one "
                        "(root, not in an unprivileged container) and util-linux"
                    )
                time.sleep(0.01)

    def _close_memory(self) -> None:
        for keeper in self._keepers:
            assert keeper.stdin is not None
            keeper.stdin.close()
            keeper.wait()
        self._keepers.clear()

    def counters(self) -> list[LinkBytes]:
        """The byte counters of all ranks' links, by rank, as the bridge's side has counted them."""
        links = {
            link["ifname"]: link["stats64"] for link in json.loads(_ip("-n", self.hub, "-s", "-j", "link", "show"))
        }
        ports = [links[f"p{rank}"] for rank in range(self.ranks)]
        return [LinkBytes(sent=port["rx"]["bytes"], received=port["tx"]["bytes"]) for port in ports]

    def create(self) -> None:
        """Builds it; ``with`` does this. Whatever fails, nothing is left behind."""
        reason = why_unavailable()
        if reason is not None:
            raise NetlabError(reason)
        remove_stale()
        self._created = True
        try:
            self._build()
        except BaseException:
            self.destroy()
            raise

    def _build(self) -> None:
        hub = self.hub
        _ip("netns", "add", hub)
        _ip("-n", hub, "link", "set", "lo", "up")
        _ip("-n", hub, "link", "add", "br0", "mtu", str(self._mtu), "type", "bridge")
        _ip("-n", hub, "link", "set", "br0", "up")
        for rank in range(self.ranks):
            name, port, mtu = self.namespace_of(rank), f"p{rank}", str(self._mtu)
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "add", INTERFACE, "mtu", mtu, "type", "veth", "peer", "name", port, "netns", hub)
            _ip("-n", hub, "link", "set", port, "mtu", mtu, "master", "br0", "up")
            _ip("-n", name, "addr", "add", f"{self.address_of(rank)}/24", "dev", INTERFACE)
            _ip("-n", name, "link", "set", INTERFACE, "up")
            self._shape(name, INTERFACE)
            self._shape(hub, port)

    def _shape(self, namespace: str, device: str) -> None:
        if self._bits_per_s is None:
            return
        rate = f"{self._bits_per_s:.0f}bit"
        shape = ["tbf", "rate", rate, "burst", str(burst_bytes(self._bits_per_s)), "latency", _QUEUE]
        _run(["tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *shape])

    def destroy(self) -> None:
        """Removes it; a second call does nothing. A Ctrl-C meanwhile waits until it is done."""
        if not self._created:
            return
        with uninterrupted():
            self._close_memory()
            for name in _namespaces():
                if name == self.hub or name.startswith(f"{self._prefix}n"):
                    _delete(name)
            self._created = False

    def __enter__(self) -> Self:
        self.create()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.destroy()


def _ipc_of(pid: int) -> str | None:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/ipc")
    return None


def remove_stale() -> list[str]:
    """Removes what laboratories of processes that are gone (killed by SIGKILL) left behind; returns the names."""
    stale = []
    for name in _namespaces():
        match = _NAME.fullmatch(name)
        if match is not None and not os.path.exists(f"/proc/{match[1]}"):
            _delete(name)
            stale.append(name)
    return stale


def _namespaces() -> list[str]:
    with contextlib.suppress(FileNotFoundError):
        return sorted(os.listdir("/run/netns"))
    return []


def _delete(name: str) -> None:
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _ip(*arguments: str) -> str:
    return _run(["ip", *arguments])


def _run(command: list[str]) -> str:
    # In its own process group a Ctrl-C at the terminal does not stop a command half-way.
    done = subprocess.run(command, capture_output=True, text=True, check=False, start_new_session=True)
    if done.returncode != 0:
        raise NetlabError(
            f"`{' '.join(command)}` failed: {done.stderr.strip() or 'no message'}; the process needs the capability to "
            "make network namespaces (root, not in an unprivileged container), and the kernel veth, bridge and tbf"
        )
    return done.stdout


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Postpones SIGINT and SIGTERM; where signals are somebody else's (another thread), does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda number, _: waiting.append(number)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
        for late in waiting:
            signal.raise_signal(late)
