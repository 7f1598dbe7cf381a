"""SparseStream: a long vector of which few entries are not zero.

It must not know of communicators. Arrays are numpy's or torch's, whichever the caller brought; torch is never
imported here.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import numpy.typing as npt

MAX_LENGTH = 2**32 - 1
"""Longest vector: indices are 32-bit on the wire."""

Bits = npt.NDArray[Any]


def is_torch_tensor(x: object) -> bool:
    """True for a torch tensor; does not import torch (what is a tensor came from an imported torch)."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


class SparseStream:
    """A vector of length ``n``: strictly increasing ``indices`` (uint32) and as many ``values``.

    ``indices``: numpy uint32, int32, int64 or uint64, or torch int32 or int64, 1-D. ``values``: 1-D, contiguous,
    float32 or torch bfloat16. uint32 indices and all values are used without a copy, so leave them alone while a
    collective runs. An absent index means 0. Raises ``TypeError`` for wrong types, ``ValueError`` for unequal lengths
    and for indices that are unsorted, repeated or outside [0, n). Source: SparCML §5.1.
    """

    __slots__ = ("_bits", "_dense", "_indices", "_n", "_of_torch")

    def __init__(self, indices: Any, values: Any, n: int) -> None:
        if isinstance(n, bool) or not isinstance(n, (int, np.integer)):
            raise TypeError(f"n={n!r} must be an int: the length of the dense vector")
        if not 0 <= n <= MAX_LENGTH:
            raise ValueError(f"n={n} must be in [0, {MAX_LENGTH}]: split longer vectors into several streams")
        self._of_torch = is_torch_tensor(values)
        self._bits = _bits_of(values, "values")
        self._indices: npt.NDArray[np.uint32] | None = _checked_indices(indices, self._bits.size, int(n))
        self._dense: Bits | None = None
        self._n = int(n)

    @classmethod
    def trusted(
        cls, indices: npt.NDArray[np.uint32] | None, bits: Bits, n: int, *, of_torch: bool = False
    ) -> SparseStream:
        """A stream from what telegrad itself has made, without any check.

        ``bits``: float32, or uint16 for bfloat16; with ``indices=None`` it is the dense vector of all ``n`` entries.
        """
        stream = cls.__new__(cls)
        stream._of_torch = of_torch
        stream._n = n
        stream._indices = indices
        stream._bits = bits
        stream._dense = bits if indices is None else None
        return stream

    @classmethod
    def from_dense(cls, x: Any) -> SparseStream:
        """The entries of ``x`` that are not zero.

        ``x``: contiguous float32 or torch bfloat16 of any shape, read in memory order.
        """
        flat = x.reshape(-1) if is_torch_tensor(x) or isinstance(x, np.ndarray) else x
        bits = _bits_of(flat, "x")
        if bits.size > MAX_LENGTH:
            raise ValueError(f"x has {bits.size} elements, more than {MAX_LENGTH}: split it into several streams")
        indices = _nonzero(bits)
        return cls.trusted(indices, bits[indices], bits.size, of_torch=is_torch_tensor(x))

    @property
    def n(self) -> int:
        """Length of the dense vector."""
        return self._n

    @property
    def is_dense(self) -> bool:
        """True if a sum became so full that it is held densely.

        ``indices`` and ``values`` are then made when asked for.
        """
        return self._dense is not None

    @property
    def nnz(self) -> int:
        """How many entries are held; for a dense stream, how many are not zero."""
        return int(self.raw_indices.size)

    @property
    def density(self) -> float:
        """``nnz / n``, or 0 for an empty vector."""
        return self.nnz / self._n if self._n else 0.0

    @property
    def dtype(self) -> str:
        """``"f32"`` or ``"bf16"``."""
        return "bf16" if self._bits.dtype == np.uint16 else "f32"

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
        """The entries at ``indices``: numpy float32, or torch float32 or bfloat16."""
        self._make_sparse()
        return self._wrap(self._bits)

    @property
    def raw_indices(self) -> npt.NDArray[np.uint32]:
        """The positions as numpy uint32, whatever the values are."""
        self._make_sparse()
        assert self._indices is not None
        return self._indices

    @property
    def raw_values(self) -> Bits:
        """The entries as numpy float32, or as uint16 that holds the bits of bfloat16."""
        self._make_sparse()
        return self._bits

    def to_dense(self) -> Any:
        """A new vector of ``n`` entries, of the values' type and library."""
        if self._dense is not None:
            return self._wrap(self._dense.copy())
        dense = np.zeros(self._n, self._bits.dtype)
        dense[self.raw_indices] = self._bits
        return self._wrap(dense)

    def __repr__(self) -> str:
        held = "dense" if self.is_dense else f"nnz={self.nnz}"
        return f"SparseStream(n={self._n}, {held}, dtype={self.dtype})"

    def _make_sparse(self) -> None:
        if self._indices is None:
            self._indices = _nonzero(self._bits)
            self._bits = self._bits[self._indices]

    def _wrap(self, bits: Bits) -> Any:
        if not self._of_torch:
            return bits
        torch = sys.modules["torch"]
        return (
            torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
            if bits.dtype == np.uint16
            else torch.from_numpy(bits)
        )


