"""What the two ranks do that try a transport for the doctor."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from telegrad.launch import join

_ELEMENTS = 4 << 20
PAYLOAD_BYTES = _ELEMENTS * 4
_TIMEOUT_S = 12.0


def meet(interface: str) -> None:
    """Sums a vector, compares it with the known sum, and prints what was seen as a line of JSON.

    ``interface``: as in ``join()``; empty for UCX's choice.
    """
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
