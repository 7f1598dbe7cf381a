"""16-bit floats as their bits, rounded as the core rounds them: to nearest even, every NaN the one quiet NaN.

By integer arithmetic, as GPUs' conversions differ in what they make of a NaN. KIND: 0 is float32, 1 bfloat16, 2
float16; bits of the latter two are int16.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def bits_of(x: torch.Tensor) -> torch.Tensor:
    """What kernels take: float32 as it is, 16-bit floats as int16."""
    return x if x.dtype == torch.float32 else x.view(torch.int16)


@triton.jit
def canonical(x):
    """float32 ``x``; every NaN the one quiet NaN, which is not the one that GPUs compute."""
    quiet = tl.full(x.shape, 0x7FC00000, tl.int32).to(tl.float32, bitcast=True)
    return tl.where((x.to(tl.int32, bitcast=True) & 0x7FFFFFFF) > 0x7F800000, quiet, x)


@triton.jit
def rounded(x, KIND: tl.constexpr):
    """float32 ``x`` as KIND has it in memory."""
    word = x.to(tl.int32, bitcast=True)
    magnitude = word & 0x7FFFFFFF
    if KIND == 0:
        stored = canonical(x)
    elif KIND == 1:
        kept = magnitude + 0x7FFF + ((magnitude >> 16) & 1)
        upper = tl.where(magnitude > 0x7F800000, 0x7FC0, (kept >> 16) | ((word >> 16) & 0x8000))
        stored = upper.to(tl.int16)
    else:
        # The unit in the last place of 0.5 is the smallest subnormal number: the addition rounds to a multiple of it.
        below = tl.where(magnitude < 0x38800000, magnitude, 0).to(tl.float32, bitcast=True)
        subnormal = (below + 0.5).to(tl.int32, bitcast=True) - 0x3F000000
        normal = (magnitude - ((127 - 15) << 23) + 0xFFF + ((magnitude >> 13) & 1)) >> 13
        finite = tl.where(magnitude < 0x38800000, subnormal, normal)
        limited = tl.where(magnitude < 0x47800000, finite, 0x7C00)
        half = tl.where(magnitude > 0x7F800000, 0x7E00, limited | ((word >> 16) & 0x8000))
        stored = half.to(tl.int16)
    return stored


@triton.jit
def widened(stored, KIND: tl.constexpr):
    """The other way, exactly; a NaN keeps its bits, or becomes another NaN."""
    if KIND == 0:
        wide = stored
    elif KIND == 1:
        wide = (stored.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        half = stored.to(tl.int32)
        magnitude = half & 0x7FFF
        subnormal = (magnitude.to(tl.float32) * 5.9604644775390625e-08).to(tl.int32, bitcast=True)
        exponent = tl.where(magnitude < 0x7C00, 127 - 15, 255 - 31)
        finite = tl.where(magnitude < 0x0400, subnormal, (magnitude << 13) + (exponent << 23))
        wide = (finite | ((half & 0x8000) << 16)).to(tl.float32, bitcast=True)
    return wide
