"""torch.sparse_coo tensors as positions and values, and back.

A tensor's entries become positions in its memory order; a hybrid tensor (sparse rows of dense values, such as the
gradient of an embedding) becomes one entry for each value.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from telegrad.sparse_vector.csr import is_scipy
from telegrad.sparse_vector.values import is_torch_tensor


def is_coo(x: object) -> bool:
    """True for a torch tensor of layout ``sparse_coo``."""
    return is_torch_tensor(x) and getattr(x, "layout", None) == sys.modules["torch"].sparse_coo


def check_coo(x: Any) -> None:
    """Raises ``TypeError`` for what is no COO tensor on the CPU."""
    if not is_coo(x):
        remedy = "SparseVector.from_csr() takes a CSR row" if is_scipy(x) else "SparseVector.from_dense() takes arrays"
        if is_torch_tensor(x):
            remedy = "use .to_sparse_coo()"
        raise TypeError(f"x is a {type(x).__name__}: it must be a torch.sparse_coo tensor; {remedy}")
    if x.device.type != "cpu":
        raise TypeError(f"x is on {x.device}: move it with .cpu()")


def entries_of_coo(x: Any) -> tuple[npt.NDArray[np.int64], Any]:
    """Strictly increasing positions and the values at them (one-dimensional) of what ``check_coo`` lets pass.

    Repeated indices are added up, as torch does.
    """
    x = x.detach().coalesce()
    shape = tuple(x.shape)
    sparse_shape = shape[: x.sparse_dim()]
    width = math.prod(shape[x.sparse_dim() :])
    if sparse_shape and x._nnz():
        rows = np.ravel_multi_index(tuple(x.indices().numpy()), sparse_shape)
    else:
        rows = np.zeros(x._nnz(), np.int64)
    flat = (rows[:, None] * width + np.arange(width)).reshape(-1)
    return flat, x.values().reshape(-1).contiguous()


def coo_of_entries(
    indices: npt.NDArray[np.uint32], values: Any, shape: tuple[int, ...], sparse_dim: int, absent: float = 0.0
) -> Any:
    """A coalesced tensor of ``shape``, of which the first ``sparse_dim`` dimensions are sparse.

    ``values``: a torch tensor, one for each position. In a row that has some entries, the others are ``absent``.
    """
    torch = sys.modules["torch"]
    sparse_shape, row_shape = shape[:sparse_dim], shape[sparse_dim:]
    width = int(np.prod(row_shape, dtype=np.int64))
    positions = indices.astype(np.int64)
    kept = np.unique(positions // width) if width else positions
    rows = torch.full((len(kept), *row_shape), absent, dtype=values.dtype)
    if positions.size:
        slots = np.searchsorted(kept, positions // width) * width + positions % width
        rows.reshape(-1)[torch.from_numpy(slots)] = values
    where = np.stack(np.unravel_index(kept, sparse_shape)) if sparse_shape else np.zeros((0, len(kept)), np.int64)
    places = torch.from_numpy(np.ascontiguousarray(where, dtype=np.int64))
    return torch.sparse_coo_tensor(places, rows, shape, is_coalesced=True, check_invariants=False)
