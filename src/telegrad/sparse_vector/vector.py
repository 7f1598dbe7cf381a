"""SparseVector: a long vector of which few entries are not absent.

Arrays are numpy's or torch's, whichever the caller brought; torch is never imported here.
"""

from __future__ import annotations

import math
import operator
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from telegrad import _core
from telegrad.sparse_vector.formats import (
    NAMES,
    Bits,
    as_bits,
    bits_of,
    check_coo,
    check_not_masked,
    coo_of_entries,
    entries_of_coo,
    entries_of_dense,
    entries_of_row,
    is_coo,
    is_torch_tensor,
    row_of_entries,
    wrapped,
)

_INDEX_BYTES = 4
_INDEX_TYPES = (np.uint32, np.int32, np.int64, np.uint64)

MAX_LENGTH = 2**32 - 1
"""Longest vector: indices are 32-bit on the wire."""


class SparseVector:
    """A vector of length ``n`` that holds only some entries: strictly increasing ``indices`` and as many ``values``.

    ``indices``: numpy uint32, int32, int64 or uint64, or torch int32 or int64, 1-D. ``values``: numpy or torch, 1-D,
    contiguous: floats of 16 to 64 bits, integers of 32 or 64 bits. Only torch has bfloat16. uint32 indices and values
    are used without a copy (except torch's lazy negative views). So do not change the indices, nor the values while a
    collective runs.

    An absent index means the neutral element of the reduction: 0 for a sum, an average or max_abs, 1 for a product,
    infinity for a minimum, -infinity for a maximum. For integers the largest and the least value of the dtype stand for
    these two, and sums and products wrap round, as in dense tensors. So a minimum over ranks is the minimum over those
    that have an entry, not over their zeros. A dense result (``is_dense``) cannot tell an entry that equals the neutral
    element from an absent index. If that element is not 0, ``to_coo()``, ``to_csr()``, ``all_gather()`` and other
    reductions take all its elements as entries.

    Raises ``TypeError`` for wrong types and masked arrays. Raises ``ValueError`` for unequal lengths, for indices that
    are unsorted, repeated or outside [0, n), and for n of 2**32 or more: split such vectors. Source: SparCML §5.1."""

    __slots__ = ("_absent", "_bits", "_dense", "_indices", "_marks", "_n", "_of_torch")

    def __init__(self, indices: Any, values: Any, n: int) -> None:
        self._n = _checked_length(n)
        self._of_torch = is_torch_tensor(values)
        self._bits = bits_of(values, "values")
        self._indices: npt.NDArray[np.uint32] | None
        self._indices, self._marks = _checked_indices(indices, self._bits, self._n)
        self._dense: Bits | None = None
        self._absent: float | None = None

    @classmethod
    def trusted(
        cls,
        indices: npt.NDArray[np.uint32] | None,
        bits: Bits,
        n: int,
        *,
        of_torch: bool = False,
        absent: float | None = None,
    ) -> SparseVector:
        """A sparse vector from arrays that telegrad itself has made, without any check.

        ``bits``: as ``values``, or uint16 for bfloat16; with ``indices=None`` it is the dense vector of
        all ``n`` elements. ``absent``: the neutral element of the reduction whose result it is, which stands in a dense
        vector for a missing entry; ``None``: it is no result, and 0 does."""
        stream = cls.__new__(cls)
        stream._of_torch = of_torch
        stream._n = n
        stream._indices = indices
        stream._marks = None
        stream._bits = bits
        stream._dense = bits if indices is None else None
        stream._absent = absent
        return stream

    def result(self, indices: npt.NDArray[np.uint32] | None, bits: Bits, absent: float | None = None) -> SparseVector:
        """``trusted()`` of this one's length, library and dtype, whose unsigned integers the core gives as signed."""
        seen = bits.view(self._bits.dtype)
        return self.trusted(indices, seen, self._n, of_torch=self._of_torch, absent=absent)

    @classmethod
    def from_dense(cls, x: Any) -> SparseVector:
        """The entries of ``x`` that are not zero, or a copy of ``x`` where they would take more memory than that.

        ``x``: contiguous, of any shape, read in memory order; dtypes as for ``values``. Raises ``TypeError`` for other
        dtypes, sparse tensors and masked arrays, and ``ValueError`` for 2**32 elements or more. Source: SparCML §5.1
        (the switch to dense).
        """
        if is_torch_tensor(x) and x.layout != sys.modules["torch"].strided:
            remedy = "use SparseVector.from_coo()" if is_coo(x) else "use .to_dense()"
            raise TypeError(f"x is a tensor of layout {x.layout}, not a dense one: {remedy}")
        check_not_masked(x, "x")
        flat = x.reshape(-1) if is_torch_tensor(x) or isinstance(x, np.ndarray) else x
        bits = bits_of(flat, "x")
        _checked_length(bits.size, "x has {} elements")
        most = bits.nbytes // (bits.itemsize + _INDEX_BYTES)
        indices, values = entries_of_dense(bits, 0.0, most) or (None, bits.copy())
        return cls.trusted(indices, values, bits.size, of_torch=is_torch_tensor(x))

    @classmethod
    def from_coo(cls, x: Any) -> SparseVector:
        """The entries of a ``torch.sparse_coo`` tensor, as positions in its memory order.

        ``x``: of any shape, also with dense dimensions (each of their elements is an entry); repeated indices are
        added up. Values as a SparseVector's, if torch can add them up. Raises ``TypeError`` for anything else, and
        ``ValueError`` for 2**32 elements or more.
        """
        check_coo(x)
        n = _checked_length(math.prod(x.shape), "x has {} elements")
        return cls(*entries_of_coo(x), n)

    @classmethod
    def from_csr(cls, row: Any) -> SparseVector:
        """The entries of a row: a scipy CSR matrix or array of shape ``(1, n)``, or an array of shape ``(n,)``.

        Values are float32, float64 or integers of 32 or 64 bits. They are shared with ``row`` if its columns are
        sorted. Raises ``TypeError`` for other formats and dtypes, ``ValueError`` for other shapes, also for 2**32
        columns or more.
        """
        columns, values, n = entries_of_row(row)
        return cls(columns, values, _checked_length(n, "row has {} columns"))

    @property
    def n(self) -> int:
        """Length of the dense vector."""
        return self._n

    @property
    def absent(self) -> float:
        """The value of an index without an entry in ``to_dense()``.

        0, or in a result the neutral element of the reduction that made it: 1 of a product, infinity of a minimum,
        -infinity of a maximum. For integers these two are the largest and the least value."""
        return self._neutral if self._bits.dtype.kind == "f" or self.dtype == "bf16" else int(self._absent_bits)

    @property
    def _neutral(self) -> float:
        return self._absent or 0.0

    @property
    def _absent_bits(self) -> Any:
        return as_bits(self._neutral, self._bits.dtype)

    @property
    def is_dense(self) -> bool:
        """True if a vector or a result is so full that it is held densely.

        ``indices`` and ``values``, of the elements that are not ``absent``, are then made when asked for.
        """
        return self._dense is not None

    @property
    def nnz(self) -> int:
        """The number of entries; for a dense vector, the number of elements that are not ``absent``."""
        return int(self.raw_indices.size)

    @property
    def density(self) -> float:
        """``nnz / n``, or 0 for an empty vector."""
        return self.nnz / self._n if self._n else 0.0

    @property
    def dtype(self) -> str:
        """``"f32"``, ``"f64"``, ``"bf16"``, ``"f16"``, ``"i32"``, ``"i64"``, ``"u32"`` or ``"u64"``."""
        return NAMES[self._bits.dtype]

    @property
    def of_torch(self) -> bool:
        """True if the values came as a torch tensor, and results are tensors too."""
        return self._of_torch

    @property
    def indices(self) -> Any:
        """Strictly increasing positions: numpy uint32, or torch int64."""
        raw = self.raw_indices
        return sys.modules["torch"].from_numpy(raw.astype(np.int64)) if self._of_torch else raw

    @property
    def values(self) -> Any:
        """The entries at ``indices``: a numpy array or a torch tensor."""
        self._make_sparse()
        return wrapped(self._bits, self._of_torch)

    @property
    def raw_indices(self) -> npt.NDArray[np.uint32]:
        """The positions as numpy uint32, whatever the values are."""
        self._make_sparse()
        assert self._indices is not None
        return self._indices

    @property
    def raw_values(self) -> Bits:
        """The entries as a numpy array, those of bfloat16 as their bits in uint16."""
        self._make_sparse()
        return self._bits

    def memory(self, absent: float) -> tuple[npt.NDArray[np.uint32] | None, Bits]:
        """Indices and bits of the values as they are held; no indices where that is densely, with ``absent`` where
        there is no entry. Else as ``entries(absent)``."""
        if self._dense is not None and self._neutral == absent:
            return None, self._dense
        return self.entries(absent)

    @property
    def marks(self) -> npt.NDArray[np.uint64] | None:
        """A bit for each of the ``n`` elements, 1 where it has an entry: element i is bit i % 64 of word i // 64.

        ``None`` of a stream that is held densely or whose entries take less memory than a dense vector.
        """
        return self._marks

    def entries(self, absent: float) -> tuple[npt.NDArray[np.uint32], Bits]:
        """Indices and bits of the values, for a caller that takes a missing index for ``absent``.

        A dense result with another neutral element returns all ``n`` elements, because it cannot tell an entry of that
        value from none."""
        if self._dense is not None and self._absent not in (None, absent):
            return np.arange(self._n, dtype=np.uint32), self._dense
        return self.raw_indices, self.raw_values

    def to_dense(self) -> Any:
        """A new vector of ``n`` elements, of the values' type and library, ``absent`` where there is no entry."""
        if self._dense is not None:
            return wrapped(self._dense.copy(), self._of_torch)
        dense = np.full(self._n, self._absent_bits, self._bits.dtype)
        dense[self.raw_indices] = self._bits
        return wrapped(dense, self._of_torch)

    def to_coo(self, shape: tuple[int, ...] | None = None, sparse_dim: int | None = None) -> Any:
        """A coalesced ``torch.sparse_coo`` tensor of ``shape``, or one-dimensional; with copies of the values.

        The first ``sparse_dim`` dimensions are sparse, or all. In the dense ones ``absent`` fills the gaps of a row
        that has an entry. A missing index is 0 to torch: if ``absent`` is not 0, a dense result (``is_dense``) has all
        its elements. Raises ``TypeError`` unless ``shape`` and ``sparse_dim`` are ints. Raises ``ValueError`` for a
        shape of another number of elements or a ``sparse_dim`` beyond it, ``ImportError`` unless torch was imported."""
        shape = (self._n,) if shape is None else _checked_shape(shape)
        if math.prod(shape) != self._n:
            raise ValueError(f"shape={shape} has not the stream's n={self._n} elements: give one that has")
        sparse_dim = len(shape) if sparse_dim is None else _checked_sparse_dim(sparse_dim)
        if not 0 <= sparse_dim <= len(shape):
            raise ValueError(f"sparse_dim={sparse_dim} must be in [0, {len(shape)}], as shape={shape} has dimensions")
        if sys.modules.get("torch") is None:
            raise ImportError("a COO tensor needs torch: import torch first")
        indices, bits = self.entries(0.0)
        return coo_of_entries(indices, wrapped(bits, True), shape, sparse_dim, self.absent)

    def to_csr(self) -> Any:
        """A ``scipy.sparse.csr_array`` of shape ``(1, n)``, with copies of indices and values; of all elements where
        ``to_coo()`` has all.

        Raises ``TypeError`` for float16 and bfloat16, which scipy has not, and ``ImportError`` without scipy.
        """
        if self.dtype == "bf16":
            raise TypeError("scipy's matrices hold no bfloat16: convert the values with .to(torch.float32)")
        return row_of_entries(*self.entries(0.0), self._n)

    def __repr__(self) -> str:
        held = "dense" if self.is_dense else f"nnz={self.nnz}"
        return f"SparseVector(n={self._n}, {held}, dtype={self.dtype})"

    def _make_sparse(self) -> None:
        if self._indices is None:
            entries = entries_of_dense(self._bits, self._neutral, self._n)
            assert entries is not None
            self._indices, self._bits = entries


