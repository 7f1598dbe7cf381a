"""A way to send a group of gradients, and group costs of the form a + b·bytes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from telegrad.cost.network import Costs

GroupCost = Callable[[int], float]
"""Seconds by the bytes of a group's dense gradients."""


def no_delay(size: int) -> float:
    """Of a group that is sent as it is."""
    return 0.0


@dataclass(frozen=True)
class SendMethod:
    """``name``: the field's terms, such as ``"dense"``, ``"sparse"``, ``"qsgd4"``. ``cost``: seconds from when a group
    may leave to when its sum is there, on all ranks. ``delay``: seconds by which it holds the backward pass up before
    it leaves, such as for selection on the same processor. ``beside``: seconds of those bytes of a group that go
    densely beside what this way takes, none of them too; ``None``: it takes all. ``busy``, ``busy_beside``: the same
    while the backward pass goes on, where that shares processors with the network; ``None``: no longer than else. All
    seconds are finite and 0 or more, of every group of a model: a way that cannot send some has a large cost there."""

    name: str
    cost: GroupCost
    delay: GroupCost = no_delay
    beside: GroupCost | None = field(default=None, kw_only=True)
    busy: GroupCost | None = field(default=None, kw_only=True)
    busy_beside: GroupCost | None = field(default=None, kw_only=True)

    def cost_of(self, size: int, dense: int = 0) -> float:
        """Seconds of a group of ``size`` bytes, ``dense`` of which are of gradients that no way compresses. Raises
        ``ValueError`` for what is no time."""
        return self._of(self.cost, self.beside, size, dense, "")

    def busy_of(self, size: int, dense: int = 0) -> float:
        """As ``cost_of``, while the backward pass goes on."""
        return self._of(self.busy or self.cost, self.busy_beside or self.beside, size, dense, "busy ")

    def _of(self, cost: GroupCost, beside: GroupCost | None, size: int, dense: int, when: str) -> float:
        if beside is None:
            return seconds_of(cost, size, f"{self.name} {when}cost".strip())
        beside_s = seconds_of(beside, dense, f"{self.name} {when}beside".strip())
        return beside_s + (seconds_of(cost, size - dense, f"{self.name} {when}cost".strip()) if size > dense else 0.0)

    def delay_of(self, size: int, dense: int = 0) -> float:
        """As ``cost_of``, of the delay."""
        taken = size if self.beside is None else size - dense
        if self.delay is no_delay or not taken:
            return 0.0
        return seconds_of(self.delay, taken, f"{self.name} delay".strip())


def seconds_of(cost: GroupCost, size: int, name: str = "cost") -> float:
    """``cost(size)``. Raises ``ValueError``, with ``name``, for what is no time."""
    seconds = float(cost(size))
    check_amount(f"{name}({size})", seconds)
    return seconds


def check_amount(what: str, value: Any) -> None:
    """Raises ``ValueError`` unless ``value`` is finite and 0 or more."""
    if not 0 <= value < math.inf:
        raise ValueError(f"{what} is {value}: it must be finite and 0 or more")


# Group costs of the form a + b·bytes: the collectives as the planner's literature has them, and fits of measurements.
# Closed forms of this library's own collectives, which are not linear, are in closed_forms.py.


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
