"""What a rank that the launcher started does first: it reads who it is, and joins the others."""

from __future__ import annotations

import os

from telegrad.communicator import Communicator
from telegrad.cost import Tuning
from telegrad.errors import RendezvousError
from telegrad.launch.exchange import SocketExchange

RANK, WORLD_SIZE, EXCHANGE = "TELEGRAD_RANK", "TELEGRAD_WORLD_SIZE", "TELEGRAD_EXCHANGE"
LAUNCHER = "TELEGRAD_LAUNCHER"
"""The launcher's process id, without which a rank does not want to live."""

_exchange: SocketExchange | None = None  # one connection serves all communicators of the process


def rank_and_size() -> tuple[int, int]:
    """This process's rank and how many there are. Raises ``RendezvousError`` if no launcher started it."""
    missing = [name for name in (RANK, WORLD_SIZE, EXCHANGE) if not os.environ.get(name)]
    if missing:
        raise RendezvousError(
            f"no peers found: the environment has no {', '.join(missing)}: "
            "start this function with telegrad.launch.Ranks, or use Communicator.from_torch() inside torchrun",
            operation="rendezvous",
        )
    return int(os.environ[RANK]), int(os.environ[WORLD_SIZE])


def exchange(join_timeout_s: float) -> SocketExchange:
    """How this process swaps bytes with the others. Raises ``RendezvousError`` if no launcher started it."""
    global _exchange
    rank, size = rank_and_size()
    if _exchange is None:
        _exchange = SocketExchange(int(os.environ[EXCHANGE]), rank, size, join_timeout_s)
    return _exchange


def join(
    *,
    timeout_s: float = 1800.0,
    liveness_timeout_s: float | None = 8.0,
    interface: str | None = None,
    join_timeout_s: float = 300.0,
    tuning: Tuning | str | None = "auto",
) -> Communicator:
    """A communicator of all ranks that the launcher started; each calls this. Arguments as in
    ``Communicator.from_torch``.
    """
    rank, size = rank_and_size()
    return Communicator.from_exchange(
        rank,
        size,
        exchange(join_timeout_s),
        timeout_s=timeout_s,
        liveness_timeout_s=liveness_timeout_s,
        interface=interface,
        tuning=tuning,
    )
