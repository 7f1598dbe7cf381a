"""Triton kernels that round value after value, and those of a mean. Positions are 64 bits wide."""

from __future__ import annotations

import triton
import triton.language as tl

from telegrad.kernels.triton.floats import canonical, rounded, widened


@triton.jit
def lost(value, decoded):
    """What is kept of a value that decodes to ``decoded``."""
    return tl.where((decoded.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < 0x7F800000, value - decoded, 0.0)


@triton.jit
def narrow_values(values, size, out, error, KIND: tl.constexpr, ERROR: tl.constexpr, BLOCK: tl.constexpr):
    """Reads 4 and writes 2 bytes of every value, and 4 of its error."""
    where = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = where < size
    x = tl.load(values + where, mask=inside, other=0.0)
    stored = rounded(x, KIND)
    tl.store(out + where, stored, mask=inside)
    if ERROR:
        tl.store(error + where, lost(x, widened(stored, KIND)), mask=inside)


@triton.jit
def widen_values(encoded, size, values, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """Reads 2 and writes 4 bytes of every value."""
    where = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = where < size
    stored = tl.load(encoded + where, mask=inside, other=0)
    tl.store(values + where, canonical(widened(stored, KIND)), mask=inside)


@triton.jit
def tally_values(values, size, sums, seen, BLOCK: tl.constexpr):
    """Of every block the sum, as a double, and what was seen, int32: 1: a positive value, 2: a negative one, 4: one
    that is not finite. Reads 4 bytes of every value."""
    block = tl.program_id(0)
    where = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(values + where, mask=where < size, other=0.0)
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    positive = tl.max(((magnitude > 0) & (bits > 0)).to(tl.int32))
    negative = tl.max(((magnitude > 0) & (bits < 0)).to(tl.int32))
    spoilt = tl.max((magnitude >= 0x7F800000).to(tl.int32))
    tl.store(seen + block, positive + 2 * negative + 4 * spoilt)
    finite = tl.where(magnitude < 0x7F800000, x, 0.0)
    tl.store(sums + block, tl.sum(finite.to(tl.float64)))


@triton.jit
def lose_mean(values, size, mean, error, BLOCK: tl.constexpr):
    """Reads and writes 4 bytes of every value."""
    where = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = where < size
    x = tl.load(values + where, mask=inside, other=0.0)
    tl.store(error + where, lost(x, tl.zeros_like(x) + tl.load(mean)), mask=inside)
