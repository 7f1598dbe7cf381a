"""The part of ``_core`` for kernels (``core/bindings/kernels.cpp``, ``selection.cpp``). Only the stub is in several
files.
"""

from typing import Any

import numpy.typing as npt

from telegrad._core import DType

def compact(dense: int, n: int, dtype: DType, absent_bits: int, indices: int, values: int, capacity: int) -> int: ...
def low_rank_product(left: int, rows: int, right: int, columns: int, rank: int, out: int) -> None: ...
def add_and_multiply(
    before: int, added: int, lines: int, rows: int, columns: int, rank: int, sum: int, out: int
) -> float: ...
def multiply_transposed(left: int, matrix: int, rows: int, columns: int, rank: int, out: int) -> None: ...
def subtract_product(left: int, right: int, rows: int, columns: int, rank: int, matrix: int) -> float: ...
def orthonormal_basis(columns: int, count: int, rows: int, basis: int) -> None: ...
def squared_lengths(matrix: int, rows: int, columns: int, squares: int) -> None: ...
def mark(indices: int, count: int, n: int, marks: int) -> bool: ...
def accumulate_select(
    residual: int,
    gradient: int,
    n: int,
    threshold: float,
    sign: int,
    indices: int,
    values: int,
    capacity: int,
    index_offset: int,
) -> int: ...
def accumulate_reused(
    residual: npt.NDArray[Any],
    before: npt.NDArray[Any] | None,
    gradient: npt.NDArray[Any],
    velocity: npt.NDArray[Any] | None,
    velocity_before: npt.NDArray[Any] | None,
    factor: float,
    nesterov: bool,
    masks: bool,
    k: int,
    least: int,
    threshold: float,
    is_due: bool,
    indices: npt.NDArray[Any],
    values: npt.NDArray[Any],
    index_offset: int,
    limit: float,
) -> tuple[bool, bool, int, float, float, float] | None: ...
def accumulate_topk(
    residual: int, gradient: int, n: int, k: int, sign: int, indices: int, values: int, index_offset: int
) -> tuple[int, float, float]: ...
def accumulate_trimmed(
    residual: int, gradient: int, n: int, k: int, step: float, sign: int, indices: int, values: int, index_offset: int
) -> tuple[int, float, float]: ...
def accumulate_search(
    residual: int,
    gradient: int,
    n: int,
    k: int,
    tolerance: float,
    sign: int,
    indices: int,
    values: int,
    index_offset: int,
) -> tuple[int, float, float]: ...
def accumulate_buckets(
    residual: int,
    gradient: int,
    n: int,
    bucket: int,
    per_bucket: int,
    of_last: int,
    indices: int,
    values: int,
    index_offset: int,
) -> tuple[int, float, float]: ...
def accumulate_random(
    residual: int,
    gradient: int,
    n: int,
    k: int,
    seed: int,
    call: int,
    rank: int,
    stream: int,
    indices: int,
    values: int,
    index_offset: int,
) -> tuple[int, float, float]: ...
def accumulate_normal(residual: int, gradient: int, n: int) -> tuple[float, float]: ...
def best_simd_level() -> int: ...
def force_simd_level(level: int) -> None: ...
def count_nonfinite(x: int, n: int, dtype: DType) -> int: ...
