"""Collectives, schemes and networks as papers reckon them: costs of the form a + b·bytes, and RedSync's model."""

from __future__ import annotations

import math
from collections.abc import Callable

from telegrad.cost.network import Costs
from telegrad.cost.send_method import GroupCost, LinearCost
from telegrad.tools.advise.sending import Cluster, PhasedWay, check_density, selected_way
from telegrad.tools.advise.workload import EXACT_BYTES, Device

# Makers of ``LinearCost`` raise ``ValueError`` for less than one rank.


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


_CHEAPEST_OF = ("ring", "recursive-doubling", "halving-doubling", "double-binary-trees")
NAMES = (*COLLECTIVES, "cheapest", "two-level", "two-level-trees")
"""``cheapest``: of ring, doublings and trees the fastest for each group; ``two-level``: rings within nodes and between
them, or trees between."""


def sum_cost(cluster: Cluster, collective: str) -> GroupCost:
    """Seconds by bytes of a dense sum among the ranks. Raises ``ValueError`` for a name that is not in ``NAMES``."""
    if collective not in NAMES:
        raise ValueError(f"collective={collective!r} is not known: use one of {', '.join(NAMES)}")
    if cluster.ranks == 1:
        return lambda size: 0.0
    if collective in COLLECTIVES:
        costs = cluster.ring_costs if collective == "ring" else cluster.shared_costs
        return COLLECTIVES[collective](cluster.ranks, costs)
    if collective == "cheapest":
        every = [sum_cost(cluster, name) for name in _CHEAPEST_OF]
        return lambda size: min(cost(size) for cost in every)
    between = "ring" if collective == "two-level" else "double-binary-trees"
    link = cluster.costs.with_bytes_times(cluster.oversubscription / cluster.ranks_per_node)
    return two_level(cluster.nodes, cluster.ranks_per_node, link, cluster.within, between)


def dense(cluster: Cluster, collective: str) -> PhasedWay:
    """All of the gradient. Raises ``ValueError`` for a collective that does not exist."""
    return PhasedWay("dense", sum_cost(cluster, collective))


def rgc(
    cluster: Cluster,
    device: Device,
    density: float,
    *,
    quantised: bool = False,
    element_bytes: float = EXACT_BYTES,
    kernels: int = 10,
) -> PhasedWay:
    """RedSync: T_select + log2 P·α + (P−1)·k·(c + v)·β + P·k·γ1. RedSync, §2.4, with k entries of c + v bytes.

    ``element_bytes`` of memory traffic and ``kernels`` are those of its selection. ``quantised``: entries of one sign
    and one mean, so that v = 0. Each of the P messages is added by a kernel of its own.
    """
    check_density(density)
    costs, ranks = cluster.shared_costs, cluster.ranks
    entry = 4 if quantised else 8

    def seconds(n: int, k: int) -> float:
        return math.log2(ranks) * costs.alpha_s + (ranks - 1) * k * entry * costs.beta_s_per_byte

    return selected_way(
        "rgc-quantised" if quantised else "rgc",
        device,
        density,
        seconds,
        lambda n, k: device.scatter_s(ranks * k, messages=ranks),
        element_bytes=element_bytes,
        kernels=kernels,
    )
