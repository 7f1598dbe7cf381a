"""Triton kernels of numbers of a fixed width, and how bits are put anywhere. Positions are 64 bits wide."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def put_field(words, bit, field, wanted):
    """ORs ``field``, int64 of at most 32 bits, into zeroed ``words``, int32, from ``bit`` on.

    Others may put theirs into the same word: whoever is first, the result is the same.
    """
    word = words + (bit >> 5)
    wide = field << (bit & 31)
    lower = wide & 0xFFFFFFFF
    tl.atomic_or(word, lower.to(tl.int32), mask=wanted & (lower != 0), sem="relaxed")
    upper = (wide >> 32) & 0xFFFFFFFF
    tl.atomic_or(word + 1, upper.to(tl.int32), mask=wanted & (upper != 0), sem="relaxed")


@triton.jit
def load_field(octets, bit, width, wanted):
    """``width`` bits, at most 32, from ``bit`` on, as int64; reads those bytes alone that hold some."""
    start = bit >> 3
    wide = tl.zeros_like(bit)
    for byte in tl.static_range(5):
        needed = wanted & (width > 0) & (8 * (start + byte) < bit + width)
        wide |= tl.load(octets + start + byte, mask=needed, other=0).to(tl.int64) << (8 * byte)
    return (wide >> (bit & 7)) & ((tl.zeros_like(bit) + 1 << width) - 1)


@triton.jit(do_not_specialize=["count", "bytes_"])
def pack_numbers(numbers, count, out, bytes_, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Makes BLOCK bytes. Reads 4 bytes of every number, some twice, from a cache; writes WIDTH / 8."""
    octet = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    made = tl.zeros([BLOCK], tl.int64)
    for i in tl.static_range((WIDTH + 6) // WIDTH + 1):  # so many numbers can have bits in one byte
        number = octet * 8 // WIDTH + i
        shift = number * WIDTH - octet * 8  # below 0: some of its bits lie in the byte before
        held = (number < count) & (shift < 8)
        field = tl.load(numbers + number, mask=held, other=0).to(tl.int64) & ((1 << WIDTH) - 1)
        made |= tl.where(shift < 0, field >> tl.maximum(-shift, 0), field << tl.minimum(tl.maximum(shift, 0), 8))
    tl.store(out + octet, (made & 0xFF).to(tl.uint8), mask=octet < bytes_)


@triton.jit(do_not_specialize=["count"])
def unpack_numbers(packed, count, numbers, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Reads WIDTH / 8 bytes of every number, some twice, from a cache; writes 4."""
    lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < count
    number = load_field(packed, lane * WIDTH, tl.full([BLOCK], WIDTH, tl.int64), inside)
    tl.store(numbers + lane, number.to(tl.uint32), mask=inside)
