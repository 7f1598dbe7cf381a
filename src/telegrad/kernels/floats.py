"""Floats of 16 and 32 bits in numpy: bfloat16 widened, and how many are NaN or infinite."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from telegrad import _core

_SCANNED = {np.dtype(np.float32): _core.DType.f32, np.dtype(np.uint16): _core.DType.bf16}


def as_float32(bits: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """float32 as it is, or bfloat16 given as uint16 (a new array)."""
    return (bits.astype(np.uint32) << 16).view(np.float32) if bits.dtype == np.uint16 else bits


def count_nonfinite(bits: npt.NDArray[Any]) -> int:
    """How many entries are NaN or infinite. ``bits``: contiguous float32, uint16 that holds bfloat16, or of another
    float dtype, which numpy looks at."""
    dtype = _SCANNED.get(bits.dtype)
    if dtype is None:
        return int(np.count_nonzero(~np.isfinite(bits)))
    return _core.count_nonfinite(bits.__array_interface__["data"][0], bits.size, dtype)
