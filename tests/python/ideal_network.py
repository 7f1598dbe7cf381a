"""What a network with exactly given costs would take for the messages that costs are fitted to."""

from __future__ import annotations

import math
from collections.abc import Mapping


def seconds_of(kind: str, size: int, costs: Mapping[str, float], ranks: int) -> float:
    """Of a ``round`` (a barrier), a message ``one_way``, an ``exchange`` of two ranks or an ``addition``, of ``size``
    bytes."""
    alpha, beta, gamma = costs["alpha_s"], costs["beta_s_per_byte"], costs["gamma_s_per_byte"]
    match kind:
        case "round":
            return math.ceil(math.log2(ranks)) * alpha
        case "one_way":
            return size * beta
        case "exchange":
            return alpha + size * (costs["beta_exchange_s_per_byte"] + gamma)
    assert kind == "addition"
    return size * gamma
