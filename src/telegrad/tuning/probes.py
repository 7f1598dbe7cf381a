"""What the costs of a network are fitted to: messages between pairs of ranks and additions, no collective of many."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

KINDS = ("round", "one_way", "exchange", "addition")

ADDED_BYTES = 16 << 20
"""Of an addition: beyond the caches, as a long vector is."""


@dataclass(frozen=True)
class Probe:
    """One thing whose time is taken, with messages of ``bytes``. All ranks take part at once, so that the machine is as
    busy as in a collective. ``kind``:

    - ``round``: barriers of all ranks;
    - ``one_way``: in each pair of neighbours one sends to the other, message after message;
    - ``exchange``: the two of a pair send to each other at once, and add what they get; from call to call with another
      partner, where the ranks can be divided by four, since links that have to begin anew are slower;
    - ``addition``: every rank adds two vectors of its own.
    """

    kind: str
    bytes: int


def probes(one_way: Iterable[int], exchange: Iterable[int]) -> list[Probe]:
    """All kinds, with messages of these lengths in bytes."""
    return [
        Probe("round", 0),
        *(Probe("one_way", size) for size in one_way),
        *(Probe("exchange", size) for size in exchange),
        Probe("addition", ADDED_BYTES),
    ]
