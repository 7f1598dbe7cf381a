"""The core's scan."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from telegrad import _core

_SCANNED = (np.dtype(np.float32), np.dtype(np.uint16))


def count_nonfinite(bits: npt.NDArray[Any]) -> int:
    """How many entries are NaN or infinite. ``bits``: contiguous float32, uint16 that holds bfloat16, or of another
    float dtype, which numpy looks at."""
    if bits.dtype not in _SCANNED:
        return int(np.count_nonzero(~np.isfinite(bits)))
    dtype = _core.DType.bf16 if bits.dtype == np.uint16 else _core.DType.f32
    return _core.count_nonfinite(bits.__array_interface__["data"][0], bits.size, dtype)
