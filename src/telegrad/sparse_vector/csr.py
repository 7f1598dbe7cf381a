"""One row of a scipy CSR matrix as indices and values, and back. scipy is imported only to make a row."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

ROW_DTYPES = ("float32", "float64")
"""What scipy's matrices can hold of a stream's values."""


def is_scipy(x: object) -> bool:
    """True for one of scipy's sparse matrices and arrays, of any format."""
    return isinstance(getattr(x, "format", None), str) and hasattr(x, "tocsr")


def entries_of_row(row: Any) -> tuple[npt.NDArray[Any], npt.NDArray[Any], int]:
    """Strictly increasing columns, the values at them, and the number of columns.

    ``row``: a scipy ``csr_matrix`` or ``csr_array`` of shape ``(1, n)`` or ``(n,)``. Columns that are out of order are
    sorted and repeated ones added up, in a copy; ``row`` stays as it is. What its arrays hold beyond ``indptr[-1]`` is
    no entry, as for scipy. Raises ``TypeError`` for anything else, and ``ValueError`` for another number of rows.
    """
    if getattr(row, "format", None) != "csr":
        given = getattr(row, "format", None)
        raise TypeError(
            f"row is a {type(row).__name__}{f' of format {given!r}' if given else ''}: it must be a scipy CSR row; "
            "use .tocsr()"
        )
    shape = tuple(row.shape)
    if len(shape) == 2 and shape[0] != 1:
        raise ValueError(f"row has shape {shape}: it must have one row; take one with matrix[i : i + 1]")
    if not row.has_canonical_format:
        row = row.copy()
        row.sum_duplicates()
    count = int(row.indptr[-1])
    return row.indices[:count], row.data[:count], int(shape[-1])


def row_of_entries(indices: npt.NDArray[np.uint32], values: npt.NDArray[Any], n: int) -> Any:
    """A ``scipy.sparse.csr_array`` of shape ``(1, n)`` with int32 columns, or int64 where ``n`` needs them."""
    try:
        from scipy.sparse import csr_array
    except ModuleNotFoundError as error:
        raise ImportError("a CSR row needs scipy: pip install scipy") from error
    if values.dtype.name not in ROW_DTYPES:
        raise TypeError(f"scipy's matrices hold no {values.dtype}: use one of {', '.join(ROW_DTYPES)}")
    columns = indices.astype(np.int32 if n <= np.iinfo(np.int32).max else np.int64)
    ends = np.array([0, indices.size], columns.dtype)
    return csr_array((values.copy(), columns, ends), shape=(1, n))
