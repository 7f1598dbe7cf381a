"""Triton kernels of QSGD and int8: a program has ROWS whole buckets of BUCKET values. Positions are 64 bits wide.

A bucket is in groups of 64 values. Word w of the Philox counter of lane l belongs to value 16 w + l of its group: so a
program goes over a quarter of its values at a time, sixteen neighbours of each group, and draws each counter once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from telegrad.kernels.triton.floats import canonical

_NAN: tl.constexpr = tl.constexpr(0x7FC00000)
_INFINITY: tl.constexpr = tl.constexpr(0x7F800000)
_QUARTERS: tl.constexpr = tl.constexpr(4)


@triton.jit
def draw_words(index, seed_low, seed_high, rank, call):
    """The four words of the counters of these indices, each in a group's first sixteen."""
    counter = index // 64 * 16 + index % 64
    low = (counter & 0xFFFFFFFF).to(tl.uint32)
    high = (counter >> 32).to(tl.uint32)
    none = tl.zeros_like(low)
    key_low = none + seed_low.to(tl.uint32)
    key_high = none + seed_high.to(tl.uint32)
    return tl.random.philox_impl(low, high, none + rank.to(tl.uint32), none + call.to(tl.uint32), key_low, key_high)


@triton.jit
def level_of(code, scale, UNIT: tl.constexpr):
    """What a code decodes to."""
    return scale * (code.to(tl.float32) * UNIT)


@triton.jit(do_not_specialize=["size", "first", "seed_low", "seed_high", "rank", "call"])
def quantise_buckets(
    values,
    size,
    out,
    error,
    first,
    seed_low,
    seed_high,
    rank,
    call,
    BITS: tl.constexpr,
    UNIT: tl.constexpr,  # 1 / levels
    STOCHASTIC: tl.constexpr,
    ERROR: tl.constexpr,
    BUCKET: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Scales, codes and what they lose.

    Reads 4 bytes of every value twice, the second time from a cache, and writes its code; and its error.
    """
    quarter: tl.constexpr = BUCKET // _QUARTERS
    per_byte: tl.constexpr = 8 // BITS
    levels: tl.constexpr = (1 << (BITS - 1)) - 1
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, quarter)
    start = column // 16 * 64 + column % 16
    place = row[:, None] * BUCKET + start[None, :]
    largest = tl.zeros([ROWS], tl.int32)
    for w in tl.static_range(_QUARTERS):
        where = place + 16 * w
        x = tl.load(values + where, mask=where < size, other=0.0)
        largest = tl.maximum(largest, tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1))
    spoilt = largest >= _INFINITY
    scale_bits = tl.where(spoilt, _NAN, largest)
    # Nothing is rounded as the scale says where that is NaN.
    scale = tl.where(spoilt, 0, largest).to(tl.float32, bitcast=True)
    magnify = tl.where(scale < 8.673617379884035e-19, 1.2676506002282294e30, 1.0)  # 2^-60, 2^100
    most: tl.constexpr = levels * 16777216.0
    divisor = tl.where(scale > 0.0, scale * magnify, 1.0)
    to_fixed = tl.where(scale > 0.0, tl.div_rn(tl.full([ROWS], most, tl.float32), divisor), 0.0)

    bucket_bytes: tl.constexpr = 4 + BUCKET * BITS // 8
    to = row * bucket_bytes
    count = size - row * BUCKET  # of this bucket and those behind
    exists = count > 0
    for byte in tl.static_range(4):
        tl.store(out + to + byte, (scale_bits >> (8 * byte)).to(tl.uint8), mask=exists)
    words = draw_words(first + place, seed_low, seed_high, rank, call)
    byte_column = tl.arange(0, quarter // per_byte)
    byte_start = byte_column // (2 * BITS) * (8 * BITS) + byte_column % (2 * BITS)
    shifts = (tl.arange(0, per_byte) * BITS)[None, None, :]
    last_byte = (tl.minimum(count, BUCKET) * BITS + 7) // 8
    for w in tl.static_range(_QUARTERS):
        where = place + 16 * w
        inside = where < size
        x = tl.load(values + where, mask=inside, other=0.0)
        bits = x.to(tl.int32, bitcast=True)
        level = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True) * magnify[:, None] * to_fixed[:, None]
        level = tl.where(spoilt[:, None], 0.0, level)
        fixed = tl.where(level < most, level, most).to(tl.int32)
        fraction = (words[w] >> 8).to(tl.int32) if STOCHASTIC else 0x800000
        # Levels have 24 bits after the point: of 127, and a fraction more, 31 bits, so that this is no negative number.
        magnitude = (fixed + fraction) >> 24
        code = tl.where(bits < 0, -magnitude, magnitude)
        code = tl.where(spoilt[:, None], 0, code)
        field = code & ((1 << BITS) - 1)
        packed = tl.sum(tl.reshape(field, [ROWS, quarter // per_byte, per_byte]) << shifts, axis=2)
        byte = byte_start[None, :] + w * (2 * BITS)
        tl.store(out + (to[:, None] + 4 + byte), packed.to(tl.uint8), mask=byte < last_byte[:, None])
        if ERROR:
            lost = tl.where(spoilt[:, None], 0.0, x - level_of(code, scale[:, None], UNIT))
            tl.store(error + where, lost, mask=inside)


@triton.jit(do_not_specialize=["size"])
def dequantise_buckets(
    encoded,
    values,
    size,
    faults,
    BITS: tl.constexpr,
    UNIT: tl.constexpr,
    BUCKET: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Adds to ``faults`` (int64) how many scales, codes and spare bits no value has.

    Reads the code of every value, and writes 4 bytes.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    bucket_bytes: tl.constexpr = 4 + BUCKET * BITS // 8
    at = row * bucket_bytes
    count = size - row * BUCKET
    exists = count > 0
    scale_bits = tl.zeros([ROWS], tl.int32)
    for byte in tl.static_range(4):
        part = tl.load(encoded + at + byte, mask=exists, other=0).to(tl.int32)
        scale_bits = scale_bits | (part << (8 * byte))
    wrong_scale = ((scale_bits < 0) | (scale_bits >= _INFINITY)) & (scale_bits != _NAN)
    column = tl.arange(0, BUCKET)
    last_byte = (tl.minimum(count, BUCKET) * BITS + 7) // 8
    byte = column * BITS // 8
    there = byte[None, :] < last_byte[:, None]
    octet = tl.load(encoded + (at[:, None] + 4 + byte[None, :]), mask=there, other=0).to(tl.int32)
    field = octet >> (column * BITS % 8)[None, :] & ((1 << BITS) - 1)
    sign: tl.constexpr = 1 << (BITS - 1)
    code = (field ^ sign) - sign
    where = row[:, None] * BUCKET + column[None, :]
    inside = where < size
    wrong_code = there & ((code == -sign) | ((inside == 0) & (code != 0)))
    found = tl.sum(wrong_scale.to(tl.int64)) + tl.sum(tl.sum(wrong_code.to(tl.int64), axis=1))
    tl.atomic_add(faults, found, sem="relaxed")
    decoded = level_of(code, scale_bits.to(tl.float32, bitcast=True)[:, None], UNIT)
    tl.store(values + where, canonical(decoded), mask=inside)
