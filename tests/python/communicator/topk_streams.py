"""What ranks give to all_reduce_topk in its tests."""

from __future__ import annotations

from typing import Any

import numpy as np
from local_ranks import SIZE

from telegrad import SparseVector

N = 20_000


def streams(call: int = 0, entries: int = 200, dtype: Any = np.float32) -> list[SparseVector]:
    """Of each rank, normal values at indices of its own, others at each call."""
    made = []
    for rank in range(SIZE):
        draw = np.random.default_rng([rank, call])
        indices = np.sort(draw.choice(N, entries, replace=False)).astype(np.uint32)
        made.append(SparseVector(indices, draw.normal(size=entries).astype(dtype), N))
    return made
