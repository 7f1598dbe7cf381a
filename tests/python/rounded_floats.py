"""float32 rounded to 16 bits and widened again, in numpy: what the references of GPU kernels compute with."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Bits = npt.NDArray[Any]


def canonical(x: Floats) -> Floats:
    """Every NaN the one quiet NaN."""
    return np.where(np.isnan(x), np.uint32(0x7FC00000).view(np.float32), x).astype(np.float32)


def narrowed(x: Floats, dtype: np.dtype[Any]) -> Bits:
    """float32 ``x`` as float32, float16 or (uint16) bfloat16, to nearest even."""
    with np.errstate(all="ignore"):
        if dtype == np.float32:
            return canonical(x)
        if dtype == np.float16:
            return np.where(np.isnan(x), np.uint16(0x7E00).view(np.float16), x.astype(np.float16)).astype(np.float16)
        word = x.view(np.uint32).astype(np.uint64)
        upper = (word + 0x7FFF + (word >> 16 & 1)) >> 16
        return np.where(np.isnan(x), 0x7FC0, upper).astype(np.uint16)


def widened(x: Bits) -> Floats:
    """The other way, exactly."""
    wide = (x.astype(np.uint32) << 16).view(np.float32) if x.dtype == np.uint16 else x.astype(np.float32)
    return canonical(wide)
