"""torch.sparse_coo tensors as sparse streams, and back.

A tensor's entries become positions in its memory order; a hybrid tensor (sparse rows of dense values, such as the
gradient of an embedding) becomes one entry for each value.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from telegrad.stream import SparseStream, is_torch_tensor


def is_coo(x: object) -> bool:
    """True for a torch tensor of layout ``sparse_coo``."""
    return is_torch_tensor(x) and getattr(x, "layout", None) == sys.modules["torch"].sparse_coo


def stream_of_coo(x: Any) -> tuple[SparseStream, Callable[[SparseStream], Any]]:
    """A stream of ``x``, and the function that makes a coalesced tensor of ``x``'s shape from a stream."""
    torch = sys.modules["torch"]
    x = x.detach().coalesce()  # sorts, and adds up repeated indices
    shape, sparse_shape = tuple(x.shape), tuple(x.shape[: x.sparse_dim()])
    width = int(np.prod(shape[x.sparse_dim() :], dtype=np.int64))
    rows = np.ravel_multi_index(tuple(x.indices().numpy()), sparse_shape) if x._nnz() else np.empty(0, np.int64)
    flat = (rows[:, None] * width + np.arange(width)).reshape(-1)
    stream = SparseStream(flat, x.values().reshape(-1).contiguous(), int(np.prod(shape, dtype=np.int64)))

    def back(total: SparseStream) -> Any:
        positions = total.raw_indices.astype(np.int64)
        kept = np.unique(positions // width) if width else positions
        values = torch.zeros((len(kept), *shape[len(sparse_shape) :]), dtype=x.dtype)
        if positions.size:
            slots = np.searchsorted(kept, positions // width) * width + positions % width
            values.reshape(-1)[torch.from_numpy(slots)] = total.values
        where = np.stack(np.unravel_index(kept, sparse_shape)) if sparse_shape else np.zeros((0, len(kept)), np.int64)
        indices = torch.from_numpy(np.ascontiguousarray(where, dtype=np.int64))
        return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=True, check_invariants=False)

    return stream, back
