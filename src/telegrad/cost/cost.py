"""What each collective takes on the α-β-γ network, as a closed form. docs/simulation.md describes the network.

The forms are those of the algorithms in core/collectives, and tests hold them against the simulator. Those of the
collectives that reduce are in cost_reductions.py, those of the others in cost_moves.py, and those on streams, which are
less exact, in cost_sparse.py.
"""

from __future__ import annotations

from telegrad.cost.cost_moves import all_to_all, allgather, barrier, broadcast, gather, scatter
from telegrad.cost.cost_reductions import (
    allreduce,
    allreduce_rabenseifner,
    allreduce_recursive_doubling,
    allreduce_ring,
    allreduce_s,
    reduce,
    reduce_scatter,
)
from telegrad.cost.cost_sparse import TopkCost, allgather_sparse, allreduce_topk, reduce_scatter_sparse
from telegrad.cost.network import ELEMENT_BYTES, Cost, Costs
from telegrad.cost.recurrences import CARD_BYTES

__all__ = [
    "CARD_BYTES",
    "ELEMENT_BYTES",
    "Cost",
    "Costs",
    "TopkCost",
    "all_to_all",
    "allgather",
    "allgather_sparse",
    "allreduce",
    "allreduce_rabenseifner",
    "allreduce_recursive_doubling",
    "allreduce_ring",
    "allreduce_s",
    "allreduce_topk",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_sparse",
    "scatter",
]
