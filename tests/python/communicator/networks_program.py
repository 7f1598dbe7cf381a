"""What a rank on a host of its own does: it joins, sums, and prints as JSON what it used, or why it could not."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from telegrad import Communicator, TransportError
from telegrad.launch import joining, rank_and_size

_JOIN_S = 20.0


class _Exchange:
    """The launcher's, of a job whose store is at ``address``."""

    repeats = True

    def __init__(self, address: str | None) -> None:
        self._exchange, self.address = joining.exchange(_JOIN_S), address

    def __call__(self, blob: bytes) -> list[bytes]:
        return self._exchange(blob)


def _summed(communicator: Communicator) -> dict[str, Any]:
    with communicator:
        x = np.full(1 << 16, communicator.rank + 1, np.float32)
        communicator.all_reduce(x)
        part = communicator.split(0)  # over the same interfaces
        assert part is not None
        with part:
            part.all_reduce(x)
            return {"sum": float(x[-1]), "interface": communicator.interface, "of_part": part.interface}


def meet(address: str, interface: str) -> None:
    """``address``: where the store is; ``interface``: as in ``from_torch``; both may be empty, not to be said."""
    rank, size = rank_and_size()
    try:
        found = _summed(
            Communicator.from_exchange(
                rank, size, _Exchange(address or None), interface=interface or None, timeout_s=_JOIN_S
            )
        )
    except (TransportError, ValueError) as error:
        found = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(found), flush=True)


def meet_once(interface: str) -> None:
    """By an exchange that can be called once."""
    rank, size = rank_and_size()
    exchange = joining.exchange(_JOIN_S)
    found = _summed(Communicator.from_exchange(rank, size, lambda blob: exchange(blob), interface=interface or None))
    print(json.dumps(found), flush=True)


def meet_by_torch() -> None:
    print(json.dumps(_summed(Communicator.from_torch(join_timeout_s=_JOIN_S, timeout_s=_JOIN_S))), flush=True)


def miss_by_torch(join_timeout_s: str) -> None:
    try:
        Communicator.from_torch(join_timeout_s=float(join_timeout_s))
    except TransportError as error:
        print(json.dumps({"error": str(error)}), flush=True)
