"""The core's scan."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from telegrad import _core


def count_nonfinite(bits: npt.NDArray[Any]) -> int:
    """How many entries are NaN or infinite. ``bits``: contiguous float32, or uint16 that holds bfloat16."""
    dtype = _core.DType.bf16 if bits.dtype == np.uint16 else _core.DType.f32
    return _core.count_nonfinite(bits.__array_interface__["data"][0], bits.size, dtype)
