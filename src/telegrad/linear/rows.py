"""Rows of sparse data with their labels, in compressed form. This module must not know of files or training."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from telegrad import _core

MOST_FEATURES = 2**32 - 1
_BLOCK_ENTRIES = 1 << 18  # at a time, so that their squares take little memory

U64 = npt.NDArray[np.uint64]
U32 = npt.NDArray[np.uint32]
F32 = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Rows:
    """Row ``r`` has the entries ``offsets[r]`` to ``offsets[r + 1]`` of ``indices`` and ``values``.

    ``offsets``: uint64, one more than there are rows, from 0; ``indices``: uint32, rising within a row, below
    ``n_features``; ``values`` and ``labels``: float32. ``starts``: uint64, of each row the first byte of its line in
    the text that it was read from, or ``None``. ``damaged``: lines that were left out, and ``first_damaged`` what is
    wrong with some of them. ``index_base``: what that text calls its first feature, 0 or 1, or ``None`` without a text;
    ``indices`` are from 0 in any case. ``base_is_guessed``: neither an argument nor a comment said so. ``weights``:
    float32, 0 or more, of each row in the mean loss; ``None``: all 1. Raises
    ``TypeError`` for other dtypes, ``ValueError`` for arrays that do not fit together.
    """

    offsets: U64
    indices: U32
    values: F32
    labels: F32
    n_features: int
    starts: U64 | None = None
    damaged: int = 0
    first_damaged: tuple[str, ...] = field(default=())
    index_base: int | None = None
    base_is_guessed: bool = False
    weights: F32 | None = None

    def __post_init__(self) -> None:
        wanted = {"offsets": np.uint64, "indices": np.uint32, "values": np.float32, "labels": np.float32}
        if self.weights is not None:
            wanted["weights"] = np.float32
        for name, dtype in wanted.items():
            array = getattr(self, name)
            if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:
                found = f"{array.ndim}-D {array.dtype}" if isinstance(array, np.ndarray) else type(array).__name__
                raise TypeError(f"{name} is {found}: it must be a 1-D array of {np.dtype(dtype)}")
            if not array.flags.c_contiguous:
                raise ValueError(f"{name} is not contiguous: use numpy.ascontiguousarray()")
        if self.weights is not None:
            if self.weights.size != self.labels.size:
                raise ValueError(
                    f"weights has {self.weights.size} elements but labels {self.labels.size}: give as many"
                )
            if not (np.isfinite(self.weights).all() and (self.weights >= 0).all()):
                raise ValueError("weights have a negative number, NaN or Inf: give finite ones, 0 or more")
        if not 0 <= self.n_features <= MOST_FEATURES:
            raise ValueError(f"n_features={self.n_features} must be from 0 to {MOST_FEATURES}")
        if self.indices.size != self.values.size:
            raise ValueError(f"indices has {self.indices.size} elements but values {self.values.size}: give as many")
        if self.offsets.size != self.labels.size + 1:
            raise ValueError(
                f"offsets has {self.offsets.size} elements but labels {self.labels.size}: it must have one more"
            )
        if (
            self.offsets[0] != 0
            or self.offsets[-1] != self.indices.size
            or (self.offsets[1:] < self.offsets[:-1]).any()
        ):
            raise ValueError(f"offsets must rise from 0 to {self.indices.size}, the number of entries")
        falls = self.indices[1:] <= self.indices[:-1]
        starts = self.offsets[1:-1]
        falls[starts[(starts > 0) & (starts < self.indices.size)].astype(np.int64) - 1] = False  # another row begins
        if falls.any():
            row = int(np.searchsorted(self.offsets, np.argmax(falls) + 1, side="right")) - 1
            raise ValueError(f"indices do not rise in row {row}: sort them and add up equal ones, as from_csr() does")
        if self.indices.size and self.indices.max() >= self.n_features:
            raise ValueError(f"indices has {self.indices.max()}, which is not below n_features={self.n_features}")

    def __len__(self) -> int:
        return self.labels.size

    @property
    def nnz(self) -> int:
        """The number of entries."""
        return self.indices.size

    @property
    def total_weight(self) -> float:
        """The sum of the weights; without any the number of rows."""
        return float(len(self)) if self.weights is None else float(self.weights.sum(dtype=np.float64))

    def weighted(self, by_row: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """``by_row``, each times the row's weight."""
        return by_row if self.weights is None else by_row * self.weights

    def first_features(self, count: int) -> Rows:
        """All rows, without the entries of later features than the first ``count``."""
        keep = self.indices < count
        before = np.concatenate([np.zeros(1, np.uint64), np.cumsum(keep, dtype=np.uint64)])
        return replace(
            self,
            offsets=before[self.offsets.astype(np.int64)],
            indices=self.indices[keep],
            values=self.values[keep],
            n_features=count,
        )

    def part(self, first: int, last: int) -> Rows:
        """Rows ``first`` to ``last``, without the latter; entries and labels are shared."""
        begin, end = int(self.offsets[first]), int(self.offsets[last])
        return Rows(
            self.offsets[first : last + 1] - self.offsets[first],
            self.indices[begin:end],
            self.values[begin:end],
            self.labels[first:last],
            self.n_features,
            None if self.starts is None else self.starts[first:last],
            index_base=self.index_base,
            base_is_guessed=self.base_is_guessed,
            weights=None if self.weights is None else self.weights[first:last],
        )

    def view(self) -> _core.RowsView:
        """The rows in the core's form; keep this object alive as long as it is used."""
        offsets, indices, values = (array.ctypes.data for array in (self.offsets, self.indices, self.values))
        return _core.RowsView(offsets, indices, values, len(self), self.nnz)

    @classmethod
    def from_csr(cls, matrix: Any, labels: Any) -> Rows:
        """The rows of a scipy CSR matrix or array, in float32, with as many ``labels``.

        Columns out of order are sorted and repeated ones added up, in a copy. Raises ``TypeError`` for another format,
        ``ValueError`` for other numbers of labels and for NaN or Inf in float32."""
        if getattr(matrix, "format", None) != "csr" or len(matrix.shape) != 2:
            raise TypeError(f"matrix is a {type(matrix).__name__}: it must be a 2-D scipy CSR matrix; use .tocsr()")
        if not matrix.has_canonical_format:
            matrix = matrix.copy()
            matrix.sum_duplicates()
        targets = np.ascontiguousarray(labels, np.float32).reshape(-1)
        if targets.size != matrix.shape[0]:
            raise ValueError(f"labels has {targets.size} elements but matrix {matrix.shape[0]} rows: give one each")
        with np.errstate(over="ignore"):
            values = np.ascontiguousarray(matrix.data, np.float32)
        for name, array in (("matrix", values), ("labels", targets)):
            if not np.isfinite(array).all():
                raise ValueError(f"{name} has NaN, infinity or what float32 cannot hold: remove or scale these")
        if matrix.shape[1] > MOST_FEATURES:
            raise ValueError(f"matrix has {matrix.shape[1]} columns: at most {MOST_FEATURES} are possible; hash them")
        offsets = matrix.indptr.astype(np.uint64)
        return cls(offsets, matrix.indices.astype(np.uint32), values, targets, int(matrix.shape[1]))

    def to_csr(self) -> Any:
        """A ``scipy.sparse.csr_array`` of shape ``(rows, n_features)``. Raises ``ImportError`` without scipy."""
        try:
            from scipy.sparse import csr_array
        except ModuleNotFoundError as error:
            raise ImportError("a CSR matrix needs scipy: pip install scipy") from error
        wide = max(self.n_features, self.nnz) > np.iinfo(np.int32).max
        dtype = np.int64 if wide else np.int32
        parts = (self.values.copy(), self.indices.astype(dtype), self.offsets.astype(dtype))
        return csr_array(parts, shape=(len(self), self.n_features))


