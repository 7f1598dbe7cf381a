"""The part of ``_core`` for kernels (``core/bindings/kernels.cpp``, ``selection.cpp``). Only the stub is in several
files.
"""

from telegrad._core import DType

def compact(dense: int, n: int, dtype: DType, absent: float, indices: int, values: int, capacity: int) -> int: ...
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
    before: int = 0,
) -> int: ...
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
def accumulate(residual: int, gradient: int, n: int) -> None: ...
def count_nonfinite(x: int, n: int, dtype: DType) -> int: ...
def scatter(adds: bool, dense: int, n: int, dtype: DType, indices: int, values: int, count: int, base: int) -> None: ...
def quantise(
    bits: int,
    bucket: int,
    stochastic: bool,
    seed: int,
    call: int,
    rank: int,
    first: int,
    values: int,
    n: int,
    out: int,
    error: int,
) -> None: ...
def dequantise(bits: int, bucket: int, stochastic: bool, encoded: int, bytes: int, values: int, n: int) -> bool: ...
def narrow(dtype: DType, values: int, n: int, out: int, error: int) -> None: ...
def widen(dtype: DType, encoded: int, n: int, values: int) -> None: ...
def mean_of_one_sign(values: int, n: int, out: int, error: int) -> bool: ...
def fill_mean(encoded: int, bytes: int, values: int, n: int) -> bool: ...
def pack_indices(indices: int, n: int, out: int, capacity: int) -> int: ...
def unpack_indices(packed: int, bytes: int, indices: int, n: int) -> bool: ...