def _nonzero(bits: Bits) -> npt.NDArray[np.uint32]:
    if bits.dtype == np.uint16:  # both zeros of bfloat16
        return np.flatnonzero(bits & np.uint16(0x7FFF)).astype(np.uint32)
    return np.flatnonzero(bits).astype(np.uint32)


def _bits_of(values: Any, argument: str) -> Bits:
    if is_torch_tensor(values):
        torch = sys.modules["torch"]
        if values.device.type != "cpu" or values.layout != torch.strided:
            raise TypeError(f"{argument} is a {values.layout} tensor on {values.device}: it must be dense on the CPU")
        if values.dtype not in (torch.float32, torch.bfloat16):
            raise TypeError(f"{argument} has dtype {values.dtype}: use .to(torch.float32) or .to(torch.bfloat16)")
        if values.dim() != 1:
            raise ValueError(f"{argument} has {values.dim()} dimensions: it must have one; use .reshape(-1)")
        if not values.is_contiguous():
            raise ValueError(f"{argument} is not contiguous (stride {values.stride()}): use .contiguous()")
        plain = values.detach()
        bits: Bits = plain.numpy() if plain.dtype == torch.float32 else plain.view(torch.int16).numpy().view(np.uint16)
        return bits
    if not isinstance(values, np.ndarray):
        raise TypeError(f"{argument} is a {type(values).__name__}: it must be a numpy array or a torch tensor")
    if values.dtype != np.float32:
        raise TypeError(f"{argument} has dtype {values.dtype}: use .astype(numpy.float32)")
    if values.ndim != 1:
        raise ValueError(f"{argument} has {values.ndim} dimensions: it must have one; use .reshape(-1)")
    if not values.flags.c_contiguous:
        raise ValueError(f"{argument} is not contiguous (strides {values.strides}): use numpy.ascontiguousarray()")
    return values


def _checked_indices(indices: Any, count: int, n: int) -> npt.NDArray[np.uint32]:
    if is_torch_tensor(indices):
        if indices.device.type != "cpu":
            raise TypeError(f"indices are on {indices.device}: move them with .cpu()")
        indices = indices.detach().numpy()
    if not isinstance(indices, np.ndarray):
        raise TypeError(f"indices is a {type(indices).__name__}: it must be a numpy array or a torch tensor")
    if indices.dtype not in (np.uint32, np.int32, np.int64, np.uint64):
        raise TypeError(f"indices have dtype {indices.dtype}: use .astype(numpy.uint32) or an int64 tensor")
    if indices.ndim != 1:
        raise ValueError(f"indices have {indices.ndim} dimensions: they must have one; use .reshape(-1)")
    if indices.size != count:
        raise ValueError(f"indices has {indices.size} entries but values has {count}: give one value for each index")
    if indices.size == 0:
        return np.empty(0, np.uint32)
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
    return np.ascontiguousarray(indices, dtype=np.uint32)