def check_rows(rows: Any) -> None:
    """Raises ``TypeError`` for what is no ``Rows``, as a matrix of scipy or numpy is none."""
    if not isinstance(rows, Rows):
        raise TypeError(f"rows is {type(rows).__name__}: it must be Rows; Rows.from_csr(matrix, labels) makes them")


def squared_lengths(rows: Rows) -> npt.NDArray[np.float64]:
    """Of each row the sum of its values' squares, (rows,), float64; the same bits whichever other rows there are."""
    found = np.zeros(len(rows))
    filled = np.flatnonzero(rows.offsets[1:] > rows.offsets[:-1])  # others have no entry to begin at
    starts = rows.offsets[filled].astype(np.int64)
    borders = np.searchsorted(starts, np.arange(0, rows.nnz, _BLOCK_ENTRIES)).tolist()
    for first, last in itertools.pairwise(dict.fromkeys([*borders, filled.size])):
        begin, end = starts[first], starts[last] if last < filled.size else rows.nnz
        squares = rows.values[begin:end].astype(np.float64) ** 2
        found[filled[first:last]] = np.add.reduceat(squares, starts[first:last] - begin)
    return found


def joined(parts: list[Rows], n_features: int) -> Rows:
    """All rows of ``parts``, one part after the other; no rows if there are none."""
    if len(parts) == 1:
        return parts[0]
    bases = np.cumsum([0, *(part.nnz for part in parts)], dtype=np.uint64)
    offsets = [part.offsets[1:] + base for part, base in zip(parts, bases[:-1], strict=True)]
    starts = [part.starts for part in parts if part.starts is not None]
    index_bases = {part.index_base for part in parts}
    return Rows(
        np.concatenate([np.zeros(1, np.uint64), *offsets]),
        np.concatenate([np.empty(0, np.uint32), *(part.indices for part in parts)]),
        np.concatenate([np.empty(0, np.float32), *(part.values for part in parts)]),
        np.concatenate([np.empty(0, np.float32), *(part.labels for part in parts)]),
        n_features,
        np.concatenate([np.empty(0, np.uint64), *starts]) if len(starts) == len(parts) else None,
        sum(part.damaged for part in parts),
        tuple(text for part in parts for text in part.first_damaged)[:8],
        index_bases.pop() if len(index_bases) == 1 else None,
        any(part.base_is_guessed for part in parts),
        _joined_weights(parts),
    )


def _joined_weights(parts: list[Rows]) -> F32 | None:
    if all(part.weights is None for part in parts):
        return None
    return np.concatenate([np.ones(len(part), np.float32) if part.weights is None else part.weights for part in parts])
