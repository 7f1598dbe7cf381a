"""The oracle of ``cpu``: plain numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def as_float32(bits: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """float32 as it is, or bfloat16 given as uint16 (a new array)."""
    return (bits.astype(np.uint32) << 16).view(np.float32) if bits.dtype == np.uint16 else bits


def count_nonfinite(bits: npt.NDArray[Any]) -> int:
    """``bits``: float32, or uint16 that holds bfloat16."""
    return int(np.count_nonzero(~np.isfinite(as_float32(bits))))
