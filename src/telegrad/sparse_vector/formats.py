"""What sparse vectors are made from and become: numpy and torch values, torch.sparse_coo tensors, rows of CSR."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from telegrad import _core

Bits = npt.NDArray[Any]

_NUMPY = ("float32", "float64", "float16", "int32", "int64", "uint32", "uint64")
_TORCH = (*_NUMPY, "bfloat16")

NAMES = {np.dtype(name): f"{np.dtype(name).kind}{np.dtype(name).itemsize * 8}" for name in _NUMPY}
NAMES[np.dtype("uint16")] = "bf16"
"""What the bits' numpy dtype stands for; not by its name, which numpy makes anew in microseconds each time."""

DTYPES = {short: getattr(_core.DType, short) for short in NAMES.values()}
# Of a dense vector's elements, at first: memory costs nothing before it is touched.
_ROOM_SHARE, _ROOM_LEAST = 4, 1 << 16

_PARTS = "make streams of .real and .imag, one of each"
_REMEDY = "another float or an integer of 32 or 64 bits"


def is_torch_tensor(x: object) -> bool:
    """True for a torch tensor; does not import torch (what is a tensor came from an imported torch)."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def check_not_masked(x: object, argument: str) -> None:
    """Raises ``TypeError`` for numpy's masked arrays: what is behind a mask would be taken for values."""
    masked = sys.modules.get("numpy.ma")  # whoever has such an array has imported it
    if masked is not None and isinstance(x, masked.MaskedArray):
        raise TypeError(
            f"{argument} is a masked array, and its mask would not be looked at: give an array without one, as of "
            ".filled(0)"
        )


def bits_of(values: Any, argument: str) -> Bits:
    """A one-dimensional numpy array or torch tensor, without a copy; of a lazy negative view a copy of what it shows.

    Raises ``TypeError`` or ``ValueError``, which name ``argument``, with the remedy.
    """
    if is_torch_tensor(values):
        return _bits_of_tensor(values, argument)
    if not isinstance(values, np.ndarray):
        raise TypeError(f"{argument} is a {type(values).__name__}: it must be a numpy array or a torch tensor")
    check_not_masked(values, argument)
    if values.dtype.name not in _NUMPY or not values.dtype.isnative:
        others = f"use .astype(numpy.float32), {_REMEDY}; bfloat16 is torch's"
        raise TypeError(f"{argument} has dtype {values.dtype}: {_PARTS if values.dtype.kind == 'c' else others}")
    if values.ndim != 1:
        raise ValueError(f"{argument} has {values.ndim} dimensions: it must have one; use .reshape(-1)")
    if not values.flags.c_contiguous:
        raise ValueError(f"{argument} is not contiguous (strides {values.strides}): use numpy.ascontiguousarray()")
    return values


def wrapped(bits: Bits, of_torch: bool) -> Any:
    """The values that ``bits`` hold, in the caller's library and without a copy."""
    if not of_torch:
        return bits
    torch = sys.modules["torch"]
    if bits.dtype == np.uint16:
        return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(bits)


def as_bits(value: float, dtype: np.dtype[Any]) -> Any:
    """A number that bfloat16 holds exactly, as an element of ``dtype``; of integers the largest and the least one stand
    for infinity and -infinity."""
    if dtype != np.uint16:
        ends = {math.inf: "max", -math.inf: "min"}
        is_end = dtype.kind in "iu" and value in ends
        return dtype.type(getattr(np.iinfo(dtype), ends[value]) if is_end else value)
    return np.uint16(np.float32(value).view(np.uint32) >> np.uint32(16))


def entries_of_dense(bits: Bits, absent: float, most: int) -> tuple[npt.NDArray[np.uint32], Bits] | None:
    """Where ``bits`` are not ``absent`` (0 stands for both zeros), and what stands there; ``None`` where these are more
    than ``most`` entries. One pass, or two where more than a quarter are entries."""
    none = int(as_bits(absent, bits.dtype).view(f"u{bits.itemsize}"))
    dtype, room = DTYPES[NAMES[bits.dtype]], max(bits.size // _ROOM_SHARE, min(bits.size, _ROOM_LEAST))
    while True:
        indices, values = np.empty(room, np.uint32), np.empty(room, bits.dtype)
        count = _core.compact(bits.ctypes.data, bits.size, dtype, none, indices.ctypes.data, values.ctypes.data, room)
        if count <= min(room, most):
            # Gives back what was not written; nobody else has seen the arrays.
            indices.resize(count, refcheck=False)
            values.resize(count, refcheck=False)
            return indices, values
        if count > most:
            return None
        room = count


def _bits_of_tensor(values: Any, argument: str) -> Bits:
    torch = sys.modules["torch"]
    if values.device.type != "cpu" or values.layout != torch.strided:
        raise TypeError(f"{argument} is a {values.layout} tensor on {values.device}: it must be dense on the CPU")
    if str(values.dtype).removeprefix("torch.") not in _TORCH:
        remedy = _PARTS if values.is_complex() else f"use .to(torch.float32), {_REMEDY}"
        raise TypeError(f"{argument} has dtype {values.dtype}: {remedy}")
    if values.dim() != 1:
        raise ValueError(f"{argument} has {values.dim()} dimensions: it must have one; use .reshape(-1)")
    if not values.is_contiguous():
        raise ValueError(f"{argument} is not contiguous (stride {values.stride()}): use .contiguous()")
    plain = values.detach().resolve_neg()  # memory holds the values as they were before the sign changed
    if plain.dtype == torch.bfloat16:
        bits: Bits = plain.view(torch.int16).numpy().view(np.uint16)
        return bits
    floats: Bits = plain.numpy()
    return floats


# One row of a scipy CSR matrix as indices and values, and back. scipy is imported only to make a row.

ROW_DTYPES = ("float32", "float64", "int32", "int64", "uint32", "uint64")
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


# torch.sparse_coo tensors as positions and values, and back.
# A tensor's entries become positions in its memory order; a hybrid tensor (sparse rows of dense values, such as the
# gradient of an embedding) becomes one entry for each value.


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
