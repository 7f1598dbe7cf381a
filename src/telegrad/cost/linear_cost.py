"""Group costs of the form a + b·bytes: the collectives as the planner's literature has them, and fits of measurements.

Closed forms of this library's own collectives, which are not linear, are in cost.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from telegrad.cost.network import Costs


@dataclass(frozen=True)
class LinearCost:
    """``startup_s`` + ``s_per_byte`` · bytes. Makers of these raise ``ValueError`` for less than one rank."""

    startup_s: float
    s_per_byte: float

    def __call__(self, size: int) -> float:
        return self.startup_s + self.s_per_byte * size


def ring(ranks: int, costs: Costs) -> LinearCost:
    """2(P−1)α and 2(P−1)/P·β + (P−1)/P·γ a byte. MG-WFBP, Table 2."""
    return LinearCost(2 * (_checked(ranks) - 1) * costs.alpha_s, _others(ranks) * _there_and_back(costs))


def recursive_doubling(ranks: int, costs: Costs) -> LinearCost:
    """log2 P·α and log2 P·(β + γ) a byte. MG-WFBP, Table 2."""
    return LinearCost(_log2(ranks) * costs.alpha_s, _log2(ranks) * (costs.beta_s_per_byte + costs.gamma_s_per_byte))


def halving_doubling(ranks: int, costs: Costs) -> LinearCost:
    """2·log2 P·α and the ring's time of a byte. MG-WFBP, Table 2."""
    return LinearCost(2 * _log2(ranks) * costs.alpha_s, _others(ranks) * _there_and_back(costs))


def binary_tree(ranks: int, costs: Costs) -> LinearCost:
    """2·log2 P·α and log2 P·(2β + γ) a byte. MG-WFBP, Table 2."""
    return LinearCost(2 * _log2(ranks) * costs.alpha_s, _log2(ranks) * _there_and_back(costs))


def double_binary_trees(ranks: int, costs: Costs) -> LinearCost:
    """2·log2 P·α and 2β + γ a byte: every byte goes up and comes down once. Sanders, Speck, Träff, Parallel Computing
    35(12), 2009. ``double_binary_trees_published`` is what MG-WFBP reckons with."""
    return LinearCost(2 * _log2(ranks) * costs.alpha_s, _there_and_back(costs) if ranks > 1 else 0.0)


def double_binary_trees_published(ranks: int, costs: Costs) -> LinearCost:
    """2·log2 P·α and β + γ a byte: MG-WFBP, Table 2, with the α that its first column has lost. A byte that goes up and
    comes down would have to cross the network once."""
    return LinearCost(
        2 * _log2(ranks) * costs.alpha_s, costs.beta_s_per_byte + costs.gamma_s_per_byte if ranks > 1 else 0.0
    )


def parameter_server(ranks: int, costs: Costs) -> LinearCost:
    """All push their gradients to one server and pull the sum: 2α and P·(2β + γ) a byte, through its one port.
    MG-WFBP, §4.3."""
    return LinearCost(2 * costs.alpha_s, _checked(ranks) * _there_and_back(costs))


COLLECTIVES: dict[str, Callable[[int, Costs], LinearCost]] = {
    "ring": ring,
    "recursive-doubling": recursive_doubling,
    "halving-doubling": halving_doubling,
    "binary-tree": binary_tree,
    "double-binary-trees": double_binary_trees,
    "double-binary-trees-published": double_binary_trees_published,
    "parameter-server": parameter_server,
}


def two_level(nodes: int, ranks_per_node: int, between: Costs, within: Costs, collective: str = "ring") -> LinearCost:
    """A ring within each node that leaves each of its R ranks 1/R of the node's sum, R collectives between nodes at
    once, of a part each, through the node's one port, and a ring within each node that gathers the parts."""
    if collective not in COLLECTIVES:
        raise ValueError(f"collective={collective!r} is not known: use one of {', '.join(COLLECTIVES)}")
    inner, outer = ring(ranks_per_node, within), COLLECTIVES[collective](nodes, between)
    return LinearCost(inner.startup_s + outer.startup_s, inner.s_per_byte + outer.s_per_byte)


def costs_of_ring_fit(startup_s: float, s_per_byte: float, ranks: int) -> Costs:
    """α and β of the network on which a ring of so many ranks takes ``startup_s`` + ``s_per_byte`` · bytes; γ is in β.

    Raises ``ValueError`` for less than 2 ranks.
    """
    if ranks < 2:
        raise ValueError(f"ranks={ranks} must be 2 or more: one rank alone needs no network")
    return Costs(startup_s / (2 * (ranks - 1)), s_per_byte * ranks / (2 * (ranks - 1)))


PAPER_NETWORKS = {
    "k80-10gbe": costs_of_ring_fit(9.72e-4, 1.97e-9, 16),
    "v100-10gbe": costs_of_ring_fit(9.08e-4, 7.4e-10, 16),
    "v100-56gbib": costs_of_ring_fit(2.36e-4, 4.06e-10, 16),
}
"""MG-WFBP's three clusters, from its Figure 4: rings of 16 GPUs."""


def _there_and_back(costs: Costs) -> float:
    return 2 * costs.beta_s_per_byte + costs.gamma_s_per_byte


def _log2(ranks: int) -> float:
    return math.log2(_checked(ranks))


def _others(ranks: int) -> float:
    """Which share of a vector the other ranks own."""
    return (_checked(ranks) - 1) / ranks


def _checked(ranks: int) -> int:
    if ranks < 1:
        raise ValueError(f"ranks={ranks} must be at least 1")
    return ranks
