"""Networks by name: what a message, a byte and a byte of work cost, and where the figures come from.

The figures are assumptions for planning, not measurements: a rate is what its standard says, less the frames' headers;
latencies are what such networks have between two idle machines at one switch. Give your own where you know them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace

from telegrad.cost import Costs

# One core adding float32 vectors that lie in memory: 10 GB of received bytes a second.
GAMMA_S_PER_BYTE = 1e-10

_RATE = re.compile(r"(\d+(?:\.\d+)?)(mbit|gbit)")
_BITS = {"mbit": 1e6, "gbit": 1e9}
_RDMA_FROM_BITS = 100e9
# Of each Ethernet frame on the wire with a payload of 1,500 bytes (preamble and gap included), TCP's user gets 1,448 of
# 1,538 bytes; of RDMA over it with an MTU of 4,096, 4,096 of 4,178.
_TCP_SHARE = 1448 / 1538
_RDMA_SHARE = 4096 / 4178
_TCP_ALPHA_S = 20e-6
_RDMA_ALPHA_S = 2e-6

NAMED = ("1gbit", "10gbit", "25gbit", "40gbit", "100gbit", "200gbit", "400gbit")


@dataclass(frozen=True)
class Network:
    """The simulator's costs: core/drivers/sim/sim_costs.hpp says what each means, docs/simulation.md in more words.

    ``about`` says where ``costs`` come from. Raises ``ValueError`` for figures that make no sense.
    """

    costs: Costs
    about: str = "costs as given"
    jitter: float = 0.0
    compute_noise: float = 0.0
    start_noise_s: float = 0.0
    ranks_per_node: int = 0
    node_alpha_s: float = 0.0
    node_beta_s_per_byte: float = 0.0
    oversubscription: float = 1.0

    def __post_init__(self) -> None:
        for name in ("jitter", "compute_noise", "start_noise_s", "node_alpha_s", "node_beta_s_per_byte"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise ValueError(f"{name}={value} must be a finite number, 0 or more")
        if self.ranks_per_node < 0:
            raise ValueError(f"ranks_per_node={self.ranks_per_node} must be 0 (one level) or more")
        if not 1 <= self.oversubscription < float("inf"):
            raise ValueError(
                f"oversubscription={self.oversubscription} must be 1 (an uplink carries all ports of its node) or more"
            )

    @property
    def is_plain(self) -> bool:
        """One level and no noise: what the closed forms are for."""
        noisy = self.jitter or self.compute_noise or self.start_noise_s
        return not noisy and self.ranks_per_node <= 1

    def fields_of_core(self) -> dict[str, float]:
        """The fields of the core's SimCosts by name."""
        own = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in ("costs", "about")}
        return own | {field.name: getattr(self.costs, field.name) for field in fields(Costs)}


def network_of(name: str) -> Network:
    """``100gbit`` or any other rate in mbit or gbit. Below 100gbit: TCP through the kernel, from there on RDMA.

    Raises ``ValueError`` for anything else.
    """
    found = _RATE.fullmatch(name.strip().lower())
    if found is None or float(found[1]) == 0:
        raise ValueError(
            f"network {name!r} is not known: use {', '.join(NAMED)} or any other rate above 0 in mbit or gbit, such as "
            "2.5gbit (10 GB/s are 80gbit)"
        )
    bits = float(found[1]) * _BITS[found[2]]
    rdma = bits >= _RDMA_FROM_BITS
    kind, alpha_s, share = ("RDMA", _RDMA_ALPHA_S, _RDMA_SHARE) if rdma else ("TCP", _TCP_ALPHA_S, _TCP_SHARE)
    costs = Costs(alpha_s=alpha_s, beta_s_per_byte=8 / (bits * share), gamma_s_per_byte=GAMMA_S_PER_BYTE)
    about = (
        f"{name.strip().lower()}: assumes {kind}, α {alpha_s * 1e6:g} µs, {share:.1%} of the rate for payload, "
        f"γ {GAMMA_S_PER_BYTE * 1e9:g} ns per byte"
    )
    return Network(costs, about)


def with_costs(network: Network, **given: float | None) -> Network:
    """``network`` with the costs that are not None, by the names of ``Costs``."""
    changed = {name: value for name, value in given.items() if value is not None}
    if not changed:
        return network
    what = ", ".join(f"{name}={value:g}" for name, value in changed.items())
    return replace(network, costs=replace(network.costs, **changed), about=f"{network.about}; given: {what}")
