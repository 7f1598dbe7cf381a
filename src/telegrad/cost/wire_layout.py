"""How messages hold the entries of a sparse stream, by what that saves on a network and what it takes."""

from __future__ import annotations

import math

from telegrad.cost.cost_sparse import BLOCK_ELEMENTS, PACKED_INDEX_BITS

_PACKED_INDEX_S, _PACKED_VALUE_S = 2e-9, 1.5e-9
"""An entry's share of packing and unpacking."""
_PACKED_VALUE_SAVES_BYTES = 0.7
"""Of a float32 or bfloat16 gradient."""


def layout_that_pays(beta_s_per_byte: float, density: float, dtype: str = "f32") -> str:
    """What ``wire="auto"`` takes where a byte on the network takes so many seconds, and a stream has entries at this
    share of its indices: ``"blocked"``, ``"indices"`` or ``"packed"``, by the bytes that each saves (of indices the
    more, the denser they are, down to 1.44 bits and what the format adds) and the time that packing takes."""
    if density <= 0:
        return "blocked"
    packed_bytes = (math.log2(1 / min(density, 1.0)) + PACKED_INDEX_BITS) / 8
    blocked_bytes = min(4.0, 2 + 4 / (BLOCK_ELEMENTS * density))
    of_indices_s = max(0.0, blocked_bytes - packed_bytes) * beta_s_per_byte - _PACKED_INDEX_S
    of_values_s = 0.0
    if dtype in ("f32", "bf16"):
        of_values_s = _PACKED_VALUE_SAVES_BYTES * beta_s_per_byte - _PACKED_VALUE_S
    gains_s = {"blocked": 0.0, "indices": of_indices_s, "packed": of_indices_s + of_values_s}
    return max(gains_s, key=gains_s.__getitem__)
