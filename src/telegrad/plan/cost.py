"""What each dense collective takes on the α-β-γ network, as a closed form. docs/simulation.md describes the network.

The forms are those of the algorithms in core/collectives, and tests hold them against the simulator. Those of the
collectives that reduce are in cost_reductions.py, those of the others in cost_moves.py.
"""

from __future__ import annotations

from telegrad.plan.cost_moves import all_to_all, allgather, barrier, broadcast, gather, scatter
from telegrad.plan.cost_reductions import (
    RING_MESSAGE_BYTES,
    allreduce,
    allreduce_rabenseifner,
    allreduce_recursive_doubling,
    allreduce_ring,
    reduce,
    reduce_scatter,
)
from telegrad.plan.network import ELEMENT_BYTES, Cost, Costs
from telegrad.plan.recurrences import CARD_BYTES

__all__ = [
    "CARD_BYTES",
    "ELEMENT_BYTES",
    "RING_MESSAGE_BYTES",
    "Cost",
    "Costs",
    "all_to_all",
    "allgather",
    "allreduce",
    "allreduce_rabenseifner",
    "allreduce_recursive_doubling",
    "allreduce_ring",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
]