def _checked_shape(shape: Any) -> tuple[int, ...]:
    try:
        sizes = tuple(operator.index(size) for size in shape)
    except TypeError:
        raise TypeError(f"shape={shape!r} must be a sequence of ints: the sizes of the dimensions") from None
    if any(size < 0 for size in sizes):
        raise ValueError(f"shape={shape} has a negative size: give the sizes of all dimensions")
    return sizes


def _checked_sparse_dim(value: Any) -> int:
    if not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise TypeError(f"sparse_dim={value!r} must be an int: how many of the first dimensions are sparse")


def _checked_length(n: Any, what: str = "n={}") -> int:
    if isinstance(n, bool) or not isinstance(n, (int, np.integer)):
        raise TypeError(f"n={n!r} must be an int: the length of the dense vector")
    if n < 0:
        raise ValueError(f"n={n} must not be negative: it is the length of the dense vector")
    if n > MAX_LENGTH:
        raise ValueError(
            f"{what.format(n)}, which must be in [0, {MAX_LENGTH}] (indices have 32 bits): split the vector into "
            "several streams"
        )
    return int(n)


def _checked_indices(indices: Any, bits: Bits, n: int) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint64] | None]:
    """The indices, and marks of them where they are many: marking checks them too."""
    given = _index_array(indices, bits.size)
    held = np.ascontiguousarray(given, dtype=np.uint32)
    marks = None
    if 0 < n * bits.itemsize <= bits.size * (_INDEX_BYTES + bits.itemsize):
        marks = np.empty(-(-n // 64), np.uint64)
        if not _core.mark(held.ctypes.data, held.size, n, marks.ctypes.data):
            marks = None
    if marks is None or given.dtype != np.uint32:  # of wider indices only what is left of them has been marked
        _check_order(given, n)
    return held, marks


def _index_array(indices: Any, count: int) -> npt.NDArray[Any]:
    if is_torch_tensor(indices):
        if indices.device.type != "cpu":
            raise TypeError(f"indices are on {indices.device}: move them with .cpu()")
        torch = sys.modules["torch"]
        if indices.layout != torch.strided:
            raise TypeError(f"indices is a tensor of layout {indices.layout}: it must be a dense one; use .to_dense()")
        if indices.dtype not in [getattr(torch, one.__name__, None) for one in _INDEX_TYPES]:
            raise TypeError(f"indices have dtype {indices.dtype}: use .to(torch.int64)")
        indices = indices.detach().resolve_neg().numpy()
    if not isinstance(indices, np.ndarray):
        raise TypeError(f"indices is a {type(indices).__name__}: it must be a numpy array or a torch tensor")
    check_not_masked(indices, "indices")
    if indices.dtype not in _INDEX_TYPES:
        raise TypeError(f"indices have dtype {indices.dtype}: use .astype(numpy.uint32) or an int64 tensor")
    if indices.ndim != 1:
        raise ValueError(f"indices have {indices.ndim} dimensions: they must have one; use .reshape(-1)")
    if indices.size != count:
        raise ValueError(f"indices has {indices.size} entries but values has {count}: give one value for each index")
    return indices


def _check_order(indices: npt.NDArray[Any], n: int) -> None:
    if indices.size == 0:
        return
    not_above = indices[1:] <= indices[:-1]
    if not_above.any():
        at = int(not_above.argmax()) + 1
        raise ValueError(
            f"indices[{at}]={indices[at]} does not exceed indices[{at - 1}]={indices[at - 1]}: "
            "indices must be strictly increasing; sort them with their values and add up repeated ones"
        )
    for at in (0, indices.size - 1):
        if not 0 <= int(indices[at]) < n:
            raise ValueError(f"indices[{at}]={indices[at]} is outside [0, n={n}): correct the index or give the true n")
