"""Starts the ranks of a run on a network and listens to them. Knows neither torch nor the terminal."""

from __future__ import annotations

import contextlib
import random
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from telegrad.launch import SINGLE_THREADED, Ranks
from telegrad.tools.bench.netlab import INTERFACE, Netlab
from telegrad.tools.demo.results import RunResult
from telegrad.tools.demo.settings import Settings

LOOPBACK, SHARED_MEMORY = "loopback", "shm"

TARGET = "telegrad.tools.demo.worker:main"
"""What the ranks run."""

_PORT = 29500


@dataclass(frozen=True)
class TrainingPlace:
    """Where the ranks run. ``interface``: the one they talk over and whose counters are read."""

    name: str
    ranks: int
    interface: str
    master: str
    prefix_of: Callable[[int], Sequence[str]] | None = None
    shared_memory: bool = False

    @property
    def environment(self) -> Mapping[str, str]:
        """Gloo over TCP, telegrad too, on the same interface, or over ``shared_memory``; one computing thread per
        rank."""
        common = {**SINGLE_THREADED, "GLOO_SOCKET_IFNAME": self.interface}
        return common if self.shared_memory else {**common, "UCX_TLS": "tcp,self", "UCX_NET_DEVICES": self.interface}


@contextlib.contextmanager
def open_place(network: str, ranks: int) -> Iterator[TrainingPlace]:
    """``"loopback"``; ``"shm"``: loopback for Gloo, shared memory for telegrad; or a rate such as ``"1gbit"``: one
    network namespace per rank, links shaped to it, removed afterwards. Raises ``ValueError`` for other names,
    ``NetlabError`` where namespaces cannot be made.
    """
    if network == LOOPBACK:
        yield TrainingPlace(network, ranks, "lo", "127.0.0.1")
        return
    if network == SHARED_MEMORY:
        yield TrainingPlace(network, ranks, "lo", "127.0.0.1", shared_memory=True)
        return
    with Netlab(ranks, network) as lab:
        yield TrainingPlace(network, ranks, INTERFACE, lab.address_of(0), lab.prefix_of)


def train(
    settings: Settings,
    place: TrainingPlace,
    *,
    timeout_s: float,
    on_message: Callable[[RunResult, str], None] = lambda result, kind: None,
) -> RunResult:
    """One training run. ``on_message(result so far, kind)`` is called after each message of rank 0. All ranks have
    ended when this returns or raises. Raises ``RankFailed`` with a dead rank's last words, ``RanksTimedOut``.
    """
    result = RunResult(settings.run)
    port = _PORT if place.prefix_of is not None else _free_port()

    def take(rank: int, line: str) -> None:
        kind = result.take(line) if rank == 0 else None
        if kind is not None:
            on_message(result, kind)

    def as_torchrun(rank: int) -> Mapping[str, str]:
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(place.ranks),
            "LOCAL_WORLD_SIZE": str(place.ranks),
            "MASTER_ADDR": place.master,
            "MASTER_PORT": str(port),
        }

    started_s = time.monotonic()
    with Ranks(
        TARGET,
        place.ranks,
        timeout_s=timeout_s,
        arguments=[settings.to_json()],
        environment=place.environment,
        environment_of=as_torchrun,
        prefix_of=place.prefix_of,
        on_line=take,
    ) as ranks:
        ranks.wait()
    result.total_s = time.monotonic() - started_s
    return result


def _free_port() -> int:
    """Below the ports that the system gives to whoever asks for any: the ranks need it some seconds from now."""
    while True:
        port = random.randrange(20_000, 32_000)
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:  # taken
            continue
